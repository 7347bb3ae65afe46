"""Registers that kernels spill, as the assembler counts; benchmarks/code_sizes.py prints more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_p2p import AllToAllConfig
from moe_p2p.machine import jit
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.prepared import variants_of
from moe_p2p.moe.gpu.shape_macros import shape_macros
from moe_p2p.moe.layouts import NAMES
from tests.gpu.test_jit import ALONE, ARCHS, why_no_nvrtc
from tests.support import ranks


@pytest.fixture(autouse=True)
def _with_nvrtc() -> None:
    if reason := why_no_nvrtc():
        pytest.skip(reason)


@pytest.mark.timeout(600)
def test_plain_kernels_of_short_steps_spill_no_registers() -> None:
    """On all multiprocessors; benchmarks/code_sizes.py prints other shapes too."""
    asked = []
    for tokens in (128, 512):
        job: dict[str, Any] = {"num_experts": 256, "hidden_dim": 7168, "topk": 8}
        config = AllToAllConfig(**job, max_tokens=tokens, chunk_tokens=tokens)
        shape = shape_macros(config, world_size=8, ranks_per_node=8)
        asked += [
            kernels.dispatch_kernel(shape, torch.bfloat16, quantize=True),
            kernels.dispatch_kernel(
                shape, torch.float8_e4m3fn, quantize=False, layout=NAMES.index("by_rank")
            ),
            kernels.combine_kernel(shape, torch.bfloat16, torch.bfloat16),
        ]
    plain = [variants_of(kernel)[1] for kernel in asked]

    def spilled(kernel: kernels.Kernel) -> int:
        usage = jit.compile_only(kernel.source, kernel.macros, "sm_90a").usage[kernel.entry]
        return usage.spill_store_bytes + usage.spill_load_bytes

    with ThreadPoolExecutor(ranks.cpu_count()) as pool:
        assert list(pool.map(spilled, plain)) == [0] * len(plain)


def test_kernels_that_are_relayed_to_do_not_pay_for_flags() -> None:
    """Both compile; only where NICs or the proxy store flags do kernels look for them."""
    config = AllToAllConfig(num_experts=256, hidden_dim=7168, topk=8, max_tokens=128)
    shape = shape_macros(config, world_size=16, ranks_per_node=8)
    relayed, flagged = (
        variants_of(kernels.combine_kernel(shape | more, torch.bfloat16, torch.bfloat16))[1]
        for more in ({}, {"MOE_P2P_ARRIVAL_FLAGS": 1})
    )
    spilled = [
        jit.compile_only(kernel.source, kernel.macros, "sm_90a").usage[kernel.entry]
        for kernel in (relayed, flagged)
    ]
    assert spilled[0].spill_load_bytes < spilled[1].spill_load_bytes


def test_kernels_without_a_communicator_spill_no_registers() -> None:
    for arch, kernel in [(arch, kernel) for arch in ARCHS for kernel in ALONE]:
        for entry, usage in jit.compile_only(*kernel, arch).usage.items():
            assert usage.stack_bytes == usage.spill_load_bytes == 0, (arch, entry)
