"""What all calls of a V1 `Buffer` share: its group, its communicators and its streams.

normal.py and low_latency.py add the calls, buffer.py puts them together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_p2p.deep_ep.mpi import MpiComm, store_over
from moe_p2p.deep_ep.streams import Streams
from moe_p2p.dispatched import DispatchOptions
from moe_p2p.pool import TIMEOUT_S, AllToAllPool
from moe_p2p.releasing import ReleasingAllToAll
from moe_p2p.row_counts import HostCounts

# What a low-latency dispatch brings: type, device, H, K, T, E, use_fp8, round_scale, use_ue8m0,
# whether it adds up what it waited.
LowLatencyKey = tuple[torch.dtype, int, int, int, int, int, bool, bool, bool, bool]
NODE_RANKS = 8  # DeepEP's calls speak of nodes of 8 ranks, whatever the machine is


class BufferBase:
    """A rank's end of its group, under DeepEP's names.

    Making one is collective. Memory is taken later, when the first call of a shape comes.

    group: of any backend, also of the CPU; None for `comm` or the default group.
    num_nvl_bytes, num_rdma_bytes: their sum is what normal calls may take. The first shape has
        steps of as many tokens as fit into 31/32 of it, the next one into 31/32 of what is left.
        0: steps of 512 tokens, whatever they take.
    low_latency_mode: num_rdma_bytes are for low-latency calls, and normal ones take none of them.
        Both kinds of calls work in any case, also side by side.
    explicitly_destroy: destroy() will be called. Otherwise memory goes back with the object.
    enable_shrink: low-latency calls mask a rank that is gone and go on without it
        (low_latency.py). Other calls raise.
    comm: an mpi4py communicator, in place of a group.
    timeout_s: deadline of every wait, in seconds. A wait that passes it raises, or masks.

    Without meaning here, and accepted: num_qps_per_rank, allow_nvlink_for_low_latency_mode,
    allow_mnnvl, use_fabric (MOE_P2P_FABRIC=1 is what asks for fabric handles). Any number of ranks
    will do.
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
    ) -> None:
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        if group is None and comm is not None:
            store, rank, size = store_over(comm)
            self._pool = AllToAllPool(store, rank=rank, world_size=size, timeout_s=self._timeout_s)
        else:
            self._pool = AllToAllPool(group, timeout_s=self._timeout_s)
        self._streams = Streams()
        self._host_counts = HostCounts()
        self._normal: dict[tuple[Any, ...], ReleasingAllToAll] = {}  # by what a normal call brings
        self._low_latency_made: dict[LowLatencyKey, tuple[ReleasingAllToAll, DispatchOptions]] = {}
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
        """Gives everything back, once all ranks are here: collective.

        A rank that masks some waits for nobody.
        """
        assert self.explicitly_destroy, "destroy() needs explicitly_destroy=True at construction"
        if self.runtime is None:
            return
        if not self._masks_some():
            self._pool.meet("all ranks to destroy their buffers")
        self._pool.close()
        self._normal.clear()
        self._low_latency_made.clear()
        self.runtime = None

    def check(self) -> None:
        """Raises what has broken this buffer, with its whole text. Not DeepEP's.

        Every call does; the replay of a CUDA graph makes none, so call it once per step that
        replays some. It waits for nothing and launches nothing.
        """
        self._pool.check()

    def _masks_some(self) -> bool:
        return False  # low_latency.py knows

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
        """A tensor of this size, or of none. Nothing of this package lies in it.

        DeepEP shows its raw buffer here, which users clear after a fault; here nothing of an
        earlier call can be mistaken for one of a later call, so there is nothing to clear.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.zeros(size or (0,), dtype=dtype, device=device)


class Runtime:
    """What users ask DeepEP's C++ object: who this rank is in terms of nodes of 8 ranks."""

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
