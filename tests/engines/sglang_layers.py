"""SGLang's own Python files in a rank of a test, and a MoE layer of its dispatchers.

Experts are of torch, each with a function of its own; run_modes() compares outputs with one
process's MoE.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import absent
from tests.support import engine_layers as plain
from tests.support.engine_layers import BF16, COUNTS, EXPERTS, HIDDEN, TOKENS, TOPK
from tests.support.ranks import Rank

MODES = ("normal", "low_latency", "auto")


def begin(rank: Rank, device: str = "cpu", *, real_deep_ep: bool = False) -> None:
    """Imports SGLang, over moe_p2p.deep_ep or after some other deep_ep."""
    absent.importing("sglang", absent.SGLANG + (" deep_ep" if real_deep_ep else ""))
    plain.join(rank, device)
    if not real_deep_ep:
        from moe_p2p import deep_ep

        deep_ep.install()
    else:
        import deep_ep as _  # noqa: F401  # as SGLang does before it loads plugins
    settings()


def settings() -> None:
    """Answers that SGLang's servers and GPUs would give."""
    from sglang.srt.environ import envs
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.token_dispatcher import deepep

    envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.set(TOKENS)
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    deep_gemm_wrapper.DEEPGEMM_BLACKWELL = False
    deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = False
    # Its arguments are published by its servers only.
    asked = types.SimpleNamespace(deepep_dispatcher_output_dtype="auto")
    utils.get_server_args = lambda: asked
    utils.get_exec = lambda: types.SimpleNamespace(moe=asked)
    deepep.sglang_per_token_group_quant_fp8 = quantize


def begin_with_ours(rank: Rank, device: str = "cpu") -> None:
    begin(rank, device, real_deep_ep=True)
    from moe_p2p.integrations.moe import sglang

    sglang.install()


def quantize(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """What SGLang's kernel computes."""
    from moe_p2p.moe import reference

    return reference.quantize(x)


def extend(whether: bool) -> None:
    """Says what the batch is, as the scheduler does: mode auto then resolves."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    set_is_extend_in_batch(whether)


def make(rank: Rank, mode: str, *, backend: str | None = None, tbo: bool = False) -> Any:
    """As create_moe_dispatcher makes it."""
    from sglang.srt.batch_overlap import two_batch_overlap
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend, MoeRunnerBackend

    two_batch_overlap.get_moe_a2a_backend = lambda: MoeA2ABackend.DEEPEP
    two_batch_overlap.is_tbo_enabled = lambda: tbo
    return two_batch_overlap.MaybeTboDeepEPDispatcher(
        runner_backend=backend and MoeRunnerBackend(backend),
        group=dist.group.WORLD,
        router_topk=TOPK,
        permute_fusion=True,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS // rank.world_size,
        hidden_size=HIDDEN,
        params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode(mode),
        async_finish=True,
        return_recv_hook=True,
    )


def topk_of(ids: Tensor, weights: Tensor) -> Any:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, weights)


def low_latency_experts(rank: Rank, got: Any) -> Tensor:
    """[E_local, rows, H], weights left to combine."""
    rows = plain.wide(got.hidden_states, got.hidden_states_scale)
    local = torch.arange(len(rows), device=rows.device)[:, None].expand(rows.shape[:2])
    y = plain.expert(rows, local + plain.first_expert(rank))
    for e, count in enumerate(got.masked_m.tolist()):
        y[e, count:] = float("nan")
    return y.to(torch.bfloat16)


def normal_experts(rank: Rank, got: Any) -> Tensor:
    """As the runner: rows of this rank's experts by id, weights applied; -1: of another rank."""
    rows, ids = plain.wide(got.hidden_states, got.hidden_states_scale), got.topk_ids
    counts = ids[ids >= 0].bincount(minlength=EXPERTS // rank.world_size)
    assert got.num_recv_tokens_per_expert == ((counts + 127) // 128 * 128).tolist()
    y = plain.expert(
        rows[:, None].expand(-1, ids.shape[1], -1), ids.clamp_min(0) + plain.first_expert(rank)
    )
    kept = torch.where(ids >= 0, got.topk_weights, 0.0)
    return (y * kept[..., None]).sum(1).to(torch.bfloat16)


def combined(rank: Rank, dispatcher: Any, got: Any, ids: Tensor, weights: Tensor) -> Any:
    """The input of combine: what experts make of dispatch's output."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    if "LL" in type(got).__name__:
        return deepep.DeepEPLLCombineInput(low_latency_experts(rank, got), ids, weights)
    return deepep.DeepEPNormalCombineInput(normal_experts(rank, got), ids, weights)


def run_layer(rank: Rank, dispatcher: Any, x: Tensor, ids: Tensor, weights: Tensor) -> tuple:
    got = dispatcher.dispatch(hidden_states=x, topk_output=topk_of(ids, weights))
    given = combined(rank, dispatcher, got, ids, weights)
    return got, dispatcher.combine(combine_input=given)


def run_modes(
    rank: Rank, dtype: str, device: str = "cpu", *, make: Callable[[Rank, str], Any] = make
) -> None:
    """Every mode, with extend and decode batches in turns where it is auto."""
    for mode in MODES:
        dispatcher = make(rank, mode)
        dispatcher.set_quant_config({"dispatcher_output_dtype": dtype})
        for step in range(len(COUNTS)):
            extend(step % 2 == 1)
            x, ids, weights = plain.inputs(rank.rank, step, torch.bfloat16, device=device)
            got, out = run_layer(rank, dispatcher, x, ids, weights)
            assert (got.hidden_states_scale is None) == (dtype == "bf16")
            expected = plain.plain(plain.as_sent(x) if dtype == "fp8" else x, ids, weights)
            torch.testing.assert_close(out.float(), expected, **BF16)


def take_turns(rank: Rank, two: Any) -> None:
    """Halves of two micro-batches, over a dispatcher for each."""
    batches = [plain.inputs(rank.rank, step, torch.bfloat16) for step in (0, 1)]
    for i, (x, ids, weights) in enumerate(batches):
        given = {"hidden_states": x, "topk_output": topk_of(ids, weights)}
        two.dispatch_a(**given, tbo_subbatch_index=i)
    for i, (_, ids, weights) in enumerate(batches):
        got = two.dispatch_b(tbo_subbatch_index=i)
        given = combined(rank, two, got, ids, weights)
        two.combine_a(combine_input=given, tbo_subbatch_index=i)
    for i, (x, ids, weights) in enumerate(batches):
        expected = plain.plain(plain.as_sent(x), ids, weights)
        out = two.combine_b(tbo_subbatch_index=i)
        torch.testing.assert_close(out.float(), expected, **BF16)
