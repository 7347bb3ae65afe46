"""vLLM's modular kernel with its Triton experts over our calls, eager and in a full CUDA graph.

Each rank compares with the same layer alone, all experts on its own GPU. One GPU is enough.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engines import vllm_experts
from tests.engines.vllm_layers import HIGH_THROUGHPUT, LOW_LATENCY, V2
from tests.support.engine_layers import BF16
from tests.support.ranks import Rank, run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.engine("vllm"),
    pytest.mark.timeout(600),
]
DEADLINE_S = 400.0  # ranks compile kernels
CAPTURED = (LOW_LATENCY, V2)  # the host waits for counts in the calls of high throughput


def run_layer(rank: Rank, backend: str) -> None:
    vllm_experts.begin(rank, "cuda")
    alone = vllm_experts.Layer(rank, "", "cuda")
    layer = vllm_experts.Layer(rank, backend, "cuda")
    for seed in range(3):
        given = vllm_experts.inputs(rank.rank, seed, "cuda")
        expected = alone(given.x, given.ids, given.weights)
        torch.testing.assert_close(expected.float(), vllm_experts.dense(alone, given), **BF16)
        torch.testing.assert_close(layer(given.x, given.ids, given.weights), expected, **BF16)
    torch.cuda.synchronize()
    dist.barrier()
    if backend in CAPTURED:
        fixed = vllm_experts.inputs(rank.rank, 0, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer(fixed.x, fixed.ids, fixed.weights)
        for seed in range(3, 6):
            given = vllm_experts.inputs(rank.rank, seed, "cuda")
            for name in ("x", "ids", "weights"):
                getattr(fixed, name).copy_(getattr(given, name))
            graph.replay()
            expected = alone(given.x, given.ids, given.weights)
            torch.testing.assert_close(out, expected, **BF16)
    torch.cuda.synchronize()
    dist.barrier()
    layer.manager.destroy()


@pytest.mark.parametrize("backend", [LOW_LATENCY, HIGH_THROUGHPUT, V2])
def test_triton_experts_compute_as_on_one_gpu(backend: str) -> None:
    run_processes(2, run_layer, backend, deadline_s=DEADLINE_S)
