"""V1's Buffer: DeepEP's normal and low-latency calls over AllToAll."""

from __future__ import annotations

from moe_p2p.deep_ep.config import Config, recommend
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.low_latency import LowLatencyCalls
from moe_p2p.deep_ep.normal import NormalCalls


class Buffer(NormalCalls, LowLatencyCalls):
    """All calls of one rank; base.py documents the constructor.

    num_sms: thread blocks of normal calls without a Config, for all buffers.
    """

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: kernels are compiled later, for the GPU that is there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, f"num_sms is {new_num_sms}, must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns the Config that dispatch uses by default; for any number of ranks."""
        return recommend(num_ranks, Buffer.num_sms, combine=False)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns the Config that combine uses by default; for any number of ranks."""
        return recommend(num_ranks, Buffer.num_sms, combine=True)
