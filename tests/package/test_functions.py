"""Functions of Python: none has more ways through it, or more lines, than a reader can hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("moe_p2p", "benchmarks")
MOST_WAYS, MOST_LINES = 25, 60
# DeepEP's calls have these branches, and another Python call in them costs each step.
GIVEN = {"moe_p2p/deep_ep/buffer.py: dispatch"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# As lizard counts them: words that branch.
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


def ways(function: ast.AST) -> int:
    """Cyclomatic complexity: 1, and each branch, `and`, `or`, and part of a comprehension.

    Functions within it count by themselves.
    """
    count, left = 1, list(ast.iter_child_nodes(function))
    while left:
        each = left.pop()
        if isinstance(each, FUNCTIONS):
            continue
        left += ast.iter_child_nodes(each)
        if isinstance(each, BRANCHES):
            count += 1
        elif isinstance(each, ast.BoolOp):
            count += len(each.values) - 1
        elif isinstance(each, ast.comprehension):
            count += 1 + len(each.ifs)
    return count


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of its body: signatures that others gave are as long as they are, docstrings are read."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """With their names. Not of kernels/: one of Triton is one function."""
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, FUNCTIONS):
                yield f"{path.relative_to(ROOT)}: {each.name}", each


def test_functions_can_be_held_in_mind() -> None:
    found = list(functions())
    assert len(found) > 3000
    assert [name for name, each in found if ways(each) > MOST_WAYS] == []
    assert {name for name, each in found if lines(each) > MOST_LINES} == GIVEN


def test_ways_are_counted() -> None:
    text = """
def f(a):
    def inner():
        return 1 if a else 2
    if a and b or c:
        return [x for x in a if x]
    try:
        while a: pass
    except ValueError:
        return (y for y in a)
"""
    function = ast.parse(text).body[0]
    assert ways(function) == 1 + 1 + 2 + 2 + 1 + 1 + 1
