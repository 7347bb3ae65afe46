"""Who writes which fields: an object writes its own, and a class is whole in its file.

Fields of an object are written through `self` alone, or by the function that has just made it.
Records are values: whoever is in the file of a dataclass without methods writes its fields.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
PACKAGE = Path(__file__).resolve().parents[2] / "moe_p2p"
# Objects of others whose fields there is no other way to set: by file, what is written, and why.
GIVEN = {
    "aliases.py": {"sys": "a program's arguments, as Python sets them"},
    "deep_ep/buffer.py": {"Buffer": "DeepEP's set_num_sms is static, and of all buffers"},
    "nixl_ep/buffer.py": {"Buffer": "NIXL EP's set_num_sms is static, and of all buffers"},
    "deep_ep/elastic.py": {"ElasticBuffer": "a method for each call that is not served"},
    "examples/disaggregated.py": {"Handler": "http.server makes the handlers itself"},
    "examples/rl.py": {"mine": "torch's gradients"},
    "fleet/client.py": {"self._limits": "threading.local"},
    "integrations/__init__.py": {"module": "an engine's function that ours replaces"},
    "integrations/kv/sglang.py": {
        "this": "SGLang's receiver or sender, which ours extends",
        "module": "SGLang's function that ours replaces",
        "queue": "SGLang's queue, whose method ours replaces",
        "get_kv_class": "marks the function that replaces SGLang's",
    },
    "integrations/moe/sglang.py": {"buffer": "SGLang's buffer, whose method ours replaces"},
    "integrations/moe/vllm.py": {"checks": "vLLM's function that ours replaces"},
    "integrations/serving_steps.py": {
        "checked": "marks a method that ours has replaced",
        "runner": "an engine's step, which ours replaces",
    },
    "integrations/moe/sglang_hooks.py": {
        "action": "a choice more of argparse's option",
        "dispatcher": "SGLang's, whose constructor ours stands for",
    },
    "integrations/weights/sglang.py": {
        "continue_generation": "marks a method that ours has replaced",
        "scheduler": "SGLang's scheduler, whose method ours replaces",
    },
    "integrations/weights/slime.py": {
        "made": "the name of a class that is made for slime",
        "this": "slime's updater, which ours extends",
    },
    "integrations/weights/torchtitan.py": {"module": "TorchTitan's module, whose store ours is"},
    "integrations/weights/vllm.py": {
        "resume_scheduler": "marks a method that ours has replaced",
        "core": "vLLM's engine core, whose methods ours replace",
        "made": "the name of a class that is made for vLLM",
    },
    "moe/direct.py": {
        "size_of": "types of a function of ctypes",
        "wrap": "types of a function of ctypes",
        "requires_grad": "types of a function of ctypes",
        "in_mode": "types of a function of ctypes",
    },
    "moe/gpu/memory.py": {
        "access": "a struct of CUDA",
        "fabric_handle": "a struct of CUDA",
        "properties": "a struct of CUDA",
        "struct": "a struct of CUDA",
    },
    "moe/gpu/prepared.py": {"function": "torch.compile's mark"},
    "moe/ops.py": {"ctx": "torch.autograd's context"},
    "integrations/moe/megatron_permute.py": {"ctx": "torch.autograd's context"},
    "tools/forked.py": {"sys": "Python has no other way to say what becomes of an exception"},
}

# Classes whose base is an engine's, which `integrations.derived` finds.
DERIVED = {
    ("integrations/kv/sglang.py", "Sample"),
    ("integrations/kv/sglang.py", "Receiver"),
    ("integrations/kv/sglang.py", "Sender"),
    ("integrations/kv/vllm.py", "Connector"),
}


def sources() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        queue = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        queue = [node.target]
    elif isinstance(node, ast.With):
        queue = [each.optional_vars for each in node.items if each.optional_vars is not None]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
        queue = [ast.Attribute(node.args[0], "*", lineno=node.lineno)]
    else:
        return
    while queue:
        target = queue.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            queue += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def is_record(node: ast.ClassDef) -> bool:
    """A dataclass with fields and properties alone."""
    made = any(ast.unparse(each).startswith("dataclass") for each in node.decorator_list)
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return made and all(
        any(ast.unparse(each) == "property" for each in method.decorator_list) for method in methods
    )


def record_fields(tree: ast.AST) -> set[str]:
    return {
        field.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and is_record(node)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def scope(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from scope(node)


def made_here(function: ast.AST) -> set[str]:
    """Names that a function gives to what a class returns when it is called."""
    return {
        target.id
        for node in scope(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if re.search(r"(^|\.)_?[A-Z]\w*$", ast.unparse(node.value.func))
        for target in targets(node)
        if isinstance(target, ast.Name)
    }


def written_by_others(name: str) -> list[str]:
    tree = ast.parse((PACKAGE / name).read_text())
    records, found = record_fields(tree), {}

    def look(node: ast.AST, allowed: set[str]) -> None:
        if isinstance(node, (*FUNCTIONS, ast.Module)):
            allowed = allowed | made_here(node)
        for target in targets(node):
            if not isinstance(target, ast.Attribute) or target.attr in records:
                continue
            owner, given = ast.unparse(target.value), GIVEN.get(name, {})
            others = owner not in {"self", "cls"} | allowed
            if others and owner not in given and re.split(r"\W", owner)[0] not in given:
                found[f"{name}:{target.lineno}: {owner}.{target.attr}"] = None
        for child in ast.iter_child_nodes(node):
            look(child, allowed)

    look(tree, set())
    return list(found)


def test_an_object_writes_its_own_fields() -> None:
    problems = [problem for name in sources() for problem in written_by_others(name)]
    assert not problems, "\n".join(problems)


def test_what_is_given_is_still_written() -> None:
    gone = set(GIVEN) - set(sources())
    assert not gone
    for name, reasons in GIVEN.items():
        text = (PACKAGE / name).read_text()
        assert all(re.search(rf"\b{each}\b", text) for each in reasons), name


def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    found: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for name in sources():
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((name, node))
    return found


def fields_of(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Names that it has of its own, and names that it uses of itself."""
    has = {each.name for each in node.body if isinstance(each, FUNCTIONS[:2])}
    uses = set()
    for each in ast.walk(node):
        for target in targets(each):
            if isinstance(target, ast.Name) and each in node.body:
                has.add(target.id)
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                has.add(target.attr)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            uses.add(each.attr)
    return has, uses


def test_a_class_is_whole_in_its_file() -> None:
    """No base that uses what only the class below it has, and no `cast("Whole", self)`."""
    by_name, problems = classes(), []
    for name in sources():
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.Call) and re.match(r"cast\(.*, self\)$", ast.unparse(node)):
                problems.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    for name, node in (each for same in by_name.values() for each in same):
        has, uses = fields_of(node)
        bases, above = list(node.bases), {node.name}
        while bases:
            base = ast.unparse(bases.pop()).rpartition(".")[2]
            if base in above:
                continue
            above.add(base)
            for _, parent in by_name.get(base, []):
                has |= fields_of(parent)[0]
                bases += parent.bases
        outside = not above <= by_name.keys() or bool(node.keywords or node.decorator_list)
        missing = sorted(each for each in uses - has if not each.startswith("__"))
        if missing and not outside and (name, node.name) not in DERIVED:
            problems.append(f"{name}:{node.lineno}: {node.name} has no {', '.join(missing)}")
    assert not problems, "\n".join(problems)


def imported(tree: ast.AST) -> set[tuple[str, str]]:
    """Files of the package, and names that are imported from them."""
    return {
        (f"{node.module.partition('.')[2].replace('.', '/')}.py", each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for each in node.names
    }


def test_no_class_is_cut_in_two() -> None:
    """A class of the package that one class of another file extends, and nobody else knows."""
    known: dict[tuple[str, str], set[str]] = {}
    below: dict[tuple[str, str], set[str]] = {}
    for name in sources():
        tree = ast.parse((PACKAGE / name).read_text())
        bases = {
            ast.unparse(base).rpartition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for base in node.bases
        }
        for each in imported(tree):
            known.setdefault(each, set()).add(name)
            if each[1] in bases:
                below.setdefault(each, set()).add(name)
    homes = {(home, name) for name, same in classes().items() for home, _ in same}
    cut = {each[1] for each, files in below.items() if len(files) == 1 and known[each] == files}
    cut &= {name for _, name in homes & below.keys()}
    assert not cut, sorted(cut)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("flight.state = 1", True),
        ("flight.a, self.b = 1, 2", True),
        ("flight.count += 1", True),
        ("setattr(flight, 'a', 1)", True),
        ("self.flight.state = 1", True),
        ("self.state = 1", False),
        ("flight = Flight(); flight.state = 1", False),
        ("record.size = 1", False),
    ],
)
def test_the_check_itself(
    line: str, fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = "@dataclass\nclass Record:\n    size: int\n"
    (tmp_path / "a.py").write_text(
        f"{record}class A:\n    def run(self, flight):\n        {line}\n"
    )
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    assert bool(written_by_others("a.py")) == fault
