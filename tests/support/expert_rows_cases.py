"""The Triton kernels behind Megatron's fused permutation; run by test_triton_kernels.py.

They are compared with the same functions in torch, which tests/engines/test_megatron_permute.py
compares with Megatron's own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError
from moe_p2p.integrations.moe import expert_rows_cpu, megatron_permute
from moe_p2p.kernels.triton import expert_rows
from tests.support.triton_cases import DEVICE, ints, rand, same_bits

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.manual_seed(5)
    monkeypatch.setattr(megatron_permute, "functions_for", lambda _: expert_rows)


def a_map(num_tokens: int = 7, num_experts: int = 5, share: float = 0.4) -> Tensor:
    return (torch.rand(num_tokens, num_experts) < share).to(DEVICE)


def cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert same_bits(got, want)


def listed(places: Tensor) -> list[tuple[list[int], list[int]]]:
    """Rows and experts of each token."""
    num_experts = (places.shape[1] - 2) // 2
    return [
        (row[2 : 2 + row[0]], row[2 + num_experts : 2 + num_experts + row[0]])
        for row in places.tolist()
    ]


@pytest.mark.parametrize(
    ("tokens", "experts", "share"), [(7, 5, 0.4), (1, 1, 1.0), (6, 8, 1.0), (9, 40, 0.0), (0, 3, 1)]
)
def test_places_are_rows_grouped_by_expert(tokens: int, experts: int, share: float) -> None:
    routing_map = a_map(tokens, experts, share)
    places = expert_rows.list_places(routing_map)
    pairs = routing_map.cpu().T.nonzero().tolist()
    row_of = {(token, expert): row for row, (expert, token) in enumerate(pairs)}
    for token, (rows, of_experts) in enumerate(listed(places)):
        assert of_experts == routing_map[token].nonzero()[:, 0].tolist()
        assert rows == [row_of[token, expert] for expert in of_experts]
    assert places[:, 1].tolist() == [len(pairs)] * tokens
    want = expert_rows_cpu.list_places(routing_map.cpu())
    assert listed(places) == listed(want)
    odd = routing_map.t().contiguous().t()  # strides of a transposed map
    assert listed(expert_rows.list_places(odd)) == listed(places)


@pytest.mark.parametrize(
    ("dtype", "weighted", "probs", "hidden", "more", "share"),
    [
        # more: rows that there are beyond, or fewer than, the map's. share: of the map.
        (FP32, None, FP32, 37, 0, 0.4),
        (BF16, None, FP32, 1032, 0, 0.4),
        (BF16, FP32, FP32, 37, 3, 0.4),
        (BF16, FP64, FP64, 37, -4, 0.4),
        (BF16, BF16, BF16, 1, 0, 1.0),
        (torch.float16, FP32, BF16, 37, 0, 1.0),
        (FP32, FP64, FP32, 37, 3, 0.0),
        (FP32, BF16, FP64, 1032, -4, 1.0),
        (FP64, None, FP64, 37, 0, 0.4),
        (FP64, FP32, FP32, 1, 40, 0.4),
    ],
)
def test_rows_and_sums_have_the_bits_of_torch(
    dtype: torch.dtype,
    weighted: torch.dtype | None,
    probs: torch.dtype,
    hidden: int,
    more: int,
    share: float,
) -> None:
    routing_map = a_map(share=share)
    num_rows = max(int(routing_map.sum()) + more, 0)
    places = expert_rows.list_places(routing_map)
    plain = expert_rows_cpu.list_places(routing_map.cpu())
    x, given = rand(7, hidden, dtype=dtype), rand(7, 5, dtype=probs)
    weights = None if weighted is None else rand(7, 5, dtype=weighted)
    for probs_or_none in (given, None):
        got = expert_rows.to_rows(x, places, num_rows, weights=weights, probs=probs_or_none)
        want = expert_rows_cpu.to_rows(
            x.cpu(), plain, num_rows, weights=cpu(weights), probs=cpu(probs_or_none)
        )
        for mine, other in zip(got, want, strict=True):
            assert_same(mine, other)
    rows, row_probs = rand(num_rows, hidden, dtype=dtype), rand(num_rows, dtype=probs)
    for probs_or_none in (row_probs, None):
        got = expert_rows.sum_rows(rows, places, weights=weights, row_probs=probs_or_none)
        want_sums = expert_rows_cpu.sum_rows(
            rows.cpu(), plain, weights=cpu(weights), row_probs=cpu(probs_or_none)
        )
        for mine, other in zip(got, want_sums, strict=True):
            assert_same(mine, other)
    dots = expert_rows.dots(x, rows, places, probs)
    want_dots = expert_rows_cpu.dots(x.cpu(), rows.cpu(), plain, probs)
    # Up to 1,032 products of size 1 in fp32, in another order, and half a bit of bf16.
    torch.testing.assert_close(
        dots.cpu(), want_dots, rtol=2**-8 if probs == BF16 else 1e-5, atol=1e-4
    )


def chunks(*given: int) -> Tensor:
    return ints(*given, dtype=torch.int64)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ((3, 0, 5, 1), (2, 0, 3, 1)),
        ((300, 2, 600), (1, 2, 0)),  # more rows than a program writes at once
        ((4,), (0,)),
        ((0, 0), (1, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_chunks_are_put_in_order(
    sizes: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = chunks(*sizes).to(dtype), chunks(*order).to(dtype)
    index, inverse = expert_rows.chunk_index(*given, sum(sizes))
    want, want_inverse = expert_rows_cpu.chunk_index(given[0].cpu(), given[1].cpu(), sum(sizes))
    assert index.tolist() == want.tolist()
    assert inverse.tolist() == want_inverse.tolist()


def test_rows_behind_all_chunks_stay() -> None:
    index, inverse = expert_rows.chunk_index(chunks(2, 1), chunks(1, 0), 6)
    assert index.tolist() == [2, 0, 1, 3, 4, 5]
    assert inverse.tolist() == [1, 2, 0, 3, 4, 5]


def test_sizes_of_more_rows_than_there_are_write_no_other_row() -> None:
    index, inverse = expert_rows.chunk_index(chunks(2, 9), chunks(1, 0), 4)
    assert index.tolist() == [2, 3, 4, 5]
    assert inverse.tolist() == [9, 10, 0, 1]
    rows = expert_rows.take_rows(torch.ones(4, 8, device=DEVICE), index)
    assert rows[:2].all()
    assert not rows[2:].any(), "rows that are not there are zeros"


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("merged", [False, True])
def test_gradients_flow_through_the_kernels(
    dtype: torch.dtype, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """permute, sort, sort back, unpermute: kernels against torch, from one seed."""
    routing_map = a_map(11, 6)
    num_rows = int(routing_map.sum())
    sizes, order = routing_map.sum(0).long(), torch.arange(6, device=DEVICE).flip(0)
    leaves = rand(11, 72, dtype=dtype), rand(11, 6), rand(11, 6)
    grad = rand(11, 72, dtype=dtype)

    def both(x: Tensor, probs: Tensor, merging: Tensor) -> list[Tensor]:
        mine = [each.to(x.device) for each in (routing_map, sizes, order, grad)]
        rows, row_probs, places = megatron_permute.fused_permute_with_probs(
            x, probs, mine[0], num_rows
        )
        rows, row_probs = megatron_permute.fused_sort_chunks_by_index_with_probs(
            rows, row_probs, mine[1], mine[2]
        )
        rows = (rows * row_probs[:, None]).to(x.dtype)
        rows = megatron_permute.fused_sort_chunks_by_index(rows, mine[1].flip(0), mine[2])
        out = megatron_permute.fused_unpermute(
            rows, places, merging if merged else None, restore_shape=x.shape
        )
        wanted = (x, probs, merging) if merged else (x, probs)
        return [out, *torch.autograd.grad(out, wanted, mine[3])]

    got = both(*(each.clone().requires_grad_() for each in leaves))
    monkeypatch.setattr(megatron_permute, "functions_for", lambda _: expert_rows_cpu)
    want = both(*(each.cpu().clone().requires_grad_() for each in leaves))
    assert same_bits(got[0], want[0])
    for mine, other in zip(got[1:], want[1:], strict=True):
        # Sums over 72 products in another order; torch's product of rows and probabilities.
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-4)
    # Of a weighted sum without such products every bit is the same.
    assert same_bits(got[1], want[1])


def test_a_sum_gives_gradients_without_memory_of_their_own() -> None:
    """sum() hands back an expanded scalar."""
    x = rand(7, 40).requires_grad_()
    rows, _ = megatron_permute.fused_permute(x, a_map(share=1.0))
    (got,) = torch.autograd.grad(rows.sum(), x)
    assert bool((got == 5).all())


def test_what_does_not_fit_is_refused() -> None:
    x, routing_map = rand(7, 40), a_map()
    rows, places = megatron_permute.fused_permute(x, routing_map)
    with pytest.raises(InvalidArgumentError, match=r"inp is \(7, 40\), routing_map \(6, 5\)"):
        megatron_permute.fused_permute(x, routing_map[:6])
    with pytest.raises(InvalidArgumentError, match=r"probs are \(7, 4\), must be \(7, 5\) like"):
        megatron_permute.fused_permute_with_probs(x, rand(7, 4), routing_map)
    with pytest.raises(InvalidArgumentError, match="must both be fused"):
        megatron_permute.fused_unpermute(rows, places[:, 0].long())
    with pytest.raises(
        InvalidArgumentError, match=r"must be \[R, H\], and restore_shape \(7, 40\)"
    ):
        megatron_permute.fused_unpermute(rows, places, restore_shape=torch.Size([8, 40]))
    with pytest.raises(InvalidArgumentError, match=r"must be \[R, H\], \[C\] and \[C\]"):
        megatron_permute.fused_sort_chunks_by_index(rows, chunks(1, 2), chunks(0))
    with pytest.raises(InvalidArgumentError, match=r"probs are \(2,\), must be"):
        megatron_permute.fused_sort_chunks_by_index_with_probs(
            rows, rand(2), chunks(len(rows)), chunks(0)
        )
    with pytest.raises(InvalidArgumentError, match="split_sizes sum up to 3, there are 4 rows"):
        expert_rows_cpu.chunk_index(torch.tensor([1, 2]), torch.tensor([0, 1]), 4)
