"""KV-cache transfer: layouts, the plan between two of them, and workers that carry it out.

docs/kv.md explains it.
"""

from typing import TYPE_CHECKING

from moe_p2p import aliases
from moe_p2p.fleet.leases import TorchLeases
from moe_p2p.kv.layout import ORDERS, Holding, KVGroup, KVLayout
from moe_p2p.kv.lease_keeper import LeaseKeeper
from moe_p2p.kv.link import CX7, EFA, LINKS, KVLink, link_of
from moe_p2p.kv.memory import (
    KVCache,
    KVMemory,
    KVRequest,
    Place,
    dense_memory,
    layout_from_bytes,
    layout_to_bytes,
    resolve,
)
from moe_p2p.kv.pair import Worker
from moe_p2p.kv.plan import KVMove, KVPlan, forget_periods, kv_plan
from moe_p2p.kv.receiver import KVReceiver, KVReservation
from moe_p2p.kv.requests import KVCounts, Span, aligned_begin, check_pages, counts, indices, span_of
from moe_p2p.kv.sender import KVSender, KVSending
from moe_p2p.kv.signals import KVSignals
from moe_p2p.kv.stats import (
    KVTotals,
    KVTransferStats,
    RequestState,
    TransferState,
    prometheus_text,
)
from moe_p2p.kv.worker import KVTimeouts

if not TYPE_CHECKING:  # which would let any name pass
    __getattr__ = aliases.renamed(__name__, {"Membership": "LeaseKeeper"})

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
    "LeaseKeeper",
    "Place",
    "RequestState",
    "Span",
    "TorchLeases",
    "TransferState",
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
