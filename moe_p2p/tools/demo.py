"""`python -m moe_p2p demo`: a small mixture-of-experts language model learns Python, twice.

Once with experts spread over ranks (one process each, two nodes of two) and data-parallel
everything else, once in one process; same seed, same batches. The loss curves must be equal within
rounding, or the command fails. The text is the standard library of the running interpreter.

The two runs add the same fp32 numbers in different orders, which alone moves the loss by 1e-6 nats;
but where two experts tie for the last of the top-k, rounding decides, and a token goes to another
expert. So the tolerance is what one token can do to the mean: one nat in T tokens. A wrong weight,
expert or token moves the loss by hundredths within a few steps. `--control` shows rounding without
communication: one process against one process with the rows of each batch in reverse (the default
sizes, 2 x86 cores: 1e-6 for 90 steps, then 9e-5 after a tie).

Shapes: B sequences of a batch, S bytes of a sequence, H hidden size, T = B * S tokens, W ranks.
"""

from __future__ import annotations

import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.layer import MoELayer, Router
from moe_p2p.tools import launch
from moe_p2p.tools.draw import draw
from moe_p2p.tools.option_types import Parser, at_least_0, at_least_1, output_file
from moe_p2p.tools.output import writing
from moe_p2p.tools.routing import RecordedRouting

TEXT_BYTES = 2_000_000
PLOT = "bench_out/demo.png"
TRACE_RECORDS = 12  # steps whose routing is kept, spread evenly


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = 4
    ranks_per_node: int = 2
    steps: int = 60
    seed: int = 1
    batch: int = 16  # sequences of all ranks
    sequence: int = 64  # bytes
    hidden: int = 96
    heads: int = 4
    layers: int = 2
    experts: int = 32
    topk: int = 4
    ffn: int = 96
    learning_rate: float = 3e-3

    @property
    def tolerance(self) -> float:
        """Nats by which the curves may differ: one nat for one token of a batch."""
        return 1.0 / (self.batch * self.sequence)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Results of a run."""

    losses: list[float]  # nats per byte, mean over all ranks' batch
    seconds: float
    topk_idx: Tensor  # [records * layers, T, K] of this rank
    topk_weights: Tensor


class Block(nn.Module):
    """Causal attention, then experts; both with a residual."""

    def __init__(self, settings: Settings, all_to_all: AllToAll | None, *, index: int) -> None:
        super().__init__()
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.qkv = nn.Linear(settings.hidden, 3 * settings.hidden, bias=False)
        self.project = nn.Linear(settings.hidden, settings.hidden, bias=False)
        self.moe_norm = nn.LayerNorm(settings.hidden)
        self.moe = MoELayer(
            settings.hidden,
            settings.experts,
            topk=settings.topk,
            ffn_dim=settings.ffn,
            all_to_all=all_to_all,
            seed=settings.seed + index,
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        tokens = self.moe_norm(x).view(batch * sequence, hidden)
        out: Tensor = x + self.moe(tokens).view_as(x)
        return out


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, settings: Settings, all_to_all: AllToAll | None = None) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.embed = nn.Embedding(256, settings.hidden)
        self.position = nn.Embedding(settings.sequence, settings.hidden)
        self.blocks = nn.ModuleList(
            Block(settings, all_to_all, index=i) for i in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """text int64 [B, S] -> logits [B, S, 256]."""
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank holds: all but the experts."""
        return [p for name, p in self.named_parameters() if ".experts." not in name]


def read_text() -> Tensor:
    """The first TEXT_BYTES of the standard library's modules, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).long()


def batches(settings: Settings, text: Tensor) -> Iterator[Tensor]:
    """int64 [B, S + 1] of all ranks, the same for every caller."""
    generator = torch.Generator().manual_seed(settings.seed)
    span = torch.arange(settings.sequence + 1)
    for _ in range(settings.steps):
        limit = len(text) - len(span)
        start = torch.randint(limit, (settings.batch, 1), generator=generator)
        yield text[start + span]


def train(
    settings: Settings, all_to_all: AllToAll | None = None, *, reverse: bool = False
) -> Training:
    """Trains on this rank's share of each batch; without an AllToAll on all of it."""
    model = LanguageModel(settings, all_to_all)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    rank, world_size = (0, 1) if all_to_all is None else (all_to_all.rank, all_to_all.world_size)
    recorder = Recorder(model, settings)
    losses = []
    started = time.perf_counter()
    for step, batch in enumerate(batches(settings, read_text())):
        recorder.begin(step)
        mine = (batch.flip(0) if reverse else batch).chunk(world_size)[rank]
        logits = model(mine[:, :-1])
        loss = functional.cross_entropy(
            logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum"
        ) / (settings.batch * settings.sequence)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if all_to_all is not None:
            sum_over_ranks([p.grad for p in model.replicated() if p.grad is not None])
        optimizer.step()
        total = loss.detach().clone()
        if all_to_all is not None:
            dist.all_reduce(total)
        losses.append(float(total))
    return Training(
        losses=losses,
        seconds=time.perf_counter() - started,
        topk_idx=torch.stack(recorder.topk_idx),
        topk_weights=torch.stack(recorder.topk_weights),
    )


class Recorder:
    """Keeps the routers' choices in some of the steps."""

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self.active = False
        self.every = max(1, settings.steps // TRACE_RECORDS)
        self.topk_idx: list[Tensor] = []
        self.topk_weights: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._keep)

    def begin(self, step: int) -> None:
        self.active = step % self.every == self.every - 1

    def _keep(self, _: nn.Module, __: tuple[Tensor], chosen: tuple[Tensor, Tensor]) -> None:
        if self.active:
            self.topk_idx.append(chosen[0].clone())
            self.topk_weights.append(chosen[1].detach().clone())


def sum_over_ranks(grads: list[Tensor]) -> None:
    """One all_reduce for all of them."""
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    parts = torch.split(flat, [g.numel() for g in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


def train_rank(settings: Settings) -> Training:
    """One rank of the expert-parallel run."""
    with launch.process_group():
        config = AllToAllConfig(
            num_experts=settings.experts,
            hidden_dim=settings.hidden,
            topk=settings.topk,
            max_tokens=settings.batch // settings.ranks * settings.sequence,
            dtype=torch.float32,
            ranks_per_node=settings.ranks_per_node,
        )
        with AllToAll(None, config) as all_to_all:
            return train(settings, all_to_all)


def main(arguments: list[str]) -> int:
    """Exit code: 0 equal curves, 1 not equal, 2 a rank failed."""
    settings, trace_path, plot_path, control = _parse(arguments)
    torch.set_num_threads(launch.threads_per_rank(settings.ranks))
    print(
        f"{settings.layers} layers, {settings.experts} experts, top-{settings.topk}, "
        f"{settings.batch} x {settings.sequence} bytes a step, {settings.ranks} ranks in nodes of "
        f"{settings.ranks_per_node}"
    )
    print(
        f"text: modules of Python {platform.python_version()}'s standard library; loss: nats per "
        f"byte, mean of a batch, {math.log(256):.2f} for a guess"
    )
    try:
        ranks = _train_ranks(settings) if not control else [train(settings, reverse=True)]
    except launch.RanksFailedError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    alone = train(settings)
    print(curves(ranks[0].losses, alone.losses))
    print(f"{ranks[0].seconds:.1f} s over ranks, {alone.seconds:.1f} s in one process")
    if plot_path is not None:
        reason = plot(settings, ranks[0].losses, alone.losses, plot_path)
        print(f"no plot: {reason}" if reason else f"wrote {plot_path}")
    if trace_path is not None:
        with writing(trace_path):
            trace_of(settings, ranks).save(trace_path)
        print(f"wrote {trace_path}: the routing of every layer in some steps")
    return judge(settings, ranks[0].losses, alone.losses)


def _train_ranks(settings: Settings) -> list[Training]:
    ranks: list[Training] = launch.run_ranks(train_rank, settings, num_ranks=settings.ranks)
    return ranks


def curves(ranks: list[float], alone: list[float]) -> str:
    """Both curves, in nats, as a table of about 12 lines."""
    lines = [f"{'step':>6}{'ranks':>12}{'one process':>14}{'difference':>13}  (loss, nats)"]
    every = max(1, len(ranks) // 12)
    for step in sorted({*range(0, len(ranks), every), len(ranks) - 1}):
        gap = ranks[step] - alone[step]
        lines.append(f"{step:6}{ranks[step]:12.6f}{alone[step]:14.6f}{gap:13.1e}")
    return "\n".join(lines)


def plot(settings: Settings, ranks: list[float], alone: list[float], path: Path) -> str | None:
    """Draws both curves and their difference. Returns why it could not; None when it could."""

    def paint(axes: Any) -> None:
        loss, gap = axes
        loss.plot(alone, "-", color="C1", linewidth=4, alpha=0.5, label="one process")
        loss.plot(ranks, "--", color="C0", label=f"{settings.ranks} ranks")
        loss.set(ylabel="loss, nats per byte")
        loss.legend()
        apart = [abs(a - b) for a, b in zip(ranks, alone, strict=True)]
        gap.plot(apart, ".-", color="C0", label="difference of the two")
        gap.axhline(settings.tolerance, color="C3", linestyle=":", label="allowed")
        gap.set(xlabel="step", ylabel="nats per byte")
        gap.set_yscale("symlog", linthresh=1e-7)
        gap.legend()

    title = f"{settings.experts} experts, top-{settings.topk}, seed {settings.seed}"
    return draw(path, title, paint, nrows=2, figsize=(7, 7))


def judge(settings: Settings, ranks: list[float], alone: list[float]) -> int:
    """0 when the curves agree within the tolerance."""
    apart = [abs(a - b) for a, b in zip(ranks, alone, strict=True)]
    equal = all(gap <= settings.tolerance for gap in apart)  # not for NaN
    print(
        f"curves are at most {max(apart):.1e} nats apart, allowed {settings.tolerance:.1e}: "
        f"{'equal' if equal else 'NOT EQUAL'}"
    )
    return 0 if equal else 1


def trace_of(settings: Settings, ranks: list[Training]) -> RecordedRouting:
    return RecordedRouting(
        topk_idx=torch.stack([r.topk_idx for r in ranks], dim=1),
        topk_weights=torch.stack([r.topk_weights for r in ranks], dim=1),
        num_experts=settings.experts,
    )


def _parse(arguments: list[str]) -> tuple[Settings, Path | None, Path | None, bool]:
    parser = Parser(
        prog="python -m moe_p2p demo",
        description="Trains a small language model with experts over ranks, and in one process.",
        epilog="Defaults in parentheses.",
    )
    add, default = parser.add_argument, Settings
    add("--steps", type=at_least_1, default=default.steps, help="of training (%(default)s)")
    add(
        "--seed", type=at_least_0, default=default.seed, help="of weights and batches (%(default)s)"
    )
    add("--ranks", type=at_least_1, default=default.ranks, help="processes (%(default)s)")
    add(
        "--ranks-per-node",
        type=at_least_1,
        default=default.ranks_per_node,
        help="ranks of a node (%(default)s)",
    )
    add(
        "--plot",
        type=output_file,
        default=PLOT,
        metavar="FILE",
        help="PNG of the curves (%(default)s; '': none)",
    )
    add("--save-trace", type=output_file, metavar="FILE", help="routing, for bench --trace (none)")
    control = "train twice in one process, in two orders of sums: how far rounding alone goes"
    add("--control", action="store_true", help=control)
    given = parser.parse_args(arguments)
    settings = Settings(
        steps=given.steps,
        seed=given.seed,
        ranks=given.ranks,
        ranks_per_node=given.ranks_per_node,
    )
    if given.ranks < 1 or settings.batch % given.ranks or settings.experts % given.ranks:
        parser.error(f"--ranks {given.ranks} must divide {settings.batch} and {settings.experts}")
    if given.ranks_per_node < 1 or given.ranks % given.ranks_per_node:
        parser.error(f"--ranks {given.ranks} is not a multiple of --ranks-per-node")
    plot_path = Path(given.plot) if given.plot else None
    trace_path = Path(given.save_trace) if given.save_trace else None
    return settings, trace_path, plot_path, given.control
