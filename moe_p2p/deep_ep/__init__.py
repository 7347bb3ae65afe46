"""DeepEP's Python API over AllToAll: V1's Buffer, V2's ElasticBuffer, and HybridEPBuffer.

    import moe_p2p.deep_ep as deep_ep            # change the import, or keep imports as they are:
    moe_p2p.deep_ep.install()                    # from now on `import deep_ep` gives this package

installation.py has more ways to keep imports. Names, arguments, shapes and meanings are DeepEP's.
These modules only translate calls to AllToAll and compute nothing. CPU tensors work too.
"""

import torch

from moe_p2p.deep_ep.buffer import Buffer
from moe_p2p.deep_ep.config import Config
from moe_p2p.deep_ep.elastic import ElasticBuffer, get_logical_domain_size, get_physical_domain_size
from moe_p2p.deep_ep.elastic_handle import EPHandle
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.hybrid import HybridEPBuffer
from moe_p2p.deep_ep.installation import install, uninstall

__version__ = "2.1.0"  # the newest DeepEP version that this API follows
topk_idx_t = torch.int64  # type that DeepEP's users create; int32 works too

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
    "uninstall",
]
