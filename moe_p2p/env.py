"""The one place that reads or sets the environment. Values are read when they are asked for.

MOE_P2P_TRANSPORT           provider behind transport="auto" (default: what the machine has)
MOE_P2P_TRANSPORT_SETTINGS  settings for it where a configuration gives none
MOE_P2P_NICS                RDMA devices in rail order where a configuration names none
MOE_P2P_CACHE               folder of compiled kernels, which no other user may write to (default:
                            ~/.cache/moe_p2p; without a home moe_p2p-<user id> in the folder for
                            temporary files)
MOE_P2P_FABRIC              1: ranks of a node share GPU memory by fabric handle (all ranks alike)
MOE_P2P_AS_DEEP_EP          1: importing moe_p2p makes `import deep_ep` give moe_p2p.deep_ep
CUDA_HOME                   CUDA toolkit whose headers kernels may use (default: /usr/local/cuda)
MOE_P2P_LOG                 error, warning, info or debug; also read by csrc/base/log.cpp
MOE_P2P_SECRET              what processes prove to each other to connect over verbs, the same in
                            all; read by csrc/provider/verbs/proof.cpp
PYTHONPATH                  prolonged for the processes that a program starts
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
                            this rank, all of them, the same of this host, and the host where ranks
                            meet, set by torchrun
GLOO_SOCKET_IFNAME          interface of torch's gloo; set here where ranks of several hosts meet
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def transport() -> str:
    """The provider that transport="auto" stands for; empty: the machine decides."""
    return os.environ.get("MOE_P2P_TRANSPORT", "")


def transport_settings() -> str:
    """`key=value,...` for the provider."""
    return os.environ.get("MOE_P2P_TRANSPORT_SETTINGS", "")


def nics() -> str:
    """`mlx5_0,mlx5_1`: the devices to use; empty: the topology decides."""
    return os.environ.get("MOE_P2P_NICS", "")


def log_level() -> str:
    """What is logged."""
    return os.environ.get("MOE_P2P_LOG", "warning")


def cache_folder() -> Path:
    """Where compiled kernels are kept, if kernel_cache.py does not refuse it."""
    if given := os.environ.get("MOE_P2P_CACHE"):
        return Path(given)
    home = Path(os.path.expanduser("~"))  # stays "~" without HOME and an entry for the user
    if home.is_absolute():
        return home / ".cache" / "moe_p2p"
    return Path(tempfile.gettempdir()) / f"moe_p2p-{os.getuid()}"


def fabric() -> bool:
    """Whether GPU memory is shared by fabric handle instead of by file descriptor."""
    return os.environ.get("MOE_P2P_FABRIC") == "1"


def as_deep_ep() -> bool:
    """Whether `import deep_ep` is to give moe_p2p.deep_ep."""
    return os.environ.get("MOE_P2P_AS_DEEP_EP") == "1"


def prepend_to_python_path(folder: Path) -> None:
    """Processes started from now on look for modules in `folder` first."""
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([rest] if rest else [])])


def cuda_home() -> Path:
    """The CUDA toolkit, which need not be there."""
    return Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")


def rank() -> int:
    """The number that the launcher gave this process."""
    return int(os.environ["RANK"])


def launched() -> bool:
    """Whether torchrun, or another launcher that speaks like it, has started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys()


def world_size() -> int:
    """Ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """The number of this process among those of this host."""
    return int(os.environ["LOCAL_RANK"])


def local_world_size() -> int:
    """Ranks that the launcher started on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def master_address() -> str:
    """The host where ranks meet."""
    return os.environ["MASTER_ADDR"]


def use_gloo_interface(name: str) -> None:
    """Unless the user has chosen one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
