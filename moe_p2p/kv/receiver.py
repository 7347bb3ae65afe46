"""The side that decodes: reserves pages, waits for their bytes, and gets the pages back.

    reserve --> open --> layers, tail --> complete              pages belong to the caller again
       \\          \\________|
        \\__________________|_ cancel, deadline, a lost sender --> draining --> settled
                                                                    \\-- drain_s --> fence --/

Pages of a reservation are *held* until no write of a sender can land in them: because all that was
announced has arrived, because each sender has said that it drained, or because the fence says so.
Each source rank that sends to this one is a *leg* of the reservation, with a number of its own by
which its immediates are counted.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moe_p2p import errors, log
from moe_p2p.errors import AbortedError, MoeP2pError, PeerDeadError, make, require
from moe_p2p.kv.channel import Message
from moe_p2p.kv.checks import check_request, page_lists
from moe_p2p.kv.legs import Leg, LegState, pull_nonce, pull_pages, wrong_sum
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.requests import counts
from moe_p2p.kv.reservation import KVReservation, PageHolds
from moe_p2p.kv.tail import CountedSlots, Tail
from moe_p2p.kv.units import int32_bytes, int32_tensor
from moe_p2p.kv.unpacking import Unpacker
from moe_p2p.kv.verify import Verify
from moe_p2p.kv.worker import KVWorker

_SLICE_S = 0.05  # after which a waiter looks at deadlines again
_LOOKS = 8  # in tail_s, at a request whose caller does not


class KVReceiver(KVWorker):
    """engine: an `Engine` of its own; its immediates from 2^30 on are counted here.

    verify: "off", "always", or "sample:0.01" for one in a hundred requests.
    """

    role = "receiver"

    def __init__(self, *args: Any, verify: str = "sample:0.01", **more: Any) -> None:
        super().__init__(*args, **more)
        self.verify = Verify(verify)
        self.reservations: list[KVReservation] = []  # not reusable yet
        self._waiting: deque[KVReservation] = deque()  # for slots, in their order
        self._holds = PageHolds(self.cache.layout, self.cache.pages)
        self.slots = CountedSlots(self.slots.count, self.engine)
        self.unpacker = Unpacker(self.engine, self.cache, self.ring, (self.rows, self.row_bytes))

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
        lists = page_lists(f"reserve {request!r}", self.cache.layout, pages)
        with self.lock:
            self.check_name()
            reservation = KVReservation(self, request, source, lists)
            reservation.begin, reservation.total = begin, total
            reservation.pull = pull
            pairs = self._sources(source)
            self._check_new(request, source, pairs)
            plan = next(p.plan for p in self.pairs.values() if p.worker.instance == source)
            self._holds.take(plan, reservation, self.reservations)
            reservation.verified, reservation.on_free = self.verify.draw(), on_free
            self.reservations.append(reservation)
            self._waiting.append(reservation)
            self._open_waiting()
        self.wake.set()
        return reservation

    def decline(self, request: str, source: str, why: str) -> None:
        """Tells a source that a request will not be reserved here, so that it takes its pages back
        now and not after open_s. Raises UnavailableError unless connected to all its ranks."""
        with self.lock:
            for pair in self._sources(source):
                pair.send("decline", request=request, why=why)

    def _check_new(self, request: str, source: str, pairs: list[Pair]) -> None:
        """A source knows requests of a receiver by name."""
        same = [each for each in self.reservations if each.request == request]
        require(
            not any(each in self._waiting and each.source == source for each in same)
            and not any(leg.pair in pairs for each in same for leg in each.legs),
            f"{self.name}: request {request!r} is reserved; a retry takes another name",
        )
        require(
            len(pairs) <= self.slots.count,
            f"{self.name}: {source} has {len(pairs)} ranks, each of which takes a slot of "
            f"max_requests={self.slots.count}",
        )

    def _sources(self, source: str) -> list[Pair]:
        known = [pair for pair in self.pairs.values() if pair.worker.instance == source]
        ranks = self.ranks_of(known[0]) if known else [0]
        return [self.pair_with(source, rank) for rank in ranks]

    def _open_waiting(self) -> None:
        while self._waiting:
            reservation = self._waiting[0]
            try:
                pairs = self._sources(reservation.source)
                if len(pairs) > self.slots.num_free:
                    return
                self._open_legs(reservation, pairs)
            except MoeP2pError as error:  # not all ranks are there any more
                self._fail(reservation, error)
                continue
            self._waiting.popleft()
            reservation.opened_at = self.clock()
            for leg in reservation.legs:
                self._send_open(reservation, leg)

    def _open_legs(self, reservation: KVReservation, pairs: list[Pair]) -> None:
        for pair in pairs:
            slot = self.slots.take(f"{self.name}: request {reservation.request!r}")
            leg = Leg(pair, slot, secrets.randbits(63) | 1)
            reservation.legs.append(leg)
            arriving = counts(
                pair.plan,
                self.cache.rank,
                reservation.begin,
                reservation.total,
                source_nics=pair.theirs.num_nics,
            ).get(pair.worker.rank)
            leg.least = pair.theirs.num_nics  # the tail's
            if arriving:
                leg.least += arriving.immediates
                leg.nbytes = arriving.nbytes

    def _send_open(self, reservation: KVReservation, leg: Leg) -> None:
        names = [group.name for group in self.cache.layout.groups]
        leg.pair.send(
            "open",
            *(int32_bytes(reservation.pages[name]) for name in names),
            request=reservation.request,
            nonce=leg.nonce,
            imm=leg.slot.imm,
            row=leg.slot.number,
            begin=reservation.begin,
            total=reservation.total,
            pull=reservation.pull,
            verify=reservation.verified,
            groups=names,
        )

    # --- layers, tail, complete ---

    def poll(self, reservation: KVReservation) -> bool:
        with self.lock:
            if not self._look(reservation):
                return False
            if reservation.state != "open":
                return True
        return self._verify(reservation)  # without the lock: it reads all bytes

    def _look(self, reservation: KVReservation) -> bool:
        """Whether it has ended, or has all bytes, which are to be checked."""
        if reservation.state != "open":
            return True
        reservation.looked_at = self.clock()
        if reservation.opened_at is None:
            return False
        try:
            arrived = [self._arrived(reservation, leg) for leg in reservation.legs]
        except MoeP2pError as error:
            self._fail(reservation, error)
            return True
        if all(arrived) and not reservation.verified:
            self._complete(reservation)
        return all(arrived)

    def _arrived(self, reservation: KVReservation, leg: Leg) -> bool:
        if leg.state is LegState.SETTLED:
            return True
        if reservation.pull:
            return self._pulled(reservation, leg)
        value = self.engine.imm_value(leg.slot.imm)
        value += self.unpacker.advance(reservation, leg)
        now = self.clock()
        if value and reservation.stats.first_arrival_at is None:
            reservation.stats.first_arrival_at = now
        reservation.saw(leg, value, now)
        if value < leg.least:
            return False
        if leg.tail is None:
            leg.tail = self._read_tail(reservation, leg)
            if leg.tail is None:
                return False
            leg.expected = leg.tail.immediates
        if value < leg.expected or leg.grants:
            return False
        leg.state, reservation.stats.last_completion_at = LegState.SETTLED, now
        reservation.stats.nbytes += leg.nbytes
        return True

    def _read_tail(self, reservation: KVReservation, leg: Leg) -> Tail | None:
        """None while it is not there, or is of an earlier use of the row."""
        at = leg.slot.number * self.row_bytes
        tail = Tail.parse(memoryview(self.rows)[at : at + self.row_bytes])
        if tail is None or tail.nonce != leg.nonce:
            return None
        self._check_tail(reservation, leg, tail)
        return tail

    def _check_tail(self, reservation: KVReservation, leg: Leg, tail: Tail) -> None:
        got = (tail.begin, tail.total)
        want = (reservation.begin, reservation.total)
        if got != want or not (reservation.pull or tail.immediates >= leg.least):
            raise make(
                errors.ProtocolError,
                f"{self.name}: request {reservation.request!r}: {leg.pair.name} has sent tokens "
                f"{got[0]} to {got[1]} in {tail.immediates} immediates, reserved are {want[0]} to "
                f"{want[1]}, which are at least {leg.least}",
            )
        reservation.user = tail.user

    def _pulled(self, reservation: KVReservation, leg: Leg) -> bool:
        if leg.tail is None:
            return False
        now, stats, done = self.clock(), reservation.stats, sum(read.done() for read in leg.reads)
        reservation.saw(leg, done, now)
        if done < len(leg.reads):
            return False
        stats.first_arrival_at = stats.first_arrival_at or now
        reads, leg.reads = stats.take_done(leg.reads)
        for read in reads:
            read.wait(0)  # raises what went wrong
        if not leg.nonce_read:
            leg.reads, leg.nonce_read = [pull_nonce(self.engine, leg, self.row_bytes)], True
            return False
        at = leg.slot.number * self.row_bytes
        (nonce,) = struct.unpack_from("<Q", self.rows, at)
        if nonce != leg.nonce:
            raise make(
                AbortedError,
                f"{self.name}: request {reservation.request!r}: {leg.pair.name} gave the pages to "
                f"another request while they were read (nonce {nonce:x}, expected {leg.nonce:x})",
            )
        leg.state = LegState.SETTLED
        leg.pair.send("release", nonce=leg.nonce)
        return True

    def _verify(self, reservation: KVReservation) -> bool:
        found = [wrong_sum(self.cache, reservation.pages, leg) for leg in reservation.legs]
        wrong = "; ".join(filter(None, found))
        with self.lock:
            if reservation.state != "open":
                return True
            if wrong:
                text = f"{self.name}: request {reservation.request!r}: checksum of {wrong}"
                self._fail(reservation, make(errors.ProtocolError, text))
            else:
                self._complete(reservation)
        return True

    def _complete(self, reservation: KVReservation) -> None:
        reservation.state, reservation.stats.ended_at = "complete", self.clock()
        self._free(reservation)

    def wait(self, reservation: KVReservation, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else self.deadline(timeout_s)
        while not self.poll(reservation):
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - self.clock())
            if left <= 0:
                raise make(errors.TimeoutError, self.text_of(reservation, f"waited {timeout_s} s"))
            self._wait_a_little(reservation, left)
        if reservation.error is not None:
            raise reservation.error
        return reservation.user

    def _wait_a_little(self, reservation: KVReservation, left: float) -> None:
        """Until something may have arrived, or the request ended."""
        if reservation.pull or any(leg.pair.packs for leg in reservation.legs):
            with self.lock:
                self.changed.wait(min(left, 0.0005))
            return
        with self.lock:
            if reservation in self._waiting:
                self.changed.wait(left)
            legs = [leg for leg in reservation.legs if leg.state is LegState.OPEN]
            if not legs or reservation.state != "open":
                return
            leg, count = legs[0], legs[0].expected or max(legs[0].least, legs[0].counted + 1)
        try:
            self.engine.wait_imm(leg.slot.imm, count, left)
        except errors.TimeoutError:
            return

    # --- cancel, deadlines, losses ---

    def cancel(self, reservation: KVReservation, why: str) -> None:
        text = self.text_of(reservation, why)
        with self.lock:
            self._fail(reservation, make(AbortedError, text))

    def _fail(self, reservation: KVReservation, error: MoeP2pError) -> None:
        if reservation.state != "open":
            return
        if reservation in self._waiting:
            self._waiting.remove(reservation)
        reservation.state, reservation.error, now = "failed", error, self.clock()
        reservation.stats.failed, reservation.stats.ended_at = True, now
        drain_until = now + self.timeouts.drain_s
        for leg in reservation.legs:
            if leg.state is LegState.OPEN:
                leg.state, leg.drain_until, leg.wants = LegState.DRAINING, drain_until, []
                if leg.pair.lost:
                    continue  # the fence settles it
                leg.pair.send("cancel", nonce=leg.nonce, why=str(error)[:400])
                for read in leg.reads:
                    read.cancel()
        self._free_if_settled(reservation)
        self.changed.notify_all()
        self.wake.set()

    def _free_if_settled(self, reservation: KVReservation) -> None:
        if reservation.state == "failed" and all(
            leg.state is LegState.SETTLED for leg in reservation.legs
        ):
            self._free(reservation)

    def _free(self, reservation: KVReservation) -> None:
        """No write can land in its pages any more."""
        if reservation.reusable:
            return
        for leg in reservation.legs:
            self.unpacker.settle(leg)
            self.slots.give_back(leg.slot)
        self._holds.give_back(reservation)
        reservation.reusable = True
        if reservation in self.reservations:
            self.reservations.remove(reservation)
            self.count(reservation.stats)
        self.wake.set()  # of those that wait for its slots
        self.changed.notify_all()
        if reservation.on_free is not None:
            try:
                reservation.on_free()
            except Exception as error:  # the caller's own, in whichever thread this is
                log.warning(f"{self.name}: on_free of {reservation.request!r} raised: {error!r}")

    def on_message(self, pair: Pair, message: Message) -> None:
        with self.lock:
            found = self._leg(pair, message.fields.get("nonce"))
            if found is None:
                return  # of a request that has ended
            reservation, leg = found
            if message.kind == "want" and leg.state is LegState.OPEN:
                self.unpacker.want(leg, message.fields["parts"], int(message.fields["most"]))
                self.wake.set()
            elif message.kind == "drained":
                self._drained(reservation, leg, str(message.fields.get("why", "")))
            elif message.kind == "moves":
                reservation.moved_at = self.clock()
            elif message.kind == "offer" and leg.state is LegState.OPEN and leg.tail is None:
                self._take_offer(reservation, leg, message)

    def _leg(self, pair: Pair, nonce: Any) -> tuple[KVReservation, Leg] | None:
        for reservation in self.reservations:
            for leg in reservation.legs:
                if leg.nonce == nonce and leg.pair is pair:
                    return reservation, leg
        return None

    def _drained(self, reservation: KVReservation, leg: Leg, why: str) -> None:
        """All that the sender wrote is visible here, and it writes nothing more."""
        if leg.state is LegState.OPEN:
            failed = f"{self.name}: request {reservation.request!r}: {leg.pair.name} gave up: {why}"
            self._fail(reservation, make(AbortedError, failed))
        leg.drained = True
        leg.settle_drained(reservation.stats)
        self._free_if_settled(reservation)

    def _take_offer(self, reservation: KVReservation, leg: Leg, message: Message) -> None:
        reservation.moved_at = self.clock()
        try:
            leg.tail = tail = Tail.parse(message.arrays[0])
            if tail is None or tail.nonce != leg.nonce:
                raise make(errors.ProtocolError, f"{leg.pair.name} offers pages without their tail")
            self._check_tail(reservation, leg, tail)
            leg.export_row = int(message.fields["row"])
            pages = dict(zip(message.fields["groups"], message.arrays[1:], strict=True))
            theirs = {name: int32_tensor(data) for name, data in pages.items()}
            leg.reads = pull_pages(self.engine, leg, theirs, reservation.pages)
        except (MoeP2pError, KeyError, ValueError, IndexError) as error:
            wrong = error if isinstance(error, MoeP2pError) else None
            self._fail(reservation, wrong or make(errors.ProtocolError, f"an offer: {error!r}"))
        self.changed.notify_all()

    def on_time(self, now: float) -> bool:
        draining = False
        self._open_waiting()
        for reservation in list(self.reservations):
            if reservation.state == "open":
                late = self._late(reservation, now)
                if late:
                    self._fail(reservation, make(errors.TimeoutError, late))
                draining |= self._unpack(reservation)
            for leg in reservation.legs:
                if leg.state is not LegState.DRAINING:
                    continue
                draining = True
                settled = leg.settle_drained(reservation.stats)
                if not settled and now >= leg.drain_until and not leg.pair.lost:
                    self._lose(
                        leg.pair,
                        f"it did not drain request {reservation.request!r} within "
                        f"{self.timeouts.drain_s} s",
                    )
            self._free_if_settled(reservation)
        return draining

    def _unpack(self, reservation: KVReservation) -> bool:
        """Scatters what has arrived; returns whether more of it is on its way."""
        legs = [leg for leg in reservation.legs if leg.grants and leg.state is LegState.OPEN]
        try:
            for leg in legs:
                self.unpacker.advance(reservation, leg)
        except MoeP2pError as error:
            self._fail(reservation, error)
        if legs and not any(leg.grants for leg in legs):
            self.changed.notify_all()  # it may be complete
        return bool(legs)

    def pause(self, seconds: float) -> None:
        """A packed write that arrives ends it, too: the sender waits for its part of the ring."""
        with self.lock:
            legs = [leg for each in self.reservations for leg in each.legs if leg.grants]
            legs = [leg for leg in legs if leg.state is LegState.OPEN]
            awaited, seconds = self.unpacker.awaited(legs), self.unpacker.patience(legs, seconds)
        if self.wake.is_set() or not self.unpacker.wait(awaited, seconds):
            super().pause(seconds)

    def _late(self, reservation: KVReservation, now: float) -> str:
        """Looks first: a worker that slept, or a caller that does not poll, has seen nothing of
        what has arrived."""
        unseen = now - reservation.looked_at >= self.timeouts.tail_s / _LOOKS
        if unseen or self._waited(reservation, now):
            self._look(reservation)
        why = self._waited(reservation, now)
        if not why or self.poll(reservation):
            return ""
        return self.text_of(reservation, why)

    def _waited(self, reservation: KVReservation, now: float) -> str:
        """Longer than it may, as far as the last look knows; else empty."""
        phase, limit, since = "open", self.timeouts.open_s, reservation.stats.queued_at
        if reservation.opened_at is not None:
            since = reservation.opened_at
        if reservation.moved_at is not None:
            phase, limit, since = "tail", self.timeouts.tail_s, reservation.moved_at
        return f"waited {limit} s in phase {phase}" if now - since > limit else ""

    def text_of(self, reservation: KVReservation, why: str) -> str:
        """What arrived, by worker."""
        legs = ", ".join(leg.text() for leg in reservation.legs) or "nobody"
        what = f"arrived from {legs}"
        if reservation.opened_at is None:
            what = f"max_requests={self.slots.count} are under way before it"
        return (
            f"{self.name}: request {reservation.request!r}, tokens {reservation.begin} to "
            f"{reservation.total}: {why}; {what}"
        )

    def on_lost(self, pair: Pair) -> None:
        for reservation in list(self.reservations):
            waits = reservation in self._waiting and reservation.source == pair.worker.instance
            legs = [leg for leg in reservation.legs if leg.state is LegState.OPEN]
            if waits or any(leg.pair is pair for leg in legs):
                text = self.text_of(reservation, f"lost {pair.name}: {pair.lost}")
                self._fail(reservation, make(PeerDeadError, text))

    def on_fenced(self, pair: Pair) -> None:
        for reservation in list(self.reservations):
            for leg in reservation.legs:
                if leg.pair is pair:
                    leg.settle_fenced(reservation.stats)
            self._free_if_settled(reservation)
