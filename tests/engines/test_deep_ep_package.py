"""The real DeepEP 2.1 (sgl-deep-ep): each of its public calls, and each parameter, is here.

Read from its source, because importing it needs its compiled part and NCCL.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from moe_p2p import deep_ep
from tests.engines import packages

pytestmark = pytest.mark.engine("sgl-deep-ep")

CLASSES = {
    "Buffer": "buffers/legacy.py",
    "ElasticBuffer": "buffers/elastic.py",
    "EPHandle": "buffers/elastic.py",
    "EventOverlap": "utils/event.py",
}
# What docs/deep_ep.md says is not there, and methods that only DeepEP's own calls use.
LACKING = {
    "Buffer.low_latency_combine": {"overlap", "src_signals", "src_signal_expect_value"},
}

REFUSED = ("engram", "pp_", "agrs", "all_gather")  # with NotImplementedError: docs/deep_ep.md


def source(path: str) -> ast.Module:
    return ast.parse((packages.where("sgl-deep-ep") / "deep_ep" / path).read_text())


def methods(kind: str) -> dict[str, ast.FunctionDef]:
    """Public methods of DeepEP's class, by name."""
    for node in source(CLASSES[kind]).body:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            found = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            return {
                each.name: each
                for each in found
                if each.name == "__init__" or not each.name.startswith("_")
            }
    raise AssertionError(f"{CLASSES[kind]} has no {kind}")


def parameters(function: ast.FunctionDef) -> list[str]:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer", "EventOverlap"])
def test_every_method_takes_deep_eps_parameters_in_their_order(kind: str) -> None:
    ours: Any = getattr(deep_ep, kind)
    theirs = methods(kind)
    assert len(theirs) >= 3
    problems = []
    for name, function in theirs.items():
        if (mine := getattr(ours, name, None)) is None:
            problems.append(f"{kind}.{name} is not there")
            continue
        wanted, found = parameters(function), inspect.signature(mine).parameters.values()
        if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in found):
            if not any(refused in name for refused in REFUSED):
                problems.append(f"{kind}.{name} takes anything")
            continue
        given = [each.name for each in found if each.name != "self"]
        lacking = LACKING.get(f"{kind}.{name}", set())
        if missing := set(wanted) - set(given) - lacking:
            problems.append(f"{kind}.{name} lacks {sorted(missing)}")
        ordered = [each.name for each in found if each.kind is not each.KEYWORD_ONLY]
        common = [each for each in wanted if each in ordered]
        if common != [each for each in ordered if each in common]:
            problems.append(f"{kind}.{name} has another order: {given}, there {wanted}")
    assert not problems, "\n".join(problems)


def test_a_handle_has_deep_eps_attributes() -> None:
    wanted = parameters(methods("EPHandle")["__init__"])
    assert len(wanted) > 5
    handle: Any = deep_ep.EPHandle
    lacking = {name for name in wanted if name not in dir(handle)}
    lacking -= set(getattr(handle, "__annotations__", {}))
    lacking -= set(inspect.signature(handle.__init__).parameters)
    assert not lacking


def test_the_module_has_deep_eps_names() -> None:
    wanted = {
        alias.asname or alias.name
        for node in source("__init__.py").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module not in ("prerequisites", "envs")
    }
    wanted -= {"_EXPECTED_CUDA_MAJOR", "find_nccl_root"}  # of its own build
    assert {"Buffer", "ElasticBuffer"} <= wanted
    assert {name for name in wanted if not hasattr(deep_ep, name)} == set()
