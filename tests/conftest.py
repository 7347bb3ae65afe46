"""Tiers by marker, each skipped with its reason where it cannot run."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import packages
from tests.progress import (  # noqa: F401  (hooks)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_xdist_make_scheduler,
)
from tests.support import installation

# Where this is started with SIGINT ignored, as by `nohup`, in a script's background and in some CI,
# so would be programs of tests, and what waits for a signal would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("tests.left_out", "tests.times", "tests.torch_imports")
os.environ["MOE_P2P_TUNED"] = "none"  # what this machine's user has measured changes no test
# torch looks up a name for each address that connects to a TCPStore, on both ends. A name server
# that loses one of these questions costs 5 s, in which the store answers nobody; here 1 s, once.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# torch.compile finds no program of an earlier run, which need not fit; processes share none. The
# folders of workers and their children, which may end at once, lie in the first one's, which goes.
_NAME = "moe_p2p-inductor-"
_above = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
_compiled = tempfile.TemporaryDirectory(
    prefix=_NAME, dir=_above if _NAME in _above else None, ignore_cleanup_errors=True
)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # they lie in a folder of all runs


def spread_over_gpus() -> None:
    """Workers of pytest-xdist begin with another GPU each. Before the driver starts."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker and gpus > 1:
        numbers = ",".join(map(str, range(gpus)))
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
        at = int(worker.removeprefix("gw")) % len(seen)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[at:] + seen[:at])


spread_over_gpus()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Kernels are compiled at first use, in as many workers as there are: tests need longer."""
    if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(max(300.0, float(item.config.getini("timeout")))))


def _why_not(item: pytest.Item) -> str | None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = max(devices, "MOE_P2P_EMULATED_GPU" in os.environ)  # emulated_gpu.py
    if item.get_closest_marker("gpu") and devices < 1:
        return "needs a CUDA device"
    if item.get_closest_marker("multi_gpu") and devices < 2:
        return f"needs several CUDA devices, here are {devices}"
    if item.get_closest_marker("rdma") and not any(Path("/sys/class").glob("infiniband/*")):
        return "needs an RDMA NIC: /sys/class/infiniband has none"
    for marker in item.iter_markers("engine"):
        if packages.find(marker.args[0]) is None:
            return packages.why_not(marker.args[0])
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := _why_not(item):
        pytest.skip(reason)


_failed = set[str]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Ends a worker of pytest-xdist whose GPU a failed test has left unusable: all of its later
    tests would fail, and another worker takes its place."""
    if nodeid in _failed and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)  # the failure has been reported


@pytest.fixture(name="wheel", scope="session")
def wheel_of_this_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installation.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(name="installed", scope="session")
def python_with_the_wheel(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    return installation.make_environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(name="key")
def exchange_key() -> Iterator[str]:
    """A key of this test; nothing that the test opened may be left open here."""
    gc.collect()  # what earlier tests left to it may hold files
    before = _open_files()
    yield f"test-{uuid.uuid4()}"
    assert _open_files() == before


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
