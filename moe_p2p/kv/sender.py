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
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_p2p import errors
from moe_p2p.errors import AbortedError, MoeP2pError, PeerDeadError, make, require
from moe_p2p.kv.channel import Message
from moe_p2p.kv.checksum import add
from moe_p2p.kv.packing import Packer
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.requests import aligned_begin
from moe_p2p.kv.sending import Flight, KVSending, Opened
from moe_p2p.kv.tail import MAX_CHUNKS, MAX_USER_BYTES, Tail
from moe_p2p.kv.units import Units, int32_bytes
from moe_p2p.kv.worker import KVWorker

_KEPT = 4096  # names of requests that were given up


class KVSender(KVWorker):
    """engine: an `Engine` of its own."""

    role = "sender"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sendings: list[KVSending] = []  # not reusable yet
        control = (self.rows, self.row_bytes)
        self.packer = Packer(self.engine, self.cache, self.ring, control)
        self._opened: dict[tuple[str, str], Opened] = {}  # by receiver and request, not started
        self._given_up: OrderedDict[tuple[str, str], str] = OrderedDict()  # by instance and request

    def start(
        self, request: str, target: str, pages: Mapping[str, Tensor], *, total: int
    ) -> KVSending:
        """Begins a request of `total` tokens to an instance. pages: per group, int32 [n].

        Raises UnavailableError unless connected to all its ranks.
        """
        with self.lock:
            known = [pair for pair in self.pairs.values() if pair.worker.instance == target]
            ranks = self.ranks_of(known[0]) if known else [0]
            sending = KVSending(self, request, pages, total)
            sending.flights = [Flight(self.pair_with(target, rank)) for rank in ranks]
            sending.began_at = self.clock()
            self.sendings.append(sending)
            self._given_up.pop((target, request), None)
            for flight in sending.flights:
                opened = self._opened.pop((flight.pair.name, request), None)
                if opened is not None:
                    self._open(sending, flight, opened)
        self.wake.set()
        return sending

    # --- open ---

    def _open(self, sending: KVSending, flight: Flight, opened: Opened) -> None:
        flight.opened, flight.state = opened, "open"
        try:
            if opened.total != sending.total:
                text = f"{opened.pair.name} expects {opened.total} tokens, here are {sending.total}"
                raise make(errors.ProtocolError, self._text(sending, text))
            flight.units = Units(
                flight.pair, sending.total, source=sending.pages, target=opened.pages
            )
            flight.slot = self.slots.take(self._text(sending, "opening"))
            for layer, end in sending.calls:
                self._send_layer(flight, layer, end)
            if sending.user is not None:
                self._send_tail(sending, flight)
        except MoeP2pError as error:  # pages that do not fit, say
            self._fail(sending, error)

    def _text(self, sending: KVSending, why: str) -> str:
        return f"{self.name}: request {sending.request!r}: {why}"

    # --- layers, tail ---

    def layer(self, sending: KVSending, layer: int, end: int) -> None:
        with self.lock:
            self._require_open(sending)
            last = sending.calls[-1][1] if sending.calls else 0
            require(
                last <= end <= sending.total and layer in sending.flights[0].pair.requests,
                self._text(
                    sending, f"layer {layer} up to token {end} of {sending.total}, after {last}"
                ),
            )
            sending.calls.append((layer, end))
            try:
                for flight in sending.flights:
                    if flight.state == "open":
                        self._send_layer(flight, layer, end)
            except MoeP2pError as error:
                self._fail(sending, error)
                raise

    def _require_open(self, sending: KVSending) -> None:
        if sending.error is not None:
            raise sending.error
        require(
            sending.state == "open" and sending.user is None,
            self._text(sending, "it was committed"),
        )

    def _send_layer(self, flight: Flight, layer: int, end: int) -> None:
        opened, units = flight.opened, flight.units
        assert opened is not None
        assert units is not None
        if end != flight.end:
            self._begin_chunk(flight, end)
        chunk = flight.chunk
        if chunk is None:
            return
        if opened.verify:
            part = units.checksum(self.cache, layer, chunk, at_source=True)
            flight.sums[layer] = add(flight.sums.get(layer, 0), part)
        if not opened.pull:
            flight.requests += units.write(self.engine, layer, chunk, opened.imm)
            if flight.pair.packs:
                self.packer.add(flight, layer, chunk)

    def _begin_chunk(self, flight: Flight, end: int) -> None:
        """Whole pages of the target, but for the last: two chunks never write the same page."""
        opened = flight.opened
        assert opened is not None
        last = end == opened.total
        begin = flight.chunks[-1][1] if flight.chunks else opened.begin
        to = end if last else max(aligned_begin(flight.pair.plan.target, end), begin)
        flight.end, flight.chunk = end, (begin, to) if to > begin or last else None
        if flight.chunk is not None:
            flight.chunks.append(flight.chunk)
            require(
                len(flight.chunks) <= MAX_CHUNKS,
                f"{self.name}: request {opened.request!r} has more than {MAX_CHUNKS} chunks",
            )

    def commit(self, sending: KVSending, user: bytes) -> None:
        with self.lock:
            self._require_open(sending)
            require(
                isinstance(user, bytes) and len(user) <= MAX_USER_BYTES,
                self._text(sending, f"user must be up to {MAX_USER_BYTES} bytes"),
            )
            self._check_complete(sending)
            sending.user = user
            try:
                for flight in sending.flights:
                    if flight.state == "open":
                        self._send_tail(sending, flight)
            except MoeP2pError as error:
                self._fail(sending, error)
                raise
        self.wake.set()

    def _check_complete(self, sending: KVSending) -> None:
        """Each chunk has each layer, once."""
        layers = sending.flights[0].pair.layers
        for end in sorted({end for _, end in sending.calls} | {sending.total}):
            got = sorted(layer for layer, to in sending.calls if to == end)
            missing = sorted(set(layers) - set(got))
            require(
                got == layers,
                self._text(
                    sending,
                    f"commit without layers {missing[:4]} of tokens up to {end}"
                    if missing
                    else f"layers up to token {end} were sent twice",
                ),
            )

    def _send_tail(self, sending: KVSending, flight: Flight) -> None:
        opened, slot = flight.opened, flight.slot
        assert opened is not None
        assert slot is not None
        assert sending.user is not None
        sums = tuple(flight.sums[layer] for layer in flight.pair.layers) if opened.verify else ()
        ends = tuple(end for _, end in flight.chunks)
        tail = Tail(opened.nonce, opened.begin, sending.total, ends, sums, sending.user).to_bytes()
        at = slot.number * self.row_bytes
        flight.committed = True
        if opened.pull:
            struct.pack_into("<Q", self.rows, at, opened.nonce)
            names = [group.name for group in self.cache.layout.groups]
            pages = (int32_bytes(sending.pages[name]) for name in names)
            flight.pair.send(
                "offer", tail, *pages, nonce=opened.nonce, row=slot.number, groups=names
            )
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

    # --- the end ---

    def poll(self, sending: KVSending) -> bool:
        with self.lock:
            for flight in sending.flights:
                if sending.state == "open" and flight.state == "open":
                    self._look(sending, flight)
            if sending.state == "open" and all(f.state == "settled" for f in sending.flights):
                sending.state = "complete"
                self._free_if_settled(sending)
            return sending.state != "open"

    def _look(self, sending: KVSending, flight: Flight) -> None:
        done = [request for request in flight.requests if request.done()]
        for request in done:
            try:
                request.wait(0)
            except MoeP2pError as error:
                why = f"a write to {flight.pair.name} failed: {error}"
                self._fail(sending, make(PeerDeadError, self._text(sending, why)))
                self._lose(flight.pair, f"a write failed: {error}")
                return
            flight.requests.remove(request)
        if not self._pack(sending, flight):
            return
        opened, over = flight.opened, not flight.requests and not flight.packing.pending
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

    def wait(self, sending: KVSending, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else self.clock() + timeout_s
        while not self.poll(sending):
            if deadline is not None and self.clock() >= deadline:
                text = self._text(sending, f"waited {timeout_s} s; {self._progress(sending)}")
                raise make(errors.TimeoutError, text)
            with self.lock:
                self.changed.wait(0.0005)
        if sending.error is not None:
            raise sending.error

    def cancel(self, sending: KVSending, why: str) -> None:
        with self.lock:
            text = self._text(sending, f"{why}; {self._progress(sending)}")
            self._fail(sending, make(AbortedError, text))

    def _fail(self, sending: KVSending, error: MoeP2pError) -> None:
        if sending.state != "open":
            return
        sending.state, sending.error = "failed", error
        until = self.clock() + self.timeouts.drain_s
        for flight in sending.flights:
            if flight.state == "waiting":
                key = (flight.pair.worker.instance, sending.request)
                self._given_up[key] = str(error)[:400]  # a receiver that opens it later hears why
                flight.state = "settled"
            elif flight.state == "open":
                flight.state, flight.drain_until = "draining", until
                flight.packing.pending.clear()
                if flight.opened is not None and flight.opened.pull:
                    self._withdraw_offer(flight)
                for request in flight.requests:
                    request.cancel()
        while len(self._given_up) > _KEPT:
            self._given_up.popitem(last=False)
        self._drain(sending)
        self.changed.notify_all()
        self.wake.set()

    def _withdraw_offer(self, flight: Flight) -> None:
        """Who reads the nonce after this finds that the pages were taken back."""
        if flight.slot is not None:
            struct.pack_into("<Q", self.rows, flight.slot.number * self.row_bytes, 0)

    def _drain(self, sending: KVSending) -> bool:
        """Says "drained" for flights that have nothing under way; returns whether some have."""
        for flight in sending.flights:
            if flight.state != "draining" or flight.pair.lost:
                continue
            flight.requests = [each for each in flight.requests if not each.done()]
            if flight.requests:
                continue
            self._settle(flight)
            if flight.opened is not None:
                why = str(sending.error)[:400]
                flight.pair.send("drained", nonce=flight.opened.nonce, why=why)
        self._free_if_settled(sending)
        return any(flight.state == "draining" for flight in sending.flights)

    def _free_if_settled(self, sending: KVSending) -> None:
        settled = all(flight.state == "settled" for flight in sending.flights)
        if sending.state != "open" and settled and not sending.reusable:
            sending.reusable = True
            self.sendings.remove(sending)
            self.changed.notify_all()

    def wait_reusable(self, sending: KVSending, timeout_s: float | None) -> None:
        limit = self.timeouts.drain_s + self.timeouts.connect_s if timeout_s is None else timeout_s
        deadline = self.clock() + limit
        with self.lock:
            while not sending.reusable:
                left = deadline - self.clock()
                if left <= 0:
                    text = self._text(sending, f"pages are not free after {limit} s")
                    raise make(errors.TimeoutError, text)
                self.changed.wait(min(left, 0.05))

    def _progress(self, sending: KVSending) -> str:
        layers = len(sending.flights[0].pair.layers)
        states = [
            f"{flight.pair.name} {flight.state}, {len(flight.requests)} writes under way"
            f"{flight.packing.text()}"
            for flight in sending.flights
        ]
        sent = len(sending.calls)
        return f"{sent} calls of layer() of {layers} layers were made; {'; '.join(states)}"

    # --- messages, deadlines, losses ---

    def on_message(self, pair: Pair, message: Message) -> None:
        with self.lock:
            if pair.lost:
                return
            if message.kind == "open":
                self._on_open(pair, Opened.of(pair, message))
            elif message.kind == "cancel":
                self._on_cancel(pair, message.fields.get("nonce"), str(message.fields.get("why")))
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

    def _on_open(self, pair: Pair, opened: Opened) -> None:
        for sending in self.sendings:
            for flight in sending.flights:
                waits = flight.pair is pair and flight.state == "waiting"
                if waits and sending.request == opened.request and sending.state == "open":
                    self._open(sending, flight, opened)
                    return
        why = self._given_up.get((pair.worker.instance, opened.request))
        if why is not None:
            pair.send("drained", nonce=opened.nonce, why=why)
            return
        self._opened[pair.name, opened.request] = opened

    def _on_cancel(self, pair: Pair, nonce: Any, why: str) -> None:
        for key, opened in list(self._opened.items()):
            if opened.pair is pair and opened.nonce == nonce:
                del self._opened[key]
        found = self._flight(pair, nonce)
        if found is None:  # nothing of it is under way, if anything ever was
            pair.send("drained", nonce=nonce, why=why)
            return
        sending = found[0]
        self._fail(sending, make(AbortedError, self._text(sending, f"{pair.name}: {why}")))

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
        for sending in list(self.sendings):
            if sending.state == "open":
                self.poll(sending)
                draining |= any(flight.packing.pending for flight in sending.flights)
                self._check_opened(sending, now)
            draining |= self._drain(sending)
            for flight in sending.flights:
                late = flight.state == "draining" and now >= flight.drain_until
                if late and not flight.pair.lost:
                    why = f"writes of request {sending.request!r} did not end within "
                    self._lose(flight.pair, f"{why}{self.timeouts.drain_s} s")
        return draining

    def _check_opened(self, sending: KVSending, now: float) -> None:
        waiting = [flight.pair.name for flight in sending.flights if flight.state == "waiting"]
        if waiting and now - sending.began_at > self.timeouts.open_s:
            why = f"waited {self.timeouts.open_s} s in phase open for {', '.join(waiting)}"
            text = self._text(sending, f"{why}; {self._progress(sending)}")
            self._fail(sending, make(errors.TimeoutError, text))

    def on_lost(self, pair: Pair) -> None:
        for key, opened in list(self._opened.items()):
            if opened.pair is pair:
                del self._opened[key]
        for sending in list(self.sendings):
            if any(f.pair is pair and f.state != "settled" for f in sending.flights):
                text = self._text(sending, f"lost {pair.name}: {pair.lost}")
                self._fail(sending, make(PeerDeadError, text))

    def on_fenced(self, pair: Pair) -> None:
        for sending in list(self.sendings):
            for flight in sending.flights:
                if flight.pair is pair and flight.state != "settled":
                    self._settle(flight)
            self._free_if_settled(sending)
