"""What a receiver knows of a request, and which pages are held. Used by moe_p2p/kv/receiver.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_p2p.errors import InvalidArgumentError, MoeP2pError, make, require
from moe_p2p.kv.layout import KVLayout
from moe_p2p.kv.legs import Leg
from moe_p2p.kv.plan import KVPlan
from moe_p2p.kv.requests import span_of
from moe_p2p.kv.stats import KVTransferStats

if TYPE_CHECKING:
    from moe_p2p.kv.receiver import KVReceiver


class KVReservation:
    """One request. Made by `KVReceiver.reserve`."""

    def __init__(
        self, receiver: KVReceiver, request: str, source: str, pages: Mapping[str, Tensor]
    ) -> None:
        self.receiver, self.request, self.source = receiver, request, source
        self.pages = dict(pages)
        self.opened_at: float | None = None  # None: waits for slots
        self.begin = self.total = 0
        self.pull = self.verified = False
        self.held: dict[str, Tensor] = {}
        self.legs: list[Leg] = []
        self.state = "open"  # then "complete" or "failed"
        self.error: MoeP2pError | None = None
        self.reusable = False  # its pages may be given to somebody else
        self.on_free: Callable[[], None] | None = None
        self.user = b""  # what the sender added to the tail
        self.moved_at: float | None = None  # when more was seen to have arrived
        self.looked_at = receiver.clock()
        self.stats = KVTransferStats(request, receiver.role, receiver.clock())

    def saw(self, leg: Leg, counted: int, now: float) -> None:
        """What has arrived of a leg by now: deadlines count from when that grows."""
        if counted > leg.counted:
            leg.counted, self.moved_at = counted, now

    def done(self) -> bool:
        """True once it is complete or failed; `wait` returns or raises accordingly."""
        return self.receiver.poll(self)

    def wait(self, timeout_s: float | None = None) -> bytes:
        """Returns what the sender added to the tail, once all bytes are there.

        Raises what ended it: TimeoutError of a phase, PeerDeadError, AbortedError, ProtocolError
        for bytes that differ from what was sent. timeout_s: TimeoutError, and the request goes on.
        """
        return self.receiver.wait(self, timeout_s)

    def cancel(self, why: str = "cancelled") -> None:
        """Ends it, unless it has ended; `wait_reusable` then says when pages are free."""
        self.receiver.cancel(self, why)

    def wait_reusable(self, timeout_s: float | None = None) -> None:
        """Waits until its pages may be given to somebody else: at most drain_s after it failed."""
        self.receiver.wait_reusable(self, timeout_s)


class PageHolds:
    """Which pages a write may land in. No page is held twice."""

    def __init__(self, layout: KVLayout, pages: Mapping[str, int]) -> None:
        self._layout = layout
        self._held = {
            group: torch.zeros(count, dtype=torch.bool, device="cpu")
            for group, count in pages.items()
        }

    def take(
        self, plan: KVPlan, reservation: KVReservation, others: Iterable[KVReservation]
    ) -> None:
        """Holds what the reservation's tokens lie in. Raises for pages that are held."""
        written = self._written(plan, reservation)
        for group, pages in written.items():
            held = self._held[group]
            bad = pages[(pages < 0) | (pages >= len(held))]
            require(
                not len(bad),
                f"reserve {reservation.request!r}: group {group!r} has {len(held)} pages, not "
                f"{bad[:4].tolist()}",
            )
            require(
                len(torch.unique(pages)) == len(pages),
                f"reserve {reservation.request!r}: pages of group {group!r} name one twice: tokens "
                "would overwrite each other",
            )
            taken = pages[held[pages]]
            require(
                not len(taken),
                f"reserve {reservation.request!r}: pages {taken[:4].tolist()} of group {group!r} "
                f"are still held{_holder(others, group, taken)}: a write may land in them; wait "
                "until they are reusable",
            )
        for group, pages in written.items():
            self._held[group][pages] = True
        reservation.held = written

    def give_back(self, reservation: KVReservation) -> None:
        for group, pages in reservation.held.items():
            self._held[group][pages] = False

    @property
    def num_held(self) -> int:
        return sum(int(held.sum()) for held in self._held.values())

    def _written(self, plan: KVPlan, reservation: KVReservation) -> dict[str, Tensor]:
        found = {}
        for group in self._layout.groups:
            span = span_of(plan, group, reservation.begin, reservation.total)
            tokens = 1 if group.kind == "state" else self._layout.page_tokens(group)
            pages = reservation.pages.get(group.name)
            if pages is None:
                text = (
                    f"reserve {reservation.request!r}: there are no pages of group {group.name!r}"
                )
                raise make(InvalidArgumentError, text)
            first, last = span.begin // tokens, -(-span.end // tokens)
            require(
                len(pages) >= last,
                f"reserve {reservation.request!r}: group {group.name!r} needs {last} pages for "
                f"{reservation.total} tokens, here are {len(pages)}",
            )
            found[group.name] = pages[first:last].to(torch.int64)
        return found


def _holder(others: Iterable[KVReservation], group: str, taken: Tensor) -> str:
    for other in others:
        if len(taken) and bool(torch.isin(taken[:1], other.held[group]).any()):
            return f" by request {other.request!r} ({other.state})"
    return ""
