"""The side that decodes: reserves pages, waits for their bytes, and gets the pages back.

    reserve --> open --> layers, footer --> complete            pages belong to the caller again
       \\          \\________|
        \\__________________|_ cancel, deadline, a lost sender --> draining --> settled
                                                                    \\-- drain_s --> fence --/

Pages of a reservation are *held* until no write of a sender can land in them: because all that was
announced has arrived, because each sender has said that it drained, or because the fence says so.
A reservation has a transfer from each source rank that sends to this one, with a number of its own
by which its immediates are counted (moe_p2p/kv/source_transfer.py).
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_p2p import errors, log
from moe_p2p.engine.engine import Engine
from moe_p2p.errors import (
    AbortedError,
    InvalidArgumentError,
    MoeP2pError,
    PeerDeadError,
    make,
    require,
    require_type,
)
from moe_p2p.fleet.late import Wait
from moe_p2p.kv.channel import Message
from moe_p2p.kv.layout import KVLayout
from moe_p2p.kv.memory import KVCache
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.plan import KVPlan
from moe_p2p.kv.requests import span_of
from moe_p2p.kv.source_transfer import SourceTransfer
from moe_p2p.kv.stats import RequestState, TransferState
from moe_p2p.kv.unpacking import Unpacker, Unpacking
from moe_p2p.kv.worker import KVWorker, Options, check_request, failing
from moe_p2p.machine.phases import Phase

if TYPE_CHECKING:  # of typing since Python 3.11
    from typing_extensions import Unpack

_SLICE_S = 0.05  # after which a waiter looks at deadlines again
_LOOKS = 8  # in tail_s, at a request whose caller does not


class KVReservation:
    """One request. Made by `KVReceiver.reserve`."""

    def __init__(
        self,
        receiver: KVReceiver,
        request: str,
        source: str,
        pages: Mapping[str, Tensor],
        tokens: tuple[int, int],
        *,
        pull: bool,
        verified: bool,
        on_free: Callable[[], None] | None,
    ) -> None:
        self.receiver, self.request, self.source = receiver, request, source
        self.pages = dict(pages)
        self.begin, self.total = tokens
        self.pull, self.verified, self._on_free = pull, verified, on_free
        self.opened_at: float | None = None  # None: waits for slots
        self.transfers: list[SourceTransfer] = []
        self.state = RequestState.OPEN
        self.error: MoeP2pError | None = None
        self.reusable = False  # its pages may be given to somebody else
        self._looked_at = receiver.clock()
        self.stats = receiver.new_stats(request)

    def text(self, why: str) -> str:
        """For errors: who, which request, why, and what arrived, by worker."""
        what = "arrived from " + (", ".join(each.text() for each in self.transfers) or "nobody")
        if self.opened_at is None:
            what = f"max_requests={self.receiver.slots.count} are under way before it"
        return (
            f"{self.receiver.name}: request {self.request!r}, tokens {self.begin} to "
            f"{self.total}: {why}; {what}"
        )

    def _short_text(self, why: str) -> str:
        return f"{self.receiver.name}: request {self.request!r}: {why}"

    def facts(self) -> dict[str, Any]:
        found = [each.pair for each in self.transfers]
        whence = ", ".join(pair.name for pair in found) or self.source
        layers = len({layer for pair in found for layer in pair.layers})
        return {"from": whence, "tokens": self.total - self.begin, "layers": layers}

    def imms(self) -> list[int]:
        found = self.transfers
        known = not self.pull and not any(each.pair.packs for each in found)
        return [each.slot.imm for each in found] if known else []

    @property
    def waits_for_slots(self) -> bool:
        return self.opened_at is None and self.state is RequestState.OPEN

    def open(self, pairs: list[Pair]) -> None:
        """Under the lock: slots are free, one for each rank of its source."""
        receiver = self.receiver
        for pair in pairs:
            self.transfers.append(SourceTransfer(receiver, receiver.unpacker, pair, self))
        self.opened_at = receiver.clock()
        for each in self.transfers:
            each.open()

    # --- layers, footer, complete ---

    def done(self) -> bool:
        """True once it is complete or failed; `wait` returns or raises accordingly."""
        with self.receiver.lock:
            if not self.look():
                return False
            if self.state is not RequestState.OPEN:
                return True
        return self._verify()  # without the lock: it reads all bytes

    def look(self) -> bool:
        """Under the lock: whether it has ended, or has all bytes, which are to be checked."""
        if self.state is not RequestState.OPEN:
            return True
        self._looked_at = self.receiver.clock()
        if self.opened_at is None:
            return False
        arrived = [True]
        with suppress(MoeP2pError), failing(self):
            arrived = [each.has_arrived() for each in self.transfers]
        if self.state is not RequestState.OPEN:
            return True
        if all(arrived) and not self.verified:
            self._complete()
        return all(arrived)

    def _verify(self) -> bool:
        wrong = "; ".join(filter(None, [each.wrong_sum() for each in self.transfers]))
        with self.receiver.lock:
            if self.state is not RequestState.OPEN:
                return True
            if wrong:
                self.fail(make(errors.ProtocolError, self._short_text(f"checksum of {wrong}")))
            else:
                self._complete()
        return True

    def _complete(self) -> None:
        self.state = RequestState.COMPLETE
        self.stats.end(self.receiver.clock())
        self._free()

    @property
    def user(self) -> bytes:
        """What the senders added to the footer."""
        found = [each.footer.user for each in self.transfers if each.footer is not None]
        return next(filter(None, found), b"")

    def wait(self, timeout_s: float | None = None) -> bytes:
        """Returns what the sender added to the footer, once all bytes are there.

        Raises what ended it: TimeoutError of a phase, PeerDeadError, AbortedError, ProtocolError
        for bytes that differ from what was sent. timeout_s: TimeoutError, and the request goes on.
        """
        receiver = self.receiver
        deadline = None if timeout_s is None else receiver.deadline(timeout_s)
        while not self.done():
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - receiver.clock())
            if left <= 0:
                raise make(errors.TimeoutError, self.text(f"waited {timeout_s} s"))
            self._wait_a_little(left)
        if self.error is not None:
            raise self.error
        return self.user

    def _wait_a_little(self, left: float) -> None:
        """Until something may have arrived, or the request ended."""
        receiver = self.receiver
        with receiver.lock:
            if self.pull or any(each.pair.packs for each in self.transfers):
                receiver.changed.wait(min(left, 0.0005))
                return
            if self.waits_for_slots:
                receiver.changed.wait(left)
            waits = [each for each in self.transfers if each.state is TransferState.OPEN]
            if not waits or self.state is not RequestState.OPEN:
                return
            imm, count = waits[0].slot.imm, waits[0].awaited
        try:
            receiver.engine.wait_imm(imm, count, left)
        except errors.TimeoutError:
            return

    # --- cancel, deadlines, losses ---

    def cancel(self, why: str = "cancelled") -> None:
        """Ends it, unless it has ended; `wait_reusable` then says when pages are free."""
        text = self.text(why)
        with self.receiver.lock:
            self.fail(make(AbortedError, text))

    def wait_reusable(self, timeout_s: float | None = None) -> None:
        """Waits until its pages may be given to somebody else: at most drain_s after it failed."""
        self.receiver.wait_reusable(self, timeout_s)

    def fail(self, error: MoeP2pError) -> None:
        """Under the lock, like all that follows."""
        if self.state is not RequestState.OPEN:
            return
        receiver, now = self.receiver, self.receiver.clock()
        receiver.stop_waiting(self)
        self.state, self.error = RequestState.FAILED, error
        self.stats.end(now, failed=True)
        for each in self.transfers:
            each.drain(now + receiver.timeouts.drain_s, str(error)[:400])
        self.free_if_settled()
        receiver.changed.notify_all()
        receiver.wake.set()

    def free_if_settled(self) -> None:
        settled = all(each.state is TransferState.SETTLED for each in self.transfers)
        if self.state is not RequestState.OPEN and settled:
            self._free()

    def _free(self) -> None:
        """No write can land in its pages any more."""
        if self.reusable:
            return
        for each in self.transfers:
            each.free()
        self.receiver.holds.give_back(self)
        self.reusable = True
        self.receiver.forget(self)
        if self._on_free is not None:
            try:
                self._on_free()
            except Exception as error:  # the caller's own, in whichever thread this is
                name = self.receiver.name
                log.warning(f"{name}: on_free of {self.request!r} raised: {error!r}")

    def was_drained(self, transfer: SourceTransfer, why: str) -> None:
        if transfer.state is TransferState.OPEN:
            text = self._short_text(f"{transfer.pair.name} gave up: {why}")
            self.fail(make(AbortedError, text))
        transfer.was_drained()
        self.free_if_settled()

    def take_offer(self, transfer: SourceTransfer, message: Message) -> None:
        try:
            transfer.take_offer(message)
        except (MoeP2pError, KeyError, ValueError, IndexError) as error:
            wrong = error if isinstance(error, MoeP2pError) else None
            self.fail(wrong or make(errors.ProtocolError, f"an offer: {error!r}"))
        self.receiver.changed.notify_all()

    def on_time(self, now: float) -> bool:
        """Returns whether something drains, or is scattered."""
        busy = False
        if self.state is RequestState.OPEN:
            late = self._late(now)
            if late:
                self.fail(make(errors.TimeoutError, late))
            busy = self._unpack()
        for each in self.transfers:
            if each.state is not TransferState.DRAINING:
                continue
            busy = True
            if not each.settle_drained() and each.drains_too_long(now):
                limit = f"{self.receiver.timeouts.drain_s} s"
                why = f"it did not drain request {self.request!r} within {limit}"
                self.receiver.lose(each.pair, why)
        self.free_if_settled()
        return busy

    def unpackings(self) -> list[Unpacking]:
        """To which parts of the ring are granted."""
        waits = [each for each in self.transfers if each.state is TransferState.OPEN]
        return [each.unpacking for each in waits if each.unpacking.grants]

    def _unpack(self) -> bool:
        """Scatters what has arrived; returns whether more of it is on its way."""
        granted = self.unpackings()
        with suppress(MoeP2pError), failing(self):
            for each in granted:
                each.advance()
        if granted and not any(each.grants for each in granted):
            self.receiver.changed.notify_all()  # it may be complete
        return bool(granted)

    def _late(self, now: float) -> str:
        """Looks first: a worker that slept, or a caller that does not poll, has seen nothing of
        what has arrived."""
        unseen = now - self._looked_at >= self.receiver.timeouts.tail_s / _LOOKS
        if unseen or self._waited(now):
            self.look()
        why = self._waited(now)
        return "" if not why or self.done() else self.text(why)

    def _waited(self, now: float) -> str:
        """Longer than it may, as far as the last look knows; else empty."""
        phase, limit, since = self._phase()
        return f"waited {limit} s in phase {phase}" if now - since > limit else ""

    def _phase(self) -> tuple[str, float, float]:
        """Its name, how long it may last, and since when it does."""
        timeouts = self.receiver.timeouts
        moved = [each.moved_at for each in self.transfers if each.moved_at is not None]
        if moved:
            return "tail", timeouts.tail_s, max(moved)
        since = self.stats.queued_at if self.opened_at is None else self.opened_at
        return "open", timeouts.open_s, since

    def waits(self) -> list[tuple[tuple[str, str], Wait]]:
        """For its peers, as far as the last look knows; alike for requests of one source."""
        if self.state is not RequestState.OPEN:
            return []
        phase, limit, since = self._phase()
        missing = [each for each in self.transfers if each.state is TransferState.OPEN]
        who = ", ".join(each.pair.name for each in missing) or str(self.source)
        text = functools.partial(self.text, f"waits in phase {phase} for {who}")
        return [((phase, who), Wait(since, limit, text))]

    def on_lost(self, pair: Pair) -> None:
        """A sender whose writes have all ended may leave before this side has looked: what it had
        committed may be here, or come, until the fence."""
        mine, committed = self._open_of(pair), False
        with suppress(MoeP2pError), failing(self):
            committed = all(each.was_committed() for each in mine)
        waits = self.waits_for_slots and self.source == pair.worker.instance
        if waits or not committed:
            self._fail_lost(pair)
        elif mine:
            pair.delay_fence(self.receiver.clock() + self.receiver.timeouts.drain_s)

    def _open_of(self, pair: Pair) -> list[SourceTransfer]:
        mine = [each for each in self.transfers if each.pair is pair]
        return [each for each in mine if each.state is TransferState.OPEN]

    def _fail_lost(self, pair: Pair) -> None:
        self.fail(make(PeerDeadError, self.text(f"lost {pair.name}: {pair.lost}")))

    def settle_fenced(self, pair: Pair) -> None:
        self.look()
        if self._open_of(pair):
            self._fail_lost(pair)
        for each in self.transfers:
            if each.pair is pair:
                each.settle_fenced()


class PageHolds:
    """Which pages a write may land in. No page is held twice."""

    def __init__(self, layout: KVLayout, pages: Mapping[str, int]) -> None:
        self._layout = layout
        self._held = {
            group: torch.zeros(count, dtype=torch.bool, device="cpu")
            for group, count in pages.items()
        }
        self._by: dict[KVReservation, dict[str, Tensor]] = {}

    def take(self, plan: KVPlan, reservation: KVReservation) -> None:
        """Holds what the reservation's tokens lie in. Raises for pages that are held."""
        written, who = self._written(plan, reservation), f"reserve {reservation.request!r}"
        for group, pages in written.items():
            held = self._held[group]
            bad = pages[(pages < 0) | (pages >= len(held))]
            require(
                not len(bad),
                f"{who}: group {group!r} has {len(held)} pages, not {bad[:4].tolist()}",
            )
            require(
                len(torch.unique(pages)) == len(pages),
                f"{who}: pages of group {group!r} name one twice: tokens would overwrite each "
                "other",
            )
            taken = pages[held[pages]]
            require(
                not len(taken),
                f"{who}: pages {taken[:4].tolist()} of group {group!r} are still held"
                f"{self._holder(group, taken)}: a write may land in them; wait until they are "
                "reusable",
            )
        for group, pages in written.items():
            self._held[group][pages] = True
        self._by[reservation] = written

    def give_back(self, reservation: KVReservation) -> None:
        for group, pages in self._by.pop(reservation).items():
            self._held[group][pages] = False

    @property
    def num_held(self) -> int:
        return sum(int(held.sum()) for held in self._held.values())

    def _written(self, plan: KVPlan, reservation: KVReservation) -> dict[str, Tensor]:
        found, who = {}, f"reserve {reservation.request!r}"
        for group in self._layout.groups:
            span = span_of(plan, group, reservation.begin, reservation.total)
            tokens = 1 if group.kind == "state" else self._layout.page_tokens(group)
            pages = reservation.pages.get(group.name)
            if pages is None:
                raise make(
                    InvalidArgumentError, f"{who}: there are no pages of group {group.name!r}"
                )
            first, last = span.begin // tokens, -(-span.end // tokens)
            require(
                len(pages) >= last,
                f"{who}: group {group.name!r} needs {last} pages for {reservation.total} tokens, "
                f"here are {len(pages)}",
            )
            found[group.name] = pages[first:last].to(torch.int64)
        return found

    def _holder(self, group: str, taken: Tensor) -> str:
        for other, held in self._by.items():
            if len(taken) and bool(torch.isin(taken[:1], held[group]).any()):
                return f" by request {other.request!r} ({other.state})"
        return ""


class Verify:
    """Which requests are checked byte by byte. mode: "off", "always", or "sample:P" with P from 0
    to 1: the share of requests."""

    def __init__(self, mode: str) -> None:
        require_type("verify", mode, str, "a str")
        self.mode = mode
        share = {"off": "0", "always": "1"}.get(mode, mode.removeprefix("sample:"))
        try:
            self.share = float(share)
        except ValueError:
            self.share = -1.0
        require(
            0 <= self.share <= 1,
            f'verify is {mode!r}, must be "off", "always" or "sample:P" with P from 0 to 1',
        )

    def draw(self) -> bool:
        return random.random() < self.share


class KVReceiver(KVWorker):
    """engine: an `Engine` of its own; its immediates from 2^30 on are counted here.

    verify: "off", "always", or "sample:0.01" for one in a hundred requests. The receiver decides,
    and says so when it opens a request.
    """

    role = "receiver"

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        *,
        instance: str,
        verify: str = "sample:0.01",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(engine, cache, instance=instance, **options)
        self.verify = Verify(verify)
        self.reservations: list[KVReservation] = []  # not reusable yet
        self.holds = PageHolds(self.cache.layout, self.cache.pages)
        self.unpacker = Unpacker(self)
        self._waiting: deque[KVReservation] = deque()  # for slots, in their order

    # --- open ---

    def reserve(
        self,
        request: str,
        source: str,
        pages: Mapping[str, Tensor],
        *,
        total: int,
        begin: int = 0,
        pull: bool = False,
        on_free: Callable[[], None] | None = None,
    ) -> KVReservation:
        """Reserves pages for tokens `begin` to `total` of a request and opens it at `source`, once
        no more than max_requests are under way.

        pages: per group, int32 [n], pages of the whole request from its first token on; those
        before `begin` are not touched. source: an instance. on_free: called once when the pages
        may be given to somebody else, from any thread.
        Raises UnavailableError unless connected to all its ranks, InvalidArgumentError for pages
        that another reservation still holds, or more ranks than max_requests.
        """
        check_request(self.name, request, total)
        require(on_free is None or callable(on_free), f"on_free is {on_free!r}, must be a function")
        lists = self.cache.page_lists(f"reserve {request!r}", pages)
        with self.lock:
            self.check_name()
            self._check_new(request, source, self.pairs_with(source))
            plan = next(p.plan for p in self.pairs.values() if p.worker.instance == source)
            reservation = KVReservation(
                self,
                request,
                source,
                lists,
                (begin, total),
                pull=pull,
                verified=self.verify.draw(),
                on_free=on_free,
            )
            self.holds.take(plan, reservation)
            self.reservations.append(reservation)
            self._waiting.append(reservation)
            self._open_waiting()
        self.wake.set()
        return reservation

    def decline(self, request: str, source: str, why: str) -> None:
        """Tells a source that a request will not be reserved here, so that it takes its pages back
        now and not after open_s. Raises UnavailableError unless connected to all its ranks."""
        with self.lock:
            for pair in self.pairs_with(source):
                pair.send("decline", request=request, why=why)

    def _check_new(self, request: str, source: str, pairs: list[Pair]) -> None:
        """A source knows requests of a receiver by name."""
        same = [each for each in self.reservations if each.request == request]
        require(
            not any(each.waits_for_slots and each.source == source for each in same)
            and not any(transfer.pair in pairs for each in same for transfer in each.transfers),
            f"{self.name}: request {request!r} is reserved; a retry takes another name",
        )
        require(
            len(pairs) <= self.slots.count,
            f"{self.name}: {source} has {len(pairs)} ranks, each of which takes a slot of "
            f"max_requests={self.slots.count}",
        )

    def _open_waiting(self) -> None:
        while self._waiting:
            reservation = self._waiting[0]
            try:
                pairs = self.pairs_with(reservation.source)
                if len(pairs) > self.slots.num_free:
                    return
                reservation.open(pairs)
                self._waiting.popleft()
            except Exception as error:  # not all ranks are there any more, say
                wrong = error if isinstance(error, MoeP2pError) else None
                text = reservation.text(f"it cannot be opened: {error!r}")
                reservation.fail(wrong or make(AbortedError, text))  # and is the first no more

    def stop_waiting(self, reservation: KVReservation) -> None:
        if reservation in self._waiting:
            self._waiting.remove(reservation)

    def forget(self, reservation: KVReservation) -> None:
        """Its pages are reusable."""
        if reservation in self.reservations:
            self.reservations.remove(reservation)
            self.count(reservation)
        self.wake.set()  # of those that wait for its slots
        self.changed.notify_all()

    def under_way(self) -> list[Phase]:
        return [self.phase_of(each, is_over=False) for each in list(self.reservations)]

    # --- messages, deadlines, losses ---

    def on_message(self, pair: Pair, message: Message) -> None:
        with self.lock:
            found = self._find(pair, message.fields.get("nonce"))
            if found is None:
                return  # of a request that has ended
            reservation, transfer = found
            is_open = transfer.state is TransferState.OPEN
            if message.kind == "want" and is_open:
                transfer.unpacking.want(message.fields["parts"], int(message.fields["most"]))
                self.wake.set()
            elif message.kind == "drained":
                reservation.was_drained(transfer, str(message.fields.get("why", "")))
            elif message.kind == "moves":
                transfer.moves()
            elif message.kind == "offer" and is_open and transfer.footer is None:
                reservation.take_offer(transfer, message)

    def _find(self, pair: Pair, nonce: object) -> tuple[KVReservation, SourceTransfer] | None:
        for reservation in self.reservations:
            for each in reservation.transfers:
                if each.nonce == nonce and each.pair is pair:
                    return reservation, each
        return None

    def on_time(self, now: float) -> bool:
        self._open_waiting()
        busy = self.on_time_of(list(self.reservations), now)
        self.name_late(now, self.reservations)
        return busy

    def pause(self, seconds: float) -> None:
        """A packed write that arrives ends it, too: the sender waits for its part of the ring."""
        with self.lock:
            granted = [one for each in self.reservations for one in each.unpackings()]
            awaited = self.unpacker.awaited(granted)
            seconds = self.unpacker.patience(granted, seconds)
        if self.wake.is_set() or not self.unpacker.wait(awaited, seconds):
            super().pause(seconds)

    def on_lost(self, pair: Pair) -> None:
        for reservation in list(self.reservations):
            reservation.on_lost(pair)

    def on_fenced(self, pair: Pair) -> None:
        for reservation in self.reservations:
            reservation.settle_fenced(pair)
        for reservation in list(self.reservations):
            reservation.free_if_settled()
