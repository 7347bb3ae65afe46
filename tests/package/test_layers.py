"""The tree itself: who includes whom, who may include torch, how long files are."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A folder includes itself, folders after it, and kernels/abi.
LAYERS = ["ops", "moe", "proxy", "engine", "provider", "platform", "base"]
# Rooms of the Python package: each imports those of tiers before its own.
TIERS = [
    {"aliases", "env", "errors", "library", "log", "version"},
    {"machine"},
    {"engine"},
    {"fleet"},
    {"moe", "kv", "weights"},
    {"deep_ep", "mooncake", "layer"},
    {"nixl_ep", "deep_ep_v25"},  # their calls are those of deep_ep's buffers
    {"integrations"},
    {"tools"},
    {"bench"},  # a link to benchmarks/bench
    {"examples", "__init__", "__main__"},
]
# Copies publish fragments through the Connections that have started them.
HEADER_CIRCLES = {frozenset({"provider/loopback/copies", "provider/loopback/peers"})}
MAX_LINES = 700
NATIVE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
LONG_COMMENT = re.compile(r"^(?=.{101}) *(?://|#) .*", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "pybind11/")


def native_sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in NATIVE_SUFFIXES)


def python_sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def includes(path: Path) -> list[tuple[str, str]]:
    """Pairs of ('<' or '"', what is included)."""
    return [(found[1], found[2]) for found in INCLUDE.finditer(path.read_text())]


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "csrc").parts[0]


def allowed_layers(layer: str) -> set[str]:
    return set(LAYERS[LAYERS.index(layer) :])


def project_include_problem(path: Path, target: str) -> str:
    """Why this file may not include the project header `target`; empty when it may."""
    if target.startswith("kernels/abi/"):
        return "" if (ROOT / target).exists() else "does not exist"
    if not (ROOT / "csrc" / target).exists():
        return "is not a path below csrc/"
    below = allowed_layers(layer_of(path))
    return "" if target.split("/")[0] in below else f"is not in {sorted(below)}"


def test_every_folder_of_csrc_has_its_place() -> None:
    folders = {layer_of(path) for path in native_sources("csrc")}
    assert folders <= set(LAYERS)


def test_includes_point_downward() -> None:
    problems = [
        f'{path.relative_to(ROOT)} includes "{target}", which {problem}'
        for path in native_sources("csrc")
        for quote, target in includes(path)
        if quote == '"' and not target.startswith(TORCH_PREFIXES)
        if (problem := project_include_problem(path, target))
    ]
    assert not problems, "\n".join(problems)


def test_only_ops_includes_torch() -> None:
    offenders = [
        f"{path.relative_to(ROOT)} includes {target}"
        for folder in ("csrc", "kernels", "tests/cpp")
        for path in native_sources(folder)
        for _, target in includes(path)
        if target.startswith(TORCH_PREFIXES)
        if path.relative_to(ROOT).parts[:2] != ("csrc", "ops")
    ]
    assert not offenders, "\n".join(offenders)


def test_abi_includes_nothing_but_itself() -> None:
    # <cstdint> stands behind the branch for host compilers; NVRTC has no standard headers.
    offenders = [
        f"{path.relative_to(ROOT)} includes {target}"
        for path in native_sources("kernels/abi")
        for _, target in includes(path)
        if not target.startswith("kernels/abi/") and target != "cstdint"
    ]
    assert not offenders, "\n".join(offenders)


def reached(name: str) -> set[str]:
    """Files of kernels/ that this one includes, directly or not."""
    found, queue = set(), [name]
    while queue:
        for _, target in includes(ROOT / queue.pop()):
            if target.startswith("kernels/") and target not in found:
                found.add(target)
                queue.append(target)
    return found


@pytest.mark.parametrize("half", ["recv", "bulk_recv"])
@pytest.mark.parametrize("what", ["dispatch", "combine"])
def test_receiving_kernels_do_not_include_sending(what: str, half: str) -> None:
    below = reached(f"kernels/{what}/{half}.cuh")
    assert "kernels/device/wait.cuh" in below
    assert not [name for name in below if name.endswith(("send.cuh", "/route.cuh"))]


def test_one_file_of_the_kernels_knows_the_placements() -> None:
    layout = re.compile(r"\b(kPadded|kGrouped|kByRank|kLayout|MOE_P2P_LAYOUT)\b")
    asking = [
        path.relative_to(ROOT / "kernels").as_posix()
        for path in native_sources("kernels")
        if path.suffix != ".h" and layout.search(path.read_text())
    ]
    assert asking == ["dispatch/placement.cuh", "dispatch/token.cuh"]  # which names the macro


def test_no_provider_includes_another() -> None:
    offenders = []
    for path in native_sources("csrc/provider"):
        own = path.parent.relative_to(ROOT / "csrc").as_posix()
        if own == "provider":
            continue
        for _, target in includes(path):
            folder = target.rsplit("/", 1)[0]
            if folder.startswith("provider/") and folder != own:
                offenders.append(f"{path.relative_to(ROOT)} includes {target}")
    assert not offenders, "\n".join(offenders)


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules, or of what they have; also for type checkers, and within functions."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            yield from (name.name for name in each.names)
        elif isinstance(each, ast.ImportFrom):
            yield from (f"{each.module}.{name.name}" for name in each.names)


def import_graph() -> dict[str, set[str]]:
    """For each module of the package, the others of it that it imports."""
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for folder, sources in ((ROOT, "moe_p2p"), (ROOT / "benchmarks", "benchmarks/bench"))
        for path in python_sources(sources)
    }
    modules = {re.sub(r"^bench\b", "moe_p2p.bench", name): path for name, path in modules.items()}
    graph = {}
    for name, path in modules.items():
        names = set(imported(ast.parse(path.read_text())))
        found = {each if each in modules else each.rpartition(".")[0] for each in names}
        graph[name] = (found & modules.keys()) - {name}
    return graph


def tier_of(module: str) -> int:
    """Who imports the package as a whole is a user of it."""
    room = module.split(".")[1] if "." in module else "__init__"
    return next(i for i, rooms in enumerate(TIERS) if room in rooms)


def room_of(module: str) -> str:
    """A folder of the package, or a flat module."""
    return ".".join(module.split(".")[:2])


def test_imports_of_python_point_downward() -> None:
    """No room imports another one of its tier, but for the flat modules at the bottom."""
    problems = []
    for name, others in import_graph().items():
        for other in others - {"moe_p2p"}:
            same = name.split(".")[1:2] == other.split(".")[1:2]
            tier = tier_of(other) - tier_of(name)
            if tier > 0 or (tier == 0 and not same and tier_of(name) > 0):
                problems.append(f"{name} imports {other}")
    assert not problems, "\n".join(sorted(problems))


def test_nothing_of_the_package_imports_the_bench() -> None:
    """It is outside of it: `python -m moe_p2p bench` alone names it."""
    users = {
        name
        for name, others in import_graph().items()
        if any(each.startswith("moe_p2p.bench") for each in others)
    }
    assert len(users) > 20
    assert not [name for name in users if not name.startswith("moe_p2p.bench")]


def test_only_users_import_the_whole_package() -> None:
    users = {name for name, others in import_graph().items() if "moe_p2p" in others}
    assert not [name for name in sorted(users) if tier_of(name) < tier_of("moe_p2p.tools")]


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Circles of a graph; each is opened when it is found, so there may be more."""
    found = set()
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            circle = error.args[1]
            found.add(frozenset(circle))
            graph[circle[1]] = graph[circle[1]] - {circle[0]}
        else:
            return found


def test_no_modules_import_each_other() -> None:
    """Nor in a longer circle, and not for types alone either."""
    graph = import_graph()
    arrows = {(room_of(name), room_of(other)) for name in graph for other in graph[name]}
    arrows = {(here, there) for here, there in arrows if here != there}
    found = circles(dict(graph))
    print(f"moe_p2p: {len({*map(room_of, graph)})} rooms, {len(arrows)} arrows between them,")
    print(f"{len(graph)} modules, circles of modules: {len(found)}")
    assert not found


@pytest.mark.parametrize("folder", ["csrc", "kernels"])
def test_headers_and_their_sources_make_no_circle(folder: str) -> None:
    """A header and the source of its name are one place."""
    graph: dict[str, set[str]] = {}
    for path in native_sources(folder):
        name = path.relative_to(ROOT / "csrc" if folder == "csrc" else ROOT).with_suffix("")
        others = {target.rpartition(".")[0] for quote, target in includes(path) if quote == '"'}
        graph.setdefault(name.as_posix(), set()).update(others - {name.as_posix()})
    assert circles(graph) <= HEADER_CIRCLES


def test_no_collective_of_objects_is_used() -> None:
    """They need numpy, which is no dependency; moe_p2p/tools/gather.py does without."""
    for source in [*python_sources("moe_p2p"), *python_sources("benchmarks")]:
        found = re.findall(r"dist\.\w+_object(?:_list)?\(", source.read_text())
        assert not found, f"{source}: {found}"


def test_environment_is_read_in_one_place() -> None:
    offenders = [
        str(path.relative_to(ROOT))
        for path in [*python_sources("moe_p2p"), *python_sources("benchmarks/bench")]
        if path.name != "env.py" and re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    ]
    assert not offenders, f"only moe_p2p/env.py reads the environment, not {offenders}"


@pytest.mark.parametrize("folder", ["csrc", "kernels", "moe_p2p", "tests", "benchmarks", "contrib"])
def test_files_are_short_and_finished(folder: str) -> None:
    unfinished = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
    problems = []
    for path in [*native_sources(folder), *python_sources(folder)]:
        text = path.read_text()
        name = path.relative_to(ROOT)
        if (lines := text.count("\n")) >= MAX_LINES:
            problems.append(f"{name} has {lines} lines, must stay below {MAX_LINES}")
        if found := unfinished.search(text):
            problems.append(f"{name} says {found[0]}")
        if found := LONG_COMMENT.search(text):  # clang-format leaves comments alone
            problems.append(f"{name} has a comment beyond column 100: {found[0].strip()[:60]}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "folder", ["csrc", "kernels/abi", "moe_p2p", "benchmarks", "contrib/release"]
)
def test_files_open_with_what_they_are(folder: str) -> None:
    headers = [p for p in native_sources(folder) if p.suffix in {".h", ".cuh"}]
    silent = [
        str(path.relative_to(ROOT))
        for path in [*headers, *python_sources(folder)]
        if not path.read_text().startswith(("//", '"""', 'r"""'))
    ]
    assert not silent, f"no opening comment: {silent}"
