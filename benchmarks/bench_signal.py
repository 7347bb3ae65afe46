"""Round trip between two processes: the peer counts an immediate and answers with another.

One direction passes: mailbox of the sender's proxy thread, the software NIC's shared memory, the
receiver's proxy thread, its counter, the waiting thread. Only these words are copied.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from moe_p2p import Engine, EngineConfig

PING, PONG, STOP = 1, 2, 3
DEADLINE_S = 30.0


def answer(pipe: Connection, wait: str) -> None:
    """Runs in the peer process: answers every PING until STOP is counted."""
    with Engine(EngineConfig(transport="loopback", nics_per_rank=1, wait=wait)) as engine:
        peer = engine.connect(pipe.recv_bytes())
        pipe.send_bytes(engine.address)
        count = 0
        while True:
            count += 1
            engine.wait_imm(PING, count, timeout_s=DEADLINE_S)
            if engine.imm_value(STOP):
                return
            engine.send_imm(peer, PONG)


@pytest.fixture(params=["sleep", "yield"])
def other(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, bytes]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moe_p2p"])
    pipe, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs, request.param), daemon=True)
    process.start()
    with Engine(EngineConfig(transport="loopback", nics_per_rank=1, wait=request.param)) as engine:
        pipe.send_bytes(engine.address)
        assert pipe.poll(DEADLINE_S), "the other process did not come"
        address = pipe.recv_bytes()
        yield engine, address
        peer = engine.connect(address)
        engine.send_imm(peer, STOP).wait()
        engine.send_imm(peer, PING).wait()
        process.join(DEADLINE_S)
    assert process.exitcode == 0


def test_round_trip(benchmark: BenchmarkFixture, other: tuple[Engine, bytes]) -> None:
    engine, address = other
    peer = engine.connect(address)
    count = 0

    def there_and_back() -> None:
        nonlocal count
        count += 1
        engine.send_imm(peer, PING)
        engine.wait_imm(PONG, count)

    benchmark.pedantic(there_and_back, rounds=2000, warmup_rounds=50)
