"""deep_ep.utils, in the spellings of both versions: events, and helpers that scripts borrow.

math, envs and testing have the functions that run anywhere, gate and refs the data and references
of V2's tests. Functions that query DeepEP's own transport (NCCL, RDMA rates) are missing
(docs/deep_ep.md).
"""

from moe_p2p.deep_ep import event
from moe_p2p.deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "event"]
