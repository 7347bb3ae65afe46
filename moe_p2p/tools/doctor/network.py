"""Facts of NICs and interfaces: firmware, GIDs, MTU, PFC and ECN as far as they are visible.

Files are read below `root`; the commands are `dcb` (iproute2) and `mlnx_qos`. One function a fact.
Used by examine.py; faults.py and job.py judge.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from moe_p2p.machine.topology import Nic
from moe_p2p.tools.doctor.report import NicFacts
from moe_p2p.tools.doctor.surroundings import output_of, pcie, text

_MODULES = ("nvidia", "mlx5_core", "mlx5_ib", "ib_core", "efa", "gdrdrv", "nvidia_peermem")
_HOST_ROUTE = "FFFFFFFF"  # of /proc/net/route: containers' interfaces


def nic_facts(root: Path, nic: Nic) -> NicFacts:
    device = root / "sys/class/infiniband" / nic.name
    interface = nic.interfaces[0] if nic.interfaces else ""
    ethernet = nic.kind == "verbs" and nic.link_layer == "Ethernet" and bool(interface)
    slot, gbps = pcie(root, nic.place.pci)
    return NicFacts(
        firmware=text(device / "fw_ver"),
        board=text(device / "board_id") or text(device / "hca_type"),
        gids=gids(device / "ports/1"),
        mtu=mtu(root, interface),
        pcie_gbps=gbps,
        pcie=slot,
        pfc=pfc(interface) if ethernet else None,
        ecn=ecn(root, interface) if ethernet else None,
        marked=_whole(device / "ports/1/hw_counters/np_ecn_marked_roce_packets"),
        traffic_class=_traffic_class(device / "tc/1/traffic_class"),
    )


def drivers(root: Path) -> dict[str, str]:
    """Versions of loaded kernel modules; those of the kernel itself have none."""
    found = {name: text(root / "sys/module" / name / "version") for name in _MODULES}
    return {name: version for name, version in found.items() if version}


def gids(port: Path) -> list[str]:
    """Index, type and address of each GID that is used."""
    found = []
    names = (entry.name for entry in (port / "gids").glob("*"))
    for index in sorted(int(name) for name in names if name.isdecimal()):
        shown = text(port / "gids" / str(index))
        if not shown.strip("0:"):
            continue
        address = ipaddress.IPv6Address(shown)
        kind = text(port / "gid_attrs/types" / str(index)) or "IB"
        found.append(f"{index}: {kind} {address.ipv4_mapped or address}")
    return found


def mtu(root: Path, interface: str) -> int:
    return (interface and _whole(root / "sys/class/net" / interface / "mtu")) or 0


def interfaces(root: Path) -> dict[str, int]:
    """MTU of each interface that a network is reached through."""
    found = {}
    for line in text(root / "proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7] != _HOST_ROUTE:
            found[fields[0]] = mtu(root, fields[0])
    return found


def pfc(interface: str) -> list[int] | None:
    """Priorities whose senders pause instead of losing packets; None: not visible."""
    shown = output_of("dcb", "pfc", "show", "dev", interface)
    if found := re.search(r"\b(?:prio|pg)-pfc((?:\s+\d:\w+)+)", shown):
        return [int(n) for n, state in re.findall(r"(\d):(\w+)", found[1]) if state == "on"]
    shown = output_of("mlnx_qos", "-i", interface)
    if found := re.search(r"^PFC configuration:\s*\n.*\n\s*enabled((?:\s+[01])+)", shown, re.M):
        return [n for n, state in enumerate(found[1].split()) if state == "1"]
    return None


def ecn(root: Path, interface: str) -> list[int] | None:
    """Priorities for which both ends of RoCE take part (mlx5 of NVIDIA); None: not visible."""
    folder = root / "sys/class/net" / interface / "ecn"
    states = [
        {int(path.name) for path in (folder / end / "enable").glob("[0-7]") if text(path) == "1"}
        for end in ("roce_np", "roce_rp")
        if (folder / end / "enable").is_dir()
    ]
    return sorted(set.intersection(*states)) if len(states) == 2 else None


def _traffic_class(path: Path) -> int | None:
    """Of "Global tclass=106"; the file is empty where none is set."""
    found = re.search(r"tclass=(\d+)", text(path))
    return int(found[1]) if found else None


def _whole(path: Path) -> int | None:
    shown = text(path)
    return int(shown) if shown.isdecimal() else None
