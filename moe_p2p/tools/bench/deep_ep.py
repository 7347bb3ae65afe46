"""DeepEP's API on the same inputs: V1 low-latency, V1 normal and V2, of any module that has it.

Each is called as its documentation shows. Its sums are compared with the closed form before it is
timed, and again after its last run. V1 normal and V2 exchange rows that the caller quantized, so
their figures leave the quantizing out, while V1 low-latency and this package quantize inside.

Shapes: n ranks, T tokens, K top-k, E experts, H hidden size, R rows at this rank's experts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools.bench.cases import Job
from moe_p2p.tools.bench.check import answer, answer_by_rank, verify_sums
from moe_p2p.tools.bench.gather import everyones
from moe_p2p.tools.bench.gpu_calls import Calls, answer_like
from moe_p2p.tools.bench.options import Options

LOW_LATENCY_TOKENS = 511  # most of a call of DeepEP: the depth of its queues by default
NORMAL_SMS = 24
# In steps of bf16: an fp8 step is 16 of them, and an interface that quantizes may round otherwise.
STEPS = 20
NVLINK_BYTES = 2_000_000_000  # buffers of V1 normal


@dataclass(frozen=True, kw_only=True, eq=False)
class Api:
    """A module with DeepEP's names, and the inputs of its calls."""

    module: Any
    label: str
    options: Options
    job: Job
    tokens: Tokens  # of this rank
    group: Any  # a ProcessGroup, or what has its rank(), size() and get_group_store()
    stack: ExitStack  # destroys buffers
    low_latency_tokens: int = LOW_LATENCY_TOKENS  # limit of low-latency calls
    cached: bool = False  # V1 normal dispatches by the handle of an earlier call
    num_sms: int | None = None  # of V2; None: as V2 advises

    @property
    def job_and_tokens(self) -> tuple[Options, Job, Tokens]:
        return self.options, self.job, self.tokens


Exchange = tuple[Calls, Callable[[], Tensor]]  # and one step with real experts, for the check


def missing() -> str | None:
    """Returns why DeepEP is missing, or None."""
    return None if importlib.util.find_spec("deep_ep") else "deep_ep is not installed"


def systems(
    api: Api, notes: list[str], *, interfaces: Iterable[str] = ("low-latency", "normal", "v2")
) -> Iterator[tuple[Calls, list[str]]]:
    """Yields the interfaces that take this call, with errors in their sums on this rank."""
    makers = {"low-latency": low_latency, "normal": normal, "v2": elastic}
    for interface in interfaces:
        name = f"{api.label} {interface}"
        try:
            made = makers[interface](api)
            if isinstance(made, str):
                problem = made
            else:
                wrong = verify_sums(
                    name, api.job, api.options, tokens=api.tokens, got=made[1](), steps=STEPS
                )
                problem = ""
        except Exception as error:  # another project's errors have no common type
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        problems: list[str] = everyones(problem)
        if any(problems):
            notes.append(f"{name}: " + next(text for text in problems if text))
        else:
            assert not isinstance(made, str)
            yield made[0], wrong


def low_latency(api: Api) -> Exchange | str:
    """Rows per (token, expert), padded; quantizes inside, weights at the source."""
    module, (options, job, tokens), rank = api.module, api.job_and_tokens, api.group.rank()
    (num_tokens, hidden), experts = tokens.x.shape, job.topology.num_experts
    if num_tokens > api.low_latency_tokens or options.dtype not in ("fp8", "bf16"):
        return f"takes up to {api.low_latency_tokens} tokens of bf16 rows"
    ranks, fp8 = options.ranks, options.quantize
    buffer = module.Buffer(
        api.group,
        num_rdma_bytes=module.Buffer.get_low_latency_rdma_size_hint(
            num_tokens, hidden, ranks, experts
        ),
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )
    api.stack.callback(buffer.destroy)
    idx, weights = tokens.topk_idx.to(module.topk_idx_t), tokens.topk_weights
    out = torch.empty_like(tokens.x)
    sync: dict[str, Any] = {"async_finish": False, "return_recv_hook": False}
    state: list[Any] = []

    def dispatch() -> object:
        state[:] = buffer.low_latency_dispatch(
            tokens.x, idx, num_tokens, experts, use_fp8=fp8, **sync
        )
        return state

    def combine_of(y: Tensor) -> Tensor:
        buffer.low_latency_combine(y, idx, weights, state[2], out=out, **sync)
        return out

    def step() -> Tensor:
        dispatch()
        rows = state[0]  # [E / n, n * T, H], with scales when fp8
        wide = reference.dequantize(rows[0], rows[1].contiguous()) if fp8 else rows.float()
        numbers = job.number_of(job.topology.local_experts(rank)).to(wide.device)
        e = numbers[:, None, None].float() / experts
        return combine_of(answer(wide, e).to(torch.bfloat16))

    dispatch()
    y = answer_like(state[0][0] if fp8 else state[0], torch.bfloat16)
    combine_of(y)
    calls = Calls(
        system=f"{api.label} v1 low-latency",
        dispatch=dispatch,
        combine=lambda: combine_of(y),
        capturable=True,
        layout="padded",
        last=lambda _: {"out": out, "answer": y[0, 0]},
    )
    return calls, step


def normal(api: Api) -> Exchange | str:
    """Rows per (token, rank); sums without weights.

    The host waits for the counts in dispatch, unless it reuses the handle of an earlier one.
    """
    module, (options, job, tokens), rank = api.module, api.job_and_tokens, api.group.rank()
    if options.dtype not in ("fp8", "bf16"):
        return "takes fp8 or bf16 rows"
    module.Buffer.set_num_sms(NORMAL_SMS)
    buffer = module.Buffer(
        api.group,
        NVLINK_BYTES,
        0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    api.stack.callback(buffer.destroy)
    experts, idx = job.topology.num_experts, tokens.topk_idx.to(module.topk_idx_t)
    x = _as_sent(options, tokens)
    # Counts of ranks that are not there cannot be had, so there is room for the worst case.
    worst = {"num_worst_tokens": options.ranks * len(idx)} if job.mirrored else {}
    state: list[Any] = []
    out: Tensor = torch.empty(0)

    def dispatch() -> object:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
        state[:] = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=tokens.topk_weights,
            **worst,
        )
        return state

    def cached() -> object:
        state[0] = buffer.dispatch(x, handle=state[4])[0]
        return state

    def combine_of(y: Tensor) -> Tensor:
        nonlocal out
        out = buffer.combine(y, state[4])[0]
        return out

    def step() -> Tensor:
        dispatch()
        if api.cached:
            combine_of(answer_like(_rows(state[0]), torch.bfloat16))
            cached()
        return combine_of(_answers(job, rank, state))

    dispatch()
    y = answer_like(_rows(state[0]), torch.bfloat16)
    combine_of(y)
    calls = Calls(
        system=f"{api.label} v1 normal",
        dispatch=cached if api.cached else dispatch,
        combine=lambda: combine_of(y),
        capturable=False,
        num_sms=NORMAL_SMS,
        layout="by_rank",
        last=lambda _: {"out": out, "answer": y[0]},
    )
    return calls, step


def elastic(api: Api) -> Exchange | str:
    """V2 without a wait on the host: rows per (token, rank), room for the worst case."""
    module, (options, job, tokens), rank = api.module, api.job_and_tokens, api.group.rank()
    if not hasattr(module, "ElasticBuffer") or options.dtype not in ("fp8", "bf16"):
        return "this deep_ep has no V2, or the rows are neither fp8 nor bf16"
    (num_tokens, hidden), experts = tokens.x.shape, job.topology.num_experts
    buffer = module.ElasticBuffer(
        api.group,
        num_max_tokens_per_rank=num_tokens,
        hidden=hidden,
        num_topk=job.topk,
        use_fp8_dispatch=False,
        allow_hybrid_mode=False,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=False,
        explicitly_destroy=True,
    )
    api.stack.callback(buffer.destroy)
    num_sms = api.num_sms or buffer.get_theoretical_num_sms(experts, job.topk)
    idx, x = tokens.topk_idx.to(module.topk_idx_t), _as_sent(options, tokens)
    state: list[Any] = []
    out: Tensor = torch.empty(0)

    def dispatch() -> object:
        state[:] = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=tokens.topk_weights,
            num_experts=experts,
            num_max_tokens_per_rank=num_tokens,
            num_sms=num_sms,
            do_cpu_sync=False,
        )
        return state

    def combine_of(y: Tensor) -> Tensor:
        nonlocal out
        out = buffer.combine(y, handle=state[3], num_sms=num_sms)[0]
        return out

    def step() -> Tensor:
        dispatch()
        received = int(state[3].psum_num_recv_tokens_per_scaleup_rank[-1])
        y = _answers(job, rank, state)
        y[received:] = 0  # rows past the count hold arbitrary values
        return combine_of(y)

    dispatch()
    y = answer_like(_rows(state[0]), torch.bfloat16)
    combine_of(y)
    calls = Calls(
        system=f"{api.label} v2",
        dispatch=dispatch,
        combine=lambda: combine_of(y),
        capturable=True,
        num_sms=num_sms,
        layout="by_rank",
        last=lambda _: {"out": out, "answer": y[0]},
    )
    return calls, step


def _as_sent(options: Options, tokens: Tokens) -> Any:
    return reference.quantize(tokens.x) if options.quantize else tokens.x


def _rows(received: Any) -> Tensor:
    rows: Tensor = received[0] if isinstance(received, tuple) else received
    return rows


def _answers(job: Job, rank: int, state: list[Any]) -> Tensor:
    """Returns answers to rows by rank: state begins with these, their local experts and weights."""
    return answer_by_rank(job, rank, *state[:3]).to(torch.bfloat16)
