"""A kernel before it is compiled: its source, macros, and how many blocks it may have."""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """Source and macros of a kernel, and the most blocks of each of its halves.

    max_copy_blocks: replaces max_send_blocks when combine only copies rows (nothing to add).
    max_away_blocks: replaces it where rows to the own rank may stay in place, too.
    max_tokens: of the calls that it is for; 0: for all. short: what takes short calls instead.
    """

    source: str
    macros: dict[str, int]
    max_send_blocks: int
    max_recv_blocks: int
    max_copy_blocks: int
    max_away_blocks: int
    max_tokens: int = 0
    short: Kernel | None = None

    @property
    def entry(self) -> str:
        """The mangled name of moe_p2p::dispatch, moe_p2p::combine or moe_p2p::clean."""
        name = self.source.removesuffix(".cu")
        params = f"{name.capitalize()}Params"
        return f"_ZN7moe_p2p{len(name)}{name}ENS_3abi{len(params)}{params}E"
