"""HybridEPBuffer against plain torch: rows expert after expert, sums, probabilities, both ways.

Symbols: W ranks, T tokens of a rank, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import InvalidArgumentError, MoeP2pError, deep_ep
from moe_p2p.moe import pool
from tests.support import gpu_ranks
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank, run_threads

E, H = 12, 256
Check = Callable[["Place"], None]


class Tokens(NamedTuple):
    x: Tensor  # [T, H]
    map: Tensor  # [T, E]
    probs: Tensor  # [T, E]


class Place(NamedTuple):
    rank: Rank
    device: str
    buffer: deep_ep.HybridEPBuffer

    def all_tokens(self, seed: int, counts: tuple[int, ...]) -> list[Tokens]:
        made = []
        for rank in range(self.rank.world_size):
            generator = torch.Generator().manual_seed(100 * seed + rank)
            num = counts[rank % len(counts)]
            chosen = torch.rand(num, E, generator=generator) < 0.3
            probs = torch.rand(num, E, generator=generator).where(chosen, 0.0)
            x = torch.randint(-8, 8, (num, H), generator=generator).bfloat16()
            made.append(Tokens(x, chosen, probs))
        return made

    def put(self, tokens: Tokens) -> dict[str, Tensor]:
        named = {"hidden": tokens.x, "routing_map": tokens.map, "probs": tokens.probs}
        return {name: tensor.to(self.device) for name, tensor in named.items()}


def run(num_ranks: int, check: Check, use_fp8: bool = False) -> None:
    def body(rank: Rank) -> None:
        check(open_place(rank, "cpu", use_fp8))

    run_threads(num_ranks, body)


def open_place(rank: Rank, device: str, use_fp8: bool = False) -> Place:
    group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
    local = E // rank.world_size
    return Place(rank, device, deep_ep.HybridEPBuffer(group, H, 8, local, use_fp8))


def wanted(place: Place, tokens: list[Tokens], pad: int) -> tuple[Tensor, Tensor, list[int]]:
    """Returns rows and probabilities with padding, and each expert's number of rows."""
    rows, probs, counts = [], [], []
    local = E // place.rank.world_size
    for expert in range(place.rank.rank * local, (place.rank.rank + 1) * local):
        mine = [t.x[t.map[:, expert]] for t in tokens]
        weights = [t.probs[t.map[:, expert], expert] for t in tokens]
        num = sum(len(part) for part in mine)
        padding = -num % pad
        rows += [*mine, torch.zeros(padding, H, dtype=torch.bfloat16)]
        probs += [*weights, torch.zeros(padding)]
        counts.append(num + padding)
    return torch.cat(rows), torch.cat(probs), counts


def check_rows(place: Place, blocking: bool, pad: int | None, counts: tuple[int, ...]) -> None:
    for seed in range(3):
        tokens = place.all_tokens(seed, counts)
        mine = tokens[place.rank.rank]
        expected, probs, per_expert = wanted(place, tokens, pad or 1)
        more: dict[str, Any] = {"pad_multiple": pad}
        if not blocking:
            more |= {"num_permuted_tokens": len(expected) + 8, "non_blocking": True}
        rows, row_probs, scales, of_expert, handle = place.buffer.dispatch_with_permute(
            **place.put(mine), **more
        )
        assert scales is None
        assert of_expert.device.type == ("cpu" if blocking else place.device)
        assert of_expert.tolist() == per_expert
        num = len(expected)
        assert rows.shape[0] == (num if blocking else num + 8)
        assert torch.equal(rows[:num].cpu(), expected)
        assert row_probs is not None
        assert torch.equal(row_probs[:num].cpu(), probs)
        assert not rows[num:].any()
        assert int(handle[-1]) == 0
        # Each row's expert adds its own share: a wrong row, expert or token would show.
        local = len(per_expert)
        number = torch.arange(local) + place.rank.rank * local + 1.0
        factor = torch.zeros(rows.shape[0])
        factor[:num] = number.repeat_interleave(torch.tensor(per_expert))
        y = rows * factor.to(place.device)[:, None].bfloat16()
        out, back = place.buffer.combine_with_unpermute(
            hidden=y, probs=row_probs, handle=handle, pad_multiple=pad
        )
        sums = (mine.map * (torch.arange(E) + 1.0)).sum(1)
        assert torch.allclose(out.cpu().float(), mine.x.float() * sums[:, None], rtol=2e-2, atol=1)
        assert back is not None
        assert torch.equal(back.cpu(), mine.probs)
        again, none, _, _, same = place.buffer.dispatch_with_permute(
            hidden=place.put(mine)["hidden"] * 2, handle=handle, pad_multiple=pad
        )
        assert (none, same) == (None, handle)
        assert torch.equal(again[:num].cpu(), expected * 2)


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_and_sums(num_ranks: int, pad: int | None) -> None:
    run(num_ranks, lambda place: check_rows(place, True, pad, (5, 0, 9)))


@pytest.mark.parametrize("pad", [None, 4])
def test_nothing_waits_where_the_caller_gives_the_rows(pad: int | None) -> None:
    run(2, lambda place: check_rows(place, False, pad, (7,)))


@pytest.mark.parametrize("counts", [(6, 2, 4, 3), (0, 8, 1, 8), (1, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_may_differ_where_nothing_waits(num_ranks: int, counts: tuple[int, ...]) -> None:
    """The bound is the constructor's, whichever routing follows: one of a rank's own T would be
    right until another rank sends more."""
    run(num_ranks, lambda place: check_rows(place, False, None, counts))


def test_more_tokens_than_the_constructor_says_are_of_all_ranks() -> None:
    """Equal T may be any; where it differs the ranks and both numbers are named."""
    run(2, lambda place: check_rows(place, False, None, (11,)))

    def check(place: Place) -> None:
        tokens = place.all_tokens(1, (11, 9))
        with pytest.raises(MoeP2pError, match=r"max_tokens of rank [01]'s call is (9|11), of rank"):
            place.buffer.dispatch_with_permute(
                **place.put(tokens[place.rank.rank]), num_permuted_tokens=200, non_blocking=True
            )

    run(2, check)


def test_ids_instead_of_a_map() -> None:
    def check(place: Place) -> None:
        tokens = place.all_tokens(5, (6, 4))
        mine = tokens[place.rank.rank]
        most = int(max(t.map.sum(1).max() for t in tokens))
        found, ids = mine.map.int().topk(most, dim=1)
        weights = mine.probs.gather(1, ids).where(found > 0, 0.0)
        rows, probs, _, per_expert, handle = place.buffer.dispatch_with_permute(
            hidden=mine.x,
            topk_idx=ids.where(found > 0, -1),
            topk_weights=weights,
            num_of_experts=E,
        )
        expected, expected_probs, counts = wanted(place, tokens, 1)
        assert torch.equal(rows, expected)
        assert probs is not None
        assert torch.equal(probs, expected_probs)
        assert per_expert.tolist() == counts
        back = place.buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)[1]
        assert back is not None
        assert torch.equal(back, mine.probs)

    run(2, check)


def test_bytes_of_fp8_travel_with_their_scales() -> None:
    def check(place: Place) -> None:
        tokens = place.all_tokens(6, (4,))
        mine = tokens[place.rank.rank]
        given = place.put(mine) | {"hidden": mine.x.to(torch.float8_e4m3fn).view(torch.uint8)}
        scales = torch.arange(8.0).view(4, 2) + 10 * place.rank.rank
        rows, _, row_scales, _, handle = place.buffer.dispatch_with_permute(
            **given, scaling_factor=scales
        )
        expected, _, _ = wanted(place, tokens, 1)
        assert rows.dtype == torch.uint8
        assert torch.equal(rows.view(torch.float8_e4m3fn).bfloat16(), expected)
        assert row_scales is not None
        assert row_scales.shape == (len(expected), 2)
        y = rows.view(torch.float8_e4m3fn).bfloat16()
        out, none = place.buffer.combine_with_unpermute(hidden=y, handle=handle)
        assert none is None
        assert torch.equal(out, mine.x * mine.map.sum(1, keepdim=True))

    run(2, check, use_fp8=True)


def test_what_does_not_fit_is_refused() -> None:
    def check(place: Place) -> None:
        one = torch.zeros(3, E, dtype=torch.bool)
        one[:, 0] = True
        x = torch.ones(3, H).bfloat16()
        place.buffer.dispatch_with_permute(hidden=x, routing_map=one)  # K is 8 from now on
        with pytest.raises(MoeP2pError, match=f"a token of routing_map has {E} experts, calls of"):
            place.buffer.dispatch_with_permute(hidden=x, routing_map=torch.ones_like(one))

    def other(place: Place) -> None:
        with pytest.raises(MoeP2pError, match="the routing is of 6 experts, 1 ranks have 12 each"):
            place.buffer.dispatch_with_permute(
                hidden=torch.ones(3, H).bfloat16(), routing_map=torch.ones(3, 6).bool()
            )

    run(1, check)
    run(1, other)


def check_too_few_rows(place: Place, pad: int | None) -> None:
    """Some ranks exceed the budget: their last rows are dropped, and nothing else is missing."""
    num_ranks, budget = place.rank.world_size, 12
    local, last = E // num_ranks, 0
    for seed in range(4):
        tokens = place.all_tokens(seed, (7,))
        mine = tokens[place.rank.rank]
        expected, probs, per_expert = wanted(place, tokens, pad or 1)
        rows, row_probs, _, of_expert, handle = place.buffer.dispatch_with_permute(
            **place.put(mine), num_permuted_tokens=budget, non_blocking=True, pad_multiple=pad
        )
        ends = torch.tensor([0, *per_expert]).cumsum(0).clamp(max=budget)
        assert of_expert.tolist() == ends.diff().tolist()
        assert int(handle[-1]) == int(sum(per_expert) > budget)
        last += int(handle[-1])
        num = min(budget, len(expected))
        assert torch.equal(rows[:num].cpu(), expected[:num])
        assert row_probs is not None
        assert torch.equal(row_probs[:num].cpu(), probs[:num])
        out, back = place.buffer.combine_with_unpermute(
            hidden=rows, probs=row_probs, handle=handle, pad_multiple=pad
        )
        left = torch.zeros(7, E)
        for rank in range(num_ranks):
            at = 0
            for expert in range(rank * local, (rank + 1) * local):
                for source, of_source in enumerate(tokens):
                    for token in of_source.map[:, expert].nonzero().flatten().tolist():
                        if source == place.rank.rank:
                            left[token, expert] = at < budget
                        at += 1
                at += -at % (pad or 1)
        assert torch.equal(out.cpu(), mine.x * left.sum(1, keepdim=True).bfloat16())
        assert back is not None
        assert torch.equal(back.cpu(), mine.probs * left)
        again = place.buffer.dispatch_with_permute(
            hidden=place.put(mine)["hidden"] * 2, handle=handle, pad_multiple=pad
        )[0]
        assert torch.equal(again[:num].cpu(), expected[:num] * 2)
    assert last > 0


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_past_the_budget_are_dropped(num_ranks: int, pad: int | None) -> None:
    run(num_ranks, lambda place: check_too_few_rows(place, pad))


@pytest.mark.parametrize("per_node", [1, 2])
def test_rows_past_the_budget_are_dropped_between_nodes(
    per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: per_node)
    run(4, lambda place: check_too_few_rows(place, None))


def on_gpu(rank: Rank, _: World) -> None:
    place = open_place(rank, "cuda")
    check_too_few_rows(place, 4)
    check_rows(place, True, 4, (5, 9))
    check_rows(place, False, None, (7,))


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2)))
def test_on_gpus(world: World) -> None:
    gpu_ranks.run(world, on_gpu, processes=True, deadline_s=500.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_most_experts_of_a_token_are_of_maps_that_have_any(num_ranks: int) -> None:
    """A first call without tokens made K 8 for ever; a token with more was refused by the text
    `topk_idx[0, 0] is 32`, where no caller had passed topk_idx."""
    experts = 32

    def body(rank: Rank) -> None:
        group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
        buffer = deep_ep.HybridEPBuffer(group, H, 8, experts // num_ranks)

        def pair(tokens: int, most: int) -> None:
            x = torch.arange(tokens * H).view(tokens, H).bfloat16()
            chosen = torch.zeros(tokens, experts, dtype=torch.bool)
            chosen[:, -most:] = True
            rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen)
            out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
            torch.testing.assert_close(out.float(), x.float() * most, rtol=2**-7, atol=0)

        pair(0, 1)
        pair(3, 13)
        pair(3, 16)
        with pytest.raises(InvalidArgumentError, match="a token of routing_map has 17 experts, "
                           "calls of this buffer take 16: the most in the first maps"):  # fmt: skip
            pair(1, 17)
        pair(2, 16)  # nothing was sent

    run_threads(num_ranks, body)
