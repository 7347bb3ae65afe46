"""Two prefill ranks and a decode rank over moe_p2p's fakes, with an account of every page.

The account is kept here, by what users are told: a page belongs to the request that reserved it
until the reservation says that it is reusable. A row that lands in a page of somebody else, or is
read from one, is a fault; so are wrong bytes in a request that completed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_p2p import kv
from moe_p2p.errors import MoeP2pError
from tests.support import kv_fakes
from tests.support.kv_fakes import Clock, FakeCopier, FakeCopy, FakeEngine, FakeNet, FakeVerbs, Link

PAGES, LAYERS, PAGE_TOKENS = 6, 2, 2
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=2, k_bytes=4, v_bytes=4, page_size=PAGE_TOKENS)
PREFILL, DECODE = kv.KVLayout((GROUP,), tp=2), kv.KVLayout((GROUP,))
TIMEOUTS = kv.KVTimeouts(open_s=20, layers_s=20, tail_s=20, drain_s=1, lease_s=5)


# Each layer of two pages is two packed writes of half of it: none lands in pages by itself.
PACKED = kv.KVLink("test", 1e9, 1, pack=True, packed_write_bytes=16, ring_bytes=2 * 256)
DIRECT = kv.KVLink("test", 1e9, 1e6, pack=False)


class FaultError(AssertionError):
    """The protocol broke a promise."""


@dataclasses.dataclass(eq=False)
class Deal:
    """One request and what the account knows of it."""

    number: int
    pages: list[int]
    source_pages: list[int]
    total: int
    reservation: kv.KVReservation
    sendings: list[kv.KVSending | None]
    calls: list[int]  # of layer(), by rank
    checked: bool = False


class World:
    """link: PACKED: prefill packs its rows, into a ring of two parts at each worker. fence: of all
    of them; with "queue_pair" NICs accept rows before they are in memory."""

    def __init__(
        self,
        receiver: type[kv.KVReceiver] = kv.KVReceiver,
        *,
        link: kv.KVLink | None = None,
        fence: str = "key",
    ) -> None:
        self.net, self.clock, self.link, self.fence = FakeNet(), Clock(), link or DIRECT, fence
        self.net.accepts = fence == "queue_pair"
        self.net.on_land, self.net.on_copy = self.check_row, self.check_copy
        self.receiver = receiver(
            self._engine(),
            kv_fakes.cache_of(DECODE, 0, PAGES),
            instance="decode",
            timeouts=TIMEOUTS,
            max_requests=4,
            verify="off",
            link=self.link,
            fence=fence,
            clock=self.clock,
        )
        self.receiver.unpacker.copier = FakeCopier(self.net)
        self.senders = [self._sender(rank) for rank in range(2)]
        self.stopped = [False, False]  # its process does not run; its NIC does
        self.links = [Link(self.receiver, sender) for sender in self.senders]
        self.old_links: list[Link] = []
        self.deals: list[Deal] = []
        self.num_deals = 0
        # Who owns a page, by what users were told: a deal's number, or 0.
        self.owner = [0] * PAGES
        self.source_owner = [[0] * PAGES for _ in range(2)]

    def _engine(self) -> FakeEngine:
        return (FakeVerbs if self.fence == "queue_pair" else FakeEngine)(self.net)

    def _sender(self, rank: int) -> kv.KVSender:
        sender = kv.KVSender(
            self._engine(),
            kv_fakes.cache_of(PREFILL, rank, PAGES),
            instance="prefill",
            timeouts=TIMEOUTS,
            max_requests=4,
            link=self.link,
            fence=self.fence,
            clock=self.clock,
        )
        sender.packer.copier = FakeCopier(self.net)
        return sender

    # --- what users do ---

    def reserve(self, count: int, *, pull: bool = False, reuse: bool = False) -> Deal | None:
        free = [page for page in range(PAGES) if not self.owner[page]]
        both = [p for p in range(PAGES) if not any(owner[p] for owner in self.source_owner)]
        connected = all(sender.name in self.receiver.pairs for sender in self.senders)
        open_again = any(
            deal.reservation.request == "again" and deal.reservation.state == "open"
            for deal in self.deals
        )
        if len(free) < count or len(both) < count or not connected or (reuse and open_again):
            return None
        self.num_deals += 1
        number, pages, source = self.num_deals, free[:count], both[:count]
        total = count * PAGE_TOKENS
        name = "again" if reuse else f"request {number}"  # a retry has the name of what failed
        reservation = self.receiver.reserve(
            name, "prefill", {"kv": _int32(pages)}, total=total, pull=pull
        )
        deal = Deal(number, pages, source, total, reservation, [None, None], [0, 0])
        self.deals.append(deal)
        for page in pages:
            self.owner[page] = number
        for rank, owner in enumerate(self.source_owner):
            for page in source:
                owner[page] = number
            self.fill(rank, source, number)
        return deal

    def fill(self, rank: int, pages: list[int], value: int) -> None:
        tensor = self.senders[rank].cache.tensors[0].view(LAYERS, PAGES, -1)
        tensor[:, pages] = value % 251 + 1

    def start(self, deal: Deal, rank: int) -> None:
        sender = self.senders[rank]
        mine = deal.number in self.source_owner[rank]
        if mine and deal.sendings[rank] is None and "decode/0" in sender.pairs:
            deal.sendings[rank] = sender.start(
                deal.reservation.request,
                "decode",
                {"kv": _int32(deal.source_pages)},
                total=deal.total,
            )

    def layer(self, deal: Deal, rank: int) -> None:
        """The next call of layer(), or commit()."""
        sending = deal.sendings[rank]
        if sending is None or sending.state != "open" or sending.user is not None:
            return
        if deal.calls[rank] < LAYERS:
            sending.layer(deal.calls[rank])
            deal.calls[rank] += 1
        else:
            sending.commit()

    def kill(self, rank: int) -> None:
        """The process ends; what its NIC has posted still travels. A new one takes its place."""
        old = self.links[rank]
        old.channels[1].close()
        old.channels[1].queue.clear()
        for deal in self.deals:
            deal.sendings[rank] = None
            deal.calls[rank] = LAYERS + 1  # the new process knows nothing of it
        for operation in list(self.net.operations):
            if operation.peer.engine is self.senders[rank].engine:
                operation.request.cancelled = True
        self.old_links.append(old)
        self.senders[rank] = self._sender(rank)  # with memory of its own
        self.stopped[rank] = False
        self.source_owner[rank] = [0] * PAGES

    def connect(self, rank: int) -> None:
        if self.stopped[rank] or self.senders[rank].name in self.receiver.pairs:
            return
        self.old_links.append(self.links[rank])
        self.links[rank] = Link(self.receiver, self.senders[rank])

    # --- the account ---

    def settle(self) -> None:
        """Takes pages back as users do, and checks what completed."""
        for deal in list(self.deals):
            reservation = deal.reservation
            reservation.done()
            if reservation.state == "complete" and not deal.checked:
                deal.checked = True
                self._check_bytes(deal)
            if reservation.reusable:
                self._give(self.owner, deal)
            for rank, sending in enumerate(deal.sendings):
                never = sending is None and reservation.state != "open"
                if sending is not None:
                    sending.done()
                if never or (sending is not None and sending.reusable):
                    self._give(self.source_owner[rank], deal)
            if deal.number not in self.owner and not any(
                deal.number in owner for owner in self.source_owner
            ):
                self.deals.remove(deal)

    def _give(self, owner: list[int], deal: Deal) -> None:
        for page, number in enumerate(owner):
            if number == deal.number:
                owner[page] = 0

    def _check_bytes(self, deal: Deal) -> None:
        tensor = self.receiver.cache.tensors[0].view(LAYERS, PAGES, -1)[:, deal.pages]
        if not bool((tensor == deal.number % 251 + 1).all()):
            raise FaultError(f"request {deal.number} completed with wrong bytes")

    def check_copy(self, copy: FakeCopy) -> None:
        """Called when a gather or scatter is about to happen: all its bytes are of one request, and
        so are the pages. A gather of pages that were taken back meanwhile is a fault, too."""
        of_pages = copy.rows.memory
        page_bytes = of_pages.numel() // (LAYERS * PAGES)
        offset, unit, _, _, _ = copy.rows.where
        pages = {(offset + u * unit) // page_bytes % PAGES for u in copy.rows.placed.units.tolist()}
        if copy.gather:
            found = {int(of_pages[page * page_bytes]) for page in pages}
        else:
            found = set(copy.packed.tolist())
            owners = {self.owner[page] % 251 + 1 if self.owner[page] else 0 for page in pages}
            if owners != found:
                raise FaultError(f"bytes of {found} are scattered into pages of {owners}")
        if len(found) != 1:
            raise FaultError(f"rows of requests {found} are copied as one")

    def _check_part(self, row: kv_fakes.Row) -> None:
        """A part of the ring belongs to a request from its grant until it was scattered, or the
        sender drained or was fenced. Nothing of another one lands in it."""
        ring = self.receiver.ring
        first, last = (
            ring.parts.first + at // ring.parts.part_bytes
            for at in (row.target_at, row.target_at + row.nbytes - 1)
        )
        holders = [
            deal.number % 251 + 1
            for deal in self.deals
            for transfer in deal.reservation.transfers
            for grant in transfer.unpacking.grants
            if grant.slots[0].number == first and last <= grant.slots[-1].number and not grant.copy
        ]
        value = int(row.source.flat[row.source_at])
        if holders != [value]:
            raise FaultError(f"a row of {value} lands in parts {first} to {last} of {holders}")

    def check_row(self, row: kv_fakes.Row) -> None:
        """Called when a row is about to land."""
        if row.target.tensor is self.receiver.ring.tensor:
            self._check_part(row)
            return
        if row.target.tensor is not self.receiver.cache.tensors[0]:
            return  # a footer, or a nonce
        page_bytes = self.receiver.cache.tensors[0].numel() // (LAYERS * PAGES)
        page = row.target_at // page_bytes % PAGES
        number = self.owner[page]
        if row.is_read:
            found = [deal.number for deal in self.deals if row.request in _reads(deal)]
        else:
            value = int(row.source.flat[row.source_at])
            found = [deal.number for deal in self.deals if deal.number % 251 + 1 == value]
        if not number or found != [number]:
            raise FaultError(f"a row of {found} lands in page {page}, which belongs to {number}")

    def step(self) -> None:
        self.receiver.step()
        for rank, sender in enumerate(self.senders):
            if not self.stopped[rank]:
                sender.step()

    def finish(self) -> None:
        """Everything that can happen happens; then nothing may be left."""
        self.stopped = [False, False]
        for _ in range(200):
            for move in self.net.moves():
                if move[1] in self.net.operations or move[1] in self.net.copies:
                    self._move(move)
            for link in (*self.links, *self.old_links):
                for sender in (0, 1):
                    while link.can_deliver(sender):
                        link.deliver(sender)
            self.clock.now += 1
            self.step()
            self.settle()
            if not self.deals and not self.net.operations:
                break
        if any(self.owner) or any(map(any, self.source_owner)):
            raise FaultError(f"pages are lost: {self.owner}, {self.source_owner}")
        taken = self.receiver.slots.num_taken, *(s.slots.num_taken for s in self.senders)
        if any(taken):
            raise FaultError(f"slots are lost: {taken}")
        parts = [worker.ring.slots.num_taken for worker in (self.receiver, *self.senders)]
        if any(parts):
            raise FaultError(f"parts of rings are lost: {parts}")

    def _move(self, move: Any) -> None:
        what, operation, row = move
        if row is None or row in operation.rows:
            still = what != "imm" or operation.imm is not None
            if still:
                self.net.move(what, operation, row)

    def call(self, function: Any, *args: Any) -> None:
        """A call of a user: an error of the package is an answer, not a fault."""
        try:
            function(*args)
        except MoeP2pError:
            return


def _reads(deal: Deal) -> list[Any]:
    return [read for each in deal.reservation.transfers for read in each.reads]


def _int32(pages: list[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)
