"""Which suites of what `make test` leaves out run for a change (tests/changed.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import changed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("start", changed.SUITES)
def test_the_table_names_what_is_there(start: str) -> None:
    assert list(ROOT.glob(f"{start.rstrip('/')}*")), "nothing has this path any more"
    for suite in changed.SUITES[start]:
        assert list((ROOT / "tests").glob(f"{suite.rstrip('/')}*")), suite


def test_each_room_has_suites() -> None:
    rooms = [folder for part in ("csrc", "kernels", "moe_p2p", "tests/emulation", "tests/engines")
             for folder in ((ROOT / part), *(ROOT / part).iterdir())
             if folder.is_dir() and not folder.name.startswith("__")]  # fmt: skip
    assert len(rooms) > 20
    for room in rooms:
        assert changed.suites([f"{room.relative_to(ROOT).as_posix()}/some.py"]), room


@pytest.mark.parametrize(
    ("path", "runs", "leaves"),
    [
        ("kernels/dispatch/send.cuh", "gpu/test_emulated_gpu.py gpu/test_jit.py", "kv/ fleet/"),
        ("csrc/moe/ledger.cpp", "package/test_cpp.py deep_ep/", "gpu/ kv/"),
        ("csrc/engine/request.cpp", "package/test_cpp.py kv/ weights/", "gpu/ machine/"),
        (
            "csrc/provider/verbs/peers.cpp",
            "package/test_cpp.py engine/test_rdma.py",
            "gpu/ weights/",
        ),
        ("moe_p2p/engine/engine.py", "engine/ kv/ weights/ mooncake/", "gpu/"),
        ("moe_p2p/kv/sender.py", "kv/ engines/test_sglang_kv.py", "moe/ weights/ gpu/"),
        ("moe_p2p/weights/trainer.py", "weights/ engines/test_verl_weights.py", "moe/ kv/ gpu/"),
        ("moe_p2p/deep_ep/buffer.py", "deep_ep/ engines/test_deep_ep_package.py", "kv/ gpu/"),
        ("moe_p2p/integrations/kv/vllm.py", "engines/test_vllm_kv.py", "kv/ gpu/"),
        ("tests/engines/vllm_kv_scenarios.py", "engines/test_vllm_kv.py", "kv/ gpu/"),
        ("tests/support/kv_world.py", "kv/", "weights/ gpu/"),
        ("tests/support/weights_killed.py", "weights/test_weights_killed.py", "kv/ gpu/"),
        ("tests/support/emulated_gpu.py", "gpu/test_emulated_gpu.py", "kv/ weights/"),
        ("docs/kv.md", "", "kv/ gpu/ package/"),
    ],
)
def test_what_changed_runs_whole(path: str, runs: str, leaves: str) -> None:
    found = tuple(changed.suites([path]))
    for suite in runs.split():
        assert suite.startswith(found), suite
    for suite in leaves.split():
        assert not any(suite.startswith(each) or each.startswith(suite) for each in found), suite


def test_faults_of_kernels_run_where_a_kernel_changed() -> None:
    command = [sys.executable, "-m", "tests.kernel_mutations", "--since", "0123"]
    assert changed.steps(["kernels/clean.cu"], "0123")[-1].command == command
    assert len(changed.steps(["moe_p2p/kv/sender.py"], "0123")) == 2  # engines' files first
    (tests,) = changed.steps(["docs/kv.md"], "0123")
    assert f"--fifth={changed.fifth()}" in tests.command


def test_since_when_is_the_callers_or_the_last_green_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head = changed._git("rev-parse", "HEAD")
    if not head:
        pytest.skip("no history of git here")
    monkeypatch.setenv("BASE", "HEAD")
    assert changed.base() == head
    monkeypatch.delenv("BASE")
    monkeypatch.setattr(changed, "GREEN", tmp_path / "green")
    changed.GREEN.write_text(f"{head} passed make test-all\n")
    assert changed.base() == head
    assert changed.files(head) is not None
    changed.GREEN.write_text("0123456789 passed make test-all\n")  # git does not know it
    assert changed.base() not in ("", "0123456789")
    assert changed.files("") is None
