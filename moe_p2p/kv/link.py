"""What a GPU's NICs can carry, which rows are too small for them, and how those are packed.

The rates are those of `CX7` and `EFA` until `python -m moe_p2p tune` has measured the NICs.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import ProtocolError, make, require, require_type
from moe_p2p.machine import transport, tuned


@dataclass(frozen=True)
class KVLink:
    """NICs of one GPU together.

    bytes_per_s: of large writes. writes_per_s: of small ones.
    pack: "auto": rows that the rates call too small; True: all rows that fit a packed write;
    False: none.
    packed_write_bytes: of a part of the ring; a packed write takes one, or a few in a row.
    ring_bytes: staging memory of each worker. num_sms: multiprocessors that gather or scatter.
    """

    name: str
    bytes_per_s: float
    writes_per_s: float
    packed_write_bytes: int = 4 << 20
    pack: bool | str = "auto"
    ring_bytes: int = 64 << 20
    num_sms: int = 6

    def __post_init__(self) -> None:
        require_type("KVLink.name", self.name, str, "a str")
        for field in ("bytes_per_s", "writes_per_s"):
            value = getattr(self, field)
            require_type(f"KVLink.{field}", value, (int, float), "a number")
            require(0 < value < float("inf"), f"KVLink.{field} is {value}, must be above 0")
        for field in ("packed_write_bytes", "ring_bytes", "num_sms"):
            value = getattr(self, field)
            require_type(f"KVLink.{field}", value, int, "an int")
            require(value > 0, f"KVLink.{field} is {value}, must be above 0")
        require(
            self.pack in (True, False, "auto"),
            f'KVLink.pack is {self.pack!r}, must be True, False or "auto"',
        )

    @property
    def small_row_bytes(self) -> int:
        """Rows below it keep the NICs busy with writes, not with bytes."""
        return round(self.bytes_per_s / self.writes_per_s)

    def why_packed(self, row_bytes: int) -> str:
        """Empty: write such rows one by one. Else the reason to gather them first."""
        small = row_bytes < self.small_row_bytes
        if self.pack is False or row_bytes > self.packed_write_bytes:
            return ""
        if not small:
            return f"rows of {row_bytes:,} B, because pack is True" if self.pack is True else ""
        reached = row_bytes * self.writes_per_s
        return (
            f"rows of {row_bytes:,} B reach {reached / 1e9:.1f} of {self.bytes_per_s / 1e9:.0f} "
            f"GB/s at {self.writes_per_s / 1e6:.1f} M writes/s; {self.name} needs "
            f"{self.small_row_bytes:,} B"
        )

    def lands(self, unit_bytes: int) -> bool:
        """Whether packed units that are one run at the target are written straight to it."""
        return self.small_row_bytes <= unit_bytes <= self.packed_write_bytes

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> KVLink:
        try:
            fields: dict[str, Any] = json.loads(data)
            return KVLink(**fields)
        except (TypeError, ValueError) as error:
            raise make(ProtocolError, f"these bytes are not a KVLink: {error!r}") from error


# One 400 Gbit/s port of ConnectX-7, and EFA of the same rate: writes/s of one GPU's NICs as the
# paper's systems report them.
CX7 = KVLink("CX7", bytes_per_s=50e9, writes_per_s=11.1e6)
EFA = KVLink("EFA", bytes_per_s=50e9, writes_per_s=2.1e6)
LINKS = {"cx7": CX7, "efa": EFA}
# Copies by the CPU or by copy engines: a write costs no more than the copy that packing adds.
SOFTWARE = KVLink("the software NIC", bytes_per_s=50e9, writes_per_s=11.1e6, pack=False)


def link_of(engine: Engine) -> KVLink:
    """The link of an engine's NICs: as measured, else as far as its provider tells."""
    settings = engine.opening.settings
    kind = transport.kind_of(engine.provider, settings)
    link = {"verbs": CX7, "efa": EFA}.get(kind, SOFTWARE)
    rates = tuned.find().rates
    if rates is None or rates.transport != tuned.transport_name(engine.provider, settings):
        return link
    return as_measured(link, rates, engine.num_nics)


def as_measured(link: KVLink, rates: tuned.Rates, num_nics: int) -> KVLink:
    """`link` at the rates of so many NICs."""
    share = num_nics / rates.nics
    return dataclasses.replace(
        link,
        name=f"{rates.transport} as measured",
        bytes_per_s=rates.bytes_per_s * share,
        writes_per_s=rates.writes_per_s * share,
    )


def measured_link() -> KVLink | None:
    """What `tune` has measured here, for `plan --kv`; None: nothing."""
    rates = tuned.find().rates
    if rates is None:
        return None
    provider, _, settings = rates.transport.partition(" ")
    link = {"verbs": CX7, "efa": EFA}.get(transport.kind_of(provider, settings), SOFTWARE)
    return as_measured(link, rates, rates.nics)
