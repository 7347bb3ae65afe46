"""NIXL EP's Buffer over AllToAll: low-latency calls in a world whose ranks come and go, and
high-throughput calls among fixed ranks.

Symbols: W ranks that there may be (num_ranks), E experts of a rank, n ranks that a call's
num_experts stands for (num_experts / E), T the bound on a rank's tokens, t tokens of this rank,
K top-k, H hidden size, R rows received, P scales of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_p2p import deep_ep, errors
from moe_p2p.deep_ep.config import Config, recommend
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.handle import Elements, NormalHandle
from moe_p2p.deep_ep.low_latency import Hook, LowLatencyHandle, size_hint
from moe_p2p.deep_ep.mpi import MpiComm, store_over
from moe_p2p.deep_ep.runtime import Runtime
from moe_p2p.fleet.bootstrap import store_of
from moe_p2p.nixl_ep.worlds import Worlds

DEFAULT_TIMEOUT_MS = 30_000
_Event = EventOverlap | EventHandle
_Values = Tensor | tuple[Tensor, Tensor]
_NO_STORE = "there is no store: pass tcp_store_group, or call set_tcp_store_group, or pass a group"


class Handle(Elements):
    """(src_info [E, n * T] int32, layout_range [E, n] int64, T, H) of a low-latency dispatch.

    The object itself carries what combine needs: pass it on, not a copy.
    """

    def __init__(self, inner: LowLatencyHandle, num_ranks: int) -> None:
        self.inner, self._num_ranks = inner, num_ranks

    @functools.cached_property
    def _elements(self) -> Sequence[Any]:
        src_info, ranges, max_tokens, hidden, _ = self.inner
        return src_info, ranges[:, : self._num_ranks].contiguous(), max_tokens, hidden


class Buffer:
    """All calls of one rank, under NIXL EP's names.

    disable_ll_nvlink: ranks of a host share no memory and talk over NICs, as ranks of several hosts
        do: ranks that come may be on any host.
    explicitly_destroy: destroy() will be called. Otherwise memory is freed with the object.
    rank: of this process; its experts are rank * E to rank * E + E - 1, whoever else is there.
    low_latency_mode: False: ht_* calls, among fixed ranks that need `group` or `comm`.
    group, comm: a ProcessGroup of any backend, or an mpi4py communicator. Low-latency calls take
        their store where there is no tcp_store_group.
    tcp_store_group: store in which ranks find each other, at each connect_ranks. The one of the
        first connect_ranks has to live as long as ranks come and go.
    timeout_ms: deadline of every wait of a call. A low-latency call masks who misses it, drops
        its tokens and goes on; sums are then of what is left, and never NaN for it.

    num_sms: thread blocks of ht_* calls without a Config, for all buffers.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: dist.ProcessGroup | None = None,
        comm: MpiComm | None = None,
        tcp_store_group: Store | None = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        errors.require(not (group and comm), "group and comm are both given; give one")
        whole = isinstance(timeout_ms, int) and timeout_ms > 0
        errors.require(whole, f"timeout_ms is {timeout_ms!r}, must be an int above 0")
        errors.require_int("rank", rank)
        self.rank = rank
        self.group_size = 0
        self.low_latency_mode = low_latency_mode
        self.timeout_ms = timeout_ms
        self.explicitly_destroy = explicitly_destroy
        self.group = group
        self.comm = comm
        self.tcp_store_group = tcp_store_group
        self.num_nvl_bytes = self.num_rdma_bytes = 0
        self.runtime: Runtime | None = Runtime(rank, 1)
        self._one_rank_nodes = disable_ll_nvlink
        self._worlds: Worlds | None = None
        self._fixed: deep_ep.Buffer | None = None  # of ht_* calls
        self._of_comm: Store | None = None

    def destroy(self) -> None:
        """Frees everything. Others go on without this rank; after ht_* calls it waits for all."""
        text = "destroy() needs explicitly_destroy=True at construction"
        errors.require(self.explicitly_destroy, text)
        if self.runtime is None:
            return
        self.runtime = None
        if self._worlds is not None:
            self._worlds.close()
        if self._fixed is not None:
            self._fixed.destroy()

    def check(self) -> None:
        """Raises the error that broke this buffer, or that the others go on without this rank. Not
        part of NIXL EP's API. It neither waits nor launches."""
        if self._worlds is not None:
            self._worlds.check()
        if self._fixed is not None:
            self._fixed.check()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: kernels are compiled later, for the GPU that is there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        errors.require(new_num_sms % 2 == 0, f"num_sms is {new_num_sms}, must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes that calls of this shape take on one rank, a multiple of 128.

        num_ranks, num_experts: as many as there may be. Memory is allocated at the first call.
        """
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The same as get_low_latency_buffer_size_hint."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls."""
        return self._fixed.get_comm_stream() if self._fixed else self._there().comm_stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Returns a tensor of this size, or an empty one, that no call uses: there is nothing to
        clear after a fault."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.zeros(size or (0,), dtype=dtype, device=device)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns the Config that ht_dispatch uses by default; for any number of ranks."""
        return recommend(num_ranks, Buffer.num_sms, combine=False)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns the Config that ht_combine uses by default; for any number of ranks."""
        return recommend(num_ranks, Buffer.num_sms, combine=True)

    # --- ranks that come and go ---

    def update_memory_buffers(
        self,
        num_ranks: int,
        num_experts_per_rank: int,
        num_rdma_bytes: int,
        num_nvl_bytes: int = 0,
    ) -> None:
        """Says how many ranks there may be, and how many experts each has. Once.

        num_rdma_bytes, num_nvl_bytes: bound the memory of ht_* calls; low-latency calls allocate
            what a shape needs at its first call, as get_low_latency_buffer_size_hint has it.
        """
        errors.require(self._worlds is None, "update_memory_buffers was called; it is called once")
        errors.require_int("num_ranks", num_ranks)
        errors.require_int("num_experts_per_rank", num_experts_per_rank)
        text = f"there may be {num_ranks} ranks of {num_experts_per_rank} experts, and this is rank"
        fits = 0 <= self.rank < num_ranks and num_experts_per_rank > 0
        errors.require(fits, f"{text} {self.rank}: it must be from 0 to num_ranks - 1")
        self.group_size = num_ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.runtime = Runtime(self.rank, num_ranks)
        self._worlds = Worlds(
            self.rank,
            num_ranks,
            num_experts_per_rank,
            timeout_s=self.timeout_ms / 1000,
            one_rank_nodes=self._one_rank_nodes,
        )

    def set_tcp_store_group(self, tcp_store_group: Store | None) -> None:
        """Sets the store in which ranks find each other from the next connect_ranks on."""
        self.tcp_store_group = tcp_store_group

    def connect_ranks(self, remote_ranks: list[int], activate: bool = True) -> None:
        """Connects these ranks, and returns once each has connected the same ranks: those that are
        connected and live, these, and itself.

        activate: False: they stay masked until update_mask_buffer(rank, False), beside steps of
            the others; at the ranks that were there all have to call that between the same two
            steps. True is both in one. A rank that comes takes part from its first call on.

        Raises TimeoutError after 300 s, naming who did not come; AbortedError where one of them is
        lost meanwhile: ranks that were connected go on as they were. On GPUs all ranks connect at
        once, before the first call; more raises UnavailableError.
        """
        worlds = self._there()
        if self.low_latency_mode:
            worlds.connect(remote_ranks, self._store, activate=activate)
            return
        if not activate:
            raise ValueError("connect_ranks(activate=False) needs low_latency_mode=True")
        text = "ranks are connected; with low_latency_mode=False they stay the same"
        errors.require(self._fixed is None, text)
        given = set(worlds.check_ranks(remote_ranks, "connect_ranks")) | {self.rank}
        text = f"ranks {sorted(given)} are connected, and there are {self.group_size}: connect all"
        errors.require(len(given) == self.group_size, text)
        errors.require(
            self.group is not None or self.comm is not None,
            "ht_* calls need a group or comm; pass one to the constructor",
        )
        self._fixed = deep_ep.Buffer(
            self.group,
            self.num_nvl_bytes,
            self.num_rdma_bytes,
            explicitly_destroy=True,
            comm=self.comm,
            timeout_s=self.timeout_ms / 1000,
        )

    def disconnect_ranks(self, remote_ranks: list[int]) -> None:
        """Masks these ranks and leaves them out of the next change. Waits for nobody; all ranks
        that stay call it between the same two steps. The others end by themselves."""
        self._elastic().disconnect(remote_ranks)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank: calls no longer wait for it or send it tokens. Or takes a mask back.

        With all others masked a call is of this rank's own experts, beside the others' calls. Else
        mask a rank on all ranks, and take a mask back only if no call was made since: a rank that
        has missed calls raises InvalidArgumentError, and clean_mask_buffer takes it back.
        """
        worlds = self._elastic()
        worlds.check_ranks([rank_to_mask], "update_mask_buffer")
        if mask:
            worlds.mask(rank_to_mask)
        else:
            worlds.unmask({rank_to_mask})

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each rank that is masked or not connected, else 0, to mask_status [W] int32,
        as the last call found them."""
        errors.require_type("mask_status", mask_status, Tensor)
        fits = mask_status.shape == (self.group_size,) and mask_status.dtype == torch.int32
        found = f"{mask_status.dtype} {tuple(mask_status.shape)}"
        errors.require(fits, f"mask_status is {found}, must be int32 ({self.group_size},)")
        self._elastic().write_masks(mask_status)

    def clean_mask_buffer(self) -> None:
        """Takes back all connected ranks that live. Each of them calls it, equally often, between
        two steps; earlier handles are void. A rank that is gone stays masked."""
        self._elastic().clean()

    def barrier(self) -> None:
        """Waits for all ranks that are not masked, and masks who does not come."""
        if self._fixed is not None:
            self._fixed._pool.meet("all ranks at the barrier")
        else:
            self._elastic().await_all()

    # --- low-latency calls ---

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[_Values, Tensor, Handle, EventOverlap, Hook | None]:
        """Sends tokens to the ranks of their experts; tokens of a masked rank's experts nowhere.

        x: [t, H] bfloat16. topk_idx: [t, K] int64 or int32; -1: none.
        num_max_dispatch_tokens_per_rank: T, equal on all ranks.
        num_experts: n * E, from one more than the highest active rank to W ranks. None: the least.
        cumulative_local_expert_recv_stats: [E] int32; each expert's tokens are added to it.
        dispatch_wait_recv_cost_stats: [n] int64; time waited for each source is added.
        use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook: as of deep_ep's Buffer.

        Returns (rows, counts [E] int32, handle, event, hook): rows [E, n * T, H], with use_fp8 a
        pair with scales of logical shape [E, n * T, P], stored column by column.
        """
        worlds = self._elastic()
        num_ranks = self._ranks_of(num_experts, worlds)
        calls = worlds.calls()
        waits = dispatch_wait_recv_cost_stats
        ticks = None if waits is None else waits.new_zeros(self.group_size)
        rows, counts, inner, event, hook = calls.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_ranks * worlds.experts_per_rank,
            cumulative_local_expert_recv_stats,
            ticks,
            use_fp8,
            round_scale,
            use_ue8m0,
            async_finish,
            return_recv_hook,
        )
        hook = self._then_add(hook, event, ticks, waits)
        return rows, counts, Handle(inner, num_ranks), event, hook

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return self.low_latency_dispatch(*args, **kwargs)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Returns rows to their tokens, each multiplied by its weight, and sums them in fp32. The
        sum is of the experts whose ranks are not masked.

        x: [E, n * T, H] bfloat16, rows in dispatch's order. topk_weights: [t, K] float32.
        topk_idx: [t, K] as at dispatch; ignored, the ids given there are used.
        zero_copy: reads rows from the buffer of get_next_combine_buffer instead of x.
        combine_wait_recv_cost_stats: [n] int64; time waited for each rank is added.
        use_logfmt, async_finish, return_recv_hook, out: as of deep_ep's Buffer.

        Returns (sums [t, H], event, hook).
        """
        errors.require_type("handle", handle, Handle, "what dispatch returned, the object itself")
        calls = self._elastic().calls()
        waits = combine_wait_recv_cost_stats
        ticks = None if waits is None else waits.new_zeros(self.group_size)
        sums, event, hook = calls.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle.inner,
            use_logfmt,
            zero_copy,
            async_finish,
            return_recv_hook,
            out,
            ticks,
        )
        return sums, event, self._then_add(hook, event, ticks, waits)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        return self.low_latency_combine(*args, **kwargs)

    def get_next_combine_buffer(self, handle: Handle) -> Tensor:
        """Returns a tensor [E, n * T, H] bfloat16 for the rows of a combine with zero_copy. Each
        handle has its own."""
        return handle.inner.make_combine_buffer()

    # --- high-throughput calls: those of deep_ep's Buffer ---

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """As deep_ep's Buffer.get_dispatch_layout, of whose calls ht_* are."""
        return self._throughput().get_dispatch_layout(
            topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream
        )

    def ht_dispatch(
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
        config: Config | None = None,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """As deep_ep's Buffer.dispatch."""
        return self._throughput().dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            config=config or self.get_dispatch_config(self.group_size),
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    def ht_combine(
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
        """As deep_ep's Buffer.combine."""
        return self._throughput().combine(
            x,
            handle,
            topk_weights,
            bias,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    # --- what they stand on ---

    def _there(self) -> Worlds:
        if self.runtime is None:
            raise errors.make(errors.ClosedError, f"rank {self.rank}: the buffer was destroyed")
        errors.require(self._worlds is not None, "call update_memory_buffers first")
        assert self._worlds is not None
        return self._worlds

    def _elastic(self) -> Worlds:
        text = "the buffer was made with low_latency_mode=False, for ht_* calls"
        errors.require(self.low_latency_mode, text)
        return self._there()

    def _throughput(self) -> deep_ep.Buffer:
        self._there()
        text = "ht_* calls need low_latency_mode=False, and connect_ranks with all ranks"
        errors.require(self._fixed is not None, text)
        assert self._fixed is not None
        return self._fixed

    def _store(self) -> Store:
        if self.tcp_store_group is not None:
            return self.tcp_store_group
        if self.group is not None:
            return store_of(self.group, None, None)[0]
        errors.require(self.comm is not None, _NO_STORE)
        if self._of_comm is None:
            assert self.comm is not None
            self._of_comm = store_over(self.comm)[0]
        return self._of_comm

    def _ranks_of(self, num_experts: int | None, worlds: Worlds) -> int:
        each, least = worlds.experts_per_rank, worlds.bound
        if num_experts is None:
            return least
        num_ranks, left = divmod(num_experts, each)
        errors.require(
            not left and least <= num_ranks <= self.group_size,
            f"num_experts is {num_experts}, must be a multiple of the {each} of a rank, from "
            f"{least * each} (rank {least - 1} is active) to {self.group_size * each}",
        )
        return num_ranks

    @staticmethod
    def _then_add(
        hook: Hook | None, event: EventOverlap, ticks: Tensor | None, waits: Tensor | None
    ) -> Hook | None:
        """Adds the ranks' ticks to the caller's `waits`, once the call has them."""
        if ticks is None or waits is None:
            return hook

        def add(before: Callable[[], None] | None = hook) -> None:
            if before is not None:
                before()
            event.current_stream_wait()
            waits.add_(ticks[: waits.shape[0]])

        if hook is not None:
            return add
        add()
        return None
