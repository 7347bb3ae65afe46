"""What is raised in the middle of a step, as where memory is gone, leaves nothing half made: the
request fails by name at both ends, other requests go on, and all comes back."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from moe_p2p import kv
from moe_p2p.errors import AbortedError, MoeP2pError
from moe_p2p.kv import receiver as receiver_module
from moe_p2p.kv.pair import Pair
from tests.kv.test_kv_packing import LAYOUT
from tests.support.kv_workers import workers
from tests.support.kv_world import LAYERS, PACKED, Deal, World

GONE = torch.OutOfMemoryError("no memory is left")


def once(of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The next call of it raises. Returns what has."""
    call, failed = getattr(of, name), list[str]()

    def fails(*given: Any, **how: Any) -> Any:
        if not failed:
            failed.append(name)
            raise GONE
        return call(*given, **how)

    monkeypatch.setattr(of, name, fails)
    return failed


def run(world: World, deals: list[Deal]) -> list[MoeP2pError]:
    """Calls as of an engine; returns what they raised."""
    found = []
    for deal in deals:
        for rank in range(2):
            world.start(deal, rank)
    for _ in range(LAYERS + 1):
        for deal in deals:
            for rank in range(2):
                try:
                    world.layer(deal, rank)
                except MoeP2pError as error:
                    found.append(error)
        goes_on(world)
    return found


def goes_on(world: World) -> None:
    """In no time: no deadline passes."""
    for _ in range(40):
        for move in world.net.moves():
            world._move(move)
        for link in world.links:
            for end in (0, 1):
                while link.can_deliver(end):
                    link.deliver(end)
        world.step()
        world.settle()


def where(world: World, what: str) -> tuple[Any, str]:
    if what == "scatter":
        return world.receiver.unpacker.copier, "copy"
    if what == "gather":
        return world.senders[0].packer.copier, "copy"
    return receiver_module, "SourceTransfer"


@pytest.mark.parametrize("what", ["gather", "scatter", "opening"])
def test_a_request_fails_by_name_and_others_go_on(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(link=dataclasses.replace(PACKED, ring_bytes=8 * 256))
    failed = once(*where(world, what), monkeypatch)
    deals = [deal for deal in (world.reserve(2), world.reserve(2)) if deal is not None]
    assert len(deals) == 2
    states = [deal.reservation for deal in deals]
    raised = run(world, deals)
    assert all(isinstance(error, AbortedError) for error in raised)
    goes_on(world)
    world.finish()
    assert failed
    assert sorted(str(each.state) for each in states) == ["complete", "failed"]
    (error,) = [each.error for each in states if each.error is not None]
    assert "no memory is left" in str(error)


@pytest.mark.parametrize("call", ["layer", "commit"])
def test_a_call_that_failed_half_way_is_not_taken_for_made(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.receiver.verify = receiver_module.Verify("always")
    deal = world.reserve(2)
    assert deal is not None
    reservation = deal.reservation
    run_to = 0 if call == "layer" else LAYERS
    for rank in range(2):
        world.start(deal, rank)
    goes_on(world)
    sending = deal.sendings[0]
    assert sending is not None
    for _ in range(run_to):
        world.layer(deal, 0)
    of = sending.transfers[0]
    once(of, "send" if call == "layer" else "_sum_layers", monkeypatch)
    with pytest.raises(AbortedError, match=r"it failed here: .*no memory is left"):
        world.layer(deal, 0)
    with pytest.raises(AbortedError, match="no memory is left"):
        sending.wait(0)
    world.finish()
    assert reservation.state == "failed"


def test_a_fence_that_raises_keeps_no_other_pair_from_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, tries = World(), list[Pair]()

    def fence(self: kv.KVReceiver, pair: Pair) -> None:
        tries.append(pair)
        if len(tries) == 1:
            raise GONE
        pair.fence()

    monkeypatch.setattr(kv.KVReceiver, "fence", fence)
    for pair in list(world.receiver.pairs.values()):
        world.receiver.lose(pair, "a test")
    with pytest.raises(torch.OutOfMemoryError):
        world.receiver.step()
    world.receiver.step()
    assert not world.receiver.is_fencing
    assert [tries.count(pair) for pair in dict.fromkeys(tries)] == [2, 1]


@pytest.mark.parametrize("which", ["step", "lease of", "accept"])
def test_a_keeper_that_was_not_made_leaves_nothing(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if which in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def alive() -> set[threading.Thread]:
        found = threading.enumerate()
        return {each for each in found if "kv-half" in each.name and each.is_alive()}

    made: Callable[[], kv.LeaseKeeper]
    with workers(LAYOUT, LAYOUT, settings="") as found:
        engine, cache = found.receivers[0].engine, found.receivers[0].cache
        worker = kv.KVReceiver(engine, cache, instance="kv-half")
        worker.replace("kv-half/0 was replaced")
        made = lambda: kv.LeaseKeeper(worker, kv.TorchLeases(HashStore()))  # noqa: E731
        monkeypatch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            made()
        assert worker.replaced
        monkeypatch.undo()
        for each in alive():
            each.join(20)
        assert not alive()
        with made():
            assert not worker.replaced
