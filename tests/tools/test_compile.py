"""`python -m moe_p2p compile`: what it puts into a folder is what an AllToAll opens later."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_p2p import AllToAllConfig, env
from moe_p2p.__main__ import main
from moe_p2p.machine import jit
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.prepared import usual_calls
from moe_p2p.moe.gpu.shape_macros import of_changing, shape_macros

SMALL = ["--experts", "8", "--hidden", "256", "--topk", "2", "--ranks", "4", "--tokens", "16"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOE_P2P_KERNELS", raising=False)
    monkeypatch.setattr(env, "_one_folder", False)


def _opened(
    config: AllToAllConfig, monkeypatch: pytest.MonkeyPatch, elastic: bool = False
) -> list[kernels.Kernel]:
    """The kernels that a communicator of 4 ranks opens when it is made."""
    opened, lock = [], threading.Lock()
    side = object.__new__(kernels.DeviceSide)
    side._shape = shape_macros(config, world_size=4, ranks_per_node=4)
    side._shape |= of_changing(config) if elastic else {}
    side._num_sms, side._ready, side._changes = config.num_sms, set(), elastic
    side.masks = torch.zeros(4) if elastic or config.mask_lost_ranks else None

    def note(kernel: kernels.Kernel) -> int:
        with lock:
            opened.append(kernel)
        return 0

    monkeypatch.setattr(kernels.DeviceSide, "_num_nodes", 1)
    for name in ("_open", "_load"):
        monkeypatch.setattr(side, name, note)
    for name in ("call", "of_arrivals"):
        monkeypatch.setattr(kernels, name, lambda *_: {})
    for name in ("prepare_dispatch", "prepare_combine", "_wait"):
        monkeypatch.setattr(side, name, lambda *_: None)
    side.begin(SimpleNamespace(comm=1))  # type: ignore[arg-type]
    side.prepare_clean()
    side.prepare(*usual_calls(config))
    return opened


WORLDS = (  # arguments, fields of the configuration, kernels
    ([], {}, 6),
    (["--masks"], {"mask_lost_ranks": True}, 7),
    (["--masks", "--lost", "poison"], {"mask_lost_ranks": True, "lost": "poison"}, 8),
    (["--elastic"], {}, 7),
    (["--elastic", "--masks"], {"mask_lost_ranks": True}, 7),
    (["--elastic", "--masks", "--lost", "drop"], {"mask_lost_ranks": True, "lost": "drop"}, 7),
)


@pytest.mark.parametrize(("arguments", "fields", "count"), WORLDS, ids=str)
def test_a_new_communicator_finds_all_that_was_compiled_ahead(
    arguments: list[str],
    fields: dict[str, Any],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("cuda.bindings")
    log = "Compiling entry function 'k'\n0 bytes stack frame, 0 bytes spill stores, 8 bytes spill "
    log += "loads\nUsed 40 registers"
    monkeypatch.setattr(jit, "_compile", lambda *_: (b"cubin", log))
    prepared = tmp_path / "prepared"
    into = ["--into", str(prepared), "--arch", "sm_90a"]
    assert main(["compile", *SMALL, *arguments, *into]) == 0
    printed = capsys.readouterr().out
    assert f"{count} kernels for sm_90a" in printed
    assert printed.count("40 registers,    8 B spilled") == count
    assert printed.count("step of    16 tokens") >= 6
    monkeypatch.setenv("MOE_P2P_KERNELS", str(prepared))
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "empty"))
    sizes: dict[str, Any] = {"num_experts": 8, "hidden_dim": 256, "topk": 2, "max_tokens": 16}
    elastic = "--elastic" in arguments
    opened = _opened(AllToAllConfig(**sizes, **fields), monkeypatch, elastic)
    assert len(opened) == count
    for kernel in opened:
        assert jit.is_compiled(kernel.source, kernel.macros, "sm_90a")
    for other in (
        _opened(AllToAllConfig(**sizes | {"topk": 4}, **fields), monkeypatch, elastic),
        _opened(AllToAllConfig(**sizes, **fields), monkeypatch, not elastic),
    ):
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
