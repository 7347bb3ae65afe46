"""Measures the links between the GPUs of this host, and lines the GPUs up (kernels/probe.cu).

Collective: all ranks of a host, one GPU each, make the same calls. Nothing here is on the data path
of the package.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.machine import driver, jit
from moe_p2p.moe.gpu.memory import share_node_memory
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.gpu_timing import timed_us

MAX_RANKS = 64
PUSH_BYTES = 64 << 20  # to each peer: more than the caches of the receiver hold
PUSHED_AT = 65536  # kernels/probe.cu, kPushed
PUSH_THREADS = 512  # kThreads
BLOCKS_OF_FEW_SMS = 24
ROUND_TRIPS = 1000
_HOST_WORDS, _RESULT_AT = 64, 32  # 64-bit words of pinned memory; the results behind the words


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a Probe measures; 0: not measured, as with one GPU."""

    push_gbs: float = 0.0  # all-to-all push out of a GPU, slowest rank, GB/s, all blocks
    push_24_gbs: float = 0.0  # the same with 24 blocks
    flag_us: float = 0.0  # round trip of a word between two GPUs
    pinned_us: float = 0.0  # round trip of a word, host to GPU and back
    relayed_us: float = 0.0  # the same through a relay block

    @property
    def arrival_us(self) -> float:
        """From the host's store of an arrival until a kernel sees it through the relay block."""
        return self.relayed_us - self.pinned_us / 2


class Params(ctypes.Structure):
    """kernels/probe.cu, Params; the kernel is compiled with its size."""

    _fields_ = (
        ("data", ctypes.c_uint64 * MAX_RANKS),
        ("host", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    )


def macros() -> dict[str, int]:
    return {"MOE_P2P_PROBE_PARAMS_BYTES": ctypes.sizeof(Params)}


class Probe:
    """The memory for measurements. The current device is this rank's.

    group: the ranks of this host; None: all ranks.
    """

    def __init__(self, *, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        errors.require(
            self.num_ranks <= MAX_RANKS, f"{self.num_ranks} ranks, at most {MAX_RANKS} on a host"
        )
        self.device, self.timeout_s = torch.cuda.current_device(), timeout_s
        key = everyones(secrets.token_hex(8), group)[0]
        self._memory = share_node_memory(
            self.rank,
            self.num_ranks,
            key=key,
            device=self.device,
            size_bytes=PUSHED_AT + PUSH_BYTES * self.num_ranks,
            deadline=time.monotonic() + timeout_s,
        )
        self._pinned = torch.zeros(_HOST_WORDS, dtype=torch.int64).pin_memory()
        self._words = (ctypes.c_uint64 * _HOST_WORDS).from_address(self._pinned.data_ptr())
        self._counts: dict[str, int] = {}
        self._kernels: dict[str, Any] = {}
        dist.barrier(self._group)  # no rank uses memory that another has not mapped

    def barrier(self) -> None:
        """Queues a meeting of all GPUs on the current stream. The host does not wait."""
        self._launch("barrier", threads=MAX_RANKS, count=1)

    def links(self) -> Links:
        """Measures the links; takes some tenths of a second."""
        found = Links(pinned_us=self._host_round_trip(1), relayed_us=self._host_round_trip(2))
        if self.num_ranks == 1:
            return found
        blocks = 2 * torch.cuda.get_device_properties(self.device).multi_processor_count
        return Links(
            push_gbs=self._push(blocks),
            push_24_gbs=self._push(BLOCKS_OF_FEW_SMS),
            flag_us=self._flag_round_trip(),
            pinned_us=found.pinned_us,
            relayed_us=found.relayed_us,
        )

    def check(self) -> None:
        """After a synchronization: raises TimeoutError when a wait on the device failed."""
        missed = int(self._words[_RESULT_AT + 1])
        if missed:
            peer = "the host" if missed > MAX_RANKS else f"the GPU of rank {missed - 1}"
            raise errors.make(
                errors.TimeoutError,
                f"rank {self.rank}: {peer} did not come within {self.timeout_s} s",
            )

    def close(self) -> None:
        """Called by all ranks: waits for the device first, and for the other ranks."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self._group)
        self._memory.close()

    def _push(self, blocks: int) -> float:
        """Returns GB/s out of the slowest rank, median of several."""
        rounds = []
        for _ in range(9):
            took_us = timed_us(
                lambda: self._launch("push", blocks=blocks, threads=PUSH_THREADS, count=0),
                self.barrier,
            )
            rounds.append(took_us)
        self.check()
        spans = torch.tensor(rounds, dtype=torch.float64)
        dist.all_reduce(spans, dist.ReduceOp.MAX, self._group)
        return PUSH_BYTES * (self.num_ranks - 1) / float(spans.median()) / 1e3

    def _flag_round_trip(self) -> float:
        trips_us = []
        for _ in range(5):
            self._words[_RESULT_AT] = 0
            self.barrier()
            self._launch("flags", threads=1, count=ROUND_TRIPS)
            torch.cuda.synchronize()
            self.check()
            trips_us.append(int(self._words[_RESULT_AT]) / ROUND_TRIPS / 1e3)
        slowest = torch.tensor([sorted(trips_us)[2]], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self._group)
        return float(slowest)

    def _host_round_trip(self, blocks: int) -> float:
        """Returns the median of single trips, in microseconds; two blocks: one of them relays."""
        words, first = self._words, self._counts.get("host", 0)
        self._launch("host", blocks=blocks, threads=1, count=ROUND_TRIPS)
        spans, end = [], time.monotonic() + self.timeout_s
        for i in range(first + 1, first + ROUND_TRIPS + 1):
            begin = time.perf_counter_ns()
            words[0] = i
            while words[16] < i:  # the second line
                if time.perf_counter_ns() - begin > 1_000_000 and time.monotonic() > end:
                    torch.cuda.synchronize()
                    self.check()
                    raise errors.make(errors.TimeoutError, f"rank {self.rank}: no word of the GPU")
            spans.append(time.perf_counter_ns() - begin)
        torch.cuda.synchronize()
        return sorted(spans)[len(spans) // 2] / 1e3

    def _launch(self, name: str, *, threads: int, count: int, blocks: int = 1) -> None:
        first = self._counts.get(name, 0)
        self._counts[name] = first + count
        params = Params(
            data=(ctypes.c_uint64 * MAX_RANKS)(*self._memory.addresses),
            host=self._pinned.data_ptr(),
            result=self._pinned.data_ptr() + 8 * _RESULT_AT,
            bytes=PUSH_BYTES,
            first=first,
            count=count,
            timeout_ns=int(self.timeout_s * 1e9),
            rank=self.rank,
            num_ranks=self.num_ranks,
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))  # copied by the launch
        cuda = driver.module()
        with driver.primary_context(self.device):
            driver.call(
                "cuLaunchKernel",
                cuda.CUfunction(self._kernel(name)),
                *(blocks, 1, 1),
                *(threads, 1, 1),
                0,
                cuda.CUstream(torch.cuda.current_stream().cuda_stream),
                ctypes.addressof(arguments),
                0,
            )

    def _kernel(self, name: str) -> int:
        return jit.load(self.device, "probe.cu", f"moe_p2p_probe_{name}", macros())
