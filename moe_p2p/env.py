"""The one module that reads or sets the environment. Values are read at each call.

Switches, below "1:" or "0:", take 1, true, on or yes, and 0, false, off or no, in any case; another
word raises InvalidArgumentError.

MOE_P2P_TRANSPORT           provider behind transport="auto" (default: what the machine has)
MOE_P2P_TRANSPORT_SETTINGS  its settings where a configuration gives none
MOE_P2P_NICS                RDMA devices in rail order where a configuration names none
MOE_P2P_CACHE               folder of compiled kernels, writable by no other user (default:
                            ~/.cache/moe_p2p; without a home directory, moe_p2p-<user id> in the
                            folder for temporary files)
MOE_P2P_TUNED               file of `python -m moe_p2p tune`; none: use no such file (default: one
                            in the folder of compiled kernels, named by the machine)
MOE_P2P_DIRECT              0: no call goes past torch's dispatcher (moe/direct.py)
MOE_P2P_FABRIC              1: ranks of a node share GPU memory by fabric handle (set on all ranks)
MOE_P2P_LOW_LATENCY_PARTIALS
                            bfloat16 or block16 (default): how partial sums of moe_p2p.deep_ep's
                            low-latency calls travel whose sums are bfloat16 (set on all ranks)
MOE_P2P_AS_DEEP_EP          1: importing moe_p2p makes `import deep_ep` give moe_p2p.deep_ep
MOE_P2P_AS_DEEP_EP_V25      1: likewise `import deep_ep_v25` and moe_p2p.deep_ep_v25
MOE_P2P_AS_MOONCAKE         1: likewise `import mooncake.engine` and moe_p2p.mooncake
MOE_P2P_AS_NIXL_EP          1: likewise `import nixl_ep` and moe_p2p.nixl_ep
MC_TRANSFER_TIMEOUT         Mooncake's: seconds of a transfer of moe_p2p.mooncake (default: 30)
MOE_P2P_NVTX                1: calls are ranges on the timeline of Nsight Systems
MOE_P2P_ENGINES             1: vLLM and SGLang load moe_p2p.integrations as a plugin
EP_DISABLE_GIN              set for vLLM, which checks NCCL for DeepEP V2 unless it is 1
CUDA_HOME                   CUDA toolkit whose headers kernels may use (default: /usr/local/cuda)
MOE_P2P_LOG                 error, warning, info or debug, in any case; also read by
                            csrc/base/log.cpp
MOE_P2P_SECRET              secret by which processes trust each other over verbs and for KV
                            transfer, equal on all ranks; also read by
                            csrc/provider/verbs/proof.cpp
PYTHONPATH                  extended for processes that this one starts
MOE_P2P_KV_STORE            HOST:PORT where KV workers of SGLang find each other; SGLang moves KV
                            through moe_p2p where it is set
MOE_P2P_WEIGHTS_STORE       HOST:PORT where TorchTitan's trainers and generator meet
MOE_P2P_KV_FENCE            key or queue_pair: how KV workers take memory back (default: key)
MOE_P2P_KV_HOST             address under which KV workers of engines are reached
MOE_P2P_KV_VERIFY           off, always or sample:0.01: checksums of KV workers in engines
MOE_P2P_KV_TIMEOUTS         open_s=300,tail_s=60: deadlines of KV workers in engines
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
                            rank and number of ranks, of the job and of this host, and the host of
                            the rendezvous, set by torchrun
MASTER_PORT                 port of the rendezvous, for scripts that use deep_ep.utils.envs; with
                            TORCHELASTIC_USE_AGENT_STORE set here for steps of fabric-check
TORCHELASTIC_USE_AGENT_STORE
                            True: torchrun serves the store of the rendezvous
NCCL_*, FI_*, UCCL_*, EP_*  shown in fabric-check's report, as MOE_P2P_* are, without secrets
NO_COLOR                    set: no colours on terminals
GLOO_SOCKET_IFNAME          interface of torch's gloo; set here for jobs on several hosts
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from moe_p2p.errors import InvalidArgumentError, make

_PACKAGED = Path(__file__).resolve().parent / "machine" / "compiled"  # moe_p2p_kernels
# For a report that leaves this machine: what is shown, and names of variables whose values are not.
_SHOWN = ("MOE_P2P_", "NCCL_", "FI_", "UCCL_", "EP_")
_SECRET = re.compile("SECRET|TOKEN|PASS|CREDENTIAL|AUTH|PRIVATE|COOKIE|_KEY|KEY_|^KEY|APIKEY", re.I)
_OF_HOSTS = re.compile(
    "HOSTNAME|_HOST$|^HOST$|NODELIST|NODENAME|NODE_NAME|_ADDR$|_STORE$|_SERVERS?$|CLUSTER_NAME|DOMAIN"
)
_OF_USERS = re.compile("^USER$|_USER$|USERNAME|LOGNAME|ACCOUNT|EMAIL|_PROJECT$")
_one_folder = False  # use_cache_folder() was called


_OF_TRANSPORTS = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
    *("MC_FORCE_TCP", "MOONCAKE_PROTOCOL"),
)
ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")  # setup.py has the latter too


def _switch(name: str, *, default: bool = False) -> bool:
    given = os.environ.get(name, "")
    word = given.strip().lower()
    if word in ON or word in _OFF:
        return word in ON
    if word:
        words = ", ".join((*ON, *_OFF))
        raise make(InvalidArgumentError, f"{name} is {given!r}, must be one of {words}")
    return default


def transport() -> str:
    """Provider for transport="auto"; empty: the machine decides."""
    return os.environ.get("MOE_P2P_TRANSPORT", "")


def transport_settings() -> str:
    """`key=value,...` for the provider."""
    return os.environ.get("MOE_P2P_TRANSPORT_SETTINGS", "")


def nics() -> str:
    """`mlx5_0,mlx5_1`: the devices to use; empty: the topology decides."""
    return os.environ.get("MOE_P2P_NICS", "")


def secret() -> str:
    """By which workers of a KV transfer trust each other; empty: drawn by each, in its lease."""
    return os.environ.get("MOE_P2P_SECRET", "")


def kv_store() -> str:
    """`HOST:PORT` of the store of KV workers; empty: SGLang moves KV by itself."""
    return os.environ.get("MOE_P2P_KV_STORE", "")


def weights_store() -> str:
    """`HOST:PORT` of the store that the first of TorchTitan's trainers serves."""
    return os.environ.get("MOE_P2P_WEIGHTS_STORE", "")


def low_latency_partials() -> str:
    """How bfloat16 sums of low-latency calls travel."""
    return os.environ.get("MOE_P2P_LOW_LATENCY_PARTIALS", "block16")


def kv_fence() -> str:
    """How KV workers take memory back where their caller does not say."""
    return os.environ.get("MOE_P2P_KV_FENCE", "key")


def kv_host() -> str:
    """Under which KV workers of engines are reached; empty: as their store's machine sees them."""
    return os.environ.get("MOE_P2P_KV_HOST", "")


def kv_verify() -> str:
    """Of KV workers that decode in engines, as `KVReceiver.verify`; empty: its default."""
    return os.environ.get("MOE_P2P_KV_VERIFY", "")


def kv_timeouts() -> str:
    """Fields of KVTimeouts of KV workers in engines, "open_s=300,tail_s=60"; empty: none."""
    return os.environ.get("MOE_P2P_KV_TIMEOUTS", "")


def log_level() -> str:
    """What is logged, as it is given."""
    return os.environ.get("MOE_P2P_LOG") or "warning"


def cache_folder() -> Path:
    """Folder of compiled kernels, unless kernel_cache.py refuses it."""
    if given := os.environ.get("MOE_P2P_CACHE"):
        return Path(given)
    home = Path(os.path.expanduser("~"))  # stays "~" without HOME and without a passwd entry
    if home.is_absolute():
        return home / ".cache" / "moe_p2p"
    return Path(tempfile.gettempdir()) / f"moe_p2p-{os.getuid()}"


def kernels_folder() -> Path | None:
    """A second folder of compiled kernels, which is only read; None: there is none."""
    given = os.environ.get("MOE_P2P_KERNELS")
    return Path(given) if given else None


def tuned_file() -> str:
    """Path of what `tune` has measured; empty: the machine names it; "none": nothing."""
    return os.environ.get("MOE_P2P_TUNED", "")


def packaged_kernels() -> Path | None:
    """The folder of the wheel moe_p2p_kernels (contrib/release/kernels.py), or None."""
    return None if _one_folder else _PACKAGED


def use_cache_folder(folder: Path) -> None:
    """Makes `folder` the only one of compiled kernels, in this process."""
    global _one_folder
    _one_folder = True
    os.environ["MOE_P2P_CACHE"] = str(folder)
    os.environ.pop("MOE_P2P_KERNELS", None)


def fabric() -> bool:
    """Whether GPU memory is shared by fabric handle instead of by file descriptor."""
    return _switch("MOE_P2P_FABRIC")


def direct() -> bool:
    """Whether eager calls may go past torch's dispatcher. Read when the package is imported."""
    return _switch("MOE_P2P_DIRECT", default=True)


def as_deep_ep() -> bool:
    """Whether `import deep_ep` shall give moe_p2p.deep_ep."""
    return _switch("MOE_P2P_AS_DEEP_EP")


def as_deep_ep_v25() -> bool:
    """Whether `import deep_ep_v25` shall give moe_p2p.deep_ep_v25."""
    return _switch("MOE_P2P_AS_DEEP_EP_V25")


def as_mooncake() -> bool:
    """Whether `import mooncake.engine` shall give moe_p2p.mooncake.engine."""
    return _switch("MOE_P2P_AS_MOONCAKE")


def as_nixl_ep() -> bool:
    """Whether `import nixl_ep` shall give moe_p2p.nixl_ep."""
    return _switch("MOE_P2P_AS_NIXL_EP")


def nvtx() -> bool:
    """Whether calls are ranges of NVTX."""
    return _switch("MOE_P2P_NVTX")


def mooncake_timeout_s() -> float:
    """Deadline of a transfer of moe_p2p.mooncake. Raises InvalidArgumentError unless above 0."""
    given = os.environ.get("MC_TRANSFER_TIMEOUT") or "30"
    try:
        if (seconds := float(given)) > 0:
            return seconds
    except ValueError:
        pass
    raise make(
        InvalidArgumentError,
        f"MC_TRANSFER_TIMEOUT is {given!r}, must be a number of seconds above 0",
    )


def engines() -> bool:
    """Whether vLLM's and SGLang's plugin replaces their classes for DeepEP."""
    return _switch("MOE_P2P_ENGINES")


def disable_gin() -> None:
    """Makes vLLM leave out its check of NCCL for DeepEP V2, unless the user has decided."""
    os.environ.setdefault("EP_DISABLE_GIN", "1")


def prepend_to_python_path(folder: Path) -> None:
    """Makes processes started from now on search `folder` for modules first."""
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([rest] if rest else [])])


def hide_frames_of_torch() -> None:
    """Processes started from now on print no C++ warnings of torch, unless their level is set.

    Of a connection that ends they are 20 lines of frames each, around the one line that says it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def cuda_home() -> Path:
    """Folder of the CUDA toolkit; it may not exist."""
    return Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")


def rank() -> int:
    """Rank that the launcher gave this process."""
    return int(os.environ["RANK"])


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys()


def world_size() -> int:
    """Number of ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """Index of this rank among the ranks of this host."""
    return int(os.environ["LOCAL_RANK"])


def local_world_size() -> int:
    """Number of ranks that the launcher started on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def master_address() -> str:
    """Host of the launcher's rendezvous."""
    return os.environ["MASTER_ADDR"]


def master_port() -> int:
    """Port of the launcher's store."""
    return int(os.environ["MASTER_PORT"])


def of_agent() -> bool:
    """Whether torchrun's agent, not rank 0, serves the store of the rendezvous."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_transports() -> dict[str, str]:
    """Variables that choose transports, libraries and modules, here or in others' packages.

    Of MOE_P2P_SECRET only that it is set.
    """
    found = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _OF_TRANSPORTS or name.startswith(("MOE_P2P_", "NCCL_", "FI_"))
    }
    if "MOE_P2P_SECRET" in found:
        found["MOE_P2P_SECRET"] = "set"
    return found


def colour() -> bool:
    """Whether terminals may show colours (no-color.org)."""
    return not os.environ.get("NO_COLOR")


def meet_at(port: int) -> None:
    """Makes this process meet its ranks at another port, where its rank 0 serves the store."""
    os.environ["MASTER_PORT"] = str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # torchrun's store knows the first port


def shown() -> dict[str, str]:
    """Variables that say how links are used, without those of secrets and hosts."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SHOWN) and not (_SECRET.search(name) or _OF_HOSTS.search(name))
    }


def private() -> dict[str, list[str]]:
    """Values that nobody else shall read: "secret", and names of a "host" and a "user"."""
    kinds = {"secret": _SECRET, "host": _OF_HOSTS, "user": _OF_USERS}
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for name, value in os.environ.items():
        for kind, pattern in kinds.items():
            if value and pattern.search(name):
                found[kind].append(value)
                break
    return found


def use_gloo_interface(name: str) -> None:
    """Sets gloo's interface, unless the user has chosen one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def model_link(settings: str) -> None:
    """Sets the software NIC's link, unless the user has chosen settings."""
    os.environ.setdefault("MOE_P2P_TRANSPORT_SETTINGS", settings)


def hosts_of_a_script() -> tuple[str, int, int, int]:
    """Address and port to meet at, number of hosts, and which this is, as DeepEP has them."""
    read = os.environ.get
    port, num_hosts, host = (
        int(read(name, default))
        for name, default in (("MASTER_PORT", "8361"), ("WORLD_SIZE", "1"), ("RANK", "0"))
    )
    return read("MASTER_ADDR", "127.0.0.1"), port, num_hosts, host
