"""Rails of GPUs, on fake trees of published machines (machines.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_p2p.machine import topology
from moe_p2p.machine.topology import Distance, Host, Place
from tests.support import machines
from tests.support.machines import Machine


def rails_of(host: Host, kind: str) -> list[list[str]]:
    nics = topology.usable(host, kind)
    return [[nic.name for nic in topology.rails(host, nics, gpu)] for gpu in host.gpus]


def problem_of(host: Host, name: str) -> str:
    return next(nic.problem for nic in host.nics if nic.name == name)


def test_p5_gives_each_gpu_the_four_nics_of_its_switch(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    host = topology.read_host(tmp_path)
    assert len(host.nics) == 32
    assert [gpu.place.pci for gpu in host.gpus][::7] == ["0000:53:00.0", "0000:ca:00.0"]
    found = rails_of(host, "efa")
    assert found[0] == ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"]
    assert found[7] == ["rdmap198s0", "rdmap199s0", "rdmap200s0", "rdmap201s0"]
    assert rails_of(host, "verbs") == [[]] * 8


def test_p5en_divides_the_nics_of_a_switch_among_its_gpus(tmp_path: Path) -> None:
    machines.p5en(tmp_path)
    host = topology.read_host(tmp_path)
    found = rails_of(host, "efa")
    assert found[:3] == [
        ["rdmap85s0", "rdmap86s0"],
        ["rdmap87s0", "rdmap88s0"],
        ["rdmap110s0", "rdmap111s0"],
    ]
    assert len({name for names in found for name in names}) == 16


def test_hgx_pairs_gpus_with_their_nics_and_leaves_the_others(tmp_path: Path) -> None:
    machines.hgx(tmp_path)
    host = topology.read_host(tmp_path)
    assert rails_of(host, "verbs") == [[f"mlx5_{i}"] for i in (0, 1, 3, 4, 5, 6, 8, 9)]
    assert problem_of(host, "mlx5_11") == "port 1 is DOWN"
    assert "mlx5_10" not in [nic.name for nic in topology.usable(host, "verbs")]  # 25 of 400 Gbit/s


def test_flat_vm_divides_all_nics_equally(tmp_path: Path) -> None:
    machines.flat_vm(tmp_path)
    host = topology.read_host(tmp_path)
    far = {topology.distance(g.place, n.place) for g in host.gpus for n in host.nics}
    assert far == {Distance.FAR}
    assert rails_of(host, "verbs") == [[f"mlx5_ib{i}"] for i in range(8)]


def test_grace_goes_by_socket(tmp_path: Path) -> None:
    machines.grace(tmp_path)
    host = topology.read_host(tmp_path)
    assert topology.distance(host.gpus[0].place, host.nics[0].place) == Distance.NUMA
    assert rails_of(host, "verbs") == [["mlx5_0"], ["mlx5_1"], ["mlx5_4"], ["mlx5_5"]]


def test_laptop_has_nothing(tmp_path: Path) -> None:
    machines.laptop(tmp_path)
    assert topology.read_host(tmp_path) == Host((), ())


def test_a_machine_without_sysfs_has_nothing(tmp_path: Path) -> None:
    assert topology.read_host(tmp_path / "nowhere") == Host((), ())


def test_soft_roce_is_at_its_interface(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.soft_nic("rxe0", "veth0")
    machine.soft_nic("rxe1", "veth1")
    host = topology.read_host(tmp_path)
    assert [(nic.name, nic.interfaces, nic.problem) for nic in host.nics] == [
        ("rxe0", ("veth0",), ""),
        ("rxe1", ("veth1",), ""),
    ]
    assert host.nics[0].place == Place()


def test_the_gid_shown_is_the_one_that_verbs_takes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    link_local = "fe80:0000:0000:0000:0000:0aff:fe4d:0001"
    machine.nic(
        "mlx5_0",
        "pci0000:15/0000:15:01.0/0000:16:00.0",
        link_layer="Ethernet",
        gid=link_local,
        gid_type="RoCE v2",
    )
    port = "sys/class/infiniband/mlx5_0/ports/1"

    def add(index: int, gid: str, gid_type: str) -> str:
        machine.write(f"{port}/gids/{index}", gid)
        machine.write(f"{port}/gid_attrs/types/{index}", gid_type)
        return topology.read_host(tmp_path).nics[0].gid

    assert topology.read_host(tmp_path).nics[0].gid == "fe80::aff:fe4d:1"
    assert add(2, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "IB/RoCE v1") == "fe80::aff:fe4d:1"
    assert add(3, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2") == "2001:db8::1"
    assert add(4, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2") == "10.77.0.1"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": "1: DOWN"}, "port 1 is DOWN"),
        ({"gid": ""}, "port 1 has no GID"),
        ({"link_layer": "Ethernet"}, "port 1 has no RoCE v2 GID"),
        ({"node_type": "4: RNIC"}, "iWARP"),
        ({"verbs": False}, "/dev/infiniband/uverbs0 is not there"),
    ],
)
def test_nics_that_cannot_be_used_give_the_reason(
    tmp_path: Path, change: dict[str, str], problem: str
) -> None:
    Machine(tmp_path).nic("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0", **change)
    host = topology.read_host(tmp_path)
    assert problem in host.nics[0].problem
    assert topology.usable(host, "verbs") == []


def place(path: str, numa_node: int = -1) -> Place:
    parts = tuple(path.split())
    return Place(parts[-1] if parts else "", parts, numa_node)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (place("pci0000:15 0000:15:01.0 x a"), place("pci0000:15 0000:15:01.0 y b"), "SWITCH"),
        (place("pci0000:15 0000:15:01.0 a"), place("pci0000:15 0000:15:03.0 b"), "ROOT"),
        (place("pci0000:15 a", 1), place("pci0000:26 b", 1), "NUMA"),
        (place("pci0000:15 a", 0), place("pci0000:26 b", 1), "FAR"),
        (place("pci0000:15 a"), place("pci0000:26 b"), "FAR"),
        (place(""), place("pci0000:26 b"), "FAR"),
    ],
)
def test_distance_goes_by_what_both_are_below(a: Place, b: Place, expected: str) -> None:
    assert topology.distance(a, b) == topology.distance(b, a) == Distance[expected]


def test_of_switches_in_a_row_the_inner_one_is_nearer(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    outer = "pci0000:15/0000:15:01.0/0000:16:00.0"
    machine.nic("mlx5_0", f"{outer}/0000:17:00.0/0000:20:00.0")
    machine.nic("mlx5_1", f"{outer}/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:30:00.0")
    machine.gpu(f"{outer}/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:31:00.0")
    assert rails_of(topology.read_host(tmp_path), "verbs") == [["mlx5_1"]]


def test_a_gpu_without_a_near_nic_leaves_those_of_others_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0")
    machine.gpu("pci0000:15/0000:15:02.0/0000:26:00.0/0000:27:00.0/0000:28:00.0")
    machine.nic("mlx5_0", "pci0000:15/0000:15:02.0/0000:26:00.0/0000:27:01.0/0000:29:00.0")
    machine.nic("mlx5_1", "pci0000:15/0000:15:03.0/0000:35:00.0")
    assert rails_of(topology.read_host(tmp_path), "verbs") == [["mlx5_1"], ["mlx5_0"]]


def test_more_gpus_than_nics_share_in_blocks(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for i in range(4):
        machine.gpu(f"pci0000:00/0000:00:1{i}.0")
    machine.nic("mlx5_0", "pci0000:00/0000:00:05.0")
    machine.nic("mlx5_1", "pci0000:00/0000:00:06.0")
    assert rails_of(topology.read_host(tmp_path), "verbs") == [
        ["mlx5_0"], ["mlx5_0"], ["mlx5_1"], ["mlx5_1"],
    ]  # fmt: skip


@pytest.mark.parametrize("count", range(1, 9))
def test_parts_are_even_and_leave_nothing_over(count: int) -> None:
    for num_items in range(1, 20):
        parts = [topology.part_of(range(num_items), i, count) for i in range(count)]
        sizes = [len(part) for part in parts]
        assert set().union(*parts) == set(range(num_items))
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


@pytest.mark.parametrize("build", [machines.p5, machines.p5en, machines.hgx, machines.grace])
def test_all_rails_of_a_machine_are_used_by_one_gpu_each(
    tmp_path: Path, build: Callable[[Path], Machine]
) -> None:
    build(tmp_path)
    host = topology.read_host(tmp_path)
    used = [name for kind in ("efa", "verbs") for names in rails_of(host, kind) for name in names]
    assert len(used) == len(set(used))
    assert (
        len({len(names) for kind in ("efa", "verbs") for names in rails_of(host, kind)} - {0}) == 1
    )


def pick(host: Host, pci: str, share: tuple[int, int], wanted: int | None) -> list[str]:
    nics = topology.usable(host, "verbs")
    chosen = topology.pick(host, nics, pci=pci, share=share, wanted=wanted)
    return [nic.name for nic in chosen]


def test_asking_for_more_takes_farther_ones(tmp_path: Path) -> None:
    machines.hgx(tmp_path)
    host = topology.read_host(tmp_path)
    last = host.gpus[-1].place.pci
    assert pick(host, last, (0, 1), None) == ["mlx5_9"]
    assert pick(host, last, (0, 1), 3) == ["mlx5_9", "mlx5_5", "mlx5_6"]  # of its socket
    assert len(pick(host, last, (0, 1), 99)) == 10


def test_ranks_without_a_gpu_divide_the_nics(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for i in range(3):
        machine.soft_nic(f"rxe{i}", f"veth{i}")
    host = topology.read_host(tmp_path)
    assert pick(host, "", (0, 1), None) == ["rxe0", "rxe1", "rxe2"]
    assert [pick(host, "", (i, 2), None) for i in range(2)] == [["rxe0"], ["rxe1", "rxe2"]]
    assert pick(host, "", (1, 2), 1) == ["rxe1"]
