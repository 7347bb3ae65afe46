"""A job's page: its hosts, what they have in common, what differs, and the problems last."""

from __future__ import annotations

from collections.abc import Sequence

from moe_p2p.tools.doctor.job import Job
from moe_p2p.tools.doctor.report import Report
from moe_p2p.tools.doctor.text import problem_lines, table


def render(job: Job, *, red: bool = False) -> str:
    """red: problems in the colour of terminals."""
    sections = [
        (f"{len(job.hosts)} hosts", table([_host(*each) for each in job.hosts.items()])),
        ("the same on all hosts", table(list(job.same.items())) if job.same else []),
        ("differs", _differences(job)),
        (
            "problems",
            problem_lines(
                [(f"{_names(p.hosts)}: {p.what}", p.remedy) for p in job.problems], red=red
            ),
        ),
    ]
    return "\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines)
        for title, lines in sections
        if lines
    )


def _host(name: str, report: Report | None) -> tuple[str, ...]:
    if report is None:
        return (name, "no report", "", "", "")
    gids = [nic.gid for nic in report.nics if nic.name in report.rail_nics]
    shown = ", ".join(gids[:2]) + (f" ... {gids[-1]}" if len(gids) > 2 else "")
    hot = [gpu.sm_mhz for gpu in report.gpus if gpu.sm_mhz]
    return (
        name,
        str(report.machine["name"]),
        f"{len(report.gpus)} GPUs" + (f" at {_between(hot)} MHz" if hot else ""),
        f"{len(report.rail_nics)} NICs" + (f", GIDs {shown}" if shown else ""),
        f"/dev/shm {report.shm_free_bytes >> 20} MiB free",
    )


def _between(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _differences(job: Job) -> list[str]:
    lines = []
    for each in job.differences:
        lines.append(each.what)
        lines += [f"  {_names(hosts)}: {value}" for value, hosts in each.values.items()]
    return lines


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) <= 4:
        return ", ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} ... {hosts[-1]} ({len(hosts)} hosts)"
