"""`python -m moe_p2p trace`: steps of the bench, traced on all ranks, beside their floor.

It writes a file for ui.perfetto.dev, a picture and, with --record, what replay reads; it prints
where a step's time went, and what the trace cost: steps without and with it take turns. Programs of
others use moe_p2p.tracing (docs/trace.md).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moe_p2p import env, errors
from moe_p2p.bench import floors, harness
from moe_p2p.bench import options as of_bench
from moe_p2p.bench.cases import Job, make_job
from moe_p2p.bench.clocks import CpuClock, GpuClock, make_clock
from moe_p2p.bench.gpu_calls import Calls, on_device, package_calls
from moe_p2p.bench.harness import finish, use_device
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import MoeP2p
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools import launch, recording
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.gpu_timing import captured, interleaved, timed_us
from moe_p2p.tools.option_types import Parser, at_least_1, output_file
from moe_p2p.tools.output import NotWrittenError
from moe_p2p.tools.trace import shown
from moe_p2p.tools.trace.session import Session, tracing
from moe_p2p.tools.trace.steps import judge, steps

# Options of the bench that say which steps.
TAKEN = (
    *("ranks", "ranks_per_node", "tokens", "model", "hidden", "topk", "experts", "dtype"),
    *("combine_dtype", "routing", "nics", "transport", "preset", "gbps", "latency_us"),
    *("part_bytes", "seed", "wait", "timeout_s", "chunks", "sms", "layout"),
)
WARM, CHAIN, COST_S = 5, 8, 2.0
COPIED_BYTES = 64 << 20  # more than caches hold
NUM_EVENTS = 1 << 16
FEW_EVENTS = 1 << 12  # of the cost: to make a large ring would empty caches before each turn
_STEP = 1_000  # whose routing is traced, as the bench's


@dataclass(frozen=True)
class Asked:
    options: Options
    steps: int
    out: str
    plot: str
    record: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """failed: files that could not be written, and why."""

    text: str
    notes: list[str]
    failed: list[str]

    @contextlib.contextmanager
    def writing(self, note: str) -> Iterator[None]:
        """A full disk does not cost what was measured, and the other ranks wait for this one."""
        try:
            yield
        except NotWrittenError as error:
            self.failed.append(str(error))
        else:
            self.notes.append(note)


def main(arguments: list[str]) -> int:
    """Returns 0: all right, 1: a file could not be written, 2: a rank failed."""
    asked = _parse(arguments)
    try:
        with contextlib.ExitStack() as stack:
            if not env.launched():
                found = launch.run_ranks(run, asked, num_ranks=asked.options.ranks)[0]
            else:
                torch.set_num_threads(launch.threads_per_rank(env.local_world_size()))
                rank, _ = stack.enter_context(launch.process_group())
                found = run(asked)
                if rank > 0:
                    return 0
    except (launch.RanksFailedError, errors.MoeP2pError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2
    print("\n".join([found.text, *found.notes]), flush=True)
    for each in found.failed:
        print(f"trace: {each}", file=sys.stderr)
    return 1 if found.failed else 0


def _parse(arguments: list[str]) -> Asked:
    own = Parser(add_help=False)
    add = own.add_argument
    add("--steps", type=at_least_1, default=32, help="that are traced")
    add("--out", type=output_file, default="bench_out/trace.json", metavar="FILE",
        help="trace for ui.perfetto.dev")  # fmt: skip
    add("--plot", type=output_file, default="bench_out/trace.png", metavar="FILE",
        help="picture of where the time went (bench_out/trace.png; '': none)")  # fmt: skip
    add("--record", type=output_file, default="", metavar="FILE",
        help="what proxies did, for `python -m moe_p2p replay FILE` (none)")  # fmt: skip
    parser = Parser(
        prog="python -m moe_p2p trace",
        description="Traces dispatch and combine of all ranks on one clock, from kernels to NICs.",
        epilog=f"{harness.EPILOG} Between hosts torchrun starts the ranks, as for the bench.",
        parents=[own],
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help=harness.DEVICE
    )
    harness.add_options(parser, Options, only=lambda each: each.name in TAKEN)
    given = parser.parse_args(arguments)
    _, rest = own.parse_known_args(arguments)
    files = [str(Path(each).resolve()) for each in (given.out, given.plot, given.record) if each]
    harness.refuse(
        parser,
        {
            "--out: name a file; the trace is what this command makes": not given.out,
            "--out, --plot and --record name one file; give each its own": len({*files})
            < len(files),
        },
    )
    several = [name for name in ("tokens", "ranks", "ranks_per_node") if _several(given, name)]
    harness.refuse(
        parser,
        {
            f"--{name.replace('_', '-')}: one number; a trace is of one job": True
            for name in several
        },
    )
    rest = rest if given.tokens else ["--tokens=128", *rest]
    (options,) = of_bench.parse([*rest, "--json=", "--plot=", "--no-baseline"], prog=parser.prog)
    why = (
        "--record: ranks of one node send each other nothing through a proxy, so there is nothing "
    )
    why += f"to replay; pass a --ranks-per-node below --ranks {options.ranks}"
    harness.refuse(parser, {why: bool(given.record) and options.ranks_per_node == options.ranks})
    return Asked(options, given.steps, given.out, given.plot, given.record)


def _several(given: argparse.Namespace, name: str) -> bool:
    return len(getattr(given, name) or ()) > 1


# --- one rank ---


def run(asked: Asked) -> Found:
    options = asked.options
    with launch.process_group() as (rank, _):
        use_device(options.device)
        torch.manual_seed(rank)
        clock, job = make_clock(options), make_job(options)
        tokens = on_device(job.tokens_of(_STEP, rank, options.tokens[0]), options.device)
        recorder = tracing(asked.out, num_events=NUM_EVENTS, timeout_s=options.timeout_s)
        found = Found(text="", notes=[], failed=[])
        with (
            found.writing(f"wrote {asked.out}: open it at https://ui.perfetto.dev"),
            recorder,
            _system(options, job, tokens) as traced,
        ):
            on_gpu = options.device == "cuda"
            pair = captured(traced.pair, repeats=1) if on_gpu else traced.pair
            for _ in range(asked.steps):
                pair()
            finish(options.device)
        with _system(options, job, tokens) as plain:
            text = _shown(asked, recorder, _floor(options, job, clock, plain), found)
            cost = _cost(options, job, tokens, plain, clock)
        clock.close()
    return dataclasses.replace(found, text=f"{text}\n{cost}")


@contextlib.contextmanager
def _system(options: Options, job: Job, tokens: Tokens) -> Iterator[Calls]:
    """Warm: it has made some pairs."""
    system = MoeP2p(options, job)
    try:
        calls = package_calls(system, options, tokens, num_sms=options.sms[0], layer=None)
        for _ in range(WARM):
            calls.pair()
        finish(options.device)
        yield calls
    finally:
        finish(options.device)
        everyones(None)  # no rank closes what another still uses
        system.close()


def _floor(options: Options, job: Job, clock: CpuClock | GpuClock, calls: Calls) -> shown.Floor:
    on_cuda = options.device == "cuda"
    push_gbs = clock.links.push_gbs if on_cuda else _copied_gbs()
    gbps = options.gbps * options.nics or (0.0 if on_cuda else push_gbs * 8)  # copies, too
    found = floors.bounds_of(
        options, job, _STEP, num_steps=calls.num_steps, push_gbs=push_gbs, gbps=gbps
    ).floor
    rates = [f"{push_gbs:.1f} GB/s {'between GPUs' if on_cuda else 'of a copy'}"] * (push_gbs > 0)
    rates += [f"{options.gbps * options.nics:g} Gbit/s between nodes"] * (options.gbps > 0)
    why = f"bytes of the busiest rank over {', '.join(rates)}"
    return shown.Floor(found.dispatch, found.combine, why)


def _copied_gbs() -> float:
    """Of memory by one rank, while the others copy too; the slowest."""
    source, to = (torch.zeros(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    dist.barrier()
    spans = []
    for _ in range(5):
        began = time.perf_counter()
        to.copy_(source)
        spans.append(time.perf_counter() - began)
    rates = everyones(COPIED_BYTES / statistics.median(spans) / 1e9)
    return float(min(rates))


def _shown(asked: Asked, recorder: tracing, floor: shown.Floor, found: Found) -> str:
    """At rank 0."""
    trace = recorder.trace
    if trace is None:
        return ""
    judged = judge(steps(trace)[-asked.steps :])
    options = asked.options
    title = f"{options.ranks} ranks in nodes of {options.ranks_per_node}, T {options.tokens[0]}"
    lines = [title, shown.text(trace, judged, floor)]
    if judged is not None and asked.plot:
        reason = None
        with found.writing(f"wrote {asked.plot}"):
            reason = shown.picture(Path(asked.plot), title, trace, judged, floor)
        if reason:
            found.notes[-1] = f"no picture: {reason}"
    if asked.record:
        step = f"step through it with python -m moe_p2p replay {asked.record}"
        with found.writing(f"wrote {asked.record}: {step}"):
            recording.save(asked.record, recording.of_trace(trace))
    return "\n".join(lines)


def _cost(
    options: Options, job: Job, tokens: Tokens, plain: Calls, clock: CpuClock | GpuClock
) -> str:
    """Times of a pair without and with a trace, in turns."""
    with contextlib.ExitStack() as stack:
        traced = plain
        if options.device == "cuda":  # other kernels
            making = Session(FEW_EVENTS)
            making.begin(with_clocks=False)
            stack.callback(making.stop)
            traced = stack.enter_context(_system(options, job, tokens))
            making.stop()
        off, on = _timed(plain, clock), _timed(traced, clock)

        def recorded() -> tuple[float]:
            watch = Session(FEW_EVENTS)
            watch.begin(with_clocks=False)
            try:
                return on()
            finally:
                watch.stop()

        spans = interleaved({"off": off, "on": recorded}, seconds=COST_S)
    times = {name: float(values.median()) for name, values in spans.items()}
    more = (times["on"] / times["off"] - 1) * 100
    low, high = (float(spans["off"].quantile(share)) for share in (0.25, 0.75))
    return (
        f"cost: a pair takes {times['off']:,.1f} us without a trace and {times['on']:,.1f} with it "
        f"({more:+.1f}%; medians of {len(spans['on'])} turns, of which half without it lie within "
        f"{(high - low) / times['off']:.1%})"
    )


def _timed(calls: Calls, clock: CpuClock | GpuClock) -> Callable[[], tuple[float]]:
    """Microseconds of a pair, mean of a chain."""
    if isinstance(clock, GpuClock):
        replay = captured(calls.pair, repeats=CHAIN)
        return lambda: (timed_us(replay, clock.align) / CHAIN,)

    def on_cpu() -> tuple[float]:
        calls.pair()
        dist.barrier()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CHAIN):
            calls.pair()
        return ((time.perf_counter() - began) / CHAIN * 1e6,)

    return on_cpu
