"""`python -m moe_p2p plan --weights`: the plan of a weight update of a public model, and its time.

Needs no ranks, GPUs or NICs. A side is RANKS:kind,key=value,...
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_p2p.errors import InvalidArgumentError, MoeP2pError, make, require
from moe_p2p.tools.draw import draw
from moe_p2p.tools.option_types import Parser, output_file
from moe_p2p.weights import models
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import WeightPlan, weight_plan
from moe_p2p.weights.predict import Prediction, Published, Rates, Totals, paper, predict, totals

GB = 1e9
TRAINER_KEYS, GENERATOR_KEYS = ("ep", "tp", "pp", "replicas"), ("ep", "tp")


def main(arguments: list[str]) -> int:
    """Prints the plan; exit code 2 when the numbers do not fit together."""
    given = (parser := _parser()).parse_args(arguments)
    if given.weights is None:
        parser.error(f"--weights: name a model: {', '.join(models.MODELS)}")
    try:
        model = models.MODELS[given.weights]
        rates = Rates(nic=given.nic * 1e9 / 8)
        require(given.nic > 0 and given.nics > 0, "--nic and --nics must be above 0")
        began = time.process_time()
        source = trainers_of(model, given.trainers)
        target = generators_of(model, given.generators, fp8=given.dtype == "fp8")
        described = time.process_time() - began
        plan = weight_plan(source, target, cache=given.cache)
        planned = time.process_time() - began - described
    except (MoeP2pError, OSError) as error:
        print(f"plan: {error}")
        return 2
    sums = totals(plan)
    prediction = predict(sums, model.layers, rates)
    parts = [
        size(plan, described, planned) + not_described(model),
        table(sums, given.nics),
        gathered(plan),
        stages(prediction),
        memory(sums, model.layers),
    ]
    if (model, source.world_size, target.world_size) == (models.MODELS["kimi-k2"], 256, 128):
        parts.append(published(paper(model, 256, 128, rates)))
    print("\n\n".join(parts))
    if given.plot:
        reason = picture(Path(given.plot), given, sums, prediction)
        print(f"no plot: {reason}" if reason else f"plot: {given.plot}")
    return 0


def trainers_of(model: models.Model, text: str) -> WeightLayout:
    """The layout of --trainers."""
    world, sizes = _side("--trainers", text, ("fsdp",), TRAINER_KEYS)
    return models.trainers(model, world, **sizes)


def generators_of(model: models.Model, text: str, *, fp8: bool) -> WeightLayout:
    """The layout of --generators; `ep` alone: experts dealt to all ranks."""
    world, sizes = _side("--generators", text, ("ep", "tp"), GENERATOR_KEYS)
    if text.partition(":")[2].split(",")[0] == "ep":
        sizes.setdefault("ep", world)
    return models.engine_ranks(model, world, fp8=fp8, **sizes)


def _side(
    name: str, text: str, kinds: Sequence[str], keys: Sequence[str]
) -> tuple[int, dict[str, int]]:
    count, _, rest = text.partition(":")
    words = rest.split(",") if rest else []
    sizes = {}
    if words and words[0] in kinds:
        words.pop(0)
    for word in words:
        key, _, value = word.partition("=")
        wanted = ", ".join(dict.fromkeys((*kinds, *keys)))
        require(key in keys, f"{name}: {key!r} is not one of {wanted}")
        sizes[key] = _number(f"{name}: {key}", value)
    return _number(f"{name}: ranks", count), sizes


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise make(InvalidArgumentError, f"{name}={text!r} is not a number from 1 on")
    return int(text)


def size(plan: WeightPlan, described: float, planned: float) -> str:
    """What planning took, on one core of this machine."""
    flows = sum(len(each.flows) for each in plan.templates)
    return (
        f"{len(plan.names):,} parameters, {len(plan.templates)} kinds of them planned once, "
        f"{flows:,} flows; {len(plan.to_bytes()):,} B with both layouts\n"
        f"CPU time: both layouts {described:.2f} s, plan {planned:.2f} s"
        + (f"; {len(plan.unused)} parameters go nowhere" if plan.unused else "")
    )


def not_described(model: models.Model) -> str:
    """A line that names what the model has besides, or nothing."""
    return f"\nnot described: {'; '.join(model.left_out)}" if model.left_out else ""


def table(sums: Totals, nics: int) -> str:
    """Least, mean and most of all ranks, and how much the most is above the mean."""
    lines = [f"{'of a rank':28} {'least':>10} {'mean':>10} {'most':>10} imbalance"]
    for name, values, unit in (
        ("out of a trainer, GB", sums.source_bytes, GB),
        ("  of each of its NICs, GB", sums.source_bytes, GB * nics),
        ("  writes, thousands", sums.source_writes, 1e3),
        ("into a generator, GB", sums.target_bytes, GB),
        ("  of each of its NICs, GB", sums.target_bytes, GB * nics),
        ("block maxima, MB", sums.maxima_bytes, 1e6),
    ):
        mean = sum(values) / len(values)
        above = max(values) / mean - 1 if mean else 0
        lines.append(
            f"{name:28} {min(values) / unit:10.3f} {mean / unit:10.3f} {max(values) / unit:10.3f} "
            f"{above:8.1%}"
        )
    return "\n".join(lines)


def gathered(plan: WeightPlan) -> str:
    """What is not written in its final form, by reason."""
    if not plan.gathered:
        return "gathered: nothing; each shard quantizes and writes its own rows"
    reasons: dict[str, list[int]] = {}
    for each in plan.gathered:
        kind = each.name.rsplit(".", 2)[-2] + ": " + each.why.partition(": ")[2]
        reasons.setdefault(kind, []).append(each.nbytes)
    total = sum(each.nbytes for each in plan.gathered)
    lines = [f"gathered: {total:,} B, which generators convert at commit"]
    lines += [f"  {sum(sizes):,} B of {len(sizes):,} {why}" for why, sizes in reasons.items()]
    return "\n".join(lines)


def stages(prediction: Prediction) -> str:
    """The predicted time, stage by stage."""
    lines = [
        f"{each.name:14} {each.seconds * 1e3:8.1f} ms  {each.how}" for each in prediction.stages
    ]
    lines.append(
        f"{'update':14} {prediction.seconds * 1e3:8.1f} ms  predicted, not measured: stages run "
        "side by side, layer by layer"
    )
    return "\n".join(lines)


def memory(sums: Totals, layers: int) -> str:
    """Extra device memory on both sides."""
    copies = max(sums.copied_bytes)
    two_layers = 2 * copies / layers
    return (
        f"memory: copies at a trainer, {copies / GB:.2f} GB, all at once as watermark=None has it; "
        f"of two layers with watermark={two_layers:.0f}, about {two_layers / GB:.2f} GB\n"
        f"        at a generator {max(sums.target_bytes) / GB:.2f} GB for an update beside the "
        "weights in use, 0 in place"
    )


def published(rows: Sequence[Published]) -> str:
    """The same model of time, run on the procedure of the paper."""
    lines = ["fabric-lib's own procedure for Kimi-K2, 256 to 128, by the same rates:"]
    lines += [
        f"  {row.name:15} {row.predicted_ms:6.0f} ms, published {row.published_ms:4.0f} "
        f"({row.predicted_ms / row.published_ms - 1:+.0%}): {row.how}"
        for row in rows
    ]
    lines.append(
        "  exposed transfer (42 ms) depends on how much it lets be in flight: not published"
    )
    return "\n".join(lines)


def picture(
    path: Path, given: argparse.Namespace, sums: Totals, prediction: Prediction
) -> str | None:
    """Draws bytes of all ranks, and the stages; returns the reason if it could not."""

    def paint(axes: Any) -> None:
        for name, values in (
            ("trainers, out", sums.source_bytes),
            ("generators, in", sums.target_bytes),
        ):
            axes[0].step(range(len(values)), [n / GB for n in values], where="mid", label=name)
        axes[0].set(xlabel="rank", ylabel="GB", ylim=(0, None))
        axes[0].legend()
        names = [each.name for each in prediction.stages][::-1]
        axes[1].barh(names, [each.seconds * 1e3 for each in prediction.stages][::-1])
        axes[1].axvline(prediction.seconds * 1e3, color="black", linestyle=":")
        axes[1].set(xlabel=f"ms, predicted; dotted: the update, {prediction.seconds * 1e3:.0f} ms")

    heading = f"{given.weights}: {given.trainers} to {given.generators}, {given.nic:g} Gbit/s a GPU"
    return draw(path, heading, paint, nrows=2, figsize=(7, 8))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m moe_p2p plan",
        description="The plan of a weight update between trainers and generators, and its "
        "predicted time (docs/weights.md). TRAINERS: RANKS:fsdp with keys "
        f"{', '.join(TRAINER_KEYS)}; GENERATORS: RANKS:ep or RANKS:tp=N with keys "
        f"{', '.join(GENERATOR_KEYS)}.",
    )
    add = parser.add_argument
    add("--weights", choices=models.MODELS, nargs="?", help="model")
    add("--trainers", default="256:fsdp", help="256:fsdp,ep=8: experts dealt to 8 ranks")
    add(
        "--generators",
        default="128:ep",
        help="128:ep=32,tp=8: four groups of 32, attention cut by 8",
    )
    add("--dtype", choices=("fp8", "bf16"), default="fp8", help="of the generators' weights")
    add("--nic", type=float, default=400, help="Gbit/s of a GPU's NICs together")
    add("--nics", type=int, default=1, help="NICs of a GPU")
    add("--cache", help="folder that keeps plans (none)")
    add(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="PNG of bytes and stages; matplotlib, of the extra bench (none)",
    )
    return parser
