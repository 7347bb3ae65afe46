"""`bench --api weights --decode N`: pairs of dispatch and combine while weights move.

Two ranks, each a node of its own, with one engine each: the communicator's traffic is class 0 of
it, weights are class 2, or class 0 too ("same class": what happens without priorities). Where the
timed NIC carries weights, pairs of a second engine show what the link alone does to them: weights
of class 2 take their time on it and are not copied ("not copied"). Each pair is timed from before
dispatch until its stream is done: a wait for the device would be one for copies of weights, too.
Ways take turns, in rounds, and begin a round each; a way whose pairs take so long that its time is
up ends with fewer. `more`: of the p99 alone, or `nothing` where it is within the spread of the p99
of rounds alone, which is printed.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, Engine, EngineConfig
from moe_p2p.bench.harness import Alone, at, cell, finish, in_turns, option, table, use_device
from moe_p2p.bench.options import NICS_OF_A_GPU
from moe_p2p.engine.transfers import Request
from moe_p2p.errors import require
from moe_p2p.machine.transport import TIMED
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.option_types import above_zero

HIDDEN, TOPK, EXPERTS, TOKENS = 7168, 8, 256, 32
WAYS: dict[str, int | None] = {"alone": None, "with priorities": 2, "same class": 0}
NOT_COPIED = "not copied"
ROUNDS = 10
AT_ONCE = 20  # pairs between two looks at the time
PENDING = 2  # writes of weights at a time
LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    device: str
    pairs: int = option(10_000, "of --decode, the same number (10000)")  # of a way
    way_s: float = option(40.0, "of --decode: seconds of each of 3 ways (40)", type=above_zero)
    transport: str = option("auto", "of --decode")
    transport_settings: str = option("", "of --decode: preset=cx7 of the timed NIC (none)")
    hidden: int = HIDDEN
    experts: int = EXPERTS
    weights_mib: int = 64  # of a write
    json: str = ""


@dataclass(frozen=True)
class Way:
    """Microseconds of a pair on rank 0. gbytes_per_s: of weights, from rank 0."""

    name: str
    p50_us: float
    p99_us: float
    gbytes_per_s: float
    pairs: int
    allowed_us: float | None = None  # p99 alone, and 10% or 10 us more, whichever is more
    spread_us: float = 0.0  # of the p99 of rounds alone
    seen: bool = True  # its p99 is further from that alone than that
    wrong: int = 0


def run(options: Options) -> list[Way]:
    with launch.process_group() as (rank, world_size):
        require(world_size == 2, f"--decode has 2 ranks, not {world_size}")
        device = use_device(options.device)
        with contextlib.ExitStack() as stack:

            def side(of: Options) -> _Decode:
                engine = Engine(engine_config(of), label=f"rank {rank}", gpu=device.index)
                return _Decode(of, rank, stack.enter_context(engine), device)

            first = side(options)
            sides = {name: (first, priority) for name, priority in WAYS.items()}
            if options.transport == TIMED and device.type == "cuda" and carries_weights(options):
                sides[NOT_COPIED] = side(hollow(options)), 2
            return _ways(rank, sides)


def hollow(options: Options) -> Options:
    """Weights that take their time on the link, and nothing else."""
    settings = ",".join(each for each in (options.transport_settings, "hollow=1") if each)
    return replace(options, transport_settings=settings)


def engine_config(options: Options) -> EngineConfig:
    """With as many timed NICs as make up a GPU's link; a software NIC's default is two."""
    preset = _words(options).get("preset", "cx7")
    return EngineConfig(
        transport=options.transport,
        transport_settings=options.transport_settings,
        nics_per_rank=NICS_OF_A_GPU.get(preset) if options.transport == TIMED else None,
    )


def carries_weights(options: Options) -> bool:
    """False where they only take their time on the link: such a NIC has no use for the GPU, as a
    real one, while copies by the software NIC take multiprocessors and the rank's thread."""
    return options.device == "cpu" or _words(options).get("hollow", "0") == "0"


def _words(options: Options) -> dict[str, str]:
    return dict(each.partition("=")[::2] for each in options.transport_settings.split(","))


class _Decode:
    def __init__(self, options: Options, rank: int, engine: Engine, device: torch.device) -> None:
        self.options, self.rank, self.device = options, rank, device
        self.engine = engine
        config = AllToAllConfig(
            num_experts=options.experts,
            hidden_dim=options.hidden,
            topk=TOPK,
            max_tokens=TOKENS,
            ranks_per_node=1,
            device=device.type,
        )
        self.comm = AllToAll(None, config, engine=engine)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(TOKENS, options.hidden, generator=generator)
        scores = torch.rand(TOKENS, options.experts, generator=generator)
        weights, experts = scores.softmax(-1).topk(TOPK, -1)
        self.x = x.bfloat16().to(device)
        self.experts, self.weights = experts.to(device), weights.to(device)
        self.expected = self.x.float() * weights.sum(-1, keepdim=True).to(device)
        size = options.weights_mib << 20
        self.source = torch.full((size,), rank + 1, dtype=torch.uint8, device=device)
        self.target = torch.zeros(size, dtype=torch.uint8, device=device)
        self.memory, inbox = engine.register(self.source), engine.register(self.target)
        both = everyones(inbox.descriptor)
        self.regions = {p: engine.resolve(both[1 - rank], priority=p) for p in (0, 2)}
        self.requests: list[Request] = []
        self.sent = 0

    def pair(self) -> Tensor:
        got = self.comm.dispatch(self.x, self.experts, self.weights)
        sums: Tensor = self.comm.combine(got.x, got)
        return sums

    def move(self, priority: int | None) -> None:
        """Keeps writes of weights under way."""
        if priority is None:
            return
        for request in [each for each in self.requests if each.done()]:
            request.wait(LIMIT_S)
            self.requests.remove(request)
            self.sent += self.source.numel()
        while len(self.requests) < PENDING:
            region = self.regions[priority]
            self.requests.append(self.engine.write(self.memory, region, priority=priority))

    def stop(self) -> None:
        for request in self.requests:
            request.wait(LIMIT_S)
            self.sent += self.source.numel()
        self.requests.clear()

    def round(self, times: list[float], priority: int | None) -> Tensor:
        """Both ranks make as many pairs: rank 0 says whether its time is up."""
        left, end = -(-self.options.pairs // ROUNDS), self.options.way_s / ROUNDS
        began, over = time.monotonic(), False
        while left and not over:
            for _ in range(min(left, AT_ONCE)):
                self.move(priority)
                start = time.monotonic()
                out = self.pair()
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
                times.append((time.monotonic() - start) * 1e6)
            left -= min(left, AT_ONCE)
            over = everyones(time.monotonic() - began > end)[0]
        return out

    def wrong(self, out: Tensor, priority: int | None) -> int:
        # bf16 rounds three times on the way: 3 * 2^-9 of the largest partial sum.
        differs = not torch.allclose(out.float(), self.expected, rtol=2e-2, atol=2e-2)
        moved = priority is not None and carries_weights(self.options)
        lost = moved and bool((self.target != 2 - self.rank).any())
        return int(differs) + int(lost)


def _ways(rank: int, sides: dict[str, tuple[_Decode, int | None]]) -> list[Way]:
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    wrong = dict.fromkeys(sides, 0)
    each_once = {id(side): side for side, _ in sides.values()}.values()
    for side in each_once:
        for _ in range(50):  # warm-up
            side.pair()
    for number in range(ROUNDS):
        for name, (side, priority) in in_turns(list(sides.items()), number):
            side.target.zero_()
            finish(side.device)
            dist.barrier()
            before, began = side.sent, time.monotonic()
            times[name].append([])
            out = side.round(times[name][-1], priority)
            moved, took = side.sent - before, time.monotonic() - began
            rates[name].append(moved / took / 1e9)
            side.stop()
            dist.barrier()
            wrong[name] += side.wrong(out, priority)
            if rank == 0:
                text = f"{len(times[name][-1]):,} pairs, {time.monotonic() - began:.1f} s"
                text = f"round {number + 1} of {ROUNDS}, {name}: {text}"
                print(text, file=sys.stderr, flush=True)
    for side in each_once:
        side.comm.close()
    return _figures(times, rates, wrong)


def _figures(
    times: dict[str, list[list[float]]], rates: dict[str, list[float]], wrong: dict[str, int]
) -> list[Way]:
    """times: of each round of a way."""
    found: list[Way] = []
    spread = Alone.of([at(each, 99) for each in times["alone"]]).spread
    for name, rounds in times.items():
        every = [us for each in rounds for us in each]
        alone, p99 = found[0].p99_us if found else None, at(every, 99)
        found.append(
            Way(
                name,
                statistics.median_low(every),
                p99,
                sum(rates[name]) / len(rates[name]),
                len(every),
                None if alone is None else alone + max(0.1 * alone, 10.0),
                spread,
                alone is not None and Alone(alone, spread).is_seen(p99),
                wrong[name],
            )
        )
    return found


def text(options: Options, ways: list[Way]) -> str:
    title = (
        f"pairs of dispatch and combine beside weights, 2 nodes of 1 rank, T {TOKENS}, "
        f"H {options.hidden}, up to {options.pairs:,} of each way, transport {options.transport} "
        f"{options.transport_settings}"
    )
    heads = ("pairs", "p50, us", "p99, us", "more, us", "allowed p99", "weights, GB/s")
    lines = [["weights", *heads]]
    for way in ways:
        more = f"{way.p99_us - ways[0].p99_us:.1f}" if way.seen else "nothing"
        lines.append([
            *(way.name, f"{way.pairs:,}", f"{way.p50_us:.1f}", f"{way.p99_us:.1f}"),
            "-" if way.allowed_us is None else more,
            *(cell(way.allowed_us, ".1f"), f"{way.gbytes_per_s:.2f}"),
        ])  # fmt: skip
    spread = f"p99 of rounds alone are {ways[0].spread_us:.1f} us apart"
    return "\n".join([title, table(lines, 1), spread])
