"""Comparison with the reference: the package bit for bit, the baseline within rounding.

Larger calls are compared with the closed form that the experts' answers allow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_p2p import Dispatched
from moe_p2p.bench.cases import Job
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import MoeP2p, Rows, System, experts_of_rows
from moe_p2p.moe import reference
from moe_p2p.moe.options import block_of
from moe_p2p.moe.reference import Received, Tokens

# In steps of x_dtype: weights, products and sums rounded once each, three stages, under 8 halves.
_BOUND = 4
_LEAK = 1e4


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one rank must see in one step."""

    received: Received
    y: Tensor  # [R, H] the answers of its experts
    out: Tensor  # [T, H] combined, rounded as the package does
    bound: Tensor  # [T, H] how far a sum in another order may differ


def answer(wide: Tensor, e: Tensor) -> Tensor:
    """Expert number e * E's answer to rows [R, H], fp32: a different function for every expert."""
    return wide * (0.5 + e) + (e - 0.25)


def apply_experts(
    job: Job, options: Options, rank: int, *, x: Tensor, scales: Tensor | None, counts: Tensor
) -> Tensor:
    """Returns the experts' answers to rows that hold tokens, [R, H] of x_dtype."""
    expert = experts_of_rows(job, rank, counts)
    rows = x[: len(expert)]
    wide = rows.float() if scales is None else reference.dequantize(rows, scales[: len(expert)])
    e = job.number_of(expert).to(torch.float32)[:, None] / job.topology.num_experts
    return answer(wide, e).to(options.x_dtype)


def expect(
    job: Job,
    options: Options,
    rank: int,
    tokens: list[Tokens],
    *,
    max_tokens: int | None = None,
    **how: Any,
) -> Expected:
    """max_tokens: the call's, for rows laid out as the package's; None: no more than needed.

    how: layout and scale_format of dispatch.
    """
    capacity = _most_rows(job, tokens) if max_tokens is None else None
    routing = reference.route(
        job.topology,
        tokens,
        capacity=capacity,
        max_tokens=max_tokens,
        quantized=options.quantize and tokens[0].scales is None,
        **{"layout": "grouped"} | how,
    )
    received = [reference.dispatch(routing, r) for r in range(job.topology.world_size)]
    y = [_answers(job, options, r, got) for r, got in enumerate(received)]
    out = reference.combine(
        routing, rank, y, out_dtype=options.x_dtype, combine_dtype=options.combine_dtype
    )
    magnitude = reference.combine(routing, rank, [a.abs() for a in y], out_dtype=torch.float32)
    bound = bound_of(magnitude, options)
    return Expected(received=received[rank], y=y[rank], out=out, bound=bound)


def _answers(job: Job, options: Options, rank: int, got: Received) -> Tensor:
    """Returns the experts' answers, [R, H]; rows without a token hold values that must not leak."""
    rows = got.rows()
    x = _flat(got.x, got.row_weights)[rows]
    scales = None if got.scales is None else _flat(got.scales, got.row_weights)[rows]
    y = torch.full((len(got.row_weights), job.hidden_dim), _LEAK, dtype=options.x_dtype)
    if got.row_topk is None:
        y[rows] = apply_experts(job, options, rank, x=x, scales=scales, counts=got.counts)
        return y
    given = x if scales is None else (x, scales)
    answers = answer_by_rank(job, rank, given, got.row_topk[rows], got.row_weights[rows])
    y[rows] = answers.to(options.x_dtype)
    return y


def verify(system: System, tokens: Tokens, expected: Expected, *, exact: bool) -> list[str]:
    """Runs one step; returns what is wrong, nothing when all is right."""
    rows = system.dispatch(tokens)
    wrong = compare_rows(rows, expected.received)
    y = torch.zeros(rows.x.shape, dtype=expected.y.dtype, device=rows.x.device)
    used = int(expected.received.counts.sum())
    y[:used] = expected.y[:used].to(y.device)
    out = system.combine(y).cpu()
    wrong += compare_sums(out, expected) if exact else []
    if not exact and bool(((out.float() - expected.out.float()).abs() > expected.bound).any()):
        wrong.append(_difference("combined row (beyond rounding)", out, expected.out))
    return [f"{system.name}: {text}" for text in wrong]


def closed_form(job: Job, options: Options, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Returns one rank's sums after apply_experts, fp32 [T, H], and the sums of magnitudes.

    Needs this rank's tokens alone, on their device: the answer to a row depends only on its expert.
    """
    assert tokens.topk_weights is not None
    wide = tokens.x.float()
    if options.quantize:
        wide = reference.dequantize(*reference.quantize(tokens.x))
    out, magnitude = torch.zeros_like(wide), torch.zeros_like(wide)
    for k in range(tokens.topk_idx.shape[1]):
        e = job.number_of(tokens.topk_idx[:, k, None]).float() / job.topology.num_experts
        part = tokens.topk_weights[:, k, None] * answer(wide, e)
        out += part
        magnitude += part.abs()
    return out, magnitude


def verify_whole(
    system: System, job: Job, options: Options, rank: int, tokens: Tokens
) -> list[str]:
    """Runs one step of any size on its device; returns what is beyond rounding."""
    rows = system.dispatch(tokens)
    answers = apply_experts(job, options, rank, x=rows.x, scales=rows.scales, counts=rows.counts)
    y = torch.zeros(rows.x.shape, dtype=options.x_dtype, device=rows.x.device)
    y[: len(answers)] = answers
    return verify_sums(system.name, job, options, tokens=tokens, got=system.combine(y))


def verify_by_rank(
    system: MoeP2p, job: Job, options: Options, rank: int, tokens: Tokens
) -> list[str]:
    """Like verify_whole for rows by rank, whose answers are partial sums."""
    comm = system.all_to_all
    got = comm.dispatch(**system.given(tokens, layout="by_rank"))
    finish(comm.config.device)
    assert got.row_topk is not None
    rows = got.x if got.scales is None else (got.x, got.scales)
    y = answer_by_rank(job, rank, rows, got.row_topk, got.row_weights).to(options.x_dtype)
    y[int(got.offsets[-1]) :] = 0  # rows past the count hold arbitrary values
    out = comm.combine(y, got, **system.combining)
    finish(comm.config.device)
    return verify_sums("moe_p2p by rank", job, options, tokens=tokens, got=out)


def answer_by_rank(
    job: Job, rank: int, received: Any, local_idx: Tensor, weights: Tensor
) -> Tensor:
    """Returns the joint answer of this rank's experts to rows [R, H], fp32.

    local_idx [R, K]: experts of this rank, -1: another rank's.
    """
    wide = reference.dequantize(*received) if isinstance(received, tuple) else received.float()
    expert = job.number_of(local_idx + job.topology.local_experts(rank)[0])
    e = expert.float() / job.topology.num_experts
    w = torch.where(local_idx >= 0, weights, 0)
    answers = [w[:, k, None] * answer(wide, e[:, k, None]) for k in range(e.shape[1])]
    return functools.reduce(Tensor.add_, answers)


def verify_sums(
    name: str,
    job: Job,
    options: Options,
    *,
    tokens: Tokens,
    got: Tensor,
    steps: float = _BOUND,
    partials: str | None = None,
) -> list[str]:
    """Reports combined rows [T, H] further than `steps` of x_dtype from the closed form.

    partials: of the combine, where they are not those of the options.
    """
    out, magnitude = closed_form(job, options, tokens)
    found = beyond_rounding(got, out, bound_of(magnitude, options, steps, partials))
    return [f"{name}: {text}" for text in found]


def bound_of(
    magnitude: Tensor, options: Options, steps: float = _BOUND, partials: str | None = None
) -> Tensor:
    """How far from the exact sum one may be whose terms have this magnitude, [T, H].

    A 10-bit integer is as far away as the largest value of its block allows, half of 1 / 511 of it
    for each of up to 8 partial sums: less than 4 steps of bfloat16. 16-bit blocks round less.
    """
    dtype, partials = options.x_dtype, partials or options.combine_dtype
    if partials:
        dtype = torch.bfloat16
        block = block_of(partials)
        blocks = magnitude.reshape(*magnitude.shape[:-1], magnitude.shape[-1] // block, block)
        magnitude = blocks.amax(-1, keepdim=True).expand(blocks.shape).flatten(-2)
    return steps * torch.finfo(dtype).eps * magnitude


def beyond_rounding(got: Tensor, want: Tensor, bound: Tensor) -> list[str]:
    """Reports where `got` is further than `bound` from `want`."""
    beyond = ~((got.float() - want).abs() <= bound)  # NaN is beyond
    if not bool(beyond.any()):
        return []
    row, at = (int(i) for i in beyond.nonzero()[0])
    return [
        f"{int(beyond.sum())} values beyond rounding, first in row {row} at {at}: "
        f"got {float(got[row, at])!r}, expected {float(want[row, at])!r}"
    ]


def _most_rows(job: Job, tokens: list[Tokens]) -> int:
    """Returns the most rows of any rank."""
    owner = job.topology.owner()
    per_rank = sum(
        torch.bincount(owner[t.topk_idx.flatten()], minlength=job.topology.world_size)
        for t in tokens
    )
    return max(1, int(torch.as_tensor(per_rank).max()))


def _flat(rows: Tensor, row_weights: Tensor) -> Tensor:
    """Returns one row after the other, [R, ...], in any layout."""
    return rows.reshape(len(row_weights), -1)


def compare_rows(got: Rows | Dispatched, want: Received) -> list[str]:
    """Compares rows that hold a token, bit for bit."""
    wrong = []
    if got.counts.tolist() != want.counts.tolist():
        return [f"counts are {got.counts.tolist()}, expected {want.counts.tolist()}"]
    rows = want.rows()

    def of(part: Tensor, of_rows: Rows | Dispatched | Received) -> Tensor:
        return _flat(part, of_rows.row_weights)[rows.to(part.device)].cpu()

    x, wanted = of(got.x, got), of(want.x, want)
    if not torch.equal(_bits(x), _bits(wanted)):
        wrong.append(_difference("dispatched row", x, wanted))
    if not torch.equal(of(got.row_weights, got), of(want.row_weights, want)):
        wrong.append("row_weights differ")
    if (want.scales is None) != (got.scales is None):
        wrong.append("rows have no scales" if got.scales is None else "rows have scales")
    elif want.scales is not None and got.scales is not None:
        scales, wanted_scales = of(got.scales, got), of(want.scales, want)
        if not torch.equal(_bits(scales), _bits(wanted_scales)):
            wrong.append(_difference("scales of row", scales, wanted_scales))
    for i, wanted in enumerate(want.extras):
        assert isinstance(got, Dispatched)
        if not torch.equal(_bits(of(got.extras[i], got)), _bits(of(wanted, want))):
            wrong.append(f"extras[{i}] differ")
    return wrong


def compare_sums(out: Tensor, expected: Expected) -> list[str]:
    """Compares combined rows, bit for bit but for the bits of NaN."""
    want = expected.out
    if out.shape == want.shape and bool(((out == want) | (out.isnan() & want.isnan())).all()):
        return []
    return [_difference("combined row", out, expected.out)]


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
