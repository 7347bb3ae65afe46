"""`python -m moe_p2p doctor`: what this machine has for moe_p2p, what it lacks and how to fix it.

`examine` collects facts, `judge` (pure) turns them into problems, doctor_text.py prints them. Works
without a GPU, without RDMA and without their libraries; it opens only engines, which write to each
other to test each rail.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from moe_p2p.config import EngineConfig
from moe_p2p.engine import Engine
from moe_p2p.errors import MoeP2pError
from moe_p2p.gpu import driver
from moe_p2p.nics import topology, transport
from moe_p2p.nics.topology import Gpu, Host, Nic
from moe_p2p.tools import doctor_text

PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
LIBRARIES = {
    "libibverbs": transport.PROVIDERS[transport.VERBS].libraries,
    "libfabric": transport.PROVIDERS[transport.LIBFABRIC].libraries,
    "libcuda": ("libcuda.so.1",),
    "libcudart": ("libcudart.so",),  # as libfabric opens it
}
LIBRARY_OF = {"efa": "libfabric", "verbs": "libibverbs"}  # by kind of NIC
MIN_EFA_VERSION = (1, 20)  # of libfabric (csrc/provider/libfabric/selection.cpp)
MIN_SHM_BYTES = 1 << 30
MIN_MEMLOCK_BYTES = 1 << 32  # registered memory is locked: regions, and users' KV caches
CAP_IPC_LOCK = 14  # linux/capability.h
WRITE_BYTES, NUM_WRITES = 4 << 20, 4
WRITE_TIMEOUT_S = 10.0


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


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str


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
    writes: list[Write] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Prints the report. 0: usable; 1: problems were found."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_p2p doctor", description="What this machine has and lacks for moe_p2p."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-writes", action="store_true", help="open no engines")
    given = parser.parse_args(arguments)
    report = examine(writes=not given.no_writes)
    print(json.dumps(asdict(report), indent=2) if given.json else doctor_text.render(report))
    return 1 if report.problems else 0


def examine(root: Path = Path("/"), *, writes: bool = True) -> Report:
    """The report of this machine; sysfs, /proc and /dev are read below `root`."""
    host = topology.read_host(root)
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    report = Report(
        machine={
            "name": platform.node(),
            "kernel": platform.release(),
            "cpus": len(os.sched_getaffinity(0)),
            "driver": _driver(root),
        },
        gpus=_gpus(root, host),
        nics=list(host.nics),
        rail_nics=[nic.name for nic in transport.rail_nics(host)],
        distances={
            gpu.place.pci: {
                nic.name: topology.distance(gpu.place, nic.place).name.lower() for nic in host.nics
            }
            for gpu in host.gpus
        },
        transport=_choice(root),
        libraries={name: _library(files) for name, files in LIBRARIES.items()},
        packages={name: _package(name) for name in PACKAGES},
        memlock_bytes=_memlock_bytes(),
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        peer_memory=any(
            (root / "sys/module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")
        ),
        torch_cuda=torch.version.cuda is not None,
    )
    if writes:
        report.writes = _write_everywhere(report)
    report.problems = judge(report)
    return report


# --- facts ---


def _driver(root: Path) -> str:
    """Version of the loaded NVIDIA kernel driver; empty when there is none."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return found[1] if found else ""


def _choice(root: Path) -> dict[str, str]:
    try:
        choice = transport.choose("auto", root=root)
    except MoeP2pError as error:  # MOE_P2P_NICS names a missing device
        return {"provider": "", "why": str(error)}
    return {"provider": choice.provider, "why": choice.why}


def _gpus(root: Path, host: Host) -> list[GpuFacts]:
    """GPUs of sysfs, and GPUs that only CUDA knows (containers may hide /sys)."""
    ordinals = _cuda_devices()
    known = {gpu.place.pci for gpu in host.gpus}
    hidden = [Gpu(topology.Place(pci)) for pci in ordinals if pci not in known]
    nics = transport.rail_nics(host)
    found = []
    for gpu in (*host.gpus, *hidden):
        device = ordinals.get(gpu.place.pci)
        rails = topology.rails(host, nics, gpu) if gpu.place.pci in known and nics else []
        dma_buf = _attribute(device, "DMA_BUF_SUPPORTED")
        found.append(
            GpuFacts(
                pci=gpu.place.pci,
                numa_node=gpu.place.numa_node,
                model=_model(root, gpu.place.pci, device),
                cuda_device=device,
                dma_buf=None if dma_buf is None else bool(dma_buf),
                writes_ordering=_attribute(device, "GPU_DIRECT_RDMA_WRITES_ORDERING"),
                rails=[nic.name for nic in rails],
            )
        )
    return found


def _cuda_devices() -> dict[str, int]:
    """PCI address and ordinal of each CUDA device of this process."""
    if not torch.cuda.is_available():
        return {}
    try:
        return {transport.pci_of(i): i for i in range(torch.cuda.device_count())}
    except MoeP2pError:  # no cuda-bindings; judge() says so
        return {}


def _attribute(device: int | None, name: str) -> int | None:
    try:
        return None if device is None else driver.attribute(device, name)
    except MoeP2pError:
        return None


def _model(root: Path, pci: str, device: int | None) -> str:
    try:
        text = (root / f"proc/driver/nvidia/gpus/{pci}/information").read_text()
    except OSError:
        return torch.cuda.get_device_name(device) if device is not None else ""
    found = re.search(r"Model:\s*(.+)", text)
    return found[1].strip() if found else ""


def _library(files: tuple[str, ...]) -> str:
    """Version and path of the first of `files` that can be loaded."""
    for name in files:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        path = _mapped(Path(name).name.split(".so")[0])
        version = path.partition(".so.")[2]
        if hasattr(library, "fi_version"):
            packed = int(library.fi_version())
            version = f"{packed >> 16}.{packed & 0xFFFF}"
        return f"{version} {path}".strip()
    return ""


def _mapped(stem: str) -> str:
    """Real path of a library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(rf"\s(/\S*/{re.escape(stem)}\.so\S*)$", maps, re.MULTILINE)
    return os.path.realpath(found[1]) if found else ""


def _memlock_bytes() -> int:
    """Bytes that this process may lock; -1: unlimited, also with CAP_IPC_LOCK."""
    status = Path("/proc/self/status").read_text()
    effective = re.search(r"^CapEff:\s*(\w+)", status, re.MULTILINE)
    if effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1:
        return -1
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# --- writes ---


def _write_everywhere(report: Report) -> list[Write]:
    """Loopback always; each usable NIC with host memory, each rail with memory of its GPU."""
    done = [_write("loopback", "", "host")]
    for nic in report.nics:
        if nic.problem or not report.libraries[LIBRARY_OF[nic.kind]]:
            continue  # judge() says so
        provider = transport.OF_KIND[nic.kind]
        done.append(_write(provider, nic.name, "host"))
        done.extend(
            _write(provider, nic.name, f"cuda:{gpu.cuda_device}")
            for gpu in report.gpus
            if gpu.cuda_device is not None and nic.name in gpu.rails
        )
    return done


def _write(provider: str, nic: str, memory: str) -> Write:
    """Writes between two engines on one NIC, and compares the bytes."""
    device = None if memory == "host" else torch.device(memory)
    gpu = None if device is None else device.index
    try:
        with (
            Engine(
                EngineConfig(
                    transport=provider, nics_per_rank=1, nics=nic, timeout_s=WRITE_TIMEOUT_S
                ),
                gpu=gpu,
            ) as sender,
            Engine(
                EngineConfig(
                    transport=provider, nics_per_rank=1, nics=nic, timeout_s=WRITE_TIMEOUT_S
                ),
                gpu=gpu,
            ) as receiver,
        ):
            data = torch.randint(0, 256, (WRITE_BYTES,), dtype=torch.uint8, device=device or "cpu")
            inbox = torch.zeros_like(data)
            if device is not None:
                torch.cuda.synchronize(device)
            region = sender.resolve(receiver.register(inbox).descriptor)
            source = sender.register(data)
            began = time.perf_counter()
            requests = [sender.write(source, region, imm=1) for _ in range(NUM_WRITES)]
            for request in requests:
                request.wait()
            receiver.wait_imm(1, NUM_WRITES)
            gbytes_per_s = NUM_WRITES * WRITE_BYTES / (time.perf_counter() - began) / 1e9
            problem = "" if torch.equal(data, inbox) else "other bytes arrived than were written"
    except RuntimeError as error:
        return Write(provider, nic, memory, 0.0, str(error))
    return Write(provider, nic, memory, gbytes_per_s, problem)


# --- judging ---


def judge(report: Report) -> list[Problem]:
    """Returns problems with their remedies. A machine without GPU or RDMA is no problem."""
    found = [*_memory_problems(report), *_gpu_problems(report), *_nic_problems(report)]
    found += _transport_problems(report)
    found += [
        Problem(
            f"write over {' '.join(filter(None, (write.provider, write.nic)))} with {write.memory} "
            f"memory failed: {write.problem}",
            "mend what it names, then run this again",
        )
        for write in report.writes
        if write.problem
    ]
    return found


def _transport_problems(report: Report) -> list[Problem]:
    provider, why = report.transport["provider"], report.transport["why"]
    known = (*transport.PROVIDERS, transport.LOOPBACK)
    if not provider:
        return [Problem(why, "correct MOE_P2P_NICS")]
    if provider == "null":
        return [Problem(f"transport null moves no bytes ({why})", "unset MOE_P2P_TRANSPORT")]
    if provider not in known:
        return [
            Problem(
                f'there is no transport "{provider}" ({why})',
                f"correct MOE_P2P_TRANSPORT: {', '.join(known)}",
            )
        ]
    return []


def _memory_problems(report: Report) -> list[Problem]:
    if report.shm_bytes >= MIN_SHM_BYTES:
        return []
    return [
        Problem(
            f"/dev/shm has {report.shm_bytes >> 20} MiB; ranks of a node share memory there",
            "start the container with --shm-size=2g, or mount -o remount,size=2g /dev/shm",
        )
    ]


def _gpu_problems(report: Report) -> list[Problem]:
    if not report.gpus:
        return []
    if not report.machine["driver"] and not report.libraries["libcuda"]:
        return [
            Problem(
                f"{len(report.gpus)} GPUs without the NVIDIA driver",
                "install it (apt-get install nvidia-open), or start the container with --gpus all",
            )
        ]
    found = []
    if not report.torch_cuda:
        found.append(Problem("torch is built without CUDA", "pip install torch, of a CUDA build"))
    if not report.packages["cuda-bindings"] or not report.packages["cuda-core"]:
        found.append(
            Problem("kernels cannot be compiled: no cuda-core", "pip install 'moe_p2p[cuda]'")
        )
    with_rails = [gpu for gpu in report.gpus if gpu.rails]
    # dma_buf is None where the driver could not be asked, without torch's CUDA or cuda-bindings.
    if not report.peer_memory and with_rails and all(gpu.dma_buf is False for gpu in with_rails):
        found.append(
            Problem(
                "NICs cannot reach GPU memory: neither dma-buf nor nvidia_peermem",
                "use the open kernel modules (apt-get install nvidia-open), or modprobe "
                "nvidia_peermem",
            )
        )
    return found


def _nic_problems(report: Report) -> list[Problem]:
    if not report.nics:
        return []
    usable = [nic for nic in report.nics if not nic.problem]
    if not usable:
        why = "; ".join(f"{nic.name}: {nic.problem}" for nic in report.nics[:8])
        return [Problem(f"no RDMA device can be used: {why}", "mend one of them")]
    found = []
    kinds = {nic.kind for nic in usable}
    if "efa" in kinds and not report.libraries["libfabric"]:
        found.append(
            Problem(
                "EFA devices without libfabric",
                "run the EFA installer of AWS (libfabric in /opt/amazon/efa)",
            )
        )
    version = re.match(r"(\d+)\.(\d+)", report.libraries["libfabric"])
    if "efa" in kinds and version and tuple(map(int, version.groups())) < MIN_EFA_VERSION:
        found.append(
            Problem(
                f"libfabric {version[0]} is too old for EFA, which needs 1.20",
                "run the EFA installer of AWS (libfabric in /opt/amazon/efa)",
            )
        )
    no_dma_buf = bool(report.gpus) and all(gpu.dma_buf is False for gpu in report.gpus)
    if "efa" in kinds and no_dma_buf and not report.libraries.get("libcudart"):
        found.append(
            Problem(
                "EFA cannot take GPU memory: libfabric finds no libcudart.so, by that very name, "
                "and the driver exports no dma-bufs",
                "use the open kernel modules (apt-get install nvidia-open), or put a folder with a "
                "link libcudart.so to the library of the pip package into LD_LIBRARY_PATH",
            )
        )
    if "verbs" in kinds and not report.libraries["libibverbs"]:
        found.append(
            Problem(
                "RDMA devices without libibverbs",
                "apt-get install libibverbs1 ibverbs-providers (dnf install libibverbs)",
            )
        )
    if 0 <= report.memlock_bytes < MIN_MEMLOCK_BYTES:
        found.append(
            Problem(
                f"{report.memlock_bytes >> 10} KiB of memory may be locked; NICs lock what they "
                "write and read",
                "ulimit -l unlimited; memlock in /etc/security/limits.conf; containers: --ulimit "
                "memlock=-1",
            )
        )
    return found
