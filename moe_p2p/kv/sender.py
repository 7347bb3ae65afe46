"""The side that prefills: writes layers to the receivers that opened a request, or offers pages.

    start --> layer, layer, ... --> commit --> done             pages belong to the caller again
                    \\__________________|_ cancel (here or there), a lost receiver --> draining
                                                  \\--> drained and said so --> reusable
                                                   \\-- drain_s --> fence --> reusable

A request has a transfer to each target rank (moe_p2p/kv/receiver_transfer.py). `layer` may come
before a receiver has opened: what it would have written waits. A cancelled transfer says "drained"
when none of its writes is under way; a receiver that hears it may give its pages to somebody else.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_p2p import errors
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Gate, shut
from moe_p2p.errors import AbortedError, MoeP2pError, PeerDeadError, make, require
from moe_p2p.fleet.late import Wait
from moe_p2p.kv.channel import Message
from moe_p2p.kv.chunks import Step
from moe_p2p.kv.footer import MAX_USER_BYTES
from moe_p2p.kv.memory import KVCache
from moe_p2p.kv.openings import Opened, Openings
from moe_p2p.kv.packing import Packer
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.receiver_transfer import ReceiverTransfer
from moe_p2p.kv.stats import RequestState, TransferState
from moe_p2p.kv.worker import KVWorker, Options, check_request, failing
from moe_p2p.machine.phases import Phase

if TYPE_CHECKING:  # of typing since Python 3.11
    from typing_extensions import Unpack


class KVSending:
    """One request. Made by `KVSender.start`."""

    def __init__(self, sender: KVSender, request: str, target: str | None, total: int) -> None:
        self.sender, self.request, self.target, self.total = sender, request, target, total
        self.pages: dict[str, Tensor] = {}
        self.transfers: list[ReceiverTransfer] = []
        self.calls: list[tuple[int, int]] = []  # (layer, tokens that are there), in their order
        self.user: bytes | None = None  # not None: committed
        self.state = RequestState.OPEN
        self.error: MoeP2pError | None = None
        self.reusable = False  # its pages may be given to somebody else
        self.stats = sender.new_stats(request)
        self._gates: dict[tuple[int, int], Gate] = {}  # of calls that wait for a signal
        self._shut: list[Gate] = []  # of these, not known to be open
        self._step_at = 0.0  # when the last step began
        self._committed_at = 0.0

    @property
    def layers(self) -> list[int]:
        """The model's layers that travel from here; all of this rank's until it has a target."""
        if self.transfers:
            return sorted({layer for each in self.transfers for layer in each.pair.layers})
        return self.own_layers

    @cached_property
    def own_layers(self) -> list[int]:
        """All of this rank's. A target may want none of some of them."""
        cache = self.sender.cache
        stage = cache.rank // cache.layout.tp
        return sorted(
            {
                group.layers[at]
                for group in cache.layout.groups
                for at in cache.layout.layers_of(group, stage)
            }
        )

    def text(self, why: str) -> str:
        """For errors: who, which request, and why."""
        return f"{self.sender.name}: request {self.request!r}: {why}"

    def facts(self) -> dict[str, Any]:
        to = ", ".join(each.pair.name for each in self.transfers) or str(self.target)
        chunks = len({end for _, end in self.calls})
        return {"to": to, "tokens": self.total, "layers": len(self.layers), "chunks": chunks}

    def imms(self) -> list[int]:
        return []

    # --- layers, footer ---

    def add_pages(self, pages: Mapping[str, Tensor]) -> None:
        """Lists that begin with what was there before: with chunked prefill, engines allocate
        pages of a chunk when they schedule it."""
        who, cache = f"{self.sender.name}: request {self.request!r}", self.sender.cache
        lists = cache.page_lists(who, pages)
        cache.check_bounds(who, lists)
        with self.sender.lock:
            self.pages.update(lists)

    def layer(self, layer: int, end: int | None = None) -> None:
        """Sends one layer, number `layer` of the model, of tokens up to `end` (None: all).

        Its bytes must be there; on a GPU synchronize `torch.cuda.current_stream(device)` first, of
        the cache's device (a new thread's current one is 0), or let `KVSignals` do it.
        With chunked prefill all layers of a chunk come before the layers of the next one.
        """
        self.send_layers((layer,), self.total if end is None else end)

    def send_layers(self, layers: tuple[int, ...], end: int, after: Step | None = None) -> None:
        """after: they are not computed yet, and each is sent when it is."""
        if not isinstance(end, int):  # its text takes longer than the write of a layer
            raise errors.wrong_type(self.text("end"), end, "an int")
        with self.sender.lock:
            self._require_open()
            last = self.calls[-1][1] if self.calls else 0
            strange = set(layers).difference(self.own_layers)
            if strange:
                strange.difference_update(self.layers)
            if strange or not last <= end <= self.total:
                wrong = min(strange, default=layers[0])
                text = f"layer {wrong} up to token {end} of {self.total}, after {last}"
                raise make(errors.InvalidArgumentError, self.text(text))
            self._add_calls(layers, end, after)
            with failing(self):
                for each in self.transfers:
                    if each.state is TransferState.OPEN:
                        each.send(layers, end, self._gates)

    def _require_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self.state is not RequestState.OPEN or self.user is not None:
            raise make(errors.InvalidArgumentError, self.text("it was committed"))

    def _add_calls(self, layers: tuple[int, ...], end: int, step: Step | None) -> None:
        self.calls += [(layer, end) for layer in layers]
        if step is None:
            return
        gates = [Gate(step[0], layer, step[1]) for layer in layers]
        self._gates.update(((gate.layer, end), gate) for gate in gates)
        self._shut += gates
        self._step_at = self.sender.clock()

    def shut_gates(self) -> list[Gate]:
        """Layers that are not computed yet, as far as signals say."""
        if self._shut:
            self._shut = shut(self._shut)
        return self._shut

    def commit(self, user: bytes = b"") -> None:
        """All layers of all tokens were sent. user: up to 256 bytes for the receivers."""
        with self.sender.lock:
            self._require_open()
            require(
                isinstance(user, bytes) and len(user) <= MAX_USER_BYTES,
                self.text(f"user must be up to {MAX_USER_BYTES} bytes"),
            )
            self._check_complete()
            self.user, self._committed_at = user, self.sender.clock()
            with failing(self):
                for each in self.transfers:
                    if each.state is TransferState.OPEN:
                        self._send_footer(each)
        self.sender.wake.set()

    def _check_complete(self) -> None:
        """Each chunk has each layer that travels, once."""
        wanted = set(self.layers)
        for end in sorted({end for _, end in self.calls} | {self.total}):
            got = [layer for layer, to in self.calls if to == end]
            missing = sorted(wanted.difference(got))
            why = f"layers up to token {end} were sent twice"
            if missing:
                why = f"commit without layers {missing[:4]} of tokens up to {end}"
            require(not missing and len(set(got)) == len(got), self.text(why))

    def _send_footer(self, transfer: ReceiverTransfer) -> None:
        assert self.user is not None
        transfer.send_footer(self.user, computed=not self.shut_gates())

    # --- open ---

    def go_to(self, pairs: list[Pair]) -> None:
        """Under the lock: these are the ranks of its target."""
        sender = self.sender
        self.transfers = [
            ReceiverTransfer(sender, sender.packer, pair, self.stats) for pair in pairs
        ]

    def begin(self, transfer: ReceiverTransfer) -> None:
        """Under the lock: a receiver has opened it and a slot is free. Sends what was computed."""
        try:
            transfer.begin(self.total, self.pages)
            for layers, end in self._runs():
                transfer.send(layers, end, self._gates)
            if self.user is not None:
                self._send_footer(transfer)
        except MoeP2pError as error:  # pages that do not fit, say
            self.fail(error)
        except Exception as error:  # other requests of the pair go on
            text = self.text(f"cannot be sent to {transfer.pair.name}: {error!r}")
            self.fail(make(errors.ProtocolError, text))

    def _runs(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Calls so far: layers that wait for the same step, or for none, and where they end."""
        for (end, _), calls in itertools.groupby(self.calls, self._run_of):
            yield tuple(layer for layer, _ in calls), end

    def _run_of(self, call: tuple[int, int]) -> tuple[int, Step | None]:
        gate = self._gates.get(call)
        return call[1], None if gate is None else (gate.signals, gate.step)

    # --- the end ---

    def done(self) -> bool:
        with self.sender.lock:
            for each in self.transfers:
                if self.state is RequestState.OPEN and each.state is TransferState.OPEN:
                    self._look_at(each)
            if self.state is RequestState.OPEN and self._is_over():
                self.state = RequestState.COMPLETE
                self.stats.end(self.sender.clock())
                self._free_if_settled()
            return self.state is not RequestState.OPEN

    def _look_at(self, transfer: ReceiverTransfer) -> None:
        with suppress(MoeP2pError), failing(self):
            if transfer.footer_due:
                self._send_footer(transfer)
        if self.state is not RequestState.OPEN:
            return
        try:
            transfer.check_writes()
        except MoeP2pError as error:
            if transfer.pair.lost:
                self._fail_lost(transfer.pair)
                return
            why = f"a write to {transfer.pair.name} failed: {error}"
            self.fail(make(PeerDeadError, self.text(why)))
            self.sender.lose(transfer.pair, f"a write failed: {error}")
            return
        self.pack(transfer)
        if transfer.state is TransferState.OPEN:
            transfer.settle_if_over()

    def pack(self, transfer: ReceiverTransfer) -> None:
        """Under the lock: goes on with packed rows; what they raise fails the request."""
        with suppress(MoeP2pError), failing(self):
            if transfer.packing is not None:
                transfer.packing.advance()

    def _is_over(self) -> bool:
        if self.transfers:
            return self._is_settled()
        # Committed, and no receiver that it may go to wants anything of this rank.
        sender = self.sender
        known = [p for p in sender.pairs.values() if self.target in (None, p.worker.instance)]
        nobody = bool(known) and not any(sender.ranks_of(pair) for pair in known)
        return self.user is not None and (nobody or not self.own_layers)

    def _is_settled(self) -> bool:
        """Nothing reads its pages for a receiver."""
        return all(each.state is TransferState.SETTLED for each in self.transfers)

    def progress(self) -> str:
        where = "; ".join(each.text() for each in self.transfers) or "no receiver has opened it"
        calls, layers = len(self.calls), len(self.layers)
        return f"{calls} calls of layer() of {layers} layers were made; {where}"

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when all receivers have all bytes; pages may then be reused. Raises what ended
        it. timeout_s: TimeoutError, and the request goes on."""
        sender = self.sender
        deadline = None if timeout_s is None else sender.deadline(timeout_s)
        while not self.done():
            if deadline is not None and sender.clock() >= deadline:
                text = self.text(f"waited {timeout_s} s; {self.progress()}")
                raise make(errors.TimeoutError, text)
            with sender.lock:
                sender.changed.wait(0.0005)
        if self.error is not None:
            raise self.error

    def wait_reusable(self, timeout_s: float | None = None) -> None:
        """Waits until nothing reads its pages: at most drain_s after it failed."""
        self.sender.wait_reusable(self, timeout_s)

    def cancel(self, why: str = "cancelled") -> None:
        with self.sender.lock:
            self.fail(make(AbortedError, self.text(f"{why}; {self.progress()}")))

    def fail(self, error: MoeP2pError) -> None:
        """Under the lock, like all that follows."""
        if self.state is not RequestState.OPEN:
            return
        sender, now, why = self.sender, self.sender.clock(), str(error)[:400]
        self.state, self.error = RequestState.FAILED, error
        self.stats.end(now, failed=True)
        if not self.transfers:
            sender.openings.give_up("", self.request, why)
        for each in self.transfers:
            if each.state is TransferState.WAITING and each.opened is None:
                sender.openings.give_up(each.pair.worker.instance, self.request, why)
                each.settle_unopened()
            else:
                each.drain(now + sender.timeouts.drain_s)
        self._drain()
        sender.changed.notify_all()
        sender.wake.set()

    def _drain(self) -> bool:
        """Transfers with nothing under way say "drained"; returns whether some have."""
        for each in self.transfers:
            each.settle_drained(str(self.error)[:400])
        self._free_if_settled()
        return any(each.state is TransferState.DRAINING for each in self.transfers)

    def _free_if_settled(self) -> None:
        if self.state is not RequestState.OPEN and self._is_settled() and not self.reusable:
            self.reusable = True
            self.sender.forget(self)

    # --- deadlines, losses ---

    def on_time(self, now: float) -> bool:
        """Returns whether something drains, or may be packed."""
        busy = False
        if self.state is RequestState.OPEN:
            self.done()
            busy = any(each.may_pack for each in self.transfers)
            self._check_opened(now)
            self._check_signals(now)
        busy |= self._drain()
        for each in self.transfers:
            if each.drains_too_long(now):
                limit = f"{self.sender.timeouts.drain_s} s"
                why = f"writes of request {self.request!r} did not end within {limit}"
                self.sender.lose(each.pair, why)
        return busy

    def _check_opened(self, now: float) -> None:
        limit, (waiting, since) = self.sender.timeouts.open_s, self._unopened()
        if waiting and now - since > limit:
            self._fail_late(f"waited {limit} s in phase open for {', '.join(waiting)}")

    def _unopened(self) -> tuple[list[str], float]:
        """Receivers that have not opened it, and since when they could."""
        if not self.transfers and self.user is not None:
            return ["any receiver"], self._committed_at
        waiting = [e.pair.name for e in self.transfers if e.state is TransferState.WAITING]
        return waiting, self.stats.queued_at

    def waits(self) -> list[tuple[tuple[str, str], Wait]]:
        """For receivers and signals; alike for requests that wait for the same."""
        if self.state is not RequestState.OPEN:
            return []
        found, timeouts, (waiting, since) = [], self.sender.timeouts, self._unopened()
        if waiting:
            who = ", ".join(waiting)
            text = functools.partial(self.text, f"waits in phase open for {who}")
            found.append((("open", who), Wait(since, timeouts.open_s, text)))
        if closed := self.shut_gates():
            layer = f"layer {closed[0].layer} of step {closed[0].step}"
            text = functools.partial(self.text, f"waits in phase signal for {layer}")
            found.append((("signal", ""), Wait(self._step_at, timeouts.layers_s, text)))
        return found

    def _check_signals(self, now: float) -> None:
        limit, closed = self.sender.timeouts.layers_s, self.shut_gates()
        if closed and now - self._step_at > limit:
            where = f"layer {closed[0].layer} of step {closed[0].step}"
            self._fail_late(f"waited {limit} s in phase signal for {where}")

    def _fail_late(self, why: str) -> None:
        self.fail(make(errors.TimeoutError, self.text(f"{why}; {self.progress()}")))

    def on_lost(self, pair: Pair) -> None:
        """A receiver that has all bytes may leave before their writes have ended here: until the
        fence they may."""
        mine = [each for each in self.transfers if each.pair is pair]
        mine = [each for each in mine if each.state is not TransferState.SETTLED]
        if self.state is RequestState.OPEN and all(each.is_posted for each in mine):
            if mine:
                pair.delay_fence(self.sender.clock() + self.sender.timeouts.drain_s)
        elif mine:
            self._fail_lost(pair)

    def _fail_lost(self, pair: Pair) -> None:
        self.fail(make(PeerDeadError, self.text(f"lost {pair.name}: {pair.lost}")))

    def on_fenced(self, pair: Pair) -> None:
        mine = [each for each in self.transfers if each.pair is pair]
        if not self.done() and any(each.state is not TransferState.SETTLED for each in mine):
            self._fail_lost(pair)
        for each in mine:
            each.settle_fenced()
        self._free_if_settled()


class KVSender(KVWorker):
    """engine: an `Engine` of its own."""

    role = "sender"

    def __init__(
        self, engine: Engine, cache: KVCache, *, instance: str, **options: Unpack[Options]
    ) -> None:
        super().__init__(engine, cache, instance=instance, **options)
        self.sendings: list[KVSending] = []  # not reusable yet
        self.openings = Openings()
        self.packer = Packer(self)
        self._waiting: deque[tuple[KVSending, ReceiverTransfer]] = deque()  # for slots

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
                sending.go_to(self.pairs_with(target))
            self.sendings.append(sending)
            declined = self.openings.begin(target or "", request)
            if declined:
                sending.fail(make(AbortedError, sending.text(declined)))
            self._find_opened(sending)
        self.wake.set()
        return sending

    def give_up(self, request: str, why: str) -> None:
        """The request will not be started: whoever has opened it, or does so later, hears why."""
        with self.lock:
            self.openings.give_up("", request, str(why)[:400])

    def begin_of(self, request: str) -> int | None:
        """The first token that a receiver of a request that is not started wants; None: nobody."""
        with self.lock:
            return self.openings.begin_of(request)

    def _find_opened(self, sending: KVSending) -> None:
        """A request without a target takes the instance that opens it once all ranks of it are
        connected: each of them opens it, so the message of the last one finds them."""
        if sending.state is not RequestState.OPEN:
            return
        instance = self.openings.instance_of(sending.request)
        if not sending.transfers and instance is not None:
            with suppress(errors.UnavailableError):
                sending.go_to(self.pairs_with(instance))
        for transfer in sending.transfers:
            if transfer.state is TransferState.WAITING:
                opened = self.openings.take(transfer.pair.name, sending.request)
                if opened is not None:
                    transfer.was_opened(opened)
                    self._waiting.append((sending, transfer))
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self.slots.num_free:
            sending, transfer = self._waiting.popleft()
            if transfer.state is TransferState.WAITING:
                sending.begin(transfer)

    def forget(self, sending: KVSending) -> None:
        """Its pages are reusable."""
        self.sendings.remove(sending)
        self.count(sending)
        self.changed.notify_all()

    def under_way(self) -> list[Phase]:
        return [self.phase_of(each, is_over=False) for each in list(self.sendings)]

    # --- messages, deadlines, losses ---

    def on_message(self, pair: Pair, message: Message) -> None:
        fields = message.fields
        with self.lock:
            if pair.lost:
                return
            if message.kind == "open":
                self._on_open(Opened.of(pair, message))
            elif message.kind == "cancel":
                self._on_cancel(pair, fields.get("nonce"), str(fields.get("why")))
            elif message.kind == "decline":
                self._on_decline(pair, str(fields["request"]), str(fields["why"]))
            elif (found := self._find(pair, fields.get("nonce"))) is not None:
                sending, transfer = found
                is_open = transfer.state is TransferState.OPEN
                if message.kind == "grant" and is_open and transfer.packing is not None:
                    transfer.packing.take(fields["parts"])
                    sending.pack(transfer)
                elif message.kind == "release" and transfer.release():
                    sending.done()
            self.changed.notify_all()

    def _on_open(self, opened: Opened) -> None:
        self.openings.add(opened)
        for sending in list(self.sendings):
            if sending.request == opened.request:
                self._find_opened(sending)

    def _on_decline(self, pair: Pair, request: str, why: str) -> None:
        why, instance = f"{pair.name} declines it: {why}", pair.worker.instance
        for sending in self.sendings:
            to = [each.pair.worker.instance for each in sending.transfers]
            if sending.request == request and (not to or instance in to):
                sending.fail(make(AbortedError, sending.text(why)))
                return
        self.openings.decline(request, why)

    def _on_cancel(self, pair: Pair, nonce: object, why: str) -> None:
        self.openings.cancel(pair, nonce, f"{pair.name} gave it up: {why}")
        found = self._find(pair, nonce)
        if found is None:  # nothing of it is under way, if anything ever was
            pair.send("drained", nonce=nonce, why=why)
            return
        sending = found[0]
        sending.fail(make(AbortedError, sending.text(f"{pair.name}: {why}")))

    def _find(self, pair: Pair, nonce: object) -> tuple[KVSending, ReceiverTransfer] | None:
        for sending in self.sendings:
            for each in sending.transfers:
                opened = each.opened
                if opened is None or each.state is TransferState.SETTLED:
                    continue
                if each.pair is pair and opened.nonce == nonce:
                    return sending, each
        return None

    def on_time(self, now: float) -> bool:
        self._begin_waiting()
        busy = self.on_time_of(list(self.sendings), now)
        self.name_late(now, self.sendings)
        return busy

    def on_lost(self, pair: Pair) -> None:
        self.openings.forget(pair)
        for sending in list(self.sendings):
            sending.on_lost(pair)

    def on_fenced(self, pair: Pair) -> None:
        for sending in list(self.sendings):
            sending.on_fenced(pair)
