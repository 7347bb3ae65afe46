"""NIXL's elastic test driver (tests/elastic) on CPU ranks over moe_p2p.nixl_ep: its own worker and
plans, in processes of a test.

The driver's lines for CUDA are replaced in a copy; nothing of what it checks is.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engines import packages
from tests.support.ranks import Rank

# File, what stands there, what stands there instead.
ON_CPUS = (
    ("elastic/elastic.py", 'device="cuda"', 'device="cpu"'),
    ("elastic/elastic.py", 'set_default_device("cuda")', 'set_default_device("cpu")'),
    ("elastic/elastic.py", "torch.cuda.set_device(0)", "pass"),
    ("utils.py", 'dtype=torch.int, device="cuda"', 'dtype=torch.int, device="cpu"'),
    # Its benchmark: bytes that flush a GPU's cache, and calls whose time is printed.
    ("utils.py", "int(256e6 // 4)", "int(256 // 4)"),
    ("utils.py", "num_warmups: int = 50, num_tests: int = 50", "num_warmups=2, num_tests=4"),
)


class Event:
    """A CUDA event of the CPU: what was called is done."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def copied(tmp_path: Path) -> Path:
    """Returns a copy of the driver's folder, for CPU ranks."""
    at = tmp_path / "tests"
    shutil.copytree(packages.where("nixl") / "tests", at)
    for name, there, instead in ON_CPUS:
        text = (at / name).read_text()
        assert there in text, (name, there)
        (at / name).write_text(text.replace(there, instead))
    return at / "elastic"


@contextmanager
def rank_server(at: Path) -> Iterator[int]:
    """Its server of rank numbers, in a thread; gives the port."""
    spec = importlib.util.spec_from_file_location("nixl_rank_server", at / "rank_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.ReusableTCPServer(("127.0.0.1", 0), module.RankServerHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def work(rank: Rank, at: str, port: int, begins: int, arguments: dict[str, Any]) -> str:
    """One process of the driver. begins: how many do at first; each other one takes the rank of
    one that was released, as a second launch of the driver does."""
    from moe_p2p import nixl_ep

    nixl_ep.install()
    sys.path[:0] = [at, str(Path(at).parent)]
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda *_: None
    elastic: Any = importlib.import_module("elastic")
    store: Any = rank.store
    elastic.TCP_STORE_PORT, elastic.RANK_SERVER_PORT = store.port, port
    released = elastic.rank_server.RankClient.release_rank

    def release(*given: Any, **named: Any) -> Any:
        done = released(*given, **named)
        store.set(f"released {store.add('num released', 1)}", "")
        return done

    elastic.rank_server.RankClient.release_rank = release
    if rank.rank >= begins:
        store.wait([f"released {rank.rank - begins + 1}"])
    elastic.worker(rank.rank, argparse.Namespace(**arguments))
    return "done"
