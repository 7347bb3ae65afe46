"""The handle that a normal dispatch returns for combine and for cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.runtime import NODE_RANKS
from moe_p2p.moe.dispatched import Dispatched
from moe_p2p.moe.options import DispatchForm, DispatchOptions
from moe_p2p.moe.pool import ReleasingAllToAll
from moe_p2p.moe.row_counts import Extent, to_device

# Options of a normal dispatch, without and with a copy of topk_idx; then of a cached dispatch.
ROWS = tuple(
    DispatchOptions(
        layout="by_rank", solo=True, zero_padding=False, with_source=True, copy_topk=copies
    )
    for copies in (False, True)
)
ROWS_AGAIN = DispatchOptions(layout="by_rank", solo=True, zero_padding=False)


def no_handle(given: object) -> errors.MoeP2pError:
    """The error for what stands in a handle's place."""
    return errors.wrong_type("handle", given, "what dispatch returned, the object itself")


class Elements(Sequence[Any]):
    """Reads as DeepEP's tuple, which is made at the first access, on the current stream."""

    @cached_property
    def _elements(self) -> Sequence[Any]:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        return self._elements[index]

    def __len__(self) -> int:
        return len(self._elements)


@dataclass(eq=False, repr=False)
class NormalHandle(Elements):
    """DeepEP's tuple with the tensors that users read, at the same indices; the others are empty.

    Up to 8 ranks: (rank_prefix_matrix, -, -, recv_src_idx, is_token_in_rank, -).
    More: (is_token_in_rank, -, -, -, -, -, recv_gbl_rank_prefix_sum, recv_src_idx, -, -).

    rank_prefix_matrix [W, W] int32: at [i][j] the rows of rank j from ranks 0 to i. Where the host
        did not wait for counts, all columns equal this rank's column.
    recv_src_idx [R] int32: index of the token at its source. recv_gbl_rank_prefix_sum [W]: rows of
        this rank from ranks 0 to i.

    dispatched: without its rows, which may be freed before this handle.
    """

    all_to_all: ReleasingAllToAll
    dispatched: Dispatched
    extent: Extent
    _is_token_in_rank: Tensor

    @cached_property
    def form_again(self) -> DispatchForm:
        """Returns the form of a dispatch of other values along the same routes."""
        return DispatchForm(ROWS_AGAIN, self.extent.max_tokens, self.extent.num_rows)

    @cached_property
    def _elements(self) -> Sequence[Any]:
        dispatched, source = self.dispatched, self.dispatched.source
        assert source is not None
        nothing, of_rank = dispatched.counts[:0], dispatched.offsets[1:]
        if self.all_to_all.world_size > NODE_RANKS:
            elements = [nothing] * 10
            elements[0], elements[6] = self._is_token_in_rank, of_rank
            elements[7] = source[:, 1]
        else:
            elements = [nothing] * 6
            elements[0] = _prefix_matrix(of_rank, self.extent)
            elements[3], elements[4] = source[:, 1], self._is_token_in_rank
        return elements


def _prefix_matrix(of_rank: Tensor, extent: Extent) -> Tensor:
    """rank_prefix_matrix on the device of of_rank [W], which is this rank's column."""
    prefix = extent.prefix
    if prefix is None:
        return of_rank.unsqueeze(1).expand(-1, of_rank.shape[0])
    return to_device(prefix, of_rank)
