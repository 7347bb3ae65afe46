"""One worker of benchmarks/kv_soak.py and kv_reclaim.py: a process that prefills or decodes.

Bytes follow from the number of a request, a layer and a token, so a decode worker knows what must
arrive, whatever the checksums say. It looks again a while after a request is complete, and at the
pages of its prefix cache: a write that lands late shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import TCPStore

from moe_p2p import AbortedError, Engine, EngineConfig, MoeP2pError, UnavailableError, kv
from moe_p2p.kv.footer import Slot, Slots
from tests.support.kv_fakes import cache_of
from tests.support.kv_mutations import mutated

LAYERS = 4
PAGE_TOKENS = {"prefill": 4, "decode": 8}
SHARED = 2  # pages of the decode side's prefix cache, which nothing may change
CACHED, FREE = 0xAB, 0xCC
LEASE_S = 8.0
FOUND_OUT_S = 20.0  # until a worker knows that it was replaced; it looks each LEASE_S / 4
PREEMPTED = "preempted, and begun anew"


@dataclasses.dataclass(frozen=True)
class Setting:
    role: str
    instance: str
    store_port: int
    transport: str
    settings: str
    timeouts: kv.KVTimeouts
    num_pages: int
    verify: str = "always"
    token_bytes: int = 64  # of a layer
    link: kv.KVLink | None = None
    device: str = "cpu"
    fence: str = "key"
    mutation: str = ""

    @property
    def layout(self) -> kv.KVLayout:
        """A page is its tokens one after the other, so that bytes are easily told."""
        layers, half = tuple(range(LAYERS)), self.token_bytes // 4
        tokens = PAGE_TOKENS[self.role]
        return kv.KVLayout((kv.KVGroup("kv", layers, 2, half, half, tokens),), "LBNHC")


@dataclasses.dataclass(frozen=True)
class Job:
    """One request, the same for both sides. cancel: side that gives it up, after so many seconds;
    prefix: tokens that the decode side has; ends: of the chunks of a chunked prefill."""

    number: int
    prefill: str
    decode: str
    total: int
    prefix: int
    ends: tuple[int, ...]
    pull: bool
    cancel: str = ""
    cancel_after_s: float = 0.0
    pause_s: float = 0.0  # of prefill, between layers
    preempted: bool = False  # prefill gives its pages up once, half way, and begins anew

    def name(self, attempt: int) -> str:
        return f"request {self.number}.{attempt}"


@dataclasses.dataclass
class Result:
    """What one side says of a job. end: "complete", "failed", "unavailable" or "wrong"."""

    number: int
    role: str
    end: str
    text: str = ""
    ended_at: float = 0.0  # it was cancelled, or failed; on this host's monotonic clock
    reusable_at: float = 0.0  # its pages were free
    packed: int = 0  # writes of packed rows
    preempted: bool = False
    lost: bool = False  # it failed because a worker was lost


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Says that a user gives the request of this job up now."""

    number: int


@dataclasses.dataclass(frozen=True)
class Leave:
    """The worker leaves once its requests have ended. replaced: another process has its name, so it
    finds out and leaves by itself."""

    replaced: bool = False


@dataclasses.dataclass(frozen=True)
class Left:
    """Its last word, with what has not come back. replaced: it has found out."""

    missing: int  # pages
    slots: int
    requests: int
    held: int  # pages of reservations
    replaced: bool


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the worker says to "pairs": by name of the other one, the tag that both have."""

    at: float
    tags: dict[str, int]


def stream(number: int, layer: int, nbytes: int) -> Tensor:
    at = torch.arange(nbytes)
    return ((at * 31 + (at >> 8) * 7 + number * 101 + layer * 57) % 251).to(torch.uint8)


class Pool:
    """Pages of one worker."""

    def __init__(self, pages: range) -> None:
        self._free = list(pages)
        self._all = len(pages)
        self._changed = threading.Condition()

    def take(self, count: int, timeout_s: float = 30.0) -> Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count, timeout_s):
                raise AssertionError(f"{count} pages are not free after {timeout_s} s")
            random.shuffle(self._free)
            taken = [self._free.pop() for _ in range(count)]
        return torch.tensor(taken, dtype=torch.int32)

    def give(self, pages: Tensor) -> None:
        with self._changed:
            self._free += pages.tolist()
            self._changed.notify_all()

    @property
    def num_missing(self) -> int:
        return self._all - len(self._free)


class Peer:
    def __init__(self, setting: Setting, pipe: Connection) -> None:
        self.setting, self.pipe = setting, pipe
        self.sending = threading.Lock()
        layout, self.token_bytes = setting.layout, setting.token_bytes
        config = EngineConfig(
            transport=setting.transport, transport_settings=setting.settings, nics_per_rank=1
        )
        self.device = torch.device(setting.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.engine = Engine(config, label=setting.instance, gpu=self.device.index)
        self.cache = cache_of(layout, 0, setting.num_pages, setting.device)
        self.page_tokens = layout.groups[0].page_size
        self.view = self.cache.tensors[0].view(LAYERS, setting.num_pages, -1)
        self.pool = Pool(range(SHARED, setting.num_pages))
        common: dict[str, Any] = {
            "instance": setting.instance,
            "timeouts": setting.timeouts,
            "link": setting.link,
            "fence": setting.fence,
            "max_requests": 16,  # so that slots are used again soon
        }
        if setting.role == "prefill":
            self.worker: Any = kv.KVSender(self.engine, self.cache, **common)
        else:
            self.worker = kv.KVReceiver(self.engine, self.cache, verify=setting.verify, **common)
            self.view[:, :SHARED], self.view[:, SHARED:] = CACHED, FREE
        store = TCPStore(
            "127.0.0.1", setting.store_port, is_master=False, timeout=timedelta(seconds=60)
        )
        leases = kv.TorchLeases(store, setting.timeouts.lease_s)
        self.keeper = kv.LeaseKeeper(self.worker, leases)
        self.jobs: list[threading.Thread] = []
        self.requests: dict[int, kv.KVSending | kv.KVReservation] = {}  # under way, by job

    def serve(self) -> None:
        self.say("ready")
        while True:
            message = self.pipe.recv()
            if isinstance(message, Leave):
                break
            if message == "pairs":
                with self.worker.lock:
                    tags = {name: pair.tag for name, pair in self.worker.pairs.items()}
                self.say(Pairs(time.monotonic(), tags))
                continue
            if isinstance(message, Cancel):
                if request := self.requests.get(message.number):
                    request.cancel("the user left")
                continue
            thread = threading.Thread(target=self._run, args=(message,), daemon=True)
            self.jobs.append(thread)
            thread.start()
            self.jobs = [each for each in self.jobs if each.is_alive()]
        for thread in self.jobs:
            thread.join(60)
        until = time.monotonic() + FOUND_OUT_S
        while message.replaced and not self.worker.replaced and time.monotonic() < until:
            time.sleep(0.01)
        self.keeper.close()
        prefill = self.setting.role == "prefill"
        left = Left(
            self.pool.num_missing,
            self.worker.slots.num_taken + self.worker.ring.slots.num_taken,
            len(self.worker.sendings if prefill else self.worker.reservations),
            0 if prefill else self.worker.holds.num_held,
            bool(self.worker.replaced),
        )
        self.engine.close()
        self.say(left)

    def say(self, what: Any) -> None:
        with self.sending:
            self.pipe.send(what)

    def _run(self, job: Job) -> None:
        result = Result(job.number, self.setting.role, "complete")
        prefill = self.setting.role == "prefill"
        try:
            try:
                self.worker.wait_for(job.decode if prefill else job.prefill, 3.0)
            except TimeoutError as error:
                result.end, result.text = "unavailable", str(error)
            else:
                run = self._prefill if prefill else self._decode
                if job.preempted:
                    run(job, result, 0)
                    result.preempted, result.ended_at = prefill, 0.0
                run(job, result, 1)
        except UnavailableError as error:
            result.end, result.text = "unavailable", str(error)
        except MoeP2pError as error:
            result.end, result.text = "failed", str(error)
            result.lost = "lost " in result.text or type(error).__name__ == "PeerDeadError"
        except BaseException:
            result.end, result.text = "wrong", traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):
            self.say(result)

    # --- prefill ---

    def _prefill(self, job: Job, result: Result, attempt: int) -> None:
        pages = self.pool.take(-(-job.total // self.page_tokens))
        try:
            sending = self.worker.start(
                job.name(attempt), job.decode, {"kv": pages}, total=job.total
            )
        except BaseException:
            self.pool.give(pages)
            raise
        self.requests[job.number] = sending
        began = time.monotonic()
        try:
            self._compute(job, sending, pages, began, preempted=attempt == 0)
            if attempt == 0:
                sending.cancel(PREEMPTED)
                return
            self._cancel(job, result, sending, began)
            sending.wait(60)
            result.packed = sum(each.packed_writes for each in sending.transfers)
        finally:
            del self.requests[job.number]
            result.ended_at = result.ended_at or time.monotonic()
            sending.wait_reusable(20)
            result.reusable_at = time.monotonic()
            self.view[:, pages.long()] = 0xEE  # whoever still reads them gets this
            self.pool.give(pages)

    @staticmethod
    def _time_to_cancel(job: Job, began: float) -> bool:
        return job.cancel == "prefill" and time.monotonic() - began >= job.cancel_after_s

    def _compute(
        self, job: Job, sending: kv.KVSending, pages: Tensor, began: float, *, preempted: bool
    ) -> None:
        page_bytes = self.page_tokens * self.token_bytes
        whole = torch.zeros(LAYERS, len(pages) * page_bytes, dtype=torch.uint8)
        for layer in range(LAYERS):
            whole[layer, : job.total * self.token_bytes] = stream(
                job.number, layer, job.total * self.token_bytes
            )
        rows = whole.view(LAYERS, len(pages), page_bytes)
        begin = 0
        for end in job.ends[:1] if preempted else job.ends:
            last = -(-end // self.page_tokens)
            for layer in range(LAYERS // 2 if preempted else LAYERS):
                self.view[layer, pages[begin:last].long()] = rows[layer, begin:last].to(self.device)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                if job.pause_s:
                    time.sleep(job.pause_s)
                if self._time_to_cancel(job, began):
                    return
                sending.layer(layer, end)
            begin = end // self.page_tokens
        if job.cancel != "prefill" and not preempted:
            sending.commit(b"token")

    # --- decode ---

    def _decode(self, job: Job, result: Result, attempt: int) -> None:
        """Of an attempt that prefill gives up: raises whatever else ended it."""
        prefix = job.prefix // self.page_tokens
        own = self.pool.take(-(-job.total // self.page_tokens) - prefix)
        self._check_marks(own)
        pages = torch.cat([torch.arange(prefix, dtype=torch.int32), own])
        given = threading.Event()
        try:
            reservation = self.worker.reserve(
                job.name(attempt),
                job.prefill,
                {"kv": pages},
                total=job.total,
                begin=job.prefix,
                pull=job.pull,
                on_free=given.set,
            )
        except BaseException:
            self._give_marked(own)
            raise
        self.requests[job.number] = reservation
        began = time.monotonic()
        try:
            if attempt == 0:
                with contextlib.suppress(AbortedError):
                    reservation.wait(60)
                    raise AssertionError("an attempt that was given up is complete")
                return
            self._cancel(job, result, reservation, began)
            if reservation.wait(60) != b"token":
                raise AssertionError("the footer is of another request")
            self._check(job, own)
            time.sleep(random.random() * 0.02)
            self._check(job, own)  # nothing has landed late
        finally:
            del self.requests[job.number]
            result.ended_at = result.ended_at or time.monotonic()
            reservation.wait_reusable(20)
            result.reusable_at = time.monotonic()
            if not given.is_set():
                raise AssertionError("pages are reusable, and on_free was not called")
            self._give_marked(own)

    def _give_marked(self, own: Tensor) -> None:
        """They belong to nobody: nothing may change them until they are taken again."""
        self.view[:, own.long()] = FREE
        self.pool.give(own)

    def _check_marks(self, pages: Tensor) -> None:
        if not bool((self.view[:, pages.long()] == FREE).all()):
            raise AssertionError("a write landed in pages that are free")
        if not bool((self.view[:, :SHARED] == CACHED).all()):
            raise AssertionError("a write landed in pages of the prefix cache")

    def _check(self, job: Job, own: Tensor) -> None:
        for layer in range(LAYERS):
            got = (
                self.view[layer, own.long()]
                .reshape(-1)[: (job.total - job.prefix) * self.token_bytes]
                .cpu()
            )
            if not torch.equal(
                got, stream(job.number, layer, job.total * self.token_bytes)[-len(got) :]
            ):
                raise AssertionError(f"request {job.number}: layer {layer} has wrong bytes")

    def _cancel(
        self, job: Job, result: Result, request: kv.KVSending | kv.KVReservation, began: float
    ) -> None:
        if job.cancel != self.setting.role:
            return
        while time.monotonic() - began < job.cancel_after_s and not request.done():
            time.sleep(0.001)
        result.ended_at = time.monotonic()
        request.cancel("given up" if job.cancel == "prefill" else "the user left")


def newest_first(self: Slots, slot: Slot) -> None:
    self._free.append(slot.number - self._first)


def main(setting: Setting, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionResetError), contextlib.ExitStack() as stack:
        if setting.mutation:
            stack.enter_context(mutated(setting.mutation))
            # What is late finds the next request in its slot, and not the one after many others.
            stack.enter_context(mock.patch.object(Slots, "give_back", newest_first))
        Peer(setting, pipe).serve()
