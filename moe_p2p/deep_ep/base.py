"""Base of V1's `Buffer`: its group, communicators and streams, shared by all calls.

normal.py and low_latency.py add the calls, buffer.py combines them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.deep_ep.mpi import MpiComm, store_over
from moe_p2p.deep_ep.streams import Streams
from moe_p2p.moe.options import DispatchForm
from moe_p2p.moe.pool import TIMEOUT_S, AllToAllPool, ReleasingAllToAll
from moe_p2p.moe.row_counts import HostCounts

# Key of a low-latency dispatch: type, device, H, K, T, E, use_fp8, round_scale, use_ue8m0, whether
# it records the time waited.
LowLatencyKey = tuple[torch.dtype, int, int, int, int, int, bool, bool, bool, bool]
NODE_RANKS = 8  # DeepEP's API assumes nodes of 8 ranks on every machine


class BufferBase:
    """A rank's end of its group, under DeepEP's names.

    The constructor is collective. Memory is allocated at the first call of each shape.

    group: of any backend, also a CPU backend; None: `comm` or the default group.
    num_nvl_bytes, num_rdma_bytes: normal calls may take their sum, in bytes. Steps of the first
        shape have as many tokens as fit into 31/32 of it, of the next one into 31/32 of what is
        left. 0: steps of 512 tokens, without a limit.
    low_latency_mode: num_rdma_bytes are for low-latency calls; normal calls do not use them. Both
        kinds of calls work in any case, also side by side.
    explicitly_destroy: destroy() will be called. Otherwise memory is freed with the object.
    enable_shrink: low-latency calls mask a lost rank and go on without it (low_latency.py), also
        one that is lost before the first call of a shape. Other calls raise. Alike on all ranks.
    comm: an mpi4py communicator instead of a group.
    timeout_s: deadline of every wait, in seconds. A wait that passes it raises, or masks.
    is_intranode: UCCL's. True on ranks of several hosts raises InvalidArgumentError; otherwise no
        difference, because ranks find out themselves.

    Accepted and ignored: num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl,
    use_fabric (set MOE_P2P_FABRIC=1 for fabric handles). Works with any number of ranks.
    """

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
        if group is None and comm is not None:
            store, rank, size = store_over(comm)
            self._pool = AllToAllPool(store, rank=rank, world_size=size, timeout_s=self._timeout_s)
        else:
            self._pool = AllToAllPool(group, timeout_s=self._timeout_s)
        errors.require(
            not is_intranode or self._pool.ranks_per_node == self._pool.world_size,
            f"is_intranode is True, and {self._pool.world_size} ranks are on several hosts, "
            f"{self._pool.ranks_per_node} on each: leave it out",
        )
        self._streams = Streams()
        self._host_counts = HostCounts()
        self._normal: dict[tuple[Any, ...], ReleasingAllToAll] = {}  # by shape of a normal call
        self._low_latency_made: dict[LowLatencyKey, tuple[ReleasingAllToAll, DispatchForm]] = {}
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


class Runtime:
    """Stands in for DeepEP's C++ object: this rank's place among nodes of 8 ranks."""

    def __init__(self, rank: int, group_size: int) -> None:
        self._rank = rank
        self._group_size = group_size

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        return max(1, self._group_size // NODE_RANKS)

    def get_rdma_rank(self) -> int:
        return self._rank // NODE_RANKS

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return self._rank % NODE_RANKS if is_global else 0

    def get_local_device_id(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0
