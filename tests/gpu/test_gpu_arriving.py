"""Rows that a product on another stream takes while others are still arriving.

On an emulated GPU the product is a kernel of another thread, which copies rows as their counters
come up; what these do not order is reported. On a GPU it is our grouped product.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, DispatchOptions
from moe_p2p.moe.reference import Received
from tests.gpu.test_gpu_overlap import Stream
from tests.gpu.test_gpu_ready import Launch
from tests.support import cases, gpu_ranks
from tests.support.cases import TOPK, Wanted
from tests.support.gpu_ranks import DEVICE, HIDDEN_DIM, MAX_TOKENS, World, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

# Multiprocessors of a receiving half. On a GPU ranks share it: products of all leave some of 132.
NUM_SMS = 2 if DEVICE == "cpu" else 100
LONG = {"max_tokens": 100, "chunk_tokens": 40, "steps_in_flight": 4}  # blocks of 128 rows that fill


class Parameters(ctypes.Structure):
    """ConsumerParams of tests/emulation/consumer.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("x", "out", "counters", "counts", "late", "timeout_ns")
        ),
        *((name, ctypes.c_int32) for name in ("capacity", "row_words", "rows", "per_expert")),
        ("want", ctypes.c_uint32),
    )


@functools.cache
def emulated_consumer() -> Any:
    from tests.support import emulated_gpu

    driver = ctypes.CDLL(str(emulated_gpu.machine()))
    library = ctypes.CDLL(
        str(
            emulated_gpu.kernel_library(
                '#include "tests/emulation/consumer.cu"\n'
                'extern "C" void moe_p2p_emulated(const void* p) {\n'
                "  moe_p2p_consumer(*static_cast<const moe_p2p::abi::ConsumerParams*>(p));\n}\n"
            )
        )
    )

    kernel = library.moe_p2p_emulated
    driver.moe_p2p_set_params_bytes(kernel, ctypes.c_size_t(ctypes.sizeof(Parameters)))

    def launch(given: Parameters, blocks: int) -> None:
        config = Launch((blocks, 1, 1), (32, 1, 1), 0, None, None, 0)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        assert driver.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None) == 0

    return launch


class Consumer:
    """Begins before dispatch_recv."""

    def __init__(self, into: Dispatched, wanted: Received) -> None:
        self.wanted = wanted
        assert into.ready is not None
        self.into, self.ready = into, into.ready
        self.result: Any = torch.zeros_like(into.x.view(torch.uint8)).view(into.x.dtype)
        self.late = torch.zeros(1, dtype=torch.int32, device=into.x.device)
        hidden, experts = into.x.shape[2], into.x.shape[0]
        if DEVICE == "cuda":
            made = torch.Generator(device=DEVICE).manual_seed(3)
            shape = experts, hidden, 128
            self.weights = [
                torch.randn(shape, generator=made, dtype=torch.bfloat16, device=DEVICE)
                for _ in range(2)
            ]

    def product(self, **ready: Any) -> Tensor:
        from moe_p2p.kernels.triton.grouped_ops import grouped_swiglu

        gate, up = self.weights
        h = grouped_swiglu(self.into.x, gate, up, self.into.counts, **ready)
        assert isinstance(h, Tensor)
        return h

    def begin(self, stream: Stream) -> None:
        if DEVICE == "cuda":
            return  # a kernel of the device runs behind the launch of what it waits for
        from tests.support import emulated_gpu

        graph = emulated_gpu.Graph()  # of this thread's device
        graph.record(self.launch)
        stream.replay(graph)
        time.sleep(0.02)  # it waits by then

    def end(self, stream: Stream) -> None:
        if DEVICE == "cuda":
            stream.run(self.run)
        stream.finish()

    def run(self) -> None:
        self.result = self.product(ready=self.ready)

    def launch(self) -> None:
        into, counters = self.into, self.ready.counters
        pointers = (t.data_ptr() for t in (into.x, self.result, counters, into.counts, self.late))
        words = into.x.shape[2] * into.x.element_size() // 4
        shape = into.x.shape[1], words, self.ready.rows, counters.shape[1]
        given = Parameters(*pointers, 10**11, *shape, self.ready.want)
        emulated_consumer()(given, counters.numel())

    def check(self) -> None:
        assert not self.late.any()
        want = self.wanted
        if DEVICE == "cpu":
            rows, like = want.rows(), want.row_weights
            mine, theirs = (cases.flat_rows(x, like)[rows] for x in (self.result, want.x))
            assert torch.equal(cases.bits(mine), cases.bits(theirs))
            return
        again = self.product()
        for expert, count in enumerate(self.into.counts.tolist()):
            assert torch.equal(self.result[expert, :count], again[expert, :count])


def call(world: World, seed: int, most: int, options: dict[str, Any]) -> Wanted:
    tokens = [
        cases.make_tokens(
            seed,
            rank,
            (most, 3, 0, most - 5)[(rank + seed) % 4],
            dtype=torch.bfloat16,
            num_experts=world.num_experts,
            hidden_dim=HIDDEN_DIM,
            topk=TOPK,
        )
        for rank in range(world.ranks)
    ]
    if most > MAX_TOKENS:  # one expert gets all tokens
        for each in tokens:
            each.topk_idx[each.topk_idx == 0] = -1
            each.topk_idx[:, 0] = 0
    return cases.expect(world.topology(), tokens, max_tokens=most, **options)


def run_case(comm: AllToAll, wanted: Wanted, stream: Stream) -> None:
    pending = comm.dispatch_send(**cases.dispatch_arguments(comm, wanted))
    into = comm.make_outputs(pending, num_sms=NUM_SMS)
    consumer = Consumer(into, wanted.received[comm.rank])
    cases.finish(comm)
    consumer.begin(stream)
    received = comm.dispatch_recv(pending, into)
    consumer.end(stream)
    cases.finish(comm)
    cases.assert_received(cases.on_cpu(received), wanted.received[comm.rank])
    assert into.ready is not None
    assert (into.ready.counters.cpu() == into.ready.want).all()
    consumer.check()
    comm.combine(dispatched=received, **cases.combine_arguments(comm, wanted))
    cases.finish(comm)


def while_rows_arrive(
    rank: Rank, world: World, steps: list[Wanted], config: dict[str, Any], options: dict[str, Any]
) -> None:
    with gpu_ranks.make(rank, world, **config) as comm:
        if comm._device is not None:
            given = DispatchOptions(with_source=True, **options)
            comm._device.prepare_dispatch(torch.bfloat16, given.number)
            comm._device.prepare_arriving(torch.bfloat16, given.number)
            comm._device.prepare_combine(torch.bfloat16, torch.bfloat16)
        gpu_ranks.meet(rank, "prepared")
        stream = Stream()
        for wanted in steps:
            run_case(comm, wanted, stream)
        gpu_ranks.meet(rank, "done")


def steps_of(world: World, most: int, options: dict[str, Any]) -> list[Wanted]:
    return [call(world, seed, most, options) for seed in range(3)]


@pytest.mark.parametrize("world", worlds((1, 1), (2, 2), (2, 1), (4, 2), (3, 3)))
def test_rows_are_taken_once_their_counters_are_up(world: World) -> None:
    gpu_ranks.run(world, while_rows_arrive, steps_of(world, MAX_TOKENS, {}), {}, {})


@pytest.mark.parametrize("world", worlds((2, 2), (4, 2)))
def test_rows_of_long_steps_in_chunks(world: World) -> None:
    """Their flags are others, an expert's rows are several blocks, and each is of several steps."""
    gpu_ranks.run(world, while_rows_arrive, steps_of(world, LONG["max_tokens"], {}), LONG, {})


def test_quantized_rows() -> None:
    world, options = World(2, 2), {"quantize": True}
    gpu_ranks.run(world, while_rows_arrive, steps_of(world, MAX_TOKENS, options), {}, options)
