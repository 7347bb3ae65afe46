"""Imports of another package give ours, in each of the ways that the docs name."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """program: imports the package as its users do, and prints `printed`."""

    name: str
    program: str
    printed: str


PACKAGES = [
    Installed(
        "deep_ep_v25",
        """
import deep_ep_v25, deep_ep_v25.comm
from deep_ep_v25 import EPBuffer, BufferAllocator, comm, topk_idx_t
from deep_ep_v25.buffers.allocator import BufferAllocator as Plan
from deep_ep_v25.buffers.ep import EPBuffer as Buffer, EPHandle
from deep_ep_v25.utils.event import EventOverlap
from deep_ep_v25.utils.refs import combine
assert (EPBuffer, BufferAllocator, EPHandle) == (Buffer, Plan, deep_ep_v25.EPHandle)
assert EventOverlap is deep_ep_v25.EventOverlap and deep_ep_v25.comm is comm
print(deep_ep_v25.__name__, deep_ep_v25.__version__)
""",
        "moe_p2p.deep_ep_v25 2.5.0\n",
    ),
    Installed(
        "nixl_ep",
        """
import importlib.util
import nixl_ep, nixl_ep.buffer
from nixl_ep.buffer import DEFAULT_TIMEOUT_MS
from nixl_ep.utils import EventOverlap
assert nixl_ep.buffer.Buffer is nixl_ep.Buffer and nixl_ep.EventOverlap is EventOverlap
assert importlib.util.find_spec("nixl_ep") is not None  # as vLLM asks
print(nixl_ep.__name__, DEFAULT_TIMEOUT_MS)
""",
        "moe_p2p.nixl_ep 30000\n",
    ),
]
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@each_package
def test_imports_give_this_package_until_uninstall(
    package: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = importlib.import_module(f"moe_p2p.{package.name}")
    ours.install()
    try:
        ours.install()  # once more does nothing
        exec(package.program, {})
    finally:
        ours.uninstall()
    assert capsys.readouterr().out == package.printed
    assert [name for name in sys.modules if name.partition(".")[0] == package.name] == []
    with pytest.raises(ImportError):
        importlib.import_module(package.name)


@each_package
@pytest.mark.parametrize("way", ["environment", "path", "launcher"])
def test_a_program_finds_it(way: str, package: Installed, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(package.program)
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if way == "path":
        folders.insert(0, str(importlib.import_module(f"moe_p2p.{package.name}.installation").PATH))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
    if way == "environment":
        environment[f"MOE_P2P_AS_{package.name.upper()}"] = "1"
        text = f"import moe_p2p\n{package.program}"
        ran = warm.without_moe_p2p().run("-c", text, env=environment, **options)
    elif way == "path":
        ran = warm.without_moe_p2p().run(str(program), env=environment, **options)
    else:
        ran = warm.run("-m", f"moe_p2p.{package.name}", str(program), env=environment, **options)
    assert ran.stdout == package.printed, ran.stderr
