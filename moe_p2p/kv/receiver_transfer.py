"""A request at its sender, as far as one of its receivers goes: what was sent, and how it ends.

    waiting --> open --> settled                    nothing reads the pages for it any more
         \\________\\__ draining __/

Used by moe_p2p/kv/sender.py, under the worker's lock.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor

from moe_p2p.engine.checksum import add
from moe_p2p.engine.transfers import Gate, Request
from moe_p2p.errors import InvalidArgumentError, ProtocolError, make
from moe_p2p.kv.chunks import Chunk, ChunkRows, int32_bytes
from moe_p2p.kv.footer import Footer, Slot
from moe_p2p.kv.openings import Opened
from moe_p2p.kv.packing import Packer, Packing
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.requests import aligned_begin, counts
from moe_p2p.kv.stats import KVTransferStats, TransferState
from moe_p2p.kv.worker import KVWorker
from moe_p2p.machine import phases


class ReceiverTransfer:
    """requests: the engine's, submitted and not known to be done. stats: of the request."""

    def __init__(
        self, worker: KVWorker, packer: Packer, pair: Pair, stats: KVTransferStats
    ) -> None:
        self.pair, self.state = pair, TransferState.WAITING
        self.opened: Opened | None = None
        self.slot: Slot | None = None  # of the row that its footer, or its nonce, lies in
        self.requests: list[Request] = []
        self.packing: Packing | None = None
        self.footer_due = False  # waits until all layers are computed
        self.committed = False
        self._worker, self._packer, self._stats = worker, packer, stats
        self._rows: ChunkRows | None = None
        self._end: int | None = None  # tokens that are there, as the caller says
        self._chunk: Chunk | None = None  # of `_end`; None: no whole page more than before
        self._sent_to: int | None = None  # the end of the last chunk
        self._immediates = 0  # of all chunks
        self._sums: dict[int, int] = {}  # by layer
        self._unsummed: list[tuple[int, Chunk]] = []  # layers, until the footer
        self._drain_until = 0.0

    # --- open ---

    def was_opened(self, opened: Opened) -> None:
        """By the receiver. It goes on with `begin`, once a slot is free."""
        self.opened = opened

    def begin(self, total: int, pages: Mapping[str, Tensor]) -> None:
        """pages: of the whole request; chunks add to it."""
        opened = self.opened
        assert opened is not None
        if opened.total != total:
            text = f"{self.pair.name} expects {opened.total} tokens, here are {total}"
            raise make(ProtocolError, self._text(text))
        self._rows = self._rows_of(opened, pages)
        self.packing = Packing(
            self._packer, self.pair, self._rows, self.requests, nonce=opened.nonce, imm=opened.imm
        )
        self.slot = self._worker.slots.take(self._text("opening"))
        self.state = TransferState.OPEN

    def _rows_of(self, opened: Opened, pages: Mapping[str, Tensor]) -> ChunkRows:
        """Those of the whole request are worked out now, and not before a forward pass."""
        rows = ChunkRows(
            self.pair, opened.total, begin=opened.begin, source=pages, target=opened.pages
        )
        if not opened.pull:
            with suppress(InvalidArgumentError):  # pages of later chunks may not be there yet
                rows.of_layers(self.pair.layers[:1], (opened.begin, opened.total))
        return rows

    def _text(self, why: str) -> str:
        assert self.opened is not None
        return f"{self._worker.name}: request {self.opened.request!r}: {why}"

    # --- layers, footer ---

    def send(
        self, layers: tuple[int, ...], end: int, gates: Mapping[tuple[int, int], Gate]
    ) -> None:
        """gates: of layers of this request that are not computed yet, by layer and end."""
        opened, rows, packing = self.opened, self._rows, self.packing
        assert opened is not None
        assert rows is not None
        assert packing is not None
        if end != self._end and not self._begin_chunk(opened, end):
            self.pair.send("moves", nonce=opened.nonce)
        chunk = self._chunk
        layers = tuple(filter(self.pair.requests.__contains__, layers))
        if chunk is None or not layers:
            return
        if opened.verify:
            self._unsummed += [(layer, chunk) for layer in layers]
            if not gates:
                self._sum_layers()
        if opened.pull:
            return
        if phases.take is not None:
            self._stats.submit(layers, end, self.pair.name)
        gate = gates.get((layers[0], end))
        after = None if gate is None else (gate.signals, gate.step)
        self.requests += rows.write(self._worker.engine, layers, chunk, opened.imm, after)
        for layer in layers if self.pair.packs else ():
            self._stats.pack(packing.add(layer, chunk, gates.get((layer, end))))

    def _begin_chunk(self, opened: Opened, end: int) -> bool:
        """Whole pages of the target, but for the last: two chunks never write the same page.
        Returns whether the receiver will see something arrive."""
        plan, worker = self.pair.plan, self._worker
        last = end == opened.total
        begin = opened.begin if self._sent_to is None else self._sent_to
        to = end if last else max(aligned_begin(plan.target, end), begin)
        self._end, self._chunk = end, (begin, to) if to > begin or last else None
        if self._chunk is None:
            return False
        self._sent_to = to
        if opened.pull:
            return last and begin == opened.begin  # the only one: its offer follows
        nics, to_rank = worker.engine.num_nics, self.pair.worker.rank
        arriving = counts(plan, to_rank, begin, to, opened.total, source_nics=nics).get(
            worker.cache.rank
        )
        self._immediates += arriving.immediates if arriving else 0
        return last or arriving is not None

    def _sum_layers(self) -> None:
        assert self._rows is not None
        for layer, chunk in self._unsummed:
            part = self._rows.checksum(self._worker.cache, layer, chunk, at_source=True)
            self._sums[layer] = add(self._sums.get(layer, 0), part)
        self._unsummed.clear()

    def send_footer(self, user: bytes, *, computed: bool) -> None:
        """computed: all layers are, as far as signals say."""
        opened, slot, rows = self.opened, self.slot, self._rows
        assert opened is not None
        assert slot is not None
        assert rows is not None
        # Sums and offers are of bytes that are there; without them the footer may go ahead.
        self.footer_due = (opened.verify or opened.pull) and not computed
        if self.footer_due:
            return
        self._sum_layers()
        worker = self._worker
        footer, at = self._footer(opened, user), slot.number * worker.row_bytes
        if opened.pull:
            struct.pack_into("<Q", worker.rows, at, opened.nonce)
            names = [group.name for group in worker.cache.layout.groups]
            pages = (int32_bytes(rows.source[name]) for name in names)
            self.pair.send(
                "offer", footer, *pages, nonce=opened.nonce, row=slot.number, groups=names
            )
            self.committed = True
            return
        worker.rows[at : at + len(footer)] = footer
        self.requests.append(
            worker.engine.write(
                self.pair.memory.control,
                self.pair.control,
                nbytes=len(footer),
                offset=at,
                region_offset=opened.row * worker.row_bytes,
                imm=opened.imm,
            )
        )
        self.committed = True  # not before: without requests under way it then counts as over

    def _footer(self, opened: Opened, user: bytes) -> bytes:
        sums = tuple(self._sums[layer] for layer in self.pair.layers) if opened.verify else ()
        count = self._immediates + self._worker.engine.num_nics  # the footer's own
        return Footer(opened.nonce, opened.begin, opened.total, count, sums, user).to_bytes()

    # --- the end ---

    @property
    def may_pack(self) -> bool:
        """Rows may be gathered as soon as they are computed and the ring has parts."""
        return self.packing is not None and self.packing.may_start

    @property
    def packed_writes(self) -> int:
        return 0 if self.packing is None else self.packing.written

    def check_writes(self) -> None:
        """Raises what went wrong with a write that has ended."""
        for request in self._take_done():
            request.wait(0)

    def _take_done(self) -> list[Request]:
        """`stats` gets their figures."""
        if not self.requests:
            return []
        done, self.requests[:] = self._stats.take_done(self.requests)
        return done

    @property
    def is_posted(self) -> bool:
        """The receiver has all bytes once the writes under way have ended. A pull ends by its
        word instead."""
        opened, packing = self.opened, self.packing
        packed = packing is not None and not packing.left
        return self.committed and packed and opened is not None and not opened.pull

    def settle_if_over(self) -> None:
        """All was written. Of a pull, the receiver says so."""
        if self.is_posted and not self.requests:
            self.settle()

    def settle(self) -> None:
        self.state = TransferState.SETTLED
        if self.packing is not None:
            self.packing.settle()
        if self.slot is not None:
            self._worker.slots.give_back(self.slot)
            self.slot = None
            self._worker.wake.set()  # of those that wait for it

    def release(self) -> bool:
        """The receiver of a pull has read everything. False: nothing was offered."""
        if self.state is not TransferState.OPEN or not self.committed:
            return False
        self.withdraw_offer()
        self.settle()
        return True

    def withdraw_offer(self) -> None:
        """Who reads the nonce now finds that pages were taken back."""
        if self.opened is not None and self.opened.pull and self.slot is not None:
            struct.pack_into("<Q", self._worker.rows, self.slot.number * self._worker.row_bytes, 0)

    def drain(self, until: float) -> None:
        """The request has failed: what is not posted will not be."""
        if self.state not in (TransferState.WAITING, TransferState.OPEN):
            return
        self.state, self._drain_until = TransferState.DRAINING, until
        if self.packing is not None:
            self.packing.stop()
        self.withdraw_offer()
        for request in self.requests:
            request.cancel()

    def settle_drained(self, why: str) -> None:
        """Once nothing is under way; says so."""
        if self.state is not TransferState.DRAINING or self.pair.lost:
            return
        self._take_done()
        if self.requests:
            return
        self.settle()
        self._stats.fenced("drained")
        if self.opened is not None:
            self.pair.send("drained", nonce=self.opened.nonce, why=why)

    def settle_fenced(self) -> None:
        if self.state is not TransferState.SETTLED:
            self._take_done()
            self._stats.fenced(self.pair.fenced_by, self.pair.fence_retries)
            self.settle()

    def settle_unopened(self) -> None:
        """The receiver is told why when it opens the request."""
        self.state = TransferState.SETTLED

    def drains_too_long(self, now: float) -> bool:
        late = self.state is TransferState.DRAINING and now >= self._drain_until
        return late and not self.pair.lost

    def text(self) -> str:
        waits = self.state is TransferState.WAITING and self.opened is not None
        where = "waiting for one of max_requests to end" if waits else self.state
        packing = "" if self.packing is None else self.packing.text()
        return f"{self.pair.name} {where}, {len(self.requests)} writes under way{packing}"
