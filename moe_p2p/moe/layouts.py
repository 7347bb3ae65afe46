"""Layouts of received rows, a line each: all that calls and kernels have to know of a layout.

They ask for a fact and name no layout. kernels/abi/layout.h has the same lines for C++ and kernels,
and tests/moe/test_layouts.py compares the two. A layout's number is its position.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

RowLayout = Literal["padded", "grouped", "by_rank"]


class LayoutFacts(NamedTuple):
    """One layout.

    kernel: number of the first of the layouts that share a dispatch kernel.
    apart: each expert has `capacity` rows of its own, [E_local, capacity]; else [capacity].
    per_token: a row is a token of this rank, with K weights and expert ids, and offsets are of
        sources; else it is of one (token, expert), and offsets are of experts.
    """

    name: str
    kernel: int
    apart: bool
    per_token: bool

    @property
    def packs_experts(self) -> bool:
        """Experts follow each other in one room: they can be aligned, and dropped at its end."""
        return not self.apart and not self.per_token


LAYOUTS = (
    LayoutFacts("padded", 0, apart=True, per_token=False),
    LayoutFacts("grouped", 0, apart=False, per_token=False),
    LayoutFacts("by_rank", 2, apart=False, per_token=True),
)
NAMES: tuple[str, ...] = get_args(RowLayout)
KERNELS = tuple(dict.fromkeys(each.kernel for each in LAYOUTS))  # layouts that name a kernel
