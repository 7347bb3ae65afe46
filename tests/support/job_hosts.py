"""Hosts of a job that `doctor` examines: a healthy one of RoCE or EFA, into which faults are put.

Trees of sysfs and /proc below a folder, and commands in its `bin` that are as strict as the real
ones: nvidia-smi knows `-q -x`, dcb `pfc show dev`, ldconfig `-p`; other arguments end with status 1
or 2. What only libraries can say, such as whether libibverbs loads, is a field.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_p2p.machine import transport
from moe_p2p.tools.doctor import examine as examination
from moe_p2p.tools.doctor import silent
from moe_p2p.tools.doctor.report import Report
from tests.support.machines import Machine

PLX = "0x10b5"
NUM_CPUS = 192
GPUS = 8
VARIABLES = ("MOE_P2P_", "NCCL_", "FI_", "MC_", "MOONCAKE_", "LD_LIBRARY_PATH", "PYTHONPATH")


class JobHost:
    """A healthy host below `root`; `examine` gives its report."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.machine = Machine(root)
        self.root, self.patch, self.bin = root, patch, root / "bin"
        self.bin.mkdir()
        self.libraries = {
            "libibverbs": "1.14 /usr/lib/libibverbs.so.1",
            "libfabric": "2.1 /opt/amazon/efa/lib/libfabric.so.1.27.0",
            "libcuda": "580.82.07 /usr/lib/libcuda.so.1",
            "libcudart": "13 /usr/lib/libcudart.so",
            "libgdrapi": "2.5 /usr/lib/libgdrapi.so.2",
        }
        self.loader = {"libfabric.so.1": "/opt/amazon/efa/lib/libfabric.so.1.27.0"}
        self.attributes = {"DMA_BUF_SUPPORTED": 1, "GPU_DIRECT_RDMA_WRITES_ORDERING": 200}
        self.imports: dict[str, str] = {}
        self.dma_buf_verbs, self.shm, self.shm_free = True, 1 << 36, 1 << 35
        self.gpus: dict[str, dict[str, str]] = {}
        self.pfc: dict[str, str] = {}
        self._files()

    # --- building ---

    def _files(self) -> None:
        write = self.machine.write
        write("proc/driver/nvidia/version", "NVRM version: x86_64  580.82.07  Release Build")
        write(
            "proc/self/status", f"CapEff:\t0000000000000000\nCpus_allowed_list:\t0-{NUM_CPUS - 1}"
        )
        self.limit_memory("unlimited")
        write("proc/self/cgroup", "0::/system.slice/job")
        write("sys/fs/cgroup/system.slice/job/cpu.max", "max 100000")
        write("sys/devices/system/cpu/online", f"0-{NUM_CPUS - 1}")
        for cpu in range(2):
            write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance")
        write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc")
        route = "eno1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"
        write("proc/net/route", f"Iface\tDestination\tGateway\tFlags\t...\n{route}")
        write("sys/class/net/eno1/mtu", "1500")
        write("sys/module/nvidia_peermem/version", "1.0")

    def limit_memory(self, soft: str) -> None:
        line = f"Max locked memory         {soft:<20} unlimited            bytes"
        self.machine.write("proc/self/limits", f"Limit       Soft Limit\n{line}")

    def bridge(self, path: str, acs: int = 0) -> None:
        """acs: control word of Access Control Services, with registers as in the kernel's file."""
        folder = self.machine.pci(path, PLX, "0x060400", 0)
        config = bytearray(4096)
        struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)  # AER, next 0x148
        struct.pack_into("<IHH", config, 0x148, 0x000D | 1 << 16, 0x1F, acs)
        (self.root / folder / "config").write_bytes(bytes(config))

    def gpu(self, path: str, numa: int) -> str:
        self.machine.gpu(path, numa, "NVIDIA H200")
        pci = Path(path).name
        self._slot(path, "32.0 GT/s PCIe", 16)
        self.gpus[pci] = {
            "vbios_version": "96.00.A5.00.03",
            "fabric": "<state>Completed</state>",
            "slowdown": "Not Active",
            "current_power_limit": "700.00 W",
        }
        return pci

    def _slot(self, path: str, speed: str, lanes: int) -> None:
        for name in ("current", "max"):
            self.machine.write(f"sys/devices/{path}/{name}_link_speed", speed)
            self.machine.write(f"sys/devices/{path}/{name}_link_width", str(lanes))
        group = f"sys/kernel/iommu_groups/{Path(path).name}"
        self.machine.write(f"{group}/type", "identity")
        self.machine.link(f"sys/devices/{path}/iommu_group", group)

    def nic(self, name: str, path: str, numa: int, *, interface: str = "", **port: Any) -> None:
        self.machine.nic(name, path, numa, interface=interface, **port)
        self._slot(path, "32.0 GT/s PCIe", 16)
        entry = f"sys/devices/{path}/infiniband/{name}"
        self.machine.write(f"{entry}/fw_ver", "28.42.1000")
        self.machine.write(f"{entry}/board_id", "MT_0000000838")
        if interface:
            self.machine.link(f"sys/class/net/{interface}", f"sys/devices/{path}/net/{interface}")
            self.machine.write(f"sys/class/net/{interface}/mtu", "9000")
            self.pfc[interface] = "3"
            self.machine.write(f"{entry}/tc/1/traffic_class", "Global tclass=106")
            for end in ("np", "rp"):
                for priority in range(8):
                    path_of = f"sys/class/net/{interface}/ecn/roce_{end}/enable/{priority}"
                    self.machine.write(path_of, str(int(priority == 3)))

    # --- commands ---

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def _commands(self) -> None:
        gpus = "".join(
            f'<gpu id="0000{pci.upper()}"><vbios_version>{gpu["vbios_version"]}</vbios_version>'
            f"<fabric>{gpu['fabric']}</fabric><clocks_event_reasons>"
            "<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>"
            "<clocks_event_reason_hw_thermal_slowdown>"
            f"{gpu['slowdown']}</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>"
            f"<gpu_power_readings><current_power_limit>{gpu['current_power_limit']}"
            "</current_power_limit><default_power_limit>700.00 W</default_power_limit>"
            "</gpu_power_readings><clocks><sm_clock>1980 MHz</sm_clock></clocks>"
            "<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks></gpu>"
            for pci, gpu in self.gpus.items()
        )
        xml = self.root / "nvidia-smi.xml"
        xml.write_text(f'<?xml version="1.0" ?><nvidia_smi_log>{gpus}</nvidia_smi_log>')
        self.command("nvidia-smi", f'[ "$*" = "-q -x" ] || exit 2\nexec /bin/cat "{xml}"')
        cases = "".join(
            f"  {name}) on='{on}' ;;\n" for name, on in self.pfc.items() if on != "hidden"
        )
        self.command(
            "dcb",
            '[ "$1 $2 $3" = "pfc show dev" ] || exit 1\n'
            f'case "$4" in\n{cases}'
            '  *) echo "Error: Operation not supported" >&2; exit 1 ;;\nesac\n'
            'echo "pfc-cap 8 macsec-bypass off delay 0 "\nline="prio-pfc"\n'
            'for i in 0 1 2 3 4 5 6 7; do\n  case "$on" in *$i*) s=on ;; *) s=off ;; esac\n'
            '  line="$line $i:$s"\ndone\necho "$line "',
        )
        known = "".join(
            f"\t{name} (libc6,x86-64) => {self.root}/cache/{name}\n" for name in self.loader
        )
        listing = self.root / "ldconfig.txt"
        listing.write_text(f"12 libs found in cache `/etc/ld.so.cache'\n{known}")
        for name, target in self.loader.items():
            real = self.root / target.lstrip("/")
            real.parent.mkdir(parents=True, exist_ok=True)
            real.touch()
            link = self.root / "cache" / name
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(real)
        self.command("ldconfig", f'[ "$*" = "-p" ] || exit 1\nexec /bin/cat "{listing}"')

    # --- examining ---

    def examine(self) -> Report:
        patch, empty = self.patch, SimpleNamespace
        self._commands()
        patch.setenv("PATH", str(self.bin))
        for name in [name for name in os.environ if name.startswith(VARIABLES)]:
            if name not in self.variables:
                patch.delenv(name)
        for name, value in self.variables.items():
            patch.setenv(name, value)
        patch.setattr(transport, "load_problem", lambda provider: "")
        by_files = {files: name for name, files in examination.LIBRARIES.items()}
        below = str(self.root)
        libraries = {
            name: each.replace(" /", f" {below}/") if each else ""
            for name, each in self.libraries.items()
        }
        patch.setattr(examination, "_library", lambda files: libraries[by_files[files]])
        patch.setattr(examination, "_has", lambda library, symbol: self.dma_buf_verbs)
        patch.setattr(examination, "_package", lambda name: "13.0")
        patch.setattr(examination, "_forks", lambda: "")
        ordinals = {pci: i for i, pci in enumerate(self.gpus)}
        patch.setattr(examination, "_cuda_devices", lambda: ordinals)
        patch.setattr(
            examination,
            "_attribute",
            lambda device, name: None if device is None else self.attributes[name],
        )
        patch.setattr(examination.torch.version, "cuda", "13.0")
        patch.setattr(silent, "imports", lambda: dict(self.imports))
        size = empty(f_frsize=1, f_blocks=self.shm, f_bavail=min(self.shm_free, self.shm))
        patch.setattr(examination.os, "statvfs", lambda path: size)
        return examination.examine(self.root, writes=False)

    @property
    def variables(self) -> dict[str, str]:
        return self.__dict__.setdefault("_variables", {})


def roce(root: Path, patch: pytest.MonkeyPatch, *, host: int = 1) -> JobHost:
    """8 GPUs, each below a switch with a ConnectX-7 of RoCE; names as NVIDIA's HGX has them."""
    made = JobHost(root, patch)
    for i, top in enumerate((0x15, 0x26, 0x37, 0x48, 0x97, 0xA7, 0xB7, 0xC7)):
        road = f"pci0000:{top:02x}/0000:{top:02x}:01.0"
        made.bridge(road)
        made.bridge(f"{road}/0000:{top + 1:02x}:00.0")
        road += f"/0000:{top + 1:02x}:00.0/0000:{top + 2:02x}"
        for port in ("00", "02"):
            made.bridge(f"{road}:{port}.0")
        made.nic(
            f"mlx5_{i}",
            f"{road}:00.0/0000:{top + 3:02x}:00.0",
            i // 4,
            interface=f"rail{i}",
            link_layer="Ethernet",
            gid=f"0000:0000:0000:0000:0000:ffff:0a{i:02x}:{host:04x}",
            gid_type="RoCE v2",
        )
        made.gpu(f"{road}:02.0/0000:{top + 6:02x}:00.0", i // 4)
    return made


def efa(root: Path, patch: pytest.MonkeyPatch) -> JobHost:
    """2 switches of a p5en, each with 4 EFA devices of 200 Gbit/s and 2 GPUs."""
    made = JobHost(root, patch)
    made.loader["libnccl-net.so"] = "/opt/amazon/ofi-nccl/lib/libnccl-net.so"
    (root / "sys/module/nvidia_peermem/version").unlink()
    (root / "sys/module/nvidia_peermem").rmdir()
    for i, first in enumerate((0x55, 0x6E)):
        top = first - 11
        road = f"pci0000:{top:02x}/0000:{top:02x}:00.0/0000:{top + 1:02x}:00.0/0000:{top + 2:02x}"
        kind = {"driver": "efa", "link_layer": "Unspecified", "node_type": "7: <unknown>"}
        for j in range(4):
            at = f"{road}:01.{j}/0000:{first + j:02x}:00.0"
            made.nic(f"rdmap{first + j}s0", at, i, rate="200 Gb/sec (4X HDR)", **kind)
        for j in (4, 5):
            made.gpu(f"{road}:01.{j}/0000:{first + j:02x}:00.0", i)
    return made
