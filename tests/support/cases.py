"""Communicators, tokens and experts that several tests share, and comparison with the reference.

Symbols: W ranks, T rows of one rank's x, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from moe_p2p import (
    AllToAll,
    AllToAllConfig,
    CombineOptions,
    Dispatched,
    DispatchOptions,
    MoeP2pError,
)
from moe_p2p.moe import reference
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.reference import Received, Tokens, Topology
from tests.support.ranks import DiedError, Rank

HIDDEN_DIM = 48
TOPK = 3
SMALL: dict[str, Any] = {
    "num_experts": 8,
    "hidden_dim": HIDDEN_DIM,
    "topk": TOPK,
    "max_tokens": 12,
    "dtype": torch.float32,
    "timeout_s": 20.0,
    "num_threads": 1,
}

LAYOUTS = get_args(RowLayout)
GROUPS = [(1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (6, 3)]
# Tokens of rank r in step s: COUNTS[s][r]. Steps with 0 tokens on some or all ranks, or the most.
COUNTS = [[5, 3, 0, 12, 1, 7], [0] * 6, [12] * 6, [0, 0, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6]]


def make(rank: Rank, **overrides: Any) -> AllToAll:
    """A small communicator of all ranks."""
    names = ("engine", "masked", "gone")
    more = {name: overrides.pop(name) for name in names if name in overrides}
    config = AllToAllConfig(**(SMALL | overrides))
    return AllToAll(rank.store, config, rank=rank.rank, world_size=rank.world_size, **more)


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
    """Tokens of one rank; every rank can make any rank's. Some entries name no expert."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    weights, idx = torch.rand(count, num_experts, generator=generator).topk(topk, dim=1)
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    x = torch.randn(count, hidden_dim, generator=generator).to(dtype)
    return Tokens(x=x, topk_idx=idx, topk_weights=weights)


def expert(number: int, x: Tensor) -> Tensor:
    """A function of its own for every expert; no two of them commute."""
    return (x.float() * (0.5 + 0.25 * number) + math.sin(number)).to(x.dtype)


def apply_experts(topology: Topology, rank: int, received: Received) -> Tensor:
    """Expert outputs in the rows of `received`; other rows hold a value that must not leak."""
    y = torch.full_like(received.x.reshape(-1, received.x.shape[-1]), 1e4)
    flat = received.x.reshape(y.shape)
    if received.row_topk is not None:
        y[received.rows()] = sum_of_experts(topology, rank, received)
        return y
    for i, number in enumerate(topology.local_experts(rank).tolist()):
        start = int(received.offsets[i])
        rows = slice(start, start + int(received.counts[i]))
        y[rows] = expert(number, flat[rows])
    return y


def sum_of_experts(topology: Topology, rank: int, received: Received) -> Tensor:
    """For rows by rank with a token: the weighted sum over this rank's experts, k ascending."""
    assert received.row_topk is not None
    rows = received.rows()
    x, total = received.x[rows], torch.zeros(len(rows), received.x.shape[-1])
    for k in range(received.row_topk.shape[1]):
        for i, number in enumerate(topology.local_experts(rank).tolist()):
            hit = (received.row_topk[rows, k] == i).nonzero().flatten()
            total[hit] += received.row_weights[rows[hit], k, None] * expert(number, x[hit]).float()
    return total.to(x.dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_combined(got: Tensor, expected: Tensor) -> None:
    """Asserts equal bits, so that 0.0 differs from -0.0; all NaNs are equal."""
    assert got.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(bits(got.masked_fill(nan, 0)), bits(expected.masked_fill(nan, 0)))


NO_NUMBERS = (math.nan, math.inf, -math.inf, -0.0)


def with_no_numbers(tokens: Tokens, rank: int) -> Tokens:
    """Puts one of NO_NUMBERS into each of tokens 0, 1, ..., and all into token 4's last block."""
    x = tokens.x.clone()
    for row, value in zip(x, NO_NUMBERS, strict=False):
        row[3 + rank] = value
    for row in x[4:5]:
        row[-5:-1] = torch.tensor(NO_NUMBERS)
    return replace(tokens, x=x)


def negative_zeros(topology: Topology, rank: int, received: Received) -> Tensor:
    """Experts for `expect`, all -0.0: sums begin at 0.0, so they are 0.0."""
    return torch.full_like(received.x.reshape(-1, received.x.shape[-1]), -0.0)


def flat_rows(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.reshape(like.shape[0], tensor.shape[-1])


def assert_received(got: Dispatched, expected: Received) -> None:
    """Asserts that rows with a token agree bit for bit; other rows are not compared."""
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
    if got.ranges is not None:
        assert torch.equal(got.ranges, expected.ranges)
    assert (got.row_topk is None) == (expected.row_topk is None)
    if got.row_topk is not None and expected.row_topk is not None:  # rows without a token too
        assert torch.equal(got.row_topk, expected.row_topk.to(got.row_topk.dtype))
        assert torch.equal(got.row_weights, expected.row_weights)


@dataclass(frozen=True)
class Wanted:
    """One call of all ranks, and the reference's results, in rank order.

    Ranks that are threads share one: computing it takes longer than the call.
    """

    tokens: list[Tokens]
    options: dict[str, Any]  # of dispatch
    received: list[Received]
    y: list[Tensor]  # rows of combine, flat
    out: list[Tensor]
    out_dtype: torch.dtype


def expect(
    topology: Topology,
    tokens: list[Tokens],
    *,
    max_tokens: int,
    experts: Callable[[Topology, int, Received], Tensor] = apply_experts,
    **options: Any,
) -> Wanted:
    """experts: (topology, rank, rows in a type for arithmetic) -> rows of combine."""
    routing = reference.route(
        topology,
        tokens,
        layout=options.get("layout", "padded"),
        capacity=options.get("capacity"),
        alignment=options.get("alignment", 1),
        max_tokens=max_tokens,
        quantized=options.get("quantize", False),
        scale_format=options.get("scale_format", "float32"),
    )
    ranks = range(topology.world_size)
    received = [reference.dispatch(routing, rank) for rank in ranks]
    out_dtype = tokens[0].x.dtype
    if out_dtype == torch.float8_e4m3fn or options.get("quantize"):
        out_dtype = torch.bfloat16
    y = [experts(topology, rank, _decoded(received[rank], out_dtype)) for rank in ranks]
    out = [reference.combine(routing, rank, y, out_dtype=out_dtype) for rank in ranks]
    return Wanted(tokens, options | {"max_tokens": max_tokens}, received, y, out, out_dtype)


def biases_of(rank: int, like: Tensor, num_biases: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(90 + rank)
    made = torch.randn(num_biases, *like.shape, generator=generator).to(like.dtype)
    return list(made.unbind())


def given_biases(comm: AllToAll, wanted: Wanted, num_biases: int) -> dict[str, Any]:
    """Arguments of combine: none, one or two biases."""
    made = biases_of(comm.rank, wanted.out[comm.rank], num_biases) if num_biases else []
    bias = [on_device(comm, each) for each in made]
    return {"bias": bias[0] if num_biases == 1 else tuple(bias)} if bias else {}


def sums_of(
    topology: Topology, wanted: Wanted, num_biases: int = 0, **options: Any
) -> list[Tensor]:
    """What the reference's combine makes of `wanted` with these options, by rank."""
    layout, most = wanted.options.get("layout", "padded"), wanted.options["max_tokens"]
    routing = reference.route(topology, wanted.tokens, layout=layout, max_tokens=most)
    return [
        reference.combine(
            routing,
            rank,
            wanted.y,
            out_dtype=wanted.out_dtype,
            bias=biases_of(rank, wanted.out[rank], num_biases) if num_biases else (),
            **options,
        )
        for rank in range(topology.world_size)
    ]


def scalars_of(comm: AllToAll, wanted: Wanted, got: Dispatched) -> tuple[Tensor, Tensor]:
    """Row scalars that are the weights, and what comes back: each (token, k) has its own."""
    mine, rows = wanted.tokens[comm.rank], got.row_weights
    assert mine.topk_weights is not None
    if got.row_topk is not None:
        rows = rows.where(got.row_topk >= 0, 0.0)
    return rows, mine.topk_weights.where(mine.topk_idx >= 0, 0.0)


def on_device(comm: AllToAll, value: Any) -> Any:
    return value.to(comm.config.device) if isinstance(value, Tensor) else value


OPTIONS = {option.name for option in dataclasses.fields(DispatchOptions) if option.init}


def in_options(**given: Any) -> dict[str, Any]:
    """Moves options, given by their names, into options=, as dispatch takes them."""
    options = {name: value for name, value in given.items() if name in OPTIONS}
    rest = {name: value for name, value in given.items() if name not in OPTIONS}
    return rest | {"options": DispatchOptions(**options)}


def dispatch_arguments(comm: AllToAll, wanted: Wanted, **more: Any) -> dict[str, Any]:
    """Returns this rank's arguments of dispatch or dispatch_send. more: replace `wanted`'s."""
    mine = wanted.tokens[comm.rank]
    given = {
        "x": on_device(comm, mine.x),
        "topk_idx": on_device(comm, mine.topk_idx),
        "topk_weights": on_device(comm, mine.topk_weights),
        "scales": on_device(comm, mine.scales),
        "extras": [on_device(comm, extra) for extra in mine.extras],
        "num_tokens": mine.num_tokens,
        "with_source": True,
        **wanted.options,
        **more,
    }
    return in_options(**given)


def combine_arguments(comm: AllToAll, wanted: Wanted, **options: Any) -> dict[str, Any]:
    """Returns this rank's arguments of combine or combine_send, without `dispatched`.

    options: of CombineOptions.
    """
    how = {"out_dtype": wanted.out_dtype}
    y = {"y": on_device(comm, wanted.y[comm.rank])}
    return y | ({"options": CombineOptions(**how | options)} if options else how)


def finish(comm: AllToAll) -> None:
    """Waits for this rank's work, and asserts that it had no error."""
    if comm.config.on_gpu:
        torch.cuda.current_stream().synchronize()
    assert comm.broken == "", comm.broken


def run_step(comm: AllToAll, wanted: Wanted, **arguments: Any) -> tuple[Dispatched, Tensor]:
    """Dispatches and combines, bit for bit as `wanted`; returns results on the CPU.

    arguments: of dispatch; they replace the arguments in `wanted`.
    """
    live = comm.dispatch(**dispatch_arguments(comm, wanted, **arguments))
    finish(comm)
    got = on_cpu(live)
    assert_received(got, wanted.received[comm.rank])
    out = comm.combine(dispatched=live, **combine_arguments(comm, wanted))
    finish(comm)
    out = out.cpu()
    assert_combined(out, wanted.out[comm.rank])
    return got, out


def check_step(comm: AllToAll, tokens: list[Tokens], **options: Any) -> tuple[Dispatched, Tensor]:
    """Dispatches and combines `tokens` (of all ranks), bit for bit as the reference."""
    max_tokens = options.pop("max_tokens", comm.config.max_tokens)
    return run_step(comm, expect(topology_of(comm), tokens, max_tokens=max_tokens, **options))


def summed_steps(
    rank: Rank,
    wanted: list[Wanted],
    wants: list[list[Tensor]],
    take: Callable[..., None],
    config: dict[str, Any],
) -> None:
    """take: (comm, a step, its sums by rank, num_biases). config: of make."""
    with make(rank, **config) as comm:
        for i, (step, want) in enumerate(zip(wanted, wants, strict=True)):
            take(comm, step, want, num_biases=i % 3)


def steps(comm: AllToAll, **options: Any) -> None:
    """Several calls, each with other tokens on each rank."""
    dtype = options.pop("dtype", torch.float32)
    for seed, counts in enumerate(COUNTS):
        tokens = [
            make_tokens(seed, rank, counts[rank], dtype=dtype, num_experts=comm.config.num_experts)
            for rank in range(comm.world_size)
        ]
        check_step(comm, tokens, **options)


def run_steps(rank: Rank, config: dict[str, Any], options: dict[str, Any]) -> None:
    """Body of a rank that only runs steps. config: of make; options: of dispatch."""
    with make(rank, **config) as comm:
        steps(comm, **options)
        assert comm.broken == ""


def check_received(comm: AllToAll, tokens: list[Tokens], **options: Any) -> None:
    """Dispatches only, for rows of a type without arithmetic."""
    routing = reference.route(
        topology_of(comm),
        tokens,
        layout=options.get("layout", "padded"),
        max_tokens=comm.config.max_tokens,
    )
    mine = tokens[comm.rank]
    got = comm.dispatch(
        mine.x, mine.topk_idx, mine.topk_weights, scales=mine.scales, **in_options(**options)
    )
    finish(comm)
    assert_received(on_cpu(got), reference.dispatch(routing, comm.rank))
    comm.release(got)


def lose_a_rank(comm: AllToAll, tokens: Tokens, lost: int) -> tuple[float, str, str]:
    """Kills rank `lost` between dispatch and combine, while the others go on with steps.

    Returns on the others: seconds until the error, its text, and `broken`. Closes `comm`.
    """
    began = time.monotonic()
    try:  # part of the lost rank's dispatch may be lost too
        received = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
        if comm.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(100):
            comm.combine(received.x, received)
            received = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
    except MoeP2pError as error:
        took, broken = time.monotonic() - began, comm.broken
        comm.close()
        return took, f"{type(error).__name__}: {error}", broken
    return time.monotonic() - began, "never noticed", ""


def lose_an_idle_rank(comm: AllToAll, lost: int, call: Callable[[], object]) -> tuple[float, str]:
    """Kills rank `lost` once it has received everything that the others' call writes to it.

    Returns on the others: seconds until the error, and the error text.
    """
    if comm.rank == lost:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        call()
    except MoeP2pError as error:
        assert comm.broken
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return time.monotonic() - began, "never noticed"


def text_of_loss(results: list[Any], lost: int) -> str:
    """The text that the other of two ranks got, soon: long before its deadline of 60 s."""
    assert isinstance(results[lost], DiedError)
    took, text = results[1 - lost]
    assert took < 20, text
    assert text.startswith("PeerDeadError"), text
    return str(text)


def on_cpu(got: Dispatched) -> Dispatched:
    moved = {
        name: value.cpu() for name, value in got._asdict().items() if isinstance(value, Tensor)
    }
    return got._replace(**moved, extras=tuple(extra.cpu() for extra in got.extras))


def _decoded(received: Received, dtype: torch.dtype) -> Received:
    """`received` with rows in a type for arithmetic."""
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
