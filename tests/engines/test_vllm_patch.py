"""contrib/vllm: its patch on vLLM's source, and vLLM's own modular_kernel_tools with it.

The patched files lie over the installed release; tests come from the source archive of the same
version. tests/gpu/test_gpu_vllm_patch.py runs the same on GPUs.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import lint
from tests.engines import packages, vllm_patch, vllm_patch_ranks
from tests.engines.vllm_patch import PATCH, TOUCHED
from tests.engines.vllm_patch_ranks import BACKENDS
from tests.support.ranks import run_processes

pytestmark = [
    pytest.mark.engine("vllm"),
    pytest.mark.engine("vllm-source"),
    pytest.mark.timeout(400),
]

RAN = {
    "moe_p2p_high_throughput": ["TritonExperts None"],
    "moe_p2p_low_latency": [
        "BatchedTritonExperts None",
        "NaiveBatchedExperts None",
        "NaiveBatchedExperts [128, 128]",
    ],
}


@pytest.fixture(name="source", scope="module")
def patched_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_patch.source(tmp_path_factory.mktemp("source"))


@pytest.fixture(name="vllm", scope="module")
def patched_release(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_patch.release(tmp_path_factory.mktemp("vllm"), source)


def test_the_patch_is_on_the_release_that_tests_use() -> None:
    source, release = packages.where("vllm-source"), packages.where("vllm")
    new = re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", PATCH.read_text(), re.MULTILINE)
    for name in TOUCHED:
        assert (source / name).exists() != (name in new), name
        if name.startswith("vllm/") and name not in new:
            assert (source / name).read_bytes() == (release / name).read_bytes(), name
    assert f"v{packages.PINNED['vllm']}" in (PATCH.parent / "README.md").read_text()


def test_patched_files_are_formatted_and_parse(source: Path) -> None:
    ruff = lint.tool("ruff")
    python = [name for name in TOUCHED if name.endswith(".py")]
    for options in (["check", "--isolated", "--select=E9,F"], ["format", "--isolated", "--check"]):
        command = [str(ruff), *options, *python]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in TOUCHED:
        if name.endswith(".yaml"):
            config = yaml.safe_load((source / name).read_text())
            (backend,) = re.findall(r"--all2all-backend=(\S+)", config["server_args"])
            assert backend in BACKENDS
            listed = (source / name).parent / "config-b200.txt"
            assert Path(name).name in listed.read_text().split()


def test_names_choose_formats_managers_and_tests(vllm: Path, source: Path) -> None:
    run_processes(1, vllm_patch_ranks.names, vllm, source)


def test_the_release_alone_refuses_the_names() -> None:
    run_processes(1, vllm_patch_ranks.names_without_patch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllms_worker_finds_its_reference(vllm: Path, source: Path, backend: str) -> None:
    assert run_processes(2, vllm_patch_ranks.run, vllm, source, backend) == [RAN[backend]] * 2
