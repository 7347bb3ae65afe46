"""Masked ranks, on CPUs and GPUs: expected results of the others, bit for bit.

A lost rank sends no tokens, and no token goes to its experts. So the reference runs without its
tokens, and with its experts removed from the others' routing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_p2p
from moe_p2p import AllToAll, CombineOptions, DispatchOptions
from moe_p2p.moe.reference import Tokens, Topology
from tests.support import cases
from tests.support.cases import COUNTS, Wanted
from tests.support.ranks import Rank

HOLDING = [{}, {"layout": "grouped"}, {"layout": "by_rank"}, {"solo": True}]  # of dispatch, in turn


def tokens_of(topology: Topology, hidden_dim: int, seed: int) -> list[Tokens]:
    counts = COUNTS[seed % len(COUNTS)] * 2
    shape = {"num_experts": topology.num_experts, "hidden_dim": hidden_dim}
    return [cases.make_tokens(seed, r, counts[r], **shape) for r in range(topology.world_size)]


def tokens_by(comm: AllToAll, seed: int) -> Tokens:
    return tokens_of(cases.topology_of(comm), comm.config.hidden_dim, seed)[comm.rank]


def without(topology: Topology, tokens: list[Tokens], gone: Iterable[int]) -> list[Tokens]:
    """Returns a call's tokens without these ranks' tokens and experts."""
    lost = torch.cat([topology.local_experts(rank) for rank in gone] or [torch.empty(0)])
    left = [
        dataclasses.replace(t, topk_idx=t.topk_idx.masked_fill(torch.isin(t.topk_idx, lost), -1))
        for t in tokens
    ]
    for rank in gone:
        left[rank] = cases.make_tokens(0, rank, 0, hidden_dim=tokens[rank].x.shape[1])
    return left


def expect_without(comm: AllToAll, seed: int, gone: Iterable[int], **options: Any) -> Wanted:
    config = comm.config
    given = cases.topology_of(comm), config.hidden_dim, config.max_tokens
    return _expected(*given, seed, tuple(gone), tuple(options.items()))


@functools.cache  # shared by ranks that are threads: none waits for it in a call
def _expected(
    topology: Topology,
    hidden_dim: int,
    max_tokens: int,
    seed: int,
    gone: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
) -> Wanted:
    tokens = without(topology, tokens_of(topology, hidden_dim, seed), gone)
    return cases.expect(topology, tokens, max_tokens=max_tokens, **dict(options))


def given_by(comm: AllToAll, seed: int, **options: Any) -> dict[str, Any]:
    """Returns this rank's arguments of dispatch: all its tokens, also for lost ranks' experts."""
    mine = tokens_by(comm, seed)
    names = ("x", "topk_idx", "topk_weights")
    arguments = {name: cases.on_device(comm, getattr(mine, name)) for name in names}
    return cases.in_options(**arguments, with_source=True, **options)


def step(comm: AllToAll, seed: int, gone: Iterable[int]) -> None:
    """Dispatches and combines without these ranks, which are masked or lost."""
    options = HOLDING[seed % len(HOLDING)]
    wanted = expect_without(comm, seed, gone, **options)
    live = comm.dispatch(**given_by(comm, seed, **options))
    cases.finish(comm)
    cases.assert_received(cases.on_cpu(live), wanted.received[comm.rank])
    check_sums(comm, live, wanted, seed)


def check_sums(comm: AllToAll, live: Any, wanted: Wanted, seed: int) -> None:
    """Combines with dispatch's weights, or, in turn, with late weights."""
    given = cases.combine_arguments(comm, wanted)
    mine = tokens_by(comm, seed)
    if seed % 3 == 1 and live.row_topk is None:
        given["topk_weights"] = cases.on_device(comm, mine.topk_weights)
    out = comm.combine(dispatched=live, **given)
    cases.finish(comm)
    assert torch.equal(out.cpu(), wanted.out[comm.rank])


def last_step(
    comm: AllToAll,
    seed: int,
    gone: Iterable[int],
    dying: Iterable[int],
    then: Callable[[], None] = lambda: None,
    *,
    poisoned: bool = False,
) -> int:
    """Ranks `dying` end between dispatch and combine; their dispatch arrives whole or not.

    then: called between the two. poisoned: sums that lack something are NaN. Returns how many do.
    """
    gone, dying = list(gone), list(dying)
    mine = expect_without(comm, seed, [*gone, *dying])
    live = comm.dispatch(**given_by(comm, seed))
    cases.finish(comm)
    got = cases.on_cpu(live)
    came = set(got.source[:, 0].tolist()) & set(dying) if got.source is not None else set()
    here = expect_without(comm, seed, [*gone, *(set(dying) - came)])
    cases.assert_received(got, here.received[comm.rank])
    then()
    out = comm.combine(
        dispatched=live, y=cases.on_device(comm, here.y[comm.rank]), out_dtype=here.out_dtype
    )
    cases.finish(comm)
    topology, sums = cases.topology_of(comm), mine.out[comm.rank].clone()
    owned = torch.cat([topology.local_experts(rank) for rank in dying])
    lacking = torch.isin(tokens_by(comm, seed).topk_idx, owned).any(1)
    if poisoned:
        assert out.cpu()[lacking].isnan().all()
    else:
        assert torch.equal(out.cpu(), sums)
    assert torch.equal(out.cpu()[~lacking], sums[~lacking])
    return int(lacking.sum())


def masks_of(comm: AllToAll) -> list[int]:
    masked: Tensor = comm.masked.cpu()
    return masked.nonzero().flatten().tolist()


def lose_before_backward(rank: Rank, comm: AllToAll, by_rank: bool) -> None:
    """Rank 1 leaves between a combine and its backward pass: rank 0 raises, or has NaN on a GPU.

    The rows of rank 2 would move up to where those of rank 1 were. The pass before it is exact.
    """
    layout = "by_rank" if by_rank else "grouped"
    config = comm.config
    shape = {"num_experts": config.num_experts, "hidden_dim": config.hidden_dim}
    mine = cases.make_tokens(5, comm.rank, 4, **shape)
    topk_idx = cases.on_device(comm, mine.topk_idx)
    for last in (False, True):
        x = cases.on_device(comm, mine.x).requires_grad_()
        live = comm.dispatch(x, topk_idx, options=DispatchOptions(layout=layout))
        y = (live.x.detach() * 1.0).requires_grad_()
        out = comm.combine(y, live, options=None if by_rank else CombineOptions(weighted=False))
        cases.finish(comm)
        name = f"rank {{}} has combined, last: {last}"
        rank.store.set(name.format(comm.rank), "")
        rank.store.wait([name.format(r) for r in range(3)], timedelta(seconds=40))
        if last and comm.rank == 1:
            return
        if last:
            comm.mask_ranks([1])
        if last and not config.on_gpu:
            with pytest.raises(moe_p2p.PeerDeadError, match="rank 1 was lost or came back between"):
                out.sum().backward()
        else:
            out.sum().backward()
            cases.finish(comm)
            assert y.grad is not None
            rows = y.grad[: int(live.offsets[-1])]  # behind them lies what the memory held
            assert rows.isnan().all() if last else not rows.isnan().any()
            assert last or len(rows) > 0
