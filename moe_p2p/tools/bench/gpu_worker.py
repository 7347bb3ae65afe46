"""One rank of the benchmark on a GPU: check first, then measure.

For each number of tokens all systems are made and compared with the reference, then timed in turns:
the package in every form that was asked for, and the baselines.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.reference import Tokens
from moe_p2p.tools import launch
from moe_p2p.tools.bench import deep_ep, floors
from moe_p2p.tools.bench.baseline import TorchAllToAll
from moe_p2p.tools.bench.cases import changing_counts, make_job
from moe_p2p.tools.bench.check import expect, verify, verify_by_rank, verify_whole
from moe_p2p.tools.bench.gather import everyones
from moe_p2p.tools.bench.gpu_calls import Calls, baseline_calls, layout_of, on_device, package_calls
from moe_p2p.tools.bench.gpu_last import COMPARED, COMPARED_SUMS, Inputs, Watch
from moe_p2p.tools.bench.gpu_layer import MAX_DIFFERENCE, difference, make_experts
from moe_p2p.tools.bench.gpu_measure import Timed, measure
from moe_p2p.tools.bench.gpu_report import GpuRow, Machine, Spread
from moe_p2p.tools.bench.gpu_timing import FLUSH_BYTES
from moe_p2p.tools.bench.options import Options
from moe_p2p.tools.bench.probe import Probe
from moe_p2p.tools.bench.progress import Progress, bar
from moe_p2p.tools.bench.systems import MoeP2p, System, finish, make_config

TIMED_STEP = 1_000  # its routing and rows are those that are timed
CHECKED_TOKENS = 48  # of a rank in steps that are compared bit for bit: the reference is slow
MEMORY_PART = 0.25  # of a GPU that the regions of one communicator may take
COUNTED_PAIRS = 8
SETTLED_S = 0.02  # without a write: nothing of the last call is still to come


@dataclass(frozen=True, kw_only=True)
class Results:
    rows: list[GpuRow]
    notes: list[str]  # what was left out, and why


@dataclass(frozen=True, kw_only=True)
class Contestant:
    calls: Calls
    story: list[str]  # what is wrong with its results on this rank
    wire_bytes: int | None = None  # of all ranks and a pair, as counted

    @property
    def compared(self) -> str:
        how = "bit for bit" if self.calls.eager is not None else "within rounding"
        if self.calls.last is None:
            return "before timing, a step of this size within rounding"
        small = f"steps of up to {CHECKED_TOKENS} tokens {how}, one of this size within rounding"
        return f"before timing, {small}; {COMPARED if self.calls.eager else COMPARED_SUMS}"


def run(options: Options) -> Results:
    """The whole job of one rank; the results are the same on every rank."""
    with launch.process_group() as (rank, _):
        torch.cuda.set_device(rank)
        torch.manual_seed(rank)
        probe = Probe(timeout_s=options.timeout_s)
        world = World(options, rank, probe)
        with bar(len(options.tokens), shown=rank == 0) as progress:
            for tokens in options.tokens:
                world.measure(tokens, progress)
                torch.cuda.empty_cache()  # regions do not come out of torch's memory
                progress.update()
        probe.close()  # not after a failure: it waits for the others
        return Results(rows=world.rows, notes=world.notes)


def forms(options: Options) -> list[tuple[int, int]]:
    """(chunk_tokens, num_sms) of every form of the package for a call of options.tokens[0]."""
    (tokens,) = options.tokens
    names = {"default": make_config(options, make_job(options)).step_tokens, "T": tokens}
    chunks = dict.fromkeys(min(names.get(c) or int(c), tokens) for c in options.chunks)
    return [(chunk, num_sms) for chunk in chunks for num_sms in options.sms]


class World:
    """What the measurements of a run have in common. rows and notes are its results."""

    def __init__(self, options: Options, rank: int, probe: Probe) -> None:
        self.options, self.rank, self.probe = options, rank, probe
        self.job = make_job(options)
        self.machine, self.links = Machine.here(), probe.links()
        self.rows: list[GpuRow] = []
        self.notes: list[str] = []
        one_node = options.ranks_per_node == options.ranks
        self.group = dist.new_group(backend="nccl") if options.baseline and one_node else None
        if options.baseline and not one_node:
            self.notes.append("no baselines: theirs would not pass the links between these nodes")
        if self.group is not None and (reason := deep_ep.missing()):
            self.notes.append(f"no DeepEP: {reason}")
        self.experts = make_experts(options, self.job, rank) if options.layer else None
        self.flushed = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if options.flush else None
        )

    def measure(self, tokens: int, progress: Progress) -> None:
        options = replace(self.options, tokens=(tokens,))
        inputs = Inputs(on_device(self.job.tokens_of(TIMED_STEP, self.rank, tokens)))
        mine = inputs.tokens
        watch = Watch(self.job, options, self.rank, inputs)
        with ExitStack() as stack:
            progress.set_description(f"T {tokens}: against the reference")
            found = [*self._packages(options, mine, stack)]
            errors.require(bool(found), f"nothing to measure: {'; '.join(self.notes)}")
            found += self._baselines(options, mine, stack)
            _compare_layers(found)
            progress.set_description(f"T {tokens}: timing")
            timed = measure(
                [one.calls for one in found],
                self.probe.barrier,
                seconds=options.seconds,
                flushed=self.flushed,
                watch=watch,
            )
            self.probe.check()
            for one in found:
                one.story.extend(watch.story.get(one.calls, []))
                of_one = [each for each in timed if each.calls is one.calls]
                self.rows += self._rows(options, one, of_one)
            torch.cuda.synchronize()
            dist.barrier()  # nobody closes what another one still uses

    def _packages(self, options: Options, mine: Tokens, stack: ExitStack) -> Iterator[Contestant]:
        """The package in every form that fits this GPU."""
        limit = MEMORY_PART * torch.cuda.get_device_properties(self.rank).total_memory
        for chunk_tokens, num_sms in forms(options):
            config = make_config(options, self.job, chunk_tokens=chunk_tokens)
            plan = config.plan(world_size=options.ranks, ranks_per_node=options.ranks_per_node)
            what = f"T {options.tokens[0]}, chunk_tokens {chunk_tokens}"
            if sum(plan.values()) > limit:
                self.notes.append(f"{what}: left out, {sum(plan.values()) >> 20} MiB of regions")
                continue
            try:
                system = MoeP2p(
                    options, self.job, chunk_tokens=chunk_tokens, num_sms=num_sms or None
                )
            except (errors.InvalidArgumentError, errors.ResourceExhaustedError) as error:
                self.notes.append(f"{what}: left out, {error}")
                continue
            stack.callback(system.close)
            story = self._check(options, mine, system, exact=True)
            if layout_of(options, options.tokens[0]) == "by_rank":
                story += verify_by_rank(system.all_to_all, self.job, options, self.rank, mine)
            calls = package_calls(system, options, mine, num_sms=num_sms, experts=self.experts)
            yield Contestant(calls=calls, story=story, wire_bytes=counted_bytes(system, calls))

    def _baselines(self, options: Options, mine: Tokens, stack: ExitStack) -> Iterator[Contestant]:
        if self.group is None:
            return
        system = TorchAllToAll(options, self.job, group=self.group)
        story = self._check(options, mine, system, exact=False)
        calls = baseline_calls(system, options, mine, experts=self.experts)
        yield Contestant(calls=calls, story=story)
        if deep_ep.missing() is None:
            api = deep_ep.Api(
                module=importlib.import_module("deep_ep"),
                label="deep_ep",
                options=options,
                job=self.job,
                tokens=mine,
                group=self.group,
                stack=stack,
            )
            for calls, story in deep_ep.systems(api, self.notes):
                yield Contestant(calls=calls, story=story)

    def _check(self, options: Options, mine: Tokens, system: System, *, exact: bool) -> list[str]:
        """Small steps with changing counts against the reference, then the call to be timed."""
        (tokens,), wrong = options.tokens, []
        for step in range(options.checks):
            counts = changing_counts(step, options.ranks, min(tokens, CHECKED_TOKENS))
            everyone = self.job.tokens(step, counts)
            expected = expect(self.job, options, self.rank, everyone)
            found = verify(system, on_device(everyone[self.rank]), expected, exact=exact)
            wrong += [f"step {step}, {text}" for text in found]
        wrong += verify_whole(system, self.job, options, self.rank, mine)
        return [f"T {tokens}, rank {self.rank}: {text}" for text in wrong]

    def _bounds(self, options: Options, calls: Calls) -> floors.Bounds:
        (tokens,), job = options.tokens, self.job
        return floors.bounds(
            [job.routing(TIMED_STEP, rank, tokens)[0] for rank in range(options.ranks)],
            job.topology,
            floors.Sizes.of(
                job.hidden_dim, topk=job.topk, item=job.x_dtype.itemsize, quantize=options.quantize
            ),
            num_steps=calls.num_steps,
            push_gbs=self.links.push_gbs,
            gbps=options.gbps * options.nics,
        )

    def _rows(self, options: Options, one: Contestant, timed: list[Timed]) -> list[GpuRow]:
        calls, bounds = one.calls, self._bounds(options, one.calls)
        story = wrong_anywhere(one.story)
        if one.wire_bytes not in (None, bounds.wire.pair):
            story.append(
                f"T {options.tokens[0]}: a pair sent {one.wire_bytes} bytes between nodes, "
                f"the routing wants {bounds.wire.pair}"
            )
        rows = []
        for each in timed:
            phase = "pair" if "layer" in each.what else each.what.split()[0]
            rows.append(
                GpuRow(
                    system=calls.system,
                    what=each.what,
                    ranks=options.ranks,
                    ranks_per_node=options.ranks_per_node,
                    tokens=options.tokens[0],
                    chunk_tokens=calls.chunk_tokens,
                    num_steps=calls.num_steps,
                    num_sms=calls.num_sms,
                    layout=calls.layout,
                    hidden=self.job.hidden_dim,
                    topk=self.job.topk,
                    experts=self.job.topology.num_experts,
                    dtype=options.dtype,
                    routing=options.trace or options.routing,
                    settings=options.transport_settings,
                    nics=options.nics,
                    rounds=len(each.spans_us),
                    chain=each.chain,
                    flushed=options.flush and each.what in ("dispatch", "combine"),
                    spread=Spread.of(each.spans_us),
                    host_us=round(each.host_us, 2),
                    nvlink_bytes=getattr(bounds.nvlink, phase),
                    nic_bytes=getattr(bounds.nic, phase),
                    wire_bytes=one.wire_bytes if phase == "pair" else None,
                    expected_wire_bytes=getattr(bounds.wire, phase),
                    payload_wire_bytes=bounds.payload,
                    floor_us=round(getattr(bounds.floor, phase), 2),
                    links=self.links,
                    machine=self.machine,
                    correct=not story,
                    compared=one.compared,
                    story=story,
                )
            )
        return rows


def _compare_layers(found: list[Contestant]) -> None:
    """All of them against the last one, the baseline where there is one."""
    layers = []
    for one in found:
        if one.calls.layer is not None:
            layers.append((one, one.calls.layer()))
            finish(layers[-1][1].device)
    for one, out in layers[:-1]:
        apart = difference(out, layers[-1][1])
        if not apart <= MAX_DIFFERENCE:  # NaN is apart
            one.story.append(f"{one.calls.system}: layer is {apart:.3f} of its length away")


def counted_bytes(system: MoeP2p, calls: Calls) -> int:
    """Bytes between nodes of all ranks in one pair, as the engines counted them."""
    before = _settled(system)
    dist.barrier()
    for _ in range(COUNTED_PAIRS):
        calls.pair()
    torch.cuda.synchronize()
    dist.barrier()
    sent = torch.tensor([_settled(system) - before])
    dist.all_reduce(sent)
    return int(sent) // COUNTED_PAIRS


def _settled(system: MoeP2p) -> int:
    """What this rank has sent, once a moment has passed without more of it."""
    seen = -1
    while (now := system.wire_bytes()) != seen:
        seen = now
        time.sleep(SETTLED_S)
    return seen


def wrong_anywhere(story: list[str]) -> list[str]:
    """What is wrong on any rank."""
    return [text for one in everyones(story) for text in one]
