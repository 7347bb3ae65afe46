"""A job's hosts: problems of each and of all together, and what differs between them: pure.

`judge_job` takes what each host answered (hosts.py, ranks.py); job_text.py prints what it returns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_p2p.machine import transport
from moe_p2p.tools.doctor.report import FORM, Problem, Report, load
from moe_p2p.version import __version__

CLOCK_S = 1.0  # by which clocks may be apart beyond what the way of the answer took
# Variables that ranks of one job must have in common.
SHARED = (
    "MOE_P2P_TRANSPORT",
    "MOE_P2P_FABRIC",
    "MOE_P2P_LOW_LATENCY_PARTIALS",
    "MOE_P2P_SECRET",
)


@dataclass(frozen=True)
class Answer:
    """What a host answered. Times by this machine's clock, in seconds."""

    report: Report | None
    problem: Problem | None = None  # why there is no report
    asked_s: float = 0.0
    answered_s: float = 0.0


def read_answer(found: Any, asked_s: float, answered_s: float, mend: str) -> Answer:
    """The answer of a host that sent `found`. mend: how this version is installed there."""
    software = found.get("software")
    version = software.get("moe_p2p") if isinstance(software, dict) else None
    why = f"it runs moe_p2p {version or 'of an older form'}, whose report is another"
    if found.get("form") == FORM:
        try:
            return Answer(load(Report, found), None, asked_s, answered_s)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            why = f"its report cannot be read: {error}"
    return Answer(None, Problem(f"{why}; this is moe_p2p {__version__}", mend))


@dataclass(frozen=True)
class JobProblem:
    hosts: list[str]  # that have it
    what: str
    remedy: str


@dataclass(frozen=True)
class Difference:
    what: str
    values: dict[str, list[str]]  # value: the hosts that have it


@dataclass(frozen=True)
class Job:
    """--json prints it unchanged. hosts: None where no report came."""

    hosts: dict[str, Report | None]
    problems: list[JobProblem]
    differences: list[Difference]
    same: dict[str, str] = field(default_factory=dict)  # what is the same on all hosts
    form: int = FORM


def judge_job(answers: Mapping[str, Answer], ours: Mapping[str, str]) -> Job:
    """ours: Report.software of the machine that asks."""
    reports = {host: answer.report for host, answer in answers.items() if answer.report}
    found: list[tuple[str, Problem]] = []
    for host, answer in answers.items():
        if answer.problem:
            found.append((host, answer.problem))
        if answer.report:
            found += [(host, problem) for problem in _own(answer.report, len(answers))]
            found += [(host, problem) for problem in _version(answer.report, ours)]
            found += [(host, problem) for problem in _clock(answer)]
    found += _together(reports)
    facts = {host: lines(report) for host, report in reports.items()}
    names = list(dict.fromkeys(itertools.chain.from_iterable(facts.values())))
    table = {name: _by_value(facts, name) for name in names}
    return Job(
        hosts={host: answer.report for host, answer in answers.items()},
        problems=_grouped(found),
        differences=[Difference(name, by) for name, by in table.items() if len(by) > 1],
        same={name: next(iter(by)) for name, by in table.items() if len(by) == 1},
    )


def _grouped(found: Sequence[tuple[str, Problem]]) -> list[JobProblem]:
    """One for all hosts that have the same."""
    hosts: dict[Problem, list[str]] = {}
    for host, problem in found:
        hosts.setdefault(problem, []).append(host)
    return [JobProblem(each, problem.what, problem.remedy) for problem, each in hosts.items()]


# --- problems ---


def _own(report: Report, num_hosts: int) -> list[Problem]:
    provider = report.transport["provider"]
    if num_hosts == 1 or provider not in transport.SOFTWARE:
        return report.problems
    named = "MOE_P2P_TRANSPORT" in report.variables
    return [
        *report.problems,
        Problem(
            f"transport {provider} reaches no other host ({report.transport['why']})",
            "unset MOE_P2P_TRANSPORT"
            if named
            else "mend its NICs; for TCP: export MOE_P2P_TRANSPORT=libfabric "
            "MOE_P2P_TRANSPORT_SETTINGS=provider=tcp",
        ),
    ]


def _version(report: Report, ours: Mapping[str, str]) -> list[Problem]:
    if all(report.software[name] == ours[name] for name in ("moe_p2p", "letter")):
        return []
    theirs = f"{report.software['moe_p2p']}, letter {report.software['letter']}"
    return [
        Problem(
            f"it runs moe_p2p {theirs}; this machine {ours['moe_p2p']}, letter {ours['letter']}",
            f"{report.software['program']} -m pip install --force-reinstall "
            f"moe_p2p=={ours['moe_p2p']}, from one build",
        )
    ]


def _clock(answer: Answer) -> list[Problem]:
    """The report was finished between question and answer, by a right clock."""
    assert answer.report is not None
    at = answer.report.time_s
    ahead = max(at - answer.answered_s, 0.0) or min(at - answer.asked_s, 0.0)
    if abs(ahead) <= CLOCK_S:
        return []
    word = "ahead of" if ahead > 0 else "behind"
    return [
        Problem(
            f"its clock is {abs(ahead):.0f} s or more {word} this machine's",
            "chronyc makestep (timedatectl set-ntp true)",
        )
    ]


def _together(reports: Mapping[str, Report]) -> list[tuple[str, Problem]]:
    """What is wrong only beside other hosts: named of the hosts that are in the minority."""
    found = _odd(
        reports,
        lambda report: report.transport["provider"],
        lambda report, odd, usual: Problem(
            f"it takes transport {odd or 'none'}, the others {usual or 'none'}: "
            f"{report.transport['why']}",
            "mend what it names, or export MOE_P2P_TRANSPORT on all hosts alike",
        ),
    )
    for name in SHARED:
        found += _odd(
            reports,
            lambda report, name=name: report.variables.get(name, ""),  # type: ignore[misc]
            lambda report, odd, usual, name=name: Problem(  # type: ignore[misc]
                f"{name} is {odd or 'not set'} here, {usual or 'not set'} on the others",
                f"export {name}={usual}" if usual else f"unset {name}",
            ),
        )
    interfaces = sorted({name for report in reports.values() for name in report.interfaces})
    for name in interfaces:
        found += _odd(
            {host: report for host, report in reports.items() if name in report.interfaces},
            lambda report, name=name: str(report.interfaces[name]),  # type: ignore[misc]
            lambda report, odd, usual, name=name: Problem(  # type: ignore[misc]
                f"{name} has MTU {odd}, on the others {usual}",
                f"ip link set dev {name} mtu {usual}",
            ),
        )
    for rail in range(max((len(report.rail_nics) for report in reports.values()), default=0)):
        found += _rail(reports, rail)
    return found


def _rail(reports: Mapping[str, Report], rail: int) -> list[tuple[str, Problem]]:
    """NIC i of one host writes to NIC i of another."""
    here = {host: report for host, report in reports.items() if rail < len(report.rail_nics)}

    def name(report: Report) -> str:
        return report.rail_nics[rail]

    def interface(report: Report) -> str:
        nic = next(nic for nic in report.nics if nic.name == name(report))
        return next(iter(nic.interfaces), "")

    def value(report: Report) -> str:
        nic = next(nic for nic in report.nics if nic.name == name(report))
        return "IPv6" if ":" in nic.gid else "IPv4"

    def link(report: Report) -> str:
        return next(nic.link_layer for nic in report.nics if nic.name == name(report))

    found = _odd(
        here,
        link,
        lambda report, odd, usual: Problem(
            f"rail {rail}, {name(report)}: {odd}, on the others {usual}",
            f"mlxconfig -d {name(report)} set LINK_TYPE_P1={1 if usual == 'InfiniBand' else 2}, or "
            "MOE_P2P_NICS in one order on all hosts",
        ),
    )
    roce = {host: report for host, report in here.items() if link(report) == "Ethernet"}
    found += _odd(
        roce,
        value,
        lambda report, odd, usual: Problem(
            f"rail {rail}, {name(report)}: its GID is of {odd}, on the others of {usual}",
            f"ip address add ADDRESS/LENGTH dev {interface(report)}, of {usual} on all hosts",
        ),
    )
    known = {host: report for host, report in roce.items() if interface(report)}
    listed = {host: r for host, r in known.items() if interface(r) not in r.interfaces}
    found += _odd(
        listed,
        lambda report: str(report.nic_facts[name(report)].mtu),
        lambda report, odd, usual: Problem(
            f"rail {rail}, {name(report)}: MTU {odd}, on the others {usual}",
            f"ip link set dev {interface(report)} mtu {usual}",
        ),
    )
    return found


def _odd(
    reports: Mapping[str, Report],
    value: Callable[[Report], str],
    problem: Callable[[Report, str, str], Problem],
) -> list[tuple[str, Problem]]:
    """A problem of each host whose value is not the usual one; of two, the first host's is."""
    values = {host: value(report) for host, report in reports.items()}
    if len({*values.values()}) < 2:
        return []
    usual = Counter(values.values()).most_common(1)[0][0]
    return [
        (host, problem(reports[host], odd, usual)) for host, odd in values.items() if odd != usual
    ]


# --- facts in a line each ---


def _by_value(facts: Mapping[str, Mapping[str, str]], name: str) -> dict[str, list[str]]:
    hosts: dict[str, list[str]] = {}
    for host, lines_of_host in facts.items():
        hosts.setdefault(lines_of_host.get(name, "none"), []).append(host)
    return hosts


def lines(report: Report) -> dict[str, str]:
    """A host's facts, each in a line, that hosts of a job should have in common."""
    software = {name: each for name, each in report.software.items() if name != "letter"}
    drivers = {f"driver {name}": each for name, each in report.drivers.items() if name != "nvidia"}
    found = {
        **software,
        "kernel": str(report.machine["kernel"]),
        "NVIDIA driver": str(report.machine["driver"]),
        **drivers,
        **{name: each.partition(" ")[0] for name, each in report.libraries.items()},
        **report.packages,
        "transport": report.transport["provider"],
        **_gpu_lines(report),
        **_nic_lines(report),
        "MTU of interfaces": _spread({n: str(mtu) for n, mtu in report.interfaces.items()}),
        **_host_lines(report),
        "python3": report.python3.get("path", ""),
        **{f"import {name}": file for name, file in report.imports.items()},
        **report.loader,
        **report.variables,
    }
    return {name: each for name, each in found.items() if each}


def _gpu_lines(report: Report) -> dict[str, str]:
    gpus = {f"GPU{i}": gpu for i, gpu in enumerate(report.gpus)}
    return {
        "GPUs": _counted(gpu.model or "unknown" for gpu in report.gpus),
        "GPU firmware": _spread({name: gpu.firmware for name, gpu in gpus.items()}),
        "GPU clock, most": _spread({n: _unit(g.sm_most_mhz, "MHz") for n, g in gpus.items()}),
        "GPU power limit": _spread({n: _unit(g.power_w, "W") for n, g in gpus.items()}),
        "GPU memory for NICs": _gpu_direct(report),
        "rails of GPUs": _spread({name: str(len(gpu.rails)) for name, gpu in gpus.items()}),
        "nearest NIC": _spread({name: _nearest(report, gpu.pci) for name, gpu in gpus.items()}),
    }


def _nic_lines(report: Report) -> dict[str, str]:
    nics = {nic.name: nic for nic in report.nics if nic.name in report.rail_nics}
    facts = {name: report.nic_facts[name] for name in nics}
    classes = {name: str(each.traffic_class or "") for name, each in facts.items()}
    return {
        "NICs": _counted(f"{nic.rate_gbps:g} Gbit/s {nic.link_layer}" for nic in nics.values()),
        "NIC firmware": _spread({name: each.firmware for name, each in facts.items()}),
        "NIC board": _spread({name: each.board for name, each in facts.items()}),
        "NIC PCIe": _spread({name: each.pcie for name, each in facts.items()}),
        "MTU": _spread({name: _unit(each.mtu, "") for name, each in facts.items()}),
        "PFC": _spread({name: _priorities(each.pfc) for name, each in facts.items()}),
        "ECN": _spread({name: _priorities(each.ecn) for name, each in facts.items()}),
        "traffic class": _spread(classes, unknown="programs'"),
        "GID": _spread({name: _gid(report, name) for name in nics}),
    }


def _host_lines(report: Report) -> dict[str, str]:
    cpu, lock = report.cpu, report.memlock_bytes
    acs = "not visible" if report.redirected is None else ", ".join(report.redirected) or "off"
    return {
        "IOMMU": _spread(report.iommu) or "off, or not visible",
        "ACS": f"redirects at {acs}" if report.redirected else acs,
        "lockable memory": "unlimited" if lock < 0 else f"{lock >> 10} KiB",
        "/dev/shm": f"{report.shm_bytes >> 20} MiB",
        "CPUs": f"{cpu.allowed} of {cpu.online}" + (f", {cpu.quota:g} by quota" * bool(cpu.quota)),
        "CPU clock": ", ".join(filter(None, (cpu.clocksource, *cpu.governors))),
    }


def _spread(values: Mapping[str, str], *, unknown: str = "not visible") -> str:
    """One value where all are the same, else the usual one, and the names of the others."""
    by: dict[str, list[str]] = {}
    for name, value in values.items():
        by.setdefault(value or unknown, []).append(name)
    if len(by) < 2:
        return next(iter(by), "").replace(unknown, "")
    usual = max(by, key=lambda value: len(by[value]))
    odd = [f"{value}: {', '.join(names)}" for value, names in by.items() if value != usual]
    return "; ".join([f"{usual} ({len(by[usual])} of {len(values)})", *odd])


def _counted(values: Iterable[str]) -> str:
    counts = Counter(values)
    return ", ".join(f"{count} x {value}" for value, count in sorted(counts.items()))


def _unit(value: float, unit: str) -> str:
    return f"{value:g} {unit}".strip() if value else ""


def _priorities(found: list[int] | None) -> str:
    if found is None:
        return ""
    return f"priorities {', '.join(map(str, found))}" if found else "no priority"


def _gid(report: Report, name: str) -> str:
    """Which GID is used, without its address."""
    nic = next(nic for nic in report.nics if nic.name == name)
    used = next((gid for gid in report.nic_facts[name].gids if gid.endswith(f" {nic.gid}")), "")
    index, _, rest = used.partition(": ")
    return f"index {index}, {rest.rpartition(' ')[0]}" if used else ""


def _nearest(report: Report, pci: str) -> str:
    far = report.distances.get(pci, {})
    order = ("switch", "root", "numa", "far")
    return min((far[name] for name in report.rail_nics if name in far), key=order.index, default="")


def _gpu_direct(report: Report) -> str:
    ways = []
    if report.gpus and all(gpu.dma_buf for gpu in report.gpus):
        ways.append("dma-buf")
    if report.peer_memory:
        ways.append("peermem")
    if report.gdrdrv:
        ways.append("gdrcopy")
    return ", ".join(ways)
