"""One rank of `benchmarks/turns.py mirror`: a process that imports the package of one tree.

Rank 0 of a mirror world (moe/rendezvous/mirror.py): its partner is the worker of the same tree on
the other GPU, or itself. It obeys commands, one JSON object a line on its standard input, and
answers each with one line. Partners get the same commands, so they make the same calls.

Only names that trees of other commits have too are imported from the package.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench.exchanges import V2, Exchange, LowLatency
from obeying import module_of, obey, take_output
from torch import Tensor

HEAD_START_CYCLES = 4_000_000  # about 2 ms: the host queues everything before the GPU begins
# The same of an eager pair between events, about 0.4 ms. Too short: the host's time is measured.
PAIR_CYCLES = 800_000
STEPS = 20  # bf16 steps that a sum may be away: fp8 rows are rounded by the caller or inside
INT10, BLOCK16 = 32, 8  # values of partial sums that share a scale
SEED = 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """calls: "all_to_all", or DeepEP's "low-latency" or "v2". given: the caller quantizes.

    chunk: tokens of a step that there is room for; 0: as many as a call has.
    """

    name: str
    calls: str = "all_to_all"
    tokens: int
    chunk: int = 0
    layout: str = "grouped"
    given: bool = False
    num_sms: int = 0  # 0: all
    ranks: int = 8
    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    combine_dtype: str | None = None  # AllToAll.combine's; "low-latency": use_logfmt
    chain: int = 20  # pairs of a graph, and spans of one measurement


@dataclass
class Made:
    """The calls of a case. step: dispatch, experts and combine, [T, H]."""

    dispatch: Callable[[], object]
    combine: Callable[[], object]
    step: Callable[[], Tensor]
    want: Callable[[], tuple[Tensor, Tensor]]
    block: int = 1  # sums are as far away as the largest of so many allows
    replay: Callable[[], None] | None = None
    keep: Any = ()

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def wrong(self) -> str:
        """Compares one step with the closed form; returns what is wrong."""
        got = self.step()
        if got.is_cuda:
            torch.cuda.synchronize()
        want, magnitude = self.want()
        blocks = magnitude.unflatten(-1, (-1, self.block))
        magnitude = blocks.amax(-1, keepdim=True).expand(blocks.shape).flatten(-2)
        away = ~((got.float() - want).abs() <= STEPS * 2.0**-8 * magnitude)  # NaN is away
        if not bool(away.any()):
            return ""
        row, at = (int(i) for i in away.nonzero()[0])
        return (
            f"{int(away.sum())} values are wrong, first in row {row} at {at}: "
            f"{float(got[row, at])!r}, expected {float(want[row, at])!r}"
        )


@dataclass(frozen=True)
class Inputs:
    """Rank 0's, the same on both GPUs."""

    x: Tensor  # [T, H] bf16
    topk_idx: Tensor  # [T, K] int64
    topk_weights: Tensor  # [T, K] fp32

    @staticmethod
    def of(case: Case, device: str) -> Inputs:
        torch.manual_seed(SEED)
        choice = torch.rand(case.tokens, case.experts).topk(case.topk, dim=1).indices
        weights = torch.rand(case.tokens, case.topk) + 0.1
        weights /= weights.sum(dim=1, keepdim=True)
        x = torch.randn(case.tokens, case.hidden).bfloat16()
        return Inputs(x.to(device), choice.to(device), weights.to(device))


def factor(local: Tensor, case: Case) -> Tensor:
    """What local expert `local` multiplies by: each its own, the same on every rank."""
    return (1 + local.float()) * (case.ranks / case.experts)


def closed_form(case: Case, inputs: Inputs, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums, fp32 [T, H], and how large their parts are. wide: x as it travels, fp32."""
    local = inputs.topk_idx % (case.experts // case.ranks)
    sums = (inputs.topk_weights * factor(local, case)).sum(1, keepdim=True) * wide
    return sums, sums.abs()


def answers(case: Case, rows: Any, wide: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """Returns y for rows of AllToAll. wide: (rows, scales) -> fp32."""
    y = torch.zeros(rows.x.shape, dtype=torch.bfloat16, device=rows.x.device)
    if case.layout == "padded":
        x = wide(rows.x, rows.scales)
        local = torch.arange(len(x), device=x.device)
        return (x * factor(local, case)[:, None, None]).bfloat16()
    used = int(rows.offsets[-1])
    x = wide(rows.x[:used], None if rows.scales is None else rows.scales[:used].contiguous())
    if case.layout == "by_rank":
        y[:used] = by_rank(case, x, rows.row_topk[:used], rows.row_weights[:used])
    else:
        local = torch.arange(len(rows.counts), device=x.device)
        of_row = torch.repeat_interleave(local, rows.counts.long())
        y[:used] = (x * factor(of_row, case)[:, None]).bfloat16()
    return y


def by_rank(case: Case, x: Tensor, topk: Tensor, weights: Tensor) -> Tensor:
    """Returns sums over a rank's experts, bf16."""
    weights = torch.where(topk >= 0, weights * factor(topk, case), 0.0)
    return (x * weights.sum(1, keepdim=True)).bfloat16()


def group_of(case: Case, place: tuple[int, int, str]) -> Any:
    mirror = module_of("moe.rendezvous.mirror", "rendezvous.mirror")
    at, count, key = place
    return mirror.MirrorGroup(case.ranks, place=at, count=count, key=f"{key}.{case.name}")


def make_all_to_all(case: Case, place: tuple[int, int, str], device: str) -> Made:
    from moe_p2p import AllToAll, AllToAllConfig

    reference = module_of("moe.reference", "reference")

    config = AllToAllConfig(
        num_experts=case.experts,
        hidden_dim=case.hidden,
        topk=case.topk,
        max_tokens=case.chunk or case.tokens,
        chunk_tokens=case.chunk or case.tokens,
        dtype=torch.float8_e4m3fn,
        combine_dtype=torch.bfloat16,
        device=device,
        num_sms=case.num_sms or None,
        timeout_s=20.0,
    )
    comm, inputs = AllToAll(group_of(case, place), config), Inputs.of(case, device)
    q, scales = reference.quantize(inputs.x)
    given: dict[str, Any] = {
        "x": q if case.given else inputs.x,
        "topk_idx": inputs.topk_idx,
        "topk_weights": inputs.topk_weights,
        "scales": scales if case.given else None,
        "quantize": not case.given,
        "layout": case.layout,
        "max_tokens": case.tokens,
    }
    state: dict[str, Any] = {}
    how: dict[str, Any] = {"combine_dtype": case.combine_dtype} if case.combine_dtype else {}

    def dispatch() -> None:
        state["rows"] = comm.dispatch(**given)

    def wide(rows: Tensor, of_rows: Tensor | None) -> Tensor:
        return reference.dequantize(rows, of_rows)

    def step() -> Tensor:
        dispatch()
        return comm.combine(answers(case, state["rows"], wide), state["rows"], **how)

    dispatch()
    y = torch.randn(case.hidden, device=device).bfloat16()
    y = y.expand(state["rows"].x.shape).contiguous()

    def combine() -> None:
        state["out"] = comm.combine(y, state["rows"], **how)

    combine()
    want = lambda: closed_form(case, inputs, reference.dequantize(q, scales))  # noqa: E731
    block = 1 if case.combine_dtype is None else INT10
    return Made(dispatch, combine, step, want, block, keep=(comm, state))


def made_of(exchange: Exchange, step: Callable[[], Tensor], want: Any, block: int = 1) -> Made:
    """Of DeepEP's calls, with answers of one value."""
    exchange.dispatch()
    y = torch.randn(exchange.rows.shape[-1], device=exchange.rows.device).bfloat16()
    y = y.expand(exchange.rows.shape).contiguous()
    exchange.combine(y)
    return Made(exchange.dispatch, lambda: exchange.combine(y), step, want, block)


def make_low_latency(case: Case, place: tuple[int, int, str], device: str) -> Made:
    from moe_p2p import deep_ep

    reference = module_of("moe.reference", "reference")

    inputs, group = Inputs.of(case, device), group_of(case, place)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        case.tokens, case.hidden, case.ranks, case.experts
    )
    buffer = deep_ep.Buffer(group, num_rdma_bytes=size, low_latency_mode=True)
    logfmt = case.combine_dtype is not None
    given = inputs.x, inputs.topk_idx, inputs.topk_weights, case.experts
    exchange = LowLatency(buffer, *given, logfmt=logfmt, out=torch.empty_like(inputs.x))

    def step() -> Tensor:
        exchange.dispatch()
        rows, scales = exchange.state[0]
        x = reference.dequantize(rows, scales.contiguous())
        local = torch.arange(len(x), device=x.device)
        return exchange.combine((x * factor(local, case)[:, None, None]).bfloat16())

    def want() -> tuple[Tensor, Tensor]:
        wide = reference.dequantize(*reference.quantize(inputs.x))
        return closed_form(case, inputs, wide)

    return made_of(exchange, step, want, INT10 if logfmt else BLOCK16)


def make_v2(case: Case, place: tuple[int, int, str], device: str) -> Made:
    from moe_p2p import deep_ep

    reference = module_of("moe.reference", "reference")

    inputs, group = Inputs.of(case, device), group_of(case, place)
    buffer = deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=case.tokens,
        hidden=case.hidden,
        num_topk=case.topk,
        use_fp8_dispatch=False,
        allow_hybrid_mode=False,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=False,
        explicitly_destroy=False,
    )
    x = reference.quantize(inputs.x)
    given = x, inputs.topk_idx, inputs.topk_weights, case.experts
    exchange = V2(buffer, *given, num_sms=case.num_sms)

    def step() -> Tensor:
        exchange.dispatch()
        (rows, scales), topk, weights = exchange.state[:3]
        used = exchange.received
        x = reference.dequantize(rows[:used], scales[:used].contiguous())
        y = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
        y[:used] = by_rank(case, x, topk[:used], weights[:used])
        return exchange.combine(y)

    want = lambda: closed_form(case, inputs, reference.dequantize(*x))  # noqa: E731
    return made_of(exchange, step, want)


MAKERS = {"all_to_all": make_all_to_all, "low-latency": make_low_latency, "v2": make_v2}


def capture(made: Made, chain: int) -> None:
    """Captures a chain of pairs, replayed by made.replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(chain):
            made.pair()
    torch.cuda.synchronize()
    made.replay = graph.replay


def _events(count: int) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def pair_us(made: Made, chain: int) -> list[float]:
    """Times a chain of pairs in a graph, behind a pair that lines the GPUs up: the period."""
    assert made.replay is not None
    begin, end = _events(2)
    torch.cuda._sleep(HEAD_START_CYCLES)
    made.pair()
    begin.record()
    made.replay()
    end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / chain]


def apart_us(made: Made, chain: int) -> list[float]:
    """Returns the medians of dispatch and of combine, each between two events."""
    events = _events(2 * chain + 1)
    torch.cuda._sleep(HEAD_START_CYCLES + chain * PAIR_CYCLES)
    made.pair()
    events[0].record()
    for i in range(chain):
        made.dispatch()
        events[2 * i + 1].record()
        made.combine()
        events[2 * i + 2].record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    return [float(torch.tensor(spans[part::2]).median()) for part in (0, 1)]


def links(place: tuple[int, int, str], store: str) -> dict[str, float]:
    """Measures the links between the two GPUs, without this package's data path."""
    import torch.distributed as dist

    probes = module_of("tools.probe", "tools.bench.probe")
    at, count, _ = place
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=at, world_size=count)
    try:
        probe = probes.Probe(timeout_s=20.0)
        found = probe.links()
        probe.close()
    finally:
        dist.destroy_process_group()
    return {"push_gbs": found.push_gbs, "push_24_gbs": found.push_24_gbs, "flag_us": found.flag_us}


class Worker:
    def __init__(self, place: tuple[int, int, str], device: str) -> None:
        self._place, self._device = place, device
        self._made: dict[str, tuple[Case, Made]] = {}

    def make(self, case: dict[str, Any]) -> None:
        wanted = Case(**case)
        self._made[wanted.name] = wanted, MAKERS[wanted.calls](wanted, self._place, self._device)

    def check(self, name: str) -> str:
        return self._made[name][1].wrong()

    def capture(self, name: str) -> None:
        case, made = self._made[name]
        capture(made, case.chain)

    def pair(self, name: str) -> list[float]:
        case, made = self._made[name]
        return pair_us(made, case.chain)

    def apart(self, name: str) -> list[float]:
        case, made = self._made[name]
        return apart_us(made, case.chain)

    def leave(self) -> None:
        """Nothing is left behind."""

    def links(self, store: str) -> dict[str, float]:
        return links(self._place, store)


def main() -> None:
    """Arguments: place, count, key; with a case behind them it is only made, for its kernels."""
    at, count, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers_to = take_output()
    torch.cuda.set_device(0)
    worker = Worker((at, count, key), "cuda")
    if len(sys.argv) > 4:
        worker.make(json.loads(sys.argv[4]))
        torch.cuda.synchronize()
        os._exit(0)
    obey(answers_to, lambda: worker)


if __name__ == "__main__":
    main()
