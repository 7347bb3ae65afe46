"""`python -m moe_p2p bench` under torchrun: on one host, and on two that are network namespaces."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from moe_p2p.bench import options
from moe_p2p.tools import launch
from tests.moe.test_hosts import ROOT
from tests.support import hosts, warm

PORT = 29537
SMALL = ["--device=cpu", "--tokens=4", "--hidden=256", "--topk=2", "--experts=8"]
DEADLINE_S = 280.0


def torchrun(*arguments: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node=2", *arguments]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def run_on_two_hosts(module: str, *arguments: str) -> list[tuple[int, str]]:
    """Two ranks on each; (exit status, output) of each host's torchrun."""
    env = environment(
        MOE_P2P_TRANSPORT="libfabric",
        MOE_P2P_TRANSPORT_SETTINGS="provider=tcp,interfaces=eth0:eth1,timeout_ms=10000",
    )
    with hosts.Hosts(2, num_interfaces=2) as both:
        meeting = (f"--master-addr={both.address(0)}", f"--master-port={PORT}", "--nnodes=2")
        for host in range(2):
            program = torchrun(*meeting, f"--node-rank={host}", "-m", module, *arguments)
            both.start(host, *program, env=env)
        return both.outcomes(DEADLINE_S)


def test_two_hosts_meet_before_a_span_and_make_figures_over_two_interfaces_each(
    tmp_path: Path,
) -> None:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    out = tmp_path / "rows.json"
    figures = [f"--json={out}", "--plot=", "--seconds=0.1", "--checks=2", "--nics=2"]
    (first, printed), (second, other) = run_on_two_hosts(
        "tests.support.hosts_meet", *SMALL, *figures, "--ranks-per-node=2,1"
    )
    assert (first, second) == (0, 0), printed + other
    assert "the hosts met" in printed
    assert "4 CPU ranks, 2 nodes of 2, 2 NICs a rank, 2 hosts" in printed
    assert printed.count("wrote ") == 1
    assert "tokens/s" not in other  # the first rank prints for all
    assert "wrote " not in other
    rows = json.loads(out.read_text())
    assert {(row["ranks_per_node"], row["system"], row["what"]) for row in rows} == {
        (local, system, what)
        for local in (2, 1)
        for system in ("moe_p2p", "torch")
        for what in ("pair eager", "dispatch", "combine")
    }
    for row in rows:
        assert row["correct"] is True, row["wrong"]
        assert (row["hosts"], row["ranks"]) == (2, 4)
        if row["system"] == "moe_p2p":
            assert row["wire_bytes"] == row["expected_wire_bytes"] > 0


@pytest.mark.more  # its lines are test_bench_check.py's, its hosts the test above's
@pytest.mark.timeout(300)
def test_a_check_of_two_hosts() -> None:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    arguments = (*SMALL, "--check", "--checks=2", "--ranks-per-node=2", "--nics=2")
    (first, printed), (second, other) = run_on_two_hosts("moe_p2p", "bench", *arguments)
    assert (first, second) == (0, 0), printed + other
    assert "4 ranks on CPUs of 2 hosts, nodes of 2, 2 libfabric NICs a rank" in printed
    for name in (
        "by_rank, fp8, scales are ue8m0",
        "a rank that closes is named",
        "a process that is killed is named",
    ):  # the outputs of all ranks are one pipe: log lines may stand before the verdict
        assert re.search(rf"^{name} \.\.\. .*?ok, \d+\.\d s$", printed, re.M | re.S), name
    assert "NICs that reorder or fail ... skipped" in printed
    assert "WRONG" not in printed


@pytest.mark.more  # ranks of two hosts, in two worlds, are the first test's
def test_ranks_of_torchrun_on_one_host_are_the_ranks_of_the_bench(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    worlds = ["--ranks-per-node=2,1", "--no-baseline", "--seconds=0.05", "--checks=1"]
    command = torchrun("--standalone", "-m", "moe_p2p", "bench", *SMALL, *worlds, "--plot=")
    done = warm.run(
        *command, f"--json={out}", capture_output=True, text=True, env=environment(), timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {(row["ranks"], row["ranks_per_node"], row["hosts"]) for row in rows} == {
        (2, 2, 1),
        (2, 1, 1),
    }
    assert done.stdout.count("wrote ") == 1


def launched(monkeypatch: pytest.MonkeyPatch, *, ranks: int, local: int) -> None:
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


def test_torchrun_decides_ranks_and_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, ranks=16, local=8)
    (found,) = options.parse(["--device=cpu", "--gbps=100"])
    assert (found.ranks, found.ranks_per_node, found.hosts, found.nics) == (16, 8, 2, 0)
    assert found.transport_settings == ""  # a rate of these NICs, for the floor
    split = options.parse(["--device=cpu", "--check"])
    assert [each.ranks_per_node for each in split] == [8, 1]
    for arguments, text in (
        (["--ranks=8"], "--ranks: torchrun has started 16 ranks"),
        (["--ranks-per-node=16"], "--ranks 8 is not a multiple of --ranks-per-node 16"),
        (["--seed=3"], "software NIC, which reaches one host"),
    ):
        with pytest.raises(SystemExit):
            options.parse(["--device=cpu", *arguments])
        assert text in capsys.readouterr().err
    launched(monkeypatch, ranks=3, local=2)
    with pytest.raises(SystemExit):
        options.parse(["--device=cpu"])
    assert "torchrun has started 3 ranks, 2 of them here" in capsys.readouterr().err


def test_one_gpu_is_shared_for_a_check_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    worlds = options.parse(["--check"])
    assert [(each.ranks, each.ranks_per_node, each.gbps) for each in worlds] == [
        (2, 2, 0),
        (2, 1, 0),
    ]
    (found,) = options.parse(["--check", "--ranks=4", "--ranks-per-node=1"])
    assert (found.ranks, found.ranks_per_node) == (4, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    # NVML may list GPUs of the host that CUDA does not give this process; torch asks it at first.
    listed = [8]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: listed[0])
    monkeypatch.setattr(torch.cuda, "init", lambda: listed.__setitem__(0, 1))
    assert launch.device_index() == 0
    with pytest.raises(SystemExit):
        options.parse(["--ranks=4", "--ranks-per-node=1"])
    assert "ranks that share one would be of its time slices" in capsys.readouterr().err


def test_the_interface_is_that_of_the_way_to_a_host() -> None:
    assert launch.interface_to("127.0.0.1") == "lo"
    assert launch.interface_to("no such host") == ""
