"""Matrix products of rows that are grouped by expert: torch operators over grouped_gemm.py.

    y = grouped_gemm(x, weight, counts)                  # x [R, K], weight [E, K, N] -> [R, N]
    h = grouped_swiglu(x, w_gate, w_up, counts)          # silu(x w_gate) * (x w_up), one kernel

No host synchronisation: counts and offsets stay on the device. The operators work in CUDA graphs
and under torch.compile, one node each. Importing this needs Triton; `import moe_p2p` does not.

Shapes: R rows (of any expert), E experts, weights [E, K, N]. Rows are [R, K] or padded
[E, capacity, K]. Expert e has counts[e] rows from offsets[e] on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_p2p import errors
from moe_p2p.kernels.triton import grouped_gemm as kernels
from moe_p2p.moe.ready import ReadyRows
from moe_p2p.moe.shape import num_scales

_FP8 = torch.float8_e4m3fn


class Fp8(NamedTuple):
    """Values with one scale per 128 of a row, or per 128 x 128 of a weight."""

    values: Tensor  # e4m3 [..., K] or [E, K, N]
    scales: Tensor  # fp32 [..., ceil(K / 128)] or [E, ceil(K / 128), ceil(N / 128)]


def grouped_gemm(
    x: Tensor | Fp8,
    weight: Tensor | Fp8,
    counts: Tensor,
    *,
    offsets: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    zero_padding: bool = False,
) -> Tensor:
    """x @ weight[e] for the rows of each expert e, [..., N], summed in fp32.

    x, weight: both bf16, fp16 or fp32, or both Fp8. Weights may be views, e.g. transposed.
    counts: [E] int32 or int64 rows of each expert. Rows past the end of x, or past a padded
        expert's capacity, are left out, so no counts access foreign memory. Negative counts, from a
        failed dispatch, are 0.
    offsets: [E] or longer, first row of each expert. None: consecutive; padded: e * capacity.
    out_dtype: None: the type of x; bf16 for Fp8.
    zero_padding: rows of no expert become zero. Otherwise they are undefined.

    Differentiable in x and weight (not Fp8), for out_dtype None. Raises InvalidArgumentError when
    shapes or types do not fit. Example: counts [2, 1] multiply rows 0 and 1 with weight[0], row 2
    with weight[1].
    """
    rows, row_scales, weights, weight_scales = *_parts(x), *_parts(weight)
    _check(rows, row_scales, weights, weight_scales, counts)
    dtype = out_dtype or (torch.bfloat16 if rows.dtype == _FP8 else rows.dtype)
    counts = _bounded(rows, counts)
    starts = _starts(rows, counts, offsets)
    tensors = (rows.flatten(0, -2), row_scales, weights, weight_scales, starts, counts)
    out: Tensor = _gemm(*tensors, dtype, zero_padding).unflatten(0, rows.shape[:-1])
    return out


_loaded = set[tuple[Any, ...]]()  # types and shapes of products that have run


def make_unready(
    x: Tensor | Fp8, weight: Tensor | Fp8, *, num_sms: int, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, ReadyRows]:
    """Room for a product that combine sends while it is computed, and counters of its rows.

    x: padded, [E, capacity, K]. num_sms: of combine's sending half; 1 or more.

        y, ready = make_unready(x, weight, num_sms=8)
        pending = all_to_all.combine_send(y, received, ready=ready)
        with torch.cuda.stream(side):                 # which has waited for x, y and counters
            grouped_gemm_into(y, x, weight, counts, ready)
        sums = all_to_all.combine_recv(pending)

    Combine goes first: a product that has taken all multiprocessors would leave it none. The first
    such product of a shape runs once here, on no rows: CUDA loads a kernel at its first launch, and
    a load waits for kernels that run. Returns (y [E, capacity, N], its counters, which are zero).
    """
    rows, weights = _parts(x)[0], _parts(weight)[0]
    errors.require(rows.dim() == 3, f"x is {tuple(rows.shape)}, must be padded: [E, capacity, K]")
    dtype = out_dtype or (torch.bfloat16 if rows.dtype == _FP8 else rows.dtype)
    out = rows.new_empty((*rows.shape[:2], weights.shape[2]), dtype=dtype)
    tiles = kernels.choose_tiles(rows.dtype, rows.shape[1], gated=False)
    shape = rows.shape[0], triton.cdiv(rows.shape[1], tiles.block_m)
    counters = rows.new_zeros(shape, dtype=torch.int32)
    want = triton.cdiv(weights.shape[2], tiles.block_n)
    ready = ReadyRows(counters=counters, want=want, rows=tiles.block_m, num_sms=num_sms)
    like = (dtype, *((t.device, t.dtype, t.shape, t.stride()) for t in (rows, weights)))
    if rows.is_cuda and like not in _loaded:
        grouped_gemm_into(out, x, weight, counters.new_zeros(rows.shape[0]), ready)
        _loaded.add(like)
    return out, ready


def grouped_gemm_into(
    out: Tensor, x: Tensor | Fp8, weight: Tensor | Fp8, counts: Tensor, ready: ReadyRows
) -> None:
    """grouped_gemm into what make_unready() of the same x and weight has made. No gradient.

    It leaves ready.num_sms multiprocessors to combine: programs that find none free would begin
    once others end, with as many tiles.
    """
    rows, row_scales, weights, weight_scales = *_parts(x), *_parts(weight)
    _check(rows, row_scales, weights, weight_scales, counts)
    shape = (*rows.shape[:-1], weights.shape[2])
    errors.require(
        rows.dim() == 3 and out.shape == shape and out.is_contiguous(),
        f"out is {tuple(out.shape)}, must be {shape} and contiguous: what make_unready() returned",
    )
    starts, counts = _starts(rows, counts, None), _bounded(rows, counts)
    flat = rows.flatten(0, -2)
    tensors = flat, row_scales, weights, weight_scales, starts, counts
    _gemm_into(out, ready.counters, *tensors, ready.num_sms)


def grouped_swiglu(
    x: Tensor | Fp8,
    gate: Tensor | Fp8,
    up: Tensor | Fp8,
    counts: Tensor,
    *,
    offsets: Tensor | None = None,
    ready: ReadyRows | None = None,
) -> Tensor | Fp8:
    """silu(x @ gate[e]) * (x @ up[e]) for the rows of each expert e, [..., N], of the type of x.

    All operands have one type; Fp8 gives Fp8, quantized from the fp32 sums. Rows of no expert are
    undefined. No gradient: to train, use grouped_gemm twice. Otherwise like grouped_gemm.

    ready: received.ready, for x and counts of the same dispatch, whose rows are still arriving. A
        tile is computed once its rows are here. On a stream of its own:

            into = all_to_all.make_outputs(pending, num_sms=16)
            side.wait_stream(torch.cuda.current_stream())
            received = all_to_all.dispatch_recv(pending, into)
            with torch.cuda.stream(side):
                h = grouped_swiglu(into.x, gate, up, into.counts, ready=into.ready)

        It leaves ready.num_sms multiprocessors to dispatch_recv. Rows that do not come within
        ready.timeout_s give NaN, and all_to_all.check() raises TimeoutError.
    """
    if ready is not None:
        _check_arriving(x, counts, offsets, ready)
    rows, row_scales, gates, gate_scales = *_parts(x), *_parts(gate)
    ups, up_scales = _parts(up)
    for weights, scales in ((gates, gate_scales), (ups, up_scales)):
        _check(rows, row_scales, weights, scales, counts)
    errors.require(
        gates.shape == ups.shape and gates.stride() == ups.stride(),
        f"gate {tuple(gates.shape)} {gates.stride()} and up {tuple(ups.shape)} {ups.stride()} must "
        "be of one shape and order in memory",
    )
    if ready is None:  # else the kernel reads and bounds them, once they are written
        counts = _bounded(rows, counts)
    starts = _starts(rows, counts, offsets)
    flat = rows.flatten(0, -2)
    given = flat, row_scales, gates, gate_scales, ups, up_scales, starts, counts
    if ready is None:
        made = _swiglu(*given)
    else:
        timeout_ns = int(ready.timeout_s * 1e9)
        counters = ready.counters, ready.late
        made = _swiglu_arriving(
            *counters, *given, ready.rows, ready.want, ready.num_sms, timeout_ns
        )
    out, out_scales = (part.unflatten(0, rows.shape[:-1]) for part in made)
    return out if row_scales is None else Fp8(out, out_scales)


# --- operators -----------------------------------------------------------------------------------


@torch.library.custom_op("moe_p2p::grouped_gemm", mutates_args=())
def _gemm(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    starts: Tensor,
    counts: Tensor,
    out_dtype: torch.dtype,
    zero_padding: bool,
) -> Tensor:
    make = x.new_zeros if zero_padding else x.new_empty
    out = make((x.shape[0], weight.shape[2]), dtype=out_dtype)
    _launch(x, x_scales, (weight, weight_scales), (None, None), (out, None), starts, counts)
    return out


@torch.library.custom_op("moe_p2p::grouped_gemm_into", mutates_args=("out", "counters"))
def _gemm_into(
    out: Tensor,
    counters: Tensor,
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    starts: Tensor,
    counts: Tensor,
    num_sms: int,
) -> None:
    to, none = (out.flatten(0, -2), None), (None, None)
    weights = weight, weight_scales
    _launch(x, x_scales, weights, none, to, starts, counts, ready=counters, others=num_sms)


@_gemm.register_fake
def _gemm_like(x: Tensor, x_scales: Tensor | None, weight: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]), dtype=args[3])  # out_dtype


@torch.library.custom_op("moe_p2p::grouped_swiglu", mutates_args=())
def _swiglu(
    x: Tensor,
    x_scales: Tensor | None,
    gate: Tensor,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor | None,
    starts: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    out, out_scales = _swiglu_like(x, x_scales, gate)
    to = (out, None if x_scales is None else out_scales)
    _launch(x, x_scales, (gate, gate_scales), (up, up_scales), to, starts, counts)
    return out, out_scales


@torch.library.custom_op("moe_p2p::grouped_swiglu_arriving", mutates_args=("late",))
def _swiglu_arriving(
    counters: Tensor,
    late: Tensor,
    x: Tensor,
    x_scales: Tensor | None,
    gate: Tensor,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor | None,
    starts: Tensor,
    counts: Tensor,
    rows: int,
    want: int,
    num_sms: int,
    timeout_ns: int,
) -> tuple[Tensor, Tensor]:
    out, out_scales = _swiglu_like(x, x_scales, gate)
    to = (out, None if x_scales is None else out_scales)
    arriving = Arriving(counters, late, rows, want, timeout_ns)
    weights = (gate, gate_scales), (up, up_scales)
    _launch(x, x_scales, *weights, to, starts, counts, others=num_sms, arriving=arriving)
    return out, out_scales


@_swiglu.register_fake
def _swiglu_like(
    x: Tensor, x_scales: Tensor | None, gate: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    num_rows, n = x.shape[0], gate.shape[2]
    width = 0 if x_scales is None else num_scales(n)
    return x.new_empty((num_rows, n)), x.new_empty((num_rows, width), dtype=torch.float32)


@_swiglu_arriving.register_fake
def _swiglu_arriving_like(
    counters: Tensor, late: Tensor, x: Tensor, x_scales: Tensor | None, gate: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _swiglu_like(x, x_scales, gate)
    return made


@torch.library.custom_op("moe_p2p::grouped_weight_grad", mutates_args=())
def _weight_grad(x: Tensor, grad: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    out: Tensor = _weight_grad_like(x, grad, starts, counts)
    num_experts, k, n = out.shape
    if out.numel() == 0:
        return out
    tiles = kernels.grad_tiles(x.dtype)
    grid = (triton.cdiv(k, tiles.block_k) * triton.cdiv(n, tiles.block_n), num_experts)
    with torch.cuda.device_of(x):
        kernels.weight_grad_kernel[grid](
            x.contiguous(),
            grad.contiguous(),
            out,
            starts,
            counts,
            x.shape[0],
            n,
            k,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out


@_weight_grad.register_fake
def _weight_grad_like(x: Tensor, grad: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((counts.shape[0], x.shape[1], grad.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, x_scales, weight, _, starts, counts, out_dtype, ctx.zero_padding = inputs
    needs_grad = x.requires_grad or weight.requires_grad
    errors.require(
        not needs_grad or (x_scales is None and out_dtype == x.dtype),
        f"no gradient through a grouped_gemm of {x.dtype} to {out_dtype}: run it under "
        "torch.no_grad(), or in bf16, fp16 or fp32 without out_dtype",
    )
    ctx.save_for_backward(x, weight, starts, counts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, starts, counts = ctx.saved_tensors
    need_x, _, need_weight = ctx.needs_input_grad[:3]
    grad_x = grad_weight = None
    if need_x:
        back = weight.transpose(1, 2)
        grad_x = _gemm(grad, None, back, None, starts, counts, x.dtype, ctx.zero_padding)
    if need_weight:
        grad_weight = _weight_grad(x, grad, starts, counts)
    return grad_x, None, grad_weight, None, None, None, None, None


_gemm.register_autograd(_backward, setup_context=_save)


# --- parts ---------------------------------------------------------------------------------------


def _parts(x: Tensor | Fp8) -> tuple[Tensor, Tensor | None]:
    return (x, None) if isinstance(x, Tensor) else (x.values, x.scales.contiguous())


def _bounded(x: Tensor, counts: Tensor) -> Tensor:
    """Contiguous counts; padded: at most the capacity. The kernels check the end of x."""
    return counts.clamp_max(x.shape[1]) if x.dim() == 3 else counts.contiguous()


def _starts(x: Tensor, counts: Tensor, offsets: Tensor | None) -> Tensor:
    """First row of each expert, [E] or longer."""
    if offsets is not None:
        errors.require(
            offsets.dim() == 1 and len(offsets) >= len(counts),
            f"offsets is {tuple(offsets.shape)}, must be [{len(counts)}] or longer",
        )
        return offsets.contiguous()
    if x.dim() == 3:
        return torch.arange(x.shape[0], device=x.device) * x.shape[1]
    counts = counts.clamp_min(0)
    return counts.cumsum(0) - counts


def _check(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, counts: Tensor
) -> None:
    """Raises InvalidArgumentError when the shapes or types of one product do not fit."""
    num_experts, k, n = weight.shape
    errors.require(
        counts.dtype in (torch.int32, torch.int64) and counts.device == x.device,
        f"counts is {counts.dtype} on {counts.device}, must be int32 or int64 on {x.device}",
    )
    fits = x.shape[-1] == k and counts.shape == (num_experts,)
    fits = fits and (x.dim() == 2 or (x.dim() == 3 and x.shape[0] == num_experts))
    errors.require(
        fits,
        f"x {tuple(x.shape)} and counts {tuple(counts.shape)} do not go with weights "
        f"{tuple(weight.shape)}: must be [R, {k}] or [{num_experts}, capacity, {k}] and "
        f"[{num_experts}]",
    )
    errors.require(x.dtype == weight.dtype, f"x is {x.dtype}, weights are {weight.dtype}")
    if x.dtype != _FP8:
        return
    errors.require(
        x_scales is not None
        and weight_scales is not None
        and x_scales.shape == (*x.shape[:-1], num_scales(k))
        and weight_scales.shape == (num_experts, num_scales(k), num_scales(n)),
        f"fp8 needs scales: [..., {num_scales(k)}] for x, "
        f"[{num_experts}, {num_scales(k)}, {num_scales(n)}] for weights; pass Fp8(values, scales)",
    )


def _check_arriving(
    x: Tensor | Fp8, counts: Tensor, offsets: Tensor | None, ready: ReadyRows
) -> None:
    """Raises InvalidArgumentError unless a product may begin before rows of x are here."""
    errors.require_type("ready", ready, ReadyRows, "received.ready")
    rows, scales = (x, None) if isinstance(x, Tensor) else x
    text = "ready: must be received.ready, of make_outputs(pending, num_sms=...)"
    errors.require(ready.late is not None and ready.rows is not None, text)
    errors.require(
        rows.dim() == 3 and offsets is None,
        f"x is {tuple(rows.shape)}, must be padded with `ready`, [E, capacity, K], without offsets",
    )
    shape = rows.shape[0], triton.cdiv(rows.shape[1], ready.rows)
    errors.require(
        tuple(ready.counters.shape) == shape,
        f"ready has counters {tuple(ready.counters.shape)}, must be {shape}: of the same dispatch",
    )
    whole = all(each is None or each.is_contiguous() for each in (rows, scales, counts))
    errors.require(
        whole,
        "x, its scales and counts must be contiguous with `ready`: a copy would read what is not "
        "here yet; leave out column_scales",
    )


class Arriving(NamedTuple):
    """Counters of rows that are still arriving (ReadyRows)."""

    counters: Tensor | None = None
    late: Tensor | None = None
    rows: int = 1
    want: int = 0
    timeout_ns: int = 0


_ALL_HERE = Arriving()


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    weight: tuple[Tensor, Tensor | None],
    up: tuple[Tensor | None, Tensor | None],
    out: tuple[Tensor, Tensor | None],
    starts: Tensor,
    counts: Tensor,
    *,
    ready: Tensor | None = None,
    others: int = 0,
    arriving: Arriving = _ALL_HERE,
) -> None:
    """others: multiprocessors that something else holds."""
    num_experts, k, n = weight[0].shape
    if out[0].numel() == 0 or num_experts == 0:
        return
    gated = up[0] is not None
    tiles = kernels.choose_tiles(x.dtype, x.shape[0] // num_experts, gated=gated)
    arrived = arriving.counters
    programs = kernels.num_programs(x.device, others, waits=arrived is not None)
    with torch.cuda.device_of(x):
        kernels.grouped_gemm_kernel[(programs,)](
            x.contiguous(),
            x_scales,
            weight[0],
            weight[1],
            *up,
            *out,
            ready,
            arrived,
            arriving.late,
            arriving.timeout_ns,
            starts,
            counts,
            x.shape[0],
            num_experts,
            n,
            k,
            *weight[0].stride(),
            EXPERTS=triton.next_power_of_2(num_experts),
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            EVEN=k % tiles.block_k == 0 and n % tiles.block_n == 0,
            PER_EXPERT=0 if ready is None else ready.shape[1],
            ARRIVED_PER_EXPERT=0 if arrived is None else arrived.shape[1],
            ARRIVED_ROWS=arriving.rows,
            ARRIVED_WANT=arriving.want,
            CLOCK=not triton.knobs.runtime.interpret,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
