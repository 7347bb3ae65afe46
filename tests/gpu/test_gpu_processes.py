"""Ranks as processes: a GPU for each where there are enough, or all on one GPU, in turns.

The bodies are those of test_gpu.py, test_gpu_calls.py and test_gpu_graphs.py, few to keep the run
short.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_p2p import AllToAll, AllToAllConfig
from tests.gpu import test_gpu_graphs
from tests.gpu.test_gpu import call, every_format, steps
from tests.gpu.test_gpu_calls import CHUNKED, LONG, LONG_COUNTS, halves
from tests.support.cases import Wanted, run_step
from tests.support.gpu_ranks import World, make, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

APART = worlds((2, 1), (4, 2), (4, 1), (2, 2), (4, 4), (8, 4), (8, 2), (8, 8), devices=True)
TOGETHER = worlds((2, 2), (2, 1))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", APART)
def test_every_format_between_gpus(world: World) -> None:
    config = {"num_sms": None, "transport_settings": f"seed={world.ranks}"}
    run(world, steps, every_format(world), config, processes=True)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", worlds((2, 2), (4, 2), devices=True))
def test_chunks_between_gpus(world: World) -> None:
    wanted = [
        call(world, seed, max_tokens=LONG, counts=LONG_COUNTS[seed:] + LONG_COUNTS[:seed])
        for seed in range(4)
    ]
    run(world, steps, wanted, CHUNKED, processes=True)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", worlds((2, 2), (4, 2), devices=True))
def test_halves_between_gpus(world: World) -> None:
    pairs = [[call(world, 2 * i + j) for j in range(2)] for i in range(4)]
    run(world, halves, pairs, processes=True)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", worlds((2, 2), (4, 2), devices=True))
def test_graphs_between_gpus(world: World) -> None:
    replays = [[test_gpu_graphs.call(world, 2 * seed + i) for i in range(2)] for seed in range(10)]
    run(world, test_gpu_graphs.micro_batches, replays, True, processes=True)


@pytest.mark.parametrize("world", TOGETHER)
def test_processes_may_share_a_gpu(world: World) -> None:
    run(world, steps, [call(world, seed) for seed in range(5)], {}, processes=True)


def large_steps(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    sizes = {"hidden_dim": 7168, "num_experts": 64, "topk": 8, "dtype": torch.bfloat16}
    settings = {"combine_dtype": None, "extra_bytes": 0, "num_sms": None}
    with make(rank, world, max_tokens=64, **sizes, **settings) as comm:
        for step in wanted:
            run_step(comm, step)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", worlds((2, 2), (4, 2), (4, 4), devices=True))
def test_calls_of_the_size_of_a_model(world: World) -> None:
    sizes = {"hidden_dim": 7168, "num_experts": 64, "topk": 8, "dtype": torch.bfloat16}
    wanted = [
        call(
            world, seed, layout="grouped", max_tokens=64, counts=counts, quantize=quantize, **sizes
        )
        for seed, (quantize, counts) in enumerate([(False, [64] * 8), (True, [64, 0, 13, 50] * 2)])
    ]
    run(world, large_steps, wanted, processes=True)


def in_process_group(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    config = AllToAllConfig(
        num_experts=world.num_experts,
        hidden_dim=wanted[0].tokens[0].x.shape[1],
        topk=wanted[0].tokens[0].topk_idx.shape[1],
        max_tokens=wanted[0].options["max_tokens"],
        dtype=torch.float32,
        device="cuda",
    )
    with AllToAll(None, config) as comm:
        assert comm.ranks_per_node == world.ranks
        for step in wanted:
            run_step(comm, step)
    dist.destroy_process_group()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", worlds((2, 2), (4, 4), devices=True))
def test_gpus_of_a_process_group(world: World) -> None:
    run(world, in_process_group, [call(world, seed) for seed in range(3)], processes=True)
