"""Who is there, for the caller of an AllToAll: masks of lost ranks, and members of a world that
changes.

AllToAll's base class; what it does is in communicator.py and elastic.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_p2p.engine.lifetime import NotCopied
from moe_p2p.library import call
from moe_p2p.moe.communicator import Communicator

_ops = torch.ops.moe_p2p


class Membership(NotCopied):
    """Of one rank's object, whose face `_communicator` is, with the number `_comm`."""

    _communicator: Communicator
    _comm: int

    # --- masks ---

    @property
    def masked(self) -> Tensor:
        """[W] int32 on the device of the calls: 1 for each rank that is masked here, else 0.

        The memory itself, which calls and the polling thread set: copy it (on a GPU in stream
        order, which waits for nothing). Each rank masks others by itself, so masks may differ
        for as long as a deadline. clean_masks() takes ranks back. Raises InvalidArgumentError
        without mask_lost_ranks.
        """
        return self._communicator.masked

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Masks these ranks at once; on a GPU in stream order. Call it on all ranks: a rank that
        does not waits for the masked ranks, and masked ranks wait for the callers. Data under way
        to a masked rank need not arrive.

        Raises InvalidArgumentError for this rank itself and for numbers that no rank has.
        """
        self._communicator.mask_ranks(ranks)

    def clean_masks(self) -> None:
        """Takes masked ranks back, where all ranks are of one node; on a GPU in stream order.

        Every rank calls it, equally often, also a rank that has masked none: others may have
        masked it. It waits for nobody. A rank that makes its next call before another one has
        cleaned waits for it there, and masks it at the deadline. The memory stays, so captured
        CUDA graphs stay valid. Calls that are open end: what was dispatched before is not combined.

        On this rank no call may run meanwhile: replays of graphs on other streams have ended.
        Objects that share one mask all clean it. Raises UnavailableError between nodes: make a new
        object there; InvalidArgumentError without mask_lost_ranks or in a capture; and the error
        of an object that is broken, which stays so.
        """
        call(_ops.all_to_all_clean_masks.default, self._comm)

    # --- its members, where the world changes ---

    def stage_members(self, *, add: Iterable[int] = (), remove: Iterable[int] = ()) -> None:
        """Begins to make the next epoch of the world, beside steps: with the ranks that are in this
        one, but for `remove` and for those whose process is gone, and with the new processes of
        `add`, which may also be ranks whose process was lost. Returns at once.

        All ranks that stay call it with the same arguments, and those that are removed too; the new
        ones are made with join=True. Raises InvalidArgumentError for seats that are not there, or
        where members are staged.
        """
        self._communicator.stage_members(add, remove)

    def members_staged(self) -> bool:
        """Whether commit_members() waits for nobody. Asks no store, and never waits."""
        return self._communicator.staged()

    def commit_members(self) -> None:
        """Enters the epoch that was staged, once all its ranks have staged it: from the next call
        on. All ranks call it between the same two steps. Calls that are open end, as handles, masks
        and errors of the epoch before do; captured calls and the object stay. At a rank that was
        removed it closes the object.

        Raises AbortedError, and this epoch goes on, where one of the ranks was lost or did not come
        within timeout_s, naming it, or what that rank raised. Raises AbortedError, too, where the
        others go on without this rank although it was not removed: where its node of several ranks
        has lost one, the object waits for an epoch with the whole node (`add` its ranks, at this
        one too), else it is closed. Raises StoreError where the store does not answer: the object
        is closed then, unless the others cannot have gone on.
        """
        self._communicator.commit_members()

    def update_members(self, *, add: Iterable[int] = (), remove: Iterable[int] = ()) -> None:
        """stage_members() and commit_members(), for ranks that may wait between two steps."""
        self.stage_members(add=add, remove=remove)
        self.commit_members()

    @property
    def lost_tokens(self) -> int:
        """How many tokens of this rank have lacked rows of a rank that was lost after their
        dispatch (`lost` of the configuration), in the epoch that is. Raises UnavailableError on
        GPUs."""
        return int(call(_ops.all_to_all_lost.default, self._comm))
