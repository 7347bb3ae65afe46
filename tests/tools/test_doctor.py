"""`python -m moe_p2p doctor`: what it finds on fake machines, what it calls a problem, its end."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_p2p.machine import transport
from moe_p2p.tools.doctor import command, examine, judge
from moe_p2p.tools.doctor import text as doctor_text
from moe_p2p.tools.doctor.report import CpuFacts, GpuFacts, Report, Write
from tests.support import machines, warm
from tests.support.machines import Machine

UNLIMITED = -1


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "load_problem", lambda provider: "")
    for name in ("MOE_P2P_TRANSPORT", "MOE_P2P_TRANSPORT_SETTINGS", "MOE_P2P_NICS"):
        monkeypatch.delenv(name, raising=False)


def healthy(root: Path, **changes: Any) -> Report:
    """The report of a fake machine that has all software and limits, then `changes`."""
    found = examine.examine(root, writes=False)
    found = dataclasses.replace(
        found,
        cpu=CpuFacts(192, 192, 0.0, [], "tsc"),  # as few as this machine has are a problem
        loader={"libnccl-net.so": "/usr/lib/libnccl-net.so"},
        python3={},
        machine={**found.machine, "driver": "580.82.07"},
        libraries=dict.fromkeys(found.libraries, "2.1 /usr/lib/libx.so.2.1"),
        packages=dict.fromkeys(found.packages, "1.2"),
        memlock_bytes=UNLIMITED,
        shm_bytes=1 << 34,
        peer_memory=True,
        torch_cuda=True,
    )
    return dataclasses.replace(found, **changes)


def with_dma_buf(report: Report, dma_buf: bool | None) -> Report:
    gpus: list[GpuFacts] = [
        dataclasses.replace(gpu, dma_buf=dma_buf, writes_ordering=100) for gpu in report.gpus
    ]
    return dataclasses.replace(report, gpus=gpus)


def texts(report: Report) -> list[str]:
    return [f"{problem.what} -> {problem.remedy}" for problem in judge.judge(report)]


def test_a_laptop_is_usable(tmp_path: Path) -> None:
    machines.laptop(tmp_path)
    report = healthy(tmp_path, libraries={"libibverbs": "", "libfabric": "", "libcuda": ""})
    assert report.transport["provider"] == "loopback"
    assert texts(report) == []
    text = doctor_text.render(report)
    assert "no RDMA device" in text
    assert "problems\n  none" in text


def test_p5_prints_gpus_rails_and_the_distance_matrix(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    report = healthy(tmp_path)
    assert texts(report) == []
    assert [len(gpu.rails) for gpu in report.gpus] == [4] * 8
    assert report.distances["0000:53:00.0"]["rdmap79s0"] == "switch"
    assert report.distances["0000:53:00.0"]["rdmap96s0"] == "numa"
    assert report.distances["0000:53:00.0"]["rdmap198s0"] == "far"
    lines = [" ".join(line.split()) for line in doctor_text.render(report).splitlines()]
    model, names = "NVIDIA H100 80GB HBM3", "rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0"
    assert f"GPU0 0000:53:00.0 {model} 0 {names}" in lines
    assert "rdmap79s0 switch numa numa numa far far far far" in lines
    assert any(line.startswith("libfabric: 32 EFA devices") for line in lines)


def test_nics_that_are_not_used_give_the_reason(tmp_path: Path) -> None:
    machines.hgx(tmp_path)
    text = doctor_text.render(healthy(tmp_path))
    assert "not used: port 1 is DOWN" in text
    assert text.count("not used: others are preferred") == 1  # the management NIC, not storage


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shm_bytes": 64 << 20}, "/dev/shm has 64 MiB.*--shm-size=2g"),
        ({"memlock_bytes": 8 << 20}, "8192 KiB of memory may be locked.*ulimit -l unlimited"),
        ({"libraries": {"libibverbs": "", "libfabric": "1", "libcuda": "1"}}, "libibverbs1"),
        ({"torch_cuda": False}, "torch is built without CUDA.*pip install"),
        ({"packages": {"cuda-bindings": "13", "cuda-core": ""}}, r"moe_p2p\[cuda\]"),
        (
            {"writes": [Write("verbs", "mlx5_0", "cuda:0", 0.0, "no key")]},
            "write over verbs mlx5_0 with cuda:0 memory failed: no key",
        ),
    ],
)
def test_each_lack_is_one_problem_with_its_remedy(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    machines.hgx(tmp_path)
    assert texts(healthy(tmp_path)) == []
    found = texts(healthy(tmp_path, **change))
    assert len(found) == 1
    assert re.search(problem, found[0])


def test_efa_without_libfabric_names_the_package(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    libraries = {"libibverbs": "1", "libfabric": "", "libcuda": "1", "libcudart": "1"}
    (found,) = texts(healthy(tmp_path, libraries=libraries))
    assert "EFA devices without libfabric" in found
    assert "EFA installer" in found
    assert "apt-get" not in found  # its libfabric is too old for EFA


def test_efa_wants_a_newer_libfabric_and_a_way_to_gpu_memory(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    healthy_libraries = healthy(tmp_path).libraries
    (found,) = texts(healthy(tmp_path, libraries={**healthy_libraries, "libfabric": "1.17 /lib/x"}))
    assert "libfabric 1.17 is too old for EFA" in found
    without = healthy(tmp_path, libraries={**healthy_libraries, "libcudart": ""})
    (found,) = texts(with_dma_buf(without, False))
    assert "libcudart.so" in found
    assert texts(with_dma_buf(without, True)) == []
    assert texts(with_dma_buf(without, None)) == []


def test_a_gpu_without_driver_is_one_problem(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    libraries = {"libibverbs": "1", "libfabric": "2.1", "libcuda": "", "libcudart": "1"}
    report = healthy(tmp_path, libraries=libraries)
    report.machine["driver"] = ""
    (found,) = texts(report)
    assert found.startswith("8 GPUs without the NVIDIA driver")


def test_dma_buf_is_as_good_as_peer_memory(tmp_path: Path) -> None:
    machines.hgx(tmp_path)
    report = with_dma_buf(healthy(tmp_path, peer_memory=False), True)
    assert texts(report) == []
    assert " owner " in doctor_text.render(report)
    (found,) = texts(with_dma_buf(report, False))
    assert re.search("neither dma-buf nor nvidia_peermem.*modprobe nvidia_peermem", found)


def test_unknown_support_of_dma_buf_is_no_problem(tmp_path: Path) -> None:
    """Without CUDA in torch, or without cuda-bindings, the driver is not asked."""
    machines.hgx(tmp_path)
    report = healthy(tmp_path, peer_memory=False, torch_cuda=False)
    assert [gpu.dma_buf for gpu in report.gpus] == [None] * len(report.gpus)
    (found,) = texts(report)
    assert found.startswith("torch is built without CUDA")


def test_nics_that_are_all_down_are_a_problem(tmp_path: Path) -> None:
    Machine(tmp_path).nic("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0", state="1: DOWN")
    (found,) = texts(healthy(tmp_path))
    assert "no RDMA device can be used: mlx5_0: port 1 is DOWN" in found


def test_a_wrong_name_in_the_environment_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.hgx(tmp_path)
    monkeypatch.setenv("MOE_P2P_NICS", "mlx5_77")
    (found,) = texts(healthy(tmp_path))
    assert "mlx5_77, which is not an RDMA device" in found


def test_a_wrong_transport_in_the_environment_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.hgx(tmp_path)
    monkeypatch.setenv("MOE_P2P_TRANSPORT", "nccl")
    (found,) = texts(healthy(tmp_path))
    assert found == (
        'there is no transport "nccl" (MOE_P2P_TRANSPORT asks for it) -> '
        "correct MOE_P2P_TRANSPORT: libfabric, verbs, loopback"
    )
    monkeypatch.setenv("MOE_P2P_TRANSPORT", "null")
    assert texts(healthy(tmp_path)) == [
        "transport null moves no bytes (MOE_P2P_TRANSPORT asks for it) -> unset MOE_P2P_TRANSPORT"
    ]
    monkeypatch.setenv("MOE_P2P_TRANSPORT", "verbs")
    assert texts(healthy(tmp_path)) == []


def test_versions_of_what_the_kernel_and_the_loader_know(tmp_path: Path) -> None:
    machine = machines.laptop(tmp_path)
    machine.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build",
    )
    assert examine.examine(tmp_path, writes=False).machine["driver"] == "580.82.07"
    assert examine._library(("libnothing.so.9", "libc.so.6")).startswith("6 /")
    assert examine._library(("libnothing.so.9",)) == ""
    assert examine._package("torch")
    assert examine._package("no-such-package") == ""


def test_a_write_that_fails_is_reported_and_not_raised() -> None:
    found = examine._write("quantum", "", "host")
    assert (found.provider, found.gbytes_per_s) == ("quantum", 0.0)
    assert "unknown provider" in found.problem


def test_this_machine_writes_over_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["problems"] else 0)
    first = report["writes"][0]
    assert (first["provider"], first["problem"]) == ("loopback", "")
    assert first["gbytes_per_s"] > 0
    assert report["packages"]["torch"]


def test_the_command_ends_with_1_when_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MIN_SHM_BYTES", 1 << 62)
    assert command.main(["--no-writes"]) == 1


def test_the_command_is_known() -> None:
    run = warm.run(
        *("-m", "moe_p2p", "doctor", "--no-writes"), capture_output=True, text=True, timeout=250
    )
    assert "problems" in run.stdout, run.stderr
    assert run.returncode in (0, 1)


@pytest.mark.parametrize(
    ("changes", "settings", "text"),
    [
        ({"gdrdrv": True}, "", "gdrcopy: GDRCopy is there"),
        ({"gdrdrv": False}, "", "GDRCopy is not used, /dev/gdrdrv is not there"),
        ({"gdrdrv": True, "libraries": {}}, "", "GDRCopy is not used, libgdrapi is not there"),
        ({"gdrdrv": True}, "ordered_writes=1", "gdrcopy"),
        (
            {"transport": {"provider": "verbs", "why": ""}},
            "devices=mlx5_0,ordered_writes=1",
            "write: NICs store flags",
        ),
    ],
)
def test_how_gpus_see_arrivals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    settings: str,
    text: str,
) -> None:
    machines.hgx(tmp_path)
    monkeypatch.setenv("MOE_P2P_TRANSPORT_SETTINGS", settings)
    report = healthy(tmp_path, **{"transport": {"provider": "libfabric", "why": ""}} | changes)
    assert text in doctor_text.arrivals(report)
    shown = dataclasses.replace(report, libraries=dict.fromkeys(report.libraries, "1"))
    assert "arrivals" in doctor_text.render(shown)


def test_without_gpus_nothing_is_said_of_arrivals(tmp_path: Path) -> None:
    machines.laptop(tmp_path)
    assert doctor_text.arrivals(healthy(tmp_path)) == ""


@pytest.mark.parametrize(("status", "text"), [(2, "the kernel keeps"), (0, "ibv_fork_init")])
def test_forks_over_verbs_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, text: str
) -> None:
    machines.hgx(tmp_path)
    library = SimpleNamespace(ibv_is_fork_initialized=lambda: status)
    monkeypatch.setattr(examine, "_library", lambda files: "")
    monkeypatch.setattr(examine.ctypes, "CDLL", lambda name: library)
    assert f"forks            {text}" in doctor_text.render(healthy(tmp_path))


def test_forks_are_not_said_without_libibverbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    machines.laptop(tmp_path)
    monkeypatch.setattr(examine, "_library", lambda files: "")
    monkeypatch.setattr(examine.ctypes, "CDLL", missing)
    assert "forks" not in doctor_text.render(healthy(tmp_path))
