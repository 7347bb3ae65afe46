"""Facts of a machine around GPUs and NICs: PCIe, IOMMU, ACS, clocks, CPUs. One function a fact.

Files are read below `root`; `nvidia-smi` is the only command. What cannot be read is reported as
unknown. Used by examine.py; faults.py judges.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from moe_p2p.machine.topology import Distance, Gpu, Nic, Place, distance
from moe_p2p.tools.doctor.report import CpuFacts

COMMAND_TIMEOUT_S = 20.0
_ACS, _FIRST_EXTENDED, _REDIRECTS, _DIRECT = 0x000D, 0x100, 0x04, 0x40  # PCIe 6.0, 7.7.8
_BRIDGE = "0x0604"
# Under these a GPU runs slower than it could; a power cap (sw_power_cap) is what load does.
_SLOWDOWNS = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)


def text(path: Path) -> str:
    """Contents of a small file; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def output_of(*command: str) -> str:
    """What a command prints; empty where it is not installed, fails or does not end."""
    program = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin")
    if program is None:
        return ""
    try:
        ran = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ran.returncode else ran.stdout


# --- PCIe ---


def pcie(root: Path, pci: str) -> tuple[str, float]:
    """The link of a device as it runs, "32.0 GT/s x16", and its Gbit/s; 0: not known."""
    device = root / "sys/bus/pci/devices" / pci
    speed, lanes = text(device / "current_link_speed"), text(device / "current_link_width")
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", speed)  # "Unknown" of virtual functions
    if not pci or not found or not lanes.isdecimal() or int(lanes) == 0:
        return "", 0.0
    rate = float(found[1])
    coding = 0.8 if rate < 8 else 128 / 130  # 8b/10b up to 5 GT/s
    return f"{found[1]} GT/s x{lanes}", rate * int(lanes) * coding


def pcie_lanes(root: Path, pci: str) -> tuple[int, int]:
    """Lanes of a device that are used, and those it has; 0: not known."""
    device = root / "sys/bus/pci/devices" / pci
    now, most = (text(device / f"{name}_link_width") for name in ("current", "max"))
    return (int(now), int(most)) if now.isdecimal() and most.isdecimal() else (0, 0)


def iommu(root: Path, addresses: Iterable[str]) -> dict[str, str]:
    """Devices behind an IOMMU: "translated", or "passthrough" where addresses stay as they are."""
    found = {}
    for pci in addresses:
        kind = text(root / "sys/bus/pci/devices" / pci / "iommu_group/type")
        if kind:
            found[pci] = "passthrough" if kind == "identity" else "translated"
    return found


def redirected(root: Path, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[str] | None:
    """Bridges between a GPU and a NIC of its switch whose ACS sends what passes to the root.

    None: none could be read (reading takes root), or no GPU shares a switch with a NIC.
    """
    found: dict[str, int] = {}
    for gpu in gpus:
        for nic in nics:
            if distance(gpu.place, nic.place) == Distance.SWITCH:
                for pci in {*_bridges(root, gpu.place), *_bridges(root, nic.place)}:
                    control = _acs_control(root / "sys/bus/pci/devices" / pci / "config")
                    if control is not None:
                        found[pci] = control
    if not found:
        return None
    return sorted(pci for pci, bits in found.items() if bits & _REDIRECTS and not bits & _DIRECT)


def _bridges(root: Path, place: Place) -> list[str]:
    return [
        pci
        for pci in place.path[1:-1]
        if text(root / "sys/bus/pci/devices" / pci / "class").startswith(_BRIDGE)
    ]


def _acs_control(config: Path) -> int | None:
    """Control word of Access Control Services; None: it cannot be read; 0: there is none."""
    try:
        data = config.read_bytes()
    except OSError:
        return None
    if len(data) <= _FIRST_EXTENDED:  # users other than root read 64 bytes
        return None
    at, seen = _FIRST_EXTENDED, set[int]()
    while _FIRST_EXTENDED <= at <= len(data) - 8 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", data, at)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", data, at + 6)[0])
        at = header >> 20
    return 0


# --- GPUs by nvidia-smi ---


def gpu_states() -> dict[str, dict[str, str]]:
    """By PCI address, what nvidia-smi says of each GPU; the names are its XML's."""
    printed = output_of("nvidia-smi", "-q", "-x")
    try:
        log = ElementTree.fromstring(printed)
    except ElementTree.ParseError:
        return {}
    found = {}
    for gpu in log.iter("gpu"):
        domain, _, rest = gpu.get("id", "").lower().partition(":")  # 00000000:18:00.0
        found[f"{domain[-4:]}:{rest}"] = {
            "firmware": gpu.findtext("vbios_version", ""),
            "sm_mhz": _number(gpu.findtext("clocks/sm_clock", "")),
            "sm_most_mhz": _number(gpu.findtext("max_clocks/sm_clock", "")),
            "power_w": _first(gpu, "current_power_limit", "enforced_power_limit", "power_limit"),
            "power_default_w": _first(gpu, "default_power_limit"),
            "fabric": gpu.findtext("fabric/state", "").replace("N/A", ""),
            "slowed_by": " ".join(name for name in _SLOWDOWNS if _active(gpu, name)),
        }
    return found


def _number(shown: str) -> str:
    """Of "1980 MHz" or "700.00 W"; empty: N/A."""
    found = re.match(r"\d+(\.\d+)?", shown)
    return found[0] if found else ""


def _first(gpu: ElementTree.Element, *names: str) -> str:
    """Of the first of these names, wherever it stands: drivers have moved them."""
    shown = (_number(each.text or "") for name in names for each in gpu.iter(name))
    return next(filter(None, shown), "")


def _active(gpu: ElementTree.Element, reason: str) -> bool:
    """clocks_event_reason_NAME; before driver 535 clocks_throttle_reason_NAME."""
    names = (f"clocks_event_reason_{reason}", f"clocks_throttle_reason_{reason}")
    return any(each.text == "Active" for name in names for each in gpu.iter(name))


# --- CPUs ---


def cpu(root: Path, allowed: int) -> CpuFacts:
    """allowed: the CPUs of this process, where root/proc does not say."""
    cpus = root / "sys/devices/system/cpu"
    governors = {text(path) for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    status = text(root / "proc/self/status")
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    online = text(cpus / "online")
    clock = text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    return CpuFacts(
        allowed=_count(listed[1]) if listed else allowed,
        online=_count(online) if online else allowed,
        quota=quota(root),
        governors=sorted(governors - {""}),
        clocksource=clock,
    )


def _count(ranges: str) -> int:
    """Of "0-3,8": 5."""
    parts = (part.partition("-") for part in ranges.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)


def quota(root: Path) -> float:
    """CPUs of time that cgroups leave this process; 0: no limit."""
    limits = []
    for line in text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mount = root / "sys/fs/cgroup"
        if controllers:  # version 1 has a folder for each
            if "cpu" not in controllers.split(","):
                continue
            mount = next(filter(Path.is_dir, (mount / controllers, mount / "cpu")), mount)
        folder = mount / path.lstrip("/")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(mount):
                break
            limits.append(_limit(each))
    return min(filter(None, limits), default=0.0)


def _limit(folder: Path) -> float:
    both = text(folder / "cpu.max").split()  # "200000 100000" or "max 100000"
    if not both:
        both = [text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(both) != 2 or not all(each.isdecimal() for each in both) or both[1] == "0":
        return 0.0  # also "-1": none
    return int(both[0]) / int(both[1])
