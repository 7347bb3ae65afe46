"""`python -m moe_p2p bench --api experts`: experts that move between ranks, alone and beside steps.

An expert of DeepSeek-V3 in fp8 has 44 MB: w13 and w2, two tensors of slots. Alone: a whole move, of
one expert to each rank and of several, from `move` until every rank has swapped. Beside pairs of
dispatch and combine, in turns: nothing, moves into empty slots, moves into slots in use (which are
copied once more, between two steps). A pair is timed from before its launch (on GPUs the replay of
a graph) until its stream is done, `step` apart. Rows are multiplied with a byte of their slot's
weights, so every sum, which is compared after every pair, says where each expert was.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, ExpertMap, ExpertMover
from moe_p2p.bench.harness import (
    Alone,
    Common,
    at,
    cell,
    device_name,
    ended,
    file,
    finish,
    in_turns,
    measured,
    option,
    parsed,
    parser_of,
    refuse,
    table,
    use_device,
)
from moe_p2p.moe.expert_map import EMPTY
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones

ROUNDS = 10
AT_ONCE = 4  # experts of the larger move alone
WAYS = ("no moves", "into empty slots", "into used slots")
FACTORS = 8  # of experts: whole numbers, whose sums are exact in bf16


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    ranks: int = option(2, "ranks of this host")
    tokens: int = option(32, "of a rank in each pair")
    hidden: int = option(512, "of a row", cuda=7168)
    topk: int = option(4, "experts of a token", cuda=8)
    experts: int = option(16, "of all ranks, each of which has an empty slot more", cuda=256)
    expert_kib: int = option(768, "of an expert: a multiple of 3", cuda=43008)
    step_kib: int = option(256, "that a rank reads in a step", cuda=4096)
    pairs: int = option(300, "of each way", cuda=10_000)
    repeats: int = option(10, "moves alone", cuda=50)
    json: str | None = file("experts.json", "rows")


@dataclass(frozen=True)
class Move:
    """A move alone, medians over repeats of the slowest rank. experts: to each rank."""

    experts: int
    us: float
    gbytes_per_s: float  # into a rank, of the whole move


@dataclass(frozen=True)
class Way:
    """Microseconds of the slowest rank."""

    name: str
    p50_us: float
    p99_us: float
    step_p50_us: float  # of `step`, with what it launched
    step_p99_us: float
    moves: int  # experts that arrived, on all ranks
    pairs: int
    allowed_us: float | None = None  # p99 without moves, and 10% or 10 us more, whichever is more
    spread_us: float = 0.0  # of the p99 of rounds without moves
    wrong: int = 0  # sums and slots


@dataclass(frozen=True)
class Found:
    alone: list[Move]
    ways: list[Way]
    more_gbytes_per_s: float | None  # of the experts by which the moves alone differ


def main(arguments: list[str]) -> int:
    """Returns 0: all right, 1: a sum or a slot is wrong, 2: a process failed."""
    parser = parser_of(Options, "experts", "Experts that move between ranks of this host.")
    base, given = parsed(parser, Options, arguments)
    options = Options(**base | given)
    each, rest = divmod(options.experts, options.ranks)
    refuse(parser, {
        "--experts: a multiple of --ranks": rest != 0,
        f"--experts: at least {AT_ONCE} for each rank": each < AT_ONCE,
        "--expert-kib: a multiple of 3": options.expert_kib % 3 != 0,
        "--topk: at most --experts": options.topk > options.experts,
        "--ranks: at least 2": options.ranks < 2,
    })  # fmt: skip
    found: Found | None = measured(run, options, options.ranks)
    if found is None:
        return 2
    wrong = [f"WRONG: {way.name}: {way.wrong} sums or slots" for way in found.ways if way.wrong]
    body = {"options": asdict(options)} | asdict(found)
    return ended(options, text(options, found), body, wrong)


def run(options: Options) -> Found:
    with launch.process_group(), contextlib.ExitStack() as stack:
        return _Bench(options, stack).run()


class _Bench:
    def __init__(self, options: Options, stack: contextlib.ExitStack) -> None:
        self.options, self.device = options, use_device(options.device)
        self.slots = options.experts // options.ranks + 1
        config = AllToAllConfig(
            num_experts=self.slots * options.ranks,
            hidden_dim=options.hidden,
            topk=options.topk,
            max_tokens=options.tokens,
            device=self.device.type,
        )
        self.comm = stack.enter_context(AllToAll(None, config))
        self.rank = self.comm.rank
        self.table = ExpertMap(
            self._first(), num_experts=options.experts, rank=self.rank, device=self.device
        )
        third = options.expert_kib * 1024 // 3
        self.tensors = [
            torch.zeros(self.slots, size, dtype=torch.uint8, device=self.device)
            for size in (2 * third, third)
        ]
        for slot, expert in self._held():
            for number, each in enumerate(self.tensors):
                each[slot] = self._byte(expert, number)
                each[slot, 0] = self._factor(expert)
        self.mover = stack.enter_context(
            ExpertMover(
                None,
                self.comm.engine,
                [(self.table, self.tensors)],
                staging_slots=AT_ONCE,
                bytes_per_step=options.step_kib * 1024,
            )
        )
        self.number, self.turns = 0, random.Random(1)
        self.pair, self.out = self._pairs()

    # --- experts ---

    def _first(self) -> list[int]:
        """Each rank has its share, and an empty slot behind it."""
        each = self.slots - 1
        ranks = range(self.options.ranks)
        return [e for rank in ranks for e in (*range(rank * each, (rank + 1) * each), EMPTY)]

    def _held(self) -> list[tuple[int, int]]:
        mine = self.table.placement[self.rank * self.slots :][: self.slots]
        return [(slot, expert) for slot, expert in enumerate(mine) if expert != EMPTY]

    @staticmethod
    def _factor(expert: int) -> int:
        return 1 + expert % FACTORS

    @staticmethod
    def _byte(expert: int, number: int) -> int:
        return (7 * expert + 101 * number + 3) % 251

    def _wrong_slots(self) -> int:
        found = 0
        for slot, expert in self._held():
            for number, each in enumerate(self.tensors):
                right = each[slot, 1:] == self._byte(expert, number)
                found += int(not bool(right.all())) + int(each[slot, 0] != self._factor(expert))
        return found

    def placement(self, way: str, num: int = 1) -> list[int]:
        """The next one: `num` experts of each rank go to the rank behind it."""
        now, size = self.table.placement, self.slots
        found = list(now)
        ranks = range(self.options.ranks)
        used = [
            self.turns.sample([s for s in range(r * size, (r + 1) * size) if now[s] != EMPTY], num)
            for r in ranks
        ]
        for rank in ranks:
            behind = (rank + 1) % len(ranks)
            targets = used[behind]
            if way == "into empty slots":
                targets = [now.index(EMPTY, behind * size, (behind + 1) * size)]
                found[used[rank][0]] = EMPTY
            for source, target in zip(used[rank], targets, strict=True):
                found[target] = now[source]
        return found

    # --- moves alone ---

    def alone(self, num: int) -> Move:
        times = []
        for _ in range(self.options.repeats + 2):
            finish(self.device)
            dist.barrier()
            began = time.monotonic()
            self.mover.move(self.placement("into used slots", num))
            self.number += 1000
            self.mover.step(self.number, wait=True)
            finish(self.device)
            times.append(max(everyones(time.monotonic() - began)))
        us = statistics.median(times[2:]) * 1e6
        return Move(num, us, num * self.options.expert_kib * 1.024 / us)

    # --- pairs ---

    def _pairs(self) -> tuple[Callable[[], None], Tensor]:
        """What makes a pair, and where its sums are."""
        options, device = self.options, self.device
        generator = torch.Generator().manual_seed(self.rank)
        x = torch.randint(-4, 5, (options.tokens, options.hidden), generator=generator)
        scores = torch.rand(options.tokens, options.experts, generator=generator)
        idx = scores.topk(options.topk, 1).indices
        factors = torch.tensor([self._factor(each) for each in range(options.experts)])
        self.expected = (x * factors[idx].sum(1, keepdim=True)).bfloat16().to(device)
        x, idx = x.bfloat16().to(device), idx.to(device)
        out = torch.empty_like(self.expected)

        def pair() -> None:
            got = self.comm.dispatch(x, self.table.to_slots(idx), layout="grouped")
            row = torch.arange(got.x.shape[0], dtype=got.offsets.dtype, device=device)
            slot = torch.searchsorted(got.offsets[: self.slots], row, right=True) - 1
            factor = self.tensors[0][:, 0].bfloat16()[slot.clamp(0, self.slots - 1)]
            self.comm.combine(got.x * factor[:, None], got, out=out)

        if device.type == "cpu":
            return pair, out
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                pair()
        finish(device)
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            pair()
        dist.barrier()
        return graph.replay, out

    def round(self, way: str, num: int, times: list[float], steps: list[float]) -> tuple[int, int]:
        """Returns moves and wrong sums. The last move of a round ends in it."""
        moves = wrong = done = 0
        while done < num or self.mover.moving:
            start = time.monotonic()
            self.pair()
            self._finish()
            times.append((time.monotonic() - start) * 1e6)
            wrong += int(not torch.equal(self.out, self.expected))
            done += 1
            start = time.monotonic()
            self.number += 1
            if way != WAYS[0]:
                if not self.mover.moving and done < num:
                    self.mover.move(self.placement(way))
                moves += self.options.ranks * self.mover.step(self.number)
                self._finish()
            steps.append((time.monotonic() - start) * 1e6)
        return moves, wrong

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def run(self) -> Found:
        for _ in range(20):  # warm-up
            self.pair()
        finish(self.device)
        times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        steps: dict[str, list[float]] = {way: [] for way in WAYS}
        moves, wrong = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0)
        for number in range(ROUNDS):
            for way in in_turns(WAYS, number):
                finish(self.device)
                dist.barrier()
                times[way].append([])
                share = -(-self.options.pairs // ROUNDS)
                moved, bad = self.round(way, share, times[way][-1], steps[way])
                moves[way] += moved
                wrong[way] += sum(everyones(bad + self._wrong_slots()))
        alone = [self.alone(1), self.alone(AT_ONCE)]
        wrong[WAYS[2]] += sum(everyones(self._wrong_slots()))
        self.comm.check()
        return _figures(self.options, alone, everyones((times, steps)), moves, wrong)


def _figures(
    options: Options,
    alone: list[Move],
    ranks: list[tuple[dict[str, list[list[float]]], dict[str, list[float]]]],
    moves: dict[str, int],
    wrong: dict[str, int],
) -> Found:
    """ranks: of each, the times of pairs by way and round, and of steps by way."""
    ways: list[Way] = []
    without = max(Alone.of([at(r, 99) for r in times[WAYS[0]]]).spread for times, _ in ranks)
    for way in WAYS:
        pairs = [[us for r in times[way] for us in r] for times, _ in ranks]
        p99 = max(at(each, 99) for each in pairs)
        allowed = ways[0].p99_us + max(0.1 * ways[0].p99_us, 10.0) if ways else None
        ways.append(
            Way(
                way,
                max(statistics.median_low(each) for each in pairs),
                p99,
                max(statistics.median_low(steps[way]) for _, steps in ranks),
                max(at(steps[way], 99) for _, steps in ranks),
                moves[way],
                len(pairs[0]),
                allowed,
                without,
                wrong[way],
            )
        )
    one, more = alone
    kb = (more.experts - one.experts) * options.expert_kib * 1.024
    return Found(alone, ways, kb / (more.us - one.us) if more.us > one.us else None)


def text(options: Options, found: Found) -> str:
    title = (
        f"experts of {options.expert_kib * 1.024e-3:.1f} MB on {options.ranks} ranks, "
        f"{device_name(options.device, 'CPUs')}; T {options.tokens}, H {options.hidden}, "
        f"{options.experts} experts, {options.step_kib} KiB a step"
    )
    moves: list[list[Any]] = [["a move alone", "us", "GB/s into a rank"]]
    moves += [
        [f"{e.experts} to each rank", f"{e.us:.0f}", f"{e.gbytes_per_s:.1f}"] for e in found.alone
    ]
    moves.append(["each expert more", "", cell(found.more_gbytes_per_s, ".1f")])
    heads = ("pairs", "experts moved", "p50, us", "p99, us", "allowed p99", "step p50, us", "p99")
    lines = [["pairs beside", *heads]]
    for way in found.ways:
        lines.append([
            *(way.name, f"{way.pairs:,}", f"{way.moves:,}"),
            *(f"{way.p50_us:.1f}", f"{way.p99_us:.1f}", cell(way.allowed_us, ".1f")),
            *(f"{way.step_p50_us:.1f}", f"{way.step_p99_us:.1f}"),
        ])  # fmt: skip
    spread = f"p99 of rounds without moves are {found.ways[0].spread_us:.1f} us apart"
    return "\n".join([title, table(moves, 1), "", table(lines, 1), spread])
