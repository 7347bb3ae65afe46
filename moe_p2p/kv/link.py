"""What a GPU's NICs can carry, and which rows are too small for them to be written one by one."""

from __future__ import annotations

from dataclasses import dataclass

from moe_p2p.errors import require, require_type


@dataclass(frozen=True)
class KVLink:
    """NICs of one GPU together.

    bytes_per_s: of large writes. writes_per_s: of small ones.
    packed_write_bytes: most bytes of one write of packed rows.
    """

    name: str
    bytes_per_s: float
    writes_per_s: float
    packed_write_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        require_type("KVLink.name", self.name, str, "a str")
        for field in ("bytes_per_s", "writes_per_s", "packed_write_bytes"):
            value = getattr(self, field)
            require_type(f"KVLink.{field}", value, (int, float), "a number")
            require(0 < value < float("inf"), f"KVLink.{field} is {value}, must be above 0")
        require_type("KVLink.packed_write_bytes", self.packed_write_bytes, int, "an int")

    @property
    def small_row_bytes(self) -> int:
        """Rows below it keep the NICs busy with writes, not with bytes."""
        return round(self.bytes_per_s / self.writes_per_s)

    def why_packed(self, row_bytes: int) -> str:
        """Empty: write such rows one by one. Else the reason to gather them first."""
        if row_bytes >= self.small_row_bytes:
            return ""
        reached = row_bytes * self.writes_per_s
        return (
            f"rows of {row_bytes:,} B reach {reached / 1e9:.1f} of {self.bytes_per_s / 1e9:.0f} "
            f"GB/s at {self.writes_per_s / 1e6:.1f} M writes/s; {self.name} needs "
            f"{self.small_row_bytes:,} B"
        )


# One 400 Gbit/s port of ConnectX-7, and EFA of the same rate: writes/s of one GPU's NICs as the
# paper's systems report them.
CX7 = KVLink("CX7", bytes_per_s=50e9, writes_per_s=11.1e6)
EFA = KVLink("EFA", bytes_per_s=50e9, writes_per_s=2.1e6)
LINKS = {"cx7": CX7, "efa": EFA}
