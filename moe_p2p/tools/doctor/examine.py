"""The facts of this machine, and what judge.py finds wrong with them. Used by command.py, ranks.py.

It needs no GPU, no RDMA and no libraries, and opens only engines, which write to each other.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import sys
import time
from pathlib import Path

import torch

from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.errors import MoeP2pError
from moe_p2p.fleet.letter import letter
from moe_p2p.machine import driver, topology, transport, tuned
from moe_p2p.machine.topology import Gpu, Host
from moe_p2p.tools.doctor import network, silent, surroundings
from moe_p2p.tools.doctor.judge import judge
from moe_p2p.tools.doctor.report import GpuFacts, Report, Write
from moe_p2p.version import __version__

PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
LIBRARIES = {
    "libibverbs": transport.PROVIDERS[transport.VERBS].libraries,
    "libfabric": transport.PROVIDERS[transport.LIBFABRIC].libraries,
    "libcuda": ("libcuda.so.1",),
    "libcudart": ("libcudart.so",),  # as libfabric opens it
    "libgdrapi": ("libgdrapi.so.2", "libgdrapi.so"),  # GDRCopy's
}
LIBRARY_OF = {"efa": "libfabric", "verbs": "libibverbs"}  # by kind of NIC
FORK_UNNEEDED = 2  # of ibv_is_fork_initialized: Linux 5.12 and later
CAP_IPC_LOCK = 14  # linux/capability.h
WRITE_BYTES, NUM_WRITES, WRITE_TIMEOUT_S = 4 << 20, 4, 10.0


def examine(root: Path = Path("/"), *, writes: bool = True) -> Report:
    """The report of this machine; sysfs, /proc and /dev are read below `root`."""
    host = topology.read_host(root)
    places = [each.place for each in host.gpus] + [each.place for each in host.nics]
    variables, allowed = silent.variables(), len(os.sched_getaffinity(0))
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    report = Report(
        machine=_machine(root, allowed),
        gpus=_gpus(root, host),
        nics=list(host.nics),
        rail_nics=[nic.name for nic in transport.rail_nics(host)],
        distances=_distances(host),
        transport=_choice(root),
        libraries={name: _library(files) for name, files in LIBRARIES.items()},
        packages={name: _package(name) for name in PACKAGES},
        memlock_bytes=_memlock_bytes(root),
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        peer_memory=any(
            (root / "sys/module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")
        ),
        torch_cuda=torch.version.cuda is not None,
        forks=_forks(),
        gdrdrv=os.access(root / "dev/gdrdrv", os.R_OK | os.W_OK),
        tuned=tuned.describe(),
        software=software(),
        drivers=network.drivers(root),
        nic_facts={nic.name: network.nic_facts(root, nic) for nic in host.nics},
        interfaces=network.interfaces(root),
        cpu=surroundings.cpu(root, allowed),
        iommu=surroundings.iommu(root, [place.pci for place in places if place.pci]),
        redirected=surroundings.redirected(root, host.gpus, transport.rail_nics(host)),
        dma_buf_verbs=_has("libibverbs.so.1", "ibv_reg_dmabuf_mr"),
        variables=variables,
        imports=silent.imports(),
        python3=silent.python3(),
        loader=silent.loader(variables),
    )
    if writes:
        report.writes = _write_everywhere(report)
    report.problems = judge(report)
    report.time_s = time.time()
    return report


# --- facts ---


def software() -> dict[str, str]:
    return {
        "moe_p2p": __version__,
        "letter": letter(),
        "Python": platform.python_version(),
        "program": sys.executable,
    }


def _machine(root: Path, cpus: int) -> dict[str, str | int]:
    return {
        "name": platform.node(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": cpus,
        "driver": _driver(root),
    }


def _distances(host: Host) -> dict[str, dict[str, str]]:
    """GPU, NIC: their distance."""
    return {
        gpu.place.pci: {
            nic.name: topology.distance(gpu.place, nic.place).name.lower() for nic in host.nics
        }
        for gpu in host.gpus
    }


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
    ordinals, states = _cuda_devices(), surroundings.gpu_states()
    known = {gpu.place.pci for gpu in host.gpus}
    hidden = [Gpu(topology.Place(pci)) for pci in ordinals if pci not in known]
    nics = transport.rail_nics(host)
    found = []
    for gpu in (*host.gpus, *hidden):
        device = ordinals.get(gpu.place.pci)
        rails = topology.rails(host, nics, gpu) if gpu.place.pci in known and nics else []
        dma_buf = _attribute(device, "DMA_BUF_SUPPORTED")
        state = states.get(gpu.place.pci, {})
        lanes, most_lanes = surroundings.pcie_lanes(root, gpu.place.pci)
        found.append(
            GpuFacts(
                pci=gpu.place.pci,
                numa_node=gpu.place.numa_node,
                model=_model(root, gpu.place.pci, device),
                cuda_device=device,
                dma_buf=None if dma_buf is None else bool(dma_buf),
                writes_ordering=_attribute(device, "GPU_DIRECT_RDMA_WRITES_ORDERING"),
                rails=[nic.name for nic in rails],
                firmware=state.get("firmware", ""),
                pcie_lanes=lanes,
                pcie_most_lanes=most_lanes,
                sm_mhz=int(state.get("sm_mhz") or 0),
                sm_most_mhz=int(state.get("sm_most_mhz") or 0),
                power_w=float(state.get("power_w") or 0),
                power_default_w=float(state.get("power_default_w") or 0),
                slowed_by=state.get("slowed_by", "").split(),
                fabric=state.get("fabric", ""),
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


def _forks() -> str:
    """What provider verbs does for forks here (csrc/provider/verbs/api.cpp)."""
    try:
        library = ctypes.CDLL(LIBRARIES["libibverbs"][0])
    except OSError:
        return ""
    status = getattr(library, "ibv_is_fork_initialized", lambda: 0)()
    if status == FORK_UNNEEDED:
        return "the kernel keeps registered memory for the parent"
    return "ibv_fork_init: children of a fork must not touch registered host memory"


def _mapped(stem: str) -> str:
    """Real path of a library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(rf"\s(/\S*/{re.escape(stem)}\.so\S*)$", maps, re.MULTILINE)
    return os.path.realpath(found[1]) if found else ""


def _has(library: str, symbol: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(library), symbol)
    except OSError:
        return False


def _memlock_bytes(root: Path) -> int:
    """Bytes that this process may lock; -1: unlimited, also with CAP_IPC_LOCK."""
    effective = re.search(
        r"^CapEff:\s*(\w+)", surroundings.text(root / "proc/self/status"), re.MULTILINE
    )
    if effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1:
        return -1
    limits = surroundings.text(root / "proc/self/limits")
    soft = re.search(r"^Max locked memory\s+(\d+|unlimited)", limits, re.MULTILINE)
    return int(soft[1]) if soft and soft[1].isdecimal() else -1


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
