"""One rank of the benchmark: check first, then measure.

For each number of tokens all systems are made and compared with the reference, then timed in turns,
and compared again. Buffers are reused, inputs change from one round to the next (clocks.py takes
spans, gpu_last.py compares after timing).
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.bench import deep_ep, floors, hops, report
from moe_p2p.bench.cases import make_job
from moe_p2p.bench.clocks import CpuClock, GpuClock, make_clock
from moe_p2p.bench.contestants import Contestant, Entry, wrong_anywhere
from moe_p2p.bench.floors import Bounds
from moe_p2p.bench.gpu_calls import Calls, on_device
from moe_p2p.bench.gpu_last import Inputs, Watch
from moe_p2p.bench.gpu_layer import (
    MAX_DIFFERENCE,
    MAX_DIFFERENCE_FP8,
    difference,
    make_parts,
    published,
)
from moe_p2p.bench.gpu_measure import Timed
from moe_p2p.bench.harness import finish, use_device
from moe_p2p.bench.options import INTERFACES, INTERFACES_ON_CUDA, Options
from moe_p2p.bench.progress import Progress, bar
from moe_p2p.bench.report import Machine, Row, Spread
from moe_p2p.bench.systems import MoeP2p, Sent
from moe_p2p.machine import tuned
from moe_p2p.moe.rendezvous.mirror import MirrorGroup
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones

TIMED_STEP = 1_000  # step whose routing and rows are timed
NUM_INPUTS = 4  # on CPUs: routings that are timed, in turn
COUNTED_PAIRS = NUM_INPUTS  # each routing equally often
SETTLED_S = 0.02  # without a write: nothing of the last call is outstanding


@dataclass(frozen=True, kw_only=True)
class Results:
    rows: list[Row]
    notes: list[str]  # what was left out, with the reason


def run(options: Options) -> Results:
    """Runs the job of one rank; the results are the same on every rank."""
    with launch.process_group() as (rank, _):
        use_device(options.device)
        torch.manual_seed(rank)
        clock = make_clock(options)
        world = World(options, rank, clock)
        cases = list(_cases(options))
        with bar(len(cases), shown=rank == 0) as progress:
            for interface, tokens in cases:
                world.measure(interface, tokens, progress)
                torch.cuda.empty_cache()  # regions are not part of torch's memory
                progress.update()
        clock.close()
        return Results(rows=world.rows, notes=list(dict.fromkeys(world.notes)))


def _cases(options: Options) -> Iterator[tuple[str, int]]:
    """Yields (DeepEP's interface, tokens); AllToAll's own calls have no interface."""
    defaults = INTERFACES_ON_CUDA if options.device == "cuda" else INTERFACES
    for interface, counts in defaults.items() if options.api == "deep_ep" else [("", ())]:
        for tokens in options.tokens or counts:
            yield interface, tokens


class World:
    """Shared by the measurements of a run. rows and notes are its results."""

    def __init__(self, options: Options, rank: int, clock: CpuClock | GpuClock) -> None:
        self.options, self.rank, self.clock = options, 0 if options.mirror else rank, clock
        self.job = make_job(options)
        on_cuda = options.device == "cuda"
        self.machine = Machine.here(on_cuda=on_cuda, hosts=options.hosts)
        self.rows: list[Row] = []
        found = tuned.find()
        self.notes: list[str] = [f"with values of {found.path}"] if found.path else []
        through = options.api == "deep_ep"
        emulated = on_cuda and options.ranks_per_node < options.ranks // options.hosts
        self.mirror = _mirror_of(options, rank) if options.mirror else None
        self.group: dist.ProcessGroup | None = None
        if self.mirror is not None:
            self.notes.append(report.MIRROR)
        elif through or (options.baseline and not emulated):
            self.group = dist.new_group(backend="nccl") if on_cuda else dist.group.WORLD
        if options.baseline and emulated:
            self.notes.append("no baselines: theirs would not pass the links between these nodes")
        if self.group is not None and on_cuda and (reason := deep_ep.missing()) and not through:
            self.notes.append(f"no DeepEP: {reason}")
        self.layer = make_parts(options, self.job, self.rank, self.notes) if options.layer else None
        self.notes += published(options)

    def measure(self, interface: str, tokens: int, progress: Progress) -> None:
        options = replace(self.options, tokens=(tokens,))
        steps = self._timed_steps(interface)
        variants = [self.job.tokens_of(step, self.rank, tokens) for step in steps]
        inputs = Inputs(*(on_device(each, options.device) for each in variants))
        watch = Watch(self.job, options, self.rank, inputs)
        with ExitStack() as stack:
            progress.set_description(f"{interface} T {tokens}: against the reference")
            entry = Entry(
                options=options,
                job=self.job,
                rank=self.rank,
                tokens=inputs.tokens,
                layer=self.layer,
                group=self.group,
                ranks=self.mirror,
                stack=stack,
                notes=self.notes,
            )
            found = self._found(entry, interface)
            entry.check(found, range(options.checks))
            counted = {
                one.calls: counted_sent(one.package, one.calls, inputs)
                for one in found
                if one.package is not None
            }
            progress.set_description(f"{interface} T {tokens}: timing")
            calls = [one.calls for one in found]
            timed = self.clock.measure(calls, watch)
            apart = self._hops(options, inputs, counted)
            hosts = self.clock.host_times(calls) if interface else {}
            # No failure while the clock ran.
            entry.check(found, range(options.checks, options.checks + 1))
            for one in found:
                one.wrong.extend(watch.wrong.get(one.calls, []))
                of_one = [each for each in timed if each.calls is one.calls]
                rows = self._rows(options, steps, one, of_one, counted=counted.get(one.calls))
                if one.package is not None:
                    rows = [
                        replace(row, hops=apart)
                        if (row.what, row.num_sms) == ("pair graph", 0)
                        else row
                        for row in rows
                    ]
                if interface:
                    us, adds_us, alone_us = hosts[one.calls]
                    through: dict[str, Any] = {"host_us": us, "adds_us": adds_us}
                    through["host_alone_us"] = alone_us
                    rows = [replace(row, interface=interface, **through) for row in rows]
                self.rows += rows
            finish(options.device)
            dist.barrier()  # no rank closes what another still uses

    def _hops(
        self, options: Options, inputs: Inputs, counted: dict[Calls, dict[str, Sent]]
    ) -> dict[str, float]:
        if not hops.can_be_taken_apart(options):
            return {}
        assert isinstance(self.clock, GpuClock)
        bytes_of_phases = bytes_of(next(iter(counted.values())))
        clock = self.clock.align
        found = hops.measure(options, self.job, inputs.tokens, clock, bytes_of_phases)
        if not found:
            self.notes.append(f"no hops of T {options.tokens[0]}: a pair takes several steps")
        return found

    def _timed_steps(self, interface: str) -> list[int]:
        """Returns the routings: one if a graph or an earlier call's layout holds it."""
        several = self.options.device == "cpu" and not interface
        return list(range(TIMED_STEP, TIMED_STEP + (NUM_INPUTS if several else 1)))

    def _found(self, entry: Entry, interface: str) -> list[Contestant]:
        if interface:
            return [*entry.through_deep_ep(interface)]
        found = [*entry.packages()]
        errors.require(bool(found), f"nothing to measure: {'; '.join(self.notes)}")
        found += entry.baselines()
        if self.layer is not None:
            _compare_layers(found, self.options)
        return found

    def _of_layer(self, timed: Timed) -> dict[str, Any]:
        layer, gbs = timed.layer, self.machine.memory_gbs
        if layer is None:
            return {"layout": timed.calls.layout}
        assert self.layer is not None
        return {
            "layout": layer.layout,
            "gemm": layer.gemm,
            "overlap_sms": layer.overlap_sms,
            "weights_us": round(self.layer.weight_bytes / gbs / 1e3, 1) if gbs else 0.0,
        }

    def _bounds(self, options: Options, step: int, calls: Calls) -> Bounds:
        push_gbs, gbps = self.clock.links.push_gbs, options.gbps * options.nics
        rates = {"push_gbs": push_gbs, "gbps": gbps}
        return floors.bounds_of(options, self.job, step, num_steps=calls.num_steps, **rates)

    def _rows(
        self,
        options: Options,
        steps: Sequence[int],
        one: Contestant,
        timed: list[Timed],
        *,
        counted: dict[str, Sent] | None,
    ) -> list[Row]:
        calls, job = one.calls, self.job
        bounds = [self._bounds(options, step, calls) for step in steps]

        def mean(what: str, phase: str) -> float:
            return sum(float(getattr(getattr(b, what), phase)) for b in bounds) / len(bounds)

        expected = int(mean("wire", "pair"))
        nbytes = bytes_of(counted) if counted else None
        wrong = wrong_anywhere(one.wrong) + miscounted(options, nbytes, expected)
        theirs = [sum(b.deepep[i] for b in bounds) // len(bounds) for i in (0, 1)]
        nics = len(one.package.all_to_all.counters()) if one.package else options.nics
        rows = []
        for each in timed:
            phase = each.what.split()[0]
            phase = "pair" if phase in ("layer", "experts") else phase
            rows.append(
                Row(
                    system=calls.system.split()[0] if options.api == "deep_ep" else calls.system,
                    what=each.what,
                    ranks=options.ranks,
                    ranks_per_node=options.ranks_per_node,
                    mirrored_on=options.mirror,
                    tokens=options.tokens[0],
                    chunk_tokens=calls.chunk_tokens,
                    num_steps=calls.num_steps,
                    num_sms=calls.num_sms,
                    **self._of_layer(each),
                    hidden=job.hidden_dim,
                    topk=job.topk,
                    experts=job.topology.num_experts,
                    dtype=options.dtype,
                    routing=options.trace or options.routing,
                    settings=options.transport_settings,
                    nics=nics,
                    rounds=len(each.spans_us),
                    chain=each.chain,
                    flushed=options.flush and each.what in ("dispatch", "combine"),
                    spread=Spread.of(each.spans_us),
                    host_us=None if each.host_us is None else round(each.host_us, 2),
                    nvlink_bytes=int(mean("nvlink", phase)),
                    nic_bytes=int(mean("nic", phase)),
                    wire_bytes=counted[phase].nbytes if counted else None,
                    wire_writes=counted[phase].writes if counted else None,
                    wire_immediates=counted[phase].immediates if counted else None,
                    deepep_writes=theirs[0] // (1 if phase == "pair" else 2),
                    deepep_flags=theirs[1] // (1 if phase == "pair" else 2),
                    expected_wire_bytes=int(mean("wire", phase)),
                    floor_bytes=int(mean("payload", phase)),
                    flat_floor_bytes=int(mean("flat", phase)),
                    floor_us=round(mean("floor", phase), 2),
                    max_vio=round(sum(b.max_vio for b in bounds) / len(bounds), 2),
                    busiest=round(sum(b.busiest for b in bounds) / len(bounds), 2),
                    links=self.clock.links,
                    machine=self.machine,
                    correct=not wrong,
                    compared=one.compared,
                    wrong=wrong,
                )
            )
        return rows


def _mirror_of(options: Options, rank: int) -> MirrorGroup:
    key = f"bench.{everyones(secrets.token_hex(8))[0]}"
    return MirrorGroup(options.ranks, place=rank, count=options.mirror, key=key)


def _compare_layers(found: list[Contestant], options: Options) -> None:
    """Compares all layers with the reference of the first contestant."""
    most = MAX_DIFFERENCE_FP8 if options.quantize else MAX_DIFFERENCE
    reference = found[0].calls.reference
    assert reference is not None
    want = reference()
    for one in found:
        for layer in one.calls.layers:
            apart = difference(layer.run(), want)
            if not apart <= most:  # NaN is apart
                text = f"layer is {apart:.3f} of its length away from plain products"
                one.wrong.append(f"{one.calls.system}, {layer.name}: {text}")


def bytes_of(counted: dict[str, Sent]) -> dict[str, int]:
    return {phase: sent.nbytes for phase, sent in counted.items()}


def counted_sent(system: MoeP2p, calls: Calls, inputs: Inputs) -> dict[str, Sent]:
    """Returns what went between nodes of all ranks, as the engines counted it, by phase and pair.

    A pair is counted over pairs with nothing in between.
    """
    device = system.all_to_all.config.device

    def settled() -> torch.Tensor:
        """Returns what this rank has sent, once a moment has passed without more."""
        finish(device)
        dist.barrier()
        seen = None
        while (now := system.sent()) != seen:
            seen = now
            time.sleep(SETTLED_S)
        return torch.tensor(now)

    marks = [settled()]
    for _ in range(COUNTED_PAIRS):
        inputs.change()
        calls.pair()
    marks.append(settled())
    for _ in range(COUNTED_PAIRS):
        inputs.change()
        for call in (calls.dispatch, calls.combine):
            call()
            marks.append(settled())
    spans = [after - before for before, after in itertools.pairwise(marks)]
    apart = (torch.stack(spans[first::2]).sum(0) for first in (1, 2))
    sent = torch.stack([spans[0], *apart])
    dist.all_reduce(sent)
    each = (sent // COUNTED_PAIRS).tolist()
    return {name: Sent(*of) for name, of in zip(("pair", "dispatch", "combine"), each, strict=True)}


def miscounted(options: Options, counted: dict[str, int] | None, expected: int) -> list[str]:
    """Compares the counters with the routing, pairs and the two phases together.

    Not phase by phase: a call of several steps closes them after it has returned, and such a header
    may then be counted with the next phase.
    """
    if counted is None:
        return []
    separate = counted["dispatch"] + counted["combine"]
    return [
        f"T {options.tokens[0]}: {what} sent {sent} bytes between nodes, the routing wants "
        f"{expected}"
        for what, sent in (("a pair", counted["pair"]), ("dispatch, then combine", separate))
        if sent != expected
    ]
