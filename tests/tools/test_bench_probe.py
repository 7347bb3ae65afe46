"""The probe's host side: what it hands to its kernels, with a thread where a kernel belongs."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.machine import driver as cuda_driver
from moe_p2p.machine import jit
from moe_p2p.tools import probe
from moe_p2p.tools.probe import Params, Probe

DEADLINE_S = 20.0


class Driver:
    """Takes launches; the kernel that answers the host runs as a thread."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int, Params]] = []  # entry, blocks, threads
        self.threads: list[threading.Thread] = []

    def call(self, name: str, *args: Any) -> None:
        assert name == "cuLaunchKernel"
        function, blocks, threads, arguments = args[0], args[1], args[4], args[9]
        address = ctypes.c_void_p.from_address(arguments).value
        assert address is not None
        params = Params.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(Params)))
        self.launches.append((function, blocks, threads, params))
        if function == "moe_p2p_probe_host":
            self.threads.append(threading.Thread(target=self._answer, args=(params,)))
            self.threads[-1].start()

    @staticmethod
    def _answer(params: Params) -> None:
        words = (ctypes.c_uint64 * 32).from_address(params.host)
        for i in range(params.first + 1, params.first + params.count + 1):
            while words[0] < i:
                pass
            words[16] = i

    def join(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    memory = types.SimpleNamespace(addresses=[1 << 40], close=lambda: None)
    same = types.SimpleNamespace(CUfunction=lambda f: f, CUstream=lambda s: s)
    monkeypatch.setattr(cuda_driver, "call", made.call)
    monkeypatch.setattr(cuda_driver, "module", lambda: same)
    monkeypatch.setattr(cuda_driver, "primary_context", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(jit, "load", lambda device, source, entry, macros: entry)
    monkeypatch.setattr(probe, "share_node_memory", lambda *_, **__: memory)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: made.join())
    monkeypatch.setattr(probe, "ROUND_TRIPS", 50)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def test_round_trips_to_the_host_are_measured(driver: Driver) -> None:
    links = Probe(timeout_s=DEADLINE_S).links()
    assert links.pinned_us > 0
    assert links.relayed_us > 0
    assert links.push_gbs == links.flag_us == 0  # one GPU has no peer
    lines = [
        (name, blocks, threads, p.first, p.count) for name, blocks, threads, p in driver.launches
    ]
    assert lines == [
        ("moe_p2p_probe_host", 1, 1, 0, 50),
        ("moe_p2p_probe_host", 2, 1, 50, 50),
    ]


def test_words_of_barriers_only_grow(driver: Driver) -> None:
    found = Probe(timeout_s=DEADLINE_S)
    for _ in range(3):
        found.barrier()
    assert [params.first for *_, params in driver.launches] == [0, 1, 2]
    (_, blocks, threads, params) = driver.launches[0]
    assert (blocks, threads) == (1, probe.MAX_RANKS)
    assert (params.data[0], params.rank, params.num_ranks) == (1 << 40, 0, 1)
    assert params.timeout_ns == 20_000_000_000
    assert params.result - params.host == 8 * 32


@pytest.mark.parametrize(("missed", "peer"), [(1, "the GPU of rank 0"), (65, "the host")])
def test_a_wait_that_times_out_names_the_missing_ranks(
    driver: Driver, missed: int, peer: str
) -> None:
    found = Probe(timeout_s=DEADLINE_S)
    found.check()
    found._words[33] = missed
    with pytest.raises(errors.TimeoutError, match=f"rank 0: {peer} did not come within 20.0 s"):
        found.check()
