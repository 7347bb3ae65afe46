"""The layers of test_vllm.py, test_sglang.py and test_megatron.py on GPUs.

The layers of vLLM in CUDA graphs too, and of Megatron's but for its experts. One GPU is enough.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import sglang_layers, test_megatron, vllm_layers
from tests.support.engine_layers import BF16, EXPERTS, HIDDEN, TOKENS, TOPK, as_sent, plain
from tests.support.ranks import Rank, run_processes

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
WORLD = max(2, min(NUM_DEVICES, 4))  # ranks that share a GPU have its time slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES == 0, reason="needs a GPU"),
    pytest.mark.timeout(600),
]
DEADLINE_S = 500.0  # ranks compile kernels


def run_vllm(rank: Rank, backend: str) -> None:
    vllm_layers.begin(rank, "cuda")
    vllm_layers.run_backend(rank, backend, ["none", "blocks", "rows"], "cuda")


@pytest.mark.engine("vllm")
@pytest.mark.parametrize("backend", [vllm_layers.LOW_LATENCY, vllm_layers.HIGH_THROUGHPUT])
def test_vllm_layer_computes_a_plain_moe(backend: str) -> None:
    run_processes(WORLD, run_vllm, backend, deadline_s=DEADLINE_S)


def run_sglang(rank: Rank, dtype: str) -> None:
    sglang_layers.begin_with_ours(rank, "cuda")
    sglang_layers.run_modes(rank, dtype, "cuda")


@pytest.mark.engine("sglang")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_sglang_layer_computes_a_plain_moe_in_all_modes(dtype: str) -> None:
    run_processes(WORLD, run_sglang, dtype, deadline_s=DEADLINE_S)


def train_megatron_cases(rank: Rank) -> None:
    """Training steps, recompute, shared experts with and without overlap; parts of a layer."""
    test_megatron.run_case(rank, list(test_megatron.CASES), 1, "cuda")
    test_megatron.train_in_parts("cuda")


@pytest.mark.engine("megatron-core")
def test_megatron_layers_train_as_with_alltoall() -> None:
    run_processes(WORLD, train_megatron_cases, deadline_s=DEADLINE_S)


def replay_megatron(rank: Rank) -> None:
    test_megatron.begin(rank, "cuda")
    test_megatron.replayed("cuda")


@pytest.mark.engine("megatron-core")
def test_megatron_layer_replays_but_for_its_experts() -> None:
    run_processes(WORLD, replay_megatron, deadline_s=DEADLINE_S)


def replay_megatron_router(rank: Rank) -> None:
    test_megatron.begin(rank, "cuda")
    for system in test_megatron.FLEX:
        test_megatron.replay_router(system, "cuda")


@pytest.mark.engine("megatron-core")
def test_megatron_router_replays_before_an_eager_dispatch() -> None:
    run_processes(WORLD, replay_megatron_router, deadline_s=DEADLINE_S)


def train_megatron(rank: Rank, alignment: int) -> None:
    test_megatron.begin(rank, "cuda")
    test_megatron.train_manager(rank, alignment, "cuda")


@pytest.mark.engine("megatron-core")
@pytest.mark.parametrize("alignment", [1, 16])
def test_megatron_manager_trains_as_a_plain_moe(alignment: int) -> None:
    run_processes(WORLD, train_megatron, alignment, deadline_s=DEADLINE_S)


def inputs(rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=-1)
    return x.cuda(), ids.cuda(), weights.cuda()


def replay_vllm(rank: Rank, backend: str) -> None:
    vllm_layers.begin(rank, "cuda")
    manager, prepare_finalize, quant_config = vllm_layers.make_layer(
        rank, backend, vllm_layers.BLOCKS
    )
    kernel = vllm_layers.make_kernel(rank, prepare_finalize, quant_config)
    x, ids, weights = inputs(rank.rank, 0)
    vllm_layers.run_kernel(kernel, x, ids, weights)  # makes the communicator
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = vllm_layers.run_kernel(kernel, x, ids, weights)
    for seed in range(1, 4):
        for old, new in zip((x, ids, weights), inputs(rank.rank, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.float(), plain(as_sent(x), ids, weights), **BF16)
    dist.barrier()
    manager.destroy()


@pytest.mark.engine("vllm")
@pytest.mark.parametrize("backend", [vllm_layers.LOW_LATENCY, vllm_layers.V2])
def test_vllm_layer_replays(backend: str) -> None:
    run_processes(WORLD, replay_vllm, backend, deadline_s=DEADLINE_S)
