"""Integrations where the other project is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("project", ["vllm", "sglang", "megatron"])
def test_without_the_project_it_imports_and_says_what_is_missing(
    project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == project]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, project, None)  # importlib then finds nothing
    module = importlib.import_module(f"moe_p2p.integrations.{project}")
    with pytest.raises(ImportError, match=rf"integrations\.{project} needs {project}"):
        module.install()
    assert "deep_ep" not in sys.modules
