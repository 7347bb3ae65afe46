"""What `KVSender` and `KVReceiver` have in common: their pairs, the clock, and losing a pair.

No thread lives here. Messages, deadlines and fences are handled by whoever calls `on_message` and
`step`: threads of moe_p2p/kv/lease_keeper.py, or a test that decides about each step itself. Any
thread may call any method.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypedDict

import torch

from moe_p2p import env, errors, log
from moe_p2p.engine import checksum
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.metrics import Family, counter, note
from moe_p2p.errors import AbortedError, UnavailableError, make, require, require_type
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.late import Late, Wait
from moe_p2p.kv.channel import Message
from moe_p2p.kv.footer import footer_bytes, slots_for
from moe_p2p.kv.link import KVLink, link_of
from moe_p2p.kv.memory import KVCache
from moe_p2p.kv.pair import (
    KEY,
    QUEUE_PAIR,
    Hello,
    Pair,
    PairMemory,
    Sends,
    Worker,
    agreed_link,
    make_pair,
)
from moe_p2p.kv.ring import Ring
from moe_p2p.kv.stats import KVTotals, KVTransferStats, RequestState, families_of
from moe_p2p.machine import phases

QUICK_S, SLOW_S = 0.0002, 0.02  # between looks, while something drains or is packed, and else
MOST_S = 1e6  # waits of Python's threads overflow beyond some years
MOST_TOKENS = (1 << 32) - 1  # of a footer
_LOOK_S = 0.25  # between two looks for waits that are late
RETRY_S = 0.5  # between two tries of a fence: each may take so long itself
LAST_WORDS_S = 0.5  # of a worker that leaves, to peers that do not read them


@dataclass(frozen=True)
class KVTimeouts:
    """Deadlines in seconds; each has an error text of its own.

    connect_s: of a meeting of two workers. open_s: until the first byte of a request, or, at a
    sender, until its receivers have opened it. tail_s: since something of the request last arrived.
    layers_s: of a step, at a sender, until the signal of its last layer. drain_s: how long a
    cancelled request may drain before the pair is fenced. lease_s: after which a worker that renews
    nothing is gone.
    """

    connect_s: float = 10.0
    open_s: float = 30.0
    layers_s: float = 30.0
    tail_s: float = 30.0
    drain_s: float = 0.25
    lease_s: float = 5.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(
                type(value) in (int, float) and 0 < value <= MOST_S,
                f"KVTimeouts.{each.name} is {value!r}, must be a positive number of seconds, up to "
                f"{MOST_S:g}",
            )


class Options(TypedDict, total=False):
    """Of a `KVWorker`."""

    timeouts: KVTimeouts | None
    max_requests: int
    link: KVLink | None
    fence: str | None
    clock: Callable[[], float]


class Request(Protocol):
    """A `KVSending` or a `KVReservation`."""

    reusable: bool
    state: RequestState
    request: str
    stats: KVTransferStats

    def text(self, why: str) -> str: ...

    def facts(self) -> dict[str, Any]:
        """For a trace: where it goes, tokens, layers."""

    def imms(self) -> list[int]:
        """That arrive here for it, if there are no others."""

    def fail(self, error: errors.MoeP2pError) -> None: ...

    def on_time(self, now: float) -> bool: ...

    def waits(self) -> list[tuple[tuple[str, str], Wait]]: ...


@contextmanager
def failing(request: Request) -> Iterator[None]:
    """Under the lock: whatever is raised, as where a GPU has no memory left, fails the request,
    which may be half submitted, and is raised as an error of ours."""
    try:
        yield
    except errors.MoeP2pError as error:
        request.fail(error)
        raise
    except Exception as error:
        failed = make(AbortedError, request.text(f"it failed here: {error!r}"))
        request.fail(failed)
        raise failed from error


def check_request(who: str, request: str, total: int) -> None:
    require(
        isinstance(request, str) and bool(request), f"{who}: request is {request!r}, must be a name"
    )
    name = f"{who}: request {request!r}: total"
    require_type(name, total, int, "an int")
    require(0 <= total <= MOST_TOKENS, f"{name} is {total}, must be 0 to {MOST_TOKENS}")


class KVWorker:
    """Base of `KVSender` and `KVReceiver`.

    fence: how memory is taken back from a worker that does not drain: "key", or "queue_pair" of
    verbs (docs/providers.md). None: what MOE_P2P_KV_FENCE says, else "key".
    """

    role = ""

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        *,
        instance: str,
        timeouts: KVTimeouts | None = None,
        max_requests: int = 256,
        link: KVLink | None = None,
        fence: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        kind = type(self).__name__
        timeouts = KVTimeouts() if timeouts is None else timeouts
        require_type(f"{kind}: cache", cache, KVCache, "a KVCache")
        require(hasattr(engine, "provider"), f"{kind}: engine is {engine!r}, must be an Engine")
        require_type(f"{kind}: timeouts", timeouts, KVTimeouts, "a KVTimeouts or None")
        require_type(f"{kind}: link", link, (KVLink, type(None)), "a KVLink or None")
        require(callable(clock), f"{kind}: clock is {clock!r}, must be a function")
        require(
            isinstance(instance, str) and bool(instance) and "/" not in instance,
            f"instance is {instance!r}, must be a name without '/'",
        )
        fence = env.kv_fence() if fence is None else fence
        require(
            fence in (KEY, QUEUE_PAIR), f"fence is {fence!r}, must be {KEY!r} or {QUEUE_PAIR!r}"
        )
        if fence == QUEUE_PAIR and engine.provider != "verbs":
            raise make(
                UnavailableError,
                f"{instance}: fence={fence!r} is of verbs, the transport is {engine.provider}; "
                f"leave it at {KEY!r}",
            )
        if why := engine.why_no_fence():
            raise make(UnavailableError, f"{instance}: pages could not be taken back: {why}")
        self.fence_by = fence
        self.engine, self.cache = engine, cache
        self.timeouts = timeouts
        self.worker = Worker(instance, cache.rank, self.role)
        self.replaced = ""  # else why no request can begin any more
        self.clock = clock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # a request ended, or a pair came
        self.wake = threading.Event()  # of whoever calls step()
        self.pairs: dict[str, Pair] = {}  # by name of the other worker
        self.totals = KVTotals()  # replaced, never changed: any thread may keep one
        counts = engine if self.role == "receiver" else None
        self.slots = slots_for(max_requests, counts)
        self.row_bytes = footer_bytes(cache.layout.num_layers)
        self.link = link_of(engine) if link is None else link
        self.ring = Ring(self.link, cache.tensors[0].device, max_requests, counts)
        # One row a slot. A bytearray, so that rows are read and written without a tensor.
        self.rows = bytearray((max_requests + self.ring.num_parts) * self.row_bytes)
        self.control = torch.frombuffer(self.rows, dtype=torch.uint8)
        self._memories: list[PairMemory] = []  # registered, as far as is known
        self._losing: list[Pair] = []  # lost, and not yet fenced
        self.late, self._late_at = Late(f"KV {self.role}"), 0.0
        note(self)

    @property
    def name(self) -> str:
        return self.worker.name

    # --- meeting ---

    def register(self) -> PairMemory:
        made = PairMemory(self.engine, self.cache, self.control, self.ring, self.fence_by)
        with self.lock:
            self._memories = [each for each in self._memories if each.is_registered] + [made]
        return made

    def check_withdrawn(self) -> None:
        """After `LeaseKeeper.close`: raises TimeoutError while memory is registered for a peer."""
        with self.lock:
            left = [each for each in self._memories if each.is_registered]
            names = ", ".join(pair.name for pair in self._losing)
        if not names:  # else the fence is still being tried, by the thread that owns it
            for memory in left:
                memory.withdraw()
        elif left:
            raise make(
                errors.TimeoutError,
                f"{self.name}: memory is still registered for {names}, whose fence has not "
                "succeeded; try again",
            )

    def hello(self, memory: PairMemory, worker: Worker) -> Hello:
        return Hello(
            worker,
            self.cache.layout,
            self.cache.memory(memory.descriptors()),
            self.engine.address,
            memory.control.descriptor,
            self.engine.num_nics,
            self.row_bytes,
            self.link,
            self.ring.parts,
            memory.ring.descriptor if memory.ring else b"",
            memory.tag,
        )

    def meet(self, memory: PairMemory, theirs: Hello, channel: Sends) -> Pair:
        """Makes the pair; `attach` lets requests use it. Raises what does not fit, by name."""
        require(
            theirs.footer_bytes == self.row_bytes,
            f"{self.name}: tails of {theirs.worker.name} have {theirs.footer_bytes} bytes, here "
            f"{self.row_bytes}; both sides must hold the same model",
        )
        sends = self.role == "sender"
        ours = self.hello(memory, self.worker)
        link = agreed_link(*((ours, theirs) if sends else (theirs, ours)))
        pair = make_pair(self.engine, self.cache, memory, theirs, channel, sends=sends, link=link)
        for row_bytes in {move.shape.row_bytes for move in pair.plan.moves}:
            checksum.prepare(self.cache.tensors[0], row_bytes)
        return pair

    def attach(self, pair: Pair) -> None:
        with self.lock:
            before = self.pairs.get(pair.name)
            if before is not None:
                self._lose(before, "it connected anew")
            self.pairs[pair.name] = pair
            self.changed.notify_all()

    def join(self) -> None:
        """Requests may begin, whatever was before."""
        self.replaced = ""

    def replace(self, why: str) -> None:
        """Another process has this worker's name: no request can begin any more."""
        self.replaced = why

    def check_name(self) -> None:
        """Raises where another process has this worker's name, or its engine is closed."""
        if self.replaced:
            raise make(AbortedError, self.replaced)
        if self.engine.closed:
            raise make(errors.ClosedError, f"{self.name}: its engine is closed")

    def pairs_with(self, instance: str) -> list[Pair]:
        """All ranks of an instance that exchange KV with this one. Raises UnavailableError."""
        known = [pair for pair in self.pairs.values() if pair.worker.instance == instance]
        names = [f"{instance}/{rank}" for rank in (self.ranks_of(known[0]) if known else [0])]
        for name in names:
            if name not in self.pairs:
                all_ = ", ".join(sorted(self.pairs)) or "nobody"
                text = f"{self.name}: not connected to {name}; connected to {all_}"
                raise make(UnavailableError, text)
        return [self.pairs[name] for name in names]

    def deadline(self, timeout_s: float) -> float:
        """By the worker's clock."""
        require(
            isinstance(timeout_s, (int, float)) and timeout_s >= 0,
            f"{self.name}: timeout_s is {timeout_s!r}, must be a number of seconds, at least 0",
        )
        return self.clock() + timeout_s

    def wait_for(self, instance: str, timeout_s: float | None = None) -> None:
        """Waits until all ranks of an instance that exchange KV with this one are connected."""
        limit = self.timeouts.connect_s if timeout_s is None else timeout_s
        deadline = self.deadline(limit)
        with self.lock:
            while missing := self._missing(instance):
                self.check_name()
                left = deadline - self.clock()
                if left <= 0:
                    raise make(
                        errors.TimeoutError,
                        f"{self.name}: waited {limit} s in phase connect for {missing}",
                    )
                self.changed.wait(min(left, 0.1))

    def _missing(self, instance: str) -> str:
        known = [pair for pair in self.pairs.values() if pair.worker.instance == instance]
        if not known:
            return f"any rank of {instance}"
        ranks = self.ranks_of(known[0])
        have = {pair.worker.rank for pair in known}
        return ", ".join(f"{instance}/{rank}" for rank in ranks if rank not in have)

    def ranks_of(self, pair: Pair) -> list[int]:
        """Ranks of the other instance that exchange KV with this one."""
        moves = pair.plan.moves
        if self.role == "sender":
            return sorted({m.target_rank for m in moves if m.source_rank == self.cache.rank})
        return sorted({m.source_rank for m in moves if m.target_rank == self.cache.rank})

    # --- losing a pair ---

    def lose(self, pair: Pair, why: str) -> None:
        """Ends a pair: its requests fail by name, and its fence follows in `step`."""
        with self.lock:
            self._lose(pair, why)

    def _lose(self, pair: Pair, why: str) -> None:
        if pair.lost:
            return
        pair.lose(why)
        if self.pairs.get(pair.name) is pair:
            del self.pairs[pair.name]
        self._losing.append(pair)
        self.on_lost(pair)
        self.wake.set()

    def fence(self, pair: Pair) -> None:
        """When it returns, no write of the other worker lands here any more."""
        pair.fence()

    def step(self) -> float:
        """Handles deadlines and fences; returns how many seconds later it wants to be called."""
        with self.lock:
            busy = self.on_time(self.clock())
            losing = list(self._losing)
        for pair in losing:
            with self.lock:  # one at a time: what is taken is given back, whatever is raised
                if not pair.take_fence(self.clock()):
                    continue
            fenced = False
            try:
                fenced = self._try_to_fence(pair)
            finally:  # whatever it raises, it is tried again
                with self.lock:
                    pair.give_fence(fenced=fenced)
                    if fenced:
                        self._losing.remove(pair)
                        self.on_fenced(pair)
                        self.changed.notify_all()
            if fenced:
                self.close_pair(pair)
        return QUICK_S if busy else SLOW_S

    def pause(self, seconds: float) -> None:
        """Between two steps: until somebody wakes it, or for so long."""
        self.wake.wait(seconds)

    def _try_to_fence(self, pair: Pair) -> bool:
        """Without the lock: other pairs go on. False: pages stay held, and it is tried again."""
        try:
            self.fence(pair)
        except errors.ClosedError:
            return True  # the engine is closed: its NICs write nothing
        except errors.MoeP2pError as error:
            if not pair.fence_retries:
                log.warning(f"{self.name}: pages stay held, {pair.name} is not fenced: {error}")
            pair.retry_fence(self.clock() + RETRY_S)
            return False
        return True

    @property
    def is_fencing(self) -> bool:
        return bool(self._losing)

    def wait_fenced(self, timeout_s: float) -> None:
        """Until all pairs that are lost are fenced, by whoever calls `step`; else warns."""
        deadline = time.monotonic() + timeout_s
        with self.lock:
            while self._losing and time.monotonic() < deadline:
                self.changed.wait(SLOW_S)
            if self._losing:
                names = ", ".join(pair.name for pair in self._losing)
                log.warning(f"{self.name}: pages stay held for {names} until a fence succeeds")

    def close_pair(self, pair: Pair) -> None:
        try:
            pair.close()
        except errors.MoeP2pError as error:
            log.warning(f"{self.name}: memory stays registered for {pair.name}: {error}")

    def lose_all(self, why: str) -> None:
        """What is queued goes first: a receiver's word that it has read all, say."""
        with self.lock:
            pairs = list(self.pairs.values())
        for pair in pairs:
            pair.channel.end()
        deadline = Deadline(LAST_WORDS_S)
        for pair in pairs:
            pair.channel.wait_sent(deadline)
        with self.lock:
            for pair in list(self.pairs.values()):
                self._lose(pair, why)

    def metrics(self) -> list[Family]:
        """For moe_p2p.prometheus_text."""
        own = {"worker": self.name, "role": self.role}
        about = "Waits in which a peer was named late"
        return [*families_of([self]), counter("kv_stragglers", about, [(own, self.late.count)])]

    def new_stats(self, request: str) -> KVTransferStats:
        return KVTransferStats(request, self.role, self.clock())

    def count(self, request: Request) -> None:
        """Under the lock, once it is reusable."""
        request.stats.free(self.clock())
        one = KVTotals()
        one.observe(request.stats)
        self.totals = self.totals + one
        if phases.take is not None:
            phases.take(self.phase_of(request, is_over=True))

    def phase_of(self, request: Request, *, is_over: bool) -> phases.Phase:
        """What it went through so far, for a trace."""
        stats = request.stats
        args = request.facts() | {"bytes": stats.nbytes, "writes": stats.writes}
        return phases.Phase(
            track=f"KV {self.role} {self.name}",
            user="kv",
            name=f"request {request.request}",
            begin=stats.queued_at,
            parts=stats.parts(),
            is_over=is_over,
            args=args | ({"failed": True, "fence": stats.fence} if stats.failed else {}),
            marks=[(name, at, at) for name, at in stats.submitted],
            engine=self.engine.number,
            imms=request.imms(),
        )

    def wait_reusable(self, request: Request, timeout_s: float | None) -> None:
        limit = self.timeouts.drain_s + self.timeouts.connect_s if timeout_s is None else timeout_s
        deadline = self.deadline(limit)
        with self.lock:
            while not request.reusable:
                left = deadline - self.clock()
                if left <= 0:
                    text = request.text(f"pages are not free after {limit} s")
                    raise make(errors.TimeoutError, text)
                self.changed.wait(min(left, 0.05))

    def on_time_of(self, requests: Sequence[Request], now: float) -> bool:
        """What one of them raises fails that one, and others go on."""
        busy, left = False, list[Exception]()
        for each in requests:
            try:
                with suppress(errors.MoeP2pError), failing(each):
                    busy |= each.on_time(now)
            except Exception as error:
                left.append(error)
        if left:
            raise left[0]
        return busy

    def name_late(self, now: float, requests: Sequence[Request]) -> None:
        """Under the lock, with each `on_time`."""
        if now - self._late_at < _LOOK_S:
            return
        self._late_at = now
        waits = [wait for each in requests for wait in each.waits()]
        self.late.look(now, dict(reversed(waits)))  # the first of those that wait alike is named

    # --- what senders and receivers do ---

    def on_message(self, pair: Pair, message: Message) -> None:
        raise NotImplementedError

    def on_time(self, now: float) -> bool:
        """Under the lock. Returns whether something drains."""
        raise NotImplementedError

    def on_lost(self, pair: Pair) -> None:
        """Under the lock: requests on the pair fail; their pages wait for the fence."""
        raise NotImplementedError

    def on_fenced(self, pair: Pair) -> None:
        """Under the lock: their pages come back."""
        raise NotImplementedError
