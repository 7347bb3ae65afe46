"""A peer that others wait for is named at half of the deadline, once for all that wait alike."""

from __future__ import annotations

import re

import pytest

import moe_p2p
from tests.kv.test_kv_deadlines import COUNT, WAYS, chunks, commit, everything_moves, opened
from tests.support.kv_world import LAYERS, TIMEOUTS, World


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [re.sub(r"^moe_p2p warning \[pid \d+\] ", "", line)
            for line in capsys.readouterr().err.splitlines()]  # fmt: skip


def pass_time(world: World, seconds: float) -> None:
    for _ in range(10):
        world.clock.now += seconds / 10
        world.step()


@pytest.mark.parametrize("way", WAYS)
def test_who_is_late_is_named_once_and_when_it_moves(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, deal = opened(way)
    pass_time(world, 0.4 * TIMEOUTS.open_s)
    assert lines(capsys) == []
    pass_time(world, 0.3 * TIMEOUTS.open_s)
    named = lines(capsys)
    assert len(named) == 1
    request = "decode/0: request 'request 1', tokens 0 to 10: waits in phase open for prefill/0"
    wanted = rf"KV receiver has waited 1\d\.\d s, of at most 20: {request}, prefill/1; arrived from"
    assert re.match(wanted, named[0]), named
    chunks(deal, 0, 1)
    everything_moves(world)
    pass_time(world, 0.3 * TIMEOUTS.tail_s)  # it looks now and then
    over = lines(capsys)
    assert len(over) == 1
    wanted = rf"KV receiver: a wait is over after \d\d\.\d s: {request}, prefill/1;"
    assert re.match(wanted, over[0]), over
    assert re.search(
        r'moe_p2p_kv_stragglers_total\{worker="\S+",role="receiver"\} 1\n',
        moe_p2p.prometheus_text(world.receiver),
    )
    chunks(deal, 1, COUNT)
    commit(deal)
    everything_moves(world)
    pass_time(world, 1.0)
    assert lines(capsys) == []
    world.settle()
    world.finish()


def test_requests_that_wait_for_the_same_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Not one for each of many; senders name receivers that open nothing."""
    world = World()
    for number in range(5):
        world.senders[0].start(f"r{number}", None, {}, total=4)
    sendings = list(world.senders[0].sendings)
    for each in sendings:
        for layer in range(LAYERS):
            each.layer(layer)
        each.commit()
    pass_time(world, 0.7 * TIMEOUTS.open_s)
    named = lines(capsys)
    assert len(named) == 1
    assert "request 'r0': waits in phase open for any receiver" in named[0]
    for each in sendings:
        each.cancel()
    pass_time(world, 0.5)
    assert [": a wait is over after 1" in line for line in lines(capsys)] == [True]
