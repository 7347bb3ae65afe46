"""Descriptions of DTensors are what torch gives to each rank, on a mesh of fake processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_p2p import Engine, InvalidArgumentError
from moe_p2p.weights import (
    Param,
    WeightEngineRank,
    WeightLayout,
    WeightTrainer,
    layout_of,
    of_tensor,
    weight_plan,
)
from moe_p2p.weights.boxes import held
from moe_p2p.weights.layout import everyones
from tests.support.ranks import Rank, run_processes


@contextmanager
def mesh_of(shape: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    ranks = torch.arange(torch.Size(shape).numel())
    dist.init_process_group("fake", rank=rank, world_size=ranks.numel(), store=FakeStore())
    try:
        yield DeviceMesh("cpu", ranks.view(shape))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 3), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
        ((2, 2, 2), [Shard(1), _StridedShard(0, split_factor=2), Shard(0)]),
    ],
)
def test_ranks_hold_what_torch_gives_them(
    mesh: tuple[int, ...], placements: list[Placement]
) -> None:
    whole = torch.arange(13 * 6).view(13, 6)
    for rank in range(torch.Size(mesh).numel()):
        with mesh_of(mesh, rank) as ranks:
            tensor = distribute_tensor(whole, ranks, placements, src_data_rank=None)
            assert isinstance(tensor, DTensor)
            param = of_tensor("w", tensor)
            local = tensor.to_local().flatten()
        found = torch.full_like(local, -1)
        for placed in held(param, param.ranks.index(rank)):
            part = whole[tuple(slice(first, first + size) for first, size in placed.box)]
            torch.as_strided(found, part.shape, placed.strides, placed.offset).copy_(part)
        assert torch.equal(found, local)


def test_partial_sums_are_no_elements() -> None:
    with mesh_of((2,), 0) as ranks:
        tensor = DTensor.from_local(torch.ones(4), ranks, [Partial()], run_check=False)
        with pytest.raises(InvalidArgumentError, match=r"w: .*redistribute to Shard or Replicate"):
            of_tensor("w", tensor)


def test_plain_tensors_are_described_with_their_strides() -> None:
    param = of_tensor("w", torch.zeros(3, 4).t(), ranks=(2, 5))
    assert (param.shape, param.strides, param.ranks) == ((4, 3), (1, 4), (2, 5))


def _of_rank(rank: int) -> WeightLayout:
    """FSDP of 2 over tensor parallelism of 2; each TP rank has its own sub-mesh for the norm, each
    pair a pipeline stage, each rank an expert; a bias that all hold whole."""
    with mesh_of((2, 2), rank) as mesh:
        dp = DeviceMesh("cpu", torch.tensor([rank % 2, rank % 2 + 2]))
        w, norm = torch.arange(48.0).view(8, 6), torch.arange(6.0)
        tensors = {
            "w": distribute_tensor(w, mesh, [_StridedShard(0, split_factor=2), Shard(0)],
                                   src_data_rank=None),
            "norm": distribute_tensor(norm, dp, [Shard(0)], src_data_rank=None),
            f"stage{rank // 2}": torch.zeros(3),
            f"expert{rank}": torch.zeros(2, 2),
            "bias": torch.zeros(5),
        }  # fmt: skip
        return WeightLayout([of_tensor(n, t, (rank,)) for n, t in tensors.items()], 4)


def test_parts_of_a_two_dimensional_mesh_become_one_layout() -> None:
    parts = [_of_rank(rank) for rank in range(4)]
    layout = WeightLayout.merged(parts)
    assert layout == WeightLayout.merged([WeightLayout.from_bytes(p.to_bytes()) for p in parts])
    found = {name: [each.ranks for each in params] for name, params in layout.by_name.items()}
    assert found == {
        "w": [(0, 1, 2, 3)],
        "norm": [(0, 2), (1, 3)],
        "stage0": [(0, 1)],
        "stage1": [(2, 3)],
        **{f"expert{rank}": [(rank,)] for rank in range(4)},
        "bias": [(0, 1, 2, 3)],
    }
    target = [Param(name, params[0].shape, "float32", (0,))
              for name, params in layout.by_name.items()]  # fmt: skip
    plan = weight_plan(layout, WeightLayout(target, 1))
    sent = dict.fromkeys(layout.by_name, 0)
    for rank in range(4):
        for write in plan.of_source(rank):
            sent[write.name] += write.nbytes
    assert sent == {name: 4 * torch.Size(params[0].shape).numel()
                    for name, params in layout.by_name.items()}  # fmt: skip


def test_what_parts_describe_otherwise_is_named() -> None:
    a = Param("a", (4,), "float32", (0,))
    one, other = (WeightLayout([a, Param("w", (8, n), "float32", (r,))], 2)
                  for r, n in enumerate((2, 3)))  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"w: a part .* \[8, 3\], another .* \[8, 2\]"):
        WeightLayout.merged([one, other])
    assert one.difference(other).startswith("w: ")


def _of_fsdp_and_tp(rank: Rank) -> list[str]:
    """Real fully_shard over tensor parallelism, fp32 masters; rank 0 has the engine, in bf16."""
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", rank.store), rank=rank.rank,
                            world_size=rank.world_size)  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 2), nn.Embedding(5, 6), nn.LayerNorm(7))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    params = dict(model.named_parameters())
    full = {n: p.full_tensor().detach().bfloat16() for n, p in params.items()}
    target = WeightLayout([Param(n, tuple(t.shape), "bfloat16", (0,)) for n, t in full.items()], 1)
    live = {name: torch.zeros_like(each) for name, each in full.items()}
    store, wrong, threads = dist.PrefixStore("weights", rank.store), list[str](), []

    def generate() -> None:
        with WeightEngineRank(Engine(), store.clone(), target, 0, live) as engine_rank:
            engine_rank.wait(60)
            wrong.extend(name for name in live if not torch.equal(live[name], full[name]))

    if rank.rank == 0:
        threads.append(threading.Thread(target=generate))
        threads[0].start()
    layout = layout_of(params)
    with WeightTrainer(Engine(), store, layout, rank.rank, params) as trainer:
        trainer.update(1, params)
        for each in threads:
            each.join()
        dist.barrier()
    dist.destroy_process_group()
    return wrong if rank.rank or threads else ["no generator"]


@pytest.mark.more  # 4 processes; the parts are in the test of a two-dimensional mesh
def test_a_real_model_of_fsdp_and_tensor_parallelism() -> None:
    assert run_processes(4, _of_fsdp_and_tp) == [[]] * 4


def _bytes_of_all(rank: Rank) -> list[list[bytes]]:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    said = (b"", b"all" * rank.rank, b"the second" * (rank.rank == 1))
    found = [everyones(each) for each in said]
    dist.destroy_process_group()
    return found


def test_ranks_have_each_others_bytes_also_where_there_are_none() -> None:
    """As slime's ranks, which say nothing unless they have failed."""
    wanted = [[b""] * 3, [b"", b"all", b"allall"], [b"", b"the second", b""]]
    assert run_processes(3, _bytes_of_all) == [wanted] * 3
