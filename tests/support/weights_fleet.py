"""Trainers and engine ranks of weight updates over real engines: layouts, oracle, threads.

Engine ranks compare with tests/support/weights_oracle.py, which shards and quantizes whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_p2p import Engine, EngineConfig
from moe_p2p.weights import (
    Blocks,
    Param,
    Placement,
    Replicate,
    Shard,
    WeightEngineRank,
    WeightLayout,
    WeightTrainer,
)
from moe_p2p.weights.stages import Stages
from tests.support.weights_oracle import tensors_of

BF16, FP8 = "bfloat16", "float8_e4m3fn"
TRAINERS, ENGINE_RANKS = 4, 2
FILLER = 0xEE  # the oracle's, beside what is written

Finalize = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
DEVICES = ["cpu"]  # the last one has the tensors of trainers and engine ranks of this process


@dataclass(frozen=True)
class Model:
    source: list[Param]
    target: list[Param]
    derived: tuple[str, ...] = ()  # one-dimensional float32 of 12 elements, made by `finalize`
    finalize: Finalize | None = None

    @property
    def layouts(self) -> tuple[WeightLayout, WeightLayout]:
        sides = ((self.source, TRAINERS), (self.target, ENGINE_RANKS))
        first, second = (WeightLayout(tuple(params), count) for params, count in sides)
        return first, second

    def values(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            each.name: torch.randn(each.elements, generator=generator).mul(3).bfloat16()
            for each in self.source
        }

    def trainer_tensors(self, rank: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = tensors_of(self.layouts[0], values, sent=False).bytes
        mine = {name: each for (of, name), each in found.items() if of == rank}
        return {name: each.to(DEVICES[-1]) for name, each in _typed(self.source, mine).items()}

    def wanted(self, rank: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """What an engine rank's kernels read at the version that has these values."""
        found = tensors_of(self.layouts[1], values, sent=True).bytes
        mine = {name: each for (of, name), each in found.items() if of == rank}
        received = {name for name in mine if name.endswith(":received")}
        tensors = _typed(self.target, {n: mine[n] for n in mine.keys() - received})
        tensors |= {name: torch.zeros(12) for name in self.derived}
        if self.finalize is not None:
            given = {n.removesuffix(":received"): mine[n].view(torch.bfloat16) for n in received}
            self.finalize({n: t.view(values[n].shape) for n, t in given.items()}, tensors)
        return tensors

    def empty(self, rank: int) -> dict[str, Tensor]:
        """Live tensors of an engine rank that was never updated."""
        tensors = self.wanted(rank, self.values(0))
        for each in tensors.values():
            each.view(-1).view(torch.uint8).fill_(FILLER)
        return {name: each.to(DEVICES[-1]) for name, each in tensors.items()}

    def holds(self, rank: int, live: dict[str, Tensor], version: int) -> bool:
        """Whether an engine rank's tensors have the values of this seed."""
        wanted = self.wanted(rank, self.values(version))
        return all(
            torch.equal(
                live[name].cpu().view(-1).view(torch.uint8), each.view(-1).view(torch.uint8)
            )
            for name, each in wanted.items()
        )


def _typed(params: list[Param], found: dict[str, Tensor]) -> dict[str, Tensor]:
    types = {each.tensor: getattr(torch, each.dtype) for each in params}
    types |= {each.blocks.tensor: torch.float32 for each in params if each.blocks}
    return {name: each.view(types[name]) for name, each in found.items()}


def _fused_qkv() -> Model:
    hidden = 24
    sizes = {"q": 32, "k": 8, "v": 8}
    at = {"q": 0, "k": 16 * hidden, "v": 24 * hidden}
    spread: dict[str, tuple[Placement, ...]] = {
        "q": (Shard(0),),
        "k": (Replicate(),),
        "v": (Replicate(),),
    }
    return Model(
        [Param(n, (r, hidden), BF16, range(TRAINERS), placements=(Shard(0),))
         for n, r in sizes.items()],
        [Param(n, (r, hidden), BF16, range(ENGINE_RANKS), placements=spread[n], tensor="qkv",
               offset=at[n]) for n, r in sizes.items()],
    )  # fmt: skip


def _fp8() -> Model:
    """Blocks of 8 rows over shards of 5 or 4: maxima of neighbours count."""
    shape, blocks = (18, 24), (8, 8)
    return Model(
        [Param("w", shape, BF16, range(TRAINERS), placements=(Shard(0),))],
        [Param("w", shape, FP8, range(ENGINE_RANKS), tensor="packed", offset=16,
               blocks=Blocks("scale", 2, blocks))],
    )  # fmt: skip


def _mixed() -> Model:
    """Shards of two dimensions, HSDP, transposed, padded, another type, an expert on both ranks."""
    ranks, mesh = range(TRAINERS), (2, 2)
    source = [
        Param("a", (10, 14), BF16, ranks, mesh, (Shard(0), Shard(1))),
        Param("b", (12, 8), BF16, ranks, mesh, (Replicate(), Shard(0))),
        *(Param(f"e{e}", (6, 8), BF16, (e, 3 - e), (2,), (Shard(0),)) for e in range(2)),
    ]
    target = [
        Param("a", (10, 14), BF16, range(ENGINE_RANKS), placements=(Shard(0),), order=(1, 0)),
        Param("b", (12, 8), "float32", (1,), tensor="padded", strides=(10, 1), offset=3),
        Param("e0", (6, 8), BF16, (0,), tensor="experts"),
        Param("e1", (6, 8), BF16, (0,), tensor="experts", offset=48),
        Param("e1", (6, 8), BF16, (1,), tensor="experts"),
    ]
    return Model(source, target)


def _make(received: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    tensors["twice"].copy_(received["d"].float().flatten() * 2)
    tensors["sums"].copy_(tensors["w"].float().view(-1, 12).sum(0))


def _derived() -> Model:
    source = [Param("w", (8, 12), BF16, range(TRAINERS), placements=(Shard(0),)),
              Param("d", (4, 3), BF16, range(TRAINERS), placements=(Shard(0),))]  # fmt: skip
    target = [Param("w", (8, 12), BF16, range(ENGINE_RANKS), placements=(Shard(0),)),
              Param("d", (4, 3), BF16, range(ENGINE_RANKS), finalize="a test")]  # fmt: skip
    return Model(source, target, ("twice", "sums"), _make)


def _replicas() -> Model:
    """Each shard is on two trainers (HSDP); fp8 blocks of 8 rows over shards of 9."""
    ranks, mesh, spread = range(TRAINERS), (2, 2), (Replicate(), Shard(0))
    return Model(
        [Param("w", (18, 24), BF16, ranks, mesh, spread),
         Param("b", (12, 8), BF16, ranks, mesh, spread)],
        [Param("w", (18, 24), FP8, range(ENGINE_RANKS), tensor="packed",
               blocks=Blocks("scale", 0, (8, 8))),
         Param("b", (12, 8), BF16, range(ENGINE_RANKS), placements=(Shard(0),))],
    )  # fmt: skip


MODELS: dict[str, Model] = {
    "fused": _fused_qkv(),
    "fp8": _fp8(),
    "mixed": _mixed(),
    "derived": _derived(),
    "replicas": _replicas(),
}


def tell_stages(stages: Stages, told: Callable[[str], object]) -> None:
    """Calls told(stage) behind each stage that a rank reaches."""
    reached = stages.reached

    def both(stage: str) -> None:
        reached(stage)
        told(stage)

    stages.reached = both  # type: ignore[method-assign]


OVER: dict[str, str] = {}  # another transport and its settings, for the whole process


def engine_of(label: str, seed: int) -> Engine:
    given = {"transport": "loopback", "transport_settings": f"seed={seed}"} | OVER
    gpu = 0 if DEVICES[-1] == "cuda" else None
    return Engine(EngineConfig(**given), gpu=gpu, label=label)


@dataclass
class Fleet:
    model: Model
    trainers: list[WeightTrainer]
    engine_ranks: list[WeightEngineRank]
    live: list[dict[str, Tensor]]
    pool: ThreadPoolExecutor
    store: Any
    stack: ExitStack
    how: dict[str, Any] = field(default_factory=dict)

    def train(self, version: int, seed: int | None = None, **how: Any) -> list[Any]:
        """Begins an update on all trainers that are there."""
        values = self.model.values(version if seed is None else seed)
        return [
            self.pool.submit(
                each.update, version, self.model.trainer_tensors(each.rank, values), **how
            )
            for each in self.trainers
        ]

    def finish(self, running: list[Any]) -> None:
        """Engine ranks go on until all of `running` has ended."""
        waits = [self.pool.submit(each.wait) for each in self.engine_ranks]
        for each in [*running, *waits]:
            each.result(100)

    def join(self, replica: str, rank: int = 0, **how: Any) -> WeightEngineRank:
        """An engine rank with the tensors of a rank of the set-up."""
        engine = self.stack.enter_context(engine_of(f"{replica} {rank}", len(self.live)))
        live = self.model.empty(rank)
        given = {**self.how, "replica": replica, **how}
        found = WeightEngineRank(engine, self.store, self.model.layouts[1], rank, live, **given)
        self.engine_ranks.append(found)
        self.live.append(live)
        return found

    def leave(self, engine_rank: WeightEngineRank) -> None:
        at = self.engine_ranks.index(engine_rank)
        self.engine_ranks.pop(at).close()
        self.live.pop(at)

    def check(self, version: int) -> None:
        values = self.model.values(version)
        for engine_rank, live in zip(self.engine_ranks, self.live, strict=True):
            assert engine_rank.version == version
            for name, each in self.model.wanted(engine_rank.rank, values).items():
                ours = live[name].cpu().view(-1).view(torch.uint8)
                assert torch.equal(ours, each.view(-1).view(torch.uint8)), (version, name)


@contextmanager
def fleet(
    model: Model,
    *,
    timeout_s: float = 40.0,  # reached only where nothing moves, or a machine is far too busy
    kind: type[WeightEngineRank] = WeightEngineRank,
    training: dict[str, Any] | None = None,
    **how: Any,
) -> Iterator[Fleet]:
    """training: arguments of the trainers; how: of the engine ranks."""
    store = HashStore()
    how = {"finalize": model.finalize, "timeout_s": timeout_s, **how}
    training = {"timeout_s": timeout_s, **(training or {})}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(TRAINERS + ENGINE_RANKS + 4))
        engines = [stack.enter_context(engine_of(f"trainer {i}", i)) for i in range(TRAINERS)]
        others = [stack.enter_context(engine_of(f"generator {i}", i)) for i in range(ENGINE_RANKS)]
        live = [model.empty(i) for i in range(ENGINE_RANKS)]
        values = model.values(0)
        trainers = [
            pool.submit(WeightTrainer, engine, store, model.layouts[0], i,
                        model.trainer_tensors(i, values), **training)
            for i, engine in enumerate(engines)
        ]  # fmt: skip
        engine_ranks = [
            pool.submit(kind, engine, store, model.layouts[1], i, live[i], **how)
            for i, engine in enumerate(others)
        ]
        # First, for the error of the rank that refused: others raise that its set-up failed.
        errors = [each.exception(100) for each in engine_ranks]
        own = [error for error in errors if error and "the set-up failed" not in str(error)]
        for error in own or filter(None, errors):
            raise error
        there = [each.result() for each in engine_ranks]
        found = Fleet(model, [each.result(100) for each in trainers], there, live, pool, store,
                      stack, how)  # fmt: skip
        yield found
        for each in [*found.trainers, *found.engine_ranks]:
            each.close()
