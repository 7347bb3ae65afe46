"""Worlds of ranks on GPUs: several ranks as threads on one GPU, or one process per rank.

Threads. Each rank has a stream of its own, and few thread blocks (`num_sms`), so that the blocks of
all ranks are on the device together, and also the blocks of queued kernels, which start early and
wait in place: ranks x queued calls x num_sms stays below 132, one block for each multiprocessor of
an H200. A kernel waits for kernels that other threads launch, so nothing may block a launch. What
could block it, and why it does not:

- Work of another rank ahead in the same hardware queue: there are more queues than streams.
- Waiting for the whole device, and so for a kernel that waits for this thread: bodies wait for
  their own stream (cases.finish) and copy results when it is idle.
- Driver work that needs an idle device (allocating, loading a kernel at its first launch): the
  allocator is filled before, all kernels are loaded by construction or `prepare`, torch's kernels
  run once in `_warm_up`, and after each of these the ranks meet (`meet`). Comparing and computing
  happens on the CPU. Later allocations (a graph's capture) are made by one rank at a time, between
  two meetings.

If one of them blocks nevertheless, each wait of a kernel ends at `timeout_s`, and the test fails
with an error text.

Processes. Rank r has device r; where there are fewer devices than ranks they share them, and the
GPU gives each process a time slice in turn: correct but slow, so use few steps.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch

# Read when the driver starts. Fewer: a rank's kernel could queue behind one that waits for it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.machine import jit
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.prepared import variants_of
from moe_p2p.moe.gpu.shape_macros import shape_macros
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import SCALE_FORMATS, DispatchOptions, rows_of
from moe_p2p.moe.reference import Topology
from moe_p2p.tools import launch
from tests.support import cases
from tests.support.ranks import Rank, cpu_count, run_processes, run_threads

DEVICE = "cuda"
# Of ranks, which compile kernels, beside other workers of pytest-xdist that do so. Less than a test
# on GPUs may take (conftest.py). Emulated GPUs share few CPUs with other work: longer.
DEADLINE_S = 300.0 if "MOE_P2P_EMULATED_GPU" in os.environ else 250.0
# Seconds of a timeout_s that is meant to pass. On GPUs ranks have to meet within it, too, while
# those of other workers make their contexts.
SOON_S, LATER_S = (2.0, 6.0) if "MOE_P2P_EMULATED_GPU" in os.environ else (20.0, 20.0)
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
HIDDEN_DIM = 272  # two blocks of 128 that share a scale, and a short one
MAX_TOKENS = 12
_MIB = 1 << 20

_one_at_a_time = threading.Lock()


class World(NamedTuple):
    ranks: int
    per_node: int

    def __str__(self) -> str:
        return f"{self.ranks}ranks-{self.per_node}pernode"

    @property
    def num_experts(self) -> int:
        return 4 * self.ranks

    def topology(self, **overrides: Any) -> Topology:
        fields = {"num_experts": self.num_experts} | overrides
        return Topology(world_size=self.ranks, ranks_per_node=self.per_node, **fields)


def worlds(*shapes: tuple[int, int], devices: bool = False) -> list[Any]:
    """Parameters of a test. devices: each rank needs a device of its own."""
    params = []
    for shape in shapes:
        marks = []
        if devices:
            reason = f"needs {shape[0]} CUDA devices, here are {NUM_DEVICES}"
            marks.append(pytest.mark.skipif(shape[0] > NUM_DEVICES, reason=reason))
        params.append(pytest.param(World(*shape), id=str(World(*shape)), marks=marks))
    return params


def fields_of(world: World, **overrides: Any) -> dict[str, Any]:
    """Fields of a configuration for small calls of any payload type."""
    fields = {
        "device": DEVICE,
        "num_experts": world.num_experts,
        "ranks_per_node": world.per_node,
        "hidden_dim": HIDDEN_DIM,
        "max_tokens": MAX_TOKENS,
        "combine_dtype": torch.float32,
        "extra_bytes": 64,
        "num_sms": 8 if world.ranks <= 2 else 4,
        "nics_per_rank": 2 if world.ranks <= 4 else 1,
    }
    return fields | overrides


def make(rank: Rank, world: World, **overrides: Any) -> AllToAll:
    return cases.make(rank, **fields_of(world, **overrides))


class Payload(NamedTuple):
    """What a dispatch kernel is compiled for, in addition to the communicator's shape."""

    dtype: torch.dtype  # of x
    quantize: bool = False
    scale_format: int = 0
    by_rank: bool = False

    @classmethod
    def of(cls, wanted: cases.Wanted) -> Payload:
        options = wanted.options
        return cls(
            wanted.tokens[0].x.dtype,
            options.get("quantize", False),
            SCALE_FORMATS.index(options.get("scale_format", "float32")),
            options.get("layout") == "by_rank",
        )

    @property
    def sums(self) -> torch.dtype:
        """Type of y and of the sums in tests: the type of x; bfloat16 for fp8 rows."""
        return torch.bfloat16 if self.quantize or self.dtype.itemsize == 1 else self.dtype

    @property
    def number(self) -> int:
        """Of the options of such a dispatch."""
        layout: RowLayout = "by_rank" if self.by_rank else "padded"
        scale_format: Any = SCALE_FORMATS[self.scale_format]
        return DispatchOptions(
            layout=layout, quantize=self.quantize, scale_format=scale_format
        ).number

    def fields(self) -> dict[str, Any]:
        layout = rows_of(self.number).kernel
        return {"quantize": self.quantize, "scale_format": self.scale_format, "layout": layout}


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAYLOADS = [
    *[Payload(dtype, quantize) for dtype, quantize in itertools.product(FLOATS, (False, True))],
    Payload(torch.float8_e4m3fn),
]


def kernels_of(
    shapes: Iterable[tuple[World, dict[str, Any]]], payloads: Iterable[Payload] = PAYLOADS
) -> list[kernels.Kernel]:
    """Kernels of all these payloads, and of their sums, for (world, overrides)."""
    sums = dict.fromkeys(payload.sums for payload in payloads)
    return [
        _kernel(AllToAllConfig(**(cases.SMALL | fields_of(world, **overrides))), world, wanted)
        for world, overrides in shapes
        for wanted in (*payloads, *sums)
    ]


def compile_ahead(
    shapes: Iterable[tuple[World, dict[str, Any]]], payloads: Iterable[Payload] = PAYLOADS
) -> None:
    """Fills the cache with kernels of (world, overrides), on all CPUs."""
    if DEVICE != "cpu":
        compile_all(kernels_of(shapes, payloads))


def compile_all(made: Iterable[kernels.Kernel]) -> None:
    """Fills the cache with both variants of these.

    NVRTC compiles in threads side by side. Processes would import torch first, 3 s of CPU time each
    and more than a kernel takes. Workers of pytest-xdist take them in one order: what one compiles,
    the others wait for.
    """
    arch = jit.arch_of(0)
    variants = [variant for kernel in made for variant in variants_of(kernel)]
    both = {(k.source, *sorted(k.macros.items())): k for k in variants}.values()
    missing = [k for k in both if not jit.is_compiled(k.source, k.macros, arch)]
    with ThreadPoolExecutor(cpu_count()) as threads:
        list(threads.map(lambda k: jit.compile_only(k.source, k.macros, arch), missing))


def _kernel(config: AllToAllConfig, world: World, wanted: Payload | torch.dtype) -> kernels.Kernel:
    """wanted: payload of a dispatch, or type of a combine."""
    shape = shape_macros(config, world_size=world.ranks, ranks_per_node=world.per_node)
    if isinstance(wanted, Payload):
        return kernels.dispatch_kernel(
            shape, wanted.dtype, **wanted.fields(), num_sms=config.num_sms
        )
    return kernels.combine_kernel(shape, wanted, wanted, num_sms=config.num_sms)


def prepare(rank: Rank, comm: AllToAll, wanted: list[cases.Wanted], name: str = "prepared") -> None:
    """Loads the kernels of all calls in `wanted`, which are compiled side by side."""
    if comm._device is not None:
        payloads = dict.fromkeys(Payload.of(w) for w in wanted)
        sums = dict.fromkeys(w.out_dtype for w in wanted)
        comm._device.prepare(
            [(payload.dtype, payload.number, 0) for payload in payloads],
            [(dtype, dtype, False, 0) for dtype in sums],
        )
    meet(rank, name)


def meet(rank: Rank, name: str, timeout_s: float = DEADLINE_S) -> None:
    """Waits for all ranks. Each name is used once per world."""
    if rank.store.add(f"came to {name}", 1) == rank.world_size:
        rank.store.set(f"all at {name}", "")
    rank.store.wait([f"all at {name}"], timedelta(seconds=timeout_s))


def in_turn(rank: Rank, name: str, body: Callable[[], Any]) -> Any:
    """Runs body() on one rank after the other, while no kernel waits."""
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()
    meet(rank, f"{name}, before")
    with _one_at_a_time:
        result = body()
    meet(rank, f"{name}, after")
    return result


def run(
    world: World, body: Callable[..., Any], *arguments: Any, processes: bool = False, **options: Any
) -> list[Any]:
    """Runs body(rank, world, *arguments) on all ranks; options: of run_threads, run_processes."""
    options.setdefault("deadline_s", DEADLINE_S)
    if processes:
        return run_processes(world.ranks, _in_process, world, body, *arguments, **options)
    return run_threads(world.ranks, _in_thread, world, body, *arguments, **options)


def run_apart(world: World, body: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
    """`run` on threads of a separate process, for bodies that may break the device's context."""
    (result,) = run_processes(1, _world_of_threads, world, body, *arguments, deadline_s=deadline_s)
    return result


def _world_of_threads(_: Rank, world: World, body: Callable[..., Any], *arguments: Any) -> Any:
    return run(world, body, *arguments)


def _in_process(rank: Rank, world: World, body: Callable[..., Any], *arguments: Any) -> Any:
    if DEVICE == "cpu":
        return body(rank, world, *arguments)
    torch.cuda.set_device(launch.gpu_of(rank.rank))
    with torch.cuda.stream(torch.cuda.Stream()):
        return body(rank, world, *arguments)


def _in_thread(rank: Rank, world: World, body: Callable[..., Any], *arguments: Any) -> Any:
    if DEVICE == "cpu":
        return body(rank, world, *arguments)
    torch.cuda.set_device(0)
    with torch.cuda.stream(_stream(rank.rank)):
        if rank.world_size > 1:  # a single rank delays no other
            with _one_at_a_time:
                _warm_up()
            meet(rank, "warm")
        return body(rank, world, *arguments)


@functools.cache
def _stream(rank: int) -> torch.cuda.Stream:
    # The same in every test: the allocator keeps memory per stream.
    return torch.cuda.Stream(0)


def _warm_up() -> None:
    """Allocates what a body will use on this stream, and runs torch's kernels that bodies use."""
    small = [torch.empty(_MIB // 2, dtype=torch.uint8, device=DEVICE) for _ in range(64)]
    large = torch.empty(256 * _MIB, dtype=torch.uint8, device=DEVICE)
    del small, large
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64):
        filled = torch.full((64, 64), 2, dtype=dtype, device=DEVICE)
        (filled * 2 + filled).zero_().copy_(filled)
        filled[:, ::2].t().cpu()
    for dtype in (torch.float32, torch.bfloat16):
        torch.mm(*[torch.ones(64, 64, dtype=dtype, device=DEVICE)] * 2)
    torch.cuda.current_stream().synchronize()


def assert_device_usable() -> None:
    """Allocates, computes and copies."""
    if DEVICE == "cuda":
        assert torch.arange(1000, device=DEVICE).sum().item() == 499500
