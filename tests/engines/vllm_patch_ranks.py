"""Ranks of vLLM's tests/kernels/moe/modular_kernel_tools, with contrib/vllm's patch.

vLLM's own worker makes inputs, runs the modular kernel and compares with its own reference; groups,
configuration, communicator, manager and prepare-finalize are vLLM's own, chosen by the backend's
name. What vLLM compiles is in torch, and NCCL has no communicator. Without a GPU tensors for one
lie on the CPU, and Triton interprets its kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tests
from moe_p2p.tools import launch
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


def begin(rank: Rank, vllm: Path, source: Path, device: str = "cpu") -> None:
    """vllm: a folder of the patched package. source: vLLM's repository, patched."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.backends import backends

        backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    vllm_ranks.begin(rank, device, as_deep_ep=False, groups=False, at=vllm)
    tests.__path__.append(str(source / "tests"))
    vllm_experts.compute_in_torch(device)
    torch.compiler.set_stance("force_eager")
    from vllm.distributed.device_communicators import pynccl
    from vllm.platforms import cuda

    pynccl.PyNcclCommunicator = NoNccl
    if device == "cpu":
        cuda.CudaPlatform.get_device_name = classmethod(lambda *_: "CPU")
        torch.accelerator.current_device_index = lambda: 0
        torch.accelerator.empty_cache = lambda: None


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
            world_size=1, rank=0, local_rank=gpu(rank), backend="gloo"
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


def tools() -> Any:
    """vLLM's modules, with what they compile or bind by name in torch."""
    named = ("mk_objects", "common", "parallel_utils")
    made = types.SimpleNamespace(**{n: importlib.import_module(f"{TOOLS}.{n}") for n in named})
    made.combinations = importlib.import_module(f"{MOE}.test_modular_kernel_combinations")
    made.common.fused_topk = top_k
    vllm_layers.use_quantizer()
    importlib.import_module("tests.kernels.utils").moe_kernel_quantize_input = vllm_layers.by_row
    return made


def recorded(module: Any, name: str) -> list[Tensor]:
    """Results of the function from now on."""
    original, results = getattr(module, name), list[Tensor]()

    def call(*arguments: Any) -> Tensor:
        results.append(original(*arguments))
        return results[-1]

    setattr(module, name, call)
    return results


def gpu(rank: Rank) -> int:
    return launch.gpu_of(rank.rank) if torch.cuda.is_available() else rank.rank


def run(rank: Rank, vllm: Path, source: Path, backend: str, device: str = "cpu") -> list[str]:
    """Runs vLLM's valid cases of a backend; returns experts and quantization of each."""
    begin(rank, vllm, source, device)
    from vllm.config import set_current_vllm_config

    with OnCpu() if device == "cpu" else contextlib.nullcontext():
        made = tools()
        information = made.mk_objects.PREPARE_FINALIZE_INFO
        kind = next(kind for kind, each in information.items() if each.backend == backend)
        assert kind.__name__ == BACKENDS[backend]
        place = made.parallel_utils.ProcessGroupInfo(
            rank.world_size, rank.world_size, rank.rank, 0, gpu(rank), torch.device(device)
        )
        outputs = recorded(made.combinations, "run_modular_kernel")
        expected = recorded(made.combinations, "reference_moe_impl")
        manager, ran = None, list[str]()
        for case in made.combinations.generate_valid_test_cases(rank.world_size, [kind]):
            config = config_of(made, case, device)
            if config.quant_dtype is not None and config.quant_block_shape is None:
                continue  # weights are quantized by a compiled function
            vllm_config, _ = config.make_env_data()
            manager = manager or make_manager(rank, vllm_config)
            torch.manual_seed(0)  # the same weights on all ranks
            weights = made.common.WeightTensors.make(config)
            with set_current_vllm_config(vllm_config):
                made.combinations.rank_worker(place, vllm_config, None, config, weights, True)
            compare(outputs, expected, config.quant_dtype)
            ran.append(f"{config.fused_experts_type.__name__} {config.quant_block_shape}")
        assert type(manager).__name__ == BACKENDS[backend].replace("PrepareAndFinalize", MANAGER)
        manager.destroy()
        return ran


def compare(outputs: list[Tensor], expected: list[Tensor], quant_dtype: Any) -> None:
    """By the norm: vLLM's tolerance is absolute, and larger than these outputs."""
    assert len(outputs) == len(expected) == len(TOKENS) * len(TOPKS)
    # bfloat16 rounds by 2^-9 of a value, a few times in a row. In fp8 (2^-4) the reference rounds
    # between the products too, and these experts do not.
    most = 0.01 if quant_dtype is None else 0.04
    for out, reference in zip(outputs, expected, strict=True):
        error = (out.float() - reference.float()).norm() / reference.float().norm()
        assert error < most, error
    outputs.clear(), expected.clear()


def config_of(made: Any, case: tuple[Any, ...], device: str) -> Any:
    """A small configuration of one of vLLM's cases."""
    *_, dtype, quantized, activation, kind, experts, world_size = case
    if device == "cpu" and "Triton" in experts.__name__:
        dtype = torch.float16  # the interpreter multiplies the bits of bfloat16 as integers
    return made.common.Config(
        Ms=TOKENS,
        K=K,
        N=N,
        E=EXPERTS,
        topks=TOPKS,
        dtype=dtype,
        quant_config=quantized,
        activation=activation,
        prepare_finalize_type=kind,
        fused_experts_type=experts,
        world_size=world_size,
    )
