"""Ranks of vLLM's tests/kernels/moe/modular_kernel_tools, on the CPU, with contrib/vllm's patch.

vLLM's own worker makes inputs, runs the modular kernel and compares with its own reference; groups,
configuration, communicator, manager and prepare-finalize are vLLM's own, chosen by the backend's
name. What needs a GPU is replaced here: tensors for a GPU lie on the CPU, what vLLM compiles is in
torch, NCCL has no communicator, and Triton interprets its kernels.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tests
from tests.engines import vllm_experts, vllm_layers, vllm_ranks
from tests.support.ranks import Rank

MOE = "tests.kernels.moe"
TOOLS = f"{MOE}.modular_kernel_tools"
BACKENDS = {
    "moe_p2p_high_throughput": "MoeP2pHTPrepareAndFinalize",
    "moe_p2p_low_latency": "MoeP2pLLPrepareAndFinalize",
}
MANAGER = "All2AllManager"
K, N, EXPERTS, TOKENS, TOPKS = 256, 128, 8, [1, 17], [1, 3]


class OnCpu(TorchFunctionMode):
    """A device that a call names is the CPU."""

    def __torch_function__(
        self, function: Any, _: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        if named.get("device") is not None:
            named["device"] = "cpu"
        return function(*arguments, **named)


class NoNccl:
    """PyNcclCommunicator where there is no NCCL."""

    def __init__(self, **_: Any) -> None:
        self.disabled = True


def begin(rank: Rank, vllm: Path, source: Path) -> None:
    """vllm: a folder of the patched package. source: vLLM's repository, patched."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    vllm_ranks.begin(rank, as_deep_ep=False, groups=False, at=vllm)
    tests.__path__.append(str(source / "tests"))
    vllm_experts.compute_in_torch("cpu")
    torch.compiler.set_stance("force_eager")
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.empty_cache = lambda: None
    from vllm.distributed.device_communicators import pynccl
    from vllm.platforms import cuda

    cuda.CudaPlatform.get_device_name = classmethod(lambda *_: "CPU")
    pynccl.PyNcclCommunicator = NoNccl


def top_k(_: Tensor, scores: Tensor, topk: int, __: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As fused_topk, which is compiled."""
    weights, ids = scores.float().softmax(-1).topk(topk, dim=-1)
    return weights, ids.to(torch.int32), ids


def make_manager(rank: Rank, vllm_config: Any) -> Any:
    """Of vLLM's own groups, whose communicator makes it by the backend's name."""
    from vllm import distributed
    from vllm.config import set_current_vllm_config

    vllm_config.parallel_config.data_parallel_rank = rank.rank
    with set_current_vllm_config(vllm_config):
        distributed.init_distributed_environment(
            world_size=1, rank=0, local_rank=rank.rank, backend="gloo"
        )
        distributed.initialize_model_parallel()
        return distributed.get_ep_group().device_communicator.all2all_manager


def names(rank: Rank, vllm: Path, source: Path) -> None:
    """What a backend's name decides in the configuration, and what a missing package gives."""
    begin(rank, vllm, source)
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.utils import import_utils

    for backend, kind in BACKENDS.items():
        batched = "LL" in kind
        config = ParallelConfig(all2all_backend=backend)
        config.enable_expert_parallel, config.data_parallel_size = True, 2
        assert config.use_all2all
        assert config.use_batched_dp_moe == batched
        moe = FusedMoEParallelConfig(
            tp_size=1, pcp_size=1, dp_size=2, ep_size=2, tp_rank=0, pcp_rank=0, dp_rank=0,
            ep_rank=0, sp_size=1, use_ep=True, all2all_backend=backend, enable_eplb=False,
        )  # fmt: skip
        assert (moe.use_moe_p2p_ll_kernels, moe.use_moe_p2p_ht_kernels) == (batched, not batched)
        assert moe.use_batched_activation_format == moe.needs_round_robin_routing_tables == batched
        assert backend in importlib.import_module(f"{MOE}.test_moe_layer").BACKENDS
    import_utils.has_moe_p2p = lambda: False
    with pytest.raises(ImportError, match="require the moe_p2p package, which is not installed"):
        importlib.import_module("vllm.distributed.device_communicators.moe_p2p")


def names_without_patch(rank: Rank) -> None:
    """vLLM as released refuses the names: the patch is needed."""
    vllm_ranks.begin(rank, as_deep_ep=False)
    from vllm.config import ParallelConfig

    for backend in BACKENDS:
        with pytest.raises(ValueError, match=r"all2all_backend\n  Input should be 'naive'"):
            ParallelConfig(all2all_backend=backend)


def run(rank: Rank, vllm: Path, source: Path, backend: str) -> list[str]:
    """Runs vLLM's valid cases of a backend; returns experts and quantization of each."""
    begin(rank, vllm, source)
    from vllm.config import set_current_vllm_config

    with OnCpu():
        objects, common, launch = (
            importlib.import_module(f"{TOOLS}.{name}")
            for name in ("mk_objects", "common", "parallel_utils")
        )
        combinations = importlib.import_module(f"{MOE}.test_modular_kernel_combinations")
        common.fused_topk = top_k
        vllm_layers.use_quantizer()
        importlib.import_module(
            "tests.kernels.utils"
        ).moe_kernel_quantize_input = vllm_layers.by_row
        kind = next(k for k, i in objects.PREPARE_FINALIZE_INFO.items() if i.backend == backend)
        assert kind.__name__ == BACKENDS[backend]
        place = launch.ProcessGroupInfo(
            rank.world_size, rank.world_size, rank.rank, 0, rank.rank, torch.device("cpu")
        )
        manager, ran = None, list[str]()
        for case in combinations.generate_valid_test_cases(rank.world_size, [kind]):
            *_, quantized, activation, _, experts, world_size = case
            if quantized is not None and quantized.block_shape is None:
                continue  # weights are quantized by a compiled function
            config = common.Config(
                Ms=TOKENS,
                K=K,
                N=N,
                E=EXPERTS,
                topks=TOPKS,
                # Triton's interpreter multiplies the bits of bfloat16 as integers.
                dtype=torch.float16 if "Triton" in experts.__name__ else torch.bfloat16,
                quant_config=quantized,
                activation=activation,
                prepare_finalize_type=kind,
                fused_experts_type=experts,
                world_size=world_size,
            )
            vllm_config, _ = config.make_env_data()
            manager = manager or make_manager(rank, vllm_config)
            torch.manual_seed(0)  # the same weights on all ranks
            weights = common.WeightTensors.make(config)
            with set_current_vllm_config(vllm_config):
                combinations.rank_worker(place, vllm_config, None, config, weights, True)
            ran.append(f"{experts.__name__} {config.quant_block_shape}")
        assert type(manager).__name__ == BACKENDS[backend].replace("PrepareAndFinalize", MANAGER)
        assert manager._handles
        manager.destroy()
        return ran
