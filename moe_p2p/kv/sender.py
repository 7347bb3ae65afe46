"""The side that prefills: writes layers to the receivers that opened a request, or offers pages.

    start --> layer, layer, ... --> commit --> done             pages belong to the caller again
                    \\__________________|_ cancel (here or there), a lost receiver --> draining
                                                  \\--> drained and said so --> reusable
                                                   \\-- drain_s --> fence --> reusable

Each target rank of a request is a *flight*. `layer` may come before a receiver has opened: what it
would have written waits. A cancelled flight says "drained" when none of its writes is under way; a
receiver that hears it may give its pages to somebody else.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from moe_p2p import errors
from moe_p2p.errors import AbortedError, MoeP2pError, PeerDeadError, make, require, require_type
from moe_p2p.kv.channel import Message
from moe_p2p.kv.checks import check_request
from moe_p2p.kv.openings import Openings
from moe_p2p.kv.packing import Packer
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.sending import Flight, KVSending, Opened
from moe_p2p.kv.tail import MAX_USER_BYTES
from moe_p2p.kv.units import Step, int32_bytes
from moe_p2p.kv.worker import KVWorker


class KVSender(KVWorker):
    """engine: an `Engine` of its own."""

    role = "sender"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sendings: list[KVSending] = []  # not reusable yet
        self._openings = Openings()
        self._waiting: deque[tuple[KVSending, Flight]] = deque()  # opened, and without a slot
        control = (self.rows, self.row_bytes)
        self.packer = Packer(self.engine, self.cache, self.ring, control)

    def start(
        self, request: str, target: str | None, pages: Mapping[str, Tensor], *, total: int
    ) -> KVSending:
        """Begins a request of `total` tokens to an instance. pages: per group, int32 [n].

        target None: whichever instance opens it; its layers may be sent before anybody has, and
        open_s counts from `commit`. Raises UnavailableError unless connected to all ranks of a
        target.
        """
        check_request(self.name, request, total)
        with self.lock:
            self.check_name()
            taken = [each for each in self.sendings if each.request == request]
            require(
                target not in [each.target for each in taken],
                f"{self.name}: request {request!r} is under way; a retry takes another name",
            )
            sending = KVSending(self, request, target, total)
            sending.add_pages(pages)
            if target is not None:
                sending.flights = self._flights_to(target)
            self.sendings.append(sending)
            declined = self._openings.begin(target or "", request)
            if declined:
                self._fail(sending, make(AbortedError, self.text_of(sending, declined)))
            self._find_opened(sending)
        self.wake.set()
        return sending

    def give_up(self, request: str, why: str) -> None:
        """The request will not be started: whoever has opened it, or does so later, hears why."""
        with self.lock:
            self._openings.give_up("", request, str(why)[:400])

    def begin_of(self, request: str) -> int | None:
        """The first token that a receiver of a request that is not started wants; None: nobody."""
        with self.lock:
            return self._openings.begin_of(request)

    def _flights_to(self, target: str) -> list[Flight]:
        known = [pair for pair in self.pairs.values() if pair.worker.instance == target]
        ranks = self.ranks_of(known[0]) if known else [0]
        return [Flight(self.pair_with(target, rank)) for rank in ranks]

    # --- open ---

    def _find_opened(self, sending: KVSending) -> None:
        """A request without a target takes the instance that opens it once all ranks of it are
        connected: each of them opens it, so the message of the last one finds them."""
        instance = self._openings.instance_of(sending.request)
        if sending.state == "open" and not sending.flights and instance is not None:
            with suppress(errors.UnavailableError):
                sending.flights = self._flights_to(instance)
        for flight in sending.flights:
            if sending.state != "open" or flight.state != "waiting":
                continue
            opened = self._openings.take(flight.pair.name, sending.request)
            if opened is not None:
                self._open(sending, flight, opened)

    def _open(self, sending: KVSending, flight: Flight, opened: Opened) -> None:
        flight.opened = opened
        if not self.slots.num_free:
            self._waiting.append((sending, flight))
            return
        flight.state = "open"
        try:
            if opened.total != sending.total:
                text = f"{opened.pair.name} expects {opened.total} tokens, here are {sending.total}"
                raise make(errors.ProtocolError, self.text_of(sending, text))
            flight.units = flight.units_of(sending)
            flight.slot = self.slots.take(self.text_of(sending, "opening"))
            for layers, end in sending.runs():
                self._send_layers(sending, flight, layers, end)
            if sending.user is not None:
                self._send_tail(sending, flight)
        except MoeP2pError as error:  # pages that do not fit, say
            self._fail(sending, error)
        except Exception as error:  # other requests of the pair go on
            text = self.text_of(sending, f"cannot be sent to {opened.pair.name}: {error!r}")
            self._fail(sending, make(errors.ProtocolError, text))

    def _open_waiting(self) -> None:
        while self._waiting and self.slots.num_free:
            sending, flight = self._waiting.popleft()
            if flight.state == "waiting" and flight.opened is not None:
                self._open(sending, flight, flight.opened)

    def text_of(self, sending: KVSending, why: str) -> str:
        return f"{self.name}: request {sending.request!r}: {why}"

    # --- layers, tail ---

    def layers(
        self, sending: KVSending, layers: tuple[int, ...], end: int, after: Step | None = None
    ) -> None:
        """after: they are not computed yet, and each is sent when it is."""
        require_type(self.text_of(sending, "end"), end, int, "an int")
        with self.lock:
            self._require_open(sending)
            last = sending.calls[-1][1] if sending.calls else 0
            strange = set(layers).difference(sending.own_layers, sending.layers)
            wrong = [*sorted(strange), *layers]
            text = f"layer {wrong[0]} up to token {end} of {sending.total}, after {last}"
            ok = len(wrong) == len(layers) and last <= end <= sending.total
            require(ok, self.text_of(sending, text))
            sending.add_calls(layers, end, after, self.clock())
            try:
                for flight in sending.flights:
                    if flight.state == "open":
                        self._send_layers(sending, flight, layers, end)
            except MoeP2pError as error:
                self._fail(sending, error)
                raise

    def _require_open(self, sending: KVSending) -> None:
        if sending.error is not None:
            raise sending.error
        require(
            sending.state == "open" and sending.user is None,
            self.text_of(sending, "it was committed"),
        )

    def _send_layers(
        self, sending: KVSending, flight: Flight, layers: tuple[int, ...], end: int
    ) -> None:
        opened, units = flight.opened, flight.units
        assert opened is not None
        assert units is not None
        if end != flight.end and not flight.begin_chunk(end, self):
            flight.pair.send("moves", nonce=opened.nonce)
        chunk = flight.chunk
        layers = tuple(layer for layer in layers if layer in flight.pair.requests)
        if chunk is None or not layers:
            return
        if opened.verify:
            flight.unsummed += [(layer, chunk) for layer in layers]
            if not sending.gates:
                flight.sum_layers(self.cache)
        if opened.pull:
            return
        after = sending.step_of(layers[0], end)
        flight.requests += units.write(self.engine, layers, chunk, opened.imm, after)
        for layer in layers if flight.pair.packs else ():
            found = self.packer.add(flight, layer, chunk, sending.gates.get((layer, end)))
            sending.stats.packed += found

    def commit(self, sending: KVSending, user: bytes) -> None:
        with self.lock:
            self._require_open(sending)
            require(
                isinstance(user, bytes) and len(user) <= MAX_USER_BYTES,
                self.text_of(sending, f"user must be up to {MAX_USER_BYTES} bytes"),
            )
            sending.check_complete()
            sending.user, sending.committed_at = user, self.clock()
            try:
                for flight in sending.flights:
                    if flight.state == "open":
                        self._send_tail(sending, flight)
            except MoeP2pError as error:
                self._fail(sending, error)
                raise
        self.wake.set()

    def _send_tail(self, sending: KVSending, flight: Flight) -> None:
        opened, slot = flight.opened, flight.slot
        assert opened is not None
        assert slot is not None
        assert sending.user is not None
        # Sums and offers are of bytes that are there; without them the tail may go ahead.
        flight.tail_due = (opened.verify or opened.pull) and bool(sending.shut_gates())
        if flight.tail_due:
            return
        flight.sum_layers(self.cache)
        tail = flight.tail(sending.user, self.engine.num_nics)
        at = slot.number * self.row_bytes
        if opened.pull:
            struct.pack_into("<Q", self.rows, at, opened.nonce)
            names = [group.name for group in self.cache.layout.groups]
            pages = (int32_bytes(sending.pages[name]) for name in names)
            flight.pair.send(
                "offer", tail, *pages, nonce=opened.nonce, row=slot.number, groups=names
            )
            flight.committed = True
            return
        self.rows[at : at + len(tail)] = tail
        flight.requests.append(
            self.engine.write(
                flight.pair.memory.control,
                flight.pair.control,
                nbytes=len(tail),
                offset=at,
                region_offset=opened.row * self.row_bytes,
                imm=opened.imm,
            )
        )
        flight.committed = True  # not before: without requests under way it then counts as over

    # --- the end ---

    def poll(self, sending: KVSending) -> bool:
        with self.lock:
            for flight in sending.flights:
                if sending.state == "open" and flight.state == "open":
                    self._look(sending, flight)
            over = sending.settled() if sending.flights else self._has_nothing_to_send(sending)
            if sending.state == "open" and over:
                sending.state, sending.stats.ended_at = "complete", self.clock()
                self._free_if_settled(sending)
            return sending.state != "open"

    def _has_nothing_to_send(self, sending: KVSending) -> bool:
        """It was committed, and no receiver that it may go to wants anything of this rank."""
        to = sending.target
        known = [pair for pair in self.pairs.values() if to in (None, pair.worker.instance)]
        nobody = bool(known) and not any(self.ranks_of(pair) for pair in known)
        return sending.user is not None and (nobody or not sending.own_layers)

    def _look(self, sending: KVSending, flight: Flight) -> None:
        try:
            if flight.tail_due:
                self._send_tail(sending, flight)
        except MoeP2pError as error:
            self._fail(sending, error)
            return
        for request in flight.take_done(sending.stats):
            try:
                request.wait(0)
            except MoeP2pError as error:
                why = f"a write to {flight.pair.name} failed: {error}"
                self._fail(sending, make(PeerDeadError, self.text_of(sending, why)))
                self._lose(flight.pair, f"a write failed: {error}")
                return
        if not self._pack(sending, flight):
            return
        opened, over = flight.opened, not flight.requests and not flight.packing.left
        if flight.committed and over and opened is not None and not opened.pull:
            self._settle(flight)

    def _pack(self, sending: KVSending, flight: Flight) -> bool:
        """Goes on with packed rows; False: that failed the request."""
        try:
            self.packer.advance(flight)
        except MoeP2pError as error:
            self._fail(sending, error)
        return flight.state == "open"

    def _settle(self, flight: Flight) -> None:
        flight.state = "settled"
        self.packer.settle(flight)
        if flight.slot is not None:
            self.slots.give_back(flight.slot)
            flight.slot = None
            self.wake.set()  # of those that wait for it

    def wait(self, sending: KVSending, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else self.deadline(timeout_s)
        while not self.poll(sending):
            if deadline is not None and self.clock() >= deadline:
                text = self.text_of(sending, f"waited {timeout_s} s; {sending.progress()}")
                raise make(errors.TimeoutError, text)
            with self.lock:
                self.changed.wait(0.0005)
        if sending.error is not None:
            raise sending.error

    def cancel(self, sending: KVSending, why: str) -> None:
        with self.lock:
            text = self.text_of(sending, f"{why}; {sending.progress()}")
            self._fail(sending, make(AbortedError, text))

    def _fail(self, sending: KVSending, error: MoeP2pError) -> None:
        if sending.state != "open":
            return
        sending.state, sending.error, now = "failed", error, self.clock()
        sending.stats.failed, sending.stats.ended_at = True, now
        until, why = now + self.timeouts.drain_s, str(error)[:400]
        if not sending.flights:
            self._openings.give_up("", sending.request, why)
        for flight in sending.flights:
            if flight.state == "waiting" and flight.opened is None:
                self._openings.give_up(flight.pair.worker.instance, sending.request, why)
                flight.state = "settled"
            elif flight.state in ("waiting", "open"):
                flight.state, flight.drain_until = "draining", until
                flight.packing.clear()
                if flight.opened is not None and flight.opened.pull:
                    self._withdraw_offer(flight)
                for request in flight.requests:
                    request.cancel()
        self._drain(sending)
        self.changed.notify_all()
        self.wake.set()

    def _withdraw_offer(self, flight: Flight) -> None:
        if flight.slot is not None:  # who reads the nonce now finds that pages were taken back
            struct.pack_into("<Q", self.rows, flight.slot.number * self.row_bytes, 0)

    def _drain(self, sending: KVSending) -> bool:
        """Says "drained" for flights that have nothing under way; returns whether some have."""
        for flight in sending.flights:
            if flight.state != "draining" or flight.pair.lost:
                continue
            flight.take_done(sending.stats)
            if flight.requests:
                continue
            self._settle(flight)
            sending.stats.fenced("drained")
            if flight.opened is not None:
                why = str(sending.error)[:400]
                flight.pair.send("drained", nonce=flight.opened.nonce, why=why)
        self._free_if_settled(sending)
        return any(flight.state == "draining" for flight in sending.flights)

    def _free_if_settled(self, sending: KVSending) -> None:
        if sending.state != "open" and sending.settled() and not sending.reusable:
            sending.reusable = True
            self.sendings.remove(sending)
            self.count(sending.stats)
            self.changed.notify_all()

    # --- messages, deadlines, losses ---

    def on_message(self, pair: Pair, message: Message) -> None:
        with self.lock:
            if pair.lost:
                return
            if message.kind == "open":
                self._on_open(Opened.of(pair, message))
            elif message.kind == "cancel":
                self._on_cancel(pair, message.fields.get("nonce"), str(message.fields.get("why")))
            elif message.kind == "decline":
                self._on_decline(pair, str(message.fields["request"]), str(message.fields["why"]))
            elif message.kind == "grant":
                found = self._flight(pair, message.fields.get("nonce"))
                if found is not None and found[1].state == "open":
                    found[1].packing.take(message.fields["parts"])
                    self._pack(*found)
            elif message.kind == "release":
                found = self._flight(pair, message.fields.get("nonce"))
                if found is not None and found[1].state == "open" and found[1].committed:
                    self._withdraw_offer(found[1])
                    self._settle(found[1])
                    self.poll(found[0])
            self.changed.notify_all()

    def _on_open(self, opened: Opened) -> None:
        self._openings.add(opened)
        for sending in self.sendings:
            if sending.request == opened.request:
                self._find_opened(sending)

    def _on_decline(self, pair: Pair, request: str, why: str) -> None:
        why, instance = f"{pair.name} declines it: {why}", pair.worker.instance
        for sending in self.sendings:
            to = [flight.pair.worker.instance for flight in sending.flights]
            if sending.request == request and (not to or instance in to):
                self._fail(sending, make(AbortedError, self.text_of(sending, why)))
                return
        self._openings.decline(request, why)

    def _on_cancel(self, pair: Pair, nonce: Any, why: str) -> None:
        self._openings.cancel(pair, nonce, f"{pair.name} gave it up: {why}")
        found = self._flight(pair, nonce)
        if found is None:  # nothing of it is under way, if anything ever was
            pair.send("drained", nonce=nonce, why=why)
            return
        sending = found[0]
        self._fail(sending, make(AbortedError, self.text_of(sending, f"{pair.name}: {why}")))

    def _flight(self, pair: Pair, nonce: Any) -> tuple[KVSending, Flight] | None:
        for sending in self.sendings:
            for flight in sending.flights:
                opened = flight.opened
                if opened is None or flight.state == "settled":
                    continue
                if flight.pair is pair and opened.nonce == nonce:
                    return sending, flight
        return None

    def on_time(self, now: float) -> bool:
        draining = False
        self._open_waiting()
        for sending in list(self.sendings):
            if sending.state == "open":
                self.poll(sending)
                draining |= any(flight.packing.may_start for flight in sending.flights)
                self._check_opened(sending, now)
                self._check_signals(sending, now)
            draining |= self._drain(sending)
            for flight in sending.flights:
                late = flight.state == "draining" and now >= flight.drain_until
                if late and not flight.pair.lost:
                    why = f"writes of request {sending.request!r} did not end within "
                    self._lose(flight.pair, f"{why}{self.timeouts.drain_s} s")
        return draining

    def _check_opened(self, sending: KVSending, now: float) -> None:
        waiting = [flight.pair.name for flight in sending.flights if flight.state == "waiting"]
        since = sending.stats.queued_at
        if not sending.flights and sending.user is not None:
            waiting, since = ["any receiver"], sending.committed_at
        if waiting and now - since > self.timeouts.open_s:
            why = f"waited {self.timeouts.open_s} s in phase open for {', '.join(waiting)}"
            text = self.text_of(sending, f"{why}; {sending.progress()}")
            self._fail(sending, make(errors.TimeoutError, text))

    def _check_signals(self, sending: KVSending, now: float) -> None:
        shut = sending.shut_gates()
        if shut and now - sending.begun_at > self.timeouts.layers_s:
            where = f"layer {shut[0].layer} of step {shut[0].step}"
            why = f"waited {self.timeouts.layers_s} s in phase signal for {where}"
            text = self.text_of(sending, f"{why}; {sending.progress()}")
            self._fail(sending, make(errors.TimeoutError, text))

    def on_lost(self, pair: Pair) -> None:
        self._openings.forget(pair)
        for sending in list(self.sendings):
            if any(f.pair is pair and f.state != "settled" for f in sending.flights):
                text = self.text_of(sending, f"lost {pair.name}: {pair.lost}")
                self._fail(sending, make(PeerDeadError, text))

    def on_fenced(self, pair: Pair) -> None:
        for sending in list(self.sendings):
            for flight in sending.flights:
                if flight.pair is pair and flight.state != "settled":
                    flight.take_done(sending.stats)
                    sending.stats.fenced(pair.fenced_by, pair.fence_retries)
                    self._settle(flight)
            self._free_if_settled(sending)
