"""Calls between nodes over the timed NIC: senders store into the partner's memory by themselves.

What its link model does is tested by tests/cpp/timed_test.cpp, ranks on a GPU by
tests/gpu/test_gpu_timed_nic.py.
"""

from __future__ import annotations

import pytest

import moe_p2p
from moe_p2p import Engine, EngineConfig
from moe_p2p.machine.transport import Choice
from moe_p2p.moe.rendezvous.agreement import Offer, agree_on_transport
from tests.support.cases import LAYOUTS, run_steps
from tests.support.ranks import run_threads

TIMED = {"transport": "timed", "transport_settings": "latency_us=0.1", "nics_per_rank": 1}


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_reference(world_size: int, ranks_per_node: int, layout: str) -> None:
    config = TIMED | {"ranks_per_node": ranks_per_node, "num_experts": max(4, 2 * world_size)}
    run_threads(world_size, run_steps, config, {"layout": layout})


def test_calls_of_several_chunks_in_parts_over_two_nics() -> None:
    config = TIMED | {"ranks_per_node": 2, "num_experts": 8, "nics_per_rank": 2}
    run_threads(4, run_steps, config | {"chunk_tokens": 3, "part_bytes": 1}, {})


def test_several_hosts_are_refused_by_name() -> None:
    offers = [Offer(host, Choice("timed", "it was asked for", automatic=False)) for host in "ab"]
    with pytest.raises(moe_p2p.UnavailableError, match="2 hosts, and timed stays on one"):
        agree_on_transport(offers, 1)


def test_settings_that_are_none_of_its_own_are_refused() -> None:
    for settings in ("seed=7", "preset=cx8"):
        with pytest.raises(moe_p2p.InvalidArgumentError, match=settings.partition("=")[0]):
            Engine(EngineConfig(transport="timed", transport_settings=settings))
