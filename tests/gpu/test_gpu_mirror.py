"""The mirror world: rank 0 of 4 or 8 ranks alone, or two of it that are each other's partners.

Its results are what it gets of all ranks together, bit for bit (tests/support/mirror_cases.py).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p import errors
from moe_p2p.moe.gpu import launch_shape
from moe_p2p.moe.rendezvous import mirror
from tests.moe.test_late_weights import late_halves
from tests.support.cases import Wanted, assert_combined, finish, run_step
from tests.support.gpu_ranks import DEVICE, World, prepare, run, worlds
from tests.support.mirror_cases import key_of_world, make_mirror, mirrored_call
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = [World(4, 4), World(8, 8)]
PARTNERS = [World(1, 1), World(2, 2)]  # threads that share a GPU
COUNTS = (12, 5, 0, 1)
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BF16 = {"dtype": torch.bfloat16}
CALLS: list[dict[str, Any]] = [
    {"layout": "grouped", "quantize": True, **BF16},
    {"layout": "padded", **BF16},
    {"layout": "by_rank", "quantize": True, **BF16},
    {"layout": "by_rank"},
]


def calls(world: World) -> list[Wanted]:
    """Several steps in each slot, with other tokens in each."""
    return [
        mirrored_call(world, seed, count=COUNTS[seed // 2 % 4], **CALLS[seed % len(CALLS)])
        for seed in range(2 * len(CALLS))
    ]


def steps(rank: Rank, _: World, world: World, key: str, wanted: list[Wanted]) -> None:
    with make_mirror(rank, world, key) as comm:
        prepare(rank, comm, wanted)
        for each in wanted:
            run_step(comm, each)


def late_steps(rank: Rank, _: World, world: World, key: str, wanted: list[Wanted]) -> None:
    """Weights that combine is given, in halves of two steps in flight."""
    with make_mirror(rank, world, key) as comm:
        prepare(rank, comm, wanted)
        for pair in zip(wanted[::2], wanted[1::2], strict=True):
            outs = late_halves(comm, pair)
            finish(comm)
            for step, out in zip(pair, outs, strict=True):
                assert_combined(out.cpu(), step.out[0])


@pytest.mark.parametrize("partners", PARTNERS, ids=("alone", "two"))
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_rank_0_gets_what_it_gets_of_all(world: World, partners: World) -> None:
    run(partners, steps, world, key_of_world(), calls(world))


@pytest.mark.parametrize("partners", PARTNERS, ids=("alone", "two"))
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_same_in_bulk(world: World, partners: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_shape, "BULK_STEP", 0)
    run(partners, steps, world, key_of_world(), calls(world))


def late_calls(world: World) -> list[Wanted]:
    return [mirrored_call(world, seed, count=COUNTS[seed], **BF16) for seed in range(4)]


@pytest.mark.parametrize("partners", PARTNERS, ids=("alone", "two"))
def test_late_weights_and_halves(partners: World) -> None:
    world = World(4, 4)
    run(partners, late_steps, world, key_of_world(), late_calls(world))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("partners", worlds((2, 2), devices=True))
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_between_gpus(world: World, partners: World) -> None:
    run(partners, steps, world, key_of_world(), calls(world), processes=True)
    run(partners, late_steps, world, key_of_world(), late_calls(world), processes=True)


def test_a_mirror_world_is_one_node() -> None:
    def body(rank: Rank, _: World) -> None:
        with pytest.raises(errors.InvalidArgumentError, match="a mirror world of 4 ranks is one"):
            make_mirror(rank, World(4, 2), key_of_world())

    run(World(1, 1), body)


def test_one_or_two_are_partners() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="place 2 of 3"):
        mirror.MirrorGroup(8, place=2, count=3)


@pytest.fixture(name="worker")
def _worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/mirror_worker.py, which is part of no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("mirror_worker")


SMALL = {"tokens": 12, "hidden": 512, "experts": 16, "topk": 3, "ranks": 4}
TIMED: list[dict[str, Any]] = [
    {"layout": "grouped"},
    {"layout": "padded"},
    {"layout": "by_rank", "given": True, "num_sms": 4},
    {"calls": "low-latency"},
    {"calls": "v2", "num_sms": 4},
]


@pytest.mark.parametrize("fields", TIMED, ids=lambda f: f.get("layout") or f["calls"])
def test_cases_of_mirror_turns_are_checked(worker: Any, fields: dict[str, Any]) -> None:
    case = worker.Case(name="small", **SMALL, **fields)

    def body(rank: Rank, _: World, key: str) -> None:
        made = worker.MAKERS[case.calls](case, (rank.rank, rank.world_size, key), DEVICE)
        made.pair()
        assert made.wrong() == ""
        want = made.want
        made.want = lambda: (want()[0] * 1.5, want()[1])
        assert "values are wrong, first in row 0 at" in made.wrong()

    run(World(1, 1), body, key_of_world())
