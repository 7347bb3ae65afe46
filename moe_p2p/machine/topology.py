"""The GPUs and NICs of this machine, their distances, and which GPU uses which NIC.

Reads sysfs only; opens no device and loads no library. Decided once, before there is an engine, and
used by the ranks' agreement and the doctor, hence Python: the engine gets device names in its
settings and knows no topology. `root` replaces / in tests.

The rails of a GPU are the usable NICs at the smallest distance from it. GPUs at the same distance
from the same NICs divide them, so that two GPUs below one PCIe switch do not share a NIC. Where
sysfs shows no topology (a flattened VM), all distances are equal and all GPUs divide all NICs.
"""

from __future__ import annotations

import enum
import ipaddress
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")  # PCI vendor; classes of GPUs
_PCI_PART = re.compile(
    r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]"
)
_IWARP = "4"  # node_type of devices without write-with-immediate
# A NIC slower than this share of the fastest one serves something else (management, storage).
_SLOW = 0.5


class Distance(enum.IntEnum):
    """Distance of two devices; smaller is nearer."""

    SWITCH = 0  # below the same PCIe switch
    ROOT = 1  # below the same root complex
    NUMA = 2  # at the same socket
    FAR = 3  # at different sockets, or unknown


@dataclass(frozen=True, order=True)
class Place:
    """Position of a device in the PCI tree."""

    pci: str = ""  # "0000:18:00.0"; empty for software devices
    path: tuple[str, ...] = ()  # root complex, bridges, the device itself
    numa_node: int = -1


@dataclass(frozen=True, order=True)
class Gpu:
    place: Place


@dataclass(frozen=True)
class Nic:
    """An RDMA device with the state of its first port, the one that providers use."""

    name: str  # "mlx5_0"
    place: Place
    kind: str  # "efa" (libfabric) or "verbs"
    state: str  # "ACTIVE"
    link_layer: str
    rate_gbps: float
    gid: str
    interfaces: tuple[str, ...]
    problem: str  # why it cannot be used; empty when it can


@dataclass(frozen=True)
class Host:
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]


class _Port(NamedTuple):
    state: str
    link_layer: str
    rate_gbps: float
    gid: str
    problem: str


# --- reading ---


def read_host(root: Path = Path("/")) -> Host:
    """Reads sysfs below `root`. Lists are empty on a machine without GPUs or RDMA devices."""
    devices = _entries(root / "sys/bus/pci/devices")
    gpus = [
        Gpu(_place(device))
        for device in devices
        if _text(device / "vendor") == _NVIDIA and _text(device / "class")[:6] in _DISPLAY
    ]
    nics = [_nic(root, device) for device in _entries(root / "sys/class/infiniband")]
    return Host(tuple(sorted(gpus)), tuple(nics))


def _entries(folder: Path) -> list[Path]:
    """Entries of a folder, mlx5_9 before mlx5_10; empty when there is no such folder."""

    def natural(path: Path) -> list[tuple[str, int]]:
        return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", path.name)]

    return sorted(folder.iterdir(), key=natural) if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # sysfs answers EINVAL for entries that do not apply, such as unused GIDs
        return ""


def _place(device: Path) -> Place:
    path = tuple(part for part in os.path.realpath(device).split("/") if _PCI_PART.fullmatch(part))
    numa_node = _text(device / "numa_node")
    return Place(path[-1] if path else "", path, int(numa_node) if numa_node else -1)


def _nic(root: Path, entry: Path) -> Nic:
    device = entry / "device"
    interfaces = tuple(path.name for path in _entries(device / "net"))
    parent = _text(entry / "parent")  # soft-RoCE: the interface that it runs on
    if parent:
        device, interfaces = root / "sys/class/net" / parent / "device", (parent,)
    ports = [_port(path) for path in _entries(entry / "ports")]
    port = ports[0] if ports else None
    kind = "efa" if Path(os.path.realpath(device / "driver")).name == "efa" else "verbs"
    problem = _device_problem(root, entry) or (port.problem if port else "it has no port")
    return Nic(
        name=entry.name,
        place=_place(device),
        kind=kind,
        state=port.state if port else "",
        link_layer=port.link_layer if port else "",
        rate_gbps=port.rate_gbps if port else 0.0,
        gid=port.gid if port else "",
        interfaces=interfaces,
        problem=problem,
    )


def _port(path: Path) -> _Port:
    state = _text(path / "state").partition(": ")[2] or "unknown"  # "4: ACTIVE"
    rate = _text(path / "rate").split(" ")[0]  # "400 Gb/sec (4X NDR)"
    link_layer = _text(path / "link_layer")
    gid = _gid(path, link_layer == "Ethernet")
    problem = ""
    if state != "ACTIVE":
        problem = f"port {path.name} is {state}"
    elif not gid:
        kind = "RoCE v2 GID" if link_layer == "Ethernet" else "GID"
        problem = f"port {path.name} has no {kind}; give its interface an address"
    return _Port(state, link_layer, float(rate or 0), gid, problem)


def _gid(port: Path, ethernet: bool) -> str:
    """Returns the GID that provider verbs uses by default (csrc/provider/verbs/gid.cpp)."""
    found = []
    for entry in _entries(port / "gids"):
        text = _text(entry)
        if not text.strip("0:"):  # unused: some NICs have 256 entries, most of them 0
            continue
        address = ipaddress.IPv6Address(text)
        if not ethernet:
            return str(address)
        if _text(port / "gid_attrs/types" / entry.name) == "RoCE v2":
            found.append(address.ipv4_mapped or address)
    best = min(found, key=lambda gid: (gid.version, gid.is_link_local), default="")
    return str(best)


def _device_problem(root: Path, entry: Path) -> str:
    if _text(entry / "node_type")[:1] == _IWARP:
        return "iWARP has no write with immediate"
    for verbs in _entries(root / "sys/class/infiniband_verbs"):
        if _text(verbs / "ibdev") == entry.name:
            device = f"dev/infiniband/{verbs.name}"
            if (root / device).exists():
                return ""
            return f"/{device} is not there; give the container --device=/dev/infiniband"
    return "it has no user-space verbs; load the module ib_uverbs"


# --- deciding: pure functions ---


def distance(a: Place, b: Place) -> Distance:
    common = _num_common(a, b)
    if common >= 2:  # they share the root complex and a root port, so a switch below it
        return Distance.SWITCH
    if common == 1:
        return Distance.ROOT
    return Distance.NUMA if a.numa_node == b.numa_node != -1 else Distance.FAR


def _num_common(a: Place, b: Place) -> int:
    """Length of the common beginning of both paths."""
    parts = zip(a.path, b.path, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda part: part[0] == part[1], parts))


def _farness(a: Place, b: Place) -> tuple[int, int]:
    """Sort key: distance(); among cascaded switches a deeper common one is nearer."""
    far = distance(a, b)
    shared = _num_common(a, b) if far == Distance.SWITCH else 0
    return far, -shared


def usable(host: Host, kind: str) -> list[Nic]:
    """NICs of a kind that rails may use: without a problem, and about as fast as the fastest."""
    nics = [nic for nic in host.nics if nic.kind == kind and not nic.problem]
    fastest = max((nic.rate_gbps for nic in nics), default=0.0)
    return [nic for nic in nics if nic.rate_gbps >= _SLOW * fastest]


def part_of(items: Sequence[T], index: int, count: int) -> list[T]:
    """Share of the index-th of `count` users: its own block of items, or one item it shares."""
    begin, end = (len(items) * i // count for i in (index, index + 1))
    return list(items[begin : max(end, begin + 1)])


def rails(host: Host, nics: Sequence[Nic], gpu: Gpu) -> list[Nic]:
    """Returns the NICs among `nics` that the GPU uses."""
    choices = [_own(host, nics, other.place) for other in host.gpus]
    mine = choices[host.gpus.index(gpu)]
    sharers = [other for other, choice in zip(host.gpus, choices, strict=True) if choice == mine]
    return part_of(mine, sharers.index(gpu), len(sharers))


def _own(host: Host, nics: Sequence[Nic], place: Place) -> list[Nic]:
    """Returns the nearest NICs; leaves out NICs to which another GPU is nearer, if any remain."""
    least = min((_farness(place, nic.place) for nic in nics), default=(0, 0))
    nearest = [nic for nic in nics if _farness(place, nic.place) == least]
    owned = [
        nic for nic in nearest if all(_farness(gpu.place, nic.place) >= least for gpu in host.gpus)
    ]
    return owned or nearest


def pick(
    host: Host, nics: Sequence[Nic], *, pci: str, share: tuple[int, int], wanted: int | None
) -> list[Nic]:
    """Returns the rails of one engine: the rails of the GPU at `pci`; without one, its share.

    share: (index, number) of the rank among the host's ranks, for ranks whose GPU is not known.
    wanted: how many NICs; adds farther ones where the rails are fewer. None: the rails.
    """
    gpu = next((gpu for gpu in host.gpus if gpu.place.pci == pci), None)
    chosen = part_of(nics, *share) if gpu is None else rails(host, nics, gpu)
    if wanted is None or wanted <= len(chosen):
        return chosen[:wanted]
    place = Place() if gpu is None else gpu.place
    others = [nic for nic in nics if nic not in chosen]
    others.sort(key=lambda nic: _farness(place, nic.place))
    return [*chosen, *others][:wanted]
