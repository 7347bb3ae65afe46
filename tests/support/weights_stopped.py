"""The process of an engine rank is stopped, updates go on without it, and it comes back.

    python -m tests.support.weights_stopped

Trainers write to it meanwhile; what they write is not acknowledged, so they have to look who is
there while they wait for it. Used by tests/weights/test_weights_killed.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import TCPStore

from moe_p2p.weights import WeightEngineRank, WeightTrainer
from tests.support.ranks import repeated
from tests.support.weights_fleet import MODELS, TRAINERS, engine_of

MODEL = MODELS["fused"]
LIMITS = {"timeout_s": 30.0, "lease_s": 1.5}


def store_at(port: int) -> Any:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def engine_rank_of(rank: int, port: int) -> WeightEngineRank:
    return WeightEngineRank(engine_of(f"generator {rank}", rank), store_at(port), MODEL.layouts[1],
                           rank, MODEL.empty(rank), **LIMITS)  # fmt: skip


def trainer_of(rank: int, port: int) -> WeightTrainer:
    return WeightTrainer(engine_of(f"trainer {rank}", rank), store_at(port), MODEL.layouts[0], rank,
                         MODEL.trainer_tensors(rank, MODEL.values(0)), **LIMITS)  # fmt: skip


def run_victim(read: int) -> None:
    """Until it is killed."""
    port = int.from_bytes(os.read(read, 2), "big")
    engine_rank = engine_rank_of(1, port)
    while True:
        engine_rank.step()
        time.sleep(0.001)


def check(victim: int, port: int) -> None:
    with ThreadPoolExecutor(TRAINERS + 1) as pool:
        made = [pool.submit(trainer_of, rank, port) for rank in range(TRAINERS)]
        engine_rank = engine_rank_of(0, port)
        trainers = [each.result() for each in made]

        def update(version: int) -> None:
            values = MODEL.values(version)
            running = [pool.submit(each.update, version, MODEL.trainer_tensors(each.rank, values))
                       for each in trainers]  # fmt: skip
            for each in running:
                each.result()

        def await_versions(wanted: dict[int, int]) -> None:
            until = time.monotonic() + LIMITS["timeout_s"]
            while trainers[0].live() != wanted:
                assert time.monotonic() < until, (trainers[0].live(), wanted)
                time.sleep(0.01)

        with repeated(lambda: (engine_rank.step(), time.sleep(0.001))):
            update(1)
            await_versions({1: 2})
            os.kill(victim, signal.SIGSTOP)
            update(2)
            assert trainers[0].totals["failed"] == 1
            update(3)  # now nobody waits for it
            assert trainers[0].totals["failed"] == 1
            await_versions({3: 1})
            os.kill(victim, signal.SIGCONT)
            await_versions({3: 1, 1: 1})
            version, until = 4, time.monotonic() + LIMITS["timeout_s"]
            update(version)
            while trainers[0].live() != {version: 2}:
                assert time.monotonic() < until, trainers[0].live()
                time.sleep(0.2)
                version += 1
                update(version)
        for each in [*trainers, engine_rank]:
            each.close()


def main() -> int:
    read, write = os.pipe()
    victim = os.fork()  # before this process has threads
    if victim == 0:
        run_victim(read)
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, store.port.to_bytes(2, "big"))
        check(victim, store.port)
    finally:
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
    print("it was left out, and it came back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
