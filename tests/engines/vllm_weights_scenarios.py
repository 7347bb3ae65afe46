"""Scenarios of weight updates with vLLM's own factories, bases, worker sessions and EngineCore."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch

from moe_p2p.integrations.moe import vllm
from moe_p2p.integrations.weights import engine as engine_weights
from moe_p2p.integrations.weights import vllm as vllm_weights
from tests.engines.scenarios import HANG_S, Scenarios, free_port, refused
from tests.engines.vllm_kv_engine import begin
from tests.support.blocking_store import LONG_S, STEP_CPU_S, Blocking, counted
from tests.support.tp_model import TpModel, checkpoint

scenario = Scenarios()
TRAINERS, WORKERS = 2, 2


class Client:
    """vLLM's calls to its workers: each goes to all of them, as collective_rpc does."""

    def __init__(self, **config: Any) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.v1.worker import gpu_worker

        self.real, self.calls = gpu_worker.Worker, list[str]()
        gpu_worker.set_current_vllm_config = lambda _: _Nothing()
        self.models = [TpModel(i, WORKERS) for i in range(WORKERS)]
        self.workers = []
        for rank, model in enumerate(self.models):
            parallel = types.SimpleNamespace(
                rank=rank, world_size=WORKERS, data_parallel_index=0, data_parallel_size=1
            )
            vllm_config = types.SimpleNamespace(
                parallel_config=parallel, model_config=None, quant_config=None, **config
            )
            engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="moe_p2p"), vllm_config, torch.device("cpu"), model
            )
            worker = self.real.__new__(self.real)
            worker.vllm_config, worker.rank = vllm_config, rank
            worker.weight_transfer_engine = engine
            worker._weight_update_active = worker._weight_update_is_draft = False
            worker.model_runner = types.SimpleNamespace(reset_lora_state=lambda: None)
            self.workers.append(worker)
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="vLLM")
        self.during: Callable[[], None] = lambda: None
        self.version = ""

    def collective_rpc(self, method: Any, *given: Any) -> list[Any]:
        def call(worker: Any) -> Any:
            return method(worker, *given) if callable(method) else getattr(worker, method)(*given)

        self.calls.append(getattr(method, "__name__", method))
        running = [self.pool.submit(call, worker) for worker in self.workers]
        done = [each.exception(2 * HANG_S) for each in running]  # all workers end before one raises
        for error in done:
            if error is not None:
                raise error
        return [each.result() for each in running]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.collective_rpc("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.during()
        self.collective_rpc("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.collective_rpc("finish_weight_update")
        self.version = weight_version or ""

    def hold(self, version: int | None) -> bool:
        return all(model.holds(version) for model in self.models)


class Clients:
    """vLLM's RayVLLMWeightSyncClient, whose calls go to all engines with the same arguments; Ray is
    left out: `handles` are the engines."""

    def __init__(self, count: int) -> None:
        self.handles = [Client(instance_id=f"engine {i}") for i in range(count)]
        self.pool = ThreadPoolExecutor(count)

    def __getattr__(self, name: str) -> Any:
        def fan_out(*given: Any, **named: Any) -> None:
            running = [self.pool.submit(getattr(each, name), *given, **named)
                       for each in self.handles]  # fmt: skip
            for each in running:
                each.result(2 * HANG_S)

        return fan_out


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def source(rank: int, *, sharded: bool) -> Any:
    """vLLM's own interface: rows of each tensor on both trainers, or all of it."""
    from vllm.distributed.weight_transfer import ParamMeta, Shard, WeightSource

    class Source(WeightSource):
        def __init__(self) -> None:
            self.values = {n: t.chunk(TRAINERS)[rank].clone() if sharded else t
                           for n, t in checkpoint(0).items()}  # fmt: skip

        def set(self, version: int) -> None:
            for name, whole in checkpoint(version).items():
                self.values[name].copy_(whole.chunk(TRAINERS)[rank] if sharded else whole)

        @cached_property
        def metadata(self) -> list[Any]:
            owners = tuple(range(TRAINERS))
            how = {"owners": owners, "placements": (Shard(0),)} if sharded else {}
            return [ParamMeta(n, t.dtype, tuple(t.shape), **how) for n, t in checkpoint(0).items()]

        def pairs(self) -> Iterator[tuple[str, Any]]:
            yield from self.values.items()

        if sharded:
            iter_local = pairs
        else:
            iter_full = pairs

    return Source()


class Fleet:
    def __init__(
        self, *, sharded: bool = True, timeout_s: float = HANG_S, engines: int = 0, **how: Any
    ) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        vllm_weights.plugin()
        self.client: Any = Clients(engines) if engines else Client()
        self.pool = ThreadPoolExecutor(TRAINERS)
        self.sources = [source(rank, sharded=sharded) for rank in range(TRAINERS)]
        port = free_port()

        def made(rank: int) -> Any:
            init = vllm_weights.MoeP2pTrainerInit(
                rank=rank,
                world_size=TRAINERS,
                host="127.0.0.1",
                port=port,
                timeout_s=timeout_s,
                **how,
            )
            return WeightTransferTrainerFactory.trainer_init(
                init, client=self.client, source=self.sources[rank]
            )

        self.trainers = [each.result(2 * HANG_S) for each in
                         [self.pool.submit(made, rank) for rank in range(TRAINERS)]]  # fmt: skip

    def send(self, version: int) -> None:
        for each in self.sources:
            each.set(version)
        running = [self.pool.submit(each.send_weights) for each in self.trainers]
        errors = [each.exception(2 * HANG_S) for each in running]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        for each in [*(w.weight_transfer_engine for w in self.client.workers), *self.trainers]:
            each.shutdown()


@scenario
def shards_are_written_while_workers_go_on_and_change_at_finish() -> None:
    fleet = Fleet()
    client = fleet.client
    loads = [model.loads for model in client.models]
    seen = []
    client.during = lambda: seen.append(client.hold(fleet.trainers[0].version or None))
    for version in (1, 2, 3):
        fleet.send(version)
        assert client.hold(version), version
        assert client.version == str(version)
    assert seen == [True] * 3  # before `finish_weight_update` it was the version before
    assert client.calls[-3:] == ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [model.loads for model in client.models] == loads  # nothing was loaded by the engine
    fleet.close()


@scenario
def two_engines_of_one_client_are_two_engines() -> None:
    fleet = Fleet(engines=2)
    for version in (1, 2):
        fleet.send(version)
        assert [each.hold(version) for each in fleet.client.handles] == [True, True]
        assert [each.version for each in fleet.client.handles] == [str(version)] * 2
    for each in fleet.client.handles:
        for worker in each.workers:
            worker.weight_transfer_engine.shutdown()
    for each in fleet.trainers:
        each.shutdown()


@scenario
def whole_tensors_are_taken_from_all_trainers() -> None:
    fleet = Fleet(sharded=False)
    fleet.send(1)
    assert fleet.client.hold(1)
    fleet.close()


@scenario
def what_vllm_has_to_load_by_itself_is_loaded_at_finish() -> None:
    receiver = vllm_weights.Receiver
    real = receiver._reload
    receiver._reload = lambda self, named: self.model.load_weights(named)  # its reload wants layers
    init = vllm_weights.Init.__init__
    vllm_weights.Init.__init__ = lambda self, **given: init(self, **given, direct=False)
    try:
        fleet = Fleet()
        fleet.send(1)
        fleet.send(2)
        assert fleet.client.hold(2)
        assert [model.loads for model in fleet.client.models] == [2, 2]
        scenario.expect_logged("are received in checkpoint layout")
        fleet.close()
    finally:
        receiver._reload, vllm_weights.Init.__init__ = real, init


@scenario
def a_failed_update_ends_the_session_and_keeps_the_version() -> None:
    fleet = Fleet()
    fleet.send(1)
    trainer = fleet.trainers[1].trainer
    real, trainer._send = trainer._send, lambda *_: 1 / 0
    refused(lambda: fleet.send(2), "")
    trainer._send = real
    assert fleet.client.hold(1)
    assert not any(worker._weight_update_active for worker in fleet.client.workers)
    fleet.send(3)
    assert fleet.client.hold(3)
    fleet.close()


def core_of(client: Client) -> Any:
    from vllm.v1.engine import core

    vllm.plugin()  # the entry point
    made = core.EngineCore.__new__(core.EngineCore)
    made.model_executor = types.SimpleNamespace(
        collective_rpc=lambda method, timeout=None, args=(), kwargs=None: client.collective_rpc(
            method, *args
        )
    )
    made.scheduler = types.SimpleNamespace(set_pause_state=lambda state: states.append(state))
    states: list[Any] = []
    made.states = states
    return made


@scenario
def in_place_vllm_refuses_to_resume_while_a_worker_is_dirty() -> None:
    fleet = Fleet(mode="in_place")
    core = core_of(fleet.client)
    core.resume_scheduler()
    assert len(core.states) == 1
    trainer = fleet.trainers[1].trainer
    real, trainer._send = trainer._send, lambda *_: 1 / 0
    refused(lambda: fleet.send(1), "")
    refused(core.resume_scheduler, "dirty, a mix of versions", "trainer 1")
    assert len(core.states) == 1
    trainer._send = real
    fleet.send(2)
    core.resume_scheduler()
    assert len(core.states) == 2
    assert fleet.client.hold(2)
    fleet.close()


@scenario
def a_store_that_blocks_stops_no_call_of_an_engine() -> None:
    """Of a session, the call that waits for the fleet's decision ends by its deadline."""
    stores, store = list[Blocking](), engine_weights.Fleet.store

    def of_workers(self: Any, **how: Any) -> Any:
        found = store(self, **how)
        if threading.current_thread().name.startswith("vLLM"):
            found = Blocking(found)
            stores.append(found)
        return found

    engine_weights.Fleet.store = of_workers
    try:
        fleet = Fleet(timeout_s=5.0)
        fleet.send(1)
        core = core_of(fleet.client)
        worker = fleet.client.workers[0]
        worker.execute_model = fleet.client.workers[1].execute_model = lambda: None
        with counted(vllm_weights.Receiver) as cost:

            def step() -> None:
                core.collective_rpc("execute_model")
                worker.weight_transfer_engine.require_clean()
                for each in fleet.client.workers:  # a session asks for it
                    each.weight_transfer_engine.weights.engine_rank.step()

            free = cost.of(step, 200)
            for each in stores:
                each.block()
            began = time.monotonic()
            fleet.client.start_weight_update()
            blocked = cost.of(step)
            assert blocked < free + STEP_CPU_S, (blocked, free)
            assert sum(each.blocked for each in stores) >= WORKERS
            core.resume_scheduler()
            refused(lambda: fleet.client.update_weights({"version": 2}), "no update was over")
            assert time.monotonic() - began < LONG_S
        assert fleet.client.hold(1)
        for each in stores:
            each.go_on()
        fleet.send(3)
        assert fleet.client.hold(3)
        fleet.close()
    finally:
        for each in stores:
            each.go_on()
        engine_weights.Fleet.store = store


class Prompts:
    """vLLM's scheduler with its KV cache manager; what it computes of a prompt is counted."""

    def __init__(self) -> None:
        from moe_p2p.integrations.kv.vllm import MoeP2pConnector  # noqa: F401  of the engine
        from tests.engines.vllm_kv_engine import Engine

        self.engine = Engine("kv_producer", f"127.0.0.1:{free_port()}")
        self.names = iter("abcdefgh")

    def computed(self, tokens: list[int]) -> int:
        """Returns the number of tokens of the prompt that were not in the prefix cache."""
        name = next(self.names)
        self.engine.add(name, tokens)
        for _ in range(20):
            self.engine.step()
            if name in self.engine.finished:
                return sum(end - begin for each, begin, end in self.engine.computed if each == name)
        raise AssertionError(f"{name} has not ended")


def computes_after_an_update(prefix_cache: str) -> tuple[int, int]:
    """Returns tokens computed of a prompt that an older version has cached, and how often a request
    that runs meanwhile is computed from its first token on."""
    fleet, prompts = Fleet(prefix_cache=prefix_cache), Prompts()
    core = core_of(fleet.client)
    core.scheduler = prompts.engine.scheduler
    fleet.client.finish_weight_update = lambda weight_version: core.collective_rpc(
        "finish_weight_update"
    )
    tokens = list(range(40))
    fleet.send(1)
    assert prompts.computed(tokens) == 40
    assert prompts.computed(tokens) == 4  # its last block, for the logits of the next token
    prompts.engine.add("running", tokens[::-1], max_tokens=50)
    prompts.engine.step()
    fleet.send(2)
    assert fleet.client.hold(2)
    computed = prompts.computed(tokens)
    begun = [begin for name, begin, _ in prompts.engine.computed if name == "running"].count(0)
    prompts.engine.close()
    fleet.close()
    return computed, begun


@scenario
def a_prompt_after_an_update_does_not_go_on_with_kv_of_older_weights() -> None:
    assert computes_after_an_update("keep") == (4, 1)
    assert computes_after_an_update("reset") == (40, 2)


@scenario
def an_unset_engine_says_what_is_missing() -> None:
    vllm_weights.plugin()
    vllm_weights.plugin()  # each process of vLLM may call it again
    client = Client()
    refused(client.start_weight_update, "init_weight_transfer_engine must be called before")


if __name__ == "__main__":
    scenario.main(begin)
