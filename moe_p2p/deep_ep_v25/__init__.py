"""DeepEP 2.5's Python API over AllToAll: EPBuffer, and balanced experts over the engine.

    import moe_p2p.deep_ep_v25 as deep_ep_v25    # change the import, or keep imports as they are:
    moe_p2p.deep_ep_v25.install()                # from now on `import deep_ep_v25` gives this one

installation.py has more ways to keep imports. Names, arguments, shapes and meanings are those of
the wheel sgl-deep-ep-v25; docs/deep_ep.md has what differs. CPU tensors work too.
"""

import torch

from moe_p2p.deep_ep import utils
from moe_p2p.deep_ep.elastic_handle import EPHandle
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep_v25 import comm
from moe_p2p.deep_ep_v25.allocator import (
    BufferAllocator,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from moe_p2p.deep_ep_v25.base import BufferBase
from moe_p2p.deep_ep_v25.comm import (
    destroy_all_managed_nccl_comm,
    get_logical_domain_size,
    get_physical_domain_size,
)
from moe_p2p.deep_ep_v25.ep import EPBuffer
from moe_p2p.deep_ep_v25.installation import install, uninstall
from moe_p2p.deep_ep_v25.refused import BucketBuffer, BucketSession, EngramBuffer, PPBuffer

__version__ = "2.5.0"  # the DeepEP version that this API follows
topk_idx_t = torch.int64  # type that DeepEP's users create; int32 works too

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "BufferAllocator",
    "BufferBase",
    "EPBuffer",
    "EPHandle",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "PPBuffer",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
    "uninstall",
    "utils",
]
