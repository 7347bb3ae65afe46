"""transport="auto": what it chooses on which machine, how ranks agree, what engines are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

import moe_p2p
from moe_p2p import AllToAll, AllToAllConfig, Engine, EngineConfig, errors
from moe_p2p.machine import transport
from moe_p2p.machine.transport import Choice, Opening, Wish, choose, open_with
from moe_p2p.moe.rendezvous.agreement import Offer, agree_on_transport
from tests.support import machines
from tests.support.cases import check_step, make, make_tokens
from tests.support.machines import Machine
from tests.support.ranks import Rank, on_ranks, run_processes, run_threads


@pytest.fixture(autouse=True)
def _libraries_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries can be loaded, and this machine's environment says nothing."""
    monkeypatch.setattr(transport, "load_problem", lambda provider: "")
    for name in ("MOE_P2P_TRANSPORT", "MOE_P2P_TRANSPORT_SETTINGS", "MOE_P2P_NICS"):
        monkeypatch.delenv(name, raising=False)


# --- one machine ---


@pytest.mark.parametrize(
    ("build", "provider", "why"),
    [
        (machines.p5, "libfabric", "32 EFA devices (rdmap79s0, "),
        (machines.p5en, "libfabric", "16 EFA devices"),
        (machines.hgx, "verbs", "10 RDMA devices"),
        (machines.flat_vm, "verbs", "8 RDMA devices"),
        (machines.grace, "verbs", "no libfabric: there is no EFA device"),
        (machines.laptop, "loopback", "no verbs: there is no RDMA device"),
    ],
)
def test_auto_takes_the_best_that_a_machine_has(
    tmp_path: Path, build: Callable[[Path], Machine], provider: str, why: str
) -> None:
    build(tmp_path)
    found = choose("auto", root=tmp_path)
    assert (found.provider, found.automatic) == (provider, True)
    assert why in found.why


def test_efa_without_libfabric_is_not_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.p5(tmp_path)
    monkeypatch.setattr(transport, "load_problem", lambda provider: f"no library of {provider}")
    found = choose("auto", root=tmp_path)
    assert found.provider == "loopback"
    assert found.why == ("no libfabric: no library of libfabric; no verbs: there is no RDMA device")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    verbs = transport.PROVIDERS["verbs"]
    monkeypatch.setitem(
        transport.PROVIDERS,
        "verbs",
        verbs._replace(libraries=("libnothing.so.1", "libmissing.so.2")),
    )
    assert "libnothing.so.1" in transport.load_problem("verbs")
    monkeypatch.setitem(
        transport.PROVIDERS, "verbs", verbs._replace(libraries=("libnothing.so.1", "libc.so.6"))
    )
    assert transport.load_problem("verbs") == ""


def test_a_port_that_is_down_is_the_reason_against_verbs(tmp_path: Path) -> None:
    Machine(tmp_path).nic("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0", state="1: DOWN")
    found = choose("auto", root=tmp_path)
    assert found.provider == "loopback"
    assert "no verbs: mlx5_0: port 1 is DOWN" in found.why


def test_what_is_asked_for_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.p5(tmp_path)
    assert choose("verbs", root=tmp_path) == Choice("verbs", "it was asked for", automatic=False)
    monkeypatch.setenv("MOE_P2P_TRANSPORT", "loopback")
    found = choose("auto", root=tmp_path)
    assert (found.provider, found.automatic) == ("loopback", False)
    assert "MOE_P2P_TRANSPORT" in found.why


# --- what an engine is given ---


def test_the_rails_of_the_gpu_become_settings(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    found = open_with("libfabric", "timeout_ms=5", Wish(pci="0000:64:00.0"), root=tmp_path)
    names = "rdmap96s0-rdm:rdmap97s0-rdm:rdmap98s0-rdm:rdmap99s0-rdm"
    assert found == Opening("libfabric", 4, f"timeout_ms=5,interfaces={names}")
    machines.hgx(tmp_path / "hgx")
    found = open_with("verbs", "", Wish(pci="0000:2c:00.0"), root=tmp_path / "hgx")
    assert found == Opening("verbs", 1, "devices=mlx5_1")


def test_a_cuda_device_is_found_in_sysfs_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes = {"PCI_DOMAIN_ID": 0, "PCI_BUS_ID": 0xCA, "PCI_DEVICE_ID": 0}
    monkeypatch.setattr(transport.driver, "attribute", lambda device, name: attributes[name])
    machines.p5(tmp_path)
    found = open_with("libfabric", "", Wish(pci=transport.pci_of(3)), root=tmp_path)
    assert found.settings.startswith("interfaces=rdmap198s0-rdm:")


def test_a_rank_without_gpu_has_its_part_of_the_nics_and_at_most_eight(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    assert open_with("libfabric", "", Wish(), root=tmp_path).num_nics == 8
    found = open_with("libfabric", "", Wish(share=(15, 16)), root=tmp_path)
    assert found == Opening("libfabric", 2, "interfaces=rdmap200s0-rdm:rdmap201s0-rdm")


def test_names_override_the_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.hgx(tmp_path)
    asked = Wish(nics="mlx5_9, mlx5_2", pci="0000:2c:00.0")
    found = open_with("verbs", "", asked, root=tmp_path)
    assert found == Opening("verbs", 2, "devices=mlx5_9:mlx5_2")
    monkeypatch.setenv("MOE_P2P_NICS", "mlx5_4")
    assert open_with("verbs", "", Wish(), root=tmp_path) == Opening("verbs", 1, "devices=mlx5_4")
    assert open_with("verbs", "", asked, root=tmp_path) == found
    # Settings that name devices are the last word.
    given = "devices=mlx5_0:mlx5_1:mlx5_3"
    assert open_with("verbs", given, asked, root=tmp_path) == Opening("verbs", 3, given)


def test_names_decide_what_auto_is(tmp_path: Path) -> None:
    machine = machines.p5(tmp_path)
    machine.nic("mlx5_0", "pci0000:ee/0000:ee:01.0/0000:ef:00.0")
    assert choose("auto", root=tmp_path).provider == "libfabric"
    assert choose("auto", nics="mlx5_0", root=tmp_path).provider == "verbs"


@pytest.mark.parametrize(
    ("nics", "error", "match"),
    [
        ("mlx5_77", moe_p2p.InvalidArgumentError, "mlx5_77, which is not an RDMA device.*mlx5_0"),
        ("mlx5_11", moe_p2p.UnavailableError, "mlx5_11, which cannot be used: port 1 is DOWN"),
    ],
)
def test_names_that_cannot_be_used(
    tmp_path: Path, nics: str, error: type[Exception], match: str
) -> None:
    machines.hgx(tmp_path)
    with pytest.raises(error, match=match):
        open_with("verbs", "", Wish(nics=nics), root=tmp_path)
    with pytest.raises(error, match=match):
        choose("auto", nics=nics, root=tmp_path)


def test_efa_devices_are_not_for_verbs(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    match = "rdmap79s0, which verbs cannot use; it is for libfabric"
    with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
        open_with("verbs", "", Wish(nics="rdmap79s0"), root=tmp_path)


def test_devices_that_are_all_down_are_an_error_before_the_provider(tmp_path: Path) -> None:
    Machine(tmp_path).nic("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0", state="1: DOWN")
    with pytest.raises(moe_p2p.UnavailableError, match="mlx5_0: port 1 is DOWN"):
        open_with("verbs", "", Wish(), root=tmp_path)


def test_providers_without_devices_get_no_names(tmp_path: Path) -> None:
    machines.p5(tmp_path)
    assert open_with("loopback", "seed=1", Wish(), root=tmp_path) == Opening(
        "loopback", 2, "seed=1"
    )
    assert open_with("libfabric", "provider=tcp", Wish(num_nics=3), root=tmp_path) == Opening(
        "libfabric", 3, "provider=tcp"
    )


def test_one_line_names_the_choice_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = Choice("verbs", "2 RDMA devices (mlx5_0, mlx5_1)", automatic=True)
    opening = Opening("verbs", 2, "devices=mlx5_0:mlx5_1")
    transport.announce("rank 3", given, opening)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("MOE_P2P_LOG", "info")
    transport.announce("rank 3", given, opening)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    expected = "rank 3: transport verbs over mlx5_0, mlx5_1: 2 RDMA devices (mlx5_0, mlx5_1)"
    assert lines[0].endswith(expected)


# --- agreement ---

EFA = Choice("libfabric", "4 EFA devices", automatic=True)
RDMA = Choice("verbs", "1 RDMA devices", automatic=True)
NONE = Choice("loopback", "no libfabric: x; no verbs: y", automatic=True)


def offers(*pairs: tuple[str, Choice]) -> list[Offer]:
    return [Offer.decode(Offer(*pair).encode()) for pair in pairs]


def test_hosts_that_choose_alike_agree() -> None:
    assert agree_on_transport(offers(("a", EFA), ("b", EFA)), None) == EFA


def test_ranks_of_one_node_need_no_nic() -> None:
    same = offers(("a", EFA), ("a", EFA))
    assert agree_on_transport(same, None).provider == "loopback"
    assert agree_on_transport(same, 2).provider == "loopback"
    assert agree_on_transport(same, 1) == EFA  # two nodes on one host do
    asked = EFA._replace(automatic=False)
    assert agree_on_transport(offers(("a", asked), ("a", asked)), None) == asked


def test_hosts_that_choose_differently_are_named_with_their_reasons() -> None:
    given = offers(("a", EFA), ("a", EFA), ("b", RDMA), ("c", NONE))
    with pytest.raises(moe_p2p.InvalidArgumentError) as error:
        agree_on_transport(given, None)
    for part in (
        "ranks 0 to 1 have libfabric (4 EFA devices)",
        "rank 2 has verbs (1 RDMA devices)",
        "rank 3 has loopback (no libfabric: x; no verbs: y)",
    ):
        assert part in str(error.value)


def test_loopback_between_hosts_is_refused() -> None:
    match = "ranks are on 2 hosts.*ranks 0 to 1 have loopback"
    with pytest.raises(moe_p2p.UnavailableError, match=match):
        agree_on_transport(offers(("a", NONE), ("b", NONE)), None)


def test_ranks_with_different_transports_stop_all() -> None:
    def body(rank: Rank) -> None:
        make(rank, transport=("loopback", "null")[rank.rank])

    for error in run_threads(2, body, return_errors=True):
        assert isinstance(error, moe_p2p.InvalidArgumentError)
        assert "rank 0 has loopback (it was asked for); rank 1 has null" in str(error)


@on_ranks(2)
def test_asking_for_what_auto_stands_for_is_no_difference(rank: Rank) -> None:
    make(rank, transport=("loopback", "auto")[rank.rank]).close()


# --- mismatched NIC counts ---


def different_nics(rank: Rank, ranks_per_node: int) -> int:
    config = {"ranks_per_node": ranks_per_node, "nics_per_rank": (2, 3, 1, 4)[rank.rank]}
    with make(rank, **config) as comm:
        for seed, counts in enumerate([(12, 0, 5, 1), (0, 0, 0, 0), (3, 12, 12, 12)]):
            tokens = [make_tokens(seed, r, n) for r, n in enumerate(counts[: rank.world_size])]
            check_step(comm, tokens)
        return len(comm.counters())


def test_ranks_with_different_numbers_of_nics() -> None:
    assert run_processes(2, different_nics, 1) == [2, 3]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_four_ranks_with_different_numbers_of_nics(ranks_per_node: int) -> None:
    assert run_threads(4, different_nics, ranks_per_node) == [2, 3, 1, 4]


def test_none_is_what_the_topology_gives() -> None:
    def body(rank: Rank) -> int:
        with make(rank, nics_per_rank=None) as comm:
            return comm.engine.num_nics

    assert run_threads(2, body) == [2, 2]
    with Engine(EngineConfig(transport="loopback")) as engine:
        assert engine.num_nics == 2


def test_names_of_devices_may_differ_between_ranks() -> None:
    shared = transport.shared_settings
    assert (
        shared("devices=mlx5_0:mlx5_1,mtu=4096") == shared("mtu=4096,devices=mlx5_2") == "mtu=4096"
    )
    assert shared("host=10.0.0.1,bind=10.0.0.1") == ""


def test_software_nics_of_a_gpu_get_the_kernel_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.jit, "load", lambda device, source, entry, macros: 70 + device)
    with_kernel = transport.with_row_kernel
    assert with_kernel("loopback", "seed=3", 1) == "seed=3,row_kernel=71"
    assert with_kernel("timed", "", 0) == "row_kernel=70"
    for unchanged in (("loopback", "", None), ("verbs", "", 0), ("timed", "row_kernel=0", 0)):
        assert with_kernel(*unchanged) == unchanged[1]

    def refuse(*_: object) -> int:
        raise errors.make(errors.UnavailableError, "no NVRTC")

    monkeypatch.setattr(transport.jit, "load", refuse)
    assert with_kernel("loopback", "gbps=5", 0) == "gbps=5"


# --- settings of the environment ---


def beside(machine: str) -> Callable[..., Choice]:
    """Chooses as on a machine that prefers this provider."""
    return lambda asked, **_: Choice(machine if asked == "auto" else asked, "", asked == "auto")


@pytest.mark.parametrize(
    ("named", "machine", "asked", "taken"),
    [
        ("", "verbs", "verbs", True),
        ("", "verbs", "auto", True),
        ("", "loopback", "loopback", True),  # there is nothing else that they can be for
        ("", "loopback", "libfabric", True),
        ("verbs", "verbs", "verbs", True),
        ("", "verbs", "loopback", False),
        ("", "libfabric", "loopback", False),
        ("verbs", "verbs", "loopback", False),
        ("libfabric", "loopback", "loopback", False),
        ("libfabric", "loopback", "verbs", False),
    ],
)
def test_settings_of_the_environment_are_for_one_transport(
    named: str, machine: str, asked: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported for NICs, they once failed whatever ran over the software NIC beside these."""
    monkeypatch.setattr(transport, "choose", beside(machine))
    monkeypatch.setenv("MOE_P2P_TRANSPORT", named)
    monkeypatch.setenv("MOE_P2P_TRANSPORT_SETTINGS", "traffic_class=104,proxy_cpu=3")
    config = EngineConfig(transport=asked)
    assert config.provider_settings == ("traffic_class=104" if taken else "")
    assert config.proxy_cpu == 3
    own = EngineConfig(transport=asked, transport_settings="seed=7")
    assert own.provider_settings == "seed=7"


def test_an_engine_beside_nics_that_the_environment_has_settings_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOE_P2P_TRANSPORT", "libfabric")
    monkeypatch.setenv("MOE_P2P_TRANSPORT_SETTINGS", "provider=tcp,interfaces=lo")
    Engine(EngineConfig(transport="loopback", nics_per_rank=1)).close()


@pytest.mark.parametrize("given", ["environment", "configuration"])
def test_ranks_of_one_node_beside_nics_with_settings(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the software NIC, which knows nothing of traffic classes."""
    settings = "traffic_class=104,proxy_cpu=0"
    if given == "environment":
        monkeypatch.setenv("MOE_P2P_TRANSPORT_SETTINGS", settings)
    monkeypatch.setattr(transport, "choose", beside("verbs"))
    config = AllToAllConfig(
        num_experts=2,
        hidden_dim=128,
        topk=1,
        max_tokens=4,
        transport_settings=settings if given == "configuration" else "",
    )
    with AllToAll(HashStore(), config, rank=0, world_size=1) as all_to_all:
        assert all_to_all.engine.provider == "loopback"
