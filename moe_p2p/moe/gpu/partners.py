"""What a rank on a GPU needs to know of ranks of other nodes on the same host."""

from __future__ import annotations

from typing import NamedTuple

from moe_p2p.engine.engine import Engine
from moe_p2p.machine.transport import SOFTWARE, TIMED


class Partners(NamedTuple):
    """The ranks with this local index on the other nodes, whose memory this one maps.

    copy_blocks: thread blocks that copy kernels of software NICs take from the calls' kernels.
    in_place: what goes to other nodes is stored straight into the partners' memory.
    """

    node: int
    num_nodes: int
    key: str  # of the exchange of their memory
    copy_blocks: int
    in_place: bool


def partners_of(engine: Engine, node: int, num_nodes: int, key: str) -> Partners | None:
    """Returns None unless NICs are software NICs: only these write through mapped memory."""
    if num_nodes == 1 or engine.provider not in SOFTWARE:
        return None
    timed = engine.provider == TIMED
    return Partners(node, num_nodes, f"{key}.partners", 0 if timed else engine.num_nics, timed)
