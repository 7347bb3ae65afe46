"""Tiers by marker, each skipped with its reason where it cannot run."""

from __future__ import annotations

import gc
import os
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
