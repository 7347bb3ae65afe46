"""DeepEP 2.5's EPBuffer on GPUs: the checks of the CPU, graphs with deferred calls, balanced
experts over NVLink, and the wheel's references where the wheel is.

One process per rank, each with a device of its own as far as there are devices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import UnavailableError
from moe_p2p.deep_ep_v25 import EPBuffer
from tests.engines import packages
from tests.support import balance_cases as balance
from tests.support import deep_ep_v25_references as references
from tests.support import elastic_cases as elastic
from tests.support import gpu_ranks
from tests.support.deep_ep_oracle import Place
from tests.support.elastic_cases import CALLS, Call
from tests.support.elastic_order import deep_ep_order
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
_DEADLINE_S = 550.0
WHEEL = "sgl-deep-ep-v25"

DEFERRED = [call._replace(mode="deferred") for call in CALLS.values() if call.mode == "sync"]
CHECKS: list[tuple[Any, ...]] = [
    *((elastic.steps, call) for call in (*CALLS.values(), *DEFERRED)),
    (elastic.steps, DEFERRED[0], elastic.SHAPE._replace(max_tokens=40), [[40, 17, 3, 9]]),
    (elastic.cached, DEFERRED[-1]),
    (deep_ep_order, Call(do_expand=True, num_bias=1, mode="deferred"), True),
    *(
        (elastic.graphs, Call(do_expand=expand, do_cpu_sync=False, mode=mode))
        for expand in (False, True)
        for mode in ("sync", "deferred")
    ),
]


def _calls(rank: Rank, world: World) -> None:
    place = Place(rank, "cuda", elastic.make_buffer(rank, EPBuffer))
    for check, *arguments in CHECKS:
        try:
            check(place, *arguments)
        except BaseException as error:
            raise AssertionError(f"{check.__name__} with {arguments}") from error
    place.buffer.destroy()


def _balance(rank: Rank, world: World) -> None:
    balance.rounds(rank, "cuda", 6, world.ranks)
    buffer, weights, _ = balance.make(rank)
    experts = torch.zeros(balance.LOCAL, 48, dtype=torch.int8, device="cuda")
    table = torch.zeros(world.ranks, balance.SLOTS, dtype=torch.int32, device="cuda")
    graph, text = torch.cuda.CUDAGraph(), "lb_prefetch_weights: the host moves the bytes"
    with torch.cuda.graph(graph), pytest.raises(UnavailableError, match=text):
        buffer.lb_prefetch_weights(weights[0], experts, table)
    buffer.destroy()


def _references(rank: Rank, world: World) -> None:
    dist.init_process_group("nccl", store=rank.store, rank=rank.rank, world_size=world.ranks)
    references.references_pass("cuda")
    dist.destroy_process_group()


WORLDS = [*gpu_ranks.worlds((1, 1), (2, 2)), *gpu_ranks.worlds((4, 4), devices=True)]


@pytest.mark.parametrize("world", WORLDS)
def test_calls_at_once_deferred_and_in_graphs(world: World) -> None:
    gpu_ranks.run(world, _calls, processes=True, deadline_s=_DEADLINE_S)


@pytest.mark.parametrize("world", WORLDS)
def test_weights_go_to_copies_and_gradients_come_back(world: World) -> None:
    gpu_ranks.run(world, _balance, processes=True, deadline_s=_DEADLINE_S)


@pytest.mark.skipif(packages.find(WHEEL) is None, reason=packages.why_not(WHEEL))
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4), devices=True))
def test_the_wheels_references_pass_over_our_buffer(world: World) -> None:
    """Each rank has a GPU: NCCL, which the references use, allows no two ranks on one."""
    gpu_ranks.run(world, _references, processes=True, deadline_s=_DEADLINE_S)
