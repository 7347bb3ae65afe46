"""REINFORCE on arithmetic: two trainers, two engine ranks, and a third that joins in the middle.

    python -m moe_p2p.examples.rl [--steps 40]

The policy reads two digits and answers their sum modulo ten. Of each version of the weights the
engine ranks draw eight samples, which carry its number; trainers learn from four of them and four
of the version before, and write new weights into the engine ranks, which go on meanwhile. On CPUs
rewards are the same in each run. Each half of the tensor `stamp` comes from another trainer and
says the version: a forward pass that saw two, or not the one of `step`, ends with status 1; so does
a policy that learned less than half in 20 steps or more. Ranks share GPUs if any.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import one_hot

from moe_p2p import Engine
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.option_types import Parser, at_least
from moe_p2p.weights import Param, Shard, WeightEngineRank, WeightLayout, WeightTrainer

TRAINERS, ENGINE_RANKS, RANKS = 2, 2, 5  # engine ranks of the start; one more joins
HIDDEN, BATCH, PER_STEP = 256, 256, 8  # of a sample: questions; of a step: samples
SHAPES = {"inner": (20, HIDDEN), "bias": (HIDDEN,), "outer": (HIDDEN, 10), "stamp": (2,)}
RATE, ENTROPY, CHANCE, LEARNED, ENOUGH = 0.03, 0.15, 0.1, 0.5, 20
WAIT = timedelta(seconds=60)


def logits(weights: dict[str, Tensor], question: Tensor) -> Tensor:  # question: [B, 2]
    x = one_hot(question, 10).flatten(1).float()
    return (x @ weights["inner"] + weights["bias"]).relu() @ weights["outer"]


def initial(device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}
    made["stamp"].zero_()
    return {name: each.to(device) for name, each in made.items()}


def targets(count: int) -> WeightLayout:
    found = (Param(n, s, "float32", range(count)) for n, s in SHAPES.items())
    return WeightLayout(tuple(found), count)


def main() -> int:
    about = (__doc__ or "").split("\n")[0]
    parser = Parser(prog="python -m moe_p2p.examples.rl", description=about)
    parser.add_argument("--steps", type=at_least(4), default=40, help="of training")
    steps = parser.parse_args().steps
    try:
        results = launch.run_ranks(rank_main, steps, num_ranks=RANKS)
    except launch.RanksFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for number, drawn in enumerate(results[TRAINERS:]):
        print(f"generator {number} drew {drawn.total():,} answers of {len(drawn)} versions")
    print(f"{results[0]:.0%} right at the end, {CHANCE:.0%} by chance; above {LEARNED:.0%} is good")
    return 0 if results[0] > LEARNED or steps < ENOUGH else 1


def rank_main(steps: int) -> Any:
    with launch.process_group() as (rank, _):
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", launch.device_index())
            torch.cuda.set_device(device)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)
        port = everyones(store.port)[0]
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT) if rank else store
        group = dist.new_group(range(TRAINERS))
        torch.set_num_threads(1)  # or sums depend on how many cores there are
        with Engine(label=f"rank {rank}", gpu=device.index) as engine:
            found: Any
            if rank < TRAINERS:
                found = Trainer(store, engine, rank, device, group).run(steps)
            else:
                found = generate(store, engine, rank - TRAINERS, device)
        dist.barrier()
        return found


# --- engine ranks ---


def generate(store: Any, engine: Engine, number: int, device: torch.device) -> Counter[int]:
    """Returns how many answers were drawn of which version."""
    weights, drawn = initial(device), Counter[int]()
    if number < ENGINE_RANKS:
        engine_rank = WeightEngineRank(engine, store, targets(ENGINE_RANKS), number, weights)
    else:
        store.wait(["join"], WAIT * 10)
        engine_rank = WeightEngineRank(engine, store, targets(1), 0, weights, replica="late")
        print(f"generator {number} joined at version {engine_rank.version} in "
              f"{engine_rank.totals['join_ms']:.0f} ms")  # fmt: skip
        store.set("joined", "now")
    while not store.check(["over"]):
        version = engine_rank.step() or 0  # weights change here, and nowhere else
        while (sample := store.add(f"samples of {version}", 1)) <= PER_STEP:
            seeded = torch.Generator(device).manual_seed(PER_STEP * version + sample)
            question = torch.randint(0, 10, (BATCH, 2), generator=seeded, device=device)
            chances = logits(weights, question).softmax(-1)
            answer = chances.multinomial(1, generator=seeded).flatten()
            found = {"version": version, "stamp": weights["stamp"].tolist(),
                     "question": question.tolist(), "answer": answer.tolist()}  # fmt: skip
            store.set(f"sample {version} {sample}", json.dumps(found))
            drawn[version] += BATCH
        time.sleep(0.002)
    engine_rank.close()
    return drawn


# --- trainers ---


class Trainer:
    """Has half of the rows of each tensor, and of each batch."""

    def __init__(self, store: Any, engine: Engine, rank: int, device: torch.device, group: Any):
        self.store, self.rank, self.device, self.group = store, rank, device, group
        self.mine = {n: each.chunk(TRAINERS)[rank].clone() for n, each in initial(device).items()}
        rows = (Param(n, s, "float32", range(TRAINERS), placements=(Shard(0),))
                for n, s in SHAPES.items())  # fmt: skip
        layout = WeightLayout(tuple(rows), TRAINERS)
        self.writer = WeightTrainer(engine, store, layout, rank, self.mine)
        self.learned = {name: each for name, each in self.mine.items() if name != "stamp"}
        self.optimizer = torch.optim.Adam(self.learned.values(), lr=RATE)

    def run(self, steps: int) -> float:
        rewards = []
        for version in range(1, steps + 1):
            samples = self.samples(version - 1)
            rewards.append(self.step(samples))
            self.mine["stamp"].fill_(version)
            self.writer.update(version)  # to every engine rank that is there, or it raises
            of = Counter(sample["version"] for sample in samples).items()
            versions = ", ".join(f"{n} of {v}" for v, n in sorted(of))
            if self.rank == 0:
                there, took = sum(self.writer.live().values()), self.writer.stages["decided"] * 1e3
                print(f"version {version:3}: {rewards[-1]:4.0%} right; samples: {versions}; "
                      f"written into {there} generators in {took:.0f} ms", flush=True)  # fmt: skip
                if word := {steps // 2: "join", steps: "over"}.get(version):
                    self.store.set(word, "now")  # "over": who took the last one is counted
                if version == steps * 3 // 4:
                    self.store.wait(["joined"], WAIT)
        self.writer.close()
        return sum(rewards[-5:]) / len(rewards[-5:])

    def samples(self, version: int) -> list[dict[str, Any]]:
        half = PER_STEP // 2
        names = [f"sample {version} {number}" for number in range(1, half + 1)]
        names += [f"sample {max(version - 1, 0)} {n}" for n in range(half + 1, PER_STEP + 1)]
        self.store.wait(names, WAIT)
        found = [json.loads(self.store.get(name)) for name in names]
        for sample in found:
            if sample["stamp"] != [sample["version"]] * TRAINERS:
                raise RuntimeError(f"version {sample['version']} read weights of {sample['stamp']}")
        return found

    def step(self, samples: list[dict[str, Any]]) -> float:
        """Makes a step of REINFORCE on this half of the samples; trainers average gradients."""
        half = samples[self.rank :: TRAINERS]
        question, answer = (
            torch.tensor([x for sample in half for x in sample[key]], device=self.device)
            for key in ("question", "answer")
        )
        whole = {}
        for name, mine in self.learned.items():
            parts = [torch.empty_like(mine) for _ in range(TRAINERS)]
            dist.all_gather(parts, mine, group=self.group)
            whole[name] = torch.cat(parts).requires_grad_()
        chances = logits(whole, question).log_softmax(-1)
        reward = (answer == question.sum(-1) % 10).float()
        chosen = chances.gather(1, answer[:, None])[:, 0]
        loss = -((reward - reward.mean()) / (reward.std() + 1e-6) * chosen).mean()
        (loss + ENTROPY * (chances.exp() * chances).sum(-1).mean()).backward()  # type: ignore[no-untyped-call]
        for name, mine in self.learned.items():
            gradient: Any = whole[name].grad
            dist.all_reduce(gradient, group=self.group)
            mine.grad = gradient.chunk(TRAINERS)[self.rank] / TRAINERS
        self.optimizer.step()
        return float(reward.mean())


if __name__ == "__main__":
    sys.exit(main())
