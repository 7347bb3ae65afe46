"""Layers of experts in slots, and steps whose sums are exact in any order: small whole numbers.

Expert e multiplies with a row of its own and adds its number; weights of tokens are 1, 2 or 4.
Symbols: W ranks, S slots of a rank, E logical experts, H hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import AllToAll, Engine, EngineConfig, ExpertMap, ExpertMover
from moe_p2p.moe.expert_map import EMPTY
from tests.support import cases
from tests.support.ranks import Rank

HIDDEN_DIM, TOPK, TOKENS = 16, 3, 5
GAP = 24  # bytes between slots of one of the tensors


def row_of(expert: int, layer: int = 0) -> Tensor:
    return torch.arange(HIDDEN_DIM).mul(3 * expert + 7 * layer + 1).remainder(11).float()


class Layer(NamedTuple):
    """table: of this rank. factors: [S, H] float32. numbers: [S, 5] int16, slots with gaps.
    scales: [S, 2, 3] fp8, which stands for what comes with quantized weights."""

    table: ExpertMap
    factors: Tensor
    numbers: Tensor
    scales: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.factors, self.numbers, self.scales]

    def fill(self, number: int = 0) -> None:
        slots = len(self.factors)
        for slot, expert in enumerate(self.table.placement[self.table.rank * slots :][:slots]):
            if expert == EMPTY:
                for each in self.tensors:
                    each[slot].view(torch.uint8).fill_(255)
                continue
            self.factors[slot] = row_of(expert, number)
            self.numbers[slot] = expert
            self.scales[slot] = torch.full((2, 3), expert % 16).to(torch.float8_e4m3fn)

    def check(self, number: int = 0) -> None:
        """Every slot that the map names has its expert's bytes."""
        slots = len(self.factors)
        factors, numbers, scales = (each.cpu() for each in self.tensors)
        for slot, expert in enumerate(self.table.placement[self.table.rank * slots :][:slots]):
            if expert != EMPTY:
                assert torch.equal(factors[slot], row_of(expert, number))
                assert (numbers[slot] == expert).all()
                assert (scales[slot].float() == expert % 16).all()


def make_layer(
    rank: Rank, placement: list[int], num_experts: int, number: int = 0, device: str = "cpu"
) -> Layer:
    slots = len(placement) // rank.world_size
    table = ExpertMap(placement, num_experts=num_experts, rank=rank.rank, device=device)
    gaps = torch.zeros(slots, 5 + GAP // 2, dtype=torch.int16, device=device)
    made = Layer(
        table,
        torch.zeros(slots, HIDDEN_DIM, device=device),
        gaps[:, :5],
        torch.zeros(slots, 2, 3, dtype=torch.float8_e4m3fn, device=device),
    )
    made.fill(number)
    return made


def drawn(rng: random.Random, num_slots: int, num_experts: int, empty: float) -> list[int]:
    more = [
        EMPTY if rng.random() < empty else rng.randrange(num_experts)
        for _ in range(num_slots - num_experts)
    ]
    found = [*range(num_experts), *more]
    rng.shuffle(found)
    return found


@contextmanager
def world(
    rank: Rank, layers: list[Layer], *, timeout_s: float = 30.0, **options: object
) -> Iterator[tuple[AllToAll, ExpertMover]]:
    """A communicator of slots, and a mover on its engine."""
    with ExitStack() as stack:
        comm = stack.enter_context(
            cases.make(
                rank,
                num_experts=layers[0].table.num_slots,
                hidden_dim=HIDDEN_DIM,
                topk=TOPK,
                max_tokens=TOKENS,
                timeout_s=timeout_s,
            )
        )
        yield comm, stack.enter_context(mover(rank, layers, comm.engine, **options))


def mover(rank: Rank, layers: list[Layer], engine: Engine, **options: object) -> ExpertMover:
    pairs = [(each.table, each.tensors) for each in layers]
    return ExpertMover(
        rank.store, engine, pairs, rank=rank.rank, world_size=rank.world_size, **options
    )  # type: ignore[arg-type]


@contextmanager
def alone(
    rank: Rank, layers: list[Layer], *, timeout_s: float = 30.0, **options: object
) -> Iterator[ExpertMover]:
    """A mover without a communicator."""
    config = EngineConfig(transport="loopback", nics_per_rank=2, timeout_s=timeout_s)
    where = layers[0].factors.device
    with (
        Engine(config, label=f"rank {rank.rank}", gpu=where.index) as engine,
        mover(rank, layers, engine, **options) as made,
    ):
        yield made


def check_step(comm: AllToAll, layer: Layer, seed: int, number: int = 0) -> None:
    """One step by the map, whose sums are those of the logical experts, bit for bit."""
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    draw = {"generator": generator}
    idx = torch.rand(TOKENS, layer.table.num_experts, **draw).topk(TOPK, 1).indices
    idx[torch.rand(idx.shape, **draw) < 0.1] = -1
    x = torch.randint(-8, 9, (TOKENS, HIDDEN_DIM), **draw).float()
    weights = torch.tensor([1.0, 2.0, 4.0])[torch.randint(0, 3, idx.shape, **draw)]
    got = comm.dispatch(x, layer.table.to_slots(idx), weights, layout="grouped")
    y = torch.full_like(got.x, 1e30)
    for slot in range(len(layer.factors)):
        begin = int(got.offsets[slot])
        rows = slice(begin, begin + int(got.counts[slot]))
        y[rows] = (
            got.x[rows] * layer.factors[slot]
            + layer.numbers[slot, 0] * layer.scales[slot, 0, 0].float()
        )
    out = comm.combine(y, got)
    wanted = torch.zeros_like(x)
    for k in range(TOPK):
        for token, expert in enumerate(idx[:, k].tolist()):
            if expert >= 0:
                one = x[token] * row_of(expert, number) + expert * (expert % 16)
                wanted[token] += weights[token, k] * one
    assert torch.equal(out, wanted)
