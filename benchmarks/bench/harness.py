"""What the routines of the bench share: options out of fields, ranks, turns, a table, JSON, a plot.

A routine is a class of options, a function that measures as one rank, figures (a dataclass), and a
text of them. `main` of the routine is parse, `measured`, `ended`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from moe_p2p import env
from moe_p2p.tools import launch, output
from moe_p2p.tools.draw import draw
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.option_types import (
    Parser,
    at_least_1,
    each_at_least_1,
    output_file,
    zero_or_more,
)

T = TypeVar("T")
SAME: Any = object()
DEVICE = "auto: GPUs if any (auto)"
EPILOG = (
    "Defaults in parentheses: CPU, then GPUs where they differ. MOE_P2P_TRANSPORT and "
    "MOE_P2P_TRANSPORT_SETTINGS choose the NICs."
)

# --- options ---


def option(
    default: Any, text: str = "", *, cuda: Any = SAME, flag: str = "", gpu: bool = False, **how: Any
) -> Any:
    """A field of a class of options, and what sets it on the command line.

    default: of CPU ranks; cuda: of GPUs, where it differs. flag: its name, where it is not the
    field's. gpu: CPU ranks do not take it. how: of add_argument; types of numbers are those of
    TYPES. A text that does not end with parentheses gets the defaults in some.
    """
    on_cuda = default if cuda is SAME else cuda
    more = {"text": text, "cuda": on_cuda, "flag": flag, "gpu": gpu, "how": how}
    return field(default=default, metadata=more)


TYPES: dict[str, Callable[[str], Any]] = {
    "int": at_least_1,
    "float": zero_or_more,
    "tuple[int, ...]": each_at_least_1,
}


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every routine."""

    device: str = "cpu"
    json: str | None = None
    plot: str | None = None


def file(name: str, what: str) -> Any:
    """The field of a file that is written."""
    path = f"bench_out/{name}"
    return option(path, f"{what} ({path}; '': none)", type=output_file, metavar="FILE")


def parser_of(kind: Any, api: str, about: str, epilog: str = EPILOG) -> argparse.ArgumentParser:
    prog = f"python -m moe_p2p bench --api {api}"
    parser = Parser(prog=prog, description=about, epilog=epilog)
    parser.add_argument("--api", choices=[api])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=DEVICE)
    add_options(parser, kind)
    return parser


def add_options(parser: Any, kind: Any, only: Callable[[Field[Any]], bool] = bool) -> None:
    """parser: or a group of one."""
    for each in fields(kind):
        if "text" in each.metadata and only(each):
            _add(parser, each)


def _add(parser: Any, each: Field[Any]) -> None:
    how = dict(each.metadata["how"])
    if each.type == "bool":
        how |= {"action": "store_const", "const": not each.default}
    elif not how.keys() & {"choices", "action"}:
        how.setdefault("type", TYPES.get(str(each.type), str))
    name = each.metadata["flag"] or f"--{each.name.replace('_', '-')}"
    parser.add_argument(name, dest=each.name, help=_help(each), **how)


def _help(each: Field[Any]) -> str:
    text, values = each.metadata["text"], (each.default, each.metadata["cuda"])
    if text.endswith(")") or each.type == "bool" or values[0] in ("", None):
        return str(text)
    shown = dict.fromkeys(
        ",".join(map(str, v)) if isinstance(v, tuple) else f"{v:g}" if v == 0 else str(v)
        for v in values
    )
    return f"{text} ({'; '.join(shown)})".strip()


def device_of(parser: argparse.ArgumentParser, device: str) -> str:
    """ "cpu" or "cuda" of what was asked for."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device cuda: torch {torch.__version__} finds no GPU; see python -m moe_p2p doctor"
        )
    return device


def defaults(kind: Any, device: str) -> dict[str, Any]:
    where = "cuda" if device == "cuda" else ""
    return {each.name: each.metadata.get(where, each.default) for each in fields(kind)}


def parsed(
    parser: argparse.ArgumentParser, kind: Any, arguments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the defaults on the device that was asked for, and what was given."""
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    given["device"] = device_of(parser, given["device"])
    base = defaults(kind, given["device"])
    if "api" not in base:
        given.pop("api", None)
    look_at_files(parser, base | given)
    return base, given


def look_at_files(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> None:
    """Ends now, not after all measuring, if a default file cannot be written."""
    if env.launched() and env.rank():
        return  # rank 0 writes
    for name in ("json", "plot"):
        try:
            output_file(options.get(name) or "")
        except argparse.ArgumentTypeError as error:
            parser.error(f"--{name}: {error}")


def refuse(parser: argparse.ArgumentParser, problems: Mapping[str, bool]) -> None:
    """Ends with the first text whose condition holds."""
    for text, holds in problems.items():
        if holds:
            parser.error(text)


# --- ranks ---


def measured(run: Callable[[Any], Any], options: Any, num_ranks: int) -> Any:
    """What rank 0 returns; None, with the reason printed: a rank failed."""
    try:
        return launch.run_ranks(run, options, num_ranks=num_ranks)[0]
    except launch.RanksFailedError as error:
        print(f"bench: {error}")
        return None


def use_device(device: str) -> torch.device:
    """This rank's, which becomes the current one."""
    if device == "cpu":
        return torch.device("cpu")
    found = torch.device("cuda", launch.device_index())
    torch.cuda.set_device(found)
    return found


def finish(device: torch.device | str) -> None:
    """On a GPU, waits for launched work, so that results of a call may be read.

    While a kernel waits for another node, the software NIC needs the driver. A copy to pageable
    memory (.cpu(), .tolist()) and the first launch of a kernel keep the driver's lock until the
    kernel ends, so that it ends by its deadline. Waiting for the device does not.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def store_of(rank: int, limit_s: float) -> TCPStore:
    """The store that all ranks of this host share; it ends with rank 0. Collective."""
    limit = timedelta(seconds=limit_s)
    store = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    port = everyones(store and store.port)[0]
    return store or TCPStore("127.0.0.1", port, is_master=False, timeout=limit)


# --- turns ---


def in_turns(ways: Sequence[T], turn: int) -> list[T]:
    """Returns the ways in the order of this turn: each begins as often, ends as often."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


class Alone(NamedTuple):
    """What others are put beside: its median, and how far its runs are apart."""

    median: float
    spread: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> Alone:
        return cls(statistics.median(runs), max(runs) - min(runs))

    def is_seen(self, value: float) -> bool:
        """Returns False where a run alone may differ from another one by as much."""
        return abs(value - self.median) > self.spread

    @property
    def spread_percent(self) -> float:
        return self.spread / self.median * 100


def at(values: Sequence[float], percent: float) -> float:
    return sorted(values)[math.floor((len(values) - 1) * percent / 100)]


# --- output ---


def cell(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def table(lines: Sequence[Sequence[str]], left: int = 0) -> str:
    """Columns as wide as their widest cell, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            each.ljust(width) if i < left else each.rjust(width)
            for i, (each, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def device_name(device: str, of_cpus: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else of_cpus


def write_json(path: str | None, body: Any) -> None:
    """Of a list, each row on a line of its own."""
    if path:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in body) if isinstance(body, list) else ""
        text = f"[\n{rows}\n]" if rows else json.dumps(body, indent=1)
        output.write(path, text + "\n")
        print(f"wrote {path}")


def ended(
    options: Any,
    text: str,
    body: Any,
    wrong: Sequence[str],
    paint: Callable[[Any], None] | None = None,
    **subplots: Any,
) -> int:
    """Prints and writes what was measured; returns the exit status. text: begins with the title."""
    print(text)
    write_json(options.json, body)
    if paint is not None and options.plot:
        reason = draw(Path(options.plot), text.splitlines()[0], paint, **subplots)
        print(f"no plot: {reason}" if reason else f"wrote {options.plot}")
    for each in wrong:
        print(each)
    return 1 if wrong else 0
