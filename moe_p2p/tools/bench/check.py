"""Comparison with the reference: the package bit for bit, the baseline within rounding.

What is too much for the reference is compared with the closed form that the experts' answers allow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, reference
from moe_p2p.reference import Received, Routing, Tokens
from moe_p2p.tools.bench.cases import Job
from moe_p2p.tools.bench.options import Options
from moe_p2p.tools.bench.systems import Rows, System, experts_of_rows, finish

# Steps of x_dtype: weights, products and sums rounded once each, three stages, under 8 halves.
_BOUND = 4


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one rank must see in one step."""

    received: Received
    y: Tensor  # [R, H] what its experts answer
    out: Tensor  # [T, H] combined, rounded as the package does
    bound: Tensor  # [T, H] how far a sum in another order may lie from it


def answer(wide: Tensor, e: Tensor) -> Tensor:
    """Of expert number e * E to rows [R, H], fp32: a different function for every expert."""
    return wide * (0.5 + e) + (e - 0.25)


def apply_experts(
    job: Job, options: Options, rank: int, *, x: Tensor, scales: Tensor | None, counts: Tensor
) -> Tensor:
    """What experts answer to the rows that hold tokens, [R, H] of x_dtype."""
    expert = experts_of_rows(job, rank, counts)
    rows = x[: len(expert)]
    wide = rows.float() if scales is None else reference.dequantize(rows, scales[: len(expert)])
    e = expert.to(torch.float32)[:, None] / job.topology.num_experts
    return answer(wide, e).to(options.x_dtype)


def expect(job: Job, options: Options, rank: int, tokens: list[Tokens]) -> Expected:
    routing = _route(job, options, tokens)
    received = [reference.dispatch(routing, r) for r in range(job.topology.world_size)]
    y = [
        apply_experts(job, options, r, x=got.x, scales=got.scales, counts=got.counts)
        for r, got in enumerate(received)
    ]
    out = reference.combine(routing, rank, y, out_dtype=options.x_dtype)
    magnitude = reference.combine(routing, rank, [a.abs() for a in y], out_dtype=torch.float32)
    bound = _BOUND * torch.finfo(options.x_dtype).eps * magnitude
    return Expected(received=received[rank], y=y[rank], out=out, bound=bound)


def verify(system: System, tokens: Tokens, expected: Expected, *, exact: bool) -> list[str]:
    """Runs one step; says what is wrong, nothing when all is right."""
    rows = system.dispatch(tokens)
    wrong = _compare_rows(rows, expected.received)
    y = torch.zeros(rows.x.shape, dtype=expected.y.dtype, device=rows.x.device)
    y[: len(expected.y)] = expected.y.to(y.device)
    out = system.combine(y).cpu()
    if exact and not torch.equal(out, expected.out):
        wrong.append(_difference("combined row", out, expected.out))
    if not exact and bool(((out.float() - expected.out.float()).abs() > expected.bound).any()):
        wrong.append(_difference("combined row (beyond rounding)", out, expected.out))
    return [f"{system.name}: {text}" for text in wrong]


def closed_form(job: Job, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """What one rank must get from apply_experts, fp32 [T, H], and the sum of its magnitudes.

    Of this rank's tokens alone, on their device: the answer to a row depends only on its expert.
    """
    assert tokens.topk_weights is not None
    wide = tokens.x.float()
    if options.quantize:
        wide = reference.dequantize(*reference.quantize(tokens.x))
    out, magnitude = torch.zeros_like(wide), torch.zeros_like(wide)
    for k in range(tokens.topk_idx.shape[1]):
        e = tokens.topk_idx[:, k, None].float() / job.topology.num_experts
        part = tokens.topk_weights[:, k, None] * answer(wide, e)
        out += part
        magnitude += part.abs()
    return out, magnitude


def verify_whole(
    system: System, job: Job, options: Options, rank: int, tokens: Tokens
) -> list[str]:
    """Runs one step of any size on its device; says what is beyond rounding."""
    rows = system.dispatch(tokens)
    answers = apply_experts(job, options, rank, x=rows.x, scales=rows.scales, counts=rows.counts)
    y = torch.zeros(rows.x.shape, dtype=options.x_dtype, device=rows.x.device)
    y[: len(answers)] = answers
    return verify_sums(system.name, job, options, tokens=tokens, got=system.combine(y))


def verify_by_rank(
    comm: AllToAll, job: Job, options: Options, rank: int, tokens: Tokens
) -> list[str]:
    """verify_whole of rows by rank, whose answers are partial sums."""
    got = comm.dispatch(
        tokens.x,
        tokens.topk_idx,
        tokens.topk_weights,
        quantize=options.quantize,
        layout="by_rank",
    )
    finish(comm.config.device)
    assert got.row_topk is not None
    rows = got.x if got.scales is None else (got.x, got.scales)
    y = answer_by_rank(job, rank, rows, got.row_topk, got.row_weights).to(options.x_dtype)
    y[int(got.offsets[-1]) :] = 0  # rows past the count are whatever the memory held
    out = comm.combine(y, got)
    finish(comm.config.device)
    return verify_sums("moe_p2p by rank", job, options, tokens=tokens, got=out)


def answer_by_rank(
    job: Job, rank: int, received: Any, local_idx: Tensor, weights: Tensor
) -> Tensor:
    """What this rank's experts answer to rows [R, H] together, fp32.

    local_idx [R, K]: experts of this rank, -1: another rank's.
    """
    wide = reference.dequantize(*received) if isinstance(received, tuple) else received.float()
    e = (local_idx + job.topology.local_experts(rank)[0]).float() / job.topology.num_experts
    w = torch.where(local_idx >= 0, weights, 0)
    answers = [w[:, k, None] * answer(wide, e[:, k, None]) for k in range(e.shape[1])]
    return functools.reduce(Tensor.add_, answers)


def verify_sums(
    name: str, job: Job, options: Options, *, tokens: Tokens, got: Tensor, steps: float = _BOUND
) -> list[str]:
    """Says where combined rows [T, H] are further than `steps` of x_dtype from the closed form."""
    out, magnitude = closed_form(job, options, tokens)
    found = beyond_rounding(got, out, magnitude, options.x_dtype, steps=steps)
    return [f"{name}: {text}" for text in found]


def beyond_rounding(
    got: Tensor, want: Tensor, magnitude: Tensor, dtype: torch.dtype, *, steps: float = _BOUND
) -> list[str]:
    """Says where `got` is further than `steps` of dtype, times magnitude, from `want`."""
    bound = steps * torch.finfo(dtype).eps * magnitude
    beyond = ~((got.float() - want).abs() <= bound)  # NaN is beyond
    if not bool(beyond.any()):
        return []
    row, at = (int(i) for i in beyond.nonzero()[0])
    return [
        f"{int(beyond.sum())} values beyond rounding, first in row {row} at {at}: "
        f"got {float(got[row, at])!r}, expected {float(want[row, at])!r}"
    ]


def _route(job: Job, options: Options, tokens: list[Tokens]) -> Routing:
    owner = job.topology.owner()
    per_rank = sum(
        torch.bincount(owner[t.topk_idx.flatten()], minlength=job.topology.world_size)
        for t in tokens
    )
    return reference.route(
        job.topology,
        tokens,
        layout="grouped",
        capacity=max(1, int(torch.as_tensor(per_rank).max())),
        quantized=options.quantize,
    )


def _compare_rows(rows: Rows, want: Received) -> list[str]:
    wrong = []
    if rows.counts.tolist() != want.counts.tolist():
        return [f"counts are {rows.counts.tolist()}, expected {want.counts.tolist()}"]
    used = int(want.counts.sum())
    x = rows.x[:used].cpu()
    if not torch.equal(_bits(x), _bits(want.x[:used])):
        wrong.append(_difference("dispatched row", x, want.x[:used]))
    if not torch.equal(rows.row_weights[:used].cpu(), want.row_weights[:used]):
        wrong.append("row_weights differ")
    if want.scales is not None:
        assert rows.scales is not None
        scales = rows.scales[:used].cpu()
        if not torch.equal(scales, want.scales[:used]):
            wrong.append(_difference("scales of row", scales, want.scales[:used]))
    return wrong


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _difference(what: str, got: Tensor, want: Tensor) -> str:
    apart = (got.float() != want.float()).any(dim=1).nonzero().flatten().tolist()
    if not apart:
        return f"{what}: same values, other bits"
    row = apart[0]
    at = int((got[row].float() != want[row].float()).nonzero()[0])
    return (
        f"{len(apart)} of {len(got)} {what}s differ, first {row} at {at}: "
        f"got {float(got[row, at])!r}, expected {float(want[row, at])!r}"
    )
