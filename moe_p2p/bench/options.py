"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import torch

DType = Literal["bf16", "fp16", "fp32", "fp8"]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Options:
    ranks: int = 4
    ranks_per_node: int = 2
    tokens: tuple[int, ...] = (1, 8, 32, 128)  # per rank
    hidden: int = 7168
    topk: int = 8
    experts: int = 64
    dtype: DType = "bf16"  # fp8: bf16 rows quantized by dispatch, combined in bf16
    routing: str = "uniform"  # or "skewed"
    trace: str | None = None  # file of a recorded routing; overrides topk, experts and routing
    checks: int = 4  # compared steps per token count
    seconds: float = 6.0  # of timing per token count
    nics: int = 2  # per rank
    gbps: float = 0.0  # link model of one NIC; 0: as fast as memory
    latency_us: float = 0.0
    seed: int = 0  # not 0: the software NIC reorders what it may
    wait: str = "sleep"
    timeout_s: float = 30.0
    baseline: bool = True
    json: str | None = "bench_out/bench.json"
    plot: str | None = "bench_out/bench.png"

    @property
    def x_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "fp8" else TORCH_DTYPES[self.dtype]

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.dtype == "fp8" else self.x_dtype

    @property
    def quantize(self) -> bool:
        return self.dtype == "fp8"

    @property
    def transport_settings(self) -> str:
        if self.seed:
            return f"seed={self.seed}"
        if self.gbps or self.latency_us:
            return f"gbps={self.gbps:g},latency_us={self.latency_us:g}"
        return ""


# Ends within 30 s on two cores, start of the ranks included.
QUICK = Options(tokens=(8, 128), checks=3, seconds=3.5)


def parse(arguments: list[str]) -> Options:
    """Exits with a message for wrong input, as argparse does."""
    parser = _parser()
    given = parser.parse_args(arguments)
    quick = given.__dict__.pop("quick")
    base = dict(vars(QUICK if quick else Options()))
    base.update({key: value for key, value in vars(given).items() if value is not None})
    for key in ("json", "plot", "trace"):
        base[key] = base[key] or None
    options = Options(**base)
    _refuse_nonsense(parser, options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moe_p2p bench",
        description="Correctness against the reference, then latency and bytes on the wire.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two token counts, within 30 s on two cores")
    add("--ranks", type=int, help="processes (4)")
    add("--ranks-per-node", type=int, help="ranks that share memory as one node (2)")
    add("--tokens", type=_counts, help="tokens per rank, several with commas (1,8,32,128)")
    add("--hidden", type=int, help="hidden size (7168)")
    add("--topk", type=int, help="experts per token (8)")
    add("--experts", type=int, help="experts of all ranks (64)")
    add("--dtype", choices=["bf16", "fp16", "fp32", "fp8"], help="rows on the wire (bf16)")
    add("--routing", choices=["uniform", "skewed"], help="how experts are chosen (uniform)")
    add("--trace", metavar="FILE", help="replay a routing that the demo recorded")
    add("--checks", type=int, help="compared steps per token count (4)")
    add("--seconds", type=float, help="timing per token count (6)")
    add("--nics", type=int, help="NICs per rank (2)")
    add("--gbps", type=float, help="link model: rate of one NIC, Gbit/s (0: memory speed)")
    add("--latency-us", type=float, help="link model: one way, microseconds (0)")
    add("--seed", type=int, help="not 0: the software NIC reorders what it may, from this seed")
    add("--wait", choices=["sleep", "yield", "spin"], help="how ranks wait (sleep)")
    add("--timeout-s", type=float, help="deadline of every wait, seconds (30)")
    add("--no-baseline", dest="baseline", action="store_const", const=False, help="leave it out")
    add("--json", metavar="FILE", help="rows as JSON (bench_out/bench.json; '' for none)")
    add("--plot", metavar="FILE", help="PNG (bench_out/bench.png; '' for none)")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _refuse_nonsense(parser: argparse.ArgumentParser, options: Options) -> None:
    if options.ranks % options.ranks_per_node:
        parser.error(
            f"--ranks {options.ranks} is not a multiple of --ranks-per-node "
            f"{options.ranks_per_node}"
        )
    if not options.trace and options.experts % options.ranks:
        parser.error(f"--experts {options.experts} is not a multiple of --ranks {options.ranks}")
    if not options.trace and options.topk > options.experts:
        parser.error(f"--topk {options.topk} is more than --experts {options.experts}")
    if min(options.tokens) < 1:
        parser.error("--tokens must be at least 1")
    if options.seed and (options.gbps or options.latency_us):
        parser.error("--seed reorders at will: it excludes the link model (--gbps, --latency-us)")
