"""Weight updates of SGLang, by its own session of begin, update and end.

    sglang.launch_server ... --custom-weight-loader moe_p2p.integrations.weights.sglang.load

    updates = SglangUpdates(engine, fleet, tp=8)     beside trainer 0; engine: sglang.Engine, or
                                                     "http://host:port" of a server
    with updates.opening():                          around the making of trainer 0; others are made
        trainer = WeightTrainer(...)                 at the same time
    updates.send(version, lambda: trainer.update(version), requests="keep")

What happens in SGLang's scheduler processes happens in `load`, which SGLang calls between forward
passes as the loader of a session; errors come back through the store, because one that is raised
there would end the server. In shadow mode SGLang generates while bytes move, and pauses for a copy.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor

from moe_p2p import log
from moe_p2p.errors import MoeP2pError, ProtocolError, TimeoutError, make, require
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.member import LEAVE_S
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations.weights.engine import EngineWeights, Fleet, beside
from moe_p2p.integrations.weights.sglang_calls import Call, in_process, over_http, payload
from moe_p2p.weights.job import prefix_of, refuse_update

LOADER = f"{__name__}.load"
# Requests in flight: what becomes of them, and SGLang's word for it.
Requests = Literal["keep", "retract", "abort"]
PAUSES: dict[str, str] = {"keep": "in_place", "retract": "retract", "abort": "abort"}
_SCHEDULER = "sglang.srt.managers.scheduler"
_LOOK_S = 0.002


# --- in each scheduler process ---

# By model; one of each, unless tests have several ranks.
_workers: dict[int, EngineWeights] = {}
_stores: dict[int, Any] = {}
_answers: dict[int, StoreKeys] = {}


def _words(fleet: Fleet, store: Any) -> StoreKeys:
    return StoreKeys(store, f"{prefix_of(fleet.name)}/sglang")


def load(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """SGLang's loader of weights, for a payload of `SglangUpdates`; it raises nothing."""
    call = json.loads(bytes(named[0][1].cpu().tolist()))
    try:
        _answer(model, call)
    except Exception as failed:  # without a store nobody waits for the answer
        log.warning(f"weight update, {call['do']}: no store to answer in: {failed!r}")


def _answer(model: Any, call: dict[str, Any]) -> None:
    fleet, error = Fleet(**call["fleet"]), ""
    if call["do"] == "open" or id(model) not in _answers:  # trainers may have begun anew
        _forget(model)
        _stores[id(model)] = fleet.store()
        _answers[id(model)] = _words(fleet, _stores[id(model)])
    store = _stores[id(model)]
    try:
        _do(model, call, fleet, store)
    except Exception as failed:
        log.warning(f"weight update, {call['do']}: {failed}")
        error = str(failed) or repr(failed)
    # Not waited for: the scheduler goes on where the store is gone.
    answer = {"number": call["number"], "error": error}
    _answers[id(model)].put(f"{call['id']} {call['rank']}", answer, wait=False)


def _forget(model: Any) -> None:
    """What was answered to who called before."""
    before = _answers.pop(id(model), None)
    if before is not None:
        with contextlib.suppress(MoeP2pError), before.within(Deadline(LEAVE_S)):
            before.withdraw(leaves=True)
        before.client.close()


def _do(model: Any, call: dict[str, Any], fleet: Fleet, store: Any) -> None:
    if call["do"] == "open":
        old = _workers.get(id(model))
        if old is not None:
            old.close()  # raises while a peer may still write: the next `open` calls it again
            del _workers[id(model)]
        first = next(model.parameters())
        _workers[id(model)] = EngineWeights(
            model, model.load_weights, fleet, call["rank"], call["world_size"],
            direct=call["direct"], device=first.device, store=store, engine_ranks=call["engine"],
            set_up=call["set_up"],
        )  # fmt: skip
        return
    worker = _workers.get(id(model))
    require(worker is not None, "no SglangUpdates has set this engine up: use its opening()")
    assert worker is not None
    step: dict[str, Callable[[], object]] = {
        "begin": worker.begin,
        "settle": worker.settle,
        "commit": worker.commit,
        "check": worker.require_clean,
    }
    step[call["do"]]()


def why_dirty() -> str:
    """Of this process; "": its tensors are one version."""
    for worker in _workers.values():
        try:
            worker.require_clean()
        except ProtocolError as error:
            return str(error)
    return ""


def guard_continue(scheduler: Any) -> None:
    """scheduler: SGLang's class. It stays paused while the process is dirty, and logs why."""
    resume = scheduler.continue_generation
    if hasattr(resume, "guarded"):
        return

    @functools.wraps(resume)
    def continue_generation(self: Any, recv_req: Any) -> Any:
        why = why_dirty()
        if why:
            log.warning(f"generation stays paused: {why}")
            return None
        return resume(self, recv_req)

    continue_generation.guarded = True  # type: ignore[attr-defined]
    scheduler.continue_generation = continue_generation


def plugin() -> None:
    """Part of the entry point `sglang.srt.plugins`."""
    module = sys.modules.get(_SCHEDULER)
    if module is not None:
        guard_continue(module.Scheduler)


# --- beside trainer 0 ---


class SglangUpdates:
    """One SGLang engine. engine: has `loop` and `tokenizer_manager`, as sglang.Engine; or a str:
    where its server is, http://host:port. api_key: the server's admin key, where it has one.

    tp: its ranks. first, world_size: where they are among engine ranks of the fleet. direct: False
    where layers are quantized: SGLang's session restores and repacks them, and so loads all.
    """

    def __init__(
        self,
        engine: Any,
        fleet: Fleet,
        *,
        tp: int = 1,
        first: int = 0,
        world_size: int | None = None,
        direct: bool = True,
        api_key: str = "",
    ) -> None:
        self.fleet, self._ranks = fleet, range(first, first + tp)
        self._world_size, self._direct = world_size or tp, direct
        # Of its calls: SGLang's ranks may have answered another process of this name before.
        self._id, self._number = secrets.token_hex(4), 0
        self._call: Call = (
            over_http(engine, api_key, 2 * fleet.timeout_s)
            if isinstance(engine, str)
            else in_process(engine)
        )

    def opening(self) -> AbstractContextManager[None]:
        """Around the set-up of this process's trainer. At its end trainers and all ranks of the
        engine are connected; or it raises why SGLang refused, which all trainers have heard."""

        return beside(
            "SGLang", self._of_fleet, lambda: self._paused("open"), 2 * self.fleet.timeout_s
        )

    def send(
        self, version: int, update: Callable[[], object], *, requests: Requests = "keep"
    ) -> None:
        """update: runs `WeightTrainer.update(version)` of this process's trainer; others run
        theirs at the same time, and raise why SGLang refuses to begin. requests: what becomes of
        those in flight."""
        require(requests in PAUSES, f"requests is {requests!r}, must be one of {', '.join(PAUSES)}")
        in_place = self.fleet.mode == "in_place"
        try:
            self._begin(requests)
            update()
        except BaseException:
            self._end_failed()
            raise
        if not in_place:
            self._pause(requests)
        try:
            self._session("commit", version=version, flush=requests != "keep")
        finally:
            self.resume()

    def _begin(self, requests: Requests) -> None:
        try:
            if self.fleet.mode == "in_place":
                self._pause(requests)
                self._session("begin")
            else:
                self._paused("begin")
        except Exception as error:  # this process's trainer takes no part
            with contextlib.suppress(MoeP2pError):
                refuse_update(self._of_fleet(), "SGLang", error, instead_of=0)
            raise

    def _end_failed(self) -> None:
        """Ranks that have begun end their session; what is raised here is not the cause."""
        try:
            if self.fleet.mode == "shadow":
                self._pause("keep")
            with contextlib.suppress(ProtocolError):
                self._session("settle")  # it failed, too, and the session is over
            self.resume()
        except Exception as error:
            log.warning(f"SGLang stays as it is after an update that failed: {error}")

    def resume(self) -> None:
        """Raises ProtocolError, and SGLang stays paused, while a rank's tensors are a mix."""
        self._session("check")
        self._call("continue_generation", torch_empty_cache=False)

    @functools.cached_property
    def _answers(self) -> StoreKeys:
        return _words(self.fleet, self.fleet.store())

    def _of_fleet(self) -> StoreKeys:
        return StoreKeys(self._answers.client, prefix_of(self.fleet.name))

    def _pause(self, requests: Requests) -> None:
        self._call("pause_generation", mode=PAUSES[requests])

    def _paused(self, do: str) -> None:
        """Without a pause SGLang waits for requests in flight."""
        self._pause("keep")
        resumes = do != "begin" or self.fleet.mode == "shadow"
        try:
            self._session(do)
        except Exception:
            with contextlib.suppress(ProtocolError):  # the first error is the cause
                self.resume() if resumes else None
            raise
        if resumes:
            self.resume()

    def _session(self, do: str, *, version: int | None = None, flush: bool = False) -> None:
        """`load` on every rank, in a session where SGLang has to restore and repack layers."""
        self._number += 1
        with self._opened():
            self._call(
                "update_weights_from_tensor",
                serialized_named_tensors=[self._payload(do, rank) for rank in self._ranks],
                load_format=LOADER,
                flush_cache=flush,
                weight_version=None if version is None else str(version),
                selector="target",
            )
        self._raise_errors(do)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        self._call("begin_weight_update", selector="target")
        try:
            yield
        finally:
            self._call("end_weight_update")

    def _payload(self, do: str, rank: int) -> bytes:
        alone = len(self._ranks) == self._world_size
        call = {"do": do, "id": self._id, "number": self._number, "rank": rank,
                "engine": list(self._ranks),
                "world_size": self._world_size, "direct": self._direct,
                "set_up": f"{self._id} {self._number}" if alone else "",
                "fleet": asdict(self.fleet)}  # fmt: skip
        return payload(json.dumps(call).encode())

    def _raise_errors(self, do: str) -> None:
        keys = {f"{self._id} {rank}": f"generator {rank}" for rank in self._ranks}
        deadline, late = Deadline(self.fleet.timeout_s), list(keys)
        while late:
            found = self._answers.wait(keys, deadline)
            late = [key for key in keys if found[key]["number"] != self._number]
            if late and not deadline.left:
                text = f"{do}: within {deadline.timeout_s:g} s no answer of {keys[late[0]]}"
                raise make(TimeoutError, text)
            time.sleep(_LOOK_S if late else 0)
        errors = [each["error"] for each in found.values() if each["error"]]
        if errors:
            raise make(ProtocolError, f"{do}: {errors[0]}")
