"""KV-cache transfer: layouts and the plan between two of them. docs/kv.md."""

from moe_p2p.kv.layout import ORDERS, Holding, KVGroup, KVLayout
from moe_p2p.kv.link import CX7, EFA, LINKS, KVLink
from moe_p2p.kv.memory import (
    KVMemory,
    KVRequest,
    Place,
    dense_memory,
    layout_from_bytes,
    layout_to_bytes,
    resolve,
)
from moe_p2p.kv.plan import KVMove, KVPlan, kv_plan
from moe_p2p.kv.requests import KVCounts, Span, aligned_begin, check_pages, counts, indices, span_of
from moe_p2p.kv.tokens import forget_periods

__all__ = [
    "CX7",
    "EFA",
    "LINKS",
    "ORDERS",
    "Holding",
    "KVCounts",
    "KVGroup",
    "KVLayout",
    "KVLink",
    "KVMemory",
    "KVMove",
    "KVPlan",
    "KVRequest",
    "Place",
    "Span",
    "aligned_begin",
    "check_pages",
    "counts",
    "dense_memory",
    "forget_periods",
    "indices",
    "kv_plan",
    "layout_from_bytes",
    "layout_to_bytes",
    "resolve",
    "span_of",
]
