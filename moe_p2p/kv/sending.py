"""What a sender knows of a request: a `Flight` for each receiver. Used by moe_p2p/kv/sender.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_p2p.engine.checksum import add
from moe_p2p.engine.transfers import Gate, shut
from moe_p2p.errors import InvalidArgumentError, MoeP2pError, require
from moe_p2p.kv.channel import Message
from moe_p2p.kv.checks import check_bounds, page_lists
from moe_p2p.kv.packing import Packing
from moe_p2p.kv.pair import KVCache, Pair
from moe_p2p.kv.requests import aligned_begin, counts
from moe_p2p.kv.stats import KVTransferStats
from moe_p2p.kv.tail import Slot, Tail
from moe_p2p.kv.units import Chunk, Step, Units, int32_tensor

if TYPE_CHECKING:
    from moe_p2p.kv.sender import KVSender


@dataclass(eq=False)
class Opened:
    """A receiver's message: where the request's bytes go, and by what they are counted."""

    pair: Pair
    request: str
    nonce: int
    imm: int
    row: int
    begin: int
    total: int
    pull: bool
    verify: bool
    pages: dict[str, Tensor]

    @staticmethod
    def of(pair: Pair, message: Message) -> Opened:
        fields = message.fields
        return Opened(
            pair,
            str(fields["request"]),
            nonce=int(fields["nonce"]),
            imm=int(fields["imm"]),
            row=int(fields["row"]),
            begin=int(fields["begin"]),
            total=int(fields["total"]),
            pull=bool(fields["pull"]),
            verify=bool(fields["verify"]),
            pages=dict(zip(fields["groups"], map(int32_tensor, message.arrays), strict=True)),
        )


@dataclass(eq=False)
class Flight:
    """One request to one receiver. state: "waiting" until it was opened, "open", "draining",
    "settled": nothing reads the pages for it any more."""

    pair: Pair
    state: str = "waiting"
    opened: Opened | None = None
    units: Units | None = None
    slot: Slot | None = None  # of the row that its tail, or its nonce, lies in
    sent_to: int | None = None  # the end of the last chunk
    immediates: int = 0  # of all chunks
    chunk: Chunk | None = None  # of `end`; None: no whole page more than before
    end: int | None = None  # tokens that are there, as the caller says
    sums: dict[int, int] = field(default_factory=dict)  # by layer
    unsummed: list[tuple[int, Chunk]] = field(default_factory=list)  # layers, until the tail
    requests: list[Any] = field(default_factory=list)
    tail_due: bool = False  # waits until all layers are computed
    packing: Packing = field(default_factory=Packing)
    committed: bool = False
    drain_until: float = 0.0

    def units_of(self, sending: KVSending) -> Units:
        """Those of the whole request are worked out now, and not before a forward pass."""
        opened = self.opened
        assert opened is not None
        units = Units(
            self.pair,
            sending.total,
            begin=opened.begin,
            source=sending.pages,
            target=opened.pages,
        )
        if not opened.pull:
            with suppress(InvalidArgumentError):  # pages of later chunks may not be there yet
                units.of_layers(self.pair.layers[:1], (opened.begin, sending.total))
        return units

    def where(self) -> str:
        waits = self.state == "waiting" and self.opened is not None
        return "waiting for one of max_requests to end" if waits else self.state

    def take_done(self, stats: KVTransferStats) -> list[Any]:
        """Removes the requests that are done, and returns them; `stats` gets their figures."""
        done, self.requests = stats.take_done(self.requests)
        return done

    def begin_chunk(self, end: int, source: KVSender) -> bool:
        """Whole pages of the target, but for the last: two chunks never write the same page.
        Returns whether the receiver will see something arrive."""
        opened, plan = self.opened, self.pair.plan
        assert opened is not None
        last = end == opened.total
        begin = opened.begin if self.sent_to is None else self.sent_to
        to = end if last else max(aligned_begin(plan.target, end), begin)
        self.end, self.chunk = end, (begin, to) if to > begin or last else None
        if self.chunk is None:
            return False
        self.sent_to = to
        if opened.pull:
            return last and begin == opened.begin  # the only one: its offer follows
        arriving = counts(
            plan,
            self.pair.worker.rank,
            begin,
            to,
            opened.total,
            source_nics=source.engine.num_nics,
        ).get(source.cache.rank)
        self.immediates += arriving.immediates if arriving else 0
        return last or arriving is not None

    def tail(self, user: bytes, num_nics: int) -> bytes:
        opened = self.opened
        assert opened is not None
        sums = tuple(self.sums[layer] for layer in self.pair.layers) if opened.verify else ()
        count = self.immediates + num_nics  # the tail's own
        return Tail(opened.nonce, opened.begin, opened.total, count, sums, user).to_bytes()

    def sum_layers(self, cache: KVCache) -> None:
        assert self.units is not None
        for layer, chunk in self.unsummed:
            part = self.units.checksum(cache, layer, chunk, at_source=True)
            self.sums[layer] = add(self.sums.get(layer, 0), part)
        self.unsummed.clear()


class KVSending:
    """One request. Made by `KVSender.start`."""

    def __init__(self, sender: KVSender, request: str, target: str | None, total: int) -> None:
        self.sender, self.request, self.target, self.total = sender, request, target, total
        self.pages: dict[str, Tensor] = {}
        self.flights: list[Flight] = []
        self.calls: list[tuple[int, int]] = []  # (layer, tokens that are there), in their order
        self.gates: dict[tuple[int, int], Gate] = {}  # of calls that wait for a signal
        self._shut: list[Gate] = []  # of these, not known to be open
        self.begun_at = 0.0  # the last step
        self.user: bytes | None = None  # not None: committed
        self.state = "open"  # then "complete" or "failed"
        self.error: MoeP2pError | None = None
        self.reusable = False  # its pages may be given to somebody else
        self.committed_at = 0.0
        self.stats = KVTransferStats(request, sender.role, sender.clock())

    @property
    def layers(self) -> list[int]:
        """The model's layers that travel from here; all of this rank's until it has a target."""
        if self.flights:
            return sorted({layer for flight in self.flights for layer in flight.pair.layers})
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

    def add_pages(self, pages: Mapping[str, Tensor]) -> None:
        """Lists that begin with what was there before: with chunked prefill, engines allocate
        pages of a chunk when they schedule it."""
        sender, who = self.sender, f"{self.sender.name}: request {self.request!r}"
        lists = page_lists(who, sender.cache.layout, pages)
        check_bounds(who, sender.cache.pages, lists)
        with sender.lock:
            self.pages.update(lists)

    def check_complete(self) -> None:
        """Each chunk has each layer that travels, once."""
        wanted = set(self.layers)
        for end in sorted({end for _, end in self.calls} | {self.total}):
            got = [layer for layer, to in self.calls if to == end]
            missing = sorted(wanted.difference(got))
            why = f"layers up to token {end} were sent twice"
            if missing:
                why = f"commit without layers {missing[:4]} of tokens up to {end}"
            ok = not missing and len(set(got)) == len(got)
            require(ok, f"{self.sender.name}: request {self.request!r}: {why}")

    def settled(self) -> bool:
        """Nothing reads its pages for a receiver."""
        return all(flight.state == "settled" for flight in self.flights)

    def progress(self) -> str:
        states = [
            f"{flight.pair.name} {flight.where()}, {len(flight.requests)} writes under way"
            f"{flight.packing.text()}"
            for flight in self.flights
        ]
        where = "; ".join(states) or "no receiver has opened it"
        calls, layers = len(self.calls), len(self.layers)
        return f"{calls} calls of layer() of {layers} layers were made; {where}"

    def layer(self, layer: int, end: int | None = None) -> None:
        """Sends one layer, number `layer` of the model, of tokens up to `end` (None: all).

        Its bytes must be there; on a GPU synchronize `torch.cuda.current_stream(device)` first, of
        the cache's device (a new thread's current one is 0), or let `KVSignals` do it.
        With chunked prefill all layers of a chunk come before the layers of the next one.
        """
        self.sender.layers(self, (layer,), self.total if end is None else end)

    def add_calls(self, layers: tuple[int, ...], end: int, step: Step | None, now: float) -> None:
        self.calls += [(layer, end) for layer in layers]
        if step is None:
            return
        gates = [Gate(step[0], layer, step[1]) for layer in layers]
        self.gates.update(((gate.layer, end), gate) for gate in gates)
        self._shut += gates
        self.begun_at = now

    def shut_gates(self) -> list[Gate]:
        """Layers that are not computed yet, as far as signals say."""
        if self._shut:
            self._shut = shut(self._shut)
        return self._shut

    def runs(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Calls so far: layers that wait for the same step, or for none, and where they end."""
        for (end, _), calls in itertools.groupby(self.calls, self._run_of):
            yield tuple(layer for layer, _ in calls), end

    def _run_of(self, call: tuple[int, int]) -> tuple[int, Step | None]:
        return call[1], self.step_of(*call)

    def step_of(self, layer: int, end: int) -> Step | None:
        gate = self.gates.get((layer, end))
        return None if gate is None else (gate.signals, gate.step)

    def commit(self, user: bytes = b"") -> None:
        """All layers of all tokens were sent. user: up to 256 bytes for the receivers."""
        self.sender.commit(self, user)

    def done(self) -> bool:
        return self.sender.poll(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when all receivers have all bytes; pages may then be reused. Raises what ended
        it. timeout_s: TimeoutError, and the request goes on."""
        self.sender.wait(self, timeout_s)

    def cancel(self, why: str = "cancelled") -> None:
        self.sender.cancel(self, why)

    def wait_reusable(self, timeout_s: float | None = None) -> None:
        """Waits until nothing reads its pages: at most drain_s after it failed."""
        self.sender.wait_reusable(self, timeout_s)
