"""Tests of the Triton kernels at small and odd shapes; run by test_triton_kernels.py.

    TRITON_INTERPRET=1 python -m pytest tests/support/triton_cases.py     # on the CPU
    python -m pytest tests/support/triton_cases.py                        # on a GPU

They need a process of their own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_p2p import AllToAll, AllToAllConfig, InvalidArgumentError, ReadyRows
from moe_p2p.layer import Experts, Fp8Experts, MoELayer
from moe_p2p.moe import reference
from tests.support import cells

triton = pytest.importorskip("triton")

from moe_p2p.kernels.triton import permute, quantize  # noqa: E402
from moe_p2p.kernels.triton.grouped_ops import (  # noqa: E402
    Fp8,
    grouped_gemm,
    grouped_gemm_into,
    grouped_swiglu,
    make_unready,
)

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [8, 128, 200, 384]
COUNTS = [[3, 0, 70, 0, 20], [0, 0, 130, 0, 0], [0, 0, 0, 0, 0], [1, 64, 65, 2, 0]]
SHAPES = [(64, 128), (100, 70), (272, 136)]  # K, N: full tiles and cut ones
NUM_EXPERTS, NUM_ROWS = 5, 140


@pytest.fixture(autouse=True)
def _seed() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.manual_seed(5)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))


# --- quantize ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden_dim", WIDTHS)
def test_quantize_has_the_bits_of_the_reference(hidden_dim: int, dtype: torch.dtype) -> None:
    """Rows from 1e-7, below the smallest amax, to 3e4; a row of zeros; ties of e4m3 values."""
    sizes = torch.logspace(-7, 4.4, 37)[:, None]
    x = (torch.randn(37, hidden_dim).clamp(-2, 2) * sizes).to(dtype)
    x[5] = 0
    x[6] = torch.arange(hidden_dim) % 449 * 0.5
    x[6, 0] = 448
    q, scales = quantize.quantize(x.to(DEVICE))
    want_q, want_scales = reference.quantize(x)
    assert same_bits(scales, want_scales)
    assert same_bits(q, want_q)


def test_quantize_leaves_out_rows_past_the_count() -> None:
    x = rand(40, 200)
    q, scales = quantize.quantize(x, num_rows=ints(17))
    want_q, want_scales = reference.quantize(x[:17].cpu())
    assert same_bits(q[:17], want_q)
    assert same_bits(scales[:17], want_scales)


def test_quantize_keeps_leading_dimensions() -> None:
    x = rand(2, 3, 130)
    q, scales = quantize.quantize(x)
    assert (q.shape, scales.shape) == (x.shape, (2, 3, 2))
    assert same_bits(q[1], reference.quantize(x[1].cpu())[0])
    assert quantize.quantize(x[:, :0])[1].shape == (2, 0, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden_dim", WIDTHS)
def test_dequantize_has_the_bits_of_the_reference(hidden_dim: int, dtype: torch.dtype) -> None:
    q, scales = reference.quantize(torch.randn(19, hidden_dim))
    got = quantize.dequantize(q.to(DEVICE), scales.to(DEVICE), dtype=dtype)
    assert same_bits(got, reference.dequantize(q, scales).to(dtype))


def test_dequantize_does_not_touch_rows_past_the_count() -> None:
    q, scales = quantize.quantize(rand(20, 136))
    out = torch.full((20, 136), 7.0, device=DEVICE)
    quantize.dequantize(q, scales, num_rows=ints(3), out=out)
    assert same_bits(out[:3], reference.dequantize(q.cpu(), scales.cpu())[:3])
    assert bool((out[3:] == 7).all())
    with pytest.raises(InvalidArgumentError, match=r"scales is \(20, 1\), must be \(20, 2\)"):
        quantize.dequantize(q, scales[:, :1])


def spread(weights: Fp8) -> Tensor:
    """Dequantizes a weight to fp32 [E, K, N]."""
    _, k, n = weights.values.shape
    scales = weights.scales.repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 2)[:, :, :n]
    return weights.values.float() * scales


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_weights_have_a_scale_per_square(k: int, n: int) -> None:
    plain = rand(3, k, n) * torch.arange(1, n + 1, device=DEVICE)
    weights = Fp8(*quantize.quantize_weights(plain))
    assert weights.values.stride(1) == 1
    for i in range(-(-k // 128)):
        for j in range(-(-n // 128)):
            block = plain[1, 128 * i :, 128 * j :][:128, :128]
            torch.testing.assert_close(weights.scales[1, i, j], block.abs().max() / 448)
    # Half a step of e4m3 is 1/16 of a value, or, near 0, 2**-10 of the scale (largest / 448).
    error = (spread(weights) - plain).abs()
    assert bool((error <= plain.abs() / 16 + plain.abs().max() / 448 * 2**-10 * 1.01).all())


# --- permute -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
@pytest.mark.parametrize("hidden_dim", [8, 200, 1032])
def test_permute_copies_rows_by_index(hidden_dim: int, dtype: torch.dtype) -> None:
    x = rand(9, hidden_dim, dtype=dtype)
    got = permute.permute_rows(x, ints(3, -1, 8, 0, 0))
    for row, source in enumerate((3, None, 8, 0, 0)):
        want = torch.zeros_like(x[0]) if source is None else x[source]
        assert same_bits(got[row], want)


def test_permute_multiplies_by_weights_into_out() -> None:
    x, weights = rand(9, 200, dtype=torch.bfloat16), torch.rand(3, device=DEVICE)
    out = torch.full((3, 200), float("nan"), device=DEVICE)
    permute.permute_rows(x, ints(4, -1, 1, dtype=torch.int64), weights=weights, out=out)
    assert same_bits(out[0], x[4].float() * weights[0])
    assert not out[1].any()
    assert same_bits(out[2], x[1].float() * weights[2])
    assert permute.permute_rows(x, ints()).shape == (0, 200)
    with pytest.raises(InvalidArgumentError, match="out is"):
        permute.permute_rows(x, ints(1), out=out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_unpermute_sums_in_the_order_of_k(weighted: bool, dtype: torch.dtype) -> None:
    rows = rand(30, 200, dtype=dtype)
    index = torch.randint(-1, 30, (11, 6))
    index[4] = -1
    weights = torch.rand(11, 6)
    want = torch.zeros(11, 200)
    for k in range(6):
        part = rows.cpu()[index[:, k].clamp_min(0)].float()
        part = part * weights[:, k, None] if weighted else part
        want += torch.where(index[:, k, None] >= 0, part, 0.0)
    given = weights.to(DEVICE) if weighted else None
    got = permute.unpermute_sum(rows, index.to(DEVICE), given)
    assert same_bits(got, want.to(dtype))


def test_unpermute_ignores_weights_of_no_row() -> None:
    weights = torch.tensor([[2.0, float("nan")]], device=DEVICE)
    got = permute.unpermute_sum(torch.ones(3, 16, device=DEVICE), ints(1, -1).view(1, 2), weights)
    assert bool((got == 2).all())


# --- grouped products ----------------------------------------------------------------------------


def by_hand(x: Tensor, weight: Tensor, counts: list[int], starts: list[int]) -> Tensor:
    """fp32 [R, N]; rows of no expert are zero."""
    out = [torch.zeros(x.shape[0], weight.shape[2], device=x.device)]
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        y = x[start : start + count].float() @ weight[expert].float()
        out.append(functional.pad(y, (0, 0, start, x.shape[0] - start - count)))
    return torch.stack(out).sum(dim=0)


def after_one_another(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """One rounding to dtype, and fp32 sums of 272 products of size 1/16 in another order."""
    rtol = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 1e-5)
    torch.testing.assert_close(got.float(), want, rtol=rtol, atol=1e-5 if rtol < 2**-10 else 1e-3)


@pytest.mark.parametrize(("shape", "counts", "dtype"), cells.pairwise(SHAPES, COUNTS, FLOATS))
def test_every_expert_multiplies_its_rows(
    shape: tuple[int, int], counts: list[int], dtype: torch.dtype
) -> None:
    k, n = shape
    x, weight = rand(NUM_ROWS, k, dtype=dtype), rand(NUM_EXPERTS, k, n, dtype=dtype) / k**0.5
    x[sum(counts) :] = float("nan")  # rows of no expert are not read
    got = grouped_gemm(x, weight, ints(*counts), zero_padding=True)
    used = torch.arange(NUM_ROWS, device=DEVICE)[:, None] < sum(counts)
    want = by_hand(torch.where(used, x, 0), weight, counts, after_one_another(counts))
    assert_close(got, want, dtype)


def test_rows_start_at_their_offsets() -> None:
    counts, offsets = [3, 0, 9, 1, 5], [0, 8, 8, 24, 32, 40]
    x, weight = rand(48, 64), rand(NUM_EXPERTS, 64, 40) / 8
    got = grouped_gemm(x, weight, ints(*counts), offsets=ints(*offsets), zero_padding=True)
    assert_close(got, by_hand(x, weight, counts, offsets[:-1]), torch.float32)


def test_padded_rows() -> None:
    counts = [3, 0, 9, 1, 5]
    x, weight = rand(NUM_EXPERTS, 10, 64), rand(NUM_EXPERTS, 64, 40) / 8
    got = grouped_gemm(x, weight, ints(*counts, dtype=torch.int64), zero_padding=True)
    want = by_hand(x.flatten(0, 1), weight, counts, [0, 10, 20, 30, 40])
    assert_close(got, want.view(NUM_EXPERTS, 10, 40), torch.float32)


@pytest.mark.parametrize(("counts", "shape"), cells.pairwise(COUNTS, SHAPES))
def test_counters_say_which_rows_are_written(counts: list[int], shape: tuple[int, int]) -> None:
    k, n = shape
    x, weight = rand(NUM_EXPERTS, NUM_ROWS, k), rand(NUM_EXPERTS, k, n)
    out, ready = make_unready(x, weight, num_sms=3)
    assert not ready.counters.any()
    grouped_gemm_into(out, x, weight, ints(*counts), ready)
    want = grouped_gemm(x, weight, ints(*counts))
    for expert, count in enumerate(counts):
        assert same_bits(out[expert, :count], want[expert, :count])
        tiles = -(-count // (ready.rows or 0))
        assert ready.counters[expert, :tiles].tolist() == [ready.want] * tiles
        assert not ready.counters[expert, tiles:].any()
    with pytest.raises(InvalidArgumentError, match="what make_unready"):
        grouped_gemm_into(out[:, 1:], x, weight, ints(*counts), ready)
    with pytest.raises(InvalidArgumentError, match=r"x is \(140, .* must be padded"):
        make_unready(x[0], weight, num_sms=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_sends_what_a_product_writes(dtype: torch.dtype) -> None:
    """Combine begins first. Sums are those of a combine behind the product."""
    fields = {"num_experts": 4, "hidden_dim": 128, "topk": 2, "max_tokens": 80, "dtype": dtype}
    config = AllToAllConfig(**fields, device=DEVICE)  # type: ignore[arg-type]
    weight = rand(4, 128, 128, dtype=dtype)
    with AllToAll(dist.HashStore(), config, rank=0, world_size=1) as all_to_all:
        x, routing = rand(80, 128, dtype=dtype), torch.rand(80, 4).topk(2).indices.to(DEVICE)
        for _ in range(3):
            got = all_to_all.dispatch(x, routing)
            expected = all_to_all.combine(grouped_gemm(got.x, weight, got.counts), got)
            got = all_to_all.dispatch(x, routing)
            y, ready = make_unready(got.x, weight, num_sms=2)
            y.fill_(float("nan"))
            product = functools.partial(grouped_gemm_into, y, got.x, weight, got.counts, ready)
            if DEVICE == "cpu":
                running = threading.Thread(target=product)
                running.start()
                pending = all_to_all.combine_send(y, got, ready=ready)
                running.join()
            else:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                pending = all_to_all.combine_send(y, got, ready=ready)
                with torch.cuda.stream(side):
                    product()
                torch.cuda.current_stream().wait_stream(side)
            assert same_bits(all_to_all.combine_recv(pending), expected)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_product_takes_rows_while_they_arrive(quantized: bool) -> None:
    """The product begins first; results are those of one that begins when all is here."""
    fields = {"num_experts": 4, "hidden_dim": 128, "topk": 2, "max_tokens": 200}
    config = AllToAllConfig(**fields, device=DEVICE, timeout_s=60.0)  # type: ignore[arg-type]
    gate, up = (rand(4, 128, 256, dtype=torch.bfloat16) / 11 for _ in range(2))
    if quantized:
        gate, up = (Fp8(*quantize.quantize_weights(each)) for each in (gate, up))
    with AllToAll(dist.HashStore(), config, rank=0, world_size=1) as all_to_all:
        for tokens in (200, 1, 0):
            x = rand(tokens, 128, dtype=torch.bfloat16)
            routing = torch.rand(tokens, 4).topk(2).indices.to(DEVICE)
            pending = all_to_all.dispatch_send(x, routing, quantize=quantized)
            into = all_to_all.make_outputs(pending, num_sms=2)
            rows = into.x if into.scales is None else Fp8(into.x, into.scales)
            product = functools.partial(grouped_swiglu, rows, gate, up, into.counts)
            got = beside(
                functools.partial(product, ready=into.ready),
                functools.partial(all_to_all.dispatch_recv, pending, into),
            )
            all_to_all.check()
            for mine, want in zip(_parts(got), _parts(product()), strict=True):
                for expert, count in enumerate(into.counts.tolist()):
                    assert same_bits(mine[expert, :count], want[expert, :count])
            all_to_all.release(into)


def beside(product: Callable[[], Tensor | Fp8], receive: Callable[[], object]) -> Tensor | Fp8:
    """What the product makes; it begins first where that is a thread, else behind the launch."""
    if DEVICE == "cpu":
        with ThreadPoolExecutor(1) as other:
            made = other.submit(product)
            receive()
            return made.result()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    receive()
    with torch.cuda.stream(side):
        got = product()
    torch.cuda.current_stream().wait_stream(side)
    return got


def _parts(each: Tensor | Fp8) -> tuple[Tensor, ...]:
    return (each,) if isinstance(each, Tensor) else tuple(each)


def arriving(capacity: int, counts: list[int], here: list[int]) -> tuple[Tensor, ReadyRows]:
    """Counts and counters of a dispatch of which so many rows are here; -1: not even the count."""
    blocks = -(-capacity // 128)
    counters = torch.zeros(len(counts), blocks, dtype=torch.int32)
    for expert, (count, rows) in enumerate(zip(counts, here, strict=True)):
        for block in range(blocks if rows >= 0 else 0):
            most, got = (min(max(n - 128 * block, 0), 128) for n in (count, rows))
            counters[expert, block] = 512 - most + got
    late = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=DEVICE == "cuda")
    ready = ReadyRows(counters=counters.to(DEVICE), want=512, rows=128, timeout_s=0.05, late=late)
    return ints(*counts), ready


@pytest.mark.parametrize(
    ("here", "late"),
    [
        ([3, 130, 0, 7, 200], None),
        ([3, 130, 0, 6, 200], (3 * 2, 511)),
        ([3, 130, 0, 7, 130], (4 * 2 + 1, 512 - 72 + 2)),
        ([3, 130, 0, -1, 200], (3 * 2, 0)),
    ],
    ids=["all", "a row is missing", "rows of a second block", "not even a count"],
)
def test_rows_that_do_not_come_are_noted(here: list[int], late: tuple[int, int] | None) -> None:
    counts, capacity = [3, 130, 0, 7, 200], 200
    x = rand(NUM_EXPERTS, capacity, 32)
    gate, up = (rand(NUM_EXPERTS, 32, 64) / 8 for _ in range(2))
    want = grouped_swiglu(x, gate, up, ints(*counts))
    given, ready = arriving(capacity, counts, here)
    got = grouped_swiglu(x, gate, up, given, ready=ready)
    assert isinstance(got, Tensor)
    assert isinstance(want, Tensor)
    assert ready.late is not None
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    noted = int(ready.late)
    assert ((noted >> 32) - 1, noted & 0xFFFFFFFF) == (late or (-1, 0))
    rows = torch.arange(capacity, device=DEVICE)[None] < given[:, None]
    absent = got[rows].isnan()
    assert same_bits(got[rows][~absent], want[rows][~absent])
    assert bool(absent.any()) == (late is not None)


def test_a_product_of_arriving_rows_refuses_what_it_cannot_wait_for() -> None:
    x, gate = rand(NUM_EXPERTS, 200, 64), rand(NUM_EXPERTS, 64, 128)
    counts, ready = arriving(200, [3, 130, 0, 7, 200], [3, 130, 0, 7, 200])
    product = functools.partial(grouped_swiglu, gate=gate, up=gate)
    bare = ReadyRows(counters=ready.counters, want=512)
    with pytest.raises(InvalidArgumentError, match=r"must be received\.ready"):
        product(x, counts=counts, ready=bare)
    with pytest.raises(InvalidArgumentError, match="must be padded with `ready`"):
        product(x[0], counts=counts, ready=ready)
    with pytest.raises(InvalidArgumentError, match=r"has counters \(5, 2\), must be \(5, 1\)"):
        product(x[:, :100].contiguous(), counts=counts, ready=ready)
    with pytest.raises(InvalidArgumentError, match="must be contiguous with `ready`"):
        product(x.mT.contiguous().mT, counts=counts, ready=ready)


def test_counts_past_the_end_read_and_write_no_other_row() -> None:
    """Counts of a dispatch over its capacity: the last expert would write far past the end."""
    weight = rand(3, 64, 40) / 8
    x, counts, grad = rand(8, 64).requires_grad_(), ints(3, 60_000, 60_000), rand(8, 40)
    got = grouped_gemm(x, weight.requires_grad_(), counts, offsets=ints(0, 3, 60_003))
    assert_close(got, by_hand(x, weight, [3, 5, 0], [0, 3, 8]), torch.float32)
    got_weight = torch.autograd.grad(got, weight, grad)[0]
    want_weight = torch.stack([x[:3].T @ grad[:3], x[3:].T @ grad[3:], torch.zeros_like(weight[0])])
    assert_close(got_weight, want_weight, torch.float32)
    padded = rand(3, 5, 64)
    got = grouped_gemm(padded, weight, ints(2, 60_000, 60_000), zero_padding=True)
    want = by_hand(padded.flatten(0, 1), weight, [2, 5, 5], [0, 5, 10])
    assert_close(got, want.view(3, 5, 40), torch.float32)


@pytest.mark.parametrize("lost", [[-1, -1, -1], [2, -1, 3]])
def test_counts_of_a_dispatch_that_failed_are_no_rows(lost: list[int]) -> None:
    counts, has = ints(*lost), [max(count, 0) for count in lost]
    weight = (rand(3, 64, 40) / 8).requires_grad_()
    x, grad = rand(8, 64), rand(8, 40)
    starts = after_one_another(has)
    for offsets in (None, ints(*starts, sum(has))):
        got = grouped_gemm(x, weight, counts, offsets=offsets, zero_padding=True)
        assert_close(got, by_hand(x, weight, has, starts), torch.float32)
        (got_weight,) = torch.autograd.grad(got, weight, grad)
        spans = [slice(start, start + count) for start, count in zip(starts, has, strict=True)]
        assert_close(got_weight, torch.stack([x[s].T @ grad[s] for s in spans]), torch.float32)
    padded = rand(3, 5, 64)
    got = grouped_gemm(padded, weight, counts, zero_padding=True)
    want = by_hand(padded.flatten(0, 1), weight, has, [0, 5, 10])
    assert_close(got, want.view(3, 5, 40), torch.float32)


def test_no_rows_and_no_experts() -> None:
    weight = rand(2, 64, 40)
    assert grouped_gemm(rand(0, 64), weight, ints(0, 0)).shape == (0, 40)
    assert grouped_gemm(rand(2, 0, 64), weight, ints(0, 0)).shape == (2, 0, 40)
    assert not grouped_gemm(rand(3, 64), weight[:0], ints(), zero_padding=True).any()


def test_rows_behind_two_to_the_thirty_first_value() -> None:
    """Tensors are mostly untouched, so that their pages take no memory."""
    rows = (1 << 31) // 64 + 3  # rows of 64 values
    x = torch.empty(rows, 64, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = rand(2, 64)
    weight, counts, offsets = rand(1, 64, 64, dtype=torch.bfloat16), ints(2), ints(rows - 2)
    want = x[-2:].float() @ weight[0].float()
    got = grouped_gemm(x, weight, counts, offsets=offsets)
    torch.testing.assert_close(got[-2:].float(), want, rtol=2**-8, atol=2**-8)  # one rounding
    grad = torch.ops.moe_p2p.grouped_weight_grad(x, got, offsets, counts)
    want = x[-2:].float().t() @ got[-2:].float()
    torch.testing.assert_close(grad[0].float(), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_swiglu_is_two_products(k: int, n: int, dtype: torch.dtype) -> None:
    counts = COUNTS[3]
    x = rand(NUM_ROWS, k, dtype=dtype)
    gate, up = (rand(NUM_EXPERTS, k, n, dtype=dtype) / k**0.5 for _ in range(2))
    got = grouped_swiglu(x, gate, up, ints(*counts))
    starts = after_one_another(counts)
    want = functional.silu(by_hand(x, gate, counts, starts)) * by_hand(x, up, counts, starts)
    assert isinstance(got, Tensor)
    assert_close(got[: sum(counts)], want[: sum(counts)], dtype)


@pytest.mark.parametrize(
    ("k", "n", "counts"),
    cells.few(
        [(*shape, counts) for shape in SHAPES for counts in COUNTS],
        keep=lambda cell: cell[0] < 272 or cell[2] is COUNTS[0],  # cut tiles with all counts
    ),
)
def test_fp8_products_use_the_scales_of_their_blocks(k: int, n: int, counts: list[int]) -> None:
    sizes = 2.0 ** torch.randint(-3, 4, (NUM_ROWS, k), device=DEVICE)
    x = Fp8(*quantize.quantize(rand(NUM_ROWS, k) * sizes))
    plain = rand(NUM_EXPERTS, k, n) * 2.0 ** torch.randint(-3, 3, (k, n), device=DEVICE)
    gate, up = (Fp8(*quantize.quantize_weights(w / k)) for w in (plain, plain.flip(0)))
    rows, starts, used = (
        reference.dequantize(*(part.cpu() for part in x)).to(DEVICE),
        after_one_another(counts),
        sum(counts),
    )
    want_gate, want_up = (by_hand(rows, spread(w), counts, starts) for w in (gate, up))
    got = grouped_gemm(x, gate, ints(*counts), out_dtype=torch.float32, zero_padding=True)
    # Tensor cores sum fp8 products with about 14 bits.
    torch.testing.assert_close(got, want_gate, rtol=2**-8, atol=2**-8)
    h = grouped_swiglu(x, gate, up, ints(*counts))
    assert isinstance(h, Fp8)
    want = functional.silu(want_gate) * want_up
    got_h = reference.dequantize(*(part[:used].cpu() for part in h)).to(DEVICE)
    # Half a step of e4m3 is 1/16 of a value.
    torch.testing.assert_close(got_h, want[:used], rtol=0.07, atol=0.02)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_are_those_of_torch(counts: list[int], dtype: torch.dtype) -> None:
    k, n = 100, 72
    x, grad = rand(NUM_ROWS, k, dtype=dtype), rand(NUM_ROWS, n, dtype=dtype)
    weight = rand(NUM_EXPERTS, k, n, dtype=dtype) / k**0.5
    x.requires_grad_()
    weight.requires_grad_()
    y = grouped_gemm(x, weight, ints(*counts), zero_padding=True)
    got = torch.autograd.grad(y, (x, weight), grad)
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    want_y = by_hand(*wide, counts, after_one_another(counts))
    want = torch.autograd.grad(want_y, wide, grad.float())
    for mine, whole in zip(got, want, strict=True):
        assert mine.dtype == dtype
        assert_close(mine, whole, dtype)


def test_counts_may_be_a_view() -> None:
    x, weight, grad = rand(8, 64), rand(2, 64, 40).requires_grad_(), rand(8, 40)
    table = ints(3, 1, 5, 1).view(2, 2)  # 1: fewer rows than there are, which no bound corrects
    (y, got), (want_y, want) = (
        (y, torch.autograd.grad(y, weight, grad)[0])
        for y in (grouped_gemm(x, weight, counts) for counts in (table[:, 0], ints(3, 5)))
    )
    assert same_bits(y, want_y)
    assert same_bits(got, want)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = rand(6, 64), rand(2, 64, 40)
    with pytest.raises(InvalidArgumentError, match=r"counts is torch.float32 on .*int32 or int64"):
        grouped_gemm(x, weight, ints(1, 2).float())
    fp8 = Fp8(*quantize.quantize(x)), Fp8(*quantize.quantize_weights(weight))
    with pytest.raises(InvalidArgumentError, match=r"do not go with weights \(2, 64, 40\)"):
        grouped_gemm(x, weight, ints(1, 2, 3))
    with pytest.raises(InvalidArgumentError, match=r"offsets is \(1,\), must be \[2\] or longer"):
        grouped_gemm(x, weight, ints(1, 2), offsets=ints(0))
    with pytest.raises(InvalidArgumentError, match=r"x is torch.float32, weights are"):
        grouped_gemm(x, weight.half(), ints(1, 2))
    with pytest.raises(InvalidArgumentError, match=r"fp8 needs scales"):
        grouped_gemm(fp8[0].values, fp8[1].values, ints(1, 2))
    with pytest.raises(InvalidArgumentError, match=r"of one shape and order in memory"):
        grouped_swiglu(x, weight, weight.mT.contiguous().mT, ints(1, 2))
    with pytest.raises(InvalidArgumentError, match=r"no gradient through a grouped_gemm"):
        grouped_gemm(x.requires_grad_(), weight, ints(1, 2), out_dtype=torch.bfloat16)


# --- the layer -----------------------------------------------------------------------------------


def experts_by_hand(experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
    return experts.cpu()(rows.cpu(), torch.tensor(counts)).to(DEVICE)


@pytest.mark.parametrize("trains", [False, True])
def test_experts_with_kernels_equal_those_without(trains: bool) -> None:
    counts = [3, 0, 20, 7]
    experts = Experts([4, 5, 6, 7], 144, ffn_dim=72, seed=1)
    rows = rand(36, 144)
    rows[30:] = float("nan")
    want = experts_by_hand(experts, rows, counts)
    with torch.set_grad_enabled(trains):
        got = experts.to(DEVICE)._with_kernels(rows, ints(*counts), None)
    used = 36 if trains else 30  # rows of no expert are zero when it trains
    torch.testing.assert_close(got[:used], want[:used], rtol=1e-4, atol=1e-5)


def test_experts_are_one_graph() -> None:
    experts = Experts([0, 1, 2], 64, ffn_dim=40, seed=1).to(DEVICE)
    fp8 = Fp8Experts(experts)
    rows, counts = rand(30, 64).requires_grad_(), ints(7, 0, 23)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return experts._with_kernels(x, counts, None), fp8(x, counts)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(rows), run(rows), strict=True):
        assert torch.equal(got, want)
    gradients = [
        torch.autograd.grad(f(rows)[0].sum(), [rows, experts.w_up]) for f in (compiled, run)
    ]
    assert all(torch.equal(got, want) for got, want in zip(*gradients, strict=True))


@pytest.mark.parametrize("over", ["nothing", "dispatch and combine"])
def test_fp8_layer_is_close_to_the_plain_one(over: str) -> None:
    layer = MoELayer(144, 6, topk=2, ffn_dim=72)
    x = rand(40, 144)
    with torch.no_grad():
        want = layer(x.cpu()).to(DEVICE)
    layer.to(DEVICE).quantize_experts()
    if over == "nothing":
        got = layer(x)
    else:
        config = AllToAllConfig(
            num_experts=6,
            hidden_dim=144,
            topk=2,
            max_tokens=40,
            dtype=torch.float32,
            device=DEVICE,
        )
        with AllToAll(dist.HashStore(), config, rank=0, world_size=1) as layer.all_to_all:
            got = layer(x).clone()
    assert not got.requires_grad
    # Four roundings, uniform between 0 and 1/16, in sums of mixed signs.
    distance = (got - want).norm() / want.norm()
    assert 0.01 < distance < 0.1
