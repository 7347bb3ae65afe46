"""`import deep_ep_v25` gives moe_p2p.deep_ep_v25, in each of the ways that the docs name."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import deep_ep_v25
from moe_p2p.deep_ep_v25 import installation
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import deep_ep_v25, deep_ep_v25.comm
from deep_ep_v25 import EPBuffer, BufferAllocator, comm, topk_idx_t
from deep_ep_v25.buffers.allocator import BufferAllocator as Plan
from deep_ep_v25.buffers.ep import EPBuffer as Buffer, EPHandle
from deep_ep_v25.utils.event import EventOverlap
from deep_ep_v25.utils.refs import combine
assert (EPBuffer, BufferAllocator, EPHandle) == (Buffer, Plan, deep_ep_v25.EPHandle)
assert EventOverlap is deep_ep_v25.EventOverlap and deep_ep_v25.comm is comm
print(deep_ep_v25.__name__, deep_ep_v25.__version__)
"""
PRINTED = "moe_p2p.deep_ep_v25 2.5.0\n"


def test_imports_give_this_package_until_uninstall(capsys: pytest.CaptureFixture[str]) -> None:
    deep_ep_v25.install()
    try:
        deep_ep_v25.install()  # once more does nothing
        exec(PROGRAM, {})
    finally:
        deep_ep_v25.uninstall()
    assert capsys.readouterr().out == PRINTED
    assert [name for name in sys.modules if name.partition(".")[0] == "deep_ep_v25"] == []
    with pytest.raises(ImportError):
        importlib.import_module("deep_ep_v25")


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
        environment["MOE_P2P_AS_DEEP_EP_V25"] = "1"
        text = f"import moe_p2p\n{PROGRAM}"
        ran = warm.without_moe_p2p().run("-c", text, env=environment, **options)
    elif way == "path":
        ran = warm.without_moe_p2p().run(str(program), env=environment, **options)
    else:
        ran = warm.run("-m", "moe_p2p.deep_ep_v25", str(program), env=environment, **options)
    assert ran.stdout == PRINTED, ran.stderr
