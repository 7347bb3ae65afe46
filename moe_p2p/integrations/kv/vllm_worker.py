"""A worker's half of MoeP2pConnector: sends layers, awaits them, and reports when blocks are free.

vLLM may give blocks to another request after a transfer is reported as over. So nothing is reported
before the pages are reusable, however the transfer ended: after a failure or an abort that takes a
round trip, or drain_s and a fence (docs/kv.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from moe_p2p import log
from moe_p2p.errors import MoeP2pError, UnavailableError
from moe_p2p.integrations import required
from moe_p2p.integrations.kv.vllm_layout import VllmCache, vllm_cache
from moe_p2p.integrations.kv.vllm_scheduler import Load, SendStep, StepMeta, attempt_name
from moe_p2p.integrations.kv.worker import EngineWorker, KVReceiver, KVSender
from moe_p2p.kv.receiver import KVReservation
from moe_p2p.kv.sender import KVSending
from moe_p2p.kv.signals import KVSignals
from moe_p2p.kv.stats import KVTotals, TransferState
from moe_p2p.kv.worker import KVWorker

_Worker = TypeVar("_Worker", bound=KVWorker)

PREEMPTED = "preempted at the prefiller, which begins anew"
ABORTED = "aborted at the prefiller"
ASLEEP = "the engine goes to sleep"


@dataclass
class _Loading:
    load: Load
    until: float  # to connect
    attempt: int = 0
    reservation: KVReservation | None = None
    aborted: bool = False


@dataclass
class Results:
    """Ids of requests whose blocks may be used or freed; `failed` are in `received`."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class KVWorkerHalf:
    def __init__(self, config: Any, caches: Any, engine_id: str, store: str) -> None:
        self._config, self._caches = config, caches
        self._engine_id, self._store = engine_id, store
        self._transfer = config.kv_transfer_config
        self._own: list[EngineWorker[Any]] = []  # of each role, with an Engine of its own
        self._sender: KVSender | None = None
        self._receiver: KVReceiver | None = None
        self._cache: VllmCache | None = None
        self._sends: dict[str, KVSending] = {}
        self._finished: set[str] = set()  # of the sends: the scheduler waits for their blocks
        self._step: dict[str, tuple[KVSending, SendStep]] = {}
        self._signals: KVSignals | None = None  # of a prefiller
        self._refused: set[str] = set()  # requests that are computed and not sent
        self._moving: set[str] = set()  # as the scheduler knows them
        self._signalled: set[int] = set()  # layers, in this step
        self._tensors: dict[int, Tensor] = {}  # by layer
        self._reported = KVTotals()
        self._loads: dict[str, _Loading] = {}
        self._declined: dict[str, tuple[str, float]] = {}  # instance and until when, by name
        self._bad_blocks: set[int] = set()

    def register(self, tensors: Mapping[str, Tensor]) -> None:
        self._cache = vllm_cache(self._config, self._caches, tensors)
        # Of vLLM's own connectors: how long a prefiller keeps blocks that nobody asks for.
        limit_s = getattr(
            required("vllm.envs", "vllm"), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", None
        )
        self._tensors = {number: tensors[name] for name, number in self._cache.layers.items()}

        def worker(kind: type[_Worker]) -> _Worker:
            settings = self._transfer.kv_connector_extra_config
            given = self.cache.cache, self._engine_id, self._store
            made = EngineWorker(kind, *given, settings, limit_s)
            self._own.append(made)
            return made.worker

        if self._transfer.is_kv_producer:
            self._sender = worker(KVSender)
            self._signals = KVSignals(self.sender)
        if self._transfer.is_kv_consumer:
            self._receiver = worker(KVReceiver)

    def unregister(self) -> None:
        """Before sleep mode unmaps the cache: what is under way fails, and peers are fenced."""
        for sending in self._sends.values():
            sending.cancel(ASLEEP)
        for loading in self._loads.values():
            if loading.reservation is not None:
                loading.reservation.cancel(ASLEEP)
        for own in self._own:
            own.leave()

    def restore(self) -> None:
        for own in self._own:
            own.join()

    @property
    def sender(self) -> KVSender:
        assert self._sender is not None, "register_kv_caches comes first, of a prefiller"
        return self._sender

    @property
    def receiver(self) -> KVReceiver:
        assert self._receiver is not None, "register_kv_caches comes first, of a decoder"
        return self._receiver

    @property
    def cache(self) -> VllmCache:
        assert self._cache is not None, "register_kv_caches comes first"
        return self._cache

    # --- prefill ---

    def preempt(self, meta: StepMeta) -> None:
        """When it returns, nothing reads pages that this step may overwrite."""
        for request in meta.preempted:
            sending = self._sends.pop(request, None)
            if sending is None:
                continue
            sending.cancel(PREEMPTED)
            self._take_back(sending)

    def begin_step(self, meta: StepMeta) -> None:
        """Before the forward pass. Its layers are sent when their signals come: from Python, from a
        replayed graph, or from `end_step`."""
        self._step = {}
        for request, step in meta.sends.items():
            try:
                self._begin_send(request, step)
            except MoeP2pError as error:  # a name that is under way, say: others go on
                log.warning(f"{self.sender.name}: request {request!r} is not sent: {error}")
                if request not in self._sends:
                    self._refused.add(request)
        self._signalled.clear()
        if self._signals is None:
            return
        try:
            self._signals.begin_step([(sending, step.end) for sending, step in self._step.values()])
        except MoeP2pError as error:
            self._give_up(str(error))

    def _begin_send(self, request: str, step: SendStep) -> None:
        pages = self.cache.pages(step.blocks)
        if step.first:
            self._sends[request] = self.sender.start(step.name, None, pages, total=step.total)
        sending = self._sends.get(request)
        if sending is None or sending.error is not None:
            return
        try:
            sending.add_pages(pages)
        except MoeP2pError as error:
            sending.cancel(str(error))
            raise
        self._step[request] = (sending, step)

    def _take_back(self, sending: KVSending) -> None:
        """Its receiver knows that it failed, so later reads give wrong bytes to nobody: the
        engine goes on where the fence does not succeed in time."""
        try:
            sending.wait_reusable()
        except MoeP2pError as error:
            log.warning(f"{self.sender.name}: pages are used again, {error}")

    def _give_up(self, why: str) -> None:
        """Requests of this step are still computed here; their decoders get the error."""
        log.warning(f"{self.sender.name}: {why}")
        for sending, _ in self._step.values():
            sending.cancel(why)
        self._step = {}

    def capturing(self) -> bool:
        return self._signals is not None and self._signals.capturing()

    def save_layer(self, name: str) -> None:
        number = self.cache.layers.get(name)
        if self._signals is not None and number is not None:
            self._signals.signal(number, self._tensors[number])
            self._signalled.add(number)

    def end_step(self) -> None:
        """After the forward pass. Layers that Python did not signal are signalled now: where a
        graph without signals was replayed, they are sent at its end; else nothing happens twice."""
        if self._signals is None or not self._step:
            return
        for number, tensor in self._tensors.items():
            if number not in self._signalled:
                self._signals.signal(number, tensor)
        self._signals.end_step()
        for sending, step in self._step.values():
            if step.end != step.total or sending.error is not None:
                continue
            try:
                sending.commit()
            except MoeP2pError as error:
                log.info(f"{self.sender.name}: {error}")
                sending.cancel(str(error))
        self._step = {}

    # --- decode ---

    def start_loads(self, meta: StepMeta) -> None:
        for request, name in meta.aborted.items():
            self._abort_send(request, name)
        if self._receiver is None:
            return
        until = self.receiver.clock() + self.receiver.timeouts.connect_s
        for request, load in meta.loads.items():
            self._loads[request] = _Loading(load, until)
        for name, source in meta.declined.items():
            self._declined[name] = (source, until)

    def _abort_send(self, request: str, name: str) -> None:
        sending = self._sends.get(request)
        if sending is not None:
            sending.cancel(ABORTED)
        elif (
            request not in self._refused
        ):  # it has no pages; a decoder may wait for it all the same
            self.sender.give_up(name, ABORTED)

    def _decline(self) -> None:
        for name, (source, until) in list(self._declined.items()):
            try:
                self.receiver.decline(attempt_name(name, 0), source, "the decoder does not need it")
            except UnavailableError:
                if self.receiver.clock() < until:
                    continue  # not connected yet
            except MoeP2pError as error:
                log.info(f"{self.receiver.name}: {error}")
            del self._declined[name]

    def _look_at(self, loading: _Loading) -> str | None:
        """None while blocks may be written; else empty, or why it failed."""
        load, reservation = loading.load, loading.reservation
        if reservation is None:
            return "aborted" if loading.aborted else self._reserve(loading)
        if not reservation.done():
            return None
        if reservation.error is None:
            return ""
        if not reservation.reusable:
            return None
        why = str(reservation.error)
        if PREEMPTED in why and not loading.aborted:
            loading.attempt += 1
            loading.reservation = None
            return self._reserve(loading)
        log.warning(f"{self.receiver.name}: request {load.name!r} failed: {why}")
        return why

    def _reserve(self, loading: _Loading) -> str | None:
        load = loading.load
        try:
            loading.reservation = self.receiver.reserve(
                attempt_name(load.name, loading.attempt),
                load.source,
                self.cache.pages(load.blocks),
                total=load.total,
                begin=load.begin,
            )
        except UnavailableError as error:
            if self.receiver.clock() < loading.until:
                return None  # not connected yet
            return self._failed(load, error)
        except MoeP2pError as error:
            return self._failed(load, error)
        return None

    def _failed(self, load: Load, error: MoeP2pError) -> str:
        log.warning(f"{self.receiver.name}: request {load.name!r} failed: {error}")
        return str(error)

    # --- results ---

    def results(self, finished: set[str], *, by_block: bool) -> Results:
        """by_block: failures are reported as blocks (`take_bad_blocks`), not as requests."""
        self._decline()
        found = Results(set(), set(), set())
        self._finished |= finished & set(self._sends)
        found.sent.update(finished & self._refused)
        self._refused -= finished
        for request in list(self._finished):
            sending = self._sends[request]
            if sending.done() and sending.reusable:
                self._finished.remove(request)
                del self._sends[request]
                found.sent.add(request)
        for request, loading in list(self._loads.items()):
            if request in finished and not loading.aborted:
                loading.aborted = True
                if loading.reservation is not None:
                    loading.reservation.cancel("aborted at the decoder")
                else:
                    self._declined[loading.load.name] = (loading.load.source, loading.until)
            why = self._look_at(loading)
            if why is None:
                continue
            del self._loads[request]
            found.received.add(request)
            if why and not loading.aborted:
                if by_block:
                    self._bad_blocks |= self._loaded_blocks(loading.load)
                else:
                    found.failed.add(request)
        return found

    def take_moving(self) -> set[str] | None:
        """Sends that end soon: all their receivers have opened them, or they have failed and drain.
        None: there are still none."""
        found = set()
        for request, sending in self._sends.items():
            states = [each.state for each in sending.transfers]
            if sending.error is not None or (states and TransferState.WAITING not in states):
                found.add(request)
        before, self._moving = self._moving, found
        return found if found or before else None

    def _loaded_blocks(self, load: Load) -> set[int]:
        spec = self._caches.transfer_groups[0].kv_cache_spec
        return set(
            load.blocks[0][load.begin // spec.block_size : -(-load.total // spec.block_size)]
        )

    def take_bad_blocks(self) -> set[int]:
        found, self._bad_blocks = self._bad_blocks, set()
        return found

    def new_totals(self) -> KVTotals:
        """Since the last call."""
        now = KVTotals()
        for own in self._own:
            now = now + own.worker.totals
        found, self._reported = now - self._reported, now
        return found

    def close(self) -> None:
        if self._signals is not None:
            self._signals.close()
        while self._own:
            self._own.pop().close()
