"""Dispatch and combine through libfabric, over its tcp and shm, and what goes wrong.

These move bytes as EFA does, with other hardware below: csrc/provider/libfabric is the same code.
Contract, engine and a fake of EFA: tests/cpp/libfabric_*.cpp. Several hosts: test_hosts.py.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig, PageRows, ResourceExhaustedError
from tests.support import warm
from tests.support.cases import SMALL, check_step, lose_a_rank, lose_an_idle_rank, make, make_tokens
from tests.support.ranks import DiedError, Rank, run_processes, run_threads

ROOT = Path(__file__).resolve().parents[2]
TCP = "provider=tcp,interfaces=lo,timeout_ms=3000"
SHM = "provider=shm,timeout_ms=3000"


def opened(num_nics: int, settings: str) -> str:
    """Python of a program that imports moe_p2p."""
    config = f"transport='libfabric', nics_per_rank={num_nics}, transport_settings='{settings}'"
    return f"moe_p2p.Engine(moe_p2p.EngineConfig({config}))"


def _why_not() -> str:
    try:
        Engine(EngineConfig(transport="libfabric", nics_per_rank=1, transport_settings=TCP)).close()
    except moe_p2p.UnavailableError as error:
        return str(error)
    return ""


_REASON = _why_not()
needs_libfabric = pytest.mark.skipif(bool(_REASON), reason=_REASON or "never skipped")


def run_changing_steps(rank: Rank, num_steps: int, config: dict[str, Any]) -> list[int]:
    """Every rank's number of tokens changes at every step, none among them; then bytes per NIC."""
    counts = random.Random(1)
    with make(rank, transport="libfabric", **config) as comm:
        for seed in range(num_steps):
            most = SMALL["max_tokens"]
            tokens = [
                make_tokens(seed, r, counts.choice([0, most, counts.randint(0, most)]))
                for r in range(rank.world_size)
            ]
            check_step(comm, tokens, layout=("padded", "grouped")[seed % 2])
        assert comm.broken == ""
        return [nic["bytes_written"] for nic in comm.counters()]


def write_and_part(rank: Rank, num_turns: int) -> int:
    """Peers come and go while writes are under way both ways; how many of the writes ended."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    with Engine(
        EngineConfig(transport="libfabric", nics_per_rank=1, transport_settings=SHM)
    ) as engine:
        registered = engine.register(memory)
        rank.store.set(f"address {rank.rank}", engine.address)
        rank.store.set(f"memory {rank.rank}", registered.descriptor)
        address = rank.store.get(f"address {1 - rank.rank}")
        descriptor = rank.store.get(f"memory {1 - rank.rank}")
        num_ended = 0
        for turn in range(num_turns):
            peer = engine.connect(address)
            region = engine.resolve(descriptor, peer)
            engine.write(registered, region, nbytes=8).wait()
            requests = [
                engine.write(registered, region, nbytes=n) for n in (8, 3000, 40_000, 1 << 20)
            ]
            early = (turn + rank.rank) % 2 == 0
            if early:
                peer.disconnect()
            for request in requests:
                try:
                    request.wait()
                except moe_p2p.ClosedError:
                    assert early
                num_ended += 1
            if not early:
                peer.disconnect()
        rank.store.set(f"done {rank.rank}", "")
        rank.store.wait([f"done {1 - rank.rank}"])
    return num_ended


@needs_libfabric
def test_loading_the_library_leaves_signal_handlers_alone(tmp_path: Path) -> None:
    """libpsm2 and libinfinipath set their own, which end Python and write python*.btr files."""
    program = (
        "import faulthandler, signal, sys, moe_p2p\n"
        "faulthandler.enable()\n"
        f"{opened(1, TCP)}.close()\n"
        "try: signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
        "signal.raise_signal(signal.SIGABRT)"
    )
    done = warm.run("-c", program, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.stdout == "interrupted\n", done.stderr
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert list(tmp_path.glob("*.btr")) == []


@needs_libfabric
def test_peers_over_shm_come_and_go_while_writes_are_under_way() -> None:
    assert run_processes(2, write_and_part, 200, deadline_s=60.0) == [800, 800]


@needs_libfabric
def test_more_peers_than_shm_has_places_for_are_refused_by_name() -> None:
    config = EngineConfig(transport="libfabric", transport_settings=SHM)

    def connect(engine: Engine) -> bytes:
        with Engine(config, label="peer") as other:
            engine.connect(other.address).disconnect()
            return other.address

    with Engine(config, label="first") as engine:
        known = [connect(engine) for _ in range(256)]
        with pytest.raises(ResourceExhaustedError, match=r"takes 256 peers .* use transport loop"):
            connect(engine)
        engine.connect(known[0]).disconnect()  # one that is known has its place


@needs_libfabric
@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "settings"), [(2, 1, TCP), (4, 2, TCP), (2, 1, SHM)]
)
def test_equals_the_reference_for_fifty_steps(
    world_size: int, ranks_per_node: int, settings: str
) -> None:
    config = {
        "ranks_per_node": ranks_per_node,
        "nics_per_rank": 2,
        "transport_settings": settings,
        "timeout_s": 60.0,
    }
    written = run_processes(world_size, run_changing_steps, 50, config, deadline_s=150.0)
    assert all(nic_bytes > 0 for rank in written for nic_bytes in rank)


def run_with_own_nics(rank: Rank) -> int:
    with Engine(
        EngineConfig(
            transport="libfabric", nics_per_rank=1 + 2 * rank.rank, transport_settings=TCP
        ),
        label=f"rank {rank.rank}",
    ) as engine:
        with make(rank, ranks_per_node=1, engine=engine) as comm:
            for seed in range(10):
                check_step(comm, [make_tokens(seed, r, (seed + 5 * r) % 13) for r in range(2)])
        return engine.num_nics


@needs_libfabric
def test_ranks_with_different_numbers_of_nics() -> None:
    assert run_processes(2, run_with_own_nics) == [1, 3]


@needs_libfabric
def test_a_peer_that_cannot_be_reached() -> None:
    with Engine(
        EngineConfig(transport="libfabric", nics_per_rank=2, transport_settings=TCP)
    ) as engine:
        with Engine(
            EngineConfig(transport="libfabric", nics_per_rank=2, transport_settings=TCP)
        ) as gone:
            address = gone.address
        began = time.monotonic()
        with pytest.raises(moe_p2p.PeerDeadError):
            engine.send_imm(engine.connect(address), 1).wait(20.0)
        assert time.monotonic() - began < 10


def run_until_killed(rank: Rank) -> tuple[float, str, str]:
    comm = make(
        rank,
        transport="libfabric",
        transport_settings=TCP,
        ranks_per_node=1,
        timeout_s=4.0,
    )
    return lose_a_rank(comm, make_tokens(0, rank.rank, 6), 1)


@needs_libfabric
def test_a_peer_that_is_killed() -> None:
    results = run_processes(2, run_until_killed, return_errors=True)
    assert isinstance(results[1], DiedError)
    took, text, _ = results[0]
    assert took < 15, text
    assert "rank 1" in text, text


def run_until_one_is_gone(rank: Rank) -> tuple[float, str]:
    config = {"transport": "libfabric", "transport_settings": TCP, "timeout_s": 60.0}
    comm = make(rank, ranks_per_node=1, **config)
    tokens = [make_tokens(0, r, 6) for r in range(2)]
    check_step(comm, tokens)
    return lose_an_idle_rank(comm, 1, lambda: comm.dispatch(tokens[0].x, tokens[0].topk_idx))


@needs_libfabric
def test_a_peer_that_is_killed_while_nothing_is_under_way_to_it() -> None:
    results = run_processes(2, run_until_one_is_gone, return_errors=True)
    assert isinstance(results[1], DiedError)
    took, text = results[0]
    assert took < 30, text  # not 60
    assert text.startswith("PeerDeadError"), text
    assert "rank 1 (node 1) is gone" in text


def test_a_library_that_is_not_there() -> None:
    program = (
        "import moe_p2p\n"
        f"try: {opened(1, 'library=/nowhere/libfabric.so.1')}\n"
        "except moe_p2p.UnavailableError as error: print(error)\n"
    )
    done = warm.run("-c", program, capture_output=True, text=True, timeout=250)
    assert "libfabric cannot be opened: /nowhere/libfabric.so.1" in done.stdout, done.stderr
    assert "apt-get install libfabric1" in done.stdout


@needs_libfabric
def test_tcp_is_announced_and_never_chosen_alone() -> None:
    def body(rank: Rank) -> str:
        with make(rank, ranks_per_node=1) as comm:
            return comm.engine.provider

    assert "libfabric" not in run_threads(2, body) or Path("/sys/class/infiniband").exists()
    program = f"import moe_p2p; {opened(2, TCP)}.close()"
    done = warm.run("-c", program, capture_output=True, text=True, timeout=250)
    assert done.stderr.count("This is not RDMA") == 1, done.stderr


@needs_libfabric
def test_pages_written_over_tcp() -> None:
    with (
        Engine(
            EngineConfig(transport="libfabric", nics_per_rank=2, transport_settings=TCP)
        ) as sender,
        Engine(
            EngineConfig(transport="libfabric", nics_per_rank=3, transport_settings=TCP)
        ) as receiver,
    ):
        pages = torch.arange(64 * 300, dtype=torch.int32).reshape(64, 300)
        inbox = torch.zeros_like(pages)
        source = sender.register(pages)
        region = sender.resolve(receiver.register(inbox).descriptor)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
        request = sender.write_pages(
            source,
            region,
            rows=PageRows(page_bytes=1200),
            pages=order,
            region_pages=torch.arange(64),
            imm=5,
        )
        request.wait(20.0)
        receiver.wait_imm(5, 64, 20.0)
        assert torch.equal(inbox, pages[order])
