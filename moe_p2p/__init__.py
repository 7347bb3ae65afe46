"""MoE dispatch and combine over one-sided writes, and a transfer engine for KV pages and weights.

Importing loads the extension and does nothing else, unless MOE_P2P_AS_DEEP_EP=1 asks for
moe_p2p.deep_ep in the place of deep_ep, or another such switch of env.py for another package or
for ranges of NVTX.
"""

from moe_p2p.machine import interrupts

# isort: split
import importlib

from moe_p2p import aliases, env
from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.metrics import prometheus_collector, prometheus_text
from moe_p2p.engine.transfers import PageRows
from moe_p2p.errors import (
    AbortedError,
    CancelledError,
    ClosedError,
    InvalidArgumentError,
    MoeP2pError,
    PeerDeadError,
    ProtocolError,
    RemoteAccessError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
    UnavailableError,
)
from moe_p2p.integrations import serving_steps
from moe_p2p.machine import ranges
from moe_p2p.moe import pool
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import Dispatched, PendingCombine, PendingDispatch
from moe_p2p.moe.expert_map import ExpertMap
from moe_p2p.moe.expert_mover import ExpertMover
from moe_p2p.moe.options import CombineOptions, DispatchOptions
from moe_p2p.moe.pool import AllToAllPool
from moe_p2p.moe.ready import ReadyRows
from moe_p2p.moe.scale_rows import swizzle_scales
from moe_p2p.tools.trace.session import tracing
from moe_p2p.version import __version__

__all__ = [
    "AbortedError",
    "AllToAll",
    "AllToAllConfig",
    "AllToAllPool",
    "CancelledError",
    "ClosedError",
    "CombineOptions",
    "DispatchOptions",
    "Dispatched",
    "Engine",
    "EngineConfig",
    "ExpertMap",
    "ExpertMover",
    "InvalidArgumentError",
    "MoeP2pError",
    "PageRows",
    "PeerDeadError",
    "PendingCombine",
    "PendingDispatch",
    "ProtocolError",
    "ReadyRows",
    "RemoteAccessError",
    "ResourceExhaustedError",
    "TimeoutError",
    "TransportError",
    "UnavailableError",
    "__version__",
    "prometheus_collector",
    "prometheus_text",
    "swizzle_scales",
    "tracing",
]


def __getattr__(name: str) -> object:
    """Modules that have moved were attributes of the package, too."""
    if name in aliases.MOVED:
        return importlib.import_module(f"moe_p2p.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


pool.when_made.append(serving_steps.end_with_check)
aliases.follow_moved()
ranges.turn_on_if_asked()
if env.as_deep_ep():
    from moe_p2p import deep_ep

    deep_ep.install()
if env.as_deep_ep_v25():
    from moe_p2p import deep_ep_v25

    deep_ep_v25.install()
if env.as_mooncake():
    from moe_p2p import mooncake

    mooncake.install()
if env.as_nixl_ep():
    from moe_p2p import nixl_ep

    nixl_ep.install()
interrupts.restore()
