"""Old command lines of the bench go on: each program has the options that were recorded."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import pytest

from moe_p2p.__main__ import main
from tests.support.recorded import RECORDED, options_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, kind: str = "all_to_all") -> None:
    if name == "bench":
        main(["bench", f"--api={kind}", "--help"])
    else:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("program", RECORDED["options"])
def test_programs_have_the_options_that_were_recorded(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # programs add to it
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setattr(sys, "argv", [*program.split(), "--help"])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    handler = signal.getsignal(signal.SIGTERM)  # programs set their own
    with pytest.raises(SystemExit) as ended:
        run(*program.split())
    signal.signal(signal.SIGTERM, handler)
    assert ended.value.code == 0
    assert options_of(capsys.readouterr().out) == RECORDED["options"][program]
