"""`python -m moe_p2p bench --api megatron`: whole training steps of Megatron's MoE layer.

Times the dispatchers of megatron_layer.py: the first step, later steps, and dispatch and combine
without experts, forward and backward. Outputs and gradients of two steps are compared. Systems take
turns, a step each, so that a slow moment of the machine meets all of them; a figure is the median
of the slower rank's times. On GPUs in bf16, on CPUs in fp32, which is what CPUs are fast at.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import env
from moe_p2p.tools import launch
from moe_p2p.tools.bench import megatron_layer
from moe_p2p.tools.bench.kernel_times import kernel_times
from moe_p2p.tools.bench.megatron_layer import SYSTEMS, Layer
from moe_p2p.tools.bench.plot import draw
from moe_p2p.tools.option_types import at_least_0, at_least_1, output_file

_Measured = TypeVar("_Measured")
WHAT = ("first step", "step", "without experts forward", "without experts backward")
# Of the norm. Both round rows, sums and gradients to bf16, 2^-9 of a value each, in another order.
MAX_DIFFERENCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Options:
    device: str
    ranks: int
    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    shared: int
    steps: int
    systems: tuple[str, ...]  # the first is what others are compared with
    json: str
    plot: str
    kernels: str  # folder of compiled kernels; "": the usual ones
    parts: bool = False  # also show which kernels the times without experts go to


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Times of one system, in milliseconds, the slower rank's."""

    system: str
    what: str
    median_ms: float
    least_ms: float
    difference: float  # from the all-to-all dispatcher's outputs and gradients, of their norm


def main(arguments: list[str]) -> int:
    """Returns 0: all right, 1: results differ, 2: a rank failed or Megatron is missing."""
    options = _parse(arguments)
    if reason := megatron_layer.find():
        print(f"bench: {reason}")
        return 2
    with tempfile.TemporaryDirectory(prefix="moe_p2p_kernels_") as folder:
        return _run(replace(options, kernels=folder) if options.kernels else options)


def _run(options: Options) -> int:
    if env.launched():
        figures = run(options)
        first = env.rank() == 0
    else:
        try:
            figures = launch.run_ranks(run, options, num_ranks=options.ranks)[0]
        except launch.RanksFailedError as error:
            print(f"bench: {error}")
            return 2
        first = True
    wrong = [figure for figure in figures if not figure.difference <= MAX_DIFFERENCE]
    if first:
        _report(options, figures)
        for figure in {figure.system: figure for figure in wrong}.values():
            print(f"WRONG: {figure.system} differs by {figure.difference:.3g} of the norm")
    return 1 if wrong else 0


def run(options: Options) -> list[Figure]:
    """One rank."""
    if reason := megatron_layer.find():
        raise RuntimeError(reason)
    if options.kernels:
        env.use_cache_folder(Path(options.kernels))
    local = env.local_world_size()
    with launch.process_group(megatron_layer.backend(options.device, local)):
        if options.device == "cuda":
            torch.cuda.set_device(launch.device_index())
        return _measure(options)


def _measure(options: Options) -> list[Figure]:
    megatron_layer.start(options.device)
    more: dict[str, Any] = {}
    if options.shared:
        more["moe_shared_expert_intermediate_size"] = options.shared
    layer = Layer(
        hidden=options.hidden,
        ffn=options.ffn,
        experts=options.experts,
        topk=options.topk,
        dtype=torch.bfloat16 if options.device == "cuda" else torch.float32,
        more=more,
    )
    made = {
        system: megatron_layer.make(system, layer, options.device) for system in options.systems
    }
    spent: dict[tuple[str, str], list[float]] = {}
    results = {system: list[Tensor]() for system in options.systems}
    for step in range(options.steps + 1):
        x, grad = megatron_layer.inputs(step, layer, options.tokens, options.device)
        for system, module in made.items():
            out: list[Tensor] = []

            def train(module: Any = module, x: Tensor = x, out: list[Tensor] = out) -> None:
                out.extend(megatron_layer.train(module, x, grad))  # noqa: B023

            key = system, "step" if step else "first step"
            spent.setdefault(key, []).append(_span(train, options.device))
            if step < 2:
                weights = [each.grad for each in module.parameters() if each.grad is not None]
                results[system] += [*out, *(weight.clone() for weight in weights)]
    apart = {
        system: _difference(results[system], results[options.systems[0]])
        for system in options.systems
    }
    results.clear()
    x, _ = megatron_layer.inputs(0, layer, options.tokens, options.device)
    for _ in range(options.steps if not options.shared else 0):
        for system, module in made.items():
            both = _without_experts(module, x, functools.partial(_span, device=options.device))
            for what, ms in zip(WHAT[2:], both, strict=True):
                spent.setdefault((system, what), []).append(ms)
    for system, module in made.items() if options.parts else ():
        found = functools.partial(kernel_times, device=options.device)
        for what, parts in zip(WHAT[2:], _without_experts(module, x, found), strict=True):
            if dist.get_rank() == 0:
                print(f"{system}, {what}: {parts.text()}")
    return [_figure(*key, times, apart[key[0]]) for key, times in spent.items()]


def _figure(system: str, what: str, times: list[float], difference: float) -> Figure:
    slower = torch.tensor([*times, difference], dtype=torch.float64, device="cpu")
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    *ms, difference = slower.tolist()
    return Figure(
        system=system,
        what=what,
        median_ms=round(statistics.median(ms), 3),
        least_ms=round(min(ms), 3),
        difference=difference,
    )


def _span(call: Callable[[], None], device: str) -> float:
    """Milliseconds of call(), begun by all ranks together."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cpu"))
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def _without_experts(
    module: Any, x: Tensor, measure: Callable[[Callable[[], None]], _Measured]
) -> tuple[_Measured, _Measured]:
    """Forward and backward of dispatch and combine, with a multiplication for experts."""
    dispatcher, out = module.token_dispatcher, list[Tensor]()
    with torch.no_grad():
        probs, routing_map = module.router(x)
    given, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()

    def forward() -> None:
        hidden, row_probs = dispatcher.dispatch_preprocess(given, routing_map, probs)
        hidden, row_probs = dispatcher.token_dispatch(hidden, row_probs)
        rows, _, row_probs = dispatcher.dispatch_postprocess(hidden, row_probs)
        rows = rows * row_probs.unsqueeze(-1).to(rows.dtype)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        out.append(dispatcher.combine_postprocess(rows))

    def backward() -> None:
        torch.autograd.backward(out[0], x)

    return measure(forward), measure(backward)


def _difference(mine: list[Tensor], other: list[Tensor]) -> float:
    """Largest difference of a tensor, of its norm."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip(mine, other, strict=True)
    )


def _parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m moe_p2p bench --api megatron",
        description="Training steps of Megatron-Core's MoE layer with three dispatchers.",
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--api", choices=["megatron"])
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if any")
    add("--ranks", type=at_least_1, help="processes (2; all GPUs)")
    add("--tokens", type=at_least_1, help="of a rank, even (64; 4096)")
    add("--hidden", type=at_least_1, help="hidden size (256; 2048)")
    add("--ffn", type=at_least_1, help="width of an expert (128; 768)")
    add("--experts", type=at_least_1, help="of all ranks (8; 64)")
    add("--topk", type=at_least_1, help="experts per token (4; 8)")
    add("--shared", type=at_least_0, default=0, help="width of shared experts, 0: none (0)")
    add("--steps", type=at_least_1, help="timed after the first (5; 20)")
    add("--systems", default=",".join(SYSTEMS), help="compared with the first (%(default)s)")
    add(
        "--empty-cache",
        dest="kernels",
        action="store_const",
        const="empty",
        default="",
        help="compile kernels anew, for the first step (the usual cache)",
    )
    add("--parts", action="store_true", help="show which kernels dispatch and combine consist of")
    add("--json", type=output_file, default="bench_out/megatron.json", help="figures ('': none)")
    add("--plot", type=output_file, default="bench_out/megatron.png", help="PNG ('': none)")
    given = vars(parser.parse_args(arguments))
    del given["api"]
    given["systems"] = tuple(given["systems"].split(","))
    if unknown := set(given["systems"]) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} is none of {', '.join(SYSTEMS)}")
    if given["device"] == "auto":
        given["device"] = "cuda" if cuda else "cpu"
    elif given["device"] == "cuda" and not cuda:
        parser.error("--device cuda: torch finds no GPU; see python -m moe_p2p doctor")
    small = {
        "ranks": 2,
        "tokens": 64,
        "hidden": 256,
        "ffn": 128,
        "experts": 8,
        "topk": 4,
        "steps": 5,
    }
    large = {"tokens": 4096, "hidden": 2048, "ffn": 768, "experts": 64, "topk": 8, "steps": 20}
    on_cuda = given["device"] == "cuda"
    defaults = {**small, **large, "ranks": torch.cuda.device_count()} if on_cuda else small
    if env.launched():
        defaults["ranks"] = env.world_size()
    complete: dict[str, Any] = {k: defaults[k] if v is None else v for k, v in given.items()}
    options = Options(**complete)
    if options.experts % options.ranks:
        parser.error(f"--experts {options.experts} is not a multiple of --ranks {options.ranks}")
    if options.tokens < 2 or options.tokens % 2:
        parser.error(f"--tokens {options.tokens} must be even: a batch has two sequences")
    if options.topk > options.experts:
        parser.error(f"--topk {options.topk} is more than --experts {options.experts}")
    return options


def _report(options: Options, figures: list[Figure]) -> None:
    print(_title(options))
    if options.device == "cuda" and options.ranks > torch.cuda.device_count():
        print("ranks share a GPU: times are of its slices, and alltoall passes through the host")
    print(f"{'':26}" + "".join(f"{system:>22}" for system in options.systems))
    for what in WHAT:
        of = {figure.system: figure for figure in figures if figure.what == what}
        if not of:
            continue
        base = of[options.systems[0]].median_ms
        cells = "".join(f"{f.median_ms:>13.2f} ms x{f.median_ms / base:4.2f}" for f in of.values())
        print(f"{what:26}{cells}")
    for path, write in ((options.json, _write_json), (options.plot, _write_plot)):
        if path:
            print(write(options, figures, Path(path)) or f"wrote {path}")


def _title(options: Options) -> str:
    from megatron.core import __version__ as version

    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU ranks"
    return (
        f"Megatron-Core {version} MoE layer, EP{options.ranks} on {where}: {options.tokens} "
        f"tokens, hidden {options.hidden}, top-{options.topk} of {options.experts}"
        + (", empty kernel cache" if options.kernels else "")
    )


def _write_json(options: Options, figures: list[Figure], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(options), **asdict(figure)} for figure in figures]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _write_plot(options: Options, figures: list[Figure], path: Path) -> str | None:
    def paint(axis: Any) -> None:
        shown = [what for what in WHAT[1:] if any(figure.what == what for figure in figures)]
        for i, system in enumerate(options.systems):
            of = {figure.what: figure.median_ms for figure in figures if figure.system == system}
            places = [
                place + 0.21 * (i - (len(options.systems) - 1) / 2) for place in range(len(shown))
            ]
            bars = axis.bar(places, [of[what] for what in shown], width=0.2, label=system)
            axis.bar_label(bars, fmt=_number, fontsize=9)
        axis.set_xticks(range(len(shown)), shown)
        axis.set(ylabel="median, ms", yscale="log")
        axis.margins(y=0.15)
        axis.grid(axis="y", alpha=0.3)
        axis.legend()

    reason = draw(path, _title(options), paint, figsize=(8, 5))
    return reason and f"no plot: {reason}"
