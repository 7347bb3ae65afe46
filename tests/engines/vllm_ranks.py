"""vLLM's own Python files in a rank of a test: imported, with the groups that its managers ask for.

The platform is vLLM's CudaPlatform, because only it has DeepEP's backends; it is asked for nothing
of a GPU.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.engines import absent
from tests.support.engine_layers import join
from tests.support.ranks import Rank

FUSED_MOE = "vllm.model_executor.layers.fused_moe"


def begin(
    rank: Rank,
    device: str = "cpu",
    *,
    as_deep_ep: bool = True,
    groups: bool = True,
    at: Path | None = None,
) -> None:
    """groups: False: the caller makes vLLM's own. at: a folder of vLLM, not the one fetched."""
    absent.importing("vllm", absent.VLLM, at)
    join(rank, device)
    if as_deep_ep:
        from moe_p2p import deep_ep

        deep_ep.install()
    import vllm.platforms

    # Asks for an installed package; without it vLLM believes that there is no Triton.
    vllm.platforms.vllm_version_matches_substr = lambda _: False
    from vllm.platforms import cuda

    if device == "cpu":
        cuda.CudaPlatform.get_device_capability = classmethod(lambda *_, **__: None)
    vllm.platforms._current_platform = cuda.CudaPlatform()
    from vllm import _custom_ops

    scaled = [f"scaled_mm_supports_{kind}" for kind in ("fp8", "block_fp8", "fp4")]
    for name in (*scaled, "group_gemm_supported"):
        setattr(_custom_ops, f"cutlass_{name}", lambda *_: False)  # asked while modules load
    if groups:
        _groups(rank)


def _groups(rank: Rank) -> None:
    """All ranks are data parallel; vLLM's own set-up of groups needs its devices."""
    from vllm.distributed import parallel_state

    group = types.SimpleNamespace(
        rank_in_group=rank.rank, world_size=rank.world_size, cpu_group=dist.group.WORLD
    )
    alone = types.SimpleNamespace(rank_in_group=0, world_size=1)
    parallel_state.get_dp_group = lambda: group
    parallel_state.get_tp_group = lambda: alone
    parallel_state.in_the_same_node_as = lambda *_, **__: [True] * rank.world_size


def config(*, fault_tolerance: bool = False, scheduled_tokens: int = 64) -> Any:
    """What managers and layers read of VllmConfig."""
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(enable_fault_tolerance=fault_tolerance),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=scheduled_tokens),
        model_config=types.SimpleNamespace(enforce_eager=True),
    )


def use(config: Any) -> None:
    """Makes it the current configuration."""
    from vllm.config import vllm

    vllm._current_vllm_config = config


def make_manager(backend: str) -> Any:
    """As cuda_communicator.py makes it."""
    from vllm.distributed.device_communicators import all2all

    group = dist.group.WORLD
    if backend == "deepep_high_throughput":
        return all2all.DeepEPHTAll2AllManager(group, None)
    if backend == "deepep_low_latency":
        return all2all.DeepEPLLAll2AllManager(group, None)
    return all2all.DeepEPV2All2AllManager(group, None, device_group=group)
