"""The fused permutation against Megatron-Core's own functions, values and gradients, on a CPU.

Whole layers with it are the `_fused` systems of test_megatron.py; the Triton kernels are compared
with what runs here in tests/support/expert_rows_cases.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe_p2p.integrations.moe import megatron, megatron_permute
from tests.engines import packages, test_megatron
from tests.support.ranks import Rank, run_processes

pytestmark = [pytest.mark.engine("megatron-core"), pytest.mark.timeout(400)]

EXPERTS = 8
FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Case(NamedTuple):
    topk: int = 4
    tokens: int = 23
    hidden: int = 37
    dtype: torch.dtype = FP32
    probs: torch.dtype | None = FP32
    dropped: float = 0.0  # share of the rows
    idle: int = 0  # first experts without rows
    cut: int = 0  # rows that num_out_tokens leaves out

    def routing_map(self) -> Tensor:
        chances = torch.rand(self.tokens, EXPERTS)
        chances[:, : self.idle] = -1.0
        indices = chances.topk(self.topk, dim=-1).indices
        made = torch.zeros(self.tokens, EXPERTS, dtype=torch.bool).scatter_(1, indices, True)
        return made & (torch.rand(made.shape) >= self.dropped)


CASES = [
    *(Case(topk=topk) for topk in (1, 2, 3, 5, 8)),
    *(Case(dtype=dtype, probs=p) for dtype in (FP32, BF16) for p in (None, FP32, FP64, BF16)),
    *(Case(tokens=tokens, topk=1, probs=p) for tokens in (0, 1) for p in (None, FP32)),
    *(Case(dropped=share, idle=idle) for share, idle in ((0.0, 4), (0.5, 0), (0.3, 2), (1.0, 0))),
    *(Case(hidden=hidden, dtype=BF16) for hidden in (1, 64)),
    *(Case(cut=5, probs=p) for p in (None, FP32)),
]


def differentiated(
    function: Callable[..., tuple[Tensor | None, ...]], *given: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of function(*given), and gradients of what was given; None is left out."""
    leaves = [None if each is None else each.clone().requires_grad_() for each in given]
    results = [each for each in function(*leaves) if each is not None]
    torch.manual_seed(9)
    seeds = [torch.randn(each.shape).to(each.dtype) for each in results]
    got = torch.autograd.grad(results, [each for each in leaves if each is not None], seeds)
    return [each.detach() for each in results], list(got)


def assert_rounded_once(mine: Tensor, exact: Tensor) -> None:
    """Of an fp32 sum, or fp64 where the type is: half a bit of the type, and 64 terms of size 1 or
    less than 4 in another order."""
    rtol, atol = {BF16: (2**-8, 1e-4), FP32: (2**-22, 2e-5), FP64: (1e-12, 1e-12)}[mine.dtype]
    torch.testing.assert_close(mine.to(FP64), exact, rtol=rtol, atol=atol)


def compare_permute(utils: Any, case: Case) -> None:
    routing_map, x = case.routing_map(), torch.randn(case.tokens, case.hidden).to(case.dtype)
    probs = None if case.probs is None else torch.rand(case.tokens, EXPERTS).to(case.probs)
    num_rows = torch.tensor(max(int(routing_map.sum()) - case.cut, 0))

    def permute(fused: bool) -> Callable[..., tuple[Tensor | None, ...]]:
        return lambda x, probs: utils.permute(
            x, routing_map, probs=probs, num_out_tokens=num_rows, fused=fused
        )[:2]

    mine, mine_grads = differentiated(permute(True), x, probs)
    other, other_grads = differentiated(permute(False), x, probs)
    for got, want in zip(mine + mine_grads[1:], other + other_grads[1:], strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want), case
    assert mine_grads[0].dtype == x.dtype
    if case.dtype == FP32:
        assert torch.equal(mine_grads[0], other_grads[0]), case  # in one order
        return
    # Megatron rounds after every row; gradients of rows are the same in fp64.
    exact = torch.zeros(x.shape, dtype=FP64)
    torch.manual_seed(9)
    seed = torch.randn(mine[0].shape).to(case.dtype)
    indices = utils.permute(x, routing_map, num_out_tokens=num_rows)[2]
    assert_rounded_once(mine_grads[0], exact.index_add_(0, indices, seed.to(FP64)))


def compare_unpermute(utils: Any, case: Case) -> None:
    routing_map, x = case.routing_map(), torch.randn(case.tokens, case.hidden).to(case.dtype)
    probs = None if case.probs is None else torch.rand(case.tokens, EXPERTS).to(case.probs)
    num_rows = max(int(routing_map.sum()) - case.cut, 0)
    given: dict[str, Any] = {"restore_shape": x.shape, "routing_map": routing_map}
    if case.cut and probs is not None:
        return  # Megatron's own cannot

    def unpermute(fused: bool, dtype: torch.dtype = case.dtype) -> Any:
        kept = utils.permute(x, routing_map, num_out_tokens=num_rows, fused=fused)[2]
        return lambda rows, probs: (
            utils.unpermute(rows.to(dtype), kept, probs=probs, fused=fused, **given),
        )

    rows = torch.randn(num_rows, case.hidden).to(case.dtype)
    mine, mine_grads = differentiated(unpermute(True), rows, probs)
    other, other_grads = differentiated(unpermute(False), rows, probs)
    assert mine[0].dtype == rows.dtype
    assert torch.equal(mine_grads[0], other_grads[0]), case
    if case.dtype == BF16 and case.probs in (None, BF16):  # Megatron rounds after every row
        assert_rounded_once(mine[0], unpermute(False, FP64)(rows, probs)[0])
    else:
        assert torch.equal(mine[0], other[0]), case
    if probs is not None:
        torch.manual_seed(9)
        seed = torch.randn(x.shape).to(case.dtype).to(FP64)
        expert, token = routing_map.T.nonzero().T
        want = torch.zeros(probs.shape, dtype=FP64)
        want[token, expert] = (seed[token] * rows.to(FP64)).sum(dim=-1)
        assert mine_grads[1].dtype == probs.dtype
        assert_rounded_once(mine_grads[1], want)


def compare_chunks(utils: Any, dtype: torch.dtype, with_probs: bool) -> None:
    sizes = torch.tensor([3, 0, 5, 1, 0, 7, 2, 4])
    order = torch.arange(8).view(2, 4).T.ravel()
    x = torch.randn(22, 37).to(dtype)
    probs = torch.rand(22) if with_probs else None

    def sort(fused: bool) -> Any:
        return lambda x, probs: utils.sort_chunks_by_idxs(x, sizes, order, probs=probs, fused=fused)

    mine, other = (differentiated(sort(fused), x, probs) for fused in (True, False))
    for got, want in zip(mine[0] + mine[1], other[0] + other[1], strict=True):
        assert torch.equal(got, want)


def compare_padded(utils: Any) -> None:
    """With --moe-pad-expert-input-to-capacity each expert has as many rows."""
    capacity = 6
    chosen = torch.rand(EXPERTS, 23).topk(capacity, dim=-1).indices
    routing_map = torch.zeros(EXPERTS, 23, dtype=torch.bool).scatter_(1, chosen, True).T
    x, probs = torch.randn(23, 37), torch.rand(23, EXPERTS)
    padded: dict[str, Any] = {"drop_and_pad": True}

    def both(fused: bool) -> Any:
        def call(x: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
            rows, row_probs, kept, *_ = utils.permute(
                x, routing_map, probs, capacity * EXPERTS, fused=fused, **padded
            )
            back = utils.unpermute(
                rows * 2, kept, x.shape, routing_map=routing_map, fused=fused, **padded
            )
            return rows, row_probs, back

        return call

    mine, other = (differentiated(both(fused), x, probs) for fused in (True, False))
    for got, want in zip(mine[0] + mine[1], other[0] + other[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # sums in another order


def offer(utils: Any) -> None:
    """Nothing but what is missing; all or none."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    with pytest.raises(ValueError, match="fused permutation is not available"):
        TransformerConfig(**sizes, moe_permute_fusion=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "fused_unpermute", other := object())
        assert not megatron.offer_permutation()
        assert (utils.fused_unpermute, utils.fused_permute) == (other, None)
        assert not utils.HAVE_TE
    assert megatron.offer_permutation()
    assert megatron.offer_permutation(), "the second time too"
    assert utils.fused_permute is megatron_permute.fused_permute
    TransformerConfig(**sizes, moe_permute_fusion=True)
    with pytest.raises(ValueError, match="fused_topk_with_score_function is not available"):
        utils.topk_routing_with_score_function(torch.rand(4, 8), 2, fused=True)


def compare_all(rank: Rank) -> None:
    test_megatron.begin(rank)
    from megatron.core.transformer.moe import moe_utils as utils

    offer(utils)
    for case in CASES:
        torch.manual_seed(3)
        compare_permute(utils, case)
        compare_unpermute(utils, case)
    for dtype, with_probs in ((FP32, True), (BF16, True), (BF16, False)):
        compare_chunks(utils, dtype, with_probs)
    compare_padded(utils)


def test_it_computes_what_megatrons_own_functions_do() -> None:
    run_processes(1, compare_all, deadline_s=200.0)


def test_megatron_asks_for_each_function_beside_transformer_engine() -> None:
    """HAVE_TE is set though there is none: each use must also ask for the function's name."""
    at = "megatron/core/transformer/moe/moe_utils.py"
    text = (Path(packages.where("megatron-core")) / at).read_text()
    asked = re.findall(r"not HAVE_TE or \(?\s*fused_\w+ is None", text)
    beside = re.findall(r"^(?:from \S+ import HAVE_TE|if HAVE_TE:)$", text, re.MULTILINE)
    assert len(asked) >= 5
    assert len(re.findall(r"\bHAVE_TE\b", text)) == len(asked) + len(beside)
