"""The place of a rank of V1's `Buffer` among nodes of 8 ranks."""

from __future__ import annotations

import torch

NODE_RANKS = 8  # DeepEP's API assumes nodes of 8 ranks on every machine


class Runtime:
    """Stands in for DeepEP's C++ object."""

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
