"""Descriptions of DTensors are what torch gives to each rank, on a mesh of fake processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_p2p import InvalidArgumentError
from moe_p2p.weights import of_tensor
from moe_p2p.weights.pieces import held


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
        for piece in held(param, param.ranks.index(rank)):
            part = whole[tuple(slice(first, first + size) for first, size in piece.box)]
            torch.as_strided(found, part.shape, piece.strides, piece.offset).copy_(part)
        assert torch.equal(found, local)


def test_partial_sums_are_no_elements() -> None:
    with mesh_of((2,), 0) as ranks:
        tensor = DTensor.from_local(torch.ones(4), ranks, [Partial()], run_check=False)
        with pytest.raises(InvalidArgumentError, match=r"w: .*redistribute to Shard or Replicate"):
            of_tensor("w", tensor)


def test_plain_tensors_are_described_with_their_strides() -> None:
    param = of_tensor("w", torch.zeros(3, 4).t(), ranks=(2, 5))
    assert (param.shape, param.strides, param.ranks) == ((4, 3), (1, 4), (2, 5))
