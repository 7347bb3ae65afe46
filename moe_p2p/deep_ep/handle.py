"""What a normal dispatch leaves for cached dispatches and for combine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moe_p2p.all_to_all import AllToAll
from moe_p2p.deep_ep.base import NODE_RANKS
from moe_p2p.deep_ep.host_counts import Extent
from moe_p2p.dispatched import Dispatched

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle(tuple[Tensor, ...]):
    """The tensors of DeepEP's handle that users look at, in its places; empty ones elsewhere.

    Up to 8 ranks: (rank_prefix_matrix, -, -, recv_src_idx, is_token_in_rank, -).
    More: (is_token_in_rank, -, -, -, -, -, recv_gbl_rank_prefix_sum, recv_src_idx, -, -).

    rank_prefix_matrix [W, W] int32: at [i][j] the rows of rank j from ranks 0 to i. Where the host
        did not wait for counts, all columns show that of this rank.
    recv_src_idx [R] int32: the token at its source. recv_gbl_rank_prefix_sum [W]: rows of this rank
        from ranks 0 to i.
    """

    all_to_all: AllToAll
    extent: Extent
    dispatched: Dispatched  # without its rows

    @classmethod
    def make(
        cls,
        all_to_all: AllToAll,
        dispatched: Dispatched,
        extent: Extent,
        is_token_in_rank: Tensor,
    ) -> Self:
        source = dispatched.source
        assert source is not None
        nothing = dispatched.counts[:0]
        of_rank = dispatched.offsets[1:]
        if all_to_all.world_size > NODE_RANKS:
            places = [nothing] * 10
            places[0], places[6], places[7] = is_token_in_rank, of_rank, source[:, 1]
        else:
            places = [nothing] * 6
            places[0] = _prefix_matrix(of_rank, extent)
            places[3], places[4] = source[:, 1], is_token_in_rank
        handle = cls(places)
        handle.all_to_all = all_to_all
        handle.extent = extent
        handle.dispatched = dispatched._replace(x=nothing, scales=None, source=None)
        return handle


def _prefix_matrix(of_rank: Tensor, extent: Extent) -> Tensor:
    """[W, W], on the device of of_rank [W], this rank's column."""
    if extent.prefix is None:
        return of_rank.unsqueeze(1).expand(-1, of_rank.shape[0])
    if of_rank.is_cuda:
        return extent.prefix.pin_memory().to(of_rank.device, non_blocking=True)
    return extent.prefix
