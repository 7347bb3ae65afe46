"""`doctor --hosts`: what is wrong between healthy hosts, what differs, and the page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_p2p.tools.doctor import examine, job_text
from moe_p2p.tools.doctor.job import Answer, Job, judge_job
from moe_p2p.tools.doctor.report import Problem, Report, load
from tests.support import job_hosts

HOSTS = ("a", "b", "c")


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Report]:
    """Of healthy hosts, as they come out of JSON."""
    found = {}
    for number, host in enumerate(HOSTS, 1):
        (tmp_path / host).mkdir()
        report = job_hosts.roce(tmp_path / host, monkeypatch, host=number).examine()
        report = dataclasses.replace(report, loader={})  # it names the stand-in's folder
        found[host] = load(Report, json.loads(json.dumps(dataclasses.asdict(report))))
        assert found[host] == report
    return found


def judged(reports: dict[str, Report], **answers: Answer) -> Job:
    given = {host: Answer(report, None, 0.0, report.time_s) for host, report in reports.items()}
    return judge_job(given | answers, examine.software())


def nics(report: Report, **changes: Any) -> Report:
    """With `changes` of the first NIC."""
    first, *others = report.nics
    return dataclasses.replace(report, nics=[dataclasses.replace(first, **changes), *others])


def facts(report: Report, **changes: Any) -> Report:
    known = dict(report.nic_facts)
    known["mlx5_0"] = dataclasses.replace(known["mlx5_0"], **changes)
    return dataclasses.replace(report, nic_facts=known)


def test_healthy_hosts_have_no_problem_and_differ_in_nothing(reports: dict[str, Report]) -> None:
    job = judged(reports)
    assert job.problems == []
    assert job.differences == []
    assert job.same["NIC firmware"] == "28.42.1000"
    text = job_text.render(job)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "3 hosts"
    assert "GPUs 8 x NVIDIA H200" in lines
    assert "GID index 0, RoCE v2" in lines
    assert "problems\n  none" in text
    assert all(f"GIDs 10.0.0.{number}, 10.1.0.{number} ... 10.7.0.{number}" in text
               for number in (1, 2, 3))  # fmt: skip


def _changed(report: Report, name: str, value: str) -> Report:
    return dataclasses.replace(report, **{name: {**getattr(report, name), **json.loads(value)}})


PLANTED = {
    "version": (
        lambda r: _changed(r, "software", '{"moe_p2p": "0.0.9"}'),
        "it runs moe_p2p 0.0.9, letter .*; this machine 0",
        "pip install --force-reinstall moe_p2p==",
    ),
    "letter": (
        lambda r: _changed(r, "software", '{"letter": "beef"}'),
        "letter beef; this machine",
        "from one build",
    ),
    "transport": (
        lambda r: _changed(r, "transport", '{"provider": "libfabric"}'),
        "it takes transport libfabric, the others verbs",
        "MOE_P2P_TRANSPORT on all hosts",
    ),
    "variable": (
        lambda r: _changed(r, "variables", '{"MOE_P2P_FABRIC": "1"}'),
        "MOE_P2P_FABRIC is 1 here, not set on the others",
        "unset MOE_P2P_FABRIC",
    ),
    "MTU of a rail": (
        lambda r: facts(r, mtu=4200),
        "rail 0, mlx5_0: MTU 4200, on the others 9000",
        "ip link set dev rail0 mtu 9000",
    ),
    "MTU of an interface": (
        lambda r: _changed(r, "interfaces", '{"eno1": 9000}'),
        "eno1 has MTU 9000, on the others 1500",
        "ip link set dev eno1 mtu 1500",
    ),
    "GIDs": (
        lambda r: nics(r, gid="fe80::1"),
        "rail 0, mlx5_0: its GID is of IPv6, on the others of IPv4",
        "ip address add ADDRESS/LENGTH dev rail0",
    ),
    "link layer": (
        lambda r: nics(r, link_layer="InfiniBand"),
        "rail 0, mlx5_0: InfiniBand, on the others Ethernet",
        "mlxconfig -d mlx5_0 set LINK_TYPE_P1=2",
    ),
    "clock ahead": (
        lambda r: dataclasses.replace(r, time_s=r.time_s + 40),
        "its clock is 40 s or more ahead of",
        "chronyc makestep",
    ),
    "clock behind": (
        lambda r: dataclasses.replace(r, time_s=-40.0),
        "its clock is 40 s or more behind",
        "chronyc makestep",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_wrong_beside_others_is_found_on_the_host_that_is_odd(
    name: str, reports: dict[str, Report]
) -> None:
    plant, what, remedy = PLANTED[name]
    at = reports["b"].time_s
    changed = plant(reports["b"])
    job = judged(reports | {"b": changed}, b=Answer(changed, None, 0.0, at))
    assert len(job.problems) == 1, job.problems
    (problem,) = job.problems
    assert problem.hosts == ["b"]
    assert re.search(what, problem.what)
    assert re.search(remedy, problem.remedy)


def test_what_differs_is_shown_with_its_hosts_and_is_no_problem(
    reports: dict[str, Report],
) -> None:
    job = judged(reports | {"c": facts(reports["c"], firmware="28.39.1002")})
    assert job.problems == []
    (difference,) = job.differences
    assert difference.what == "NIC firmware"
    assert list(difference.values.values()) == [["a", "b"], ["c"]]
    assert "c: 28.42.1000 (7 of 8); 28.39.1002: mlx5_0" in job_text.render(job)


def test_one_problem_of_several_hosts_is_one_line(reports: dict[str, Report]) -> None:
    problem = Problem("/dev/shm has 64 MiB", "remount")
    ill = {
        host: dataclasses.replace(report, problems=[problem]) for host, report in reports.items()
    }
    job = judged(ill, d=Answer(None, Problem("did not answer", "ssh d true")))
    text = job_text.render(job, red=True)
    assert text.endswith(
        "problems\n  \x1b[31m- a, b, c: /dev/shm has 64 MiB\x1b[0m\n      remount\n"
        "  \x1b[31m- d: did not answer\x1b[0m\n      ssh d true"
    )
    assert "d  no report" in text


@pytest.mark.parametrize("named", [False, True])
def test_a_transport_of_one_host_is_none_for_a_job(named: bool, reports: dict[str, Report]) -> None:
    alone = {
        host: dataclasses.replace(
            report,
            transport={"provider": "loopback", "why": "there is no RDMA device"},
            variables={"MOE_P2P_TRANSPORT": "loopback"} if named else {},
        )
        for host, report in reports.items()
    }
    (problem,) = judged(alone).problems
    assert problem.hosts == list(HOSTS)
    assert problem.what.startswith("transport loopback reaches no other host")
    assert problem.remedy.startswith(
        "unset MOE_P2P_TRANSPORT" if named else "mend its NICs; for TCP"
    )


def test_the_form_of_json_is_kept(reports: dict[str, Report]) -> None:
    """A change of these names is a new FORM."""
    found = json.loads(json.dumps(dataclasses.asdict(judged(reports))))
    assert list(found) == ["hosts", "problems", "differences", "same", "form"]
    assert found["form"] == 1
    assert list(found["hosts"]["a"]) == [
        *("machine", "gpus", "nics", "rail_nics", "distances", "transport", "libraries"),
        *("packages", "memlock_bytes", "shm_bytes", "shm_free_bytes", "peer_memory", "torch_cuda"),
        *("forks", "gdrdrv", "tuned", "software", "drivers", "nic_facts", "interfaces", "cpu"),
        *("iommu", "redirected", "dma_buf_verbs", "variables", "imports", "python3", "loader"),
        *("time_s", "form", "writes", "problems"),
    ]


@pytest.mark.parametrize(
    ("path", "value"), [(("cpu", "allowed"), "two"), (("gpus", 0, "rails"), 3), (("gpus",), {})]
)
def test_a_report_of_another_form_is_refused(
    path: tuple[Any, ...], value: Any, reports: dict[str, Report]
) -> None:
    found = json.loads(json.dumps(dataclasses.asdict(reports["a"])))
    at = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises((TypeError, AttributeError)):
        load(Report, found)
