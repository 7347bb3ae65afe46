"""`python -m moe_p2p compile`: what it puts into a folder is what an AllToAll opens later."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import AllToAllConfig, env
from moe_p2p.__main__ import main
from moe_p2p.machine import jit
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.prepared import usual_calls
from moe_p2p.moe.gpu.shape_macros import shape_macros

SMALL = ["--experts", "8", "--hidden", "256", "--topk", "2", "--ranks", "4", "--tokens", "16"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOE_P2P_KERNELS", raising=False)
    monkeypatch.setattr(env, "_one_folder", False)


def _opened(config: AllToAllConfig, monkeypatch: pytest.MonkeyPatch) -> list[kernels.Kernel]:
    """The kernels that a communicator of 4 ranks opens when it is made."""
    opened, lock = [], threading.Lock()
    side = object.__new__(kernels.DeviceSide)
    side._shape = shape_macros(config, world_size=4, ranks_per_node=4)
    side._num_sms, side._ready = config.num_sms, set()

    def note(kernel: kernels.Kernel) -> None:
        with lock:
            opened.append(kernel)

    monkeypatch.setattr(side, "_open", note)
    for kind in ("dispatch", "combine"):
        monkeypatch.setattr(side, f"prepare_{kind}", lambda *_: None)
    side.prepare(*usual_calls(config))
    return opened


def test_a_new_communicator_finds_all_that_was_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.bindings")
    log = "Compiling entry function 'k'\n0 bytes stack frame, 0 bytes spill stores, 8 bytes spill "
    log += "loads\nUsed 40 registers"
    monkeypatch.setattr(jit, "_compile", lambda *_: (b"cubin", log))
    prepared = tmp_path / "prepared"
    assert main(["compile", *SMALL, "--into", str(prepared), "--arch", "sm_90a"]) == 0
    printed = capsys.readouterr().out
    assert "6 kernels for sm_90a" in printed
    assert (
        printed.count("step of    16 tokens") == printed.count("40 registers,    8 B spilled") == 6
    )
    monkeypatch.setenv("MOE_P2P_KERNELS", str(prepared))
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "empty"))
    sizes: dict[str, Any] = {"num_experts": 8, "hidden_dim": 256, "topk": 2, "max_tokens": 16}
    opened = _opened(AllToAllConfig(**sizes), monkeypatch)
    assert len(opened) == 6
    for kernel in opened:
        assert jit.is_compiled(kernel.source, kernel.macros, "sm_90a")
    other = _opened(AllToAllConfig(**sizes | {"topk": 4}), monkeypatch)
    assert not any(jit.is_compiled(each.source, each.macros, "sm_90a") for each in other)


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--experts", "8"]) == 2
    assert "give --model, or --experts, --hidden and --topk" in capsys.readouterr().out
    assert main(["compile", *SMALL, "--topk", "9"]) == 2
    assert "topk" in capsys.readouterr().out
    assert main(["compile", *SMALL, "--jobs", "0"]) == 2
    assert "--jobs is 0, must be above 0" in capsys.readouterr().out
    for wrong in (["--model", "gpt-2"], ["--tokens", "8,x"]):
        with pytest.raises(SystemExit):
            main(["compile", *wrong])
    assert "'8,x' is not a number, or several with commas" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = jit.Usage(32, 0, 0, 0, 0)
    compiled = jit.Compiled(b"", "", "sm_90a", cached=False)
    monkeypatch.setattr(jit.Compiled, "usage", {"dispatch": usage})
    monkeypatch.setattr(jit, "compile_only", lambda *_: compiled)
    (tmp_path / "file").touch()
    assert main(["compile", *SMALL, "--into", str(tmp_path / "file")]) == 1
    assert "NOT KEPT" in capsys.readouterr().out
    assert env.cache_folder() == tmp_path / "file"
