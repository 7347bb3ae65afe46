"""HybridEPBuffer of DeepEP's branch hybrid-ep, which Megatron's `hybridep` backend calls.

Its routing is a map of tokens and experts; its rows lie expert after expert, so experts need no
permutation of their own. Dispatch and combine are solo calls of AllToAll, as in normal.py.

Symbols: W ranks, T tokens of this rank, K most experts of a token, E experts, E_local of this rank,
H hidden size, P scales of a token, R rows received.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.config import named
from moe_p2p.deep_ep.elastic import usual_steps
from moe_p2p.deep_ep.handle import Elements
from moe_p2p.library import unaffected
from moe_p2p.moe.config import DEFAULT_CHUNK_TOKENS, AllToAllConfig
from moe_p2p.moe.dispatched import Dispatched, without_rows
from moe_p2p.moe.options import DispatchForm, DispatchOptions
from moe_p2p.moe.pool import TIMEOUT_S, AllToAllPool, ReleasingAllToAll
from moe_p2p.moe.row_counts import HostCounts

_MAX_TOKENS = 1 << 24  # of a communicator: sizes nothing, memory follows from each call's tokens
_TOPKS = (8, 16, 32)  # a map does not name K: the least of these that the first one fits in


class HybridHandle(Elements):
    """Handle of one routing. [0]: rows of each local expert, [-1]: overflow flag, int32 [1].

    The flag is 1 where rows past num_permuted_tokens were dropped, else 0.
    """

    def __init__(
        self,
        all_to_all: ReleasingAllToAll,
        received: Dispatched,
        topk: Tensor,
        per_expert: Tensor,
        *,
        num_experts: int,
        alignment: int,
    ) -> None:
        """received: without its rows, which may be freed before this handle."""
        self.all_to_all, self.received, self.topk = all_to_all, received, topk
        self.per_expert, self.num_experts, self.alignment = per_expert, num_experts, alignment

    @property
    def form_again(self) -> DispatchForm:
        """Returns the form of a dispatch of other values along the same routes."""
        call = self.received.call
        return DispatchForm(_options(self.alignment), call.max_tokens, call.capacity)

    @functools.cached_property
    def _elements(self) -> Sequence[Any]:
        received = self.received
        return self.per_expert, (received.offsets[-1:] > received.call.capacity).int()


class HybridEPBuffer:
    """Dispatch and combine of one rank. The constructor is collective.

    group: of any backend. hidden_dim: not used, calls bring theirs.
    max_num_of_tokens_per_rank: equal on all ranks; tokens of a step, as far as 2 GiB allow. Calls
        may bring more.
    num_local_experts: E_local, for calls that pass none. use_fp8: of calls that do not say.
    num_sms_dispatch_api: thread blocks of a call and its combine. None: all that help.

    Accepted and ignored: what else says how DeepEP's kernels are made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self._pool = AllToAllPool(group, timeout_s=TIMEOUT_S)
        self._host_counts = HostCounts()
        self._made: dict[tuple[Any, ...], ReleasingAllToAll] = {}
        self._topk: int | None = None  # of maps, once known
        self.group, self.rank, self.group_size = group, self._pool.rank, self._pool.world_size
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        self.num_local_experts, self.use_fp8 = num_local_experts, use_fp8
        self._num_sms = num_sms_dispatch_api

    @unaffected
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: HybridHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, HybridHandle]:
        """Sends each token to the ranks of its experts, into rows that lie expert after expert.

        hidden: [T, H] bfloat16, or uint8 that are float8_e4m3fn, with scaling_factor [T, P].
        routing_map: bool [T, E], with probs float32 [T, E] or None; or topk_idx and topk_weights
            [T, K] with num_of_experts. A map's tokens have at most as many experts as the largest
            in the first maps of all ranks, rounded up to 8, 16 or 32.
        pad_multiple: each expert's rows begin at a multiple of it; rows between are zero.
        num_permuted_tokens: R where the host does not wait (non_blocking, or with a handle): then
            T is at most max_num_of_tokens_per_rank, or equal on all ranks, and the call can be
            captured in a graph.
        handle: of an earlier call: other values along the same routes.

        Returns rows [R, H], their probs [R] or None, their scales or None, the rows of each local
        expert with padding [E_local] int32 (on the host unless non_blocking), and the handle. Where
        more than num_permuted_tokens arrive, the last rows are dropped and handle[-1] says so.
        """
        blocking = not (non_blocking if use_host_meta is None else not use_host_meta)
        values = hidden.view(torch.float8_e4m3fn) if hidden.dtype == torch.uint8 else hidden
        self._pool.check_others()
        if handle is not None:
            fields = handle.all_to_all.dispatch_with(
                handle.form_again, values.contiguous(), handle.topk, None, scaling_factor
            )
            return _returned(fields, hidden.dtype, handle, with_probs=False)
        topk, weights, experts = self._routing(
            routing_map, probs, topk_idx, topk_weights, num_of_experts, blocking=blocking
        )
        local = num_of_experts_per_rank or self.num_local_experts
        errors.require(
            experts == local * self.group_size,
            f"the routing is of {experts} experts, {self.group_size} ranks have {local} each",
        )
        all_to_all, alignment = self._all_to_all(values, topk.shape[1], experts), pad_multiple or 1
        given = (values.contiguous(), topk, weights, scaling_factor)
        if num_permuted_tokens is None:
            assert blocking, "non_blocking needs num_permuted_tokens"
            fields, padded = self._dispatch_exactly(all_to_all, given, alignment)
        else:
            most = max(1, self.max_num_of_tokens_per_rank, values.shape[0])
            form = DispatchForm(_options(alignment), most, int(num_permuted_tokens))
            fields = all_to_all.dispatch_with(form, *given)
            padded = (fields.counts + (alignment - 1)) // alignment * alignment
            padded = padded.cpu() if blocking else padded
        handle = HybridHandle(
            all_to_all,
            without_rows(fields),
            topk,
            padded,
            num_experts=experts,
            alignment=alignment,
        )
        return _returned(fields, hidden.dtype, handle, with_probs=weights is not None)

    def _dispatch_exactly(
        self, all_to_all: ReleasingAllToAll, given: tuple[Any, ...], alignment: int
    ) -> tuple[Dispatched, Tensor]:
        """Waits for the counts of all ranks; returns the rows of each expert too."""
        values, topk, weights, scales = given
        fields, sizes = all_to_all.dispatch_counted(
            _options(alignment),
            values,
            topk,
            weights,
            scales,
            self._host_counts.of(topk, all_to_all.config.num_experts, self.group_size),
            alignment=alignment,
        )
        return fields, sizes.counts

    @unaffected
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: HybridHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sums the rows of each token, without weights.

        hidden: [R, H], rows in dispatch's order. probs: [R] float32, returned to (token, expert).

        Returns [T, H], and [T, E] float32, zero where the token has no such expert, or None.
        """
        assert handle is not None, "the handle of dispatch_with_permute is missing"
        result: Any = handle.all_to_all.combine_with(
            hidden.contiguous(),
            handle.received,
            row_scalars=None if probs is None else probs.float().contiguous(),
        )
        if probs is None:
            return result, None
        sums, scalars = result  # [T, H], [T, K]
        topk = handle.topk
        spread = scalars.new_zeros((topk.shape[0], handle.num_experts))
        named = scalars.where(topk >= 0, 0.0)
        return sums, spread.scatter_add_(1, topk.clamp(min=0).long(), named)

    def _routing(
        self,
        routing_map: Tensor | None,
        probs: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        *,
        blocking: bool,
    ) -> tuple[Tensor, Tensor | None, int]:
        """Returns ids [T, K] with -1 for none, their weights [T, K] or None, and E."""
        if routing_map is None:
            assert topk_idx is not None, "there is neither a routing_map nor topk_idx"
            assert num_experts is not None, "topk_idx needs num_of_experts"
            return topk_idx.contiguous(), topk_weights, num_experts
        num_experts = routing_map.shape[1]
        most = self._most_experts(routing_map)
        # Of distinct numbers the largest: a token's experts in ascending order.
        order = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
        found, topk = (routing_map * order).topk(most, dim=1)
        topk = topk.where(found > 0, -1)
        weights = None
        if probs is not None:
            weights = probs.float().gather(1, topk.clamp(min=0)).where(found > 0, 0.0)
        counts = routing_map.sum(1)
        if (blocking or not routing_map.is_cuda) and counts.numel():
            mine = int(counts.max())
            errors.require(
                mine <= most,
                f"a token of routing_map has {mine} experts, calls of this buffer take {most}: the "
                f"most in the first maps of all ranks, rounded up to one of {_TOPKS}. Make a new "
                "buffer, and call it with such a map first, or pass topk_idx instead of maps",
            )
        # Where nothing may wait, such a token names an expert that there is not: the call fails.
        topk[:, 0] = topk[:, 0].where(counts <= most, num_experts)
        return topk, weights, num_experts

    def _most_experts(self, routing_map: Tensor) -> int:
        """Returns K for maps, found by all ranks from the first ones in which a token has any."""
        if self._topk is None:
            mine = int(routing_map.sum(1).max()) if routing_map.shape[0] else 0
            most = max(map(int, self._pool.meet("the most experts of a token", str(mine))))
            errors.require(
                most <= _TOPKS[-1], f"a token has {most} experts, must be at most {_TOPKS[-1]}"
            )
            fitting = next(k for k in _TOPKS if k >= most)
            fitting = min(fitting, routing_map.shape[1])
            if most == 0:  # a warm-up without tokens says nothing about those that follow
                return fitting
            self._topk = fitting
        return self._topk

    def _all_to_all(self, values: Tensor, topk: int, num_experts: int) -> ReleasingAllToAll:
        key = (values.dtype, values.get_device(), values.shape[1], topk, num_experts)
        made = self._made.get(key)
        if made is None:
            steps = min(max(1, self.max_num_of_tokens_per_rank), DEFAULT_CHUNK_TOKENS)
            config = AllToAllConfig(
                num_experts=num_experts,
                hidden_dim=values.shape[1],
                topk=topk,
                max_tokens=_MAX_TOKENS,
                dtype=values.dtype,
                device=values.device.type,
                chunk_tokens=steps,
                num_sms=self._num_sms if values.is_cuda else None,
                timeout_s=self._pool.timeout_s,
            )
            if values.is_cuda:
                config = usual_steps(self._pool, config, self.max_num_of_tokens_per_rank)
            with named(chunk_tokens="max_num_of_tokens_per_rank"):
                made = self._made[key] = self._pool.get(config)
        return made


@functools.cache
def _options(alignment: int) -> DispatchOptions:
    return DispatchOptions(
        layout="grouped", alignment=alignment, solo=True, zero_padding=True, drop=True
    )


def _returned(
    fields: Dispatched, dtype: torch.dtype, handle: HybridHandle, *, with_probs: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, HybridHandle]:
    rows, scales = fields[:2]
    probs = fields.row_weights if with_probs else None
    return rows.view(dtype), probs, scales, handle.per_expert, handle
