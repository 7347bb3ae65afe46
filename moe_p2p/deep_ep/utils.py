"""deep_ep.utils, in the spellings of both versions."""

from moe_p2p.deep_ep import event
from moe_p2p.deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "event"]
