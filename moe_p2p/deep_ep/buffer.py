"""V1's Buffer: DeepEP's normal and low-latency calls over AllToAll.

Symbols: W ranks, K top-k, E experts, E_local of this rank, H hidden size, P scales of a token. Of
normal calls: T tokens, R rows received. Of low-latency calls: T the bound on a rank's tokens, t
tokens of this rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.config import Config, check_alignment, recommend
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.handle import ROWS, NormalHandle, no_handle
from moe_p2p.deep_ep.low_latency import (
    LowLatencyKey,
    Masks,
    await_all,
    make_low_latency,
    size_hint,
)
from moe_p2p.deep_ep.low_latency_calls import LowLatencyCalls
from moe_p2p.deep_ep.mpi import MpiComm
from moe_p2p.deep_ep.normal import (
    dispatch_again,
    in_columns,
    normal_config,
    ranks_as_topk,
    rows_of,
    send,
    widened,
)
from moe_p2p.deep_ep.runtime import NODE_RANKS, Runtime, pool_of
from moe_p2p.deep_ep.streams import new_event
from moe_p2p.moe import bare
from moe_p2p.moe.arguments import bias_list
from moe_p2p.moe.dispatched import new_tuple, tensors_of, without_rows
from moe_p2p.moe.options import DispatchForm
from moe_p2p.moe.pool import TIMEOUT_S, ReleasingAllToAll
from moe_p2p.moe.row_counts import Extent, HostCounts, worst_extent

_Event = EventOverlap | EventHandle
_Values = Tensor | tuple[Tensor, Tensor]
_Result = tuple[
    _Values, Tensor | None, Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
]


class Buffer(LowLatencyCalls):
    """All calls of one rank, under DeepEP's names.

    The constructor is collective. Memory is allocated at the first call of each shape.

    group: of any backend, also a CPU backend; None: `comm` or the default group.
    num_nvl_bytes, num_rdma_bytes: normal calls may take their sum, in bytes. Steps of the first
        shape have as many tokens as fit into 31/32 of it, of the next one into 31/32 of what is
        left. 0: steps of 512 tokens, without a limit.
    low_latency_mode: num_rdma_bytes are for low-latency calls; normal calls do not use them. Both
        kinds of calls work in any case, also side by side.
    explicitly_destroy: destroy() will be called. Otherwise memory is freed with the object.
    enable_shrink: low-latency calls mask a lost rank and go on without it, also one that is lost
        before the first call of a shape. Other calls raise. Alike on all ranks.
    comm: an mpi4py communicator instead of a group.
    timeout_s: deadline of every wait, in seconds. A wait that passes it raises, or masks.
    is_intranode: UCCL's; True where ranks are on several hosts raises InvalidArgumentError.

    num_sms: thread blocks of normal calls without a Config, for all buffers.

    Accepted and ignored: num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
    use_fabric (set MOE_P2P_FABRIC=1 for fabric handles). Works with any number of ranks.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: MpiComm | None = None,
        *,
        timeout_s: float | None = None,
        is_intranode: bool | None = None,
    ) -> None:
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._pool = pool_of(group, comm, self._timeout_s, is_intranode=is_intranode)
        super().__init__(self._pool.check_others)
        self._host_counts = HostCounts()
        self._normal: dict[tuple[Any, ...], ReleasingAllToAll] = {}  # by shape of a normal call
        self._masks = Masks(self._pool.world_size)
        self.rank = self._pool.rank
        self.group_size = self._pool.world_size
        self.group = comm if group is None and comm is not None else group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime: Runtime | None = Runtime(self.rank, self.group_size)

    def destroy(self) -> None:
        """Waits for all ranks, then frees everything. Collective.

        With enable_shrink it waits for nobody: the others go on without this rank.
        """
        assert self.explicitly_destroy, "destroy() needs explicitly_destroy=True at construction"
        if self.runtime is None:
            return
        if self.enable_shrink:
            self._pool.depart()
        else:
            self._pool.meet("all ranks to destroy their buffers")
        self._pool.close()
        self._normal.clear()
        self._low_latency_made.clear()
        self.runtime = None

    def check(self) -> None:
        """Raises the error that broke this buffer, with its whole text. Not part of DeepEP's API.

        Every call checks by itself. Replays of CUDA graphs do not: call this once per step of them.
        It neither waits nor launches.
        """
        self._pool.check()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: kernels are compiled later, for the GPU that is there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, f"num_sms is {new_num_sms}, must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns the Config that dispatch uses by default; for any number of ranks."""
        return recommend(num_ranks, Buffer.num_sms, combine=False)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns the Config that combine uses by default; for any number of ranks."""
        return recommend(num_ranks, Buffer.num_sms, combine=True)

    def reset_rdma_buffer(self) -> None:
        """UCCL's; does nothing, as clean_low_latency_buffer: no call reads what another left."""

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls."""
        return self._streams.comm

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Returns a tensor of this size, or an empty one. This package does not use it.

        DeepEP returns its raw buffer, which users clear after a fault. Here a later call cannot
        mistake data of an earlier one for its own, so there is nothing to clear.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.zeros(size or (0,), dtype=dtype, device=device)

    # --- normal calls (normal.py) ---
    # All take previous_event (the work runs after it, not after the current stream), async_finish
    # (the work runs on the communication stream; wait for the returned event) and
    # allocate_on_comm_stream, which needs both and changes nothing: results are safe on either.

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
        values, scales = x if isinstance(x, tuple) else (x, None)
        plain = previous_event is None and not (async_finish or allocate_on_comm_stream)
        plain = plain and topk_idx is topk_weights is None and type(handle) is NormalHandle
        if plain and handle and self._streams.bare_on(values) is not None:
            again = dispatch_again(handle, values, scales)
            if again is not None:
                return again, None, None, None, None, new_event(EventOverlap)
        self._pool.check_others(dispatches=handle is not None)
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
                fields = send(handle.all_to_all, form, values, scales, topk)
                got = fields[0] if scales is None else rows_of(fields, scales)
                if async_finish:
                    turn.uses((values, scales, topk), fields[:2])
            return got, None, None, None, None, turn.event
        with turn:
            if expert_alignment != 1:
                check_alignment(expert_alignment)
            assert is_token_in_rank is not None, "is_token_in_rank is missing"
            assert num_tokens_per_rank is not None, "num_tokens_per_rank is missing"
            assert num_tokens_per_expert is not None, "num_tokens_per_expert is missing"
            num_experts = num_tokens_per_expert.shape[0]
            if topk_idx is None:
                topk = ranks_as_topk(is_token_in_rank, num_experts)
            else:
                topk = topk_idx.contiguous()
            all_to_all = self._all_to_all(num_experts, topk.shape[1], values, config)
            # The handle has a copy of topk_idx: the caller may overwrite the given one.
            rows = ROWS[topk_idx is not None]
            if num_worst_tokens > 0:
                assert topk_idx is not None, "num_worst_tokens needs topk_idx"
                extent = worst_extent(num_worst_tokens, values.shape[0], self.group_size)
                form = DispatchForm(rows, extent.max_tokens, extent.num_rows)
                fields = send(all_to_all, form, values, scales, topk, topk_weights)
                counts = []
            else:
                fields, sizes = all_to_all.dispatch_counted(
                    rows,
                    values.contiguous(),
                    topk,
                    topk_weights,
                    None if scales is None else in_columns(scales),
                    self._host_counts.given(
                        num_tokens_per_rank, num_tokens_per_expert, values.shape[0]
                    ),
                    alignment=expert_alignment,
                )
                extent = new_tuple(Extent, (sizes.num_tokens, sizes.max_tokens, sizes.gathered))
                counts = sizes.counts.tolist()
            received = without_rows(fields)
            got = fields[0] if scales is None else rows_of(fields, scales)
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
        plain = previous_event is None and not (async_finish or allocate_on_comm_stream)
        alone = type(handle) is NormalHandle and topk_weights is bias is None
        if plain and alone and self._streams.bare_on(x) is not None:
            sums = bare.combine(handle.all_to_all._comm, x, handle.dispatched)
            if sums is not None:
                return sums, None, new_event(EventOverlap)
        turn = self._streams.turn(x, previous_event, async_finish, allocate_on_comm_stream)
        with turn:
            try:
                all_to_all, dispatched = handle.all_to_all, handle.dispatched
            except AttributeError:
                raise no_handle(handle) from None
            scalars = None
            if topk_weights is not None:
                scalars = widened(topk_weights, dispatched.topk_idx.shape[1])
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
            # In this mode num_rdma_bytes are kept for low-latency calls.
            rdma_bytes = 0 if self.low_latency_mode else self.num_rdma_bytes
            shape = normal_config(num_experts, topk, values, num_sms, timeout_s=self._timeout_s)
            made = self._normal[key] = self._pool.get(
                shape, limit_bytes=self.num_nvl_bytes + rdma_bytes
            )
        return made

    # --- beside low-latency calls (low_latency_calls.py) ---

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Without enable_shrink does nothing: calls do not depend on data that earlier calls left.

        With it all ranks call it, and a rank that is gone, or does not come within the deadline, is
        masked: an empty dispatch waits for all. Before the first call of the shape it does nothing.
        """
        if self.enable_shrink:
            self._pool.require_open()
            shape = (hidden, num_max_dispatch_tokens_per_rank, num_experts)
            await_all(self._low_latency_made, shape)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes that calls of this shape take on one rank, a multiple of 128.

        For nodes of 8 ranks and any top-k. Memory is allocated at the first call, independent of
        num_rdma_bytes.
        """
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def _make_low_latency(
        self, x: Tensor, key: LowLatencyKey
    ) -> tuple[ReleasingAllToAll, DispatchForm]:
        masked = self._mask_status(x.device) if self.enable_shrink else None
        made = make_low_latency(self._pool, x, key, timeout_s=self._timeout_s, masked=masked)
        self._low_latency_made[key] = made
        return made

    # --- masks: ranks that the calls above leave out, if enable_shrink is set ---

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank: low-latency calls no longer wait for it or send it tokens.

        Calls mask a rank by themselves when it misses the deadline (`timeout_s`) or is gone. Mask
        it on all ranks: otherwise ranks without the mask wait for it, and it waits for ranks with
        the mask. mask=False undoes a mask only if no call was made since; otherwise the rank has
        missed calls (AssertionError), and low_latency_clean_mask_buffer takes it back.
        """
        masks = self._mask_status()
        assert mask or not self._low_latency_made or int(masks[rank_to_mask]) == 0, (
            f"rank {rank_to_mask} is masked and has missed calls; low_latency_clean_mask_buffer, "
            "called by all ranks, takes it back"
        )
        masks[rank_to_mask].fill_(int(mask))

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each masked rank, else 0, to mask_status [W] int32, without waiting."""
        mask_status.copy_(self._mask_status())

    def low_latency_clean_mask_buffer(self) -> None:
        """Removes all masks. All ranks of the group call it, equally often, masked ranks too.

        On one host it waits for nobody and captured CUDA graphs stay valid. The next call waits
        for ranks that have not called this yet, and masks them at its deadline, as ranks that are
        gone. On several hosts the next low-latency call of each shape makes a new communicator of
        the ranks that come within its deadline, and masks the others. Handles of earlier dispatches
        become invalid.
        """
        masks = self._mask_status()
        self._pool.clean_masks()
        self._low_latency_made.clear()
        masks.zero_()

    def _mask_status(self, device: torch.device | None = None) -> Tensor:
        """Returns the masks. Before the first call of a shape they move to its device."""
        assert self.enable_shrink, "masks need a Buffer made with enable_shrink=True"
        self._pool.require_open()
        return self._masks.on(None if self._low_latency_made else device)
