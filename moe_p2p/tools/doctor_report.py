"""What `python -m moe_p2p doctor` reports; --json prints it unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_p2p.machine.topology import Nic


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str


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
    writes: list[Write] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
