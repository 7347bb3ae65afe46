"""DeepEP's low-latency calls and ElasticBuffer on GPUs: the checks of the CPU, and graphs.

One process per rank, each with a device of its own as far as there are devices. A world makes all
checks one after the other: starting one takes longer than most checks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import deep_ep_cases as normal
from tests.support import elastic_cases as elastic
from tests.support import gpu_ranks
from tests.support import low_latency_cases as low_latency
from tests.support.deep_ep_oracle import Place, Shape
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
_DEADLINE_S = 550.0

LOW_LATENCY: list[tuple[Any, ...]] = [
    *((low_latency.steps, form) for form in low_latency.FORMATS),
    (low_latency.steps, "ue8m0", "hook"),
    (low_latency.steps, "bf16", "async"),
    (low_latency.one_step, Shape(896, 3584, 16, 6), [6, 4, 0, 5], "ue8m0"),
    (low_latency.narrow_ids,),
    (low_latency.repeats,),
    (low_latency.two_in_flight,),
    (low_latency.never_or_again,),
    (low_latency.results_go,),
    (low_latency.ten_bits_travel,),
    (low_latency.times_waited,),
    (low_latency.masked,),
    *((low_latency.graphs, mode) for mode in ("sync", "hook", "async")),
]
ELASTIC: list[tuple[Any, ...]] = [
    *((elastic.steps, call) for call in elastic.CALLS.values()),
    (elastic.steps, elastic.Call(), elastic.SHAPE._replace(max_tokens=40), [[40, 17, 3, 9]]),
    (elastic.cached, elastic.CALLS["rows by rank, no CPU sync"]),
    (elastic.cached, elastic.CALLS["expanded, fp8, biases"]),
    (elastic.any_order,),
    (elastic.own_routing,),
    (elastic.zero_padding,),
    (elastic.columns, 24, False),
    (elastic.columns, 3, True),
    (elastic.repeats, False),
    (elastic.one_rounding, True),
    *((elastic.graphs, elastic.Call(do_expand=e, do_cpu_sync=False)) for e in (False, True)),
]


def _check_all(rank: Rank, world: World, cases: Any, checks: list[tuple[Any, ...]]) -> None:
    place = Place(rank, "cuda", cases.make_buffer(rank))
    for check, *arguments in checks:
        try:
            check(place, *arguments)
        except BaseException as error:
            raise AssertionError(f"{check.__name__} with {arguments}") from error
    place.buffer.destroy()


def _low_latency(rank: Rank, world: World) -> None:
    nobody_to_mask = world.ranks == 1
    checks = [c for c in LOW_LATENCY if not (nobody_to_mask and c[0] is low_latency.masked)]
    _check_all(rank, world, low_latency, checks)


def _elastic(rank: Rank, world: World) -> None:
    _check_all(rank, world, elastic, ELASTIC)


WORLDS = [
    *gpu_ranks.worlds((1, 1), (2, 2)),
    *gpu_ranks.worlds((4, 4), devices=True),
]


@pytest.mark.parametrize("world", WORLDS)
def test_low_latency_calls(world: World) -> None:
    gpu_ranks.run(world, _low_latency, processes=True, deadline_s=_DEADLINE_S)


@pytest.mark.parametrize("world", WORLDS)
def test_elastic_buffer(world: World) -> None:
    gpu_ranks.run(world, _elastic, processes=True, deadline_s=_DEADLINE_S)


# For all but the eight the real DeepEP has no kernels, nor for 768 tokens, nor a rank without any.
MORE_RANKS = gpu_ranks.worlds((3, 3), (5, 5), (6, 6), (7, 7), (8, 8))
COUNTS = [5, 3, 0, 12, 1, 0, 7, 4]


def _few_calls(rank: Rank, world: World) -> None:
    shape = low_latency.SHAPE._replace(num_experts=2 * world.ranks)
    many = shape._replace(max_tokens=768, hidden_dim=128)
    checks: list[tuple[Any, ...]] = [
        (low_latency.one_step, shape, COUNTS, "fp8"),
        (low_latency.one_step, many, [768, 700, 0, 1, 768, 5, 64, 512], "ue8m0"),
    ]
    _check_all(rank, world, low_latency, checks)
    calls = (elastic.Call(), elastic.Call(do_expand=True, do_cpu_sync=False))
    checks = [(elastic.steps, call, shape, [COUNTS]) for call in calls]
    _check_all(rank, world, elastic, checks)
    place = normal.open_buffer(rank, "cuda")
    counts = tuple(COUNTS[: world.ranks])
    setting = normal.Setting(num_tokens=counts, num_experts=2 * world.ranks, fp8=True)
    for check in (normal.check_layout, normal.check_dispatch, normal.check_combine):
        check(place, setting)
    place.buffer.destroy()


@pytest.mark.parametrize("world", MORE_RANKS)
def test_other_numbers_of_ranks(world: World) -> None:
    gpu_ranks.run(world, _few_calls, processes=True, deadline_s=_DEADLINE_S)
