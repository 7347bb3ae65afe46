"""Integrations where the other project is not installed."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_p2p import InvalidArgumentError
from moe_p2p.integrations import provide_deep_ep
from moe_p2p.integrations.moe import sglang_eplb, vllm_eplb
from moe_p2p.moe.row_counts import SizeExchange
from tests.support.cases import make
from tests.support.ranks import Rank


@pytest.mark.parametrize("project", ["vllm", "sglang", "megatron"])
def test_without_the_project_it_imports_and_names_what_is_missing(
    project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == project]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, project, None)  # importlib then finds nothing
    module = importlib.import_module(f"moe_p2p.integrations.moe.{project}")
    with pytest.raises(ImportError, match=rf"integrations needs {project}\S* for {project}"):
        module.install()
    assert "deep_ep" not in sys.modules


def test_sizes_of_experts_in_any_order_are_refused() -> None:
    alone = Rank(0, 1, dist.HashStore())
    with make(alone, num_experts=4, expert_rank=[0, 0, 0, 0]) as comm:
        idx = torch.zeros(3, 2, dtype=torch.int64)
        with pytest.raises(InvalidArgumentError, match="has expert_rank: count rows"):
            SizeExchange().ask(comm, idx)
    alone = Rank(0, 1, dist.HashStore())
    with make(alone, num_experts=4) as comm:
        assert SizeExchange().ask(comm, idx).counts.tolist() == [6, 0, 0, 0]


@pytest.mark.parametrize(
    ("group", "variable", "installs"),
    [
        ("vllm.general_plugins", "MOE_P2P_ENGINES", True),
        ("vllm.general_plugins", "NONE", False),
        ("sglang.srt.plugins", "MOE_P2P_ENGINES", True),
        ("sglang.srt.plugins", "MOE_P2P_AS_DEEP_EP", False),
    ],
)
def test_plugins_install_when_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, group: str, variable: str, installs: bool
) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.search(rf'"{re.escape(group)}"\]\s+\w+ = "(.+):(.+)"', text)
    assert found is not None
    module, installed = importlib.import_module(found[1]), list[bool]()
    monkeypatch.setattr(module, "install", lambda: installed.append(True))
    for name in ("MOE_P2P_ENGINES", "MOE_P2P_AS_DEEP_EP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    getattr(module, found[2])()
    assert installed == [True] * installs


@pytest.mark.parametrize(
    ("project", "name"), [("vllm", "vLLM"), ("sglang", "SGLang"), ("megatron", "Megatron")]
)
def test_an_engine_that_takes_our_classes_says_so(
    project: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In the line that docs/doors.md tells users to look for."""
    module = importlib.import_module(f"moe_p2p.integrations.moe.{project}")
    nothing = {"required": None, "put": None, "provide_deep_ep": None, "optional": None}
    classes = {"manager_classes": (0, 0), "prepare_and_finalize_classes": (0, 0)}
    for patched, value in {**nothing, **classes, "manager_class": 0, "dispatcher_class": 0}.items():
        if hasattr(module, patched):
            monkeypatch.setattr(module, patched, lambda *_, value=value: value)
    for eplb in (vllm_eplb, sglang_eplb):
        monkeypatch.setattr(eplb, "install", lambda: None)
    monkeypatch.setenv("MOE_P2P_LOG", "info")
    module.install()
    text = f"{name}: what DeepEP does is moe_p2p's"
    assert re.search(rf"^moe_p2p info .* {text}$", capfd.readouterr().err, re.MULTILINE)
    assert text in (Path(__file__).parents[2] / "docs/doors.md").read_text()


def test_a_deep_ep_that_was_imported_before_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("deep_ep")
    real.__file__ = "/site-packages/deep_ep/__init__.py"
    monkeypatch.setitem(sys.modules, "deep_ep", real)
    provide_deep_ep()
    assert sys.modules["deep_ep"] is real
