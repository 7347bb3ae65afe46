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

from moe_p2p.bench.cases import Job
from moe_p2p.bench.check import answer, answer_by_rank, verify_sums
from moe_p2p.bench.exchanges import V2, Exchange, LowLatency, Normal
from moe_p2p.bench.gpu_calls import Calls, answer_like
from moe_p2p.bench.options import Options
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools.gather import everyones

LOW_LATENCY_TOKENS = 511  # most of a call of DeepEP: the depth of its queues by default
NORMAL_SMS = 24
# In steps of bf16: an fp8 step is 16 of them, and an interface that quantizes may round otherwise.
STEPS = 20
NVLINK_BYTES, RDMA_BYTES = 2_000_000_000, 1_000_000_000  # buffers of V1 normal, as its tests have
RDMA_QPS = 24  # as its tests have


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


Made = tuple[Calls, Callable[[], Tensor]]  # and one step with real experts, for the check


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
                    name,
                    api.job,
                    api.options,
                    tokens=api.tokens,
                    got=made[1](),
                    steps=STEPS,
                    partials=made[0].partials,
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


def _buffer(api: Api, *sizes: int, **how: Any) -> Any:
    """One of V1, which the api destroys."""
    made = api.module.Buffer(api.group, *sizes, explicitly_destroy=True, **how)
    api.stack.callback(made.destroy)
    return made


def _made(api: Api, name: str, exchange: Exchange, step: Callable[[], Tensor], **how: Any) -> Made:
    """Its calls, with answers of one value."""
    exchange.dispatch()
    y = answer_like(exchange.rows, torch.bfloat16)
    exchange.combine(y)
    calls = Calls(
        system=f"{api.label} {name}",
        dispatch=exchange.dispatch,
        combine=lambda: exchange.combine(y),
        last=lambda _: {"out": exchange.out, "answer": y.reshape(-1, y.shape[-1])[0]},
        **how,
    )
    return calls, step


def low_latency(api: Api) -> Made | str:
    """Rows per (token, expert), padded; quantizes inside, weights at the source."""
    module, (options, job, tokens), rank = api.module, api.job_and_tokens, api.group.rank()
    (num_tokens, hidden), experts = tokens.x.shape, job.topology.num_experts
    if num_tokens > api.low_latency_tokens or options.dtype not in ("fp8", "bf16"):
        return f"takes up to {api.low_latency_tokens} tokens of bf16 rows"
    ranks, fp8 = options.ranks, options.quantize
    sizes = num_tokens, hidden, ranks, experts
    buffer = _buffer(
        api,
        num_rdma_bytes=module.Buffer.get_low_latency_rdma_size_hint(*sizes),
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        allow_nvlink_for_low_latency_mode=True,
    )
    given = tokens.x, tokens.topk_idx.to(module.topk_idx_t), tokens.topk_weights, experts
    exchange = LowLatency(buffer, *given, fp8=fp8, out=torch.empty_like(tokens.x))

    def step() -> Tensor:
        exchange.dispatch()
        rows = exchange.state[0]  # [E / n, n * T, H], with scales when fp8
        wide = reference.dequantize(rows[0], rows[1].contiguous()) if fp8 else rows.float()
        numbers = job.number_of(job.topology.local_experts(rank)).to(wide.device)
        e = numbers[:, None, None].float() / experts
        return exchange.combine(answer(wide, e).to(torch.bfloat16))

    how: dict[str, Any] = {"capturable": True, "layout": "padded"}
    return _made(api, "v1 low-latency", exchange, step, partials="block16", **how)  # as ours sends


def normal(api: Api) -> Made | str:
    """Rows per (token, rank); sums without weights.

    The host waits for the counts in dispatch, unless it reuses the handle of an earlier one.
    """
    module, (options, job, tokens), rank = api.module, api.job_and_tokens, api.group.rank()
    if options.dtype not in ("fp8", "bf16"):
        return "takes fp8 or bf16 rows"
    module.Buffer.set_num_sms(NORMAL_SMS)
    rdma_bytes, num_qps = (RDMA_BYTES, RDMA_QPS) if options.hosts > 1 else (0, 1)
    buffer = _buffer(
        api, NVLINK_BYTES, rdma_bytes, low_latency_mode=False, num_qps_per_rank=num_qps
    )
    idx = tokens.topk_idx.to(module.topk_idx_t)
    # Counts of ranks that are not there cannot be had, so there is room for the worst case.
    worst = {"num_worst_tokens": options.ranks * len(idx)} if job.mirrored else {}
    given = _as_sent(options, tokens), idx, tokens.topk_weights, job.topology.num_experts
    exchange = Normal(buffer, *given, cached=api.cached, **worst)

    def step() -> Tensor:
        exchange.fresh()
        if api.cached:
            exchange.combine(answer_like(exchange.rows, torch.bfloat16))
            exchange.dispatch()
        return exchange.combine(_answers(job, rank, exchange.state))

    how: dict[str, Any] = {"num_sms": NORMAL_SMS, "layout": "by_rank"}
    return _made(api, "v1 normal", exchange, step, capturable=False, **how)


def elastic(api: Api) -> Made | str:
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
    idx = tokens.topk_idx.to(module.topk_idx_t)
    given = _as_sent(options, tokens), idx, tokens.topk_weights, experts
    exchange = V2(buffer, *given, num_sms=num_sms)

    def step() -> Tensor:
        exchange.dispatch()
        y = _answers(job, rank, exchange.state)
        y[exchange.received :] = 0  # rows past the count hold arbitrary values
        return exchange.combine(y)

    how: dict[str, Any] = {"num_sms": num_sms, "layout": "by_rank"}
    return _made(api, "v2", exchange, step, capturable=True, **how)


def _as_sent(options: Options, tokens: Tokens) -> Any:
    return reference.quantize(tokens.x) if options.quantize else tokens.x


def _answers(job: Job, rank: int, state: Any) -> Tensor:
    """Returns answers to rows by rank: state begins with these, their local experts and weights."""
    return answer_by_rank(job, rank, *state[:3]).to(torch.bfloat16)
