"""DeepEP 2.5's own references over our EPBuffer: its refs.py, gate.py, testing.py and math.py as
they are in the wheel, loaded by path, because the package does not import without nvcc.

Called on all ranks of the default group. Symbols: R rows received, K top-k, H hidden size.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_p2p.deep_ep.utils import envs
from moe_p2p.deep_ep_v25 import EPBuffer
from tests.engines import packages

HIDDEN, TOPK, MOST = 256, 4, 40


class _OnCpu(TorchFunctionMode):
    """What gate.py makes on "cuda" is made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return func(*args, **given)


def module(name: str) -> Any:
    """A module of deep_ep_v25/utils; of envs.py, which needs the compiled part, the seed."""
    if "stranger25" not in sys.modules:
        folder = packages.where("sgl-deep-ep-v25") / "deep_ep_v25" / "utils"
        sys.modules["stranger25"] = package = ModuleType("stranger25")
        package.__path__ = [str(folder)]
        sys.modules["stranger25.envs"] = seeds = ModuleType("stranger25.envs")
        seeds.get_global_seed = envs.get_global_seed  # type: ignore[attr-defined]
    return importlib.import_module(f"stranger25.{name}")


def routing(num_tokens: int, num_experts: int, ratio: float, precise: bool, device: str) -> Tensor:
    """[num_tokens, K] by the wheel's gate, some of them -1."""
    mode: AbstractContextManager[object] = _OnCpu() if device == "cpu" else nullcontext()
    with mode:
        scores = module("gate").get_unbalanced_scores(
            num_tokens, num_experts, dist.get_world_size(), TOPK, ratio, precise
        )
    topk_idx: Tensor = scores.topk(TOPK, dim=-1, sorted=False).indices
    topk_idx[::7, 1] = -1
    return topk_idx


def later(deferred: bool) -> dict[str, Any]:
    return {"defer_epilogue": True, "async_with_compute_stream": True} if deferred else {}


def waited(made: Any, deferred: bool) -> tuple[Any, ...]:
    return made.current_stream_wait() if deferred else made[:-1]


def rows_are_those_of_the_reference(
    buffer: EPBuffer, num_tokens: int, num_experts: int, fp8: bool, deferred: bool, device: str
) -> None:
    """Also of a cached dispatch, and without a CPU sync."""
    x: Any = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
    if fp8:
        x = module("math").per_token_cast_to_fp8.__wrapped__(x)
    topk_idx = routing(num_tokens, num_experts, 2.0, False, device)
    weights = torch.rand(num_tokens, TOPK, device=device)
    plain = (x[0].view(torch.uint8), x[1]) if fp8 else x  # gloo has no fp8
    wanted = module("refs").dispatch(plain, topk_idx, weights, MOST, num_experts)
    count = len(wanted[3])
    handle = None
    for sync in (True, False, None):
        if sync is None:
            how: dict[str, Any] = {"handle": handle}
        else:
            how = {"topk_idx": topk_idx, "num_experts": num_experts, "do_cpu_sync": sync}
        made = buffer.dispatch(x, topk_weights=weights, **how, **later(deferred))
        got, ids, row_weights, handle = waited(made, deferred)
        if sync:
            assert len(ids) == count
            assert handle.num_recv_tokens == count
        of_both = ((got[0].view(torch.uint8), wanted[0][0]), (got[1], wanted[0][1])) if fp8 else (
            (got, wanted[0]),)  # fmt: skip
        for ours, theirs in of_both:
            assert torch.equal(ours[:count], theirs)
        assert torch.equal(ids[:count], wanted[1])
        here = wanted[1] >= 0
        assert torch.equal(row_weights[:count][here], wanted[2][here])
        assert torch.equal(handle.recv_src_metadata[:count, 0], wanted[3])
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        assert torch.equal(ends.cpu(), wanted[4].cumsum(0, dtype=torch.int32))


def sums_are_those_of_the_reference(
    buffer: EPBuffer, num_tokens: int, num_experts: int, num_bias: int, deferred: bool, device: str
) -> None:
    """Expanded rows. Bit for bit where DeepEP's order of addition is ours: with a bias, and where
    sums are rounded once."""
    refs, rank = module("refs"), dist.get_rank()
    topk_idx = routing(num_tokens, num_experts, 1.5, True, device)
    x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    how = {"num_experts": num_experts, "do_expand": True, "expert_alignment": 8}
    rows, _, _, handle = waited(buffer.dispatch(x, topk_idx, **how, **later(deferred)), deferred)
    metadata = handle.recv_src_metadata
    made = refs.generate_pre_combine_data(metadata[:, 0], MOST, TOPK, HIDDEN)
    at = metadata[:, 2:]
    y = torch.full_like(rows, 1e4)
    y[at[at >= 0].long()] = made[at >= 0]
    terms = [torch.randn(num_tokens, HIDDEN, device=device).bfloat16() for _ in range(num_bias)]
    bias: Any = (None, *terms[:1])[num_bias] if num_bias < 2 else tuple(terms)
    combined = buffer.combine(y, handle, bias=bias, **later(deferred))
    sums = waited(combined, deferred)[0]
    own = MOST * rank + torch.arange(num_tokens, device=device)
    given = refs.generate_pre_combine_data(own, MOST, TOPK, HIDDEN)
    given[topk_idx < 0] = 0
    allowed = buffer.allow_multiple_reduction
    wanted = refs.combine(
        given, topk_idx, *buffer.get_logical_domain_size(), num_experts, bias, allowed, False
    ).bfloat16()
    if num_bias or not allowed:
        assert torch.equal(sums, wanted)
    assert module("math").calc_diff(sums, wanted) < 1e-5


def references_pass(device: str) -> None:
    """Every call of theirs, on ranks with different numbers of tokens."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    envs.init_seed(3)
    num_experts, num_tokens = 6 * num_ranks, 40 - 7 * rank
    group: Any = dist.group.WORLD
    for allowed in (True, False):
        buffer = EPBuffer(
            group,
            num_max_tokens_per_rank=MOST,
            hidden=HIDDEN,
            num_topk=TOPK,
            allow_multiple_reduction=allowed,
            explicitly_destroy=True,
        )
        for deferred in (False, True):
            for fp8 in (False, True):
                rows_are_those_of_the_reference(
                    buffer, num_tokens, num_experts, fp8, deferred, device
                )
            for num_bias in range(3):
                sums_are_those_of_the_reference(
                    buffer, num_tokens, num_experts, num_bias, deferred, device
                )
        buffer.destroy()
