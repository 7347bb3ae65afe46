"""`import nixl_ep` gives moe_p2p.nixl_ep, in each of the ways that docs/nixl_ep.md names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import nixl_ep
from moe_p2p.nixl_ep import installation
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib.util
import nixl_ep, nixl_ep.buffer
from nixl_ep.buffer import DEFAULT_TIMEOUT_MS
from nixl_ep.utils import EventOverlap
assert nixl_ep.buffer.Buffer is nixl_ep.Buffer and nixl_ep.EventOverlap is EventOverlap
assert importlib.util.find_spec("nixl_ep") is not None  # as vLLM asks
print(nixl_ep.__name__, DEFAULT_TIMEOUT_MS)
"""


def test_imports_give_this_package_until_uninstall(capsys: pytest.CaptureFixture[str]) -> None:
    nixl_ep.install()
    try:
        nixl_ep.install()  # once more does nothing
        exec(PROGRAM, {})
    finally:
        nixl_ep.uninstall()
    assert capsys.readouterr().out == "moe_p2p.nixl_ep 30000\n"
    assert [name for name in sys.modules if name.partition(".")[0] == "nixl_ep"] == []
    with pytest.raises(ImportError):
        importlib.import_module("nixl_ep")


@pytest.mark.parametrize("way", ["environment", "path", "launcher"])
def test_a_program_finds_it(way: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if way == "path":
        folders.insert(0, str(installation.PATH))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
    if way == "environment":
        environment["MOE_P2P_AS_NIXL_EP"] = "1"
        text = f"import moe_p2p\n{PROGRAM}"
        ran = warm.without_moe_p2p().run("-c", text, env=environment, **options)
    elif way == "path":
        ran = warm.without_moe_p2p().run(str(program), env=environment, **options)
    else:
        ran = warm.run("-m", "moe_p2p.nixl_ep", str(program), env=environment, **options)
    assert ran.stdout == "moe_p2p.nixl_ep 30000\n", ran.stderr
