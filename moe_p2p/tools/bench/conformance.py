"""One rank of `bench --check`: correctness alone, a line for each case that the ranks allow.

An owner of new NICs or GPUs runs it first. Rows and sums are compared with moe_p2p.reference bit
for bit; every rank must report a deliberate fault in time. Faults run last, each with its own
communicator.

Shapes: W ranks, T tokens, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, DispatchOptions, errors, reference
from moe_p2p.reference import Tokens
from moe_p2p.tools import launch
from moe_p2p.tools.bench.cases import changing_counts, make_job
from moe_p2p.tools.bench.check import Expected, compare_rows, compare_sums, expect
from moe_p2p.tools.bench.gather import everyones
from moe_p2p.tools.bench.gpu_calls import on_device
from moe_p2p.tools.bench.gpu_timing import captured
from moe_p2p.tools.bench.options import Options
from moe_p2p.tools.bench.systems import finish, make_config

LAYOUTS = ("padded", "grouped", "by_rank")
GIVEN = "fp8 with scales of the caller"
# Name -> --dtype, and how dispatch quantizes.
TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "fp32": ("fp32", {}),
    "fp8, quantized inside": ("fp8", {"quantize": True}),
    "fp8, scales are powers of two": ("fp8", {"quantize": True, "scale_format": "power_of_two"}),
    "fp8, scales are ue8m0": ("fp8", {"quantize": True, "scale_format": "ue8m0"}),
    GIVEN: ("fp8", {}),
}
SOON_S = 5.0  # timeout_s where a rank stays away on purpose
CALLS = 8  # calls until a fault must show
IN_TIME_S = 30.0  # latest error of any rank; well above SOON_S, for busy machines

Wrong = list[str]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One dispatch and combine of all ranks, as this rank makes it, and the expected results."""

    given: dict[str, Any]  # arguments of dispatch
    y: Tensor  # [R, H] rows of combine
    expected: Expected


def run(options: Options) -> Wrong:
    """Runs the whole check of one rank; returns the errors of all ranks, the same on each."""
    with launch.process_group() as (rank, _):
        if options.device == "cuda":
            torch.cuda.set_device(launch.device_index())
        ranks = Ranks(options, rank)
        for part in (
            ranks.world, ranks.payloads, ranks.halves, ranks.graphs, ranks.masks, ranks.faults
        ):  # fmt: skip
            part()
        return ranks.wrong


class Ranks:
    """All ranks, seen from one. wrong: errors so far, of any rank."""

    def __init__(self, options: Options, rank: int) -> None:
        self.options, self.rank = options, rank
        self.size, self.last = options.ranks, options.ranks - 1
        self.nodes = options.ranks // options.ranks_per_node
        self.is_software = False  # whether the NICs are software
        self.wrong: Wrong = []

    # --- lines ---

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def skip(self, name: str, why: str) -> None:
        self.say(f"skip   {name}: {why}")

    def line(self, name: str, check: Callable[..., Wrong], *args: Any, **how: Any) -> None:
        """check(*args, **how): what is wrong on this rank. Collective."""
        try:
            found = check(*args, **how)
        except errors.MoeP2pError as error:
            found = [f"{type(error).__name__}: {error}"]
        every = [f"rank {r}: {text}" for r, one in enumerate(everyones(found)) for text in one]
        self.say(f"{'WRONG' if every else 'ok':5}  {name}")
        for text in every[:8]:
            self.say(f"         {text}")
        self.wrong += [f"{name}: {text}" for text in every]

    # --- calls ---

    def make(self, **fields: Any) -> AllToAll:
        """Makes a communicator with room for every type."""
        config = make_config(self.options, make_job(self.options))
        wide = {"dtype": torch.float32, "combine_dtype": torch.float32}
        return AllToAll(None, replace(config, **wide | fields))

    def call(
        self, step: int, *, kind: str = "bf16", gone: bool = False, full: bool = False, **how: Any
    ) -> Call:
        """gone: the last rank has no tokens, and no rank has any for its experts."""
        dtype, quantization = TYPES[kind]
        options = replace(self.options, dtype=dtype)
        job, (most,) = make_job(options), options.tokens
        counts = changing_counts(0 if full else step, self.size, most)
        if gone:
            counts[self.last] = 0
        lost = job.topology.local_experts(self.last) if gone else torch.empty(0)
        tokens = [self._with_gaps(t, step, lost) for t in job.tokens(step, counts)]
        if kind == GIVEN:
            tokens = [_quantized(t) for t in tokens]
        scale_format = {k: v for k, v in quantization.items() if k == "scale_format"}
        layout = {"layout": how.get("layout", "padded")}
        expected = expect(
            job, options, self.rank, tokens, max_tokens=most, **layout, **scale_format
        )
        mine = on_device(tokens[self.rank], options.device)
        given = {name: getattr(mine, name) for name in ("x", "topk_idx", "topk_weights", "scales")}
        y = expected.y.to(options.device)
        given["options"] = DispatchOptions(**quantization, **how)
        return Call(given=given, y=y, expected=expected)

    @staticmethod
    def _with_gaps(tokens: Tokens, step: int, lost: Tensor) -> Tokens:
        """Removes the expert from some entries."""
        generator = torch.Generator().manual_seed(step)
        none = torch.rand(tokens.topk_idx.shape, generator=generator) < 0.1
        none |= torch.isin(tokens.topk_idx, lost)
        return replace(tokens, topk_idx=tokens.topk_idx.masked_fill(none, -1))

    def rows(self, call: Call, got: Dispatched) -> Wrong:
        finish(self.options.device)
        return compare_rows(got, call.expected.received)

    def sums(self, call: Call, out: Tensor) -> Wrong:
        finish(self.options.device)
        return compare_sums(out.cpu(), call.expected)

    def whole(self, comm: AllToAll, call: Call) -> Wrong:
        got = comm.dispatch(**call.given)
        found = self.rows(call, got)
        return found + self.sums(call, comm.combine(call.y, got))

    def each_step(self, check: Callable[[int], Wrong]) -> Wrong:
        steps = range(self.options.checks)
        return [f"step {step}: {text}" for step in steps for text in check(step)]

    def steps(self, comm: AllToAll, **how: Any) -> Wrong:
        """Makes whole calls with tokens at all ranks, at some, at none."""
        return self.each_step(lambda step: self.whole(comm, self.call(step, **how)))

    # --- what is checked ---

    def world(self) -> None:
        """Says what is here."""
        with self.make() as comm:
            self.is_software = comm.engine.provider == "loopback"
            nics = f"{len(comm.counters())} {comm.engine.provider} NICs a rank"
        nodes, hosts = f"nodes of {self.options.ranks_per_node}", self.options.hosts
        where = "CPUs" if self.options.device == "cpu" else torch.cuda.get_device_name()
        self.say(f"{self.size} ranks on {where} of {hosts} hosts, {nodes}, {nics}")

    def payloads(self) -> None:
        with self.make() as comm:
            for layout in LAYOUTS:
                for kind in TYPES:
                    self.line(f"{layout}, {kind}", self.steps, comm, kind=kind, layout=layout)
        with self.make(chunk_tokens=-(-self.options.tokens[0] // 3)) as comm:
            for layout in LAYOUTS:
                self.line(f"{layout}, calls of three steps", self.steps, comm, layout=layout)

    def halves(self) -> None:
        with self.make() as comm:
            halves = Halves(self, comm)
            for layout in LAYOUTS:
                for name, way in halves.ways().items():
                    self.line(f"{layout}, {name}", halves.steps, way, layout=layout)

    def graphs(self) -> None:
        if self.options.device != "cuda":
            self.skip("graphs", "ranks are on CPUs")
            return
        with self.make() as comm:
            for layout in LAYOUTS:
                for kind in ("bf16", "fp8, quantized inside"):
                    name = f"{layout}, {kind}, replayed from a CUDA graph"
                    self.line(name, self._replayed, comm, kind=kind, layout=layout)

    def _replayed(self, comm: AllToAll, **how: Any) -> Wrong:
        held, results = self.call(0, full=True, **how), list[Any]()

        def pair() -> None:
            got = comm.dispatch(**held.given)
            results[:] = got, comm.combine(held.y, got)

        pair()  # loads the kernels
        finish(self.options.device)
        replay = captured(pair, repeats=1)

        def step(number: int) -> Wrong:
            call = self.call(number, full=True, **how)
            for name in ("x", "topk_idx", "topk_weights"):
                held.given[name].copy_(call.given[name])
            held.y.copy_(call.y)
            finish(self.options.device)
            replay()
            got, out = results
            return self.rows(call, got) + self.sums(call, out)

        return self.each_step(step)

    def masks(self) -> None:
        name = "a rank that stays away is masked, the others go on"
        if self.size == 1:
            self.skip(name, "there is one rank")
        elif self.nodes > 1 and self.options.ranks_per_node > 1:
            self.skip(name, "masks are for one node, or one rank a node")
        else:
            with self.make(mask_lost_ranks=True) as comm:  # on GPUs kernels are compiled here
                for layout in LAYOUTS:
                    found = f"{layout}, with masks, all ranks are there"
                    self.line(found, self.steps, comm, layout=layout)
            with self.make(mask_lost_ranks=True, timeout_s=SOON_S) as comm:
                self.line(name, self._masked, comm)

    def _masked(self, comm: AllToAll) -> Wrong:
        if self.rank == self.last:
            return []
        found = []
        for step, layout in enumerate(LAYOUTS):
            found += self.whole(comm, self.call(step, gone=True, layout=layout))
        lost = comm.masked.cpu().nonzero().flatten().tolist()
        return found + ([] if lost == [self.last] else [f"masked are {lost}"])

    def faults(self) -> None:
        if self.size == 1:
            self.skip("faults", "there is one rank")
            return
        self.line("configurations that differ are refused", self._differing)
        with self.make() as comm:
            self.line("a wrong argument is refused", self._refused, comm)
            self.line("calls after a refused one", self.steps, comm)
        last = f"rank {self.last}"
        for name, fault in {
            "a rank that stays away from dispatch is named": Fault(says=last, away="dispatch"),
            "a rank that stays away from combine is named": Fault(says=last, away="combine"),
            "a rank that closes is named": Fault(says=last, away="dispatch", closes=True),
            "calls that differ are reported": Fault(says="must make the same", differs=True),
        }.items():
            with self.make(timeout_s=SOON_S) as comm:
                self.line(name, self._reported, comm, fault)
        name = "NICs that reorder or fail"
        if not self.is_software or self.nodes == 1:
            self.skip(name, "no software NIC is between these ranks")
            return
        settings: dict[str, Any] = {"transport": "loopback", "transport_settings": "seed=7"}
        with self.make(**settings) as comm:
            for layout in LAYOUTS:
                name = f"{layout}, NICs that reorder what they may"
                self.line(name, self.steps, comm, layout=layout)
        settings |= {"transport_settings": "fail_nth=3", "timeout_s": SOON_S}
        with self.make(**settings) as comm:
            self.line(
                "a NIC that fails is reported",
                self._reported,
                comm,
                Fault(says="failed: transport"),
            )

    def _differing(self) -> Wrong:
        try:
            self.make(max_tokens=self.options.tokens[0] + (self.rank == self.last)).close()
        except errors.InvalidArgumentError as error:
            return [] if "max_tokens" in str(error) else [f"the error names no field: {error}"]
        return ["nothing was refused"]

    def _refused(self, comm: AllToAll) -> Wrong:
        given = self.call(0).given
        try:
            comm.dispatch(**given | {"x": given["x"][:, :16].contiguous()})
        except errors.InvalidArgumentError:
            return []
        return ["rows that are too short were not refused"]

    def _reported(self, comm: AllToAll, fault: Fault) -> Wrong:
        began = time.monotonic()
        error = fault.provoke(self, comm)
        took = time.monotonic() - began
        every = everyones(error)  # no rank closes before all have their error
        if self.rank == self.last and fault.away:
            return []
        found = [] if error else ["no error came"]
        found += [f"the error came after {took:.1f} s"] if took > IN_TIME_S else []
        if not any(fault.says in text for text in every):
            found.append(f"no error has {fault.says!r}: {error}")
        return found


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A deliberate fault, and words that some rank's error must contain."""

    says: str
    away: str = ""  # the call that the last rank does not make
    closes: bool = False  # instead
    differs: bool = False  # the call of rank 0

    def provoke(self, ranks: Ranks, comm: AllToAll) -> str:
        """Returns the error of this rank; empty: there was none."""
        stays = bool(self.away) and ranks.rank == ranks.last
        call = ranks.call(0, kind="fp16" if self.differs and ranks.rank == 0 else "fp32", full=True)
        if stays and self.away == "dispatch":
            if self.closes:
                comm.close()
            return ""
        try:
            for _ in range(CALLS):
                got = comm.dispatch(**call.given)
                finish(ranks.options.device)
                if stays:
                    return ""
                comm.combine(call.y, got)
                finish(ranks.options.device)
                if comm.broken:
                    break
        except errors.MoeP2pError as error:
            return str(error)
        return comm.broken


class Halves:
    """Ways to make two calls out of halves: (first, second) -> what is wrong."""

    def __init__(self, ranks: Ranks, comm: AllToAll) -> None:
        self._ranks, self._comm = ranks, comm

    def ways(self) -> dict[str, Callable[[Call, Call], Wrong]]:
        return {
            "dispatch in halves": self._dispatch,
            "combine in halves": self._combine,
            "both in halves, two calls open": self._both,
            "dispatch alone": self._dispatch_alone,
            "combine alone, weights given late": self._combine_alone,
        }

    def steps(self, way: Callable[[Call, Call], Wrong], *, layout: str) -> Wrong:
        def step(number: int) -> Wrong:
            return way(*(self._ranks.call(2 * number + i, layout=layout) for i in (0, 1)))

        return self._ranks.each_step(step)

    def _received(self, call: Call) -> Dispatched:
        return self._comm.dispatch_recv(self._comm.dispatch_send(**call.given))

    def _dispatch(self, first: Call, second: Call) -> Wrong:
        found = []
        for call in (first, second):
            got = self._received(call)
            found += self._ranks.rows(call, got)
            found += self._ranks.sums(call, self._comm.combine(call.y, got))
        return found

    def _combine(self, first: Call, second: Call) -> Wrong:
        found = []
        for call in (first, second):
            sent = self._comm.combine_send(call.y, self._comm.dispatch(**call.given))
            found += self._ranks.sums(call, self._comm.combine_recv(sent))
        return found

    def _both(self, first: Call, second: Call) -> Wrong:
        comm, calls = self._comm, (first, second)
        pending = [comm.dispatch_send(**call.given) for call in calls]
        got = [comm.dispatch_recv(each) for each in pending]
        found = [
            t for call, rows in zip(calls, got, strict=True) for t in self._ranks.rows(call, rows)
        ]
        sent = [comm.combine_send(call.y, rows) for call, rows in zip(calls, got, strict=True)]
        out = [comm.combine_recv(each) for each in sent]
        return found + [
            t for call, y in zip(calls, out, strict=True) for t in self._ranks.sums(call, y)
        ]

    def _dispatch_alone(self, first: Call, second: Call) -> Wrong:
        """Dispatches without a combine: released, or solo."""
        got = self._comm.dispatch(**first.given)
        found = self._ranks.rows(first, got)
        self._comm.release(got)
        alone = second.given | {"options": replace(second.given["options"], solo=True)}
        return found + self._ranks.rows(second, self._comm.dispatch(**alone))

    def _combine_alone(self, first: Call, second: Call) -> Wrong:
        """Combines rows whose dispatch had no weights; by rank the experts have used them."""
        found = []
        for call in (first, second):
            late = call.given["topk_weights"] if call.given["options"].layout != "by_rank" else None
            given = call.given | ({} if late is None else {"topk_weights": None})
            got = self._comm.dispatch(**given)
            found += self._ranks.sums(call, self._comm.combine(call.y, got, topk_weights=late))
        return found


def _quantized(tokens: Tokens) -> Tokens:
    x, scales = reference.quantize(tokens.x)
    return replace(tokens, x=x, scales=scales)
