"""`python -m moe_p2p bench --api megatron`: whole training steps of Megatron's MoE layer.

Times the dispatchers of megatron_layer.py: the first step, later steps, and dispatch and combine
without experts, forward and backward. Outputs and gradients of two steps are compared. Systems take
turns, a step each, so that a slow moment of the machine meets all of them; a figure is the median
of the slower rank's times. On GPUs in bf16, on CPUs in fp32, which is what CPUs are fast at.
"""

from __future__ import annotations

import functools
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
from moe_p2p.bench import megatron_layer
from moe_p2p.bench.harness import (
    Common,
    device_name,
    ended,
    file,
    finish,
    measured,
    option,
    parsed,
    parser_of,
    refuse,
    table,
    use_device,
)
from moe_p2p.bench.kernel_times import kernel_times
from moe_p2p.bench.megatron_layer import SYSTEMS, Layer
from moe_p2p.tools import launch
from moe_p2p.tools.option_types import at_least_0, some_of

_Measured = TypeVar("_Measured")
WHAT = ("first step", "step", "without experts forward", "without experts backward")
# Of the norm. Both round rows, sums and gradients to bf16, 2^-9 of a value each, in another order.
MAX_DIFFERENCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    ranks: int = option(2, "processes (2; all GPUs)")
    tokens: int = option(64, "of a rank, even", cuda=4096)
    hidden: int = option(256, "hidden size", cuda=2048)
    ffn: int = option(128, "width of an expert", cuda=768)
    experts: int = option(8, "of all ranks", cuda=64)
    topk: int = option(4, "experts per token", cuda=8)
    shared: int = option(0, "width of shared experts, 0: none (0)", type=at_least_0)
    steps: int = option(5, "timed after the first", cuda=20)
    # The first is what others are compared with.
    systems: tuple[str, ...] = option(SYSTEMS, "compared with the first", type=some_of(SYSTEMS))
    json: str = file("megatron.json", "figures")
    plot: str = file("megatron.png", "PNG")
    # Folder of compiled kernels; "": the usual ones.
    kernels: str = option(
        "",
        "compile kernels anew, for the first step (the usual cache)",
        flag="--empty-cache",
        action="store_const",
        const="empty",
    )
    parts: bool = option(False, "show which kernels dispatch and combine consist of")


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
        figures: list[Figure] | None = run(options)
    else:
        figures = measured(run, options, options.ranks)
    if figures is None:
        return 2
    differences = {f.system: f.difference for f in figures if not f.difference <= MAX_DIFFERENCE}
    wrong = [f"WRONG: {name} differs by {d:.3g} of the norm" for name, d in differences.items()]
    if env.launched() and env.rank():
        return 1 if wrong else 0
    return _report(options, figures, wrong)


def run(options: Options) -> list[Figure]:
    """One rank."""
    if reason := megatron_layer.find():
        raise RuntimeError(reason)
    if options.kernels:
        env.use_cache_folder(Path(options.kernels))
    local = env.local_world_size()
    with launch.process_group(megatron_layer.backend(options.device, local)):
        use_device(options.device)
        return _measure(options)


def _measure(options: Options) -> list[Figure]:
    megatron_layer.start(options.device)
    more = {"moe_shared_expert_intermediate_size": options.shared} if options.shared else {}
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
    finish(device)
    dist.all_reduce(torch.zeros(1, device="cpu"))
    began = time.perf_counter()
    call()
    finish(device)
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
    about = "Training steps of Megatron-Core's MoE layer with each dispatcher."
    parser = parser_of(Options, "megatron", about, "Defaults in parentheses: CPU, then GPUs.")
    base, given = parsed(parser, Options, arguments)
    if given["device"] == "cuda":
        base["ranks"] = torch.cuda.device_count()
    if env.launched():
        base["ranks"] = env.world_size()
    options = Options(**base | given)
    experts, ranks, tokens, topk = options.experts, options.ranks, options.tokens, options.topk
    problems = {
        f"--experts {experts} is not a multiple of --ranks {ranks}": experts % ranks > 0,
        f"--tokens {tokens} must be even: a batch has two sequences": tokens % 2 > 0,
        f"--topk {topk} is more than --experts {experts}": topk > experts,
    }
    refuse(parser, problems)
    return options


def _report(options: Options, figures: list[Figure], wrong: list[str]) -> int:
    text = [_title(options)]
    if options.device == "cuda" and options.ranks > torch.cuda.device_count():
        text.append(
            "ranks share a GPU: times are of its slices, and alltoall passes through the host"
        )
    if any(system.endswith("_fused") for system in options.systems):
        text.append(f"fused permutation: {megatron_layer.permutation()}")
    lines = [["", *options.systems]]
    for what in WHAT:
        of = {figure.system: figure.median_ms for figure in figures if figure.what == what}
        if of:
            base = of[options.systems[0]]
            lines.append([what, *(f"{ms:.2f} ms x{ms / base:4.2f}" for ms in of.values())])
    rows = [{**asdict(options), **asdict(figure)} for figure in figures]
    return ended(
        options,
        "\n".join([*text, table(lines, 1)]),
        rows,
        wrong,
        lambda axis: _paint(axis, options, figures),
        figsize=(10, 5),
    )


def _title(options: Options) -> str:
    from megatron.core import __version__ as version

    return (
        f"Megatron-Core {version} MoE layer, EP{options.ranks} on "
        f"{device_name(options.device, 'CPU ranks')}: {options.tokens} tokens, hidden "
        f"{options.hidden}, top-{options.topk} of {options.experts}"
        + (", empty kernel cache" if options.kernels else "")
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _paint(axis: Any, options: Options, figures: list[Figure]) -> None:
    shown = [what for what in WHAT[1:] if any(figure.what == what for figure in figures)]
    for i, system in enumerate(options.systems):
        of = {figure.what: figure.median_ms for figure in figures if figure.system == system}
        width = 0.84 / len(options.systems)
        shift = width * (i - (len(options.systems) - 1) / 2)
        places = [place + shift for place in range(len(shown))]
        bars = axis.bar(places, [of[what] for what in shown], width=0.95 * width, label=system)
        axis.bar_label(bars, fmt=_number, fontsize=9)
    axis.set_xticks(range(len(shown)), shown)
    axis.set(ylabel="median, ms", yscale="log")
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
