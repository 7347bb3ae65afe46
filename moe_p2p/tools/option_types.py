"""Types for argparse that refuse, by name, what has no meaning: numbers, and files to write.

Used by the commands of `python -m moe_p2p`, before they compute anything or start ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from moe_p2p.machine.models import MODELS

MOST = (1 << 31) - 1  # of whole numbers: a larger one is a mistake


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; --help has the usage. Defaults stand in parentheses."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"formatter_class": Defaults} | how)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class Defaults(argparse.HelpFormatter):
    """Adds a default in parentheses to each text that does not end with some."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if not action.option_strings or text.endswith(")") or _is_none(default):
            return text
        several = isinstance(default, (list, tuple))
        return f"{text} ({','.join(map(str, default)) if several else default})".strip()


def _is_none(default: Any) -> bool:
    """Whether no parentheses show a default."""
    return default is None or default is False or default in ("", argparse.SUPPRESS)


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` on."""
    return lambda text: _whole(text, least)


def at_least_1(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def at_least_0(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def each_at_least_1(text: str) -> tuple[int, ...]:
    """Several from 1 on, with commas."""
    return _several(text, at_least_1)


def each_at_least_0(text: str) -> tuple[int, ...]:
    """Several from 0 on, with commas."""
    return _several(text, at_least_0)


def some_of(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of these names, with commas; empty: none."""
    known = tuple(names)

    def chosen(text: str) -> tuple[str, ...]:
        found = tuple(filter(None, text.split(",")))
        if unknown := sorted({*found} - {*known}):
            wrong = f"{', '.join(unknown)} is none of {', '.join(known)}"
            raise argparse.ArgumentTypeError(wrong)
        return found

    return chosen


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return _real(text, "above 0", lambda value: value > 0)


def zero_or_more(text: str) -> float:
    """A finite number from 0 on."""
    return _real(text, "from 0 on", lambda value: value >= 0)


def output_file(text: str) -> str:
    """A file that can be written, also in a folder that is still to be made; empty: none."""
    path = Path(text)
    if not text:
        return text
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    was_there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not was_there:
            path.unlink(missing_ok=True)
        for folder in made:  # until there is something to write; from the deepest on
            folder.rmdir()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written ({error.strerror}); name another file"
        ) from error
    return text


def _is_whole(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _whole(text: str, least: int) -> int:
    if not _is_whole(text) or not least <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {MOST}")
    return int(text)


def _several(text: str, each: Callable[[str], int]) -> tuple[int, ...]:
    if not all(map(_is_whole, text.split(","))):
        wanted = f"{text!r} is not a number, or several with commas between them: 8,32,128"
        raise argparse.ArgumentTypeError(wanted)
    return tuple(map(each, text.split(",")))


def _real(text: str, wanted: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not holds(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
    return value


def parsed_for_model(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Adds --model; returns the arguments, with the model's sizes in place of defaults."""
    parser.add_argument("--model", choices=MODELS, help="its hidden size, top-k, experts (none)")
    given = parser.parse_args(arguments)
    if given.model is None:
        return given
    sizes = MODELS[given.model]
    parser.set_defaults(hidden=sizes.hidden, topk=sizes.topk, experts=sizes.experts)
    return parser.parse_args(arguments)
