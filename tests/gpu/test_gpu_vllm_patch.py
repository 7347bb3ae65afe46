"""vLLM's own modular_kernel_tools with contrib/vllm's patch, on GPUs; one is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines import vllm_patch, vllm_patch_ranks
from tests.engines.vllm_patch_ranks import BACKENDS
from tests.support.ranks import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.engine("vllm"),
    pytest.mark.engine("vllm-source"),
    pytest.mark.timeout(600),
]
# On every GPU; one with fp8 runs block-quantized cases too.
RAN = {
    "moe_p2p_high_throughput": {"TritonExperts None"},
    "moe_p2p_low_latency": {"BatchedTritonExperts None", "NaiveBatchedExperts None"},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllms_worker_finds_its_reference(tmp_path: Path, backend: str) -> None:
    folders = [tmp_path / name for name in ("source", "release")]
    for folder in folders:
        folder.mkdir()
    patched = vllm_patch.source(folders[0])
    release = vllm_patch.release(folders[1], patched)
    run = vllm_patch_ranks.run
    for ran in run_processes(2, run, release, patched, backend, "cuda", deadline_s=400.0):
        assert set(ran) >= RAN[backend]
