"""The doctor's report as text."""

from __future__ import annotations

from collections.abc import Sequence

from moe_p2p import env
from moe_p2p.machine import transport
from moe_p2p.machine.topology import Nic
from moe_p2p.tools.doctor.job import lines
from moe_p2p.tools.doctor.report import Report

_AROUND = (
    *("GPU firmware", "GPU clock, most", "GPU power limit", "GPU memory for NICs"),
    *("NIC firmware", "NIC PCIe", "MTU", "MTU of interfaces", "PFC", "ECN", "traffic class"),
    *("IOMMU", "ACS", "CPUs", "CPU clock", "python3"),
)
_RED, _PLAIN = "\033[31m", "\033[0m"
_ORDERING = {0: "none", 100: "owner", 200: "all devices"}


def render(report: Report, *, red: bool = False) -> str:
    """All sections, problems last. red: those in the colour of terminals."""
    machine = report.machine
    sections = [
        ("machine", [f"{machine['name']}, Linux {machine['kernel']}, {machine['cpus']} CPUs"]),
        ("GPUs", _gpus(report)),
        ("NICs", _nics(report)),
        ("distance", _distances(report)),
        ("transport", [f"{report.transport['provider'] or 'none'}: {report.transport['why']}"]),
        ("software", _software(report)),
        ("tuned", [report.tuned]),
        ("memory", _memory(report)),
        ("around", _around(report)),
        ("writes", _writes(report)),
        ("problems", problem_lines([(p.what, p.remedy) for p in report.problems], red=red)),
    ]
    return "\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines)
        for title, lines in sections
        if lines
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _numa(node: int) -> str:
    return "" if node == -1 else str(node)


def _gpus(report: Report) -> list[str]:
    if not report.gpus:
        return ["none of NVIDIA"]
    rows = [("", "PCI", "model", "NUMA", "CUDA", "dma-buf", "NIC writes ordered for", "rails")]
    rows += [
        (
            f"GPU{i}",
            gpu.pci,
            gpu.model,
            _numa(gpu.numa_node),
            "" if gpu.cuda_device is None else str(gpu.cuda_device),
            {None: "", True: "yes", False: "no"}[gpu.dma_buf],
            "" if gpu.writes_ordering is None else _ORDERING.get(gpu.writes_ordering, "?"),
            " ".join(gpu.rails),
        )
        for i, gpu in enumerate(report.gpus)
    ]
    return table(rows)


def _nics(report: Report) -> list[str]:
    if not report.nics:
        return ["no RDMA device"]
    rows = [("", "PCI", "NUMA", "kind", "state", "Gbit/s", "link", "interface", "GID", "")]
    rows += [
        (
            nic.name,
            nic.place.pci,
            _numa(nic.place.numa_node),
            nic.kind,
            nic.state,
            f"{nic.rate_gbps:g}",
            nic.link_layer,
            " ".join(nic.interfaces),
            nic.gid,
            _use(report, nic),
        )
        for nic in report.nics
    ]
    return table(rows)


def _use(report: Report, nic: Nic) -> str:
    if nic.problem:
        return f"not used: {nic.problem}"
    return "" if nic.name in report.rail_nics else "not used: others are preferred"


def _distances(report: Report) -> list[str]:
    if not report.distances or not report.nics:
        return []
    names = [nic.name for nic in report.nics]
    rows = [("", *(f"GPU{i}" for i in range(len(report.distances))))]
    rows += [(name, *(far[name] for far in report.distances.values())) for name in names]
    return table(rows)


def _software(report: Report) -> list[str]:
    known = {"NVIDIA driver": str(report.machine["driver"]), **report.libraries, **report.packages}
    return table([(name, version or "not there") for name, version in known.items()])


def _around(report: Report) -> list[str]:
    """Those of the job's lines that no other section has."""
    known = lines(report)
    named = [*_AROUND, *(f"import {name}" for name in report.imports), *report.variables]
    rows = [(name, known[name]) for name in named if name in known]
    return table(rows) if rows else []


def arrivals(report: Report) -> str:
    """How GPUs here see what comes from other nodes (EngineConfig.arrivals); empty: no GPUs."""
    if not report.gpus:
        return ""
    verbs = report.transport["provider"] == transport.VERBS
    if verbs and transport.setting(env.transport_settings(), "ordered_writes") == "1":
        return "write: NICs store flags into GPU memory, where all ranks' do (ordered_writes=1)"
    library = bool(report.libraries.get("libgdrapi"))
    if library and report.gdrdrv:
        return "gdrcopy: GDRCopy is there, and is used where the GPU can flush"
    lacks = "libgdrapi" if not library else "/dev/gdrdrv"
    return (
        f"relay: a block of each kernel passes them on; GDRCopy is not used, {lacks} is not there"
    )


def _memory(report: Report) -> list[str]:
    lock = report.memlock_bytes
    seen = arrivals(report)
    return table(
        [
            *([("arrivals", seen)] if seen else []),
            ("lockable", "unlimited" if lock < 0 else f"{lock >> 10} KiB"),
            *([("forks", report.forks)] if report.forks else []),
            ("/dev/shm", f"{report.shm_bytes >> 20} MiB, {report.shm_free_bytes >> 20} free"),
            ("GPU peer memory", "module loaded" if report.peer_memory else "no module"),
        ]
    )


def _writes(report: Report) -> list[str]:
    if not report.writes:
        return []
    return table(
        [
            (
                " ".join(filter(None, (write.provider, write.nic))),
                f"{write.memory} memory",
                "failed" if write.problem else f"{write.gbytes_per_s:.2f} GB/s",
            )
            for write in report.writes
        ]
    )


def problem_lines(problems: Sequence[tuple[str, str]], *, red: bool = False) -> list[str]:
    """What is wrong, and below it the command that mends it. red: in the colour of terminals."""
    lines = []
    for what, remedy in problems:
        lines += [f"{_RED}- {what}{_PLAIN}" if red else f"- {what}", f"    {remedy}"]
    return lines or ["none"]
