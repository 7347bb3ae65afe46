"""EPHandle: returned by ElasticBuffer.dispatch, for its combine and for cached dispatches.

Its fields are DeepEP's. Fields that our calls do not need are computed when they are read, on the
current stream, without waiting on the host.

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E_local experts of
this rank, M tokens per step, C chunks of a call. R rows by rank: received tokens, each once, in the
order of (source rank, token), or W * T where the host does not know their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from moe_p2p.library import call, numbers_of
from moe_p2p.moe.dispatched import Dispatched
from moe_p2p.moe.options import DispatchForm, DispatchOptions
from moe_p2p.moe.pool import ReleasingAllToAll
from moe_p2p.moe.row_counts import to_device

# do_expand, do_zero_padding, use_tma_aligned_col_major_sf, whether topk_idx is copied
RowForm = tuple[bool, bool, bool, bool]


@cache
def _options(alignment: int, rows: RowForm) -> DispatchOptions:
    do_expand, zero_padding, column_scales, copy_topk = rows
    return DispatchOptions(
        layout="grouped" if do_expand else "by_rank",
        alignment=alignment if do_expand else 1,
        column_scales=column_scales,
        with_source=True,
        copy_topk=copy_topk,
        zero_padding=zero_padding,
    )


class RowCounts(NamedTuple):
    """Row counts of a dispatch on the host: exact after a CPU sync, else upper bounds."""

    num_recv_tokens: int
    num_expanded_tokens: int  # rows of all experts, each rounded up to expert_alignment
    per_expert: Tensor | None = None  # [E_local] int32, on the host, rounded up likewise
    gathered: Tensor | None = None  # [W, W + ..] int32, on the host: [i, j] tokens from i to j

    @staticmethod
    def most(all_to_all: ReleasingAllToAll, num_tokens: int, alignment: int) -> RowCounts:
        """Returns upper bounds."""
        tokens, experts = all_to_all.world_size * num_tokens, all_to_all.num_local_experts
        expanded = tokens * min(all_to_all.config.topk, experts) + (alignment - 1) * experts
        return RowCounts(tokens, -(-expanded // alignment) * alignment)

    def form(self, num_tokens: int, alignment: int, rows: RowForm) -> DispatchForm:
        """Returns the form of a dispatch with this many rows, in this format."""
        capacity = self.num_expanded_tokens if rows[0] else self.num_recv_tokens
        return DispatchForm(_options(alignment, rows), num_tokens, capacity)


@dataclass(eq=False, repr=False)
class EPHandle:
    """Handle of one routing. Passed to dispatch, it sends other values along the same routes.

    received: without its rows, which may be freed before this handle.
    """

    # Fields of DeepEP's own transport, without counterpart here.
    token_metadata_at_forward: ClassVar[Tensor | None] = None
    channel_linked_list: ClassVar[Tensor | None] = None

    all_to_all: ReleasingAllToAll
    received: Dispatched
    row_counts: RowCounts
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_sms: int
    topk_version: int | None = None  # of topk_idx, which has to keep it; None: it may change

    def hold_topk(self) -> None:
        """From now on topk_idx must stay as it is. Tensors of inference mode have no version."""
        topk_idx = self.received.topk_idx
        self.topk_version = None if topk_idx.is_inference() else topk_idx._version

    def take(self, received: Dispatched) -> None:
        """Of a cached dispatch: it holds the open step, for the next combine."""
        self.received = received

    @property
    def num_max_tokens_per_rank(self) -> int:
        return self.received.call.max_tokens

    @property
    def topk_idx(self) -> Tensor:
        """[t, K]"""
        topk_idx = self.received.topk_idx
        assert self.topk_version is None or self.topk_version == topk_idx._version, (
            "topk_idx was changed in place, and the handle of its dispatch holds it by reference: "
            "leave it as it is as long as the handle is used, or pass a copy to dispatch"
        )
        return topk_idx

    @property
    def num_recv_tokens(self) -> int:
        return self.row_counts.num_recv_tokens

    @property
    def num_expanded_tokens(self) -> int:
        return self.row_counts.num_expanded_tokens

    @property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        per_expert = self.row_counts.per_expert
        return [] if per_expert is None else per_expert.tolist()

    def check_same(self, **given: int | None) -> None:
        """Asserts that arguments equal the handle's; None: not given."""
        for name, value in given.items():
            mine = getattr(self, name)
            assert value in (None, mine), f"{name} is {value}, the handle's is {mine}"

    def deterministic_sort(
        self,
        do_cpu_sync: bool,
        is_cached_dispatch: bool,
        recv_x: Tensor,
        recv_sf: Tensor | None,
        recv_topk_idx: Tensor | None,
        recv_topk_weights: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        """Does nothing: rows are in the order of (source rank, token), of each expert too."""

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """[W] int32: running sum of the tokens of each source rank; all ranks are one domain."""
        if not self.do_expand:
            return self.received.offsets[1:]
        gathered = self.row_counts.gathered
        if gathered is not None:
            from_rank = gathered[:, self.all_to_all.rank]
            return to_device(from_rank.cumsum(0, dtype=torch.int32), self.received.counts)
        return self._token_rows.ge(0).any(2).sum(1).cumsum(0).int()

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """[E_local] int32: running sum of each expert's rows, rounded up to expert_alignment.

        With do_expand the expert's own rows are not rounded up, so this is where they end.
        """
        if self.do_expand:
            return self.received.offsets[:-1] + self.received.counts
        ends = self.received.counts + (self.expert_alignment - 1)
        return (ends // self.expert_alignment * self.expert_alignment).cumsum(0).int()

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """[E_local] int32: tokens of each expert."""
        return self.received.counts

    @property
    def dst_buffer_slot_idx(self) -> Tensor:
        """[t, L + N] int32: slot of each token at each rank of the node, then for each node."""
        shape = self.all_to_all._shape
        width = shape.ranks_per_node + shape.world_size // shape.ranks_per_node
        send_slots = self.received.call.handle[self._layout["send_slots"] :]
        return send_slots.view(self.topk_idx.shape[0], width)

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        """[R, K + 2] int32, a row per received token: source rank * T + token at the source, source
        rank * K + first k with an expert here, then its row for each k (-1: none). Rows past the
        last received token are not set.
        """
        rows = self._rows_by_token if self.do_expand else self._rows_by_rank
        here = rows >= 0
        first_row = rows.amax(1).clamp(min=0)  # any row will do: all have the token's source
        assert self.received.source is not None
        rank, token = self.received.source[first_row].unbind(1)
        first_k = here.int().argmax(1)
        head = (rank * self.num_max_tokens_per_rank + token, rank * rows.shape[1] + first_k)
        return torch.cat((torch.stack(head, 1), rows), 1).int()

    @property
    def _rows_by_rank(self) -> Tensor:
        """[R, K]: the row itself for each k with an expert here."""
        assert self.received.row_topk is not None
        topk = self.received.row_topk
        row = torch.arange(topk.shape[0], device=topk.device).unsqueeze(1)
        return torch.where(topk >= 0, row, -1)

    @property
    def _rows_by_token(self) -> Tensor:
        """[R, K]: rows of each received token, in the order of (source rank, token)."""
        rows = self._token_rows.flatten(0, 1)
        ours = (rows >= 0).any(1)
        # Slots for other ranks of the node all go to an extra last row.
        place = torch.where(ours, ours.cumsum(0) - 1, self.num_recv_tokens)
        gathered = rows.new_full((self.num_recv_tokens + 1, rows.shape[1]), -1)
        return gathered.index_copy_(0, place, rows)[:-1]

    @cached_property
    def _layout(self) -> dict[str, int]:
        """Where the arrays of the received handle begin (kernels/abi/handle.h, HandleLayout)."""
        comm, num_tokens = self.all_to_all._comm, self.topk_idx.shape[0]
        op = torch.ops.moe_p2p.handle_layout.default
        return numbers_of(call(op, comm, num_tokens, self.num_max_tokens_per_rank))

    @cached_property
    def _token_rows(self) -> Tensor:
        """[W, C * M, K] int32: row of each slot and k, -1 where the expert is not this rank's."""
        shape, words, at = self.all_to_all._shape, self.received.call.handle, self._layout
        num_ranks, topk, chunk = shape.world_size, shape.topk, at["num_slots"]
        counts = words[at["slot_counts"] : at["slot_rows"]]
        num_sources = counts.shape[0]
        num_chunks = num_sources // num_ranks
        rows = words[at["slot_rows"] :][: num_sources * chunk * topk]
        ours = torch.arange(chunk, device=words.device) < counts.unsqueeze(1)  # [C * W, M]
        if shape.ranks_per_node < num_ranks:
            # Another node's tokens include tokens that go only to our neighbours.
            node, local = divmod(self.all_to_all.rank, shape.ranks_per_node)
            sources = torch.arange(num_ranks, device=words.device).repeat(num_chunks)
            near = sources // shape.ranks_per_node == node
            ranks = words[at["slot_ranks"] : at["send_slots"]].view(torch.int64)
            ranks = ranks.view(num_sources, chunk)
            ours &= near.unsqueeze(1) | ((ranks >> local & 1) != 0)
        rows = rows.view(num_sources, chunk, topk).where(ours.unsqueeze(2), -1)
        rows = rows.view(num_chunks, num_ranks, chunk, topk)
        return rows.transpose(0, 1).reshape(num_ranks, num_chunks * chunk, topk)
