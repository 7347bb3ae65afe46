"""Scenarios of weight updates with verl's own registry and CheckpointEngineManager."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tests.engines import absent, packages
from tests.engines.scenarios import HANG_S, Scenarios, refused
from tests.support.blocking_store import LONG_S, STEP_CPU_S, STEPS, Blocking
from tests.support.tp_model import checkpoint

scenario = Scenarios()
ACTORS = 2


def begin() -> None:
    absent.importing("verl", "ray verl.single_controller verl.utils verl.workers")
    verl = types.ModuleType("verl")  # its __init__ reads a file that is no Python
    verl.__path__ = [str(packages.where("verl") / "verl")]
    sys.modules["verl"] = verl
    waits = types.ModuleType("verl.utils.ray_utils")
    waits.auto_await = lambda call: call  # verl's runs coroutines where nobody awaits them
    sys.modules["verl.utils.ray_utils"] = waits
    base = importlib.import_module("verl.checkpoint_engine.base")
    base.ray.get = lambda futures: [each.result(2 * HANG_S) for each in futures]
    base.ray.util.get_node_ip_address = lambda: "127.0.0.1"
    base.import_external_libs = importlib.import_module  # verl's own does no more
    base.RayWorkerGroup = lambda worker_handles, **_: Group(worker_handles)


class Group:
    """A worker group of verl: methods of its engines, each in a thread; ray.get waits."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines, self.world_size = engines, len(engines)
        self.pool = ThreadPoolExecutor(len(engines) or 1)
        self.update: Any = None

    def execute_checkpoint_engine(self, method: list[str], **how: list[Any]) -> list[Future[Any]]:
        return [
            self.pool.submit(getattr(engine, name), **{k: v[i] for k, v in how.items()})
            for i, (engine, name) in enumerate(zip(self.engines, method, strict=True))
        ]

    def update_weights(self, global_steps: int, **_: Any) -> list[Future[Any]]:
        return [self.pool.submit(Group.run, engine, self.update, global_steps)
                for engine in self.engines]  # fmt: skip

    @staticmethod
    def run(engine: Any, weights: Any, step: int) -> Any:
        if weights is not None:
            return asyncio.run(engine.send_weights(weights(), step))

        async def receive() -> dict[str, Tensor]:
            return {n: t.clone() async for n, t in engine.receive_weights(step)}

        engine.got = asyncio.run(receive())
        return None


class Replica:
    """What the manager asks of a rollout replica; calls are kept."""

    def __init__(self, engines: list[Any]) -> None:
        self.workers, self.calls = engines, list[str]()

    def __getattr__(self, name: str) -> Any:
        async def call(**_: Any) -> None:
            self.calls.append(name)

        return call


def manager(bucket_size: int, replicas: int = 2) -> Any:
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry

    config = types.SimpleNamespace(
        backend="moe_p2p", custom_backend_module="moe_p2p.integrations.weights.verl"
    )
    actors = Group([])
    made = CheckpointEngineManager(config, actors, [])

    def engine() -> Any:
        return CheckpointEngineRegistry.new("moe_p2p", bucket_size=bucket_size, timeout_s=HANG_S)

    made.actor_wg = Group([engine() for _ in range(ACTORS)])
    made.replicas = [Replica([engine()]) for _ in range(replicas)]
    return made


def update(made: Any, version: int) -> None:
    made.actor_wg.update = lambda: iter(checkpoint(version).items())
    asyncio.run(made.update_weights(global_steps=version))


def check(made: Any, version: int) -> None:
    for replica in made.replicas:
        for worker in replica.workers:
            wanted = checkpoint(version)
            assert worker.got.keys() == wanted.keys()
            assert all(torch.equal(worker.got[name], each) for name, each in wanted.items())


@scenario
def whole_parameters_arrive_in_buckets_smaller_than_some() -> None:
    made = manager(bucket_size=640)  # a q_proj has 1,024 bytes
    for version in (1, 2):
        update(made, version)
        check(made, version)
    calls = made.replicas[0].calls
    assert calls[: len(calls) // 2] == [
        "abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"
    ]  # fmt: skip


@scenario
def replicas_come_and_go_between_updates() -> None:
    made = manager(bucket_size=1 << 20)
    update(made, 1)
    made.add_replicas(manager(bucket_size=1 << 20, replicas=1).replicas)
    update(made, 2)
    check(made, 2)
    assert len(made.replicas) == 3
    made.remove_replicas(made.replicas[:2])
    update(made, 3)
    check(made, 3)


@scenario
def a_store_that_blocks_stops_no_event_loop() -> None:
    """verl serves other calls of an actor, and of a worker, from the loop that updates."""
    from moe_p2p.integrations.weights import verl

    actor, worker = (verl.Checkpoint(640, timeout_s=HANG_S) for _ in range(2))
    of_actor, of_worker = verl.Checkpoint.build_topology(1, 1, [worker.prepare()])
    stores, store = list[Blocking](), verl.TCPStore

    def blocking(*at: Any, **how: Any) -> Blocking:
        stores.append(Blocking(store(*at, **how)))
        return stores[-1]

    verl.TCPStore = blocking
    pool = ThreadPoolExecutor(2)

    def set_up(side: Any, given: dict[str, list[Any]]) -> None:
        side.init_process_group(**{name: each[0] for name, each in given.items()})

    def go_on() -> None:
        for each in stores:
            each.go_on()

    async def update() -> dict[str, Tensor]:
        cpu_s = await turns()
        for each in stores:
            each.block()
        late = threading.Timer(HANG_S / 4, go_on)  # for a loop that would never go on
        late.start()
        sending = asyncio.create_task(actor.send_weights(iter(checkpoint(1).items())))
        receiving = asyncio.create_task(everything())
        while not all(each.blocked for each in stores):
            await asyncio.sleep(0)
        assert await turns() < cpu_s + STEP_CPU_S
        late.cancel()
        assert not any(each.is_free for each in stores), "the loop has waited for the store"
        go_on()
        await sending
        return await receiving

    async def everything() -> dict[str, Tensor]:
        return {n: t.clone() async for n, t in worker.receive_weights()}

    async def turns() -> float:
        began, cpu_s = time.monotonic(), time.thread_time()
        for _ in range(STEPS):
            await asyncio.sleep(0)
            assert time.monotonic() - began < LONG_S
        return (time.thread_time() - cpu_s) / STEPS

    try:
        for each in [pool.submit(set_up, actor, of_actor), pool.submit(set_up, worker, of_worker)]:
            each.result(2 * HANG_S)
        got, wanted = asyncio.run(update()), checkpoint(1)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], each) for name, each in wanted.items())
        for side in (actor, worker):
            side.finalize()
    finally:
        go_on()
        verl.TCPStore = store


@scenario
def an_actor_that_fails_fails_the_update() -> None:
    made = manager(bucket_size=640)
    update(made, 1)

    def broken() -> Any:
        for number, pair in enumerate(checkpoint(2).items()):
            if number == 5:
                raise RuntimeError("the actor is out of memory")
            yield pair

    made.actor_wg.update = broken
    refused(lambda: asyncio.run(made.update_weights(global_steps=2)), "the actor is out of memory")
    for worker in (w for replica in made.replicas for w in replica.workers):
        deadline = time.monotonic() + HANG_S / 2  # it would wait twice as long for a silent actor
        while "the actor is out of memory" not in worker._side.failure:
            assert time.monotonic() < deadline, worker._side.failure
            time.sleep(0.01)


if __name__ == "__main__":
    scenario.main(begin)
