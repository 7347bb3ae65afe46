"""What of a rank's GPU memory is an epoch's own. Of a fixed world there is one, for its life."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from moe_p2p.moe.gpu.partners import Partners
from moe_p2p.moe.rendezvous.mirror import Sharing


class Sharers(NamedTuple):
    """Who shares memory, as these ranks have agreed.

    sharing: the ranks of this node. world: number of the communicator, the same on all ranks.
    partners: ranks of other nodes on this host; None: none. exchange: carries bytes among the ranks
    of this node; memory is then shared by fabric handle.
    """

    sharing: Sharing
    world: int
    partners: Partners | None
    exchange: Callable[[bytes], list[bytes]] | None


class EpochMemory:
    """comm: number of the C++ object. masks: int32 [W] of its NICs, on the host; None: no masks.

    Owns the mappings of regions and of signal memory, which go in this order: finish(), once no
    kernel uses them; the C++ object is closed; close().
    """

    def __init__(self, comm: int, world: int, masks: Tensor | None) -> None:
        self.comm, self.world, self.masks = comm, world, masks
        self.undo, self.signals = ExitStack(), ExitStack()

    def finish(self) -> None:
        """Unregisters the signal memory before it is unmapped."""
        self.signals.close()

    def close(self) -> None:
        """Unmaps and frees; idempotent."""
        self.signals.close()
        self.undo.close()
