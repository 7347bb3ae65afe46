"""Plans for NIXL EP's Buffer: which ranks take part in each phase, who comes, leaves and is killed.

A process has a rank and a first phase. Rows and sums of each step are compared with what the ranks
that are not masked send, each expert with a factor and each (token, expert) with a weight of its
own. Symbols: E experts of a rank, T tokens of a rank, K top-k, H hidden size.
"""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_p2p.nixl_ep import Buffer
from tests.support.ranks import Rank

E, T, K, H = 2, 8, 3, 256
# Partial sums travel as block16 (2^-14.4 of the largest of 8 neighbours, whose values are alike),
# rows and sums as bfloat16: three roundings of 2^-9, of terms of one sign.
NEAR: dict[str, Any] = {"rtol": 3 * 2**-8, "atol": 1e-3}


class Phase(NamedTuple):
    """active: ranks that take part, in the end. killed: of them before, killed in a step."""

    active: tuple[int, ...]
    killed: tuple[int, ...] = ()


class Process(NamedTuple):
    rank: int
    first: int = 0  # phase


def tokens_of(rank: int, seed: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], topk_idx [T, K], weights [T, K]."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scores = torch.rand(T, num_experts, generator=generator)
    topk_idx = scores.topk(min(K, num_experts)).indices
    topk_idx[seed % T, 0] = -1
    value = torch.arange(T) + 16 * (rank + 1)  # exact in bfloat16 and, times 2^n, in e4m3
    x = value.view(T, 1).expand(T, H).to(torch.bfloat16).contiguous()
    return x, topk_idx, torch.rand(topk_idx.shape, generator=generator) + 0.5


def masked(buffer: Buffer, device: str = "cpu") -> list[int]:
    status = torch.full((buffer.group_size,), -1, dtype=torch.int32, device=device)
    buffer.query_mask_buffer(status)
    assert set(status.tolist()) <= {0, 1}
    return status.nonzero().flatten().tolist()


def step(
    buffer: Buffer, seed: int, num_experts: int | None, dies: str = "", device: str = "cpu"
) -> None:
    """One dispatch and combine, compared. dies: where this process kills itself."""
    here = set(range(buffer.group_size)) - set(masked(buffer, device))
    top = num_experts or (max(here) + 1) * E
    x, topk_idx, weights = tokens_of(buffer.rank, seed, top)
    hooked, fp8 = seed % 2 == 1, seed % 3 == 2
    if dies == "dispatch":
        os.kill(os.getpid(), signal.SIGKILL)
    rows, counts, handle, _, hook = buffer.dispatch(
        x.to(device), topk_idx.to(device), T, num_experts, use_fp8=fp8, return_recv_hook=hooked
    )
    if hook is not None:
        hook()
    gone = masked(buffer, device)
    if isinstance(rows, tuple):
        rows = (rows[0].float().unflatten(-1, (-1, 128)) * rows[1].unsqueeze(-1)).flatten(-2)
    src_info, ranges, _, _ = handle
    values, counts, src_info, ranges = (t.cpu() for t in (rows, counts, src_info, ranges))
    assert values.shape == (E, top // E * T, H)
    assert ranges.shape == (E, top // E)
    y = torch.full(values.shape, float("nan"), dtype=torch.bfloat16)  # past counts nobody looks
    for local in range(E):
        expert = buffer.rank * E + local
        wanted, places = list[Tensor](), list[int]()
        for source in range(top // E):
            if source in gone:
                assert int(ranges[local, source]) & 0xFFFFFFFF == 0
                continue
            sx, sidx, _ = tokens_of(source, seed, top)
            here = (sidx == expert).any(1).nonzero().flatten()
            begin, count = int(ranges[local, source]) >> 32, int(ranges[local, source]) & 0xFFFFFFFF
            assert (begin, count) == (len(places), len(here))
            wanted.append(sx[here].float())
            places += here.tolist()
        total = int(counts[local])
        assert total == len(places)
        assert src_info[local, :total].tolist() == places
        got = values[local, :total].float()
        torch.testing.assert_close(got, torch.cat(wanted), rtol=2**-4 if fp8 else 0, atol=0)
        y[local, :total] = (got * (expert + 1)).to(torch.bfloat16)
    if dies == "combine":
        os.kill(os.getpid(), signal.SIGKILL)
    out = torch.empty(T, H, dtype=torch.bfloat16, device=device)
    given = (y.to(device), topk_idx.to(device), weights.to(device))
    sums, _, hook = buffer.combine(*given, handle, return_recv_hook=hooked, out=out)
    if hook is not None:
        hook()
    assert sums is out
    lost = torch.tensor(masked(buffer, device), dtype=torch.int64)
    kept = weights.masked_fill((topk_idx < 0) | torch.isin(topk_idx // E, lost), 0)
    factor = (kept * (topk_idx + 1)).sum(1)
    sent = x.float()
    if fp8:  # as it arrives: of one value in a row
        sent = (x.float() * (448 / x.float())).to(torch.float8_e4m3fn).float() * (x.float() / 448)
    torch.testing.assert_close(sums.float().cpu(), sent * factor.view(T, 1), **NEAR)


def begin(store: Store, rank: int, num_ranks: int, **options: Any) -> Buffer:
    fields: dict[str, Any] = {"explicitly_destroy": True, "timeout_ms": 60_000} | options
    buffer = Buffer(rank=rank, tcp_store_group=store, **fields)
    buffer.update_memory_buffers(num_ranks, E, 0)
    return buffer


def run_plan(
    rank: Rank,
    plan: list[Phase],
    processes: list[Process],
    options: dict[str, Any],
    device: str = "cpu",
) -> str:
    """One process of the plan; returns how it ended."""
    seat, first = processes[rank.rank]
    num_ranks = 1 + max(r for phase in plan for r in (*phase.active, *phase.killed))
    store = rank.store
    if first:  # the process before it has left
        store.wait([f"phase {first - 1} is over"])
    buffer = begin(store, seat, num_ranks, **options)
    before: set[int] = set()
    for number, phase in enumerate(plan[first:], first):
        there = {*phase.active, *phase.killed}
        if seat not in there:
            buffer.destroy()
            return "left"
        if new := sorted(there - before - {seat}):
            buffer.connect_ranks(new)
        if gone := sorted(before - there):
            buffer.disconnect_ranks(gone)
        assert masked(buffer, device) == sorted(set(range(num_ranks)) - there)
        num_experts = E * (max(there) + 1)
        for index in range(6):
            kill = seat in phase.killed and index == 3
            dies = ("dispatch", "combine")[number % 2] if kill else ""
            step(buffer, 10 * number + index, (num_experts, None)[index % 2], dies, device)
        assert masked(buffer, device) == sorted(set(range(num_ranks)) - set(phase.active))
        if phase.killed:
            buffer.disconnect_ranks(list(phase.killed))
        before = set(phase.active)
        buffer.barrier()
        if seat == min(phase.active):
            store.set(f"phase {number} is over", "")
    buffer.destroy()
    return "done"
