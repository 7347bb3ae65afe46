"""What `python -m moe_p2p doctor` finds wrong with a machine, and the remedies: pure.

Used by examine.py. What surrounds GPUs and NICs is judged in faults.py.
"""

from __future__ import annotations

import re

from moe_p2p.machine import transport, tuned
from moe_p2p.tools.doctor.faults import faults
from moe_p2p.tools.doctor.report import Problem, Report

MIN_EFA_VERSION = (1, 20)  # of libfabric (csrc/provider/libfabric/selection.cpp)
MIN_SHM_BYTES = 1 << 30
MIN_MEMLOCK_BYTES = 1 << 32  # registered memory is locked: regions, and users' KV caches


def judge(report: Report) -> list[Problem]:
    """Returns problems with their remedies. A machine without GPU or RDMA is no problem."""
    found = [*_memory_problems(report), *_gpu_problems(report), *_nic_problems(report)]
    found += [*_transport_problems(report), *faults(report)]
    if report.tuned.startswith(tuned.BROKEN):
        found.append(Problem(report.tuned, "delete the file"))
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
    if provider not in (*known, transport.TIMED):
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
    if with_rails and not report.peer_memory and all(gpu.dma_buf for gpu in with_rails):
        verbs = any(nic.kind == "verbs" for nic in report.nics if nic.name in report.rail_nics)
        if verbs and report.libraries["libibverbs"] and not report.dma_buf_verbs:
            found.append(
                Problem(
                    "libibverbs is too old for dma-bufs, and nvidia_peermem is not loaded: NICs "
                    "cannot reach GPU memory",
                    "modprobe nvidia_peermem, or install rdma-core 34 or newer",
                )
            )
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
