"""kernels/map.cu, its twin on hosts, and a map that changes between replays of a graph."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AbortedError, ExpertMap, InvalidArgumentError
from moe_p2p.moe import expert_map
from moe_p2p.moe.expert_map import EMPTY, Move, moves_between
from moe_p2p.moe.reference import Tokens
from tests.gpu.test_gpu_graphs import Inputs, prepare_bf16, record
from tests.gpu.test_gpu_overlap import call, rows_as_they_are
from tests.support import gpu_ranks
from tests.support.cases import Wanted, assert_received, expect, finish, on_cpu
from tests.support.gpu_ranks import MAX_TOKENS, World
from tests.support.ranks import Rank

ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    return "cpu" if request.param == "cpu" else gpu_ranks.DEVICE


def drawn(num_slots: int, num_experts: int, seed: int, empty: float = 0.2) -> list[int]:
    """A placement: each expert somewhere, others anywhere or nowhere."""
    rng = random.Random(seed)
    more = num_slots - num_experts
    found = [*range(num_experts)]
    found += [EMPTY if rng.random() < empty else rng.randrange(num_experts) for _ in range(more)]
    rng.shuffle(found)
    return found


def slots_of(placement: list[int], rank: int, topk_idx: Tensor) -> Tensor:
    """The definition, entry by entry."""
    out = topk_idx.clone()
    for token, row in enumerate(topk_idx.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                held = [slot for slot, each in enumerate(placement) if each == expert]
                out[token, k] = held[(token + rank) % len(held)]
    return out


# T, K, E, N: nobody, no id, one expert, several blocks.
SHAPES = [(0, 2, 4, 8), (3, 0, 4, 4), (9, 1, 1, 5), (70, 3, 6, 6), (9000, 8, 256, 288)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_id_becomes_a_slot(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    num_tokens, topk, num_experts, num_slots = shape
    generator = torch.Generator().manual_seed(num_tokens)
    idx = torch.randint(-1, num_experts, (num_tokens, topk), generator=generator, dtype=dtype)
    placement = drawn(num_slots, num_experts, num_tokens)
    for rank in (0, 3):
        table = ExpertMap(placement, num_experts=num_experts, rank=rank, device=device)
        found = table.to_slots(idx.to(device))
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), slots_of(placement, rank, idx))
        where = table.slots.data_ptr(), table.counts.data_ptr()
        other = drawn(num_slots, num_experts, num_tokens + 1)
        table.set(other)
        assert (table.slots.data_ptr(), table.counts.data_ptr()) == where
        assert torch.equal(table.to_slots(idx.to(device)).cpu(), slots_of(other, rank, idx))


def test_an_id_that_no_expert_has_is_refused_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_map, "map_kernel", lambda _: 0)  # not an emulated GPU's
    table = ExpertMap([0, 1, 2], num_experts=3)
    for wrong in (3, -2):
        with pytest.raises(InvalidArgumentError, match=f"token 1 names expert {wrong}, must be"):
            table.to_slots(torch.tensor([[0, 1], [2, wrong]]))
    with pytest.raises(InvalidArgumentError, match=r"topk_idx is torch\.float32"):
        table.to_slots(torch.zeros(2, 2))
    with pytest.raises(
        InvalidArgumentError, match=r"topk_idx is torch\.int64 \[2\], must have shape"
    ):
        table.to_slots(torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
def test_a_dispatch_refuses_ids_that_no_expert_has() -> None:
    table = ExpertMap([0, 1, 2, -1], num_experts=3, device=gpu_ranks.DEVICE)
    idx = torch.tensor([[0, 3], [-1, -2]], device=gpu_ranks.DEVICE)
    assert table.to_slots(idx).tolist() == [[0, 4], [-1, -2]]


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ([0, 1, 2], "has 3 slots, must have 4"),
        ([0, 1, 2, 3], r"slot \[3\] holds expert \[3\], must be 0 to 2"),
        ([0, 1, 2, -2], r"slot \[3\] holds expert \[-2\]"),
        ([0, 1, 1, -1], r"no slot holds experts \[2\]"),
        ([0, 1, 2, 1.5], "placement is .*must be a list of ints"),
        (None, "must be a list of ints"),
    ],
)
def test_a_placement_that_is_none_is_refused_and_changes_nothing(placement: Any, text: str) -> None:
    table = ExpertMap([0, 1, 2, 2], num_experts=3)
    with pytest.raises(InvalidArgumentError, match=text):
        table.set(placement)
    assert table.placement == [0, 1, 2, 2]
    assert table.slots.tolist() == [[0, -1], [1, -1], [2, 3]]


def test_a_void_map_names_no_slot() -> None:
    table = ExpertMap([0, 1, 1], num_experts=2)
    table.make_void("rank 1 is lost")
    with pytest.raises(AbortedError, match="rank 1 is lost"):
        table.to_slots(torch.zeros(1, 1, dtype=torch.int64))
    assert (table.slots == 3).all()


@pytest.mark.parametrize("seed", range(40))
def test_moves_bring_each_slot_its_expert_from_a_slot_that_has_it(seed: int) -> None:
    rng = random.Random(seed)
    ranks, slots = rng.randint(1, 5), rng.randint(1, 6)
    experts = rng.randint(1, ranks * slots)
    before, after = (drawn(ranks * slots, experts, 2 * seed + i) for i in (0, 1))
    found = moves_between(before, after, slots, experts)
    assert len({each.target for each in found}) == len(found)
    changed = dict(enumerate(before)) | {each.target: before[each.source] for each in found}
    for slot, expert in enumerate(after):
        assert expert in (EMPTY, changed[slot])
    for each in found:
        assert after[each.target] != before[each.target]
        near = before[each.target // slots * slots :][:slots]
        if after[each.target] in near:
            assert each.source // slots == each.target // slots


def test_moves_of_many_replicas_are_shared_by_their_holders() -> None:
    before = [0, 1, 0, 2, 0, 3, 4, 5]  # expert 0 on three ranks of four
    assert moves_between(before, [0, 0, 0, 0, 0, 0, 0, 0], 2, 6)[:1] == [Move(0, 1)]
    wanted = [1, 1, 2, 2, 3, 3, 0, 0]
    found = {each.target: each.source for each in moves_between(before, wanted, 2, 6)}
    assert found == {0: 1, 2: 3, 4: 5, 6: 0, 7: 2}


# --- under graphs ---


def mapped(world: World, wanted: Wanted, placement: list[int]) -> Wanted:
    """What a call of logical experts is, as one of slots."""

    def of(rank: int, tokens: Tokens) -> Tokens:
        idx = slots_of(placement, rank, tokens.topk_idx)
        return replace(tokens, topk_idx=idx)

    tokens = [of(rank, each) for rank, each in enumerate(wanted.tokens)]
    return expect(
        world.topology(), tokens, max_tokens=MAX_TOKENS, experts=rows_as_they_are, layout="grouped"
    )


def replays(rank: Rank, world: World, steps: list[tuple[Wanted, list[int], Wanted]]) -> None:
    num_experts = world.num_experts - 2
    first = drawn(world.num_experts, num_experts, 0)
    table = ExpertMap(first, num_experts=num_experts, rank=rank.rank, device=gpu_ranks.DEVICE)
    with gpu_ranks.make(rank, world) as comm:
        place = Inputs.make(MAX_TOKENS)

        def body() -> list[Any]:
            slots = table.to_slots(place.topk_idx)  # returned: emulated graphs keep no memory
            got = comm.dispatch(
                **place.arguments(MAX_TOKENS) | {"topk_idx": slots, "num_tokens": None}
            )
            return [slots, got, comm.combine(got.x, got)]

        prepare_bf16(rank, comm)
        body()
        graph, (_, live, out) = record(rank, "capture", body)
        for logical, placement, wanted in steps:
            place.set(logical.tokens[rank.rank])
            table.set(placement)
            graph.replay()
            finish(comm)
            assert_received(on_cpu(live), wanted.received[rank.rank])
            assert torch.equal(out.cpu(), wanted.out[rank.rank])
        gpu_ranks.meet(rank, "replayed")


@pytest.mark.gpu
@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2)))
def test_a_map_changes_between_replays_of_a_graph(world: World) -> None:
    num_experts = world.num_experts - 2
    steps = []
    for seed in range(6):
        logical = call(world, seed)
        for tokens in logical.tokens:  # distinct experts in a row, all of them logical
            tokens.topk_idx.copy_(
                torch.where(tokens.topk_idx < num_experts, tokens.topk_idx, torch.tensor(-1))
            )
        placement = drawn(world.num_experts, num_experts, seed)
        steps.append((logical, placement, mapped(world, logical, placement)))
    gpu_ranks.run(world, replays, steps)
