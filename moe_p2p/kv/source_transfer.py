"""A reservation at its receiver, as far as one of its senders goes: what has arrived, how it ends.

    open --> settled                                nothing lands in the pages for it any more
       \\__ draining __/

Used by moe_p2p/kv/receiver.py, under the worker's lock.
"""

from __future__ import annotations

import secrets
import struct

from moe_p2p.engine.transfers import Request
from moe_p2p.errors import AbortedError, ProtocolError, make
from moe_p2p.kv.channel import Message
from moe_p2p.kv.chunks import ChunkRows, int32_bytes, int32_tensor
from moe_p2p.kv.footer import Footer
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.requests import counts
from moe_p2p.kv.stats import TransferState
from moe_p2p.kv.unpacking import Reserved, Unpacker, Unpacking
from moe_p2p.kv.worker import KVWorker


class SourceTransfer:
    """nonce: of the reservation at this sender; a message or a footer without it is of another one.
    least: immediates, where the request comes as one chunk. counted: immediates, or reads that are
    done, at the last look. moved_at: when it was seen last that more has arrived."""

    def __init__(
        self, worker: KVWorker, unpacker: Unpacker, pair: Pair, reserved: Reserved
    ) -> None:
        self.pair, self.state = pair, TransferState.OPEN
        self.nonce = secrets.randbits(63) | 1
        self.unpacking = Unpacking(unpacker, pair, self.nonce, reserved)
        self.counted = 0
        self.moved_at: float | None = None
        self.footer: Footer | None = None
        self.reads: list[Request] = []  # of a pull
        self._worker, self._reserved, self._stats = worker, reserved, reserved.stats
        self._nonce_read = False
        self._nonce_row = 0
        self._drained = False  # the sender has said so
        self._drain_until = 0.0
        nics = pair.theirs.num_nics
        arriving = counts(
            pair.plan, worker.cache.rank, reserved.begin, reserved.total, source_nics=nics
        ).get(pair.worker.rank)
        self.least = nics + (arriving.immediates if arriving else 0)  # the footer's, and all others
        self._nbytes = arriving.nbytes if arriving else 0  # of all chunks
        self.slot = worker.slots.take(f"{worker.name}: request {reserved.request!r}")
        self._has_slot = True

    def open(self) -> None:
        """Tells the sender where its bytes go."""
        names, reserved = [group.name for group in self._worker.cache.layout.groups], self._reserved
        self.pair.send(
            "open",
            *(int32_bytes(reserved.pages[name]) for name in names),
            request=reserved.request,
            nonce=self.nonce,
            imm=self.slot.imm,
            row=self.slot.number,
            begin=reserved.begin,
            total=reserved.total,
            pull=reserved.pull,
            verify=reserved.verified,
            groups=names,
        )

    # --- layers, footer ---

    @property
    def _expected(self) -> int:
        """Immediates, as the footer says; 0: it is not there."""
        return 0 if self.footer is None or self._reserved.pull else self.footer.immediates

    @property
    def awaited(self) -> int:
        """Immediates at which it has moved on."""
        return self._expected or max(self.least, self.counted + 1)

    def has_arrived(self) -> bool:
        """Looks. Raises what shows that it will not."""
        if self.state is TransferState.SETTLED:
            return True
        worker = self._worker
        if self._reserved.pull:
            return self._is_pulled()
        value = worker.engine.imm_value(self.slot.imm) + self.unpacking.advance()
        now = worker.clock()
        if value:
            self._stats.arrive(now)
        self.saw(value, now)
        if value < self.least:
            return False
        if self.footer is None:
            self.footer = self._read_footer()
        if self.footer is None or value < self.footer.immediates or self.unpacking.grants:
            return False
        self.state = TransferState.SETTLED
        self._stats.complete(now, self._nbytes)
        return True

    def saw(self, counted: int, now: float) -> None:
        """What has arrived by now: deadlines count from when that grows."""
        if counted > self.counted:
            self.counted, self.moved_at = counted, now

    def moves(self) -> None:
        """The sender says that it goes on, with nothing that arrives here."""
        self.moved_at = self._worker.clock()

    def was_committed(self) -> bool:
        """The sender has written the last word: what is missing had begun before it. Raises as
        `has_arrived`."""
        return not self._reserved.pull and self._read_footer() is not None

    def _read_footer(self) -> Footer | None:
        """None while it is not there, or is of an earlier use of the row."""
        worker = self._worker
        at = self.slot.number * worker.row_bytes
        footer = Footer.parse(memoryview(worker.rows)[at : at + worker.row_bytes])
        if footer is None or footer.nonce != self.nonce:
            return None
        return self._checked(footer)

    def _checked(self, footer: Footer) -> Footer:
        reserved, got = self._reserved, (footer.begin, footer.total)
        want = (reserved.begin, reserved.total)
        if got != want or not (reserved.pull or footer.immediates >= self.least):
            text = (
                f"{self.pair.name} has sent tokens {got[0]} to {got[1]} in {footer.immediates} "
                f"immediates, reserved are {want[0]} to {want[1]}, which are at least {self.least}"
            )
            raise make(ProtocolError, self._text(text))
        return footer

    def _text(self, why: str) -> str:
        return f"{self._worker.name}: request {self._reserved.request!r}: {why}"

    # --- pull ---

    def take_offer(self, message: Message) -> None:
        """The sender's pages may be read."""
        self.moves()
        self.footer = footer = Footer.parse(message.arrays[0])
        if footer is None or footer.nonce != self.nonce:
            raise make(ProtocolError, f"{self.pair.name} offers pages without their tail")
        self._checked(footer)
        self._nonce_row = int(message.fields["row"])
        pages = dict(zip(message.fields["groups"], message.arrays[1:], strict=True))
        theirs = {name: int32_tensor(data) for name, data in pages.items()}
        rows = ChunkRows(self.pair, footer.total, source=theirs, target=self._reserved.pages)
        self.reads = rows.read(self._worker.engine, (footer.begin, footer.total))

    def _is_pulled(self) -> bool:
        if self.footer is None:
            return False
        now, done = self._worker.clock(), sum(read.done() for read in self.reads)
        self.saw(done, now)
        if done < len(self.reads):
            return False
        self._stats.arrive(now)
        reads, self.reads = self._stats.take_done(self.reads)
        for read in reads:
            read.wait(0)  # raises what went wrong
        if not self._nonce_read:
            self.reads, self._nonce_read = [self._read_nonce()], True
            return False
        at = self.slot.number * self._worker.row_bytes
        (nonce,) = struct.unpack_from("<Q", self._worker.rows, at)
        if nonce != self.nonce:
            text = (
                f"{self.pair.name} gave the pages to another request while they were read "
                f"(nonce {nonce:x}, expected {self.nonce:x})"
            )
            raise make(AbortedError, self._text(text))
        self.state = TransferState.SETTLED
        self.pair.send("release", nonce=self.nonce)
        return True

    def _read_nonce(self) -> Request:
        """Under which the sender keeps the pages, into this transfer's own row. Where it is still
        there after all else was read, the pages had not been given to another request."""
        row_bytes = self._worker.row_bytes
        return self._worker.engine.read(
            self.pair.memory.control,
            self.pair.control,
            nbytes=8,
            offset=self.slot.number * row_bytes,
            region_offset=self._nonce_row * row_bytes,
        )

    # --- checksums ---

    def wrong_sum(self) -> str:
        """Names the first layer whose bytes are not those that were sent. Without the lock."""
        footer = self.footer
        assert footer is not None
        chunk, cache = (footer.begin, footer.total), self._worker.cache
        rows = ChunkRows(self.pair, footer.total, begin=footer.begin, target=self._reserved.pages)
        sums = [rows.checksum(cache, layer, chunk, at_source=False) for layer in self.pair.layers]
        for layer, got, sent in zip(self.pair.layers, sums, footer.checksums, strict=True):
            if got != sent:
                hexed = [f"{each & (1 << 64) - 1:016x}" for each in (got, sent)]
                return f"layer {layer} from {self.pair.name}: {hexed[0]}, sent {hexed[1]}"
        return ""

    # --- the end ---

    def drain(self, until: float, why: str) -> None:
        """The reservation has failed: the sender is asked to write nothing more."""
        if self.state is not TransferState.OPEN:
            return
        self.state, self._drain_until = TransferState.DRAINING, until
        self.unpacking.stop()
        if self.pair.lost:
            return  # the fence settles it
        self.pair.send("cancel", nonce=self.nonce, why=why)
        for read in self.reads:
            read.cancel()

    def was_drained(self) -> None:
        """The sender says so: all that it wrote is visible here, and it writes nothing more."""
        self._drained = True
        self.settle_drained()

    def settle_drained(self) -> bool:
        """Once the sender has said so and nothing that was begun here is under way."""
        if self.state is not TransferState.DRAINING or not self._drained:
            return False
        self.reads = self._stats.take_done(self.reads)[1]
        if not self._is_idle():
            return False
        self.state = TransferState.SETTLED
        self._stats.fenced("drained")
        return True

    def _is_idle(self) -> bool:
        """Nothing that was begun here still writes to its pages."""
        copies = [grant.copy for grant in self.unpacking.grants if grant.copy is not None]
        return all(read.done() for read in self.reads) and all(copy.done() for copy in copies)

    def settle_fenced(self) -> None:
        if self.state is TransferState.SETTLED:
            return
        self.reads = self._stats.take_done(self.reads)[1]
        self.state = TransferState.SETTLED
        self._stats.fenced(self.pair.fenced_by, self.pair.fence_retries)

    def free(self) -> None:
        """Of a request whose transfers are all settled: its parts and its slot are others'."""
        self.unpacking.settle()
        if self._has_slot:
            self._worker.slots.give_back(self.slot)
        self._has_slot = False

    def drains_too_long(self, now: float) -> bool:
        late = self.state is TransferState.DRAINING and now >= self._drain_until
        return late and not self.pair.lost

    def text(self) -> str:
        layers, want = len(self.pair.layers), self._expected or self.least
        if self.reads:
            count = f"{self.counted} of {len(self.reads)} reads"
        elif self.counted > want:
            count = f"{self.counted} immediates, of more than one chunk, and no tail"
        elif want > self.least:
            count = f"{self.counted} of {want} immediates"
        else:
            at = min(self.counted * layers // want, layers) if want else layers
            count = f"{self.counted} of {want} immediates (about layer {at} of {layers})"
        return f"{self.pair.name} {count}"
