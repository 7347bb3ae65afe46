"""Fake sysfs trees of real machines, for topology, choice of transport and the doctor.

Addresses of p5 and p5en follow lspci and lstopo there. GPU addresses of p5en, and bus numbers of
the HGX and Grace machines, are examples of their published layouts. Files have the kernel's format.
"""

from __future__ import annotations

from pathlib import Path

EFA, MELLANOX, NVIDIA, INTEL = "0x1d0f", "0x15b3", "0x10de", "0x8086"


class Machine:
    """A tree below `root`, to which devices are added. `path`: a device's path in sys/devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/shm").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / target)

    def pci(self, path: str, vendor: str, kind: str, numa_node: int) -> str:
        """A PCI device; returns its folder."""
        folder = f"sys/devices/{path}"
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa_node))):
            self.write(f"{folder}/{name}", text)
        self.link(f"sys/bus/pci/devices/{Path(path).name}", folder)
        return folder

    def gpu(self, path: str, numa_node: int = -1, model: str = "NVIDIA H100 80GB HBM3") -> None:
        self.pci(path, NVIDIA, "0x030200", numa_node)
        self.write(f"proc/driver/nvidia/gpus/{Path(path).name}/information", f"Model: \t\t {model}")

    def nic(
        self,
        name: str,
        path: str,
        numa_node: int = -1,
        *,
        driver: str = "mlx5_core",
        state: str = "4: ACTIVE",
        link_layer: str = "InfiniBand",
        rate: str = "400 Gb/sec (4X NDR)",
        gid: str = "fe80:0000:0000:0000:a088:c203:0012:3456",
        gid_type: str = "IB/RoCE v1",
        interface: str = "",
        node_type: str = "1: CA",
        verbs: bool = True,
    ) -> None:
        vendor = EFA if driver == "efa" else MELLANOX
        device = self.pci(path, vendor, "0x020700", numa_node)
        self.link(f"{device}/driver", f"sys/bus/pci/drivers/{driver}")
        if interface:
            self.write(f"{device}/net/{interface}/operstate", "up")
        entry = f"{device}/infiniband/{name}"
        self.link(f"{entry}/device", device)
        self.link(f"sys/class/infiniband/{name}", entry)
        self.rdma(entry, name, state, link_layer, rate, gid, gid_type, node_type, verbs)

    def soft_nic(self, name: str, interface: str) -> None:
        """Soft-RoCE: no PCI device of its own."""
        entry = f"sys/devices/virtual/infiniband/{name}"
        self.write(f"{entry}/parent", interface)
        self.write(f"sys/devices/virtual/net/{interface}/operstate", "up")
        self.link(f"sys/class/net/{interface}", f"sys/devices/virtual/net/{interface}")
        self.link(f"sys/class/infiniband/{name}", entry)
        gid, rate = "0000:0000:0000:0000:0000:ffff:0a00:0001", "2.5 Gb/sec (1X SDR)"
        self.rdma(entry, name, "4: ACTIVE", "Ethernet", rate, gid, "RoCE v2", "1: CA", True)

    def rdma(
        self,
        entry: str,
        name: str,
        state: str,
        link_layer: str,
        rate: str,
        gid: str,
        gid_type: str,
        node_type: str,
        verbs: bool,
    ) -> None:
        self.write(f"{entry}/node_type", node_type)
        port = f"{entry}/ports/1"
        empty = ":".join(["0000"] * 8)
        for file, text in (
            ("state", state),
            ("link_layer", link_layer),
            ("rate", rate),
            ("gids/0", gid or empty),
            ("gids/1", empty),
            ("gid_attrs/types/0", gid_type),
        ):
            self.write(f"{port}/{file}", text)
        (self.root / port / "gid_attrs/types/1").mkdir()  # reading it fails, as in the kernel
        number = len(list((self.root / "sys/class/infiniband").iterdir())) - 1
        self.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        if verbs:
            self.write(f"dev/infiniband/uverbs{number}", "")


def _four_efas(machine: Machine, road: str, first: int, numa_node: int, rate: str) -> None:
    kind = {"driver": "efa", "link_layer": "Unspecified", "node_type": "7: <unknown>"}
    for number in range(first, first + 4):
        at = f"{road}:01.{number - first}/0000:{number:02x}:00.0"
        machine.nic(f"rdmap{number}s0", at, numa_node, rate=rate, **kind)


def p5(root: Path) -> Machine:
    """8 GPUs, each below a switch of its own with 4 EFA devices of 100 Gbit/s."""
    machine = Machine(root)
    for i in range(8):
        top, first = 0x44 + 0x11 * i, 0x4F + 0x11 * i
        road = f"pci0000:{top:02x}/0000:{top:02x}:00.0/0000:{top + 1:02x}:00.0/0000:{top + 2:02x}"
        _four_efas(machine, road, first, i // 4, "100 Gb/sec (4X EDR)")
        machine.gpu(f"{road}:01.4/0000:{first + 4:02x}:00.0", i // 4)
    return machine


def p5en(root: Path) -> Machine:
    """4 switches, each with 4 EFA devices of 200 Gbit/s and 2 GPUs; the ENA NIC has no RDMA."""
    machine = Machine(root)
    for i, first in enumerate((0x55, 0x6E, 0x87, 0xA0)):
        top = first - 11
        road = f"pci0000:{top:02x}/0000:{top:02x}:00.0/0000:{top + 1:02x}:00.0/0000:{top + 2:02x}"
        _four_efas(machine, road, first, i // 2, "200 Gb/sec (4X HDR)")
        for j in (4, 5):
            machine.gpu(f"{road}:01.{j}/0000:{first + j:02x}:00.0", i // 2, "NVIDIA H200")
    machine.pci("pci0000:20/0000:20:03.0/0000:21:00.0", EFA, "0x020000", 0)
    return machine


def hgx(root: Path) -> Machine:
    """8 GPUs with a CX7 each, two storage NICs of 200 Gbit/s, a management NIC of 25 with RoCE."""
    machine = Machine(root)
    for i, top in enumerate((0x15, 0x26, 0x37, 0x48, 0x97, 0xA7, 0xB7, 0xC7)):
        road = f"pci0000:{top:02x}/0000:{top:02x}:01.0/0000:{top + 1:02x}:00.0/0000:{top + 2:02x}"
        # mlx5_2 and mlx5_7 are the storage NICs.
        name = f"mlx5_{i + (i > 1) + (i > 5)}"
        machine.nic(name, f"{road}:00.0/0000:{top + 3:02x}:00.0", i // 4, interface=f"ibs{i}")
        machine.gpu(f"{road}:02.0/0000:{top + 6:02x}:00.0", i // 4)
    for i, name in enumerate(("mlx5_2", "mlx5_7")):
        machine.nic(
            name,
            f"pci0000:{0x59 + 0x80 * i:02x}/0000:{0x59 + 0x80 * i:02x}:01.0/0000:5{i}:00.0",
            i,
            rate="200 Gb/sec (4X HDR)",
        )
    machine.nic(
        "mlx5_10",
        "pci0000:70/0000:70:01.0/0000:71:00.0",
        0,
        link_layer="Ethernet",
        rate="25 Gb/sec (1X EDR)",
        gid_type="RoCE v2",
        interface="eno1",
    )
    machine.nic(
        "mlx5_11", "pci0000:70/0000:70:01.0/0000:71:00.1", 0, state="1: DOWN", rate="25 Gb/sec"
    )
    return machine


def flat_vm(root: Path) -> Machine:
    """8 GPUs and 8 VFs, each on its own bus and without NUMA; an Ethernet NIC of 100 Gbit/s."""
    machine = Machine(root)
    for i in range(8):
        machine.nic(f"mlx5_ib{i}", f"LNXSYSTM:00/pci01{i:02x}:00/01{i:02x}:00:00.0")
        machine.gpu(f"LNXSYSTM:00/pci00{i + 1:02x}:00/00{i + 1:02x}:00:00.0")
    machine.nic(
        "mlx5_an0",
        "LNXSYSTM:00/pcia0a0:00/a0a0:00:02.0",
        link_layer="Ethernet",
        rate="100 Gb/sec (4X EDR)",
        gid_type="RoCE v2",
        interface="enP41120s1",
    )
    return machine


def grace(root: Path) -> Machine:
    """2 Grace with 2 GPUs and 2 NICs each: every device at a root port, no switch."""
    machine = Machine(root)
    for node in range(2):
        for i in range(2):
            domain = f"00{node}{8 + i}"
            machine.gpu(f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0", node, "NVIDIA GB200")
            domain = f"00{node}{2 * i}"
            name = f"mlx5_{4 * node + i}"
            machine.nic(name, f"pci{domain}:00/{domain}:00:00.0/{domain}:03:00.0", node)
    return machine


def laptop(root: Path) -> Machine:
    """No NVIDIA GPU, no RDMA."""
    machine = Machine(root)
    machine.pci("pci0000:00/0000:00:02.0", INTEL, "0x030000", -1)
    machine.pci("pci0000:00/0000:00:14.3", INTEL, "0x028000", -1)
    return machine
