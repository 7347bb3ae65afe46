"""What a rank on a GPU needs to know of ranks of other nodes on the same host."""

from __future__ import annotations

from typing import NamedTuple

from moe_p2p.engine.engine import Engine
from moe_p2p.machine.transport import SOFTWARE, TIMED


class Partners(NamedTuple):
    """The ranks with this local index on the other nodes, whose memory this one maps.

    nodes: those whose rank came, in order; place: of this one among them.
    copy_blocks: thread blocks that copy kernels of software NICs take from the calls' kernels.
    in_place: what goes to other nodes is stored straight into the partners' memory.
    """

    place: int
    nodes: list[int]
    num_nodes: int
    key: str  # of the exchange of their memory
    copy_blocks: int
    in_place: bool

    def by_node(self, addresses: list[int]) -> list[int]:
        """Returns an address of each node, from addresses in order of place; 0: it is absent, and
        nothing is written to it."""
        of_nodes = dict(zip(self.nodes, addresses, strict=True))
        return [of_nodes.get(node, 0) for node in range(self.num_nodes)]


def partners_of(
    engine: Engine, node: int, num_nodes: int, key: str, absent_nodes: list[int]
) -> Partners | None:
    """Returns None unless NICs are software NICs: only these write through mapped memory.

    absent_nodes: those whose ranks did not come.
    """
    if num_nodes == 1 or engine.provider not in SOFTWARE:
        return None
    timed = engine.provider == TIMED
    nodes = [each for each in range(num_nodes) if each not in absent_nodes]
    blocks = 0 if timed else engine.num_nics
    return Partners(nodes.index(node), nodes, num_nodes, f"{key}.partners", blocks, timed)
