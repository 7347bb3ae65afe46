"""MoE dispatch and combine over one-sided writes, and a transfer engine for KV pages and weights.

Importing loads the extension and does nothing else, unless MOE_P2P_AS_DEEP_EP=1 asks for
moe_p2p.deep_ep in the place of deep_ep.
"""

from moe_p2p import _interrupts, env
from moe_p2p.all_to_all import AllToAll
from moe_p2p.config import AllToAllConfig, EngineConfig
from moe_p2p.dispatched import Dispatched, PendingCombine, PendingDispatch
from moe_p2p.engine import Engine
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
from moe_p2p.options import DispatchOptions
from moe_p2p.pool import AllToAllPool
from moe_p2p.scale_rows import swizzle_scales
from moe_p2p.version import __version__

__all__ = [
    "AbortedError",
    "AllToAll",
    "AllToAllConfig",
    "AllToAllPool",
    "CancelledError",
    "ClosedError",
    "DispatchOptions",
    "Dispatched",
    "Engine",
    "EngineConfig",
    "InvalidArgumentError",
    "MoeP2pError",
    "PeerDeadError",
    "PendingCombine",
    "PendingDispatch",
    "ProtocolError",
    "RemoteAccessError",
    "ResourceExhaustedError",
    "TimeoutError",
    "TransportError",
    "UnavailableError",
    "__version__",
    "swizzle_scales",
]

if env.as_deep_ep():
    from moe_p2p import deep_ep

    deep_ep.install()
if env.as_mooncake():
    from moe_p2p import mooncake

    mooncake.install()
_interrupts.restore()
