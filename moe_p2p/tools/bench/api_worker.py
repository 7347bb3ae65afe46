"""One rank of `--api deep_ep`: the shim through DeepEP's calls, AllToAll beside it, on CPU or GPU.

For each interface and number of tokens all systems are made, each result is compared with the
closed form, and they are timed in turns: on GPUs in the ways of gpu_measure, and the host alone; on
CPUs by the clock from a barrier to a rank's own result. Inputs change between rounds, and the
results of a last run are compared (gpu_last).
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moe_p2p import reference
from moe_p2p.reference import Tokens
from moe_p2p.tools import launch
from moe_p2p.tools.bench import deep_ep
from moe_p2p.tools.bench.api_report import ApiRow, HostTime
from moe_p2p.tools.bench.cases import Job, make_job
from moe_p2p.tools.bench.check import verify_by_rank, verify_whole
from moe_p2p.tools.bench.gpu_calls import Calls, on_device, package_calls
from moe_p2p.tools.bench.gpu_last import Inputs, Watch
from moe_p2p.tools.bench.gpu_measure import Timed, measure
from moe_p2p.tools.bench.gpu_timing import interleaved
from moe_p2p.tools.bench.gpu_worker import TIMED_STEP, wrong_anywhere
from moe_p2p.tools.bench.options import INTERFACES, INTERFACES_ON_CUDA, Options
from moe_p2p.tools.bench.probe import Probe
from moe_p2p.tools.bench.progress import bar
from moe_p2p.tools.bench.systems import MoeP2p, finish

OURS = "moe_p2p.deep_ep"
# Of timing the host alone, for each system; a round begins on an idle device.
HOST_SECONDS = 0.4
# Pairs of a row: before the clock starts, and by the clock. More might fill the queue of launches,
# and the host would wait for the device.
WARM_PAIRS, TIMED_PAIRS = 4, 16


@dataclass(frozen=True, kw_only=True)
class Results:
    rows: list[ApiRow]
    notes: list[str]  # what was left out, and why


@dataclass(frozen=True, kw_only=True, eq=False)
class Clock:
    """How systems are timed on this device."""

    measure: Callable[[Sequence[Calls], Watch], list[Timed]]
    host: Callable[[Sequence[Calls]], dict[Calls, HostTime]]
    close: Callable[[], None]


def run(options: Options) -> Results:
    """The whole job of one rank; the results are the same on every rank."""
    with launch.process_group() as (rank, _):
        on_cuda = options.device == "cuda"
        torch.manual_seed(rank)
        clock = _gpu_clock(options, rank) if on_cuda else _cpu_clock(options)
        group = dist.new_group(backend="nccl") if on_cuda else dist.group.WORLD
        assert group is not None
        job, notes, rows = make_job(options), list[str](), list[ApiRow]()
        cases = list(_cases(options))
        with bar(len(cases), shown=rank == 0) as progress:
            for interface, tokens in cases:
                progress.set_description(f"{interface}, T {tokens}")
                case = replace(options, tokens=(tokens,))
                rows += _case(case, job, interface, group=group, clock=clock, notes=notes)
                torch.cuda.empty_cache()  # regions do not come out of torch's memory
                progress.update()
        clock.close()
        return Results(rows=rows, notes=notes)


def _cases(options: Options) -> Iterator[tuple[str, int]]:
    defaults = INTERFACES_ON_CUDA if options.device == "cuda" else INTERFACES
    for interface, counts in defaults.items():
        for tokens in options.tokens or counts:
            yield interface, tokens


def _case(
    options: Options,
    job: Job,
    interface: str,
    *,
    group: dist.ProcessGroup,
    clock: Clock,
    notes: list[str],
) -> list[ApiRow]:
    (num_tokens,), rank = options.tokens, dist.get_rank()
    tokens = job.tokens_of(TIMED_STEP, rank, num_tokens)
    inputs = Inputs(on_device(tokens) if options.device == "cuda" else tokens)
    tokens = inputs.tokens
    watch = Watch(job, options, rank, inputs)
    modules = [OURS] + ([options.deep_ep_module] if options.deep_ep_module else [])
    with ExitStack() as stack:
        num_sms = None if interface == "low-latency" else deep_ep.NORMAL_SMS
        found = [_all_to_all(options, job, tokens, stack, interface=interface, num_sms=num_sms)]
        for name in modules:
            api = deep_ep.Api(
                module=importlib.import_module(name),
                label=name,
                options=options,
                job=job,
                tokens=tokens,
                group=group,
                stack=stack,
                low_latency_tokens=num_tokens if name == OURS else deep_ep.LOW_LATENCY_TOKENS,
                cached=True,
                num_sms=num_sms,
            )
            found += deep_ep.systems(api, notes, interfaces=[interface])
        timed = clock.measure([calls for calls, _ in found], watch)
        host = clock.host([calls for calls, _ in found])
        stories = {
            calls: wrong_anywhere(story + watch.story.get(calls, [])) for calls, story in found
        }
        finish(options.device)
        dist.barrier()  # nobody closes what another one still uses
    return [
        ApiRow.of(options, job, interface, each, host=host[each.calls], story=story)
        for each in timed
        for story in (stories[each.calls],)
    ]


def _all_to_all(
    options: Options,
    job: Job,
    tokens: Tokens,
    stack: ExitStack,
    *,
    interface: str,
    num_sms: int | None,
) -> tuple[Calls, list[str]]:
    """This package's own calls, given what the interface is given and asked for the same rows.

    Low-latency: rows by expert, quantized inside. The others: by rank, quantized by the caller.
    """
    system = MoeP2p(options, job, num_sms=num_sms)
    stack.callback(system.close)
    rank = dist.get_rank()
    if interface == "low-latency":
        options = replace(options, layout="padded")
        story = verify_whole(system, job, options, rank, tokens)
    else:
        options = replace(options, layout="by_rank")
        story = verify_by_rank(system.all_to_all, job, options, rank, tokens)
        if options.quantize:
            q, scales = reference.quantize(tokens.x)
            tokens = replace(tokens, x=q, scales=scales)
    return package_calls(system, options, tokens, num_sms=num_sms or 0, experts=None), story


# --- GPUs ---


def _gpu_clock(options: Options, rank: int) -> Clock:
    torch.cuda.set_device(rank)
    probe = Probe(timeout_s=options.timeout_s)

    def timed(systems: Sequence[Calls], watch: Watch) -> list[Timed]:
        found = measure(systems, probe.barrier, seconds=options.seconds, flushed=None, watch=watch)
        probe.check()
        return found

    return Clock(measure=timed, host=_host_times, close=probe.close)


def _host_times(systems: Sequence[Calls]) -> dict[Calls, HostTime]:
    """In turns: hosts have tenths of a second in which everything takes twice as long."""
    rows = _until_issued(systems, warm=WARM_PAIRS, timed=TIMED_PAIRS)
    alone = _until_issued(systems, warm=0, timed=1)
    return {calls: HostTime(us=rows[calls], alone_us=alone[calls]) for calls in systems}


def _until_issued(systems: Sequence[Calls], *, warm: int, timed: int) -> dict[Calls, float]:
    """Microseconds until the calls of an eager pair return: median, slowest rank of each round."""

    def span(calls: Calls) -> tuple[float]:
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(warm):
            calls.pair()
        started = time.perf_counter()
        for _ in range(timed):
            calls.pair()
        return ((time.perf_counter() - started) / timed * 1e6,)

    runs = {calls: functools.partial(span, calls) for calls in systems}
    spans = interleaved(runs, seconds=HOST_SECONDS)
    torch.cuda.synchronize()
    return {calls: round(float(values.median()), 1) for calls, values in spans.items()}


# --- CPUs ---


def _cpu_clock(options: Options) -> Clock:
    measure_all = functools.partial(_by_wall, seconds=options.seconds / 4)
    return Clock(measure=measure_all, host=_no_host_times, close=lambda: None)


def _no_host_times(systems: Sequence[Calls]) -> dict[Calls, HostTime]:
    return dict.fromkeys(systems, HostTime(None, None))


def _by_wall(systems: Sequence[Calls], watch: Watch, *, seconds: float) -> list[Timed]:
    spans = interleaved(
        {calls: functools.partial(_wall_us, calls) for calls in systems},
        seconds=seconds,
        before=watch.change,
    )
    for calls in systems:
        watch.look(calls, "pair eager", calls.pair)
    return [
        Timed(calls=calls, what=what, chain=1, spans_us=values[:, i])
        for calls, values in spans.items()
        for i, what in enumerate(("pair eager", "dispatch", "combine"))
    ]


def _wall_us(calls: Calls) -> tuple[float, ...]:
    def span(call: Callable[[], object]) -> float:
        dist.barrier()
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6

    return span(calls.pair), span(calls.dispatch), span(calls.combine)
