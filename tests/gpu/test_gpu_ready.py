"""Rows of y that a product writes on another stream while combine sends them.

On an emulated GPU the product is a kernel of another thread, and what its counters do not order is
reported. Y is NaN where the product has not been.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, DispatchOptions, ReadyRows
from moe_p2p.moe.options import Partials, partials_of
from tests.gpu.test_gpu_failures import error_of
from tests.gpu.test_gpu_overlap import Stream
from tests.moe.test_late_weights import late_combine, late_dispatch
from tests.support import cases, gpu_ranks
from tests.support.cases import TOPK, Wanted
from tests.support.gpu_ranks import DEVICE, HIDDEN_DIM, MAX_TOKENS, SOON_S, World, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

ADDS = 3  # of each block of rows


def call(world: World, seed: int) -> Wanted:
    tokens = [
        cases.make_tokens(
            seed,
            rank,
            (MAX_TOKENS, 3, 0, 7)[(rank + seed) % 4],
            dtype=torch.bfloat16,
            num_experts=world.num_experts,
            hidden_dim=HIDDEN_DIM,
            topk=TOPK,
        )
        for rank in range(world.ranks)
    ]
    return cases.expect(world.topology(), tokens, max_tokens=MAX_TOKENS)


class Parameters(ctypes.Structure):
    """ProductParams of tests/emulation/product.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("y", "result", "counters")),
        *((name, ctypes.c_int32) for name in ("capacity", "row_words", "rows", "per_expert")),
        ("adds", ctypes.c_uint32),
    )


class Launch(ctypes.Structure):
    """LaunchConfig of tests/emulation/driver.cpp."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def emulated_product() -> Any:
    from tests.support import emulated_gpu

    driver = ctypes.CDLL(str(emulated_gpu.machine()))
    library = ctypes.CDLL(
        str(
            emulated_gpu.kernel_library(
                '#include "tests/emulation/product.cu"\n'
                'extern "C" void moe_p2p_emulated(const void* params) {\n'
                "  moe_p2p_product(*static_cast<const moe_p2p::abi::ProductParams*>(params));\n}\n"
            )
        )
    )

    def launch(given: Parameters, blocks: int) -> None:
        config = Launch((blocks, 1, 1), (32, 1, 1), 0, None, None, 0)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        kernel = library.moe_p2p_emulated
        assert driver.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None) == 0

    return launch


class Product:
    """Writes `result` into y, block by block from the last on, and raises counters."""

    def __init__(self, result: Tensor, rows: int | None, base: int) -> None:
        self.result, self.y = result, torch.full_like(result, float("nan"))
        self.rows = result.shape[1] if rows is None else rows
        per_expert = -(-result.shape[1] // self.rows)
        kind = {"dtype": torch.int32, "device": result.device}
        self.counters = torch.full((result.shape[0], per_expert), base, **kind)
        self.ready = ReadyRows(
            counters=self.counters,
            want=ADDS,
            rows=rows,
            base=torch.tensor([base], **kind) if base else None,
            num_sms=2,
        )

    def run(self) -> None:
        if DEVICE == "cpu":
            time.sleep(0.05)  # combine waits by then
            words = self.y.shape[2] * self.y.element_size() // 4
            pointers = (each.data_ptr() for each in (self.y, self.result, self.counters))
            given = Parameters(
                *pointers, self.y.shape[1], words, self.rows, self.counters.shape[1], ADDS
            )
            emulated_product()(given, self.counters.numel())
            return
        torch.cuda._sleep(10_000_000)
        for expert in reversed(range(self.counters.shape[0])):
            for block in reversed(range(self.counters.shape[1])):
                part = slice(block * self.rows, (block + 1) * self.rows)
                self.y[expert, part].copy_(self.result[expert, part])
                self.counters[expert, block].add_(ADDS)


class Case(NamedTuple):
    """A step: its sums by rank, the rows of a counter, where counters begin, late weights."""

    wanted: Wanted
    sums: list[Tensor]
    rows: int | None
    base: int
    late: bool


def cases_of(world: World, partials: Partials | None) -> list[Case]:
    made = []
    for i in range(4):
        wanted = call(world, i)
        sums = wanted.out
        if partials:
            sums = cases.sums_of(world.topology(), wanted, 0, combine_dtype=partials)
        rows, base = ((None, 0), (5, 7), (64, (1 << 31) - 2))[i % 3]
        made.append(Case(wanted, sums, rows, base, i % 2 == 1))
    return made


def run_case(comm: AllToAll, case: Case, stream: Stream, partials: Partials | None) -> None:
    wanted = case.wanted
    given = late_dispatch if case.late else cases.dispatch_arguments
    got = comm.dispatch(**given(comm, wanted))
    more = cases.combine_arguments(comm, wanted, partials=partials)
    result = more.pop("y").reshape(comm.num_local_experts, -1, comm.config.hidden_dim)
    if case.late:
        more["topk_weights"] = late_combine(comm, wanted, got)["topk_weights"]
    product = Product(result, case.rows, case.base)
    cases.finish(comm)
    stream.run(product.run)
    pending = comm.combine_send(product.y, got, ready=product.ready, **more)
    out = comm.combine_recv(pending)
    stream.finish()
    cases.finish(comm)
    cases.assert_combined(out.cpu(), case.sums[comm.rank])


def while_rows_are_written(
    rank: Rank, world: World, steps: list[Case], partials: Partials | None, config: dict[str, Any]
) -> None:
    with gpu_ranks.make(rank, world, **config) as comm:
        if comm._device is not None:
            kind = partials_of(partials)
            comm._device.prepare_dispatch(torch.bfloat16, DispatchOptions().number)
            comm._device.prepare_combine(torch.bfloat16, torch.bfloat16, False, kind)
            comm._device.prepare_ready(torch.bfloat16, torch.bfloat16, kind)
        gpu_ranks.meet(rank, "prepared")
        stream = Stream()
        for case in steps:
            run_case(comm, case, stream, partials)
        gpu_ranks.meet(rank, "done")


@pytest.mark.parametrize("world", worlds((1, 1), (2, 2), (2, 1), (4, 2), (3, 3)))
def test_rows_are_sent_once_their_counters_are_up(world: World) -> None:
    gpu_ranks.run(world, while_rows_are_written, cases_of(world, None), None, {})


@pytest.mark.parametrize("world", worlds((2, 2), (4, 2)))
def test_rows_with_flags_of_their_own(world: World) -> None:
    """Rows of longer steps do not flag themselves."""
    config = {"max_tokens": 300, "chunk_tokens": 300}
    gpu_ranks.run(world, while_rows_are_written, cases_of(world, "block16"), "block16", config)


def a_counter_that_stays(rank: Rank, world: World, case: Case) -> str:
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        if comm._device is not None:
            comm._device.prepare_dispatch(torch.bfloat16, DispatchOptions().number)
            comm._device.prepare_ready(torch.bfloat16, torch.bfloat16)
        gpu_ranks.meet(rank, "prepared")
        got = comm.dispatch(**cases.dispatch_arguments(comm, case.wanted))
        more = cases.combine_arguments(comm, case.wanted)
        result = more.pop("y").reshape(comm.num_local_experts, -1, comm.config.hidden_dim)
        ready = Product(result, 64, 0).ready
        cases.finish(comm)
        return error_of(comm, lambda: comm.combine_send(result, got, ready=ready, **more))


def test_a_counter_that_is_never_raised_is_named() -> None:
    world = World(1, 1)
    (text,) = gpu_ranks.run(world, a_counter_that_stays, cases_of(world, None)[0])
    assert "combine of step 0" in text
    assert "of `ready` stands at 0, less than is awaited" in text
