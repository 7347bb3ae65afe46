"""The layers of test_vllm.py, test_sglang.py and test_megatron.py on GPUs, one for each rank.

Those of vLLM in CUDA graphs too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations import test_megatron, test_sglang, test_vllm
from tests.support.engine_layers import BF16, EXPERTS, HIDDEN, TOKENS, TOPK, as_sent, plain
from tests.support.fakes import vllm as fake_vllm
from tests.support.ranks import Rank, run_processes

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
WORLD = min(NUM_DEVICES, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(WORLD < 2, reason=f"needs 2 GPUs, there are {NUM_DEVICES}"),
]


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_high_throughput"])
def test_vllm_layer_computes_a_plain_moe(backend: str) -> None:
    run_processes(WORLD, test_vllm.run_vllm, backend, True, False, "cuda")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_sglang_layer_computes_a_plain_moe_in_both_modes(dtype: str) -> None:
    run_processes(WORLD, test_sglang.run_sglang, dtype, False, "cuda")


@pytest.mark.parametrize("alignment", [1, 16])
def test_megatron_layer_trains_as_a_plain_moe(alignment: int) -> None:
    run_processes(WORLD, test_megatron.run_megatron, alignment, "cuda")


def inputs(rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=-1)
    return x.cuda(), ids.cuda(), weights.cuda()


def replay_vllm(rank: Rank, backend: str) -> None:
    manager, layer = test_vllm.make_vllm(rank, backend, "cuda")
    experts = test_vllm.vllm_experts(rank, layer, torch.bfloat16)
    given: dict[str, Any] = {"num_experts": EXPERTS, "quant_config": test_vllm.QUANTIZED["blocks"]}
    x, ids, weights = inputs(rank.rank, 0)

    def run() -> Tensor:
        return fake_vllm.run_layer(layer, experts, x, weights, ids, **given)

    run()  # makes the communicator
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    for seed in range(1, 4):
        for old, new in zip((x, ids, weights), inputs(rank.rank, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.float(), plain(as_sent(x), ids, weights), **BF16)
    dist.barrier()
    manager.destroy()


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_v2"])
def test_vllm_layer_replays(backend: str) -> None:
    run_processes(WORLD, replay_vllm, backend)
