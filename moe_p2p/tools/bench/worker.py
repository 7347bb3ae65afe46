"""One rank of the benchmark: check first, then measure.

The boundary of every figure: all ranks leave a barrier, each reads its clock before and after its
own call, and the latency of that iteration is the largest of these spans over the ranks. "pair" is
dispatch and combine back to back with no clock or barrier between them; "dispatch" and "combine"
come from other iterations, with a barrier between the two. Systems take turns in every iteration.
Buffers are reused, inputs change from one iteration to the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import reference
from moe_p2p.reference import Tokens
from moe_p2p.reference.wire import floor_bytes, wire_bytes
from moe_p2p.tools import launch
from moe_p2p.tools.bench.baseline import TorchAllToAll
from moe_p2p.tools.bench.cases import Job, changing_counts, make_job
from moe_p2p.tools.bench.check import expect, verify
from moe_p2p.tools.bench.gather import everyones
from moe_p2p.tools.bench.options import Options
from moe_p2p.tools.bench.progress import bar
from moe_p2p.tools.bench.report import Latency, Row
from moe_p2p.tools.bench.systems import MoeP2p, Rows, System

PHASES = ("dispatch", "combine", "pair")
NUM_INPUTS = 4  # taken in turn by the iterations
WARM_UP = 2
MIN_ITERATIONS, MAX_ITERATIONS = 6, 400


@dataclass(frozen=True, kw_only=True)
class Measured:
    spans_us: dict[str, Tensor]  # phase -> [iterations], the slowest rank of each
    wire_bytes: dict[str, int]  # phase -> bytes of all ranks in all iterations; 0: not counted


def run(options: Options) -> list[Row]:
    """The whole job of one rank; rows are the same on every rank."""
    with launch.process_group() as (rank, _):
        job = make_job(options)
        systems: list[System] = [MoeP2p(options, job)]
        if options.baseline:
            systems.append(TorchAllToAll(options, job))
        try:
            return _run(options, job, rank, systems=systems)
        finally:
            for system in systems:
                system.close()


def _run(options: Options, job: Job, rank: int, *, systems: list[System]) -> list[Row]:
    rows: list[Row] = []
    total = len(options.tokens) * (options.checks + 1)
    with bar(total, shown=rank == 0) as progress:
        for tokens in options.tokens:
            wrong: dict[str, list[str]] = {system.name: [] for system in systems}
            for system in systems:
                system.begin(tokens)
            for step in range(options.checks):
                progress.set_description(f"T {tokens}: step {step} against the reference")
                _check(options, job, rank, step=step, tokens=tokens, systems=systems, wrong=wrong)
                progress.update()
            progress.set_description(f"T {tokens}: timing")
            counts = [tokens] * options.ranks
            inputs = [job.tokens(1_000 + i, counts) for i in range(NUM_INPUTS)]
            mine = [each[rank] for each in inputs]
            measured = _measure(options, mine, systems)
            last = expect(job, options, rank, inputs[0])
            for system in systems:  # nothing went wrong while the clock ran
                exact = system is systems[0]
                wrong[system.name] += verify(system, mine[0], last, exact=exact)
            stories = _gather_stories(wrong)
            rows += _rows(
                options,
                job,
                inputs,
                measured=measured,
                stories=stories,
                num_steps=systems[0].num_steps,
            )
            progress.update()
    return rows


def _check(
    options: Options,
    job: Job,
    rank: int,
    *,
    step: int,
    tokens: int,
    systems: list[System],
    wrong: dict[str, list[str]],
) -> None:
    counts = changing_counts(step, options.ranks, tokens)
    everyone = job.tokens(step, counts)
    expected = expect(job, options, rank, everyone)
    for system in systems:
        exact = system is systems[0]
        found = verify(system, everyone[rank], expected, exact=exact)
        wrong[system.name] += [f"T {tokens}, step {step}, rank {rank}: {text}" for text in found]


def _measure(options: Options, inputs: list[Tokens], systems: list[System]) -> dict[str, Measured]:
    y = {system.name: _answer(options, system, inputs) for system in systems}
    started = time.perf_counter()
    for i in range(WARM_UP):
        _iteration(inputs[i], systems, y)
    each = (time.perf_counter() - started) / WARM_UP
    wanted = torch.tensor([options.seconds / max(each, 1e-6)], dtype=torch.float64)
    dist.broadcast(wanted, 0)
    iterations = max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(wanted)))
    iterations = -(-iterations // NUM_INPUTS) * NUM_INPUTS  # every input equally often

    spans = torch.zeros(iterations, len(systems), len(PHASES), dtype=torch.float64)
    sent = torch.zeros(len(systems), len(PHASES), dtype=torch.int64)
    for i in range(iterations):
        order = systems if i % 2 == 0 else systems[::-1]
        for name, (span, bytes_) in _iteration(inputs[i % NUM_INPUTS], order, y).items():
            at = [system.name for system in systems].index(name)
            spans[i, at] = torch.tensor(span, dtype=torch.float64)
            sent[at] += torch.tensor(bytes_)
    dist.all_reduce(spans, dist.ReduceOp.MAX)
    dist.all_reduce(sent)
    return {
        system.name: Measured(
            spans_us={phase: spans[:, at, p] * 1e6 for p, phase in enumerate(PHASES)},
            wire_bytes={phase: int(sent[at, p]) // iterations for p, phase in enumerate(PHASES)},
        )
        for at, system in enumerate(systems)
    }


def _iteration(
    tokens: Tokens, systems: list[System], y: dict[str, Tensor | None]
) -> dict[str, tuple[list[float], list[int]]]:
    """Seconds and bytes sent of (dispatch, combine, pair) of each system, on this rank."""
    result = {}
    for system in systems:
        answer = y[system.name]
        clock = time.perf_counter

        dist.barrier()  # ranks leave the first barrier after other work milliseconds apart
        bytes_0 = system.wire_bytes()
        dist.barrier()
        t0 = clock()
        rows = system.dispatch(tokens)
        system.combine(rows.x if answer is None else answer)
        pair = clock() - t0

        dist.barrier()
        bytes_1 = system.wire_bytes()
        dist.barrier()
        t0 = clock()
        rows = system.dispatch(tokens)
        dispatch = clock() - t0
        dist.barrier()
        bytes_2 = system.wire_bytes()
        dist.barrier()
        t0 = clock()
        system.combine(rows.x if answer is None else answer)
        combine = clock() - t0
        dist.barrier()
        bytes_3 = system.wire_bytes()

        sent = [bytes_2 - bytes_1, bytes_3 - bytes_2, bytes_1 - bytes_0]
        result[system.name] = ([dispatch, combine, pair], sent)
    return result


def _answer(options: Options, system: System, inputs: list[Tokens]) -> Tensor | None:
    """What the experts answer while timing: the rows themselves, where they have a type to add."""
    if not options.quantize:
        return None
    rows: Rows = system.dispatch(inputs[0])
    y = torch.randn(rows.x.shape[-1]).to(options.x_dtype).expand(rows.x.shape).contiguous()
    system.combine(y)
    return y


def _gather_stories(wrong: dict[str, list[str]]) -> dict[str, list[str]]:
    everyone: list[dict[str, list[str]]] = everyones(wrong)
    return {name: [s for one in everyone for s in one[name]] for name in wrong}


def _rows(
    options: Options,
    job: Job,
    inputs: list[list[Tokens]],
    *,
    measured: dict[str, Measured],
    stories: dict[str, list[str]],
    num_steps: int,
) -> list[Row]:
    exact, floor, flat = _bytes(options, job, inputs, num_steps=num_steps)
    ours = measured[MoeP2p.name]
    theirs = measured.get(TorchAllToAll.name)
    wrong = stories[MoeP2p.name] + stories.get(TorchAllToAll.name, [])
    wrong += _miscounted(ours.wire_bytes, exact, tokens=inputs[0][0].x.shape[0])
    rows = []
    for phase in PHASES:
        rows.append(
            Row(
                what=phase,
                ranks=options.ranks,
                ranks_per_node=options.ranks_per_node,
                tokens=inputs[0][0].x.shape[0],
                hidden=options.hidden,
                topk=job.topk,
                experts=job.topology.num_experts,
                dtype=options.dtype,
                routing=options.trace or options.routing,
                settings=options.transport_settings,
                iterations=len(ours.spans_us[phase]),
                latency=Latency.of(ours.spans_us[phase]),
                baseline=Latency.of(theirs.spans_us[phase]) if theirs else None,
                wire_bytes=ours.wire_bytes[phase],
                floor_bytes=floor[phase],
                flat_floor_bytes=flat[phase],
                correct=not wrong,
                story=wrong,
            )
        )
    return rows


def _miscounted(counted: dict[str, int], exact: dict[str, int], *, tokens: int) -> list[str]:
    """What the counters say against the reference, pairs and the two phases together.

    Not phase by phase: a call of several steps closes them after it has returned, and such a header
    is then counted with the next phase.
    """
    separate = counted["dispatch"] + counted["combine"]
    return [
        f"T {tokens}: {what} sent {sent} bytes per iteration, the reference says {exact['pair']}"
        for what, sent in (("a pair", counted["pair"]), ("dispatch, then combine", separate))
        if sent != exact["pair"]
    ]


def _bytes(
    options: Options, job: Job, inputs: list[list[Tokens]], *, num_steps: int
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Of all ranks, mean over the inputs: what must be sent, the floor, the floor without dedup."""
    totals = [dict.fromkeys(PHASES, 0) for _ in range(3)]
    for tokens in inputs:
        routing = reference.route(
            job.topology, tokens, layout="grouped", quantized=options.quantize
        )
        for source in range(options.ranks):
            kinds = (
                wire_bytes(routing, source, combine_dtype=options.x_dtype, num_steps=num_steps),
                floor_bytes(routing, source, combine_dtype=options.x_dtype),
                floor_bytes(routing, source, combine_dtype=options.x_dtype, dedup=False),
            )
            for total, kind in zip(totals, kinds, strict=True):
                for phase in PHASES:
                    total[phase] += getattr(kind, phase)
    wire, floor, flat = ({p: t // len(inputs) for p, t in total.items()} for total in totals)
    return wire, floor, flat
