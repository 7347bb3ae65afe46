"""SGLang's prefill-decode disaggregation over moe_p2p.kv.

    MOE_P2P_ENGINES=1 MOE_P2P_KV_STORE=HOST:PORT python -m sglang.launch_server ... \\
        --disaggregation-mode prefill --disaggregation-transfer-backend mooncake

SGLang's list of transfer backends is closed, so install() puts these classes in the place of one of
them, by wrapping `get_kv_class`. SGLang's bootstrap server and its HTTP stay as they are: they say
which ranks and sizes a prefiller has. The workers find each other in the store.

A room is a request; so is each sample where n > 1, and the request before them that fills the
prefix cache: all have one room. Tokens are counted in whole pages, as SGLang counts them. What
SGLang calls aux, the first token and its like, is a group of state: one page a request.
"""

from __future__ import annotations

import functools
import ipaddress
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from moe_p2p import log
from moe_p2p.errors import (
    InvalidArgumentError,
    MoeP2pError,
    UnavailableError,
    make,
    require,
)
from moe_p2p.fleet import addresses
from moe_p2p.integrations import required
from moe_p2p.integrations.kv.worker import EngineWorker, KVReceiver, KVSender, serve_store
from moe_p2p.kv.layout import KVGroup, KVLayout
from moe_p2p.kv.memory import KVCache, Place
from moe_p2p.kv.receiver import KVReservation
from moe_p2p.kv.sender import KVSending
from moe_p2p.mooncake.memory import tensor_at

_COMMON = "sglang.srt.disaggregation.common.conn"
_UTILS = "sglang.srt.disaggregation.utils"
_DECODE = "sglang.srt.disaggregation.decode"
# Heads of a rank's pool and of the model, while a decoder's queue makes its KV manager.
_heads: ContextVar[tuple[int, int] | None] = ContextVar("moe_p2p_sglang_heads", default=None)
_ROOM_S = 60.0  # between two samples of a room; too short: they are taken for requests of others
_LOOK_S = 0.1  # most between two looks for what decoders have opened; arrivals end it
_FAILED, _WAITING, _TRANSFERRING, _SUCCESS = 0, 2, 3, 4  # KVPoll


def refuse(what: str, instead: str) -> MoeP2pError:
    return make(UnavailableError, f"moe_p2p does not carry {what}; {instead}")


def check_supported(manager: Any) -> None:
    """manager: of SGLang, with its sizes."""
    other = "use --disaggregation-transfer-backend nixl"
    if manager.pp_size > 1 and manager.disaggregation_mode.value != "prefill":
        raise refuse(f"pp_size={manager.pp_size} of a server that decodes", other)
    for name in ("attn_cp_size", "dcp_size", "kv_shard_size"):
        if getattr(manager, name) > 1:
            raise refuse(f"{name}={getattr(manager, name)}", other)
    args = manager.kv_args
    if args.state_types:
        names = ", ".join(str(getattr(kind, "value", kind)) for kind in args.state_types)
        raise refuse(f"state components ({names})", other)
    if getattr(args, "num_draft_entries", 0):
        raise refuse("KV of a draft model", f"start without speculative decoding, or {other}")
    if manager.defer_decode_allocation:
        raise refuse(
            "--disaggregation-decode-allocation-policy prefill_complete", "leave it at early"
        )


def layers_in(args: Any, mla: bool) -> int:
    """KVArgs have K of all layers, then V; a latent is one buffer a layer."""
    return len(args.kv_item_lens) // (1 if mla else 2)


def sglang_cache(
    args: Any, *, tp: int, rank: int, mla: bool, stages: Sequence[int] = (), stage: int = 0
) -> KVCache:
    """Makes it from KVArgs. stages: layers of each pipeline stage; (): there is one. The last stage
    computes the first token, so it has aux."""
    items, page, count = args.kv_item_lens, args.page_size, layers_in(args, mla)
    stages = stages or (count,)
    total, is_last = sum(stages), stage == len(stages) - 1
    require(
        len(set(items[:count])) == 1 and len(set(items[count:])) <= 1,
        f"sglang_kv: layers differ in their bytes a page: {sorted(set(items))}",
    )
    local, heads = (1, 1) if mla else _heads_of(args)
    sizes = [items[0] // page // local, 0 if mla else items[count] // page // local]
    layers = tuple(range(total))
    groups = [KVGroup("kv", layers, heads, k_bytes=sizes[0], v_bytes=sizes[1], page_size=page)]
    places: list[tuple[tuple[Place, ...], ...]] = [
        tuple(
            (Place(at, 0),) if mla else (Place(at, 0), Place(count + at, 0)) for at in range(count)
        )
    ]
    pages = {"kv": args.kv_data_lens[0] // items[0]}
    for at, size in enumerate(args.aux_item_lens):
        name = f"aux{at}"
        groups.append(KVGroup(name, (total + at,), 1, size, 0, page_size=1, kind="state"))
        places.append(((Place(len(items) + at, 0),),) if is_last else ())
        pages[name] = args.aux_data_lens[at] // size
    buffers = zip(
        [*args.kv_data_ptrs, *args.aux_data_ptrs],
        [*args.kv_data_lens, *args.aux_data_lens],
        strict=True,
    )
    layout = KVLayout(
        tuple(groups),
        order="NHD",
        kv_split="layer",
        tp=tp,
        pp=len(stages),
        stages=(*stages[:-1], stages[-1] + len(args.aux_item_lens)),
    )
    tensors = tuple(tensor_at(address, size) for address, size in buffers)
    return KVCache(layout, stage * tp + rank, tuple(places), tensors, pages)


def _heads_of(args: Any) -> tuple[int, int]:
    """Returns heads of a rank, and of the model. Only prefillers have them in KVArgs."""
    known = _heads.get()
    if known is None and hasattr(args, "kv_head_num"):
        known = args.kv_head_num, args.total_kv_head_num
    if known is None:
        raise make(
            UnavailableError,
            "sglang_kv: neither KVArgs nor DecodePreallocQueue say how many KV heads a rank has: "
            "use a version of SGLang that docs/engines.md names",
        )
    return known


def _hand_over_heads(queue: Any) -> None:
    """queue: the class that makes a decoder's KV manager, and knows its pool."""
    init = queue._init_kv_manager

    @functools.wraps(init)
    def init_kv_manager(self: Any) -> Any:
        pool = getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool)
        count = getattr(pool, "head_num", 0)
        total = self.scheduler.model_config.get_total_num_kv_heads() if count else 0
        token = _heads.set((count, total) if count else None)
        try:
            return init(self)
        finally:
            _heads.reset(token)

    queue._init_kv_manager = init_kv_manager


def instance_of(host: str, port: int, dp_rank: int, own_ip: str) -> str:
    """Names a prefiller by its bootstrap server's address, as its ranks and decoders see it."""
    try:
        ip = addresses.resolve(host)
    except InvalidArgumentError as error:  # perhaps only for now: receivers try again
        raise make(UnavailableError, f"sglang_kv: {error}") from error
    seen = ipaddress.ip_address(ip.partition("%")[0])
    if seen.is_loopback or seen.is_unspecified:
        ip = own_ip
    return f"{addresses.join(ip, port)}:dp{dp_rank}"


class Manager:
    """CommonKVManager of a rank, with its KVSender or KVReceiver."""

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: Any = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)  # type: ignore[call-arg]
        this: Any = self  # SGLang's attributes
        this.enable_deferred_decode_kv_release = True  # until `is_abort_release_safe`
        check_supported(this)
        store = kv_store()
        prefills = mode.value == "prefill"
        if prefills:
            host = this.bootstrap_host
            if this.dist_init_addr:
                host, _ = addresses.split(this.dist_init_addr, "SGLang's dist_init_addr")
            name = instance_of(host, this.bootstrap_port, this.attn_dp_rank, this.local_ip)
        else:
            host = this.dist_init_addr or addresses.join(this.local_ip, server_args.port)
            name = f"decode {host}:dp{this.attn_dp_rank}"
        mla = bool(is_mla_backend)
        stages = this.pp_group.all_gather_object(layers_in(args, mla)) if this.pp_size > 1 else ()
        cache = sglang_cache(
            args,
            tp=this.attn_tp_size,
            rank=this.attn_tp_rank,
            mla=mla,
            stages=stages,
            stage=this.pp_rank,
        )
        # SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, SGLANG_DISAGGREGATION_WAITING_TIMEOUT
        limit_s = this.bootstrap_timeout if prefills else this.waiting_timeout
        self.own = EngineWorker(
            KVSender if prefills else KVReceiver, cache, name, store, {}, float(limit_s)
        )
        self.worker: Any = self.own.worker
        self.reservations: dict[int, list[KVReservation]] = {}  # by room, of this decoder
        self.rooms = Rooms()
        # SGLang's first pipeline stage decides when a request begins, by the states of all stages;
        # others poll no sender before. Theirs change here, as soon as a decoder opens a request.
        self._unopened: set[Sender] | None = set() if stages and this.pp_rank else None
        self._looking, self._closed = threading.Lock(), False
        if self._unopened is not None:
            threading.Thread(target=self._watch, daemon=True, name=self.worker.name).start()

    def watch(self, sender: Sender) -> None:
        if self._unopened is not None:
            with self._looking:
                self._unopened.add(sender)
            sender.is_opened()  # it may have been, before there was a sender

    def unwatch(self, sender: Sender) -> None:
        """When it returns, no other thread makes a room of it."""
        if self._unopened is not None:
            with self._looking:
                self._unopened.discard(sender)

    def _watch(self) -> None:
        assert self._unopened is not None
        worker = self.worker
        while not self._closed:
            with worker.lock:
                with self._looking:
                    self._unopened -= {each for each in self._unopened if each.is_opened()}
                worker.changed.wait(_LOOK_S)

    def pages(self, kv: Any, aux: int | None, skipped: int) -> dict[str, torch.Tensor]:
        """skipped: pages before them, which the decoder has."""
        numbers = [0] * skipped + [int(page) for page in kv]
        found = {"kv": torch.tensor(numbers, dtype=torch.int32, device="cpu")}
        for group in self.worker.cache.layout.groups[1:]:
            found[group.name] = torch.tensor([aux or 0], dtype=torch.int32, device="cpu")
        return found

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no write can land in the pages of an aborted room."""
        found = self.reservations.get(bootstrap_room, [])
        return all(each.reusable for each in found if each.error is not None)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        found = [each for each in self.reservations.pop(bootstrap_room, []) if not each.reusable]
        if found:
            self.reservations[bootstrap_room] = found

    def teardown(self) -> None:
        """SGLang's, where a scheduler gives up its role. The garbage collector would wait for ever
        for a ZMQ context whose sockets are open."""
        self._closed = True
        self.own.close()
        this: Any = self
        this._zmq_ctx.destroy(linger=0)
        if this.pp_size > 1:
            this.request_status.close()


class Rooms:
    """Numbers the requests of a room as they come.

    All ranks of both servers get them in one order, so equal numbers are the same request. A room
    is forgotten when none of its requests has begun or ended for a while. Until then a room that
    only one of the servers has seen cannot be used again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[int, tuple[int, float]] = {}  # and since when, in this order

    def take(self, room: int) -> int:
        number = self._next.get(room, (0, 0.0))[0]
        self.used(room, number)
        return number

    def used(self, room: int, number: int) -> None:
        before = self._next.pop(room, (0, 0.0))[0]
        now = self._clock()
        self._next[room] = max(before, number + 1), now
        for other, (_, since) in list(self._next.items()):
            if now - since <= _ROOM_S:
                break
            del self._next[other]


class Sample:
    """A request of a room. SGLang's managers know it by a number of its own, their `room`."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more: Any, **by: Any):
        self._room, self._number = bootstrap_room, mgr.rooms.take(bootstrap_room)
        own = bootstrap_room
        # Routers draw rooms from 63 bits, so that no other one has it; SGLang's stages tell each
        # other numbers of 64. The DP rank that follows from it is the same.
        if self._number:
            own -= (self._number << 40) * required(_COMMON, "sglang").get_parallel().num_dp_ranks
        super().__init__(mgr, bootstrap_addr, own, *more, **by)  # type: ignore[call-arg]

    @property
    def _name(self) -> str:
        return f"{self._room}+{self._number}" if self._number else str(self._room)

    def clear(self) -> None:
        super().clear()  # type: ignore[misc]
        this: Any = self
        this.kv_mgr.rooms.used(self._room, self._number)


class Sender(Sample):
    """CommonKVSender of one room."""

    _sending: KVSending | None = None
    _refused = False  # by `init`
    _skipped = 0  # pages that the decoder has
    _pages: list[int]

    def __init__(self, mgr: Any, *given: Any, **by: Any) -> None:
        super().__init__(mgr, *given, **by)
        mgr.watch(self)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)  # type: ignore[misc]
        this: Any = self
        this.kv_mgr.unwatch(self)
        self._pages = []
        size = this.kv_mgr.kv_args.page_size
        total = (self._skipped + num_kv_indices) * size
        pages = this.kv_mgr.pages([], aux_index, self._skipped)
        try:
            self._sending = this.kv_mgr.worker.start(self._name, None, pages, total=total)
        except MoeP2pError as error:
            log.warning(f"{this.kv_mgr.worker.name}: room {self._name} failed: {error}")
            this.kv_mgr.record_failure(this.bootstrap_room, str(error))
            self._refused, this.conclude_state = True, _FAILED

    def send(
        self,
        kv_indices: Any,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        this: Any = self
        manager, sending = this.kv_mgr, self._sending
        if sending is None:  # refused by `init`
            return
        for event in (this._early_send_wait_event, indices_event):
            if event is not None:
                event.synchronize()  # bytes, or page numbers, are there
        this._early_send_wait_event = None
        if sending.error is not None:
            return
        self._pages += [int(page) for page in kv_indices]
        end = (self._skipped + len(self._pages)) * manager.kv_args.page_size
        try:
            sending.add_pages(manager.pages(self._pages, this.aux_index, self._skipped))
            for layer in sending.layers:
                sending.layer(layer, end)
            if end == sending.total:
                sending.commit()
        except MoeP2pError as error:
            log.info(f"{manager.worker.name}: {error}")
            sending.cancel(str(error))

    def _register_prefill_dp_rank(self) -> None:
        """SGLang's decoders ask for the room's."""
        this: Any = self
        own, this.bootstrap_room = this.bootstrap_room, self._room
        try:
            super()._register_prefill_dp_rank()  # type: ignore[misc]
        finally:
            this.bootstrap_room = own

    def get_transfer_metric(self) -> Any:
        metric = required("sglang.srt.disaggregation.base.conn", "sglang").KVTransferMetric
        if self._sending is None:
            return metric()
        stats = self._sending.stats
        return metric(transfer_latency_s=stats.transfer_s, transfer_total_bytes=stats.nbytes)

    def poll(self) -> Any:
        if self.conclude_state is None:  # type: ignore[attr-defined]
            self._look()
        return super().poll()  # type: ignore[misc]

    def poll_pp_consensus(self) -> Any:
        """Of all stages, in the first one."""
        if self.conclude_state is None:  # type: ignore[attr-defined]
            self._look()
        return super().poll_pp_consensus()  # type: ignore[misc]

    def is_opened(self) -> bool:
        """By a decoder, which then waits for it."""
        this: Any = self
        manager, room = this.kv_mgr, this.bootstrap_room
        begin = manager.worker.begin_of(self._name)
        if begin is None:
            return False
        self._skipped = begin // manager.kv_args.page_size
        manager.req_to_decode_prefix_len.setdefault(room, begin)
        manager.update_status(room, _WAITING)
        return True

    def _look(self) -> None:
        this: Any = self
        manager, room, sending = this.kv_mgr, this.bootstrap_room, self._sending
        if sending is None:
            self.is_opened()
            return
        if self._pages:
            manager.update_status(room, _TRANSFERRING)
        if not (sending.done() and sending.reusable):
            return
        if sending.error is not None:
            manager.record_failure(room, str(sending.error))
        manager.update_status(room, _SUCCESS if sending.error is None else _FAILED)

    def clear(self) -> None:
        this: Any = self
        this.kv_mgr.unwatch(self)
        super().clear()

    def abort(self) -> None:
        """When it returns, nothing reads the pages."""
        this: Any = self
        this.kv_mgr.unwatch(self)
        super().abort()  # type: ignore[misc]
        worker = this.kv_mgr.worker
        if self._sending is None:
            if not self._refused:
                worker.give_up(self._name, "aborted at the prefiller")
            return
        self._sending.cancel("aborted at the prefiller")
        try:
            self._sending.wait_reusable()
        except MoeP2pError as error:  # its decoder knows: bytes that it reads later are not used
            log.warning(f"{worker.name}: pages are used again, {error}")


class Receiver(Sample):
    """CommonKVReceiver of one room."""

    _reservation: KVReservation | None = None
    _wanted: dict[str, Any] | None = None  # not reserved yet, because not connected yet
    _until = 0.0

    def _register_kv_args(self) -> bool:
        return True  # workers exchange it when they meet

    @property
    def _source(self) -> str:
        this: Any = self
        host, port = addresses.split(this.bootstrap_addr, "SGLang's bootstrap_addr")
        return instance_of(host, port, this.prefill_dp_rank, this.kv_mgr.local_ip)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
        device_kv_indices: Any = None,
    ) -> None:
        this: Any = self
        manager = this.kv_mgr
        size, begin = manager.kv_args.page_size, decode_prefix_len or 0
        why = ""
        if getattr(destination, "value", "device") != "device":
            why = str(refuse("KV pages in host memory", "leave host destinations off"))
        elif begin % size or not len(kv_indices):
            why = f"decode_prefix_len={begin} must be whole pages of {size} tokens, not the prompt"
        if why:
            self._fail(why)
            self._send_abort_notification()
            return
        pages = manager.pages(kv_indices, aux_index, begin // size)
        self._wanted = {"pages": pages, "total": len(pages["kv"]) * size, "begin": begin}
        self._until = manager.worker.clock() + manager.worker.timeouts.connect_s
        this.init_time = None  # deadlines are those of KVTimeouts
        self._reserve()

    def _reserve(self) -> None:
        this: Any = self
        manager, wanted = this.kv_mgr, self._wanted
        assert wanted is not None
        try:
            self._reservation = manager.worker.reserve(self._name, self._source, **wanted)
            manager.reservations.setdefault(self._room, []).append(self._reservation)
        except UnavailableError as error:
            if manager.worker.clock() < self._until:
                return
            self._fail(str(error))
        except MoeP2pError as error:
            self._fail(str(error))
        self._wanted = None

    def _fail(self, why: str) -> None:
        this: Any = self
        log.warning(f"{this.kv_mgr.worker.name}: room {self._name} failed: {why}")
        this.kv_mgr.record_failure(this.bootstrap_room, why)
        this.kv_mgr.update_status(this.bootstrap_room, _FAILED)

    def poll(self) -> Any:
        if self.conclude_state is None:  # type: ignore[attr-defined]
            self._look()
        return super().poll()  # type: ignore[misc]

    def _look(self) -> None:
        this: Any = self
        if self._wanted is not None:
            self._reserve()
        reservation = self._reservation
        if reservation is None:
            return
        this.kv_mgr.update_status(this.bootstrap_room, _TRANSFERRING)
        if not reservation.done():
            return
        if reservation.error is None:
            self._forget(reservation)
            this.kv_mgr.update_status(this.bootstrap_room, _SUCCESS)
        elif reservation.reusable:
            self._fail(str(reservation.error))

    def _forget(self, reservation: KVReservation) -> None:
        this: Any = self
        of_room = this.kv_mgr.reservations.get(self._room, [])
        if reservation in of_room:
            of_room.remove(reservation)
        if not of_room:
            this.kv_mgr.reservations.pop(self._room, None)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Then pages are free once `is_abort_release_safe` says so."""
        this: Any = self
        why, self._wanted = "aborted at the decoder", None
        if self._reservation is not None:
            self._reservation.cancel(why)
            return
        try:
            this.kv_mgr.worker.decline(self._name, self._source, why)
        except MoeP2pError as error:
            log.info(f"{this.kv_mgr.worker.name}: {error}")


class BootstrapServer:
    """CommonKVBootstrapServer; it serves the store too, where the store's host is this one."""

    def __init__(self, host: str, port: int) -> None:
        serve_store(kv_store())
        super().__init__(host, port)  # type: ignore[call-arg]


def kv_store() -> str:
    from moe_p2p import env

    store = env.kv_store()
    require(
        bool(store),
        "MOE_P2P_KV_STORE is not set: name the store of KV workers, HOST:PORT, the same for all "
        "prefill and decode servers",
    )
    return store


@functools.cache
def classes() -> dict[str, type]:
    """Ours by the value of KVClassType. Raises for methods that they would have to have."""
    common = required(_COMMON, "sglang")
    made = {}
    for kind, ours, base in (
        ("manager", Manager, common.CommonKVManager),
        ("sender", Sender, common.CommonKVSender),
        ("receiver", Receiver, common.CommonKVReceiver),
        ("bootstrap_server", BootstrapServer, common.CommonKVBootstrapServer),
    ):
        made[kind] = type(base)(f"MoeP2pKV{ours.__name__}", (ours, base), {"__doc__": ours.__doc__})
        missing = sorted(getattr(made[kind], "__abstractmethods__", ()))
        if missing:
            raise make(
                UnavailableError,
                f"this SGLang asks a KV {kind} for {', '.join(missing)}, which moe_p2p does not "
                "have: use a version of SGLang that docs/engines.md names",
            )
    return made


def install(backend: str = "mooncake") -> None:
    """From now on `--disaggregation-transfer-backend` of this name means moe_p2p."""
    utils = required(_UTILS, "sglang")
    theirs = utils.get_kv_class
    if getattr(theirs, "moe_p2p_backend", None) == backend:
        return

    def get_kv_class(transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend.value == backend and class_type.value in classes():
            return classes()[class_type.value]
        return theirs(transfer_backend, class_type)

    get_kv_class.moe_p2p_backend = backend  # type: ignore[attr-defined]
    if not hasattr(theirs, "moe_p2p_backend"):
        _hand_over_heads(required(_DECODE, "sglang").DecodePreallocQueue)
    for module in list(sys.modules.values()):  # SGLang imports it by name
        if getattr(module, "__name__", "").startswith("sglang.") and (
            module.__dict__.get("get_kv_class") is theirs
        ):
            module.get_kv_class = get_kv_class  # type: ignore[attr-defined]
