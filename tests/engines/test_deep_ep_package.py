"""The real DeepEP 2.1 (sgl-deep-ep): each of its public calls, and each parameter, is here.

Read from its source, because importing it needs its compiled part and NCCL.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import tempfile
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import deep_ep
from moe_p2p.deep_ep.utils import envs, refs
from tests.engines import packages
from tests.support.ranks import Rank, run_processes

pytestmark = pytest.mark.engine("sgl-deep-ep")

CLASSES = {
    "Buffer": "buffers/legacy.py",
    "ElasticBuffer": "buffers/elastic.py",
    "EPHandle": "buffers/elastic.py",
    "EventOverlap": "utils/event.py",
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
        if missing := set(wanted) - set(given):
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


# --- utils.refs beside DeepEP's file, on CPU ranks ---


def deep_eps_refs() -> Any:
    """Its refs.py and math.py as they are; of envs.py, which needs its compiled part, the seed."""
    folder = packages.where("sgl-deep-ep") / "deep_ep" / "utils"
    sys.modules["stranger"] = package = ModuleType("stranger")
    package.__path__ = [str(folder)]
    sys.modules["stranger.envs"] = seeds = ModuleType("stranger.envs")
    seeds.get_global_seed = envs.get_global_seed  # type: ignore[attr-defined]
    return importlib.import_module("stranger.refs")


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one.dtype == other.dtype and torch.equal(one, other)


def compare_refs(rank: Rank, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    envs.init_seed(5)
    theirs, (experts, bound, hidden) = deep_eps_refs(), (8 * rank.world_size, 12, 256)
    num_tokens = 5 + 2 * rank.rank
    topk_idx = torch.rand(num_tokens, experts).topk(6).indices
    topk_idx[topk_idx % 5 == 0] = -1
    weights = torch.rand(num_tokens, 6)
    x = torch.randn(num_tokens, hidden)
    pair = (x.bfloat16(), torch.rand(num_tokens, 2))
    for rows in (x.bfloat16(), pair):
        arguments = (rows, topk_idx, weights, bound, experts)
        got = refs.dispatch(*arguments)
        assert equal(got, theirs.dispatch(*arguments))
        assert len(got[3]) > 0
    made = refs.generate_pre_combine_data(got[3], bound, 6, hidden)
    assert equal(made, theirs.generate_pre_combine_data(got[3], bound, 6, hidden))
    y = torch.randn(num_tokens, 6, hidden).bfloat16()
    y[topk_idx == -1] = 0
    assert equal(refs.ordered_accumulate(y), theirs.ordered_accumulate(y))
    biases = (
        torch.randn(num_tokens, hidden).bfloat16(),
        torch.randn(num_tokens, hidden).bfloat16(),
    )
    for bias in (None, biases[0], biases):
        for levels in ((True, True), (True, False), (False, False)):
            arguments = (topk_idx, 2, rank.world_size // 2, experts, bias, *levels)
            got_sum = refs.combine(y.clone(), *arguments)
            assert equal(got_sum, theirs.combine(y.clone(), *arguments)), (bias is None, levels)
    dist.destroy_process_group()


def test_references_give_the_bits_of_deep_eps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(4, compare_refs, folder)
