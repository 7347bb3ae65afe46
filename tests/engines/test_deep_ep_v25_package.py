"""The real DeepEP 2.5 (sgl-deep-ep-v25): its signatures are ours, and its references pass over our
EPBuffer on CPU ranks. Read from its source: importing it needs nvcc 13.1, NCCL and a GPU."""

from __future__ import annotations

import ast
import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_p2p import deep_ep_v25
from moe_p2p.deep_ep_v25 import BufferAllocator, EPBuffer, EPHandle, EventOverlap, comm
from tests.engines import packages
from tests.support import deep_ep_v25_references as references
from tests.support.ranks import Rank, run_processes

pytestmark = pytest.mark.engine("sgl-deep-ep-v25")

CLASSES: dict[str, tuple[str, Any]] = {
    "EPBuffer": ("buffers/ep.py", EPBuffer),
    "BufferAllocator": ("buffers/allocator.py", BufferAllocator),
    "EventOverlap": ("utils/event.py", EventOverlap),
}
OURS = {"check", "prepare"}  # additions: docs/deep_ep.md
# What the wheel imports for itself.
OF_ITS_OWN = {"_EXPECTED_CUDA_MAJOR", "_MIN_CUDA_MINOR", "_check_prerequisites", "find_nccl_root"}


def source(path: str) -> ast.Module:
    return ast.parse((packages.where("sgl-deep-ep-v25") / "deep_ep_v25" / path).read_text())


def class_of(path: str, kind: str) -> ast.ClassDef:
    found = [n for n in source(path).body if isinstance(n, ast.ClassDef) and n.name == kind]
    assert len(found) == 1
    return found[0]


def theirs(function: ast.FunctionDef) -> str:
    """Its parameters with their defaults, as `ours` writes them."""
    given = function.args
    assert not any((given.posonlyargs, given.kwonlyargs, given.vararg, given.kwarg))
    defaults = [ast.literal_eval(each) for each in given.defaults]
    names = [each.arg for each in given.args]
    first = len(names) - len(defaults)
    texts = [*names[:first], *(f"{n}={d!r}" for n, d in zip(names[first:], defaults, strict=True))]
    return ", ".join(texts)


def ours(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_every_method_has_the_signature_of_the_wheel(kind: str) -> None:
    path, mine = CLASSES[kind]
    found = [node for node in class_of(path, kind).body if isinstance(node, ast.FunctionDef)]
    public = [n for n in found if not n.name.startswith("_") or n.name in ("__init__", "__call__")]
    assert len(public) >= 3
    problems = []
    for node in public:
        function = inspect.getattr_static(mine, node.name, None)
        is_static = [ast.unparse(each) for each in node.decorator_list] == ["staticmethod"]
        if isinstance(function, staticmethod) != is_static:
            problems.append(f"{kind}.{node.name} is static in one of both")
            continue
        got = ours(getattr(mine, node.name))
        if got != theirs(node):
            problems.append(f"{kind}.{node.name}({got}), in the wheel ({theirs(node)})")
    assert not problems, "\n".join(problems)


def test_epbuffer_has_what_the_wheels_has_and_two_calls_more() -> None:
    node = class_of("buffers/ep.py", "EPBuffer")
    assigned = {
        target.id: ast.unparse(each.value)
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    assert assigned
    for name, value in assigned.items():  # barrier = comm.barrier
        assert getattr(EPBuffer, name) is getattr(comm, value.removeprefix("comm."))
    base = class_of("buffers/base.py", "BufferBase")
    wanted = {
        each.name
        for one in (node, base)
        for each in one.body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    }
    mine = {name for name in dir(EPBuffer) if not name.startswith("_")}
    assert mine - OURS == wanted | set(assigned)
    assert mine >= OURS


def assigned_to_self(function: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def init_of(path: str, kind: str) -> ast.FunctionDef:
    body = class_of(path, kind).body
    return next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__")


def test_buffers_have_the_wheels_attributes() -> None:
    wanted = assigned_to_self(init_of("buffers/ep.py", "EPBuffer"))
    assert len(wanted) > 15
    mine = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(EPBuffer)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert wanted - mine == set()


def test_handles_have_the_wheels_attributes() -> None:
    wanted = {n for n in assigned_to_self(init_of("buffers/ep.py", "EPHandle")) if n[0] != "_"}
    wanted |= {"topk_idx", "deterministic_sort"}
    wanted -= {"cached_recv_src_metadata_before_sort"}  # of its sort, which we do not need
    assert len(wanted) > 14
    lacking = wanted - set(dir(EPHandle)) - set(getattr(EPHandle, "__annotations__", {}))
    assert not lacking


def test_functions_of_comm_have_the_signatures_of_the_wheel() -> None:
    names = [alias.name for node in source("comm/__init__.py").body
             if isinstance(node, ast.ImportFrom) for alias in node.names]  # fmt: skip
    found = {
        node.name: node
        for name in ("barrier", "handle", "stream")
        for node in source(f"comm/{name}.py").body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(found) >= 6
    for name in names:
        assert hasattr(comm, name)
    for name, node in found.items():
        assert ours(getattr(comm, name)) == theirs(node), name


def test_the_module_has_the_wheels_names() -> None:
    wanted = {
        alias.asname or alias.name
        for node in source("__init__.py").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } - OF_ITS_OWN
    assert {"EPBuffer", "EPHandle", "BucketBuffer", "comm", "topk_idx_t"} <= wanted
    assert {name for name in wanted if not hasattr(deep_ep_v25, name)} == set()


def test_every_module_of_the_wheel_can_be_imported_or_is_known_to_be_missing() -> None:
    folder = packages.where("sgl-deep-ep-v25") / "deep_ep_v25"
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for name in ("buffers", "comm", "utils")
        for path in Path(folder, name).glob("*.py")
        if path.stem != "__init__"
    }
    deep_ep_v25.install()
    try:
        lacking = {name for name in found if not _imports(f"deep_ep_v25.{name}")}
    finally:
        deep_ep_v25.uninstall()
    assert lacking == {"utils.find_pkgs", "utils.semantic"}  # docs/deep_ep.md


def _imports(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("name", ["gate", "math", "refs", "testing"])
def test_utils_that_scripts_borrow_are_here(name: str) -> None:
    """Those of gate.py that only its own file calls are not."""
    wanted = {n.name for n in source(f"utils/{name}.py").body
              if isinstance(n, (ast.FunctionDef, ast.ClassDef))}  # fmt: skip
    if name == "gate":
        wanted = {"get_unbalanced_scores"}
    mine = getattr(deep_ep_v25.utils, name, None) or __import__(
        f"moe_p2p.deep_ep.utils.{name}", fromlist=[name]
    )
    assert {each for each in wanted if not hasattr(mine, each)} == set()


# --- its references over our buffer ---


def with_gloo(rank: Rank, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    references.references_pass("cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_wheels_references_pass_over_our_buffer(num_ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(num_ranks, with_gloo, folder)


@pytest.mark.parametrize(
    ("text", "wanted"), [("1G", 1 << 30), ("64 MiB", 64 << 20), ("512k", 512 << 10), ("7", 7)]
)
def test_sizes_are_parsed_as_in_the_wheel(text: str, wanted: int) -> None:
    from moe_p2p.deep_ep.utils import testing

    assert testing.parse_num_bytes(text) == references.module("testing").parse_num_bytes(text)
    assert testing.parse_num_bytes(text) == wanted
