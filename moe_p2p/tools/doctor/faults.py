"""Problems of what surrounds GPUs and NICs: slots, networks, clocks, CPUs, silent TCP: pure.

Used by judge.py. What is not known is no problem. A machine without GPUs and NICs is judged by what
concerns it too.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import TypeVar

from moe_p2p import env
from moe_p2p.machine import transport
from moe_p2p.machine.topology import Distance, Nic
from moe_p2p.tools.doctor.report import GpuFacts, NicFacts, Problem, Report

T = TypeVar("T")
MIN_FREE_SHM_BYTES = 1 << 28
MIN_ROCE_MTU = 4200  # packets of 4096 bytes, with their headers
CPUS_PER_RANK = 2  # its polling thread's and its own
POWER_SHARE = 0.95  # of the usual limit, below which a GPU was limited on purpose
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")  # reads enter the kernel
SLOW_GOVERNORS = ("powersave", "ondemand", "conservative", "schedutil")
OVER_KERNEL = (
    "tcp",
    "net",
    "sockets",
    "udp",
)  # libfabric's providers over the kernel's network
ENGINES = ("vllm", "sglang", "megatron")
_ORDER = tuple(each.name.lower() for each in Distance)  # from near to far
_FAR = len(_ORDER) - 1


def faults(report: Report) -> list[Problem]:
    return [
        *_free_memory(report),
        *_cpus(report),
        *_slots(report),
        *_gpu_states(report),
        *_roce(report),
        *_rails(report),
        *_tcp(report),
        *_others(report),
    ]


def _free_memory(report: Report) -> list[Problem]:
    if report.shm_free_bytes >= MIN_FREE_SHM_BYTES or report.shm_bytes < MIN_FREE_SHM_BYTES:
        return []  # the latter is judged by its size
    return [
        Problem(
            f"/dev/shm is full: {report.shm_free_bytes >> 20} of {report.shm_bytes >> 20} MiB free",
            "ls -lS /dev/shm; rm what no process uses (fuser -v /dev/shm/*)",
        )
    ]


def _cpus(report: Report) -> list[Problem]:
    found, cpu = [], report.cpu
    if cpu.clocksource in SLOW_CLOCKS:
        found.append(
            Problem(
                f"the kernel's clock is {cpu.clocksource}: each look at the time is a system call",
                "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
            )
        )
    slow = [name for name in cpu.governors if name in SLOW_GOVERNORS]
    if slow and (report.gpus or report.nics):
        found.append(
            Problem(
                f"CPUs change their clock (governor {', '.join(slow)}), under threads that poll",
                "cpupower frequency-set --governor performance",
            )
        )
    need = CPUS_PER_RANK * max(1, len(report.gpus))
    why = f"{max(1, len(report.gpus))} ranks of this host need {need}, 2 each, of which one polls"
    if report.gpus and cpu.allowed < need:
        found.append(
            Problem(
                f"{cpu.allowed} of {cpu.online} CPUs may be used (affinity); {why}",
                f"srun --cpus-per-task={CPUS_PER_RANK} for each rank, or taskset -c "
                f"0-{cpu.online - 1}, docker run --cpuset-cpus=0-{cpu.online - 1}",
            )
        )
    if report.gpus and 0 < cpu.quota < need:
        found.append(
            Problem(
                f"a cgroup stops this process after {cpu.quota:g} CPUs' time; {why}",
                f"docker run --cpus={need}, or the pod's limits.cpu: {need}; cat "
                "/sys/fs/cgroup/cpu.max shows the limit",
            )
        )
    return found


# --- slots: PCIe, IOMMU, ACS ---


def _slots(report: Report) -> list[Problem]:
    found = []
    for nic in _used(report):
        facts = report.nic_facts.get(nic.name)
        if facts and 0 < facts.pcie_gbps < nic.rate_gbps:
            found.append(
                Problem(
                    f"{nic.name}: PCIe carries {facts.pcie_gbps:.0f} Gbit/s ({facts.pcie}) to a "
                    f"port of {nic.rate_gbps:g}",
                    f"lspci -vvs {nic.place.pci} | grep Lnk; seat the card anew, or raise the "
                    "slot's speed and width in the BIOS",
                )
            )
    found += [
        Problem(
            f"GPU {gpu.pci} has {gpu.pcie_lanes} PCIe lanes of {gpu.pcie_most_lanes}",
            f"lspci -vvs {gpu.pci} | grep Lnk; seat the card anew",
        )
        for gpu in report.gpus
        if 0 < gpu.pcie_lanes < gpu.pcie_most_lanes
    ]
    translated = [pci for pci, kind in report.iommu.items() if kind == "translated"]
    if translated and report.gpus and report.machine.get("architecture") == "x86_64":
        found.append(
            Problem(
                f"the IOMMU translates addresses of {_few(translated)}, so NICs reach GPUs through "
                "the CPU",
                'add iommu=pt to the kernel: grubby --update-kernel=ALL --args="iommu=pt" (Debian: '
                "GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub); reboot",
            )
        )
    if report.redirected:
        found.append(
            Problem(
                f"ACS of {_few(report.redirected)} sends what NICs write to GPUs up through the "
                "CPU",
                f"for b in {' '.join(report.redirected)}; do setpci -s $b ECAP_ACS+6.w=0000; done "
                "(after each boot), or switch ACS off in the BIOS",
            )
        )
    return found


def _gpu_states(report: Report) -> list[Problem]:
    found = []
    for why, gpus in _by(report.gpus, lambda gpu: ", ".join(gpu.slowed_by)).items():
        slowest = min(gpus, key=lambda gpu: gpu.sm_mhz)
        found.append(
            Problem(
                f"GPU {_few([gpu.pci for gpu in gpus])} is slowed down ({why}), to "
                f"{slowest.sm_mhz} of {slowest.sm_most_mhz} MHz",
                f"nvidia-smi -i {','.join(gpu.pci for gpu in gpus)} -q -d "
                "PERFORMANCE,TEMPERATURE,POWER; mend cooling or power",
            )
        )
    limited = [gpu for gpu in report.gpus if 0 < gpu.power_w < POWER_SHARE * gpu.power_default_w]
    if limited:
        gpu = limited[0]
        found.append(
            Problem(
                f"GPU {_few([gpu.pci for gpu in limited])} is limited to {gpu.power_w:g} W of "
                f"{gpu.power_default_w:g}",
                f"nvidia-smi -i {','.join(gpu.pci for gpu in limited)} -pl {gpu.power_default_w:g}",
            )
        )
    bad = [gpu for gpu in report.gpus if gpu.fabric not in ("", "Completed")]
    if bad:
        found.append(
            Problem(
                f"NVSwitch of {_few([gpu.pci for gpu in bad])}: {bad[0].fabric}; GPUs cannot reach "
                "each other",
                "systemctl restart nvidia-fabricmanager",
            )
        )
    return found


def _by(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Items of one text together; those with an empty text are left out."""
    found: dict[str, list[T]] = {}
    for item in items:
        if text := key(item):
            found.setdefault(text, []).append(item)
    return found


# --- networks ---


def _used(report: Report) -> list[Nic]:
    """NICs that rails are chosen from and that are hardware."""
    return [nic for nic in report.nics if nic.name in report.rail_nics and nic.place.pci]


def _roce(report: Report) -> list[Problem]:
    nics = [
        nic
        for nic in _used(report)
        if nic.kind == "verbs" and nic.link_layer == "Ethernet" and nic.name in report.nic_facts
    ]
    found = []
    for text, short in _by(nics, lambda nic: _small(report.nic_facts[nic.name])).items():
        mend = _for_each(short, "ip link set dev $i mtu 9000")
        found.append(Problem(f"{_named(short)}: {text}", f"{mend} (switches must carry it too)"))
    for text, bare in _by(nics, lambda nic: _unguarded(report.nic_facts[nic.name])).items():
        mend = _for_each(
            bare,
            "mlnx_qos -i $i --trust dscp --pfc 0,0,0,1,0,0,0,0; echo 1 > "
            "/sys/class/net/$i/ecn/roce_np/enable/3; echo 1 > "
            "/sys/class/net/$i/ecn/roce_rp/enable/3",
        )
        found.append(Problem(f"{_named(bare)}: {text}", mend))
    for text, astray in _by(nics, lambda nic: _astray(report, nic)).items():
        facts = report.nic_facts[astray[0].name]
        value = min({*(facts.pfc or []), *(facts.ecn or [])}) * 32 + 8
        found.append(
            Problem(
                f"{_named(astray)}: {text}",
                f"export MOE_P2P_TRANSPORT_SETTINGS=traffic_class={value}, or echo {value} > "
                f"/sys/class/infiniband/{astray[0].name}/tc/1/traffic_class, for each",
            )
        )
    return found


def _small(facts: NicFacts) -> str:
    if not 0 < facts.mtu < MIN_ROCE_MTU:
        return ""
    return f"MTU {facts.mtu} of the interface is too little for packets of 4096 bytes"


def _unguarded(facts: NicFacts) -> str:
    if facts.pfc != [] or facts.ecn != []:  # also None: not visible
        return ""
    return "neither PFC nor ECN for any priority, so congestion loses packets"


def _astray(report: Report, nic: Nic) -> str:
    """Whether the priorities of our writes are not among those that are guarded."""
    facts = report.nic_facts[nic.name]
    guarded = sorted({*(facts.pfc or []), *(facts.ecn or [])})
    settings = report.variables.get("MOE_P2P_TRANSPORT_SETTINGS", "")
    given = transport.setting(settings, "traffic_class") or "0"
    classes = [int(each) for each in given.split(":") if each.isdecimal()]
    if facts.traffic_class is not None:  # takes the place of what programs ask
        classes = [facts.traffic_class]
    outside = [each for each in classes if each >> 5 not in guarded]  # DSCP is the class / 4
    if not guarded or not outside:
        return ""
    return (
        f"writes travel in traffic class {outside[0]}, priority {outside[0] >> 5}, and the "
        f"interface guards priority {', '.join(map(str, guarded))} alone"
    )


def _named(nics: Iterable[Nic]) -> str:
    return _few([nic.name for nic in nics])


def _for_each(nics: Sequence[Nic], command: str) -> str:
    """command: of interface $i."""
    names = [next(iter(nic.interfaces), nic.name) for nic in nics]
    if len(names) == 1:
        return command.replace("$i", names[0])
    return f"for i in {' '.join(names)}; do {command}; done"


def _rails(report: Report) -> list[Problem]:
    """GPUs beside which a NIC cannot be used, and GPUs whose NICs are at another socket."""
    found = []
    for gpu in report.gpus:
        distances = report.distances.get(gpu.pci, {})
        nearest = _nearest(report, gpu)
        within = _FAR - 1 if nearest == -1 else min(nearest, _FAR - 1)
        lost = [
            nic
            for nic in report.nics
            if nic.problem and _ORDER.index(distances.get(nic.name, "far")) <= within
        ]
        if lost:
            interface = next(iter(lost[0].interfaces), "its interface")
            found.append(
                Problem(
                    f"GPU {gpu.pci} cannot use NICs beside it: "
                    + "; ".join(f"{nic.name}: {nic.problem}" for nic in lost[:4]),
                    f"ip link set dev {interface} up; ibv_devinfo -d {lost[0].name} shows the port "
                    "(cable, switch)",
                )
            )
    far = [gpu for gpu in report.gpus if gpu.numa_node != -1 and _nearest(report, gpu) == _FAR]
    if far and not found:
        found.append(
            Problem(
                f"GPU {_few([gpu.pci for gpu in far])} has no NIC at its socket; it uses "
                f"{_few(sorted({name for gpu in far for name in gpu.rails}))}",
                "nvidia-smi topo -m; give ranks the GPUs beside NICs (CUDA_VISIBLE_DEVICES), or "
                "move a card",
            )
        )
    return found


def _nearest(report: Report, gpu: GpuFacts) -> int:
    """Of a GPU's rails, in _ORDER; -1: it has none."""
    distances = report.distances.get(gpu.pci, {})
    return min((_ORDER.index(distances[name]) for name in gpu.rails), default=-1)


# --- silent TCP, and other packages than were meant ---


def _tcp(report: Report) -> list[Problem]:
    """Settings by which this package or others take TCP beside NICs, and none says so."""
    if not report.rail_nics:
        return []
    given, found = report.variables, []
    efa = any(nic.kind == "efa" for nic in _used(report))
    provider = transport.setting(given.get("MOE_P2P_TRANSPORT_SETTINGS", ""), "provider")
    if provider.partition(";")[0] in OVER_KERNEL:
        found.append(
            Problem(
                f"MOE_P2P_TRANSPORT_SETTINGS asks for libfabric's {provider}, beside "
                f"{len(report.rail_nics)} NICs: every byte goes over TCP",
                "unset MOE_P2P_TRANSPORT_SETTINGS MOE_P2P_TRANSPORT",
            )
        )
    named = given.get("FI_PROVIDER", "")
    if efa and named and "efa" not in named:
        found.append(
            Problem(f"FI_PROVIDER={named} hides EFA from libfabric", "export FI_PROVIDER=efa")
        )
    forced = [name for name in ("MC_FORCE_TCP", "NCCL_IB_DISABLE") if given.get(name, "0") != "0"]
    if given.get("NCCL_NET", "").lower() == "socket":
        forced.append("NCCL_NET")
    if forced:
        shown = " ".join(f"{name}={given[name]}" for name in forced)
        found.append(Problem(f"{shown}: what reads it takes TCP", f"unset {' '.join(forced)}"))
    mooncake = report.imports.get("mooncake.engine", "")
    if efa and mooncake and not _is_ours(mooncake) and given.get("MOONCAKE_PROTOCOL") != "efa":
        found.append(
            Problem(
                f"Mooncake ({mooncake}) moves KV caches over TCP here: without "
                "MOONCAKE_PROTOCOL=efa it takes no EFA device",
                "export MOE_P2P_AS_MOONCAKE=1 (this package's), or MOONCAKE_PROTOCOL=efa",
            )
        )
    plugin = given.get("NCCL_NET_PLUGIN", "")
    if efa and ("/" in plugin or not (plugin or "libnccl-net.so" in report.loader)):
        why = f"NCCL_NET_PLUGIN={plugin} is a path" if plugin else "no libnccl-net.so is found"
        found.append(
            Problem(
                f"NCCL takes TCP beside EFA: {why}, and its plugin goes by a short name",
                "export NCCL_NET_PLUGIN=ofi (libnccl-net-ofi.so of AWS's installer)",
            )
        )
    return found


def _others(report: Report) -> list[Problem]:
    """Another package, Python or library than was meant."""
    given, found = report.variables, []
    efa = any(nic.kind == "efa" for nic in _used(report))
    for module, short in (("deep_ep", "deep_ep"), ("mooncake.engine", "mooncake")):
        name = f"MOE_P2P_AS_{short.upper()}"
        asked = given.get(name, "0").lower() in env.ON or f"moe_p2p/{short}/path" in given.get(
            "PYTHONPATH", ""
        )
        where = report.imports.get(module, "")
        if where and not _is_ours(where) and (asked or (efa and short == "deep_ep")):
            why = "though this package's is asked for" if asked else "which knows no EFA"
            found.append(
                Problem(
                    f"import {module} gives {where}, {why}",
                    f"export {name}=1 and start programs by {report.software['program']}, or "
                    f"{report.software['program']} -m pip uninstall {module.partition('.')[0]}",
                )
            )
    has = report.python3.get("has", "")
    engines = [name for name in ENGINES if name in has]
    ours = f"moe_p2p {report.software['moe_p2p']}"
    if ("moe_p2p" in has and ours not in has) or (engines and "moe_p2p" not in has):
        what = "another version of moe_p2p" if "moe_p2p" in has else "no moe_p2p"
        found.append(
            Problem(
                f"python3 is {report.python3['path']}, with {what}; this is "
                f"{report.software['program']}: programs started by python3 do not run this one",
                f"export PATH={PurePath(report.software['program']).parent}:$PATH, or "
                f"{shlex.quote(report.python3['path'])} -m pip install "
                f"moe_p2p=={report.software['moe_p2p']}",
            )
        )
    aws = report.libraries.get("libfabric", "").rpartition(" ")[2]
    other = report.loader.get("libfabric.so.1", "")
    if efa and aws and other and other != aws:
        found.append(
            Problem(
                f"two libfabrics: this package opens {aws}, and programs that open libfabric.so.1 "
                f"(Mooncake, NIXL, NCCL's plugin) get {other}: EFA breaks, or they take TCP",
                f"export LD_LIBRARY_PATH={PurePath(aws).parent}:$LD_LIBRARY_PATH",
            )
        )
    return found


def _is_ours(file: str) -> bool:
    return any(f"/moe_p2p/{name}/" in file for name in ("deep_ep", "mooncake", "nixl_ep"))


def _few(names: Iterable[str], most: int = 4) -> str:
    each = list(names)
    more = f" and {len(each) - most} more" if len(each) > most else ""
    return ", ".join(each[:most]) + more
