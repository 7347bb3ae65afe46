"""Communicators, tokens and experts that several tests share, and comparison with the reference.

Symbols: W ranks, T rows of one rank's x, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, Dispatched, reference
from moe_p2p.reference import Received, Tokens, Topology
from ranks import Rank

HIDDEN_DIM = 48
TOPK = 3
SMALL = {
    "num_experts": 8,
    "hidden_dim": HIDDEN_DIM,
    "topk": TOPK,
    "max_tokens": 12,
    "dtype": torch.float32,
    "timeout_s": 20.0,
    "num_threads": 1,
}


def make(rank: Rank, **overrides: Any) -> AllToAll:
    """A small communicator of all ranks."""
    engine = overrides.pop("engine", None)
    config = AllToAllConfig(**(SMALL | overrides))
    return AllToAll(rank.store, config, rank=rank.rank, world_size=rank.world_size, engine=engine)


def topology_of(comm: AllToAll) -> Topology:
    return Topology(
        world_size=comm.world_size,
        ranks_per_node=comm.ranks_per_node,
        num_experts=comm.config.num_experts,
        expert_rank=comm.config.expert_rank,
    )


def make_tokens(
    seed: int,
    rank: int,
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    topk: int = TOPK,
    num_experts: int = 8,
    hidden_dim: int = HIDDEN_DIM,
) -> Tokens:
    """Tokens of one rank; every rank can make those of all others. Some entries name no expert."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    weights, idx = torch.rand(count, num_experts, generator=generator).topk(topk, dim=1)
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    x = torch.randn(count, hidden_dim, generator=generator).to(dtype)
    return Tokens(x=x, topk_idx=idx, topk_weights=weights)


def expert(number: int, x: Tensor) -> Tensor:
    """Different for every expert, and no two of them commute."""
    return (x.float() * (0.5 + 0.25 * number) + math.sin(number)).to(x.dtype)


def apply_experts(topology: Topology, rank: int, received: Received) -> Tensor:
    """Expert outputs in the rows of `received`; the other rows hold one that must not leak."""
    y = torch.full_like(received.x.reshape(-1, received.x.shape[-1]), 1e4)
    flat = received.x.reshape(y.shape)
    for i, number in enumerate(topology.local_experts(rank).tolist()):
        start = int(received.offsets[i])
        rows = slice(start, start + int(received.counts[i]))
        y[rows] = expert(number, flat[rows])
    return y


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def flat_rows(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.reshape(like.numel(), tensor.shape[-1])


def assert_received(got: Dispatched, expected: Received) -> None:
    """Rows that hold a token agree bit for bit; what lies in the others is nobody's business."""
    assert torch.equal(got.counts, expected.counts)
    assert torch.equal(got.offsets, expected.offsets)
    rows = expected.rows()
    assert got.x.shape == expected.x.shape
    assert got.x.dtype == expected.x.dtype
    assert torch.equal(got.row_weights[rows], expected.row_weights[rows])
    pairs = [(got.x, expected.x), *zip(got.extras, expected.extras, strict=True)]
    if expected.scales is not None:
        assert got.scales is not None
        pairs.append((got.scales, expected.scales))
    else:
        assert got.scales is None
    for mine, theirs in pairs:
        weights = expected.row_weights
        assert torch.equal(
            bits(flat_rows(mine, weights)[rows]), bits(flat_rows(theirs, weights)[rows])
        )
    if got.source is not None:
        assert torch.equal(got.source[rows], expected.source[rows])


def check_step(comm: AllToAll, tokens: list[Tokens], **options: Any) -> tuple[Dispatched, Tensor]:
    """Dispatch and combine of `tokens` (of all ranks), bit for bit as the reference has them.

    The results lie on the CPU, wherever `comm` works.
    """
    topology, mine = topology_of(comm), tokens[comm.rank]
    layout = options.get("layout", "padded")
    max_tokens = options.pop("max_tokens", comm.config.max_tokens)
    routing = reference.route(
        topology,
        tokens,
        layout=layout,
        capacity=options.get("capacity"),
        alignment=options.get("alignment", 1),
        max_tokens=max_tokens,
        quantized=options.get("quantize", False),
    )
    expected = [reference.dispatch(routing, rank) for rank in range(comm.world_size)]
    device = comm.config.device

    def there(tensor: Tensor | int | None) -> Any:
        return tensor.to(device) if isinstance(tensor, Tensor) else tensor

    live = comm.dispatch(
        there(mine.x),
        there(mine.topk_idx),
        there(mine.topk_weights),
        scales=there(mine.scales),
        extras=[there(extra) for extra in mine.extras],
        num_tokens=there(mine.num_tokens),
        max_tokens=max_tokens,
        with_source=True,
        **options,
    )
    got = _on_cpu(live)
    assert_received(got, expected[comm.rank])
    out_dtype = mine.x.dtype
    if out_dtype == torch.float8_e4m3fn or options.get("quantize"):
        out_dtype = torch.bfloat16
    y = [
        apply_experts(topology, rank, _decoded(received, out_dtype))
        for rank, received in enumerate(expected)
    ]
    out = comm.combine(there(y[comm.rank].reshape(got.x.shape)), live, out_dtype=out_dtype).cpu()
    want = reference.combine(routing, comm.rank, y, out_dtype=out_dtype)
    assert torch.equal(out, want)
    return got, out


def _on_cpu(got: Dispatched) -> Dispatched:
    moved = {
        name: value.cpu() for name, value in got._asdict().items() if isinstance(value, Tensor)
    }
    return got._replace(**moved, extras=tuple(extra.cpu() for extra in got.extras))


def _decoded(received: Received, dtype: torch.dtype) -> Received:
    """`received` with rows of a type that experts can compute with."""
    if received.x.dtype != torch.float8_e4m3fn:
        return received
    x = received.x.float()
    if received.scales is not None:
        x = reference.dequantize(received.x, received.scales)
    return Received(**{**received.__dict__, "x": x.to(dtype)})


def memfd(text: str) -> int:
    """A new anonymous file that holds `text`."""
    fd = os.memfd_create("test")
    os.pwrite(fd, text.encode(), 0)
    return fd
