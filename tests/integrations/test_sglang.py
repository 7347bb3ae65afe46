"""SGLang's interface over AllToAll: layers that call it as SGLang does compute a plain MoE."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError, UnavailableError
from tests.support.engine_layers import (
    BF16,
    COUNTS,
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOPK,
    WORLD,
    as_sent,
    expert,
    first_expert,
    inputs,
    join,
    plain,
    wide,
)
from tests.support.fakes import sglang as fake_sglang
from tests.support.ranks import Rank, run_processes


def low_latency_experts(rank: Rank, got: Any) -> Tensor:
    """[E_local, rows, H], weights left to combine."""
    rows, scales = (
        got.hidden_states_fp8
        if hasattr(got, "hidden_states_fp8")
        else (got.hidden_states, got.hidden_states_scale)
    )
    local = torch.arange(len(rows), device=rows.device)[:, None].expand(rows.shape[:2])
    y = expert(wide(rows, scales), local + first_expert(rank))
    for e, count in enumerate(got.masked_m.tolist()):
        y[e, count:] = float("nan")
    return y.to(torch.bfloat16)


def normal_experts(rank: Rank, got: Any) -> Tensor:
    """As the runner: scatters rows to their experts by id, applies weights, gathers them again."""
    rows = wide(got.hidden_states, got.hidden_states_scale)
    ids, weights = got.topk_ids, got.topk_weights
    assert ids.dtype == torch.int64
    assert [len(ids), 1] == list(ids.shape) == list(weights.shape)
    counts = ids[:, 0].bincount(minlength=EXPERTS // rank.world_size)
    assert got.num_recv_tokens_per_expert == ((counts + 127) // 128 * 128).tolist()
    return (expert(rows, ids[:, 0] + first_expert(rank)) * weights).to(torch.bfloat16)


def run_sglang(rank: Rank, dtype: str, older: bool, device: str) -> None:
    fake_sglang.put(max_tokens=TOKENS, older=older)
    fake_sglang.State.dtype = fake_sglang.OutputDtype(dtype)
    from moe_p2p.integrations import sglang

    sglang.install()
    made = sys.modules["sglang.srt.batch_overlap.two_batch_overlap"].DeepEPDispatcher
    group = join(rank, device)
    two = [
        made(
            group=group,
            router_topk=TOPK,
            permute_fusion=True,
            num_experts=EXPERTS,
            num_local_experts=EXPERTS // rank.world_size,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
            deepep_mode=fake_sglang.DeepEPMode.AUTO,
            async_finish=True,
            return_recv_hook=True,
        )
        for _ in range(2)
    ]
    assert isinstance(two[0], fake_sglang.BaseDispatcher)
    between: list[object] = []
    registered = two[0].register_deepep_dispatch_hook(between.append)
    for step in range(len(COUNTS)):
        fake_sglang.State.extend = step % 2 == 1
        x, ids, weights = inputs(rank.rank, step, torch.bfloat16, device=device)
        topk = fake_sglang.TopKOutput(weights, ids)
        got = two[0].dispatch(x, topk)
        experts = normal_experts if fake_sglang.State.extend else low_latency_experts
        y = experts(rank, got)
        out = two[0].combine(fake_sglang.CombineInput(y, ids, weights))
        expected = plain(as_sent(x) if dtype == "fp8" else x, ids, weights)
        torch.testing.assert_close(out.float(), expected, **BF16)
    assert between == [two[0]] * len(COUNTS)
    registered.remove()
    _two_batches(rank, two, dtype, device)


def _two_batches(rank: Rank, two: list[Any], dtype: str, device: str) -> None:
    """Halves of two micro-batches take turns."""
    fake_sglang.State.extend = False
    batches = [inputs(rank.rank, step, torch.bfloat16, device=device) for step in (0, 1)]
    for one, (x, ids, weights) in zip(two, batches, strict=True):
        one.dispatch_a(x, fake_sglang.TopKOutput(weights, ids))
    for one, (_, ids, weights) in zip(two, batches, strict=True):
        y = low_latency_experts(rank, one.dispatch_b())
        one.combine_a(fake_sglang.CombineInput(y, ids, weights))
    for one, (x, ids, weights) in zip(two, batches, strict=True):
        expected = plain(as_sent(x) if dtype == "fp8" else x, ids, weights)
        torch.testing.assert_close(one.combine_b().float(), expected, **BF16)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_sglang_layer_computes_a_plain_moe_in_both_modes(dtype: str) -> None:
    run_processes(WORLD, run_sglang, dtype, False, "cpu")


def test_sglang_outputs_of_older_versions() -> None:
    run_processes(WORLD, run_sglang, "fp8", True, "cpu")


def run_sglang_refused(rank: Rank) -> None:
    fake_sglang.put(max_tokens=TOKENS)
    fake_sglang.State.dtype = fake_sglang.OutputDtype.NVFP4
    from moe_p2p.integrations import sglang

    one = sglang.dispatcher_class()(
        join(rank, "cpu"), TOPK, num_experts=EXPERTS, deepep_mode=fake_sglang.DeepEPMode.LOW_LATENCY
    )
    with pytest.raises(UnavailableError, match="--enable-single-batch-overlap"):
        one.set_overlap_args(object(), {})
    x, ids, weights = inputs(rank.rank, 0, torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="nvfp4; bf16 and fp8"):
        one.dispatch(x, fake_sglang.TopKOutput(weights, ids))


def test_sglang_refuses_what_it_cannot_do() -> None:
    run_processes(1, run_sglang_refused)
