"""torch.compile of a layer over dispatch and combine: one graph each way, and the same results.

`aot_eager` runs all that concerns ops (tracing, functionalization, partitioning) in a second;
inductor generates code on top, which a C++ compiler takes seconds for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor

from moe_p2p import AllToAll, CombineOptions, DispatchOptions
from moe_p2p.moe import bare, direct
from moe_p2p.moe.options import QUANTIZE, rows_of, scale_format_of
from tests.support import cells
from tests.support.cases import HIDDEN_DIM, TOPK, make, make_tokens
from tests.support.ranks import Rank, run_processes

NUM_EXPERTS = 8
BACKENDS = cells.few(["aot_eager", "inductor"], keep=["aot_eager"])
ROWS_BY_RANK = DispatchOptions(layout="by_rank", zero_padding=True)
TIMED = CombineOptions(with_wait_ticks=True)
PACKED = DispatchOptions(
    quantize=True,
    scale_format="ue8m0",
    column_scales=True,
    with_ranges=True,
    with_wait_ticks=True,
    zero_padding=True,
)


class Layer(nn.Module):
    """Router, dispatch, one matrix per expert, combine."""

    def __init__(self, comm: AllToAll, options: DispatchOptions | None = None) -> None:
        super().__init__()
        self.comm = comm
        self.options = options
        generator = torch.Generator().manual_seed(3)
        self.router = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN_DIM, generator=generator))
        experts = torch.randn(NUM_EXPERTS, HIDDEN_DIM, HIDDEN_DIM, generator=generator)
        local = comm.num_local_experts
        self.experts = nn.Parameter(experts[comm.rank * local :][:local] / HIDDEN_DIM**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        weights, topk_idx = (x @ self.router.t()).softmax(-1).topk(TOPK)
        received = self.comm.dispatch(x, topk_idx, weights, options=self.options)
        y = torch.bmm(received.x, self.experts).relu()
        return x + self.comm.combine(y, received)


def gradients(layer: Layer, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result of `run` on x, and the gradients of x and of the layer's weights."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    grads = [x.grad, layer.router.grad, layer.experts.grad]
    assert all(grad is not None for grad in grads)
    return [out.detach(), *[grad.clone() for grad in grads if grad is not None]]


@pytest.fixture
def alone() -> Iterator[AllToAll]:
    torch._dynamo.reset()
    # Without vectors: else inductor compiles three programs first, to find out what this CPU has.
    no_vectors = inductor.patch({"cpp.vec_isa_ok": False})
    with no_vectors, make(Rank(0, 1, dist.HashStore()), steps_in_flight=4) as comm:
        yield comm


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_is_one_graph_forward_and_backward(alone: AllToAll, backend: str) -> None:
    layer = Layer(alone)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x = torch.randn(7, HIDDEN_DIM)
    wanted = gradients(layer, x, layer)
    # Inductor reorders the sums of the layer's own matrix products.
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for got, want in zip(gradients(layer, x, compiled), wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance)
    assert counter.frame_count == 1
    assert [node.name for node in counter.graphs[0].graph.nodes if "dispatch" in node.name]


def test_a_compiled_backward_pass_with_masks_asks_who_was_lost() -> None:
    asked: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()
        asked.extend(n.name for n in graph.graph.nodes if "check_again" in f"{n.target} {n.args}")
        return graph.forward

    torch._dynamo.reset()
    options = {"steps_in_flight": 4, "mask_lost_ranks": True}
    with make(Rank(0, 1, dist.HashStore()), **options) as comm:
        layer, x = Layer(comm), torch.randn(5, HIDDEN_DIM)
        backend = aot_autograd(fw_compiler=record, bw_compiler=record)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        wanted = gradients(layer, x, layer)
        for got, want in zip(gradients(layer, x, compiled), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(asked) == 1


def test_number_of_tokens_may_change_without_compiling_again(alone: AllToAll) -> None:
    layer = Layer(alone)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for count in (7, 5, 3, 12, 2):
        x = torch.randn(count, HIDDEN_DIM)
        wanted = gradients(layer, x, layer)
        for got, want in zip(gradients(layer, x, compiled), wanted, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_options_and_inference(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, 6)

    def step(x: Tensor, idx: Tensor, weights: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        received = alone.dispatch(
            x,
            idx,
            weights,
            num_tokens=count,
            options=DispatchOptions(
                quantize=True, layout="grouped", alignment=4, with_source=True, zero_padding=True
            ),
        )
        assert received.scales is not None
        assert received.source is not None
        scales = received.scales.repeat_interleave(128, dim=-1)[:, :HIDDEN_DIM]
        out = alone.combine(received.x.float() * scales, received)
        return out, received.counts, received.offsets

    given = (tokens.x, tokens.topk_idx, tokens.topk_weights, torch.tensor(4))
    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(*given), step(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


class LayerByRank(Layer):
    """The same, with rows by rank: the experts of a token are added up before combine."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        weights, topk_idx = (x @ self.router.t()).softmax(-1).topk(TOPK)
        received = self.comm.dispatch(x, topk_idx, weights, layout="by_rank")
        assert received.row_topk is not None
        chosen = self.experts[received.row_topk.clamp_min(0)]  # [R, K, H, H]
        y = torch.einsum("rh,rkhf->rkf", received.x, chosen).relu()
        return x + self.comm.combine((y * received.row_weights[..., None]).sum(1), received)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_by_rank_are_one_graph_whatever_the_number_of_tokens(
    alone: AllToAll, backend: str
) -> None:
    layer, padded = LayerByRank(alone), Layer(alone)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for count in (7, 3, 12):
        x = torch.randn(count, HIDDEN_DIM)
        wanted = gradients(padded, x, padded)
        for got, want in zip(gradients(layer, x, compiled), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # sums in another order
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_output_of_dispatch_and_combine_is_in_the_graph(
    alone: AllToAll, backend: str
) -> None:
    tokens = make_tokens(2, 0, 6)

    def step(x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        padded = alone.dispatch(x, idx, options=PACKED)
        assert padded.scales is not None
        assert padded.ranges is not None
        assert padded.wait_ticks is not None
        out, ticks = alone.combine(
            padded.x.float(), padded, options=TIMED, topk_weights=weights, bias=(x, x)
        )
        by_rank = alone.dispatch(x, idx, weights, options=ROWS_BY_RANK)
        assert by_rank.row_topk is not None
        sums, back = alone.combine(by_rank.x, by_rank, row_scalars=by_rank.row_weights)
        waited = (padded.wait_ticks.numel() + ticks.numel()) * torch.ones(1)
        return out, padded.scales, padded.ranges, by_rank.row_topk, sums, back, waited

    assert tokens.topk_weights is not None
    given = (tokens.x, tokens.topk_idx, tokens.topk_weights)
    with torch.no_grad():
        wanted = step(*given)
        assert wanted[1].stride() == (12, 1, 12)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for got, want in zip(compiled(*given), wanted, strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()


@pytest.mark.parametrize(
    ("layout", "backend"),
    cells.few(
        itertools.product(["padded", "by_rank"], ["aot_eager", "inductor"]),
        keep=lambda cell: cell != ("by_rank", "inductor"),
    ),
)
def test_halves_are_one_graph(
    alone: AllToAll, layout: Literal["padded", "by_rank"], backend: str
) -> None:
    tokens = make_tokens(1, 0, 6)

    def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        pending = alone.dispatch_send(x, idx, weights, layout=layout)
        shared = x.tanh()  # the time between the halves
        received = alone.dispatch_recv(pending)
        combining = alone.combine_send(received.x * 2, received)
        shared = shared @ shared.t() @ x
        return alone.combine_recv(combining) + shared

    given = (tokens.x, tokens.topk_idx, tokens.topk_weights)
    with torch.no_grad():
        wanted = step(*given)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(compiled(*given), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_into_a_given_tensor_are_in_the_graph(alone: AllToAll, backend: str) -> None:
    tokens = make_tokens(1, 0, 6)

    def step(x: Tensor, idx: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        received = alone.dispatch(x, idx, weights)
        alone.combine(received.x * 2, received, out=out)
        return out.tanh()

    given = (tokens.x, tokens.topk_idx, tokens.topk_weights)
    with torch.no_grad():
        want_out = torch.empty_like(tokens.x)
        wanted = step(*given, want_out)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        out = torch.empty_like(tokens.x)
        torch.testing.assert_close(compiled(*given, out), wanted)
        assert torch.equal(out, want_out)


class Kernels:
    """In place of a GPU's side: what a communicator asks it to compile."""

    def __init__(self) -> None:
        self.asked: set[tuple[object, ...]] = set()

    def prepare_dispatch(self, x_dtype: torch.dtype, number: int, x_bytes: int = 0) -> None:
        assert x_bytes == 0
        quantize, by_rank = bool(number & QUANTIZE), rows_of(number).per_token
        self.asked.add((x_dtype, quantize, scale_format_of(number), by_rank))

    def prepare_combine(self, y_dtype: torch.dtype, out_dtype: torch.dtype, *order: int) -> None:
        assert not any(order)
        self.asked.add((y_dtype, out_dtype))


def test_kernels_of_a_graph_are_prepared_while_it_is_traced(
    alone: AllToAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the eager calls, and of their gradients."""
    tokens, kernels = make_tokens(0, 0, 6), Kernels()
    monkeypatch.setattr(alone, "_device", kernels)
    communicator = alone._communicator
    monkeypatch.setattr(communicator, "device", kernels)
    for call in ("_DISPATCH", "_COMBINE"):  # as where a kernel is missing
        monkeypatch.setattr(bare, call, direct.none)
    monkeypatch.setattr(communicator, "_prepared", set())

    def train(x: Tensor) -> Tensor:
        received = alone.dispatch(x, tokens.topk_idx, options=ROWS_BY_RANK)
        return alone.combine(received.x, received).sum()

    def infer(x: Tensor) -> Tensor:
        options = DispatchOptions(quantize=True, scale_format="ue8m0")
        received = alone.dispatch(x, tokens.topk_idx, options=options)
        return alone.combine(received.x.half(), received, out_dtype=torch.float32)

    def halves(x: Tensor) -> Tensor:
        received = alone.dispatch_recv(alone.dispatch_send(x, tokens.topk_idx, layout="grouped"))
        return alone.combine_recv(alone.combine_send(received.x, received))

    fp32, half = torch.float32, torch.float16
    for step, asked in (
        (train, {(fp32, False, 0, True), (fp32, fp32)}),
        (infer, {(fp32, True, 2, False), (half, fp32)}),
        (halves, {(fp32, False, 0, False), (fp32, fp32)}),
    ):
        x = tokens.x.clone().requires_grad_(step is train)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for run in (step, compiled):
            run(x)
            assert kernels.asked == asked
            kernels.asked.clear()
            run(x)
            assert not kernels.asked  # each once
            communicator._prepared.clear()
        compiled(x)
        assert not kernels.asked  # nothing of it is left in the graph
        if step is train:
            compiled(x).backward()
            assert not kernels.asked


def next_step(comm: AllToAll) -> int:
    """How many steps the communicator has made."""
    tokens = make_tokens(0, 0, 1)
    received = comm.dispatch(tokens.x, tokens.topk_idx)
    comm.release(received)
    return int(received.call.handle.view(torch.int32)[2])


def test_a_call_that_nobody_reads_still_runs(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, 4)

    def step(x: Tensor, idx: Tensor) -> Tensor:
        alone.dispatch(x, idx, options=DispatchOptions(solo=True))
        alone.dispatch(x, idx, options=DispatchOptions(solo=True))  # alike, and yet a second one
        return x + 1

    before = next_step(alone)
    torch.compile(step, fullgraph=True, backend="aot_eager")(tokens.x, tokens.topk_idx)
    assert next_step(alone) == before + 3


def test_calls_keep_their_order(alone: AllToAll) -> None:
    first, second = make_tokens(0, 0, 4), make_tokens(1, 0, 4)
    order: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            text = f"{node.target} {node.args}"
            for op in ("dispatch", "combine"):
                if f"moe_p2p.{op}" in text and "getitem" not in node.name:
                    order.append(op)
        return graph.forward

    def step(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        one = alone.dispatch(x1, first.topk_idx)
        two = alone.dispatch(x2, second.topk_idx)
        # The second combine is needed first.
        return alone.combine(two.x, two), alone.combine(one.x, one)

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=record))
        compiled(first.x, second.x)
    assert order == ["dispatch", "dispatch", "combine", "combine"]


def test_errors_come_through_with_their_text(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, 4)

    def step(x: Tensor, idx: Tensor) -> Tensor:
        return alone.dispatch(x, idx, options=DispatchOptions(solo=True)).x

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    bad = tokens.topk_idx.clone()
    bad[1, 2] = 99
    with pytest.raises(RuntimeError, match=r"moe_p2p \[invalid argument\] topk_idx\[1, 2\] is 99"):
        compiled(tokens.x, bad)
    assert alone.broken == ""


def run_compiled(rank: Rank) -> list[Tensor]:
    with make(rank, ranks_per_node=1) as comm:
        layer = Layer(comm)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        results = []
        for count in (5 + rank.rank, 3, 2 + 4 * rank.rank):
            x = torch.randn(count, HIDDEN_DIM, generator=torch.Generator().manual_seed(count))
            wanted = gradients(layer, x, layer)
            for got, want in zip(gradients(layer, x, compiled), wanted, strict=True):
                torch.testing.assert_close(got, want)
            results.append(wanted[0])
        return results


@pytest.mark.more
def test_ranks_compile_alike_with_tokens_of_their_own() -> None:
    first, second = run_processes(2, run_compiled)
    assert [len(out) for out in first] == [5, 3, 2]
    assert [len(out) for out in second] == [6, 3, 6]
