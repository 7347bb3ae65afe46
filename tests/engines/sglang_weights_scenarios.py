"""Scenarios of weight updates with SGLang's own session, loader, pause and continue."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import pickle
import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moe_p2p.integrations.weights import sglang_calls
from tests.engines import absent
from tests.engines.scenarios import HANG_S, Scenarios, free_port, refused
from tests.support.blocking_store import Blocking, Cost, check_steps
from tests.support.store_clients import clients_of
from tests.support.tp_model import TpModel, checkpoint

scenario = Scenarios()
TP = 2
local = threading.local()  # a thread is a scheduler process


def begin() -> None:
    absent.importing("sglang", f"{absent.SGLANG} setproctitle uvicorn")
    from sglang.srt.managers import scheduler, tp_worker
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.model_executor.model_runner_components import weight_updater as of_runner

    from moe_p2p.integrations.weights import sglang as sglang_weights

    def parallel() -> Any:
        return types.SimpleNamespace(
            tp_rank=local.rank, tp_group=types.SimpleNamespace(cpu_group=None)
        )

    for module in (tp_worker, weight_updater, of_runner):
        module.get_parallel = parallel
    for module in (tp_worker, of_runner):
        module.monkey_patch_torch_reductions = lambda: None  # for tensors of GPUs alone
    of_runner.get_model = lambda: types.SimpleNamespace(weight_cache_mode="off")
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda **group: (
        local.barrier.wait(HANG_S) if hasattr(local, "barrier") else barrier(**group)
    )
    torch.cuda.current_device = lambda: 0  # asked for a device that CPU tensors do not have
    of_runner._unwrap_tensor = lambda tensor, **_: tensor
    assert scheduler.Scheduler is not None
    sglang_weights.plugin()


class Rank:
    """One of SGLang's scheduler processes, as far as weights go."""

    def __init__(self, rank: int, barrier: threading.Barrier, model: Any) -> None:
        from sglang.srt.managers import tp_worker
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager,
        )
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        from moe_p2p.integrations.weights import sglang as sglang_weights

        local.rank, local.barrier = rank, barrier
        self.model = model(rank, TP)
        runner = types.SimpleNamespace(weight_updater=WeightUpdater(
            tp_rank=rank, device="cpu", gpu_id=0, model_config=None,
            custom_weight_loaders={sglang_weights.LOADER: None}, get_model=lambda: self.model,
            update_model_fields=None, recapture_cuda_graph=None,
            get_model_runner=None))  # fmt: skip
        worker = types.SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        worker.deserialize_own_rank = types.MethodType(
            tp_worker.BaseTpWorker.deserialize_own_rank, worker
        )
        self.versions, self.flushed = list[str](), list[bool]()
        self.scheduler = Scheduler.__new__(Scheduler)
        self.scheduler.record_weight_version_change = self._version
        self.scheduler._engine_paused, self.scheduler._pause_started_at = False, None
        self.scheduler._pause_intervals = []
        self.scheduler.disaggregation_mode = None
        self.scheduler.disagg_decode_prealloc_queue = None
        self.updater = SchedulerWeightUpdaterManager(
            tp_worker=worker, draft_worker=None, memory_saver_adapter=None,
            flush_cache=lambda **_: self.flushed.append(True) or True,
            is_fully_idle=lambda **_: True, scheduler=self.scheduler)  # fmt: skip

    def _version(self, *, new_version: str | None) -> None:
        if new_version is not None:
            self.versions.append(new_version)


class Manager:
    """SGLang's TokenizerManager: each call reaches all ranks, in their order of calls."""

    def __init__(self, model: Any = TpModel) -> None:
        self.barrier, self.calls = threading.Barrier(TP), list[str]()
        self.pools = [ThreadPoolExecutor(1) for _ in range(TP)]
        self.ranks = [
            self.pools[i].submit(Rank, i, self.barrier, model).result(HANG_S) for i in range(TP)
        ]

    def on_all(self, what: str, call: Any) -> list[Any]:
        self.calls.append(what)
        running = [
            pool.submit(call, rank) for pool, rank in zip(self.pools, self.ranks, strict=True)
        ]
        return [each.result(2 * HANG_S) for each in running]

    async def begin_weight_update(self, obj: Any, _: Any) -> None:
        assert all(
            each.success
            for each in self.on_all("begin", lambda rank: rank.updater.begin_weight_update(obj))
        )

    async def end_weight_update(self, obj: Any, _: Any) -> None:
        assert all(
            each.success
            for each in self.on_all("end", lambda rank: rank.updater.end_weight_update(obj))
        )

    async def update_weights_from_tensor(self, obj: Any, _: Any) -> tuple[bool, str]:
        assert all(rank.scheduler._engine_paused for rank in self.ranks)  # or SGLang would wait
        done = self.on_all("update", lambda rank: rank.updater.update_weights_from_tensor(obj))
        return all(each.success for each in done), done[0].message

    async def pause_generation(self, obj: Any) -> None:
        def pause(rank: Rank) -> None:
            if obj.mode == "in_place":
                rank.scheduler.pause_generation(obj)
            rank.scheduler._engine_paused = True  # others have queues of requests to go through

        self.on_all(f"pause {obj.mode}", pause)

    async def continue_generation(self, obj: Any) -> None:
        self.on_all("continue", lambda rank: rank.scheduler.continue_generation(obj))

    def hold(self, version: int | None) -> bool:
        return all(rank.model.holds(version) for rank in self.ranks)

    @property
    def paused(self) -> list[bool]:
        return [rank.scheduler._engine_paused for rank in self.ranks]


class Server:
    """SGLang's HTTP server, as far as weights go: its paths, its requests' schemas, answers. key:
    "": it asks for none."""

    def __init__(self, manager: Manager, key: str) -> None:
        import sglang
        from pydantic import TypeAdapter
        from sglang.srt.managers import io_struct

        entry = Path(sglang.__path__[0], "srt/entrypoints/http_server.py").read_text()
        found = re.findall(
            r'app.post\("/(\w+)"\)\n@auth_level\(AuthLevel.ADMIN_OPTIONAL\)\n'
            r"async def \w+\(\n    obj: Annotated\[(\w+), Body\(\)\], request",
            entry,
        )
        schemas = {path: TypeAdapter(getattr(io_struct, name)) for path, name in found}
        self.loop, self.refused = asyncio.new_event_loop(), list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                path, length = handler.path[1:], int(handler.headers["Content-Length"])
                body = json.loads(handler.rfile.read(length))
                if key and handler.headers["Authorization"] != f"Bearer {key}":
                    self.refused.append(path)
                    return handler.send_error(401)
                status, content = self.answer(getattr(manager, path), schemas[path], body)
                handler.send_response(status)
                handler.end_headers()
                handler.wfile.write(json.dumps(content).encode())
                return None

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method: Any, schema: Any, body: Any) -> tuple[int, Any]:
        obj = schema.validate_python(body)
        alone = "generation" in method.__name__
        found = self.loop.run_until_complete(method(obj) if alone else method(obj, None))
        good, text = found or (True, "")
        return 200 if good else 400, {"success": good, "message": text}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class World:
    """One trainer with whole tensors, and one SGLang engine of two ranks."""

    def __init__(self, **how: Any) -> None:
        from moe_p2p import Engine
        from moe_p2p.integrations.weights import sglang as sglang_weights
        from moe_p2p.integrations.weights.engine import Fleet
        from moe_p2p.weights import Param, WeightLayout, WeightTrainer

        direct, manager = how.pop("direct", True), how.pop("manager", None)
        key = how.pop("http", "")
        how.setdefault("port", free_port())
        how.setdefault("timeout_s", HANG_S)
        self.fleet = fleet = Fleet(host="127.0.0.1", **how)
        self.store = fleet.store(serves=True)
        self.manager = manager or Manager()
        engine = types.SimpleNamespace(
            loop=asyncio.new_event_loop(), tokenizer_manager=self.manager
        )
        self.server = Server(self.manager, key) if key else None
        at = self.server.url if self.server else engine
        self.updates = sglang_weights.SglangUpdates(at, fleet, tp=TP, direct=direct, api_key=key)
        self.values = checkpoint(0)
        layout = WeightLayout(
            tuple(Param(n, tuple(t.shape), "bfloat16", (0,)) for n, t in self.values.items()), 1
        )
        self.engine = Engine(label="trainer")
        with self.updates.opening():
            self.trainer = WeightTrainer(
                self.engine, self.store, layout, 0, self.values, timeout_s=fleet.timeout_s
            )

    def send(self, version: int, requests: Any = "keep") -> None:
        self.updates.send(
            version, lambda: self.trainer.update(version, checkpoint(version)), requests=requests
        )

    def fail(self, version: int) -> None:
        def update() -> None:
            self.trainer.update(version, {"none": torch.zeros(1)})

        self.updates.send(version, update)

    def close(self) -> None:
        from moe_p2p.integrations.weights import sglang as sglang_weights

        for worker in sglang_weights._workers.values():
            worker.close()
        sglang_weights._workers.clear()
        sglang_weights._stores.clear()
        if self.server:
            self.server.close()
        self.end_trainer()

    def end_trainer(self) -> None:
        """And the store, which it serves."""
        self.trainer.close()
        self.engine.close()
        self.store = None


@contextlib.contextmanager
def world(**how: Any) -> Any:
    made = World(**how)
    try:
        yield made
    finally:
        made.close()


@scenario
def bytes_move_beside_generation_and_a_pause_changes_all_ranks() -> None:
    with world() as w:
        seen = []
        real = w.trainer.update

        def update(*given: Any) -> None:
            seen.append(list(w.manager.paused))
            real(*given)

        w.trainer.update = update
        w.manager.calls.clear()
        for version in (1, 2):
            w.send(version)
            assert w.manager.hold(version)
        assert seen == [[False] * TP] * 2  # not paused while bytes move
        session = ["begin", "update", "end"]
        around = ["pause in_place", *session, *session, "continue"]  # the call, and the check
        assert w.manager.calls == 4 * around  # bytes move between
        assert w.manager.paused == [False] * TP
        assert [rank.versions for rank in w.manager.ranks] == [["1", "2"]] * TP
        assert not any(rank.flushed for rank in w.manager.ranks)


@scenario
def an_engine_adds_three_clients_of_the_store_for_each_rank() -> None:
    """Its own, the one of its answers, and its generator's."""
    with world() as w:
        served, trainer, updates = 1, 1, 1
        assert clients_of(w.store.port) == served + trainer + updates + 3 * TP


@scenario
def a_store_that_blocks_stops_no_scheduler() -> None:
    """It asks what an update has come to, and may go on, between forward passes."""
    from moe_p2p.integrations.weights import sglang as sglang_weights

    stores, store = list[Blocking](), sglang_weights.Fleet.store

    def of_ranks(self: Any, **how: Any) -> Any:
        found = store(self, **how)
        if hasattr(local, "rank"):
            found = Blocking(found)
            stores.append(found)
        return found

    sglang_weights.Fleet.store = of_ranks
    cost = Cost()
    load = cost.wrapped(sglang_weights.load)
    try:
        with world() as w:
            w.send(1)
            rank = w.manager.ranks[0]
            check = pickle.loads(w.updates._payload("check", 0))
            go_on = types.SimpleNamespace(torch_empty_cache=False)
            resume = cost.wrapped(lambda: rank.scheduler.continue_generation(go_on))

            def step() -> None:
                load(rank.model, check)
                resume()
                sglang_weights._workers[id(rank.model)].engine_rank.step()

            check_steps(cost, stores[0], step)
            assert not rank.scheduler._engine_paused
            for each in stores:
                each.go_on()
            w.send(2)
            assert w.manager.hold(2)
    finally:
        for each in stores:
            each.go_on()
        sglang_weights.Fleet.store = store


@scenario
def requests_are_kept_retracted_or_aborted() -> None:
    with world() as w:
        for version, (ours, theirs) in enumerate(
            (("keep", "in_place"), ("retract", "retract"), ("abort", "abort")), 1
        ):
            w.manager.calls.clear()
            w.send(version, ours)
            assert f"pause {theirs}" in w.manager.calls
            assert w.manager.hold(version)
        assert [len(rank.flushed) for rank in w.manager.ranks] == [2, 2]  # not where kept
        refused(lambda: w.send(4, "drop"), "must be one of keep, retract, abort")


@scenario
def a_server_is_updated_over_http() -> None:
    with world(http="secret") as w:
        for version, requests in enumerate(("keep", "retract"), 1):
            w.send(version, requests)
            assert w.manager.hold(version)
        assert [rank.versions for rank in w.manager.ranks] == [["1", "2"]] * TP
        refused(lambda: w.fail(3), "none of this trainer's")
        assert w.manager.hold(2)
        assert w.manager.paused == [False] * TP
        stranger = sglang_calls.over_http(w.server.url, "guessed", HANG_S)
        refused(lambda: stranger("pause_generation", mode="abort"), "status 401", w.server.url)
        assert w.server.refused == ["pause_generation"]
        nobody = sglang_calls.over_http("http://127.0.0.1:1", "", HANG_S)
        refused(lambda: nobody("end_weight_update"), "does not answer end_weight_update")
        refused(lambda: sglang_calls.over_http("server:30000", "", HANG_S), "as http://host:port")


class Forgetful(TpModel):
    """Its loader takes no part of a parameter."""

    def load_weights(self, weights: Any) -> set[str]:
        return super().load_weights(pair for pair in weights if "attn.o" not in pair[0])


@scenario
def an_engine_that_cannot_open_says_why() -> None:
    refused(lambda: World(manager=Manager(Forgetful), timeout_s=2.0), "layers.0.attn.o.weight")


@scenario
def a_session_that_sglang_refuses_is_an_error() -> None:
    with world(http="secret") as w:

        async def refuses(obj: Any, _: Any) -> tuple[bool, str]:
            return False, "another session is open"

        w.manager.begin_weight_update = refuses
        refused(lambda: w.send(1), "refuses begin_weight_update", "another session is open")


@scenario
def trainers_end_and_begin_anew_while_the_engine_stays() -> None:
    with world() as w:
        w.send(1)
        w.end_trainer()
        refused(w.updates.resume, "")  # nobody answers
        assert w.manager.hold(1)
        with world(manager=w.manager, port=w.fleet.port) as again:
            again.send(2)
            assert w.manager.hold(2)


@scenario
def a_worker_that_cannot_be_closed_yet_is_closed_by_the_next_open() -> None:
    from moe_p2p import TimeoutError
    from moe_p2p.integrations.weights import sglang as sglang_weights

    calls = list[str]()
    with world() as w:
        w.send(1)
        w.end_trainer()
        worker = sglang_weights._workers[id(w.manager.ranks[0].model)]
        close = worker.close

        def late() -> None:
            calls.append("close")
            if len(calls) == 1:
                raise TimeoutError("a peer may still write")
            close()

        worker.close = late
        refused(lambda: World(manager=w.manager, timeout_s=2.0), "may still write")
        with world(manager=w.manager) as again:
            again.send(2)
            assert w.manager.hold(2)
    assert calls == ["close", "close"]


@scenario
def what_sglang_repacks_goes_through_its_loader() -> None:
    with world(direct=False) as w:
        w.send(1)
        assert w.manager.hold(1)
        assert [rank.model.loads for rank in w.manager.ranks] == [1] * TP


@scenario
def a_failed_update_keeps_the_version_and_generation() -> None:
    with world() as w:
        w.send(1)
        refused(lambda: w.fail(2), "none of this trainer's")
        assert w.manager.hold(1)
        assert w.manager.paused == [False] * TP
        w.send(3)
        assert w.manager.hold(3)


@scenario
def in_place_sglang_stays_paused_while_a_rank_is_dirty() -> None:
    with world(mode="in_place") as w:
        refused(lambda: w.fail(1), "none of this trainer's")
        assert w.manager.paused == [True] * TP
        refused(w.updates.resume, "dirty, a mix of versions", "trainer 0")
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        asked = ContinueGenerationReqInput(torch_empty_cache=False)  # by anybody
        asyncio.new_event_loop().run_until_complete(w.manager.continue_generation(asked))
        assert w.manager.paused == [True] * TP
        scenario.expect_logged("generation stays paused", "dirty")
        w.send(2)
        assert w.manager.paused == [False] * TP
        assert w.manager.hold(2)


if __name__ == "__main__":
    scenario.main(begin)
