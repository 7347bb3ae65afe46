"""CUDA graphs that hold dispatch and combine: captured once, replayed with changing inputs.

Ranks are threads that share one GPU (gpu_ranks.py). Experts double their rows, which is exact, so
results are those of the reference bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moe_p2p import AllToAll, Dispatched, DispatchOptions, MoeP2pError
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.reference import Received, Tokens, Topology
from tests.support import gpu_ranks
from tests.support.cases import TOPK, Wanted, assert_received, expect, finish, make_tokens, on_cpu
from tests.support.gpu_ranks import DEVICE, HIDDEN_DIM, MAX_TOKENS, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = gpu_ranks.worlds((1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (6, 2))


def doubled(topology: Topology, rank: int, received: Received) -> Tensor:
    return received.x.reshape(-1, received.x.shape[-1]) * 2


def call(
    world: World,
    seed: int,
    max_tokens: int = MAX_TOKENS,
    layout: str = "grouped",
    *,
    all_count: bool = False,
) -> Wanted:
    """A call whose tensors have all rows, of which a number that changes counts."""

    def tokens(rank: int) -> Tokens:
        made = make_tokens(
            seed,
            rank,
            max_tokens,
            dtype=torch.bfloat16,
            num_experts=world.num_experts,
            hidden_dim=HIDDEN_DIM,
        )
        if all_count:
            return replace(made, num_tokens=None)
        return replace(made, num_tokens=(5 * seed + 3 * rank) % (max_tokens + 1))

    made = [tokens(rank) for rank in range(world.ranks)]
    return expect(world.topology(), made, max_tokens=max_tokens, experts=doubled, layout=layout)


@dataclass(frozen=True)
class Inputs:
    """Where a captured graph finds its inputs."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens: Tensor

    @classmethod
    def make(cls, max_tokens: int) -> Inputs:
        return cls(
            torch.zeros(max_tokens, HIDDEN_DIM, dtype=torch.bfloat16, device=DEVICE),
            torch.full((max_tokens, TOPK), -1, dtype=torch.int64, device=DEVICE),
            torch.zeros(max_tokens, TOPK, device=DEVICE),
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )

    def set(self, tokens: Tokens) -> None:
        assert tokens.topk_weights is not None
        self.x.copy_(tokens.x)
        self.topk_idx.copy_(tokens.topk_idx)
        self.topk_weights.copy_(tokens.topk_weights)
        self.num_tokens.copy_(torch.tensor([tokens.count], dtype=torch.int32))

    def arguments(self, max_tokens: int, layout: str = "grouped") -> dict[str, object]:
        return {
            "x": self.x,
            "topk_idx": self.topk_idx,
            "topk_weights": self.topk_weights,
            "num_tokens": self.num_tokens,
            "max_tokens": max_tokens,
            "options": DispatchOptions(layout=layout, with_source=True),  # type: ignore[arg-type]
        }


Result = tuple[Dispatched, Tensor]


def capture(
    rank: Rank, body: Callable[[], list[Result]]
) -> tuple[torch.cuda.CUDAGraph, list[Result]]:
    """body() once as it is, so that all it needs is loaded, then captured."""
    body()
    return record(rank, "capture", body)


def record(rank: Rank, name: str, body: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of body(), and what body() returns. Each name once per world."""
    if DEVICE == "cpu":
        from tests.support import emulated_gpu

        emulated = emulated_gpu.Graph()
        return emulated, gpu_ranks.in_turn(rank, name, lambda: emulated.record(body))
    graph = torch.cuda.CUDAGraph()

    def captured() -> Any:
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            return body()

    return graph, gpu_ranks.in_turn(rank, name, captured)


def replay(
    rank: Rank,
    comm: AllToAll,
    body: Callable[[], list[Result]],
    inputs: list[Inputs],
    steps: list[list[Wanted]],
) -> None:
    """Every replay has other tokens, and results that are those of the reference."""
    graph, results = capture(rank, body)
    for step in steps:
        for place, wanted in zip(inputs, step, strict=True):
            place.set(wanted.tokens[rank.rank])
        graph.replay()
        finish(comm)
        for (got, out), wanted in zip(results, step, strict=True):
            assert_received(on_cpu(got), wanted.received[rank.rank])
            assert torch.equal(out.cpu(), wanted.out[rank.rank])
    gpu_ranks.meet(rank, "replayed")


def pair(rank: Rank, world: World, steps: list[list[Wanted]], max_tokens: int, layout: str) -> None:
    with gpu_ranks.make(rank, world, chunk_tokens=MAX_TOKENS, max_tokens=max_tokens) as comm:
        comm_inputs = Inputs.make(max_tokens)

        def body() -> list[Result]:
            got = comm.dispatch(**comm_inputs.arguments(max_tokens, layout))
            return [(got, comm.combine(got.x * 2, got))]

        prepare_bf16(rank, comm, by_rank=layout == "by_rank")
        replay(rank, comm, body, [comm_inputs], steps)


def without_one(rank: Rank, world: World, wanted: Wanted, layout: str) -> None:
    """The last rank replays once, the others again and again: no call of theirs could raise."""
    with gpu_ranks.make(rank, world, timeout_s=gpu_ranks.SOON_S, chunk_tokens=MAX_TOKENS) as comm:
        place = Inputs.make(MAX_TOKENS)

        def body() -> list[Result]:
            got = comm.dispatch(**place.arguments(MAX_TOKENS, layout))
            return [(got, comm.combine(got.x * 2, got))]

        prepare_bf16(rank, comm, by_rank=layout == "by_rank")
        graph, ((live, out),) = capture(rank, body)
        place.set(wanted.tokens[rank.rank])
        graph.replay()
        finish(comm)
        comm.check()
        assert torch.equal(out.cpu(), wanted.out[rank.rank])
        gpu_ranks.meet(rank, "replayed together")
        if rank.rank + 1 < world.ranks:
            for _ in range(3):
                graph.replay()
                torch.cuda.current_stream().synchronize()
                got = on_cpu(live)
                assert (got.counts == -1).all()
                assert (got.offsets == 0).all()
                assert got.x.isnan().all()
                assert out.cpu().isnan().all()
            with pytest.raises(MoeP2pError, match=f"rank {world.ranks - 1}|gave up") as error:
                comm.check()
            assert str(error.value) == comm.broken
        gpu_ranks.meet(rank, "reported")


@pytest.mark.parametrize("layout", ["grouped", "by_rank"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_replays_without_a_rank_give_nothing_that_passes_for_a_result(
    world: World, layout: str
) -> None:
    gpu_ranks.run(world, without_one, call(world, 2, layout=layout), layout)


def prepare_bf16(rank: Rank, comm: AllToAll, *, by_rank: bool = False) -> None:
    if comm._device is not None:
        layout: RowLayout = "by_rank" if by_rank else "padded"
        comm._device.prepare_dispatch(torch.bfloat16, DispatchOptions(layout=layout).number)
        comm._device.prepare_combine(torch.bfloat16, torch.bfloat16)
    gpu_ranks.meet(rank, "prepared")


@pytest.mark.parametrize("layout", ["grouped", "by_rank"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_graph_follows_inputs_and_counts(world: World, layout: str) -> None:
    steps = [[call(world, seed, layout=layout)] for seed in range(20)]
    gpu_ranks.run(world, pair, steps, MAX_TOKENS, layout)


@pytest.mark.parametrize("layout", ["grouped", "by_rank"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2)))
def test_a_captured_call_of_several_chunks(world: World, layout: str) -> None:
    long = 3 * MAX_TOKENS + 1
    gpu_ranks.run(
        world, pair, [[call(world, seed, long, layout)] for seed in range(8)], long, layout
    )


def micro_batches(rank: Rank, world: World, steps: list[list[Wanted]], apart: bool) -> None:
    """apart: the compute runs on a stream of its own."""
    with gpu_ranks.make(rank, world) as comm:
        inputs = [Inputs.make(MAX_TOKENS) for _ in range(2)]
        weights = torch.eye(256, device=DEVICE)
        side = torch.cuda.Stream() if apart else torch.cuda.current_stream()
        computed: list[Tensor] = []

        def compute() -> None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                computed.append(weights @ weights)

        def body() -> list[Result]:
            computed.clear()
            sent = [comm.dispatch_send(**place.arguments(MAX_TOKENS)) for place in inputs]
            compute()
            got, combining = [], []
            for pending in sent:
                received = comm.dispatch_recv(pending)
                got.append(received)
                combining.append(comm.combine_send(received.x * 2, received))
                compute()
            outs = [comm.combine_recv(pending) for pending in combining]
            torch.cuda.current_stream().wait_stream(side)
            return list(zip(got, outs, strict=True))

        gpu_ranks.in_turn(
            rank, "product", compute
        )  # cuBLAS allocates at its first call on a stream
        torch.cuda.current_stream().wait_stream(side)
        prepare_bf16(rank, comm)
        replay(rank, comm, body, inputs, steps)
        assert all(torch.equal(product.cpu(), torch.eye(256)) for product in computed)


@pytest.mark.parametrize("apart", [False, True], ids=["same stream", "side stream"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2)))
def test_two_micro_batches_in_flight_within_a_graph(world: World, apart: bool) -> None:
    steps = [[call(world, 2 * seed + i) for i in range(2)] for seed in range(10)]
    gpu_ranks.run(world, micro_batches, steps, apart)


# --- graphs of a part of a step: what is in which graph is nothing that a kernel could see ---


def static(dispatched: Dispatched) -> Dispatched:
    """Tensors of the same sizes, for a graph that combines what others have dispatched."""
    return tree_map(
        lambda value: torch.empty_like(value) if isinstance(value, Tensor) else value, dispatched
    )


def fill(to: Dispatched, dispatched: Dispatched) -> None:
    for place, value in zip(tree_leaves(to), tree_leaves(dispatched), strict=True):
        if isinstance(value, Tensor):
            place.copy_(value)


class Layer:
    """A dispatch and its combine, or their halves; those with a star are replayed."""

    def __init__(self, rank: Rank, comm: AllToAll, name: str, parts: list[str]) -> None:
        self.comm, self.parts = comm, parts
        self.inputs = Inputs.make(MAX_TOKENS)
        self.arguments = self.inputs.arguments(MAX_TOKENS) | {"num_tokens": None}
        self.got = comm.dispatch(**self.arguments)
        self.y = self.got.x * 2
        self.out = comm.combine(self.y, self.got)
        self.copied = parts[0] == "dispatch" and "*combine" in parts
        if self.copied or "dispatch_recv" in parts:  # with tensors that are others at each call
            self.copied, self.got = True, static(self.got)
        self.pending: Any = None
        self.graphs = {
            part: record(rank, f"{name} {part}", lambda part=part: self.call(part[1:]))[0]
            for part in parts
            if part[0] == "*"
        }

    def call(self, part: str) -> None:
        if part in ("dispatch", "dispatch_recv"):
            if part == "dispatch":
                got = self.comm.dispatch(**self.arguments)
            else:
                got = self.comm.dispatch_recv(self.sent)
            if self.copied:
                fill(self.got, got)
            else:
                self.got = got
        elif part == "dispatch_send":
            self.sent = self.comm.dispatch_send(**self.arguments)
        elif part == "combine_send":
            self.pending = self.comm.combine_send(self.y, self.got)
        elif part == "combine_recv":
            self.out = self.comm.combine_recv(self.pending)
        else:
            self.out = self.comm.combine(self.y, self.got)

    def run(self, rank: Rank, wanted: Wanted) -> None:
        self.inputs.set(wanted.tokens[rank.rank])
        for part in self.parts:
            if "combine" in part:
                self.y.copy_(self.got.x * 2)
            if part in self.graphs:
                self.graphs[part].replay()
            else:
                self.call(part)
            finish(self.comm)
            if part.endswith(("combine", "combine_recv")):
                assert_received(on_cpu(self.got), wanted.received[rank.rank])
                assert torch.equal(self.out.cpu(), wanted.out[rank.rank])


PARTS = {
    "dispatch": ["*dispatch combine"],
    "dispatch, combined twice": ["*dispatch combine combine"],
    "combine": ["dispatch *combine"],
    "graphs in turns": ["*dispatch *combine", "dispatch combine", "*dispatch *combine"],
    "sending halves": ["*dispatch_send dispatch_recv *combine_send combine_recv"],
    "each half": ["*dispatch_send *dispatch_recv *combine_send *combine_recv"],
}


def in_parts(rank: Rank, world: World, layers: list[str], steps: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        prepare_bf16(rank, comm)
        made = [Layer(rank, comm, f"{i}", parts.split()) for i, parts in enumerate(layers)]
        for wanted in steps:
            for layer in made:
                layer.run(rank, wanted)
        gpu_ranks.meet(rank, "done")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_a_part_of_a_step_in_a_graph(world: World, parts: str) -> None:
    """More steps than may be open: whether a combine closes one is found out on the device."""
    steps = [call(world, seed, all_count=True) for seed in range(4)]
    gpu_ranks.run(world, in_parts, PARTS[parts], steps)


def between(step: Callable[[], object]) -> None:
    """What torch computes within a captured body."""
    if DEVICE == "cpu":
        from tests.support import emulated_gpu

        emulated_gpu.compute(step)
    else:
        step()


def pieces(rank: Rank, world: World, steps: list[tuple[Wanted, Wanted]]) -> None:
    """Two layers as vLLM captures them: what is between the experts is replayed, they are not."""
    with gpu_ranks.make(rank, world) as comm:
        prepare_bf16(rank, comm)
        inputs = [Inputs.make(MAX_TOKENS) for _ in range(2)]
        given = [place.arguments(MAX_TOKENS) | {"num_tokens": None} for place in inputs]
        y = []
        for each in given:
            received = comm.dispatch(**each)
            y.append(torch.zeros_like(received.x))
            comm.combine(y[-1], received)
        first, got = record(rank, "first", lambda: comm.dispatch(**given[0]))

        def both() -> tuple[Tensor, Dispatched]:
            out = comm.combine(y[0], got)
            between(lambda: inputs[1].x.copy_(out))
            return out, comm.dispatch(**given[1])

        middle, (out, got_next) = record(rank, "middle", both)
        last, out_next = record(rank, "last", lambda: comm.combine(y[1], got_next))
        for step in steps:
            for place, wanted in zip(inputs, step, strict=True):
                place.set(wanted.tokens[rank.rank])
            inputs[1].x.zero_()
            first.replay()
            y[0].copy_(got.x * 2)
            middle.replay()
            y[1].copy_(got_next.x * 2)
            last.replay()
            finish(comm)
            for wanted, result in zip(step, (out, out_next), strict=True):
                assert torch.equal(result.cpu(), wanted.out[rank.rank])
        gpu_ranks.meet(rank, "done")


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_graphs_of_pieces_with_experts_between(world: World) -> None:
    def both(seed: int) -> tuple[Wanted, Wanted]:
        before, after = (call(world, 2 * seed + i, all_count=True) for i in range(2))
        tokens = [
            replace(tokens, x=out) for tokens, out in zip(after.tokens, before.out, strict=True)
        ]
        return before, expect(
            world.topology(), tokens, max_tokens=MAX_TOKENS, experts=doubled, layout="grouped"
        )

    gpu_ranks.run(world, pieces, [both(seed) for seed in range(4)])
