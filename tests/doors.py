"""The table of docs/doors.md, from the classes of this tree: `python -m tests.doors` writes it.

A call that raises NotImplementedError before it does anything else is refused; all others are
served, within the bounds that the door's page names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "doors.md"
BEGIN, END = "<!-- made by `python -m tests.doors` -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Door:
    """One class that users of another package call."""

    used: str  # what a user has now
    as_: str  # the class, as that package spells it
    ours: str  # module:class
    turn_on: str
    page: str  # below docs/
    heading: str  # of its five minutes
    own: tuple[str, ...] = ()  # public methods that are ours


_DEEP_EP = "`MOE_P2P_AS_DEEP_EP=1`"
DOORS = [
    Door(
        "DeepEP V1 (1.2)",
        "deep_ep.Buffer",
        "moe_p2p.deep_ep:Buffer",
        _DEEP_EP,
        "deep_ep.md",
        "DeepEP V1",
    ),
    Door(
        "DeepEP V2 (2.1)",
        "deep_ep.ElasticBuffer",
        "moe_p2p.deep_ep:ElasticBuffer",
        _DEEP_EP,
        "deep_ep.md",
        "DeepEP V2",
        own=("count", "route", "sums_of"),  # for deep_ep_v25
    ),
    Door(
        "DeepEP's branch hybrid-ep",
        "deep_ep.HybridEPBuffer",
        "moe_p2p.deep_ep:HybridEPBuffer",
        _DEEP_EP,
        "deep_ep.md",
        "HybridEP",
    ),
    Door(
        "DeepEP 2.5 (sgl-deep-ep-v25)",
        "deep_ep_v25.EPBuffer",
        "moe_p2p.deep_ep_v25:EPBuffer",
        "`MOE_P2P_AS_DEEP_EP_V25=1`",
        "deep_ep.md",
        "DeepEP 2.5",
    ),
    Door(
        "UCCL's EP", "deep_ep.Buffer", "moe_p2p.deep_ep:Buffer", _DEEP_EP, "deep_ep.md", "UCCL's EP"
    ),
    Door(
        "NIXL EP (8770b65)",
        "nixl_ep.Buffer",
        "moe_p2p.nixl_ep:Buffer",
        "`MOE_P2P_AS_NIXL_EP=1`",
        "nixl_ep.md",
        "NIXL EP",
    ),
    Door(
        "Mooncake's transfers (0.3.13)",
        "mooncake.engine.TransferEngine",
        "moe_p2p.mooncake:TransferEngine",
        "`MOE_P2P_AS_MOONCAKE=1`",
        "mooncake.md",
        "Mooncake",
    ),
]


def class_of(door: Door) -> type:
    module, _, name = door.ours.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def calls_of(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods, static ones too, of the class and its bases, by name."""
    for name in sorted(dir(cls)):
        found = inspect.getattr_static(cls, name)
        found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if not name.startswith("_") and inspect.isfunction(found):
            yield name, found


def is_refused(call: Callable[..., Any]) -> bool:
    """Whether its first statement behind the docstring raises NotImplementedError."""
    function = ast.parse(textwrap.dedent(inspect.getsource(call))).body[0]
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) else function.body
    first = body[0] if body else None
    return (
        isinstance(first, ast.Raise)
        and isinstance(first.exc, ast.Call)
        and isinstance(first.exc.func, ast.Name)
        and first.exc.func.id == "NotImplementedError"
    )


def row_of(door: Door) -> str:
    served: list[str] = []
    refused: list[str] = []
    for name, call in calls_of(class_of(door)):
        if name not in door.own:
            (refused if is_refused(call) else served).append(name)
    assert served, door
    out = ", ".join(f"`{name}`" for name in refused) or "none"
    anchor = re.sub(r"[^\w\- ]", "", door.heading.lower()).replace(" ", "-")
    return (
        f"| [{door.used}](#{anchor}) | `{door.as_}` | {door.turn_on} | {len(served)} | {out} "
        f"| [{door.page.removesuffix('.md')}]({door.page}) |"
    )


def table() -> str:
    head = ["you use", "class", "turned on by", "calls served", "refused by name", "page"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(row_of, DOORS)]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, "docs/doors.md has no place for the table"
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
