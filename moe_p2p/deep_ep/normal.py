"""DeepEP's normal calls: one row for each (token, rank), in the order of source rank and token.

All of them are solo calls of AllToAll: DeepEP's users dispatch and combine in any number and order
with one handle, forward and backward.

Symbols: T tokens, K top-k, E experts, H hidden size, W ranks, R rows received, P scales of a token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from moe_p2p import errors
from moe_p2p.deep_ep.base import NODE_RANKS, BufferBase
from moe_p2p.deep_ep.config import Config, check_alignment
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.handle import ROWS, NormalHandle, no_handle
from moe_p2p.moe.arguments import bias_list
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import new_tuple, tensors_of, without_rows
from moe_p2p.moe.options import DispatchForm
from moe_p2p.moe.pool import ReleasingAllToAll
from moe_p2p.moe.row_counts import Extent, worst_extent

_MAX_TOKENS = 1 << 24  # of a communicator: sizes nothing, memory follows from each call's tokens
_Event = EventOverlap | EventHandle
_Values = Tensor | tuple[Tensor, Tensor]
_Result = tuple[
    _Values, Tensor | None, Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
]


class NormalCalls(BufferBase):
    """get_dispatch_layout, dispatch and combine.

    All take previous_event (the work runs after it, not after the current stream), async_finish
    (the work runs on the communication stream; wait for the returned event) and
    allocate_on_comm_stream, which needs both and changes nothing: results are safe on both streams.
    """

    num_sms: ClassVar[int] = 20

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts where the tokens of topk_idx [T, K] go; -1: nowhere.

        Returns num_tokens_per_rank [W] int32, num_tokens_per_rdma_rank [W / 8] int32 or None up to
        8 ranks, num_tokens_per_expert [E] int32, is_token_in_rank [T, W] bool, and the event.
        """
        turn = self._streams.turn(topk_idx, previous_event, async_finish, allocate_on_comm_stream)
        with turn:
            num_nodes, left = divmod(self.group_size, NODE_RANKS)
            num_nodes = num_nodes if num_nodes > 1 and not left else 0
            counts = self._host_counts.count(
                topk_idx, num_experts, self.group_size, num_nodes=num_nodes
            )
            if async_finish:
                turn.uses((topk_idx,), counts)
        return *counts, turn.event

    def dispatch(
        self,
        x: _Values,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> _Result:
        """Sends each token once to each rank that owns one of its experts.

        x: [T, H], or a pair of float8_e4m3fn [T, H] and its scales [T, P], float32 or int32.
        handle: of an earlier dispatch: the same routing again, without counts, top-k or waiting.
        num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of get_dispatch_layout.
        topk_idx, topk_weights: [T, K]. Without topk_idx, is_token_in_rank decides where rows go.
        expert_alignment: counts in the list are rounded up to it.
        num_worst_tokens: greater than 0: R is this number, and the host does not wait, so the call
            can be captured in a graph. At least W times the largest T of any rank, and equal on all
            ranks: no rank may send more than its W-th part.
        config: its num_sms applies to this dispatch and to later calls with its handle.

        Returns x of R rows (a pair if a pair was given), their top-k as local experts [R, K] with
        -1 elsewhere, their weights [R, K], tokens of each local expert as a list (empty with
        num_worst_tokens), the handle and the event; with a handle None for all but rows and event.
        Rows past the last have -1 for all experts, weights of 0 and any values.
        """
        self._pool.check_others(dispatches=handle is not None)
        values, scales = x if isinstance(x, tuple) else (x, None)
        turn = self._streams.turn(values, previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            if not (topk_idx is None and topk_weights is None):
                text = "a handle was given with topk_idx or topk_weights; give one or the other: a "
                text += "handle brings the routing of its own dispatch"
                raise errors.make(errors.InvalidArgumentError, text)
            if not isinstance(handle, NormalHandle):
                raise no_handle(handle)
            with turn:
                form, topk = handle.form_again, handle.dispatched.topk_idx
                again = _send(handle.all_to_all, form, values, scales, topk)
                got = again[0] if scales is None else _rows_of(again, scales)
                if async_finish:
                    turn.uses((values, scales, topk), again[:2])
            return got, None, None, None, None, turn.event
        with turn:
            if expert_alignment != 1:
                check_alignment(expert_alignment)
            assert is_token_in_rank is not None, "is_token_in_rank is missing"
            assert num_tokens_per_rank is not None, "num_tokens_per_rank is missing"
            assert num_tokens_per_expert is not None, "num_tokens_per_expert is missing"
            num_experts = num_tokens_per_expert.shape[0]
            if topk_idx is None:
                topk = _ranks_as_topk(is_token_in_rank, num_experts)
            else:
                topk = topk_idx.contiguous()
            all_to_all = self._all_to_all(num_experts, topk.shape[1], values, config)
            # The handle has a copy of topk_idx: the caller may overwrite the given one.
            rows = ROWS[topk_idx is not None]
            if num_worst_tokens > 0:
                assert topk_idx is not None, "num_worst_tokens needs topk_idx"
                extent = worst_extent(num_worst_tokens, values.shape[0], self.group_size)
                form = DispatchForm(rows, extent.max_tokens, extent.num_rows)
                fields = _send(all_to_all, form, values, scales, topk, topk_weights)
                counts = []
            else:
                fields, sizes = all_to_all.dispatch_counted(
                    rows,
                    values.contiguous(),
                    topk,
                    topk_weights,
                    None if scales is None else _in_columns(scales),
                    self._host_counts.given(
                        num_tokens_per_rank, num_tokens_per_expert, values.shape[0]
                    ),
                    alignment=expert_alignment,
                )
                extent = new_tuple(Extent, (sizes.num_tokens, sizes.max_tokens, sizes.gathered))
                counts = sizes.counts.tolist()
            received = without_rows(fields)
            got = fields[0] if scales is None else _rows_of(fields, scales)
            new_handle = NormalHandle(all_to_all, received, extent, is_token_in_rank)
            if async_finish:
                layout = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
                given = (values, scales, topk_idx, topk, topk_weights, *layout)
                turn.uses(given, tensors_of(fields))
        return (
            got,
            None if topk_idx is None else received.row_topk,
            None if topk_weights is None else received.row_weights,
            counts,
            new_handle,
            turn.event,
        )

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token of the dispatch that returned `handle`, without weights.

        x: [R, H], a row for each row that dispatch returned.
        topk_weights: [R, K] float32, summed over the ranks of each token as well.
        bias: one or two [T, H]; each sum starts with them.

        Returns [T, H] of x's type, [T, K] or None, and the event.
        """
        turn = self._streams.turn(x, previous_event, async_finish, allocate_on_comm_stream)
        with turn:
            try:
                all_to_all, dispatched = handle.all_to_all, handle.dispatched
            except AttributeError:
                raise no_handle(handle) from None
            scalars = None
            if topk_weights is not None:
                scalars = _widened(topk_weights, dispatched.topk_idx.shape[1])
            result = all_to_all.combine_with(
                x.contiguous(),
                dispatched,
                row_scalars=scalars,
                terms=[] if bias is None else bias_list(bias),
            )
            out, summed = result if isinstance(result, tuple) else (result, None)
            if summed is not None and topk_weights is not None:
                summed = summed[:, : topk_weights.shape[1]]
            if async_finish:
                terms = bias if isinstance(bias, tuple) else (bias,)
                turn.uses((x, topk_weights, *terms, dispatched.call.handle), (out, summed))
        return out, summed, turn.event

    def prepare(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        dtype: torch.dtype = torch.bfloat16,
        config: Config | None = None,
    ) -> None:
        """Makes all that dispatch and combine of these shapes need, which their first call does
        otherwise and no call can while a CUDA graph is captured. Collective. Not in DeepEP.

        dtype: of x at dispatch; sums are bfloat16 where it is float8_e4m3fn. Tensors of the calls
        are on this rank's GPU; on a machine without one on the CPU.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        values = torch.empty(0, hidden, dtype=dtype, device=device)
        all_to_all = self._all_to_all(num_experts, num_topk, values, config)
        summed = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        all_to_all.prepare(ROWS[True], x_dtype=dtype, y_dtype=summed)

    internode_dispatch = dispatch
    internode_combine = combine

    def _all_to_all(
        self, num_experts: int, topk: int, values: Tensor, config: Config | None
    ) -> ReleasingAllToAll:
        """Returns the communicator of these shapes; types of 1 and 2 bytes share one."""
        num_sms = config.num_sms if config else self.num_sms
        key = num_experts, topk, values.dtype, values.shape[1], values.get_device(), num_sms
        made = self._normal.get(key)
        if made is None:
            narrow = values.dtype.itemsize <= 2
            fields: dict[str, Any] = {
                "num_experts": num_experts,
                "hidden_dim": values.shape[1],
                "topk": topk,
                "dtype": torch.bfloat16 if narrow else values.dtype,
                "device": values.device.type,
                "num_sms": num_sms if values.is_cuda else None,
            }
            # In this mode num_rdma_bytes are kept for low-latency calls.
            rdma_bytes = 0 if self.low_latency_mode else self.num_rdma_bytes
            shape = AllToAllConfig(**fields, max_tokens=_MAX_TOKENS, timeout_s=self._timeout_s)
            made = self._normal[key] = self._pool.get(
                shape, limit_bytes=self.num_nvl_bytes + rdma_bytes
            )
        return made


def _send(
    all_to_all: ReleasingAllToAll,
    form: DispatchForm,
    values: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
) -> tuple[Any, ...]:
    """Dispatches; returns the fields of a Dispatched."""
    if scales is not None:
        scales = _in_columns(scales)
    values, others = values.contiguous(), all_to_all.others
    return all_to_all.dispatch_with(form, values, topk_idx, topk_weights, scales, others=others)


def _in_columns(scales: Tensor) -> Tensor:
    """[T] or [T, P] -> [T, P]"""
    return (scales.unsqueeze(1) if scales.dim() == 1 else scales).contiguous()


def _rows_of(fields: tuple[Any, ...], scales: Tensor) -> _Values:
    """Returns rows in the form of the caller's x; its scales may be [T] instead of [T, P]."""
    return fields[0], fields[1].squeeze(1) if scales.dim() == 1 else fields[1]


def _ranks_as_topk(is_token_in_rank: Tensor, num_experts: int) -> Tensor:
    """[T, W] int64: the first expert of each rank that a token goes to, else -1."""
    num_ranks = is_token_in_rank.shape[1]
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)


def _widened(topk_weights: Tensor, topk: int) -> Tensor:
    """Adds columns up to the number that the dispatch used."""
    if topk_weights.shape[1] == topk:
        return topk_weights.contiguous()
    missing = topk - topk_weights.shape[1]
    errors.require(
        missing > 0,
        f"topk_weights has {topk_weights.shape[1]} columns, the dispatch of this handle had {topk}",
    )
    return functional.pad(topk_weights, (0, missing))
