"""`doctor` finds each fault that is planted in a healthy stand-in, and names what mends it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_p2p.tools.doctor import judge, surroundings
from moe_p2p.tools.doctor import text as doctor_text
from tests.support import job_hosts
from tests.support.job_hosts import JobHost

_CPU = "sys/devices/system/cpu"
_CLOCK = "sys/devices/system/clocksource/clocksource0"
_CGROUP = "sys/fs/cgroup/cpu,cpuacct/job"
_FIRST = "sys/class/infiniband/mlx5_0"
_GPU = "0000:1b:00.0"


class Fault(NamedTuple):
    name: str
    plant: Callable[[JobHost], Any]
    what: str
    remedy: str


def _write(path: str, text: str) -> Callable[[JobHost], Any]:
    return lambda host: host.machine.write(path, text)


def _set(**fields: Any) -> Callable[[JobHost], Any]:
    return lambda host: [setattr(host, name, value) for name, value in fields.items()]


def _export(name: str, value: str) -> Callable[[JobHost], Any]:
    return lambda host: host.variables.__setitem__(name, value)


def _lacks(library: str) -> Callable[[JobHost], Any]:
    return lambda host: host.libraries.__setitem__(library, "")


def _gpu(**fields: str) -> Callable[[JobHost], Any]:
    return lambda host: host.gpus[_GPU].update(fields)


def _no_driver(host: JobHost) -> None:
    (host.root / "proc/driver/nvidia/version").unlink()
    host.libraries["libcuda"] = ""


def _no_gpu_direct(host: JobHost) -> None:
    for path in ("version", ""):
        target = host.root / "sys/module/nvidia_peermem" / path
        target.unlink() if path else target.rmdir()
    host.attributes["DMA_BUF_SUPPORTED"] = 0


def _old_verbs(host: JobHost) -> None:
    _no_gpu_direct(host)
    host.attributes["DMA_BUF_SUPPORTED"], host.dma_buf_verbs = 1, False


def _acs(host: JobHost) -> None:
    pci = "0000:17:02.0"
    config = host.root / "sys/bus/pci/devices" / pci / "config"
    data = bytearray(config.read_bytes())
    data[0x14E] = 0x1D  # source validation, request and completion redirect, upstream forwarding
    config.write_bytes(bytes(data))


def _no_guard(host: JobHost) -> None:
    host.pfc["rail0"] = ""
    for end in ("np", "rp"):
        host.machine.write(f"sys/class/net/rail0/ecn/roce_{end}/enable/3", "0")


def _no_address(host: JobHost) -> None:
    host.machine.write(f"{_FIRST}/ports/1/gid_attrs/types/0", "IB/RoCE v1")


def _far(host: JobHost) -> None:
    """The NICs of the first socket are gone."""
    for number in range(4):
        (host.root / f"sys/class/infiniband/mlx5_{number}").unlink()


def _other_python(host: JobHost) -> None:
    said = '{"prefix": "/usr", "has": ["sglang"]}'
    host.command("python3", f"[ \"$1\" = -c ] || exit 2\necho '{said}'")


def _old_python(host: JobHost) -> None:
    said = '{"prefix": "/usr", "has": ["sglang", "moe_p2p 0.0.9"]}'
    host.command("python3", f"[ \"$1\" = -c ] || exit 2\necho '{said}'")


def _no_plugin(host: JobHost) -> None:
    del host.loader["libnccl-net.so"]


def _quota_of_version_1(host: JobHost) -> None:
    host.machine.write("proc/self/cgroup", "4:cpu,cpuacct:/job")
    host.machine.write(f"{_CGROUP}/cpu.cfs_quota_us", "50000")
    host.machine.write(f"{_CGROUP}/cpu.cfs_period_us", "100000")


def _imports(**found: str) -> Callable[[JobHost], Any]:
    return lambda host: host.imports.update(
        {name.replace("__", "."): file for name, file in found.items()}
    )


def _shadowed(host: JobHost) -> None:
    host.imports["deep_ep"] = "/usr/lib/python3/dist-packages/deep_ep/__init__.py"
    host.variables["MOE_P2P_AS_DEEP_EP"] = "1"


ROCE = (
    Fault("small shm", _set(shm=64 << 20), "/dev/shm has 64 MiB", "--shm-size=2g"),
    Fault("full shm", _set(shm_free=5 << 20), "/dev/shm is full: 5 of 65536 MiB", "rm what no"),
    Fault("memlock", lambda host: host.limit_memory("8388608"), "8192 KiB of memory may be locked",
          "ulimit -l unlimited"),
    Fault("clock", _write(f"{_CLOCK}/current_clocksource", "hpet"),
          "the kernel's clock is hpet", "echo tsc >"),
    Fault("governor", _write(f"{_CPU}/cpu1/cpufreq/scaling_governor", "powersave"),
          r"governor powersave", "cpupower frequency-set --governor performance"),
    Fault("affinity", _write("proc/self/status", "Cpus_allowed_list:\t0,96"),
          "2 of 192 CPUs may be used.*8 ranks", "srun --cpus-per-task"),
    Fault("quota", _write("sys/fs/cgroup/system.slice/cpu.max", "400000 100000"),
          "after 4 CPUs' time", "docker run --cpus=16"),
    Fault("quota of version 1", _quota_of_version_1, "after 0.5 CPUs' time", "limits.cpu: 16"),
    Fault("NIC's slot", _write(f"{_FIRST}/device/current_link_width", "8"),
          r"mlx5_0: PCIe carries 252 Gbit/s \(32.0 GT/s x8\) to a port of 400",
          "lspci -vvs 0000:18"),
    Fault("GPU's lanes", _write(f"sys/bus/pci/devices/{_GPU}/current_link_width", "8"),
          f"GPU {_GPU} has 8 PCIe lanes of 16", f"lspci -vvs {_GPU}"),
    Fault("IOMMU", _write(f"sys/kernel/iommu_groups/{_GPU}/type", "DMA-FQ"),
          f"the IOMMU translates addresses of {_GPU}", "iommu=pt"),
    Fault("ACS", _acs, "ACS of 0000:17:02.0 sends", r"setpci -s \$b ECAP_ACS\+6.w=0000"),
    Fault("heat", _gpu(slowdown="Active"), f"GPU {_GPU} is slowed down .hw_thermal_slowdown",
          f"nvidia-smi -i {_GPU} -q -d PERFORMANCE"),
    Fault("power", _gpu(current_power_limit="500.00 W"), "limited to 500 W of 700",
          f"nvidia-smi -i {_GPU} -pl 700"),
    Fault("NVSwitch", _gpu(fabric="<state>In Progress</state>"), f"NVSwitch of {_GPU}: In Progress",
          "systemctl restart nvidia-fabricmanager"),
    Fault("MTU", _write("sys/class/net/rail0/mtu", "1500"), "mlx5_0: MTU 1500 of",
          "ip link set dev rail0 mtu 9000"),
    Fault("no PFC, no ECN", _no_guard, "mlx5_0: neither PFC nor ECN", "mlnx_qos -i rail0"),
    Fault("traffic class", _write(f"{_FIRST}/tc/1/traffic_class", ""),
          "mlx5_0: writes travel in traffic class 0, priority 0, .* priority 3 alone",
          "MOE_P2P_TRANSPORT_SETTINGS=traffic_class=104"),
    Fault("port", _write(f"{_FIRST}/ports/1/state", "1: DOWN"),
          f"GPU {_GPU} cannot use NICs beside it: mlx5_0: port 1 is DOWN",
          "ip link set dev rail0 up"),
    Fault("no GID", _no_address, "mlx5_0: port 1 has no RoCE v2 GID", "ip link set dev rail0 up"),
    Fault("far NICs", _far, f"GPU {_GPU}, .* has no NIC at its socket", "nvidia-smi topo -m"),
    Fault("driver", _no_driver, "8 GPUs without the NVIDIA driver", "apt-get install nvidia-open"),
    Fault("libibverbs", _lacks("libibverbs"), "RDMA devices without libibverbs", "libibverbs1"),
    Fault("GPUDirect", _no_gpu_direct, "neither dma-buf nor nvidia_peermem", "modprobe nvidia"),
    Fault("old libibverbs", _old_verbs, "libibverbs is too old for dma-bufs", "rdma-core 34"),
    Fault("no name", _export("MOE_P2P_NICS", "mlx5_77"), "mlx5_77, which is not", "MOE_P2P_NICS"),
    Fault("asked for TCP", _export("MOE_P2P_TRANSPORT_SETTINGS", "traffic_class=104,provider=tcp"),
          "asks for libfabric's tcp, beside 8 NICs", "unset MOE_P2P_TRANSPORT_SETTINGS"),
    Fault("NCCL without NICs", _export("NCCL_IB_DISABLE", "1"), "NCCL_IB_DISABLE=1", "unset NCCL"),
)  # fmt: skip
EFA = (
    Fault("no libfabric", _lacks("libfabric"), "EFA devices without libfabric", "EFA installer"),
    Fault("FI_PROVIDER", _export("FI_PROVIDER", "tcp;ofi_rxm"), "FI_PROVIDER=tcp;ofi_rxm hides EFA",
          "export FI_PROVIDER=efa"),
    Fault("MC_FORCE_TCP", _export("MC_FORCE_TCP", "1"), "MC_FORCE_TCP=1", "unset MC_FORCE_TCP"),
    Fault("trap 1: another deep_ep", _imports(deep_ep="/usr/lib/python3/deep_ep/__init__.py"),
          "import deep_ep gives /usr/lib/python3/deep_ep/__init__.py, which knows no EFA",
          "export MOE_P2P_AS_DEEP_EP=1"),
    Fault("trap 1: though asked for", _shadowed, "deep_ep.*though this package's is asked for",
          "pip uninstall deep_ep"),
    Fault("trap 2: another Python", _other_python, "python3 is .*bin/python3, with no moe_p2p",
          "export PATH="),
    Fault("trap 2: an older package", _old_python, "with another version of moe_p2p",
          "pip install moe_p2p=="),
    Fault("trap 3: two libfabrics",
          lambda host: host.loader.update({"libfabric.so.1": "/usr/lib/libfabric.so.1.14.0"}),
          "two libfabrics: .*open libfabric.so.1 .*get .*/usr/lib/libfabric.so.1.14.0",
          "export LD_LIBRARY_PATH=.*/opt/amazon/efa/lib:"),
    Fault("trap 4: Mooncake", _imports(mooncake__engine="/usr/lib/python3/mooncake/engine.so"),
          "Mooncake .* moves KV caches over TCP", "MOONCAKE_PROTOCOL=efa"),
    Fault("NCCL's plugin", _no_plugin, "no libnccl-net.so is found", "NCCL_NET_PLUGIN=ofi"),
    Fault("a path to NCCL's plugin", _export("NCCL_NET_PLUGIN", "/opt/lib/libnccl-net-ofi.so"),
          "NCCL_NET_PLUGIN=/opt/lib/libnccl-net-ofi.so is a path", "NCCL_NET_PLUGIN=ofi"),
)  # fmt: skip
KINDS = {"roce": (job_hosts.roce, ROCE), "efa": (job_hosts.efa, EFA)}
PLANTED = [(kind, fault) for kind, (_, faults) in KINDS.items() for fault in faults]


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_host_has_no_problem(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = KINDS[kind][0](tmp_path, monkeypatch)
    report = host.examine()
    assert [problem.what for problem in report.problems] == []
    assert len(report.gpus) == (8 if kind == "roce" else 4)
    assert {len(gpu.rails) for gpu in report.gpus} == {1 if kind == "roce" else 2}
    assert {gpu.sm_most_mhz for gpu in report.gpus} == {1980}
    assert report.redirected == ([] if kind == "roce" else None)


@pytest.mark.parametrize(
    ("kind", "fault"), PLANTED, ids=[f"{kind} {fault.name}" for kind, fault in PLANTED]
)
def test_a_planted_fault_is_found_and_named(
    kind: str, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = KINDS[kind][0](tmp_path, monkeypatch)
    fault.plant(host)
    problems = [(problem.what, problem.remedy) for problem in host.examine().problems]
    assert len(problems) == 1, problems
    assert re.search(fault.what, problems[0][0]), problems
    assert re.search(fault.remedy, problems[0][1]), problems


def test_the_page_of_a_host_shows_what_surrounds_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = job_hosts.roce(tmp_path, monkeypatch)
    host.machine.write(f"{_FIRST}/fw_ver", "28.39.1002")
    lines = [" ".join(line.split()) for line in doctor_text.render(host.examine()).splitlines()]
    for line in (
        "NIC firmware 28.42.1000 (7 of 8); 28.39.1002: mlx5_0",
        "PFC priorities 3",
        "ECN priorities 3",
        "traffic class 106",
        "MTU 9000",
        "IOMMU passthrough",
        "ACS off",
        "CPUs 192 of 192",
        "CPU clock tsc, performance",
        "GPU memory for NICs dma-buf, peermem",
    ):
        assert line in lines


def test_what_cannot_be_seen_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No root, no commands, a container that hides /sys/class/net: facts are unknown."""
    host = job_hosts.roce(tmp_path, monkeypatch)
    host.pfc = dict.fromkeys(host.pfc, "hidden")
    for config in (tmp_path / "sys/devices").rglob("config"):
        config.write_bytes(bytes(64))
    for path in (tmp_path / "sys/devices").rglob("roce_*/enable/*"):
        path.unlink()
    report = host.examine()
    assert report.redirected is None
    assert {facts.pfc for facts in report.nic_facts.values()} == {None}
    assert report.problems == judge.judge(report) == []


def test_a_command_that_fails_or_hangs_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, script in (("fails", "echo no; exit 3"), ("hangs", "exec /bin/sleep 100")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(surroundings, "COMMAND_TIMEOUT_S", 0.05)
    assert [surroundings.output_of(name) for name in ("fails", "hangs", "absent")] == ["", "", ""]
