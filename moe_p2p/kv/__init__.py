"""KV-cache transfer: layouts, the plan between two of them, and workers that carry it out.

docs/kv.md explains it.
"""

from moe_p2p.kv.layout import ORDERS, Holding, KVGroup, KVLayout
from moe_p2p.kv.leases import TorchLeases, Worker
from moe_p2p.kv.link import CX7, EFA, LINKS, KVLink, link_of
from moe_p2p.kv.membership import Membership
from moe_p2p.kv.memory import (
    KVMemory,
    KVRequest,
    Place,
    dense_memory,
    layout_from_bytes,
    layout_to_bytes,
    resolve,
)
from moe_p2p.kv.pair import KVCache
from moe_p2p.kv.plan import KVMove, KVPlan, kv_plan
from moe_p2p.kv.receiver import KVReceiver
from moe_p2p.kv.requests import KVCounts, Span, aligned_begin, check_pages, counts, indices, span_of
from moe_p2p.kv.reservation import KVReservation
from moe_p2p.kv.sender import KVSender
from moe_p2p.kv.sending import KVSending
from moe_p2p.kv.signals import KVSignals
from moe_p2p.kv.stats import KVTotals, KVTransferStats, prometheus_text
from moe_p2p.kv.tokens import forget_periods
from moe_p2p.kv.worker import KVTimeouts

__all__ = [
    "CX7",
    "EFA",
    "LINKS",
    "ORDERS",
    "Holding",
    "KVCache",
    "KVCounts",
    "KVGroup",
    "KVLayout",
    "KVLink",
    "KVMemory",
    "KVMove",
    "KVPlan",
    "KVReceiver",
    "KVRequest",
    "KVReservation",
    "KVSender",
    "KVSending",
    "KVSignals",
    "KVTimeouts",
    "KVTotals",
    "KVTransferStats",
    "Membership",
    "Place",
    "Span",
    "TorchLeases",
    "Worker",
    "aligned_begin",
    "check_pages",
    "counts",
    "dense_memory",
    "forget_periods",
    "indices",
    "kv_plan",
    "layout_from_bytes",
    "layout_to_bytes",
    "link_of",
    "prometheus_text",
    "resolve",
    "span_of",
]
