"""Calls of one communicator on several streams: in the order of the calls, whatever the streams.

One rank, so that nothing else keeps two kernels apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from moe_p2p import AllToAll, AllToAllConfig, InvalidArgumentError

pytestmark = pytest.mark.gpu

HIDDEN_DIM, TOKENS, EXPERTS, TOPK = 7168, 2048, 8, 4


@contextmanager
def alone(**overrides: Any) -> Iterator[AllToAll]:
    """Few multiprocessors: two calls find room at once, and a call takes long."""
    fields: dict[str, Any] = {
        "num_experts": EXPERTS,
        "hidden_dim": HIDDEN_DIM,
        "topk": TOPK,
        "max_tokens": TOKENS,
        "chunk_tokens": TOKENS,
        "steps_in_flight": 4,
        "num_sms": 16,
        "device": "cuda",
    }
    config = AllToAllConfig(**fields | overrides)
    with AllToAll(HashStore(), config, rank=0, world_size=1) as comm:
        yield comm


class Call:
    """Weights that add up to 1, so that what comes back is x, to the rounding of three sums."""

    def __init__(self, comm: AllToAll, seed: int) -> None:
        random = torch.Generator("cuda").manual_seed(seed)
        self.comm = comm
        self.x = torch.randn(
            TOKENS, HIDDEN_DIM, device="cuda", dtype=torch.bfloat16, generator=random
        )
        order = torch.rand(TOKENS, EXPERTS, device="cuda", generator=random)
        self.topk_idx = order.topk(TOPK, dim=-1).indices
        self.weights = torch.full((TOKENS, TOPK), 1 / TOPK, device="cuda")
        self.received: Any = None
        self.out: Tensor | None = None

    def dispatch(self) -> None:
        self.received = self.comm.dispatch(self.x, self.topk_idx, self.weights, layout="grouped")

    def combine(self) -> None:
        self.out = self.comm.combine(self.received.x, self.received)

    def check(self) -> None:
        assert self.out is not None
        # Quarters of one bf16 number add up to it, but for the rounding of partial sums: 3 * 2^-9.
        torch.testing.assert_close(self.out, self.x, rtol=6e-3, atol=1e-6)


def captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def ready(comm: AllToAll) -> list[Call]:
    """Two calls; kernels are loaded."""
    calls = [Call(comm, seed) for seed in range(2)]
    for call in calls:
        call.dispatch()
        call.combine()
    torch.cuda.synchronize()
    return calls


def test_two_streams() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    with alone() as comm:
        calls = ready(comm)
        for _ in range(20):
            for part in ("dispatch", "combine"):
                for stream, call in zip(streams, calls, strict=True):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(200_000)
                        getattr(call, part)()
            torch.cuda.synchronize()
            assert comm.broken == ""
            for call in calls:
                call.check()


def test_two_communicators_that_may_take_the_whole_gpu() -> None:
    """Blocks of a call wait for its other blocks, in steps of which each needs the whole GPU."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    whole = {"num_sms": None, "chunk_tokens": 128, "steps_in_flight": 2, "timeout_s": 20.0}
    with alone(**whole) as first, alone(**whole) as second:
        calls = [ready(comm)[0] for comm in (first, second)]
        for _ in range(20):
            for part in ("dispatch", "combine"):
                for stream, call in zip(streams, calls, strict=True):
                    with torch.cuda.stream(stream):
                        getattr(call, part)()
        torch.cuda.synchronize()
        for comm, call in zip((first, second), calls, strict=True):
            assert comm.broken == ""
            call.check()


def test_a_stream_of_somebody_else_is_destroyed() -> None:
    """Its handle may be that of the next one."""
    driver = pytest.importorskip("cuda.bindings.driver")
    with alone() as comm:
        calls = ready(comm)
        for round_ in range(10):
            call = calls[round_ % 2]
            _, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
                call.dispatch()
            driver.cuStreamDestroy(handle)
            call.combine()  # on the current stream
            torch.cuda.synchronize()
            assert comm.broken == ""
            call.check()


def test_streams_within_a_graph() -> None:
    side = torch.cuda.Stream()
    with alone() as comm:
        calls = ready(comm)

        def body() -> None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            for part in ("dispatch", "combine"):
                getattr(calls[0], part)()
                with torch.cuda.stream(side):
                    getattr(calls[1], part)()
            main.wait_stream(side)

        graph = captured(body)
        for _ in range(5):
            for call in calls:
                call.x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            assert comm.broken == ""
            for call in calls:
                call.check()


def test_graphs_in_turns_with_calls_on_other_streams() -> None:
    """Where the caller puts replays in order, they may be on any stream."""
    side = torch.cuda.Stream()
    with alone() as comm:
        calls = ready(comm)
        eager = Call(comm, 7)
        graphs = [captured(lambda c=call: (c.dispatch(), c.combine())) for call in calls]
        for round_ in range(6):
            main = torch.cuda.current_stream()
            calls[round_ % 2].x.normal_()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                graphs[round_ % 2].replay()
            main.wait_stream(side)
            eager.dispatch()
            graphs[(round_ + 1) % 2].replay()
            eager.combine()
            torch.cuda.synchronize()
            assert comm.broken == ""
            for call in (*calls, eager):
                call.check()


def test_graphs_at_once_are_reported() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    with alone() as comm:
        calls = ready(comm)
        graphs = [captured(call.dispatch) for call in calls]
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert "while another call of this communicator was running" in comm.broken
        with pytest.raises(InvalidArgumentError, match="communicator"):
            calls[0].dispatch()


def test_compiled_with_graphs() -> None:
    """mode="reduce-overhead", with a call that is not compiled between replays."""
    with alone(max_tokens=256, chunk_tokens=256, num_sms=None) as comm:
        calls = [Call(comm, seed) for seed in range(2)]

        def layer(x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
            received = comm.dispatch(x, topk_idx, weights, layout="grouped")
            return comm.combine(received.x * 1.0, received)

        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for round_ in range(6):
            call = calls[round_ % 2]
            inputs = [t[:256].clone() for t in (call.x, call.topk_idx, call.weights)]
            expected = layer(*inputs)
            out = compiled(*inputs)
            assert torch.equal(out, expected)
            assert comm.broken == ""
