"""What a sender knows of a request: a `Flight` for each receiver. Used by moe_p2p/kv/sender.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_p2p.errors import MoeP2pError
from moe_p2p.kv.channel import Message
from moe_p2p.kv.packing import Packing
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.tail import Slot
from moe_p2p.kv.units import Chunk, Units, int32_tensor

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
    chunks: list[Chunk] = field(default_factory=list)
    chunk: Chunk | None = None  # of `end`; None: no whole page more than before
    end: int | None = None  # tokens that are there, as the caller says
    sums: dict[int, int] = field(default_factory=dict)  # by layer
    requests: list[Any] = field(default_factory=list)
    packing: Packing = field(default_factory=Packing)
    committed: bool = False
    drain_until: float = 0.0


class KVSending:
    """One request. Made by `KVSender.start`."""

    def __init__(
        self, sender: KVSender, request: str, pages: Mapping[str, Tensor], total: int
    ) -> None:
        self.sender, self.request, self.pages, self.total = sender, request, dict(pages), total
        self.flights: list[Flight] = []
        self.calls: list[tuple[int, int]] = []  # (layer, tokens that are there), in their order
        self.user: bytes | None = None  # not None: committed
        self.state = "open"  # then "complete" or "failed"
        self.error: MoeP2pError | None = None
        self.reusable = False  # its pages may be given to somebody else
        self.began_at = 0.0

    def layer(self, layer: int, end: int | None = None) -> None:
        """Sends one layer, number `layer` of the model, of tokens up to `end` (None: all).

        Its bytes must be there; on a GPU synchronize the stream first. With chunked prefill all
        layers of a chunk come before those of the next one.
        """
        self.sender.layer(self, layer, self.total if end is None else end)

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
