"""Dispatch and combine on GPUs of one node, bit for bit as the reference has them.

Each rank is a process with a device of its own; worlds larger than the machine are skipped.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from cases import check_step, make, make_tokens
from moe_p2p import errors
from ranks import Rank, run_processes

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device")]

WORLDS = [
    pytest.param(
        size,
        marks=pytest.mark.skipif(size > NUM_DEVICES, reason=f"needs {size} CUDA devices"),
    )
    for size in (1, 2, 3, 4, 8)
]


def on_device(rank: Rank, body: Any, *arguments: Any) -> Any:
    torch.cuda.set_device(rank.rank)
    return body(rank, *arguments)


def run(world_size: int, body: Any, *arguments: Any, **options: Any) -> list[Any]:
    return run_processes(world_size, on_device, body, *arguments, **options)


def gpu(rank: Rank, **overrides: Any) -> Any:
    experts = 8 * rank.world_size
    return make(rank, **({"device": "cuda", "num_experts": experts} | overrides))


def every_format(rank: Rank) -> None:
    experts, world = 8 * rank.world_size, rank.world_size

    def tokens(seed: int, dtype: torch.dtype, hidden: int) -> list[Any]:
        return [
            make_tokens(
                seed,
                r,
                (seed * 5 + r * 3) % 13,
                dtype=dtype,
                num_experts=experts,
                hidden_dim=hidden,
            )
            for r in range(world)
        ]

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for hidden in (48, 7168):
            with gpu(rank, dtype=dtype, combine_dtype=torch.float32, hidden_dim=hidden) as comm:
                for step in range(6):
                    options: dict[str, Any] = {"quantize": step % 3 == 2}
                    if step % 2:
                        options |= {"layout": "grouped", "alignment": 4}
                    check_step(comm, tokens(step, dtype, hidden), **options)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_format_is_the_reference_bit_for_bit(world_size: int) -> None:
    run(world_size, every_format, deadline_s=240.0)


def two_hundred_steps(rank: Rank) -> None:
    experts = 8 * rank.world_size
    with gpu(rank, dtype=torch.bfloat16, max_tokens=40) as comm:
        for step in range(200):
            counts = [(step * 7 + r * 11) % 41 for r in range(rank.world_size)]
            tokens = [
                make_tokens(step, r, n, dtype=torch.bfloat16, num_experts=experts)
                for r, n in enumerate(counts)
            ]
            if step % 20 == 3:  # all to one expert
                for t in tokens:
                    t.topk_idx[:] = -1
                    t.topk_idx[:, 0] = step % experts
            check_step(comm, tokens)


@pytest.mark.parametrize("world_size", WORLDS)
def test_two_hundred_steps_of_changing_counts(world_size: int) -> None:
    run(world_size, two_hundred_steps, deadline_s=240.0)


def graph(rank: Rank) -> None:
    experts = 8 * rank.world_size
    with gpu(rank, dtype=torch.bfloat16, max_tokens=32) as comm:
        x = torch.zeros(32, 48, dtype=torch.bfloat16, device="cuda")
        idx = torch.full((32, 3), -1, dtype=torch.int64, device="cuda")
        count = torch.zeros(1, dtype=torch.int32, device="cuda")

        def pair() -> torch.Tensor:
            got = comm.dispatch(x, idx, num_tokens=count)
            return comm.combine(got.x, got)

        pair()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            out = pair()
        for step in range(20):
            n = (step * 5 + rank.rank) % 33
            made = make_tokens(step, rank.rank, n, dtype=torch.bfloat16, num_experts=experts)
            x[:n].copy_(made.x)
            idx[:n].copy_(made.topk_idx)
            count.fill_(n)
            captured.replay()
            times = (made.topk_idx >= 0).sum(1, keepdim=True)
            # Up to three equal values: the sum of two is exact, that of three rounds once in fp32
            # and once to bfloat16, whatever the order.
            torch.testing.assert_close(
                out[:n].cpu().float(), made.x.float() * times, rtol=2**-7, atol=0
            )
            assert not out[n:].any()


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_captured_graph_follows_inputs_and_counts(world_size: int) -> None:
    run(world_size, graph, deadline_s=120.0)


def halves_and_release(rank: Rank) -> None:
    with gpu(rank, dtype=torch.bfloat16) as comm:
        for step in range(10):
            made = [
                make_tokens(
                    2 * step + i,
                    rank.rank,
                    7,
                    dtype=torch.bfloat16,
                    num_experts=8 * rank.world_size,
                )
                for i in range(2)
            ]
            sent = [comm.dispatch_send(m.x.cuda(), m.topk_idx.cuda()) for m in made]
            got = [comm.dispatch_recv(s) for s in sent]
            pending = [comm.combine_send(g.x, g) for g in got]
            outs = [comm.combine_recv(p) for p in pending]
            for m, out in zip(made, outs, strict=True):
                times = (m.topk_idx >= 0).sum(1, keepdim=True)
                torch.testing.assert_close(
                    out.cpu().float(), m.x.float() * times, rtol=2**-7, atol=0
                )
            dropped = comm.dispatch(made[0].x.cuda(), made[0].topk_idx.cuda())
            comm.release(dropped)


@pytest.mark.parametrize("world_size", WORLDS)
def test_two_steps_in_flight_and_released_ones(world_size: int) -> None:
    run(world_size, halves_and_release, deadline_s=120.0)


def lonely(rank: Rank) -> str:
    comm = gpu(rank, timeout_s=2.0)
    x = torch.zeros(1, 48, device="cuda")
    idx = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
    idx[:, 1:] = -1
    rank.store.add("ready", 1)
    if rank.rank == rank.world_size - 1:
        while rank.store.add("told", 0) < rank.world_size - 1:
            time.sleep(0.01)
        return ""
    comm.dispatch(x, idx)
    torch.cuda.synchronize()
    with pytest.raises(errors.TimeoutError) as caught:
        comm.dispatch(x, idx)
    assert torch.ones(3, device="cuda").sum().item() == 3  # the context lives
    rank.store.add("told", 1)
    return str(caught.value)


@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_a_rank_that_does_not_come_is_named(world_size: int) -> None:
    stories = run(world_size, lonely, deadline_s=60.0)
    for story in stories[:-1]:
        assert f"waiting for rank {world_size - 1}" in story
