"""Into how many parts a step's message to another node is cut where nobody has said or measured it.

What parts do to results at every size: tests/moe/test_all_to_all.py, tests/gpu/test_gpu.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import AllToAllConfig, Engine, EngineConfig
from moe_p2p.moe.config import MOST_PARTS, default_part_bytes
from moe_p2p.moe.reference.routing import Tokens
from moe_p2p.tools.model import phases
from moe_p2p.tools.model.wire import Job
from tests.support import cases, hosts
from tests.support.ranks import Rank, run_threads

ROOT = Path(__file__).resolve().parents[2]
LONG = {"hidden_dim": 4096, "max_tokens": 64, "num_experts": 8}  # rows of 16 KiB: 1 MiB
NICS: dict[str, dict[str, Any]] = {
    "loopback": {"transport": "loopback"},
    "timed": {"transport": "timed", "transport_settings": "latency_us=0.1"},
    "tcp": {"transport": "libfabric", "transport_settings": "provider=tcp,interfaces=lo"},
}


def test_parts_are_short_over_nics_where_a_step_fills_all_of_them() -> None:
    full = 4 * (256 << 10)
    for provider in ("verbs", "libfabric", "timed"):
        assert default_part_bytes(provider, full) == 256 << 10
        assert default_part_bytes(provider, full - 1) == 2 << 20
    assert default_part_bytes("loopback", 1 << 30) == 2 << 20


def test_a_step_has_as_many_parts_as_kernels_know() -> None:
    found = re.search(r"kMaxParts = (\d+);", (ROOT / "kernels/abi/region.h").read_text())
    assert found is not None
    assert int(found[1]) == MOST_PARTS


def test_a_configuration_that_names_parts_keeps_them() -> None:
    job: dict[str, Any] = {"num_experts": 8, "hidden_dim": 7168, "topk": 8, "max_tokens": 4096}
    config = AllToAllConfig(**job)  # steps of 512 tokens
    assert config.with_parts("verbs").part_bytes == 256 << 10
    assert config.with_parts("loopback").part_bytes == 2 << 20
    assert config.with_parts("verbs", measured=0).part_bytes == 0
    for given in (0, 4096, 2 << 20):
        config = AllToAllConfig(**job, part_bytes=given)
        assert config.with_parts("verbs", measured=64).part_bytes == given


def test_the_model_cuts_as_the_communicator_does() -> None:
    slots = [phases.slot_bytes(Job(ranks=2, tokens=tokens)) for tokens in (32, 64, 128, 512)]
    parts = [
        [phases.num_parts(Job(ranks=2, tokens=tokens), slot, tokens) for slot in of_step]
        for tokens, of_step in zip((32, 64, 128, 512), slots, strict=True)
    ]
    assert parts == [[1, 1], [1, 1], [4, 4], [4, 4]]


def tokens_of(world_size: int, count: int) -> list[Tokens]:
    return [cases.make_tokens(5, r, count, hidden_dim=4096) for r in range(world_size)]


@pytest.mark.parametrize("nic", NICS)
def test_a_long_step_leaves_in_parts_where_there_are_nics(nic: str) -> None:
    """Of 16 tokens, 256 KiB: four are the whole step. A short step is one write."""
    if nic == "tcp" and (why := hosts.why_no_tcp()):
        pytest.skip(why)

    def body(rank: Rank) -> int:
        with Engine(EngineConfig(**NICS[nic], nics_per_rank=1)) as engine:
            with cases.make(rank, engine=engine, ranks_per_node=1, **LONG) as comm:
                for count in (64, 3, 64):
                    cases.check_step(comm, tokens_of(2, count))
            return sum(each["writes"] for each in engine.counters())

    def parts(source: int, count: int) -> int:
        idx = tokens_of(2, count)[source].topk_idx
        away = int(((idx >= 0) & (idx // 4 != source)).any(1).sum())
        return 1 if nic == "loopback" else max(1, -(-away // 16))

    both = sum(parts(source, count) for source in (0, 1) for count in (64, 3, 64))
    assert both == (6 if nic == "loopback" else 18)
    for writes in run_threads(2, body):  # dispatch for its own tokens, combine for the other's
        # Whoever closes first says farewell, the other one need not.
        assert both <= writes <= both + 1


@pytest.mark.parametrize("nic", NICS)
def test_default_parts_change_no_result_between_nodes_of_two(nic: str) -> None:
    if nic == "tcp" and (why := hosts.why_no_tcp()):
        pytest.skip(why)

    def body(rank: Rank) -> None:
        with cases.make(rank, **NICS[nic], nics_per_rank=2, ranks_per_node=2, **LONG) as comm:
            for count in (64, 3, 64):
                cases.check_step(comm, tokens_of(4, count))

    run_threads(4, body)
