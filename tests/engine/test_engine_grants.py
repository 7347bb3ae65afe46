"""Memory lent to one peer, and taken back from it while its writes are under way."""

from __future__ import annotations

import time

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig
from tests.engine.test_engine import pair

LATE_US = 200_000  # from the post of a write to its arrival


def late_pair() -> tuple[Engine, Engine]:
    """Engines between which a write travels for LATE_US: long enough to be cancelled meanwhile."""
    config = EngineConfig(
        transport="loopback",
        nics_per_rank=2,
        transport_settings=f"latency_us={LATE_US}",
        timeout_s=20,
    )
    return Engine(config, label="sender"), Engine(config, label="receiver")


def write_late(fence: bool) -> bool:
    """Whether a write that was posted before the page went to somebody else changes it after."""
    sender, receiver = late_pair()
    with sender, receiver:
        cache = torch.zeros(64, dtype=torch.uint8)
        grant = receiver.grant(receiver.register(cache), "prefill-3")
        memory = sender.register(torch.ones(64, dtype=torch.uint8))
        region = sender.resolve(grant.descriptor)
        request = sender.write(memory, region)
        deadline = time.monotonic() + 20
        while sum(nic["writes"] for nic in sender.counters()) < 1:
            assert time.monotonic() < deadline
        cancelled = request.cancel()
        assert cancelled is not None
        assert cancelled.posted_bytes == 64  # too late to take it back
        assert not cache.any()
        if fence:
            grant.revoke()
        cache.fill_(7)  # of the next request
        with pytest.raises(moe_p2p.RemoteAccessError if fence else moe_p2p.CancelledError):
            request.wait()
        return bool((cache != 7).any())


def test_a_write_posted_before_the_cancel_lands_unless_the_grant_is_revoked() -> None:
    assert write_late(fence=False)
    assert not write_late(fence=True)


def test_revoking_fails_that_peer_by_name_and_no_other() -> None:
    (first, receiver), (second, spare) = pair(), pair()
    spare.close()
    with first, second, receiver:
        cache = torch.zeros(1000, dtype=torch.uint8)
        memory = receiver.register(cache)
        grants = {name: receiver.grant(memory, name) for name in ("first", "second")}
        assert grants["first"].descriptor != grants["second"].descriptor
        source = torch.ones(1000, dtype=torch.uint8)
        regions = [first.resolve(grants["first"].descriptor)]
        regions.append(second.resolve(grants["second"].descriptor))
        memories = [first.register(source), second.register(source)]
        first.write(memories[0], regions[0], nbytes=400).wait()
        grants["first"].revoke()
        grants["first"].revoke()
        cache.zero_()
        with pytest.raises(moe_p2p.RemoteAccessError, match="sender: write of 1000 bytes failed"):
            first.write(memories[0], regions[0]).wait()
        with pytest.raises(moe_p2p.RemoteAccessError):
            first.read(memories[0], regions[0]).wait()
        assert not cache.any()
        second.write(memories[1], regions[1], imm=3).wait()
        receiver.wait_imm(3, second.num_nics)
        assert cache.all()
        with pytest.raises(moe_p2p.ClosedError, match="receiver: the grant for first was revoked"):
            _ = grants["first"].descriptor
        anew = receiver.grant(memory, "first")  # it comes back
        first.write(memories[0], first.resolve(anew.descriptor)).wait()


def test_unregistering_memory_revokes_its_grants() -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        cache = torch.zeros(64, dtype=torch.uint8)
        memory, other = receiver.register(cache), receiver.register(torch.zeros(64))
        grant = receiver.grant(memory, "prefill")
        kept = receiver.grant(other, "prefill")
        source = sender.register(torch.ones(64, dtype=torch.uint8))
        regions = [sender.resolve(one.descriptor) for one in (grant, kept)]
        memory.unregister()
        with pytest.raises(moe_p2p.RemoteAccessError):
            sender.write(source, regions[0]).wait()
        sender.write(source, regions[1], nbytes=64).wait()
        assert not cache.any()
        grant.revoke()  # nothing is left to do
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"memory .* is not known here"):
            receiver.grant(memory, "prefill")
