"""What `python -m moe_p2p doctor` reports of one machine; --json prints it unchanged.

Other hosts send it as JSON: `load` makes a Report of that. FORM changes with the fields.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_p2p.machine.topology import Nic

T = TypeVar("T")
FORM = 1


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str  # the command that mends it


@dataclass(frozen=True)
class GpuFacts:
    """One GPU. Fields that need the CUDA driver are None without it."""

    pci: str
    numa_node: int
    model: str
    cuda_device: int | None  # ordinal in this process
    dma_buf: bool | None
    writes_ordering: int | None  # GPU_DIRECT_RDMA_WRITES_ORDERING
    rails: list[str]
    firmware: str = ""
    pcie_lanes: int = 0  # 0: not known, as all below
    pcie_most_lanes: int = 0
    sm_mhz: int = 0
    sm_most_mhz: int = 0
    power_w: float = 0.0  # its limit
    power_default_w: float = 0.0
    slowed_by: list[str] = field(default_factory=list)
    fabric: str = ""  # of NVSwitch: "Completed"; empty: none


@dataclass(frozen=True)
class NicFacts:
    """One RDMA device beside what topology.Nic has. None: not visible."""

    firmware: str
    board: str
    gids: list[str]  # "3: RoCE v2 10.0.0.1"
    mtu: int  # of its interface; 0: it has none
    pcie_gbps: float  # what its slot carries; 0: not known
    pcie: str  # "32.0 GT/s x16"
    pfc: list[int] | None  # priorities that pause
    ecn: list[int] | None  # priorities of which congestion is notified and obeyed
    marked: int | None  # packets that switches have marked, since the start
    traffic_class: int | None  # the device's own, in place of a program's


@dataclass(frozen=True)
class CpuFacts:
    """CPUs of this process."""

    allowed: int
    online: int
    quota: float  # CPUs of time by cgroups; 0: no limit
    governors: list[str]
    clocksource: str


@dataclass(frozen=True)
class Write:
    """Result of NUM_WRITES writes from engine to engine on one rail."""

    provider: str
    nic: str
    memory: str  # "host" or "cuda:0"
    gbytes_per_s: float
    problem: str


@dataclass
class Report:
    """All facts; --json prints them unchanged."""

    machine: dict[str, str | int]
    gpus: list[GpuFacts]
    nics: list[Nic]
    rail_nics: list[str]  # NICs that rails are chosen from
    distances: dict[str, dict[str, str]]  # GPU, NIC: distance
    transport: dict[str, str]  # what "auto" means here: provider, why; without provider: an error
    libraries: dict[str, str]  # version and path; empty where it cannot be loaded
    packages: dict[str, str]
    memlock_bytes: int  # -1: unlimited
    shm_bytes: int
    shm_free_bytes: int
    peer_memory: bool
    torch_cuda: bool  # torch is built for CUDA
    forks: str  # what happens to memory registered over verbs in a fork; empty: no libibverbs
    gdrdrv: bool  # GDRCopy's driver is there
    tuned: str  # the file of `tune` that is used, and from when
    software: dict[str, str]  # moe_p2p, its letter, Python
    drivers: dict[str, str]  # versions of kernel modules
    nic_facts: dict[str, NicFacts]
    interfaces: dict[str, int]  # those with routes: MTU
    cpu: CpuFacts
    iommu: dict[str, str]  # GPU or NIC by PCI address: "translated", "passthrough"; empty: off
    redirected: list[str] | None  # bridges whose ACS sends writes to GPUs up; None: not visible
    dma_buf_verbs: bool  # libibverbs takes dma-bufs
    variables: dict[str, str]  # of the environment, those that choose transports
    imports: dict[str, str]  # module: its file, as programs here would import it
    python3: dict[str, str]  # the python3 of PATH: "path", and what it imports
    loader: dict[str, str]  # library: the file that programs get by its bare name
    time_s: float = 0.0  # by its clock, as the report was finished
    form: int = FORM
    writes: list[Write] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def load(kind: type[T], value: Any) -> T:
    """Makes a dataclass of what dataclasses.asdict and JSON made of it.

    Raises TypeError, KeyError or ValueError if the value has another form.
    """
    return typing.cast(T, _load(kind, value))


def _load(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(
            **{name: _load(kinds[name], each) for name, each in value.items()}
        )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _load_first(arguments, value)
    if origin in (list, tuple, dict) and not isinstance(value, dict if origin is dict else list):
        raise TypeError(f"{value!r} is no {'object' if origin is dict else 'list'}")
    if origin is list:
        return [_load(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(_load(arguments[0], each) for each in value)
    if origin is dict:
        return {name: _load(arguments[1], each) for name, each in value.items()}
    if not isinstance(value, (int, kind) if kind is float else kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _load_first(kinds: tuple[Any, ...], value: Any) -> Any:
    """As the first of several types that takes it."""
    for kind in kinds:
        try:
            return _load(kind, value)
        except (TypeError, AttributeError):
            continue
    raise TypeError(f"{value!r} is none of {kinds}")
