"""MoE dispatch and combine over one-sided writes, and a transfer engine for KV pages and weights.

Importing loads the extension and does nothing else.
"""

from moe_p2p.all_to_all import AllToAll
from moe_p2p.config import AllToAllConfig
from moe_p2p.dispatched import Dispatched, PendingCombine, PendingDispatch
from moe_p2p.engine import Engine
from moe_p2p.errors import (
    AbortedError,
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

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "AllToAll",
    "AllToAllConfig",
    "ClosedError",
    "Dispatched",
    "Engine",
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
]
