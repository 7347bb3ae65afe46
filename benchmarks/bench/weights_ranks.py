"""The ranks of `bench --api weights`: trainers first, then engine ranks; they share GPUs.

All run the same steps. Every update is of other values; the first and the last are compared byte
by byte with what the loader makes of the same values.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_p2p import Engine
from moe_p2p.bench import weights_baseline
from moe_p2p.bench.harness import Common, file, finish, in_turns, option, store_of, use_device
from moe_p2p.bench.weights_loader import Loader, fill, shards
from moe_p2p.bench.weights_watched import Posted, Watched
from moe_p2p.errors import ProtocolError, require
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones
from moe_p2p.weights import WeightEngineRank, WeightLayout, WeightTrainer, agree_in
from moe_p2p.weights.models import MODELS, Model, engine_ranks, trainers, weights

LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    model: str = option("qwen3-30b-a3b", choices=[n for n in MODELS if n.startswith("qwen")])
    layers: int = option(1, "of the model", cuda=8)
    experts: int = option(8, "of a layer (8; the model's)", cuda=0)  # 0: the model's
    vocab: int = option(4096, "rows of both embeddings (4096; the model's)", cuda=0)  # likewise
    narrow: int = option(1, "divides hidden and expert widths", type=int, choices=(1, 2))
    trainers: int = option(2, "ranks")
    generators: int = option(2, "ranks of one inference engine")
    ep: int = option(0, "generators that experts are dealt to (all)")
    tp: int = option(0, "generators that cut the rest (all)")
    mode: str = option("shadow", choices=["shadow", "in_place"])
    repeats: int = option(5, "updates that are timed")
    bucket_mib: int = option(512, "of the broadcast")
    watermark_mib: int = option(16, "of a trainer's conversions", cuda=2048)
    baseline: bool = option(True, flag="--no-baseline")
    join: bool = option(True, "no generator joins", flag="--no-join")
    json: str = file("weights.json", "figures")
    plot: str = file("weights.png", "PNG")

    @property
    def full(self) -> Model:
        return MODELS[self.model]

    @property
    def scaled(self) -> Model:
        full, narrow = self.full, self.narrow
        return dataclasses.replace(
            full,
            layers=self.layers,
            dense_layers=min(full.dense_layers, self.layers),
            experts=self.experts or full.experts,
            vocab=self.vocab or full.vocab,
            hidden=full.hidden // narrow,
            latent=full.latent // narrow,
            expert_inner=full.expert_inner // narrow,
        )

    @property
    def world_size(self) -> int:
        """Ranks of all kinds; the last ones are an engine that joins, as large as the first."""
        return self.trainers + self.generators * (1 + self.join)

    @property
    def layouts(self) -> tuple[WeightLayout, WeightLayout]:
        return (
            trainers(self.scaled, self.trainers),
            engine_ranks(self.scaled, self.generators, ep=self.ep, tp=self.tp),
        )

    @property
    def full_part(self) -> float:
        """How many times the parameters of this run the whole model has."""
        return elements(self.full) / elements(self.scaled)


def elements(model: Model) -> int:
    return sum(math.prod(each.shape) for each in weights(model))


@dataclass
class Bytes:
    """Of one trainer and update. link: to other GPUs; local: to engine ranks on the same one."""

    link: int = 0
    local: int = 0
    writes: int = 0


@dataclass
class Measured:
    """Of one rank. spans_s: of each timed update, by stage."""

    role: str
    spans_s: list[dict[str, float]] = field(default_factory=list)
    # Of a trainer's thread, while bytes move: converting, submitting, waiting for writes.
    thread_s: list[dict[str, float]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    baseline_s: list[float] = field(default_factory=list)
    sent: Bytes = field(default_factory=Bytes)
    posted: list[Posted] = field(default_factory=list)
    live_bytes: int = 0
    # Device memory beyond the tensors themselves: the most, and what was allowed. On a CPU: as the
    # library counts it.
    high_water: int = 0
    watermark: int = 0
    host_bytes: int = 0  # of tensors on the host, of a GPU; resident memory that updates added
    peer_copies: list[float] = field(default_factory=list)  # GB/s
    join_s: float | None = None  # since its descriptors were known
    joined_s: dict[str, float] = field(default_factory=dict)  # by stage, from its begin
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(options: Options) -> list[Measured]:
    """Of all ranks, on each."""
    with launch.process_group() as (rank, _):
        device = use_device(options.device)
        first = options.trainers + options.generators
        side = _Trainer if rank < options.trainers else _Generator if rank < first else _Joiner
        store = store_of(rank, LIMIT_S)
        with Engine(label=f"rank {rank}", gpu=device.index) as engine:
            mine = side(options, rank, engine, device)
            baseline = weights_baseline.Baseline(mine) if options.baseline else None
            mine.begin(store)
            _measure(mine, baseline if baseline and baseline.runs else None)
            if options.join:
                _join(mine, options.repeats + 2)
            mine.close()
            dist.barrier()  # the store ends with rank 0
        return everyones(mine.measured)


class _Side:
    """One rank. Rank r uses GPU r modulo the number of GPUs."""

    def __init__(
        self, options: Options, rank: int, engine: Engine, device: torch.device, role: str
    ) -> None:
        self.options, self.rank, self.engine, self.device = options, rank, engine, device
        self.layouts = options.layouts
        self.measured = Measured(role)
        self.at_rest = 0  # bytes of device memory before set-up
        self.addresses = everyones(engine.address)
        self.groups: dict[str, Any] = {}
        first, count = options.trainers, options.generators
        self.groups["generator"] = dist.new_group(range(first, first + count), backend="gloo")
        if options.join:
            joiners = range(first + count, first + 2 * count)
            self.groups["joiner"] = dist.new_group(joiners, backend="gloo")

    def begin(self, store: Any) -> None:
        self.at_rest = self.memory()
        self.open(store)

    def open(self, store: Any) -> None:
        raise NotImplementedError

    def prepare(self, version: int) -> None:
        """Not timed."""

    def update(self, version: int) -> None:
        raise NotImplementedError

    def check(self, version: int) -> None:
        """Compares every byte."""

    def join(self) -> None:
        """Does nothing: only joiners join."""

    def close(self) -> None:
        raise NotImplementedError

    def allowed(self) -> int:
        """Bytes of device memory beside the tensors."""
        raise NotImplementedError

    def counted(self) -> int:
        """What the library says that it uses of them."""
        raise NotImplementedError

    def memory(self) -> int:
        if self.device.type == "cpu":
            return 0
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    def same_gpu(self, generator: int) -> bool:
        if self.device.type == "cpu":
            return False
        return launch.gpu_of(self.options.trainers + generator) == self.device.index


class _Trainer(_Side):
    def __init__(self, options: Options, rank: int, engine: Engine, device: torch.device) -> None:
        super().__init__(options, rank, engine, device, f"trainer {rank}")
        self.tensors = shards(self.layouts[0], rank, device)
        there = self.addresses[options.trainers : options.trainers + options.generators]
        self.watched = Watched(engine, {a for i, a in enumerate(there) if self.same_gpu(i)})

    def open(self, store: Any) -> None:
        self.trainer = WeightTrainer(
            self.engine,
            store,
            self.layouts[0],
            self.rank,
            self.tensors,
            watermark=self.allowed(),
            timeout_s=LIMIT_S,
        )
        require(not self.trainer.plan.gathered, "these layouts make the plan gather; change them")
        for write in self.trainer.plan.of_source(self.rank):
            sent = self.measured.sent
            sent.writes += 1
            if self.same_gpu(write.target_rank):
                sent.local += write.nbytes
            else:
                sent.link += write.nbytes

    def allowed(self) -> int:
        return self.options.watermark_mib << 20

    def counted(self) -> int:
        return self.trainer.totals["staging_bytes"]

    def prepare(self, version: int) -> None:
        fill(self.tensors, self.layouts[0], self.rank, version)

    def update(self, version: int) -> None:
        self.watched.clear()
        self.trainer.update(version)
        self.measured.spans_s.append(spans(self.trainer.stages))
        self.measured.thread_s.append(dict(self.trainer.seconds))
        self.measured.posted.append(self.watched.posted())

    def close(self) -> None:
        self.trainer.close()


class _Generator(_Side):
    role = "generator"

    def __init__(self, options: Options, rank: int, engine: Engine, device: torch.device) -> None:
        number = (rank - options.trainers) % options.generators
        super().__init__(options, rank, engine, device, f"{self.role} {number}")
        self.number = number
        self.loader = Loader(self.layouts[1], self.number, device)
        self.tensors = {name: torch.zeros_like(each) for name, each in self.loader.tensors.items()}
        self.measured.live_bytes = sum(each.nbytes for each in self.tensors.values())

    def open(self, store: Any) -> None:
        self.generator = self.made(store, "")

    def made(self, store: Any, replica: str) -> WeightEngineRank:
        return WeightEngineRank(
            self.engine,
            store,
            self.layouts[1],
            self.number,
            self.tensors,
            replica=replica,
            mode="shadow" if self.options.mode == "shadow" else "in_place",
            engine_ranks=range(self.options.generators),
            agree=agree_in(self.groups[self.role]),
            poison=True,
            watermark=self.allowed(),
            timeout_s=LIMIT_S,
        )

    def allowed(self) -> int:
        """A second copy; each tensor begins at a multiple of 256 there."""
        if self.options.mode == "in_place":
            return 0
        return self.measured.live_bytes + 512 * len(self.tensors)

    def counted(self) -> int:
        return int(self.generator.totals["buffer_bytes"])

    def prepare(self, version: int) -> None:
        if self.options.mode == "in_place":
            self.generator.begin()

    def close(self) -> None:
        self.generator.close()

    def update(self, version: int) -> None:
        began = time.monotonic()
        if self.options.mode == "in_place":
            self.generator.wait()
            finish(self.device)
            self.measured.pause_s.append(time.monotonic() - began)
            self.measured.spans_s.append(spans(self.generator.stages))
            return
        while self.generator.step() != version:  # ranks of the engine make as many steps
            require(time.monotonic() - began < LIMIT_S, f"no version {version} in {LIMIT_S} s")
            time.sleep(0.0005)
        while "offered" not in self.generator.stages:
            require(time.monotonic() - began < LIMIT_S, f"version {version} is not offered")
            time.sleep(0.0005)
        found = spans(self.generator.stages)
        self.measured.pause_s.append(found["copied"])
        self.measured.spans_s.append(found)

    def check(self, version: int) -> None:
        reference = self.loader.load_all(self.layouts[0].params, version)
        try:
            self.generator.check_equal(reference)
        except ProtocolError as error:
            self.measured.wrong.append(str(error))


class _Joiner(_Generator):
    """Of an inference engine that joins when all else is measured."""

    role = "joiner"

    def open(self, store: Any) -> None:
        self.store = store

    def join(self) -> None:
        began = time.monotonic()
        self.generator = self.made(self.store, "joiners")
        finish(self.device)
        stages = self.generator.stages
        self.measured.join_s = time.monotonic() - began - stages["registered"]
        self.measured.joined_s = spans(stages)


def _join(side: _Side, version: int) -> None:
    """An engine joins, and has the version that the others have; then all go to the next one."""
    dist.barrier()
    side.join()
    dist.barrier()
    side.check(version - 1)
    side.prepare(version)
    dist.barrier()
    side.update(version)
    side.check(version)
    found = side.measured
    for each in (found.spans_s, found.thread_s, found.pause_s, found.posted):
        del each[side.options.repeats :]


def spans(stages: dict[str, float]) -> dict[str, float]:
    """Returns the seconds of each stage, from the times at which stages ended."""
    ends = sorted(stages.items(), key=lambda item: item[1])
    begins = [0.0, *(end for _, end in ends)]
    return {name: end - begin for (name, end), begin in zip(ends, begins, strict=False)}


def _measure(side: _Side, baseline: weights_baseline.Baseline | None) -> None:
    """Updates, the baseline and peer copies take turns; the first turn is a warm-up."""
    measured, last = side.measured, side.options.repeats + 1
    ways: list[Callable[[int], None]] = [partial(_update, side), partial(_peer_copy, side)]
    if baseline is not None:
        ways.append(partial(_baseline, side, baseline))
    for version in range(1, last + 1):
        if not isinstance(side, _Joiner):
            side.prepare(version)
        for way in in_turns(ways, version):
            finish(side.device)
            dist.barrier()
            way(version)
            dist.barrier()
        if version in (1, last):
            if not isinstance(side, _Joiner):
                side.check(version)
            if baseline is not None:
                baseline.check(version)
        if version == 1:
            measured.host_bytes = 0
            for each in (measured.began, measured.ended, measured.spans_s, measured.thread_s,
                         measured.pause_s, measured.posted, measured.baseline_s,
                         measured.peer_copies):  # fmt: skip
                each.clear()
    measured.watermark = side.allowed()


def _update(side: _Side, version: int) -> None:
    measured, resident = side.measured, _resident()
    if isinstance(side, _Joiner):
        return
    if side.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(side.device)
    measured.began.append(time.monotonic())
    side.update(version)
    finish(side.device)
    measured.ended.append(time.monotonic())
    measured.high_water = max(measured.high_water, _beside(side))
    measured.host_bytes += max(_resident() - resident, 0)


def _peer_copy(side: _Side, _: int) -> None:
    if side.rank == 0 and (rate := weights_baseline.peer_copy(side.device)):
        side.measured.peer_copies.append(rate)


def _baseline(side: _Side, baseline: weights_baseline.Baseline, _: int) -> None:
    began = time.monotonic()
    baseline.run()
    finish(side.device)
    side.measured.baseline_s.append(time.monotonic() - began)


def _beside(side: _Side) -> int:
    """The most device memory since its peak was reset, without what was there before set-up."""
    if side.device.type == "cpu":
        return side.counted()
    return int(torch.cuda.max_memory_allocated(side.device)) - side.at_rest


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
