"""Every fact about torch that direct calls rely on: without it, calls go through their ops.

moe_p2p/moe/direct.py finds and verifies the facts. Here torch is another one in each of them.
"""

from __future__ import annotations

import ast
import ctypes
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p.moe import direct
from moe_p2p.moe.dispatched import OBJECTS
from tests.support import warm

pytestmark = pytest.mark.skipif(direct.FACTS is None, reason="this torch has no direct calls")

Patch = pytest.MonkeyPatch
_word, _thread_keys, _key_set = direct._word, direct._thread_keys, direct._key_set


def named(name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(direct, name, value)


def with_function(name: str, function: Callable[..., Any]) -> Callable[[Patch], None]:
    """A torch whose function of that name does something else."""
    functions: dict[str, Any] = {
        each: ctypes.PyDLL(torch._C.__file__)[each]
        for each in (
            direct._WRAP,
            direct._OBSERVED,
            direct._IN_FUNCTION_MODE,
            direct._REQUIRES_GRAD,
        )
    }
    functions[name] = function
    return lambda patch: patch.setattr(ctypes, "PyDLL", lambda _: functions)


def other_type(patch: Patch) -> None:
    probes = list(direct._probes())
    types = {id(each) + direct._HEAD - 8 for each in probes}
    patch.setattr(direct, "_probes", lambda: iter(probes))
    patch.setattr(direct, "_word", lambda at: _word(at) + (at in types))


def probes_with(at: int, tensor: Callable[[], Tensor]) -> Callable[[Patch], None]:
    real = direct._probes

    def probes() -> Iterator[Tensor]:
        for i, each in enumerate(real()):
            yield tensor() if i == at else each

    return named("_probes", probes)


def without_trace(seen: Callable[[], bool]) -> Callable[[Patch], None]:
    """A torch whose threads show other modes than these elsewhere."""
    return named("_thread_keys", lambda: _thread_keys() if seen() else (0, 0))


def never_ends(patch: Patch) -> None:
    patch.setattr(direct, "_DEADLINE_S", 0.01)
    patch.setattr(direct, "_facts", threading.Event().wait)


def meta() -> Tensor:
    return torch.empty(2, device="meta")


def plain() -> Tensor:
    return torch.empty(2, device="cpu")


in_inference = torch.is_inference_mode_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
MISSING = "_Z_nothing"
WRONG: list[tuple[str, Callable[[Patch], None]]] = [
    # Objects of tensors.
    ("a tensor's object does not begin with it", named("_HEAD", direct._HEAD + 8)),
    ("a tensor's object does not begin with it", named("_HEAD", 1 << 12)),
    ("an object's type is not where it was", other_type),
    ("a handle of torch's C functions is no at::Tensor", named("_DATA", "aoti_torch_get_numel")),
    ("a tensor's object is not found again", with_function(direct._WRAP, lambda _: None)),
    (
        "a found object is not a new reference",
        named("_references", lambda _: object()),
    ),
    ("undefined symbol", named("_DATA", MISSING)),
    ("undefined symbol", named("_WRAP", MISSING)),
    # Which tensors are nothing but memory.
    (
        "dispatch keys of tensors are found at [], not at one place",
        named("_keys", lambda _: 0x1234567812345678),
    ),
    (
        "a plain tensor has a key that is not known here",
        named("_key_set", lambda *names: _key_set(*names[:-2])),
    ),
    ("a parameter is not a plain tensor", probes_with(2, meta)),
    ("any tensor is plain", probes_with(4, plain)),
    (
        "which tensors require grad is not found",
        with_function(direct._REQUIRES_GRAD, lambda _: False),
    ),
    ("undefined symbol", named("_REQUIRES_GRAD", MISSING)),
    # Who watches a thread's calls. test_direct_calls.py has more of them.
    ("a new thread is in a mode of torch", named("_thread_keys", lambda: (1, 0))),
    ("inference_mode leaves no trace", without_trace(lambda: False)),
    ("TorchDispatchMode leaves no trace", without_trace(in_inference)),
    ("autocast leaves no trace", without_trace(lambda: in_inference() or dispatch_modes() > 0)),
    (
        "a mode of torch's functions is not seen",
        with_function(direct._IN_FUNCTION_MODE, lambda: False),
    ),
    ("undefined symbol", named("_THREAD_KEYS", MISSING)),
    ("undefined symbol", named("_IN_FUNCTION_MODE", MISSING)),
    ("undefined symbol", named("_OBSERVED", MISSING)),
    # Who looks at them.
    ("looking at torch took more than 0.01 s", never_ends),
    ("MOE_P2P_DIRECT is 0", lambda patch: patch.setenv("MOE_P2P_DIRECT", "0")),
]


@pytest.mark.parametrize(("text", "break_it"), WRONG)
def test_without_one_of_them_calls_go_through_their_ops(
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    text: str,
    break_it: Callable[[Patch], None],
) -> None:
    caplog.set_level(logging.DEBUG, "moe_p2p")
    with monkeypatch.context() as patch:
        break_it(patch)
        found = direct.find_facts()
    assert found is None
    assert "calls go through torch's dispatcher" in caplog.text
    assert text in caplog.text
    monkeypatch.setattr(direct, "FACTS", found)
    assert direct.call_of("dispatch", *OBJECTS) is direct.none


def test_this_names_all_that_are_required() -> None:
    """Each _require of moe_p2p/moe/direct.py."""
    tree = ast.parse(Path(direct.__file__).read_text())
    texts = []
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "_require":
            text = call.args[1]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            texts.append(
                "".join(
                    re.escape(each.value) if isinstance(each, ast.Constant) else ".+"
                    for each in parts
                )
            )
    assert len(texts) > 10
    named_here = [text for text, _ in WRONG]
    assert [text for text in texts if not any(re.fullmatch(text, n) for n in named_here)] == []


# --- importing ---

PAIR = """
import torch, torch.distributed as dist
from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.moe import bare, direct
ops = torch.ops.moe_p2p
config = AllToAllConfig(num_experts=2, hidden_dim=16, topk=1, max_tokens=2, dtype=torch.float32)
with AllToAll(dist.HashStore(), config, rank=0, world_size=1) as comm, torch.no_grad():
    x = torch.ones(2, 16)
    received = comm.dispatch(x, torch.tensor([[0], [1]]))
    assert torch.equal(comm.combine(received.x, received), x)
"""
ARE_OPS = """
assert direct.FACTS is None
assert bare._DISPATCH is bare._COMBINE is direct.none
"""
IN_MODE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with {}:
    import moe_p2p
from moe_p2p.moe import direct
assert direct.FACTS is not None
"""
REFUSED = """
def refuse(*_):
    raise AssertionError("an op was called")

torch.ops.moe_p2p.dispatch_inference.default._op = refuse
torch.ops.moe_p2p.combine_inference.default._op = refuse
"""


@pytest.mark.parametrize(
    "mode", ["FakeTensorMode()", "torch.inference_mode()", "torch.device('meta')"]
)
def test_a_pair_is_direct_where_the_first_import_was_in_a_mode(mode: str) -> None:
    """As of an engine that imports the package while it makes a model."""
    program = IN_MODE.format(mode) + REFUSED + PAIR
    warm.without_moe_p2p().run("-c", program, check=True, timeout=250)


@pytest.mark.parametrize("without", ["facts", "leave"])
def test_without_them_calls_are_as_before(without: str, monkeypatch: Patch) -> None:
    program = PAIR + ARE_OPS
    if without == "facts":
        program = "import torch\ntorch._C._dispatch_keys = None\n" + program
    else:
        monkeypatch.setenv("MOE_P2P_DIRECT", "0")
    warm.without_moe_p2p().run("-c", program, check=True, timeout=250)


def test_modes_of_who_asks_do_not_matter() -> None:
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
        assert direct.find_facts() == direct.FACTS
