"""The transfer engine: one-sided writes and reads between processes."""

from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import (
    Gate,
    Grant,
    Memory,
    NicCounters,
    Peer,
    Region,
    Request,
    Slice,
)

__all__ = [
    "Engine",
    "EngineConfig",
    "Gate",
    "Grant",
    "Memory",
    "NicCounters",
    "Peer",
    "Region",
    "Request",
    "Slice",
]
