"""Prints the matrix of faults: `python -m tests.faults [--cell WORD]`."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.faults.matrix import (
    CELLS,
    COMMANDS,
    FAULTS,
    IN_TURNS,
    LOCAL,
    OVER,
    POINTS,
    Cell,
    Elsewhere,
    Never,
    Run,
    cases,
)


def mark(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Run | Elsewhere):
        return "/".join(sorted(cell.outcomes)) + ("" if isinstance(cell, Run) else " *")
    return "-" if isinstance(cell, Never) else "pairs"


def table(over: str) -> list[str]:
    faults = [fault for fault in FAULTS if (fault, "set-up", over) in CELLS]
    lines = [[over, *faults]]
    for point in POINTS:
        lines.append([point, *(mark(CELLS[fault, point, over]) for fault in faults)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{text:{w}}" for text, w in zip(line, widths, strict=True)) for line in lines
    ]


def kind(over: str, cell: Cell) -> str:
    if isinstance(cell, Run | Elsewhere):
        return "run" if over in LOCAL else f"run by its own command ({over})"
    return "cannot be" if isinstance(cell, Never) else "left to pairs"


def counts() -> list[str]:
    by_kind = Counter(kind(over, cell) for (_, _, over), cell in CELLS.items())
    here = sum(isinstance(cell, Run) and key[2] in LOCAL for key, cell in CELLS.items())
    local = [case for case in cases() if case.over in LOCAL]
    lines = [f"{len(CELLS)} cells: {', '.join(f'{n} {name}' for name, n in by_kind.items())}"]
    lines += [f"of those run, {here} by the {len(local)} runs of tests/faults, others (*) by tests"]
    reasons = Counter(cell.reason for cell in CELLS.values() if isinstance(cell, Never))
    lines += [f"cannot be, {number}: {reason}" for reason, number in reasons.items()]
    lines.append(IN_TURNS)
    return lines + [f"{over}: {command}" for over, command in COMMANDS.items()]


def details(word: str) -> list[str]:
    lines = []
    for key, cell in CELLS.items():
        if word in key:
            lines.append(f"{', '.join(key)}: {mark(cell)}")
            if isinstance(cell, Never):
                lines.append(f"    {cell.reason}")
            if isinstance(cell, Run):
                lines += [f"    test_faults.py, {case}: {outcome}" for case, outcome in cell.cases]
            if isinstance(cell, Run | Elsewhere):
                lines += [f"    {test}" for test in cell.tests]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", help="a fault, a point or a transport: what runs its cells")
    word = parser.parse_args().cell
    if word is not None:
        print("\n".join(details(word)))
        return
    for over in OVER:
        print("\n".join([*table(over), ""]))
    print("\n".join(counts()))


if __name__ == "__main__":
    main()
