"""Kernels that must compile, for tests: every type, and shapes at the edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.gpu.kernels import (
    READY,
    clean_kernel,
    combine_kernel,
    dispatch_kernel,
    enter_kernel,
)
from moe_p2p.moe.gpu.prepared import variants_of
from moe_p2p.moe.gpu.shape_macros import of_changing, shape_macros
from moe_p2p.moe.layouts import KERNELS


def every_kernel() -> Iterator[Kernel]:
    """Yields them."""
    for kernel in itertools.chain(_general_kernels(), _of_changing_worlds(), _of_unready_rows()):
        alone = kernel.source in ("clean.cu", "enter.cu")
        yield from [kernel] if alone else variants_of(kernel)


JOB: dict[str, Any] = {"num_experts": 256, "hidden_dim": 7168, "topk": 8, "max_tokens": 128}


def _of_unready_rows() -> Iterator[Kernel]:
    long = {"max_tokens": 2048, "chunk_tokens": 2048}
    for local, more, partials in ((8, {}, 3), (8, {}, 0), (4, {}, 3), (1, {}, 0), (8, long, 1)):
        config = AllToAllConfig(**JOB | more)
        shape = shape_macros(config, world_size=8, ranks_per_node=local) | READY
        yield combine_kernel(shape, torch.bfloat16, torch.bfloat16, partials=partials)
        if not partials:
            yield dispatch_kernel(shape, torch.bfloat16, quantize=True)
        yield dispatch_kernel(shape, torch.bfloat16, quantize=False)


def _of_changing_worlds() -> Iterator[Kernel]:
    for local, lost in [*itertools.product((8, 1), ("drop", "poison", None)), (4, None)]:
        config = AllToAllConfig(**JOB, lost=lost, mask_lost_ranks=lost is not None)  # type: ignore[arg-type]
        shape = shape_macros(config, world_size=8, ranks_per_node=local) | of_changing(config)
        yield enter_kernel(shape)
        yield dispatch_kernel(shape, torch.bfloat16, quantize=True)
        yield combine_kernel(shape, torch.bfloat16, torch.bfloat16)
        if local == 8:
            yield combine_kernel(shape, torch.bfloat16, torch.bfloat16, by_topk=True)


def _general_kernels() -> Iterator[Kernel]:

    def shape(world_size: int, local: int | None = None, **fields: Any) -> dict[str, int]:
        config = AllToAllConfig(**fields)
        return shape_macros(config, world_size=world_size, ranks_per_node=local or world_size)

    job = JOB
    usual = shape(8, **job)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, quantize in [
        *itertools.product(floats, (False, True)),
        (torch.float8_e4m3fn, False),
    ]:
        for layout in KERNELS:
            yield dispatch_kernel(usual, dtype, quantize=quantize, layout=layout)
    for form, layout in itertools.product((1, 2), KERNELS):
        yield dispatch_kernel(usual, floats[0], quantize=True, scale_format=form, layout=layout)
    for y_dtype, out_dtype in itertools.product(floats, (torch.bfloat16, torch.float32)):
        yield combine_kernel(usual, y_dtype, out_dtype)
    uneven = tuple(min(expert // 50, 7) for expert in range(256))
    others = [
        (shape(1, num_experts=1, hidden_dim=16, topk=1, max_tokens=1), None),
        (shape(3, num_experts=1023, hidden_dim=3584, topk=32, max_tokens=300), None),
        (shape(8, **job | {"max_tokens": 2048, "chunk_tokens": 2048}), None),
        (shape(8, expert_rank=uneven, **job), None),
        (shape(8, 4, **job), None),
        (shape(8, 2, **job), 8),
        (shape(8, 4, part_bytes=1 << 17, **job), None),
        (shape(8, 1, part_bytes=1 << 17, **job), 24),
        (shape(4, 1, **job | {"topk": 1}), None),
        (shape(64, 8, **job), 24),
        (usual, 24),
        (shape(8, **job | {"max_tokens": 32}), 24),
        (shape(8, **job | {"max_tokens": 2048, "chunk_tokens": 2048}), 24),
        (shape(3, num_experts=1023, hidden_dim=3584, topk=32, max_tokens=300), 24),
        (shape(2, num_experts=4, hidden_dim=16, topk=2, max_tokens=300), 24),
        (shape(8, mask_lost_ranks=True, **job), None),
        (shape(4, 1, mask_lost_ranks=True, **job | {"max_tokens": 600}), 24),
    ]
    for other, num_sms in others:
        yield dispatch_kernel(other, torch.bfloat16, quantize=True, num_sms=num_sms)
        for layout in KERNELS[1:]:
            yield dispatch_kernel(
                other, torch.bfloat16, quantize=False, layout=layout, num_sms=num_sms
            )
        yield combine_kernel(other, torch.bfloat16, torch.bfloat16, num_sms=num_sms)
    long = shape(8, **job | {"max_tokens": 2048, "chunk_tokens": 2048})
    yield dispatch_kernel(long, torch.float32, quantize=True, num_sms=24)
    yield dispatch_kernel(long, torch.float8_e4m3fn, quantize=False, num_sms=24)
    for other, num_sms in ((usual, None), (long, 24)):  # nvfp4
        yield dispatch_kernel(other, torch.uint8, quantize=False, x_bytes=3584, num_sms=num_sms)
    yield combine_kernel(long, torch.float32, torch.float32, num_sms=24)
    apart, masked = shape(8, combine_rows=8, **job), shape(8, mask_lost_ranks=True, **job)
    yield clean_kernel(masked)
    for partials, two in itertools.product((1, 2, 3), (shape(8, 4, **job), shape(4, 1, **job))):
        yield combine_kernel(two, torch.bfloat16, torch.bfloat16, partials=partials)
    for other, num_sms in ((usual, None), (long, 24), (masked, None)):
        yield combine_kernel(other, torch.float32, torch.bfloat16, partials=1, num_sms=num_sms)
        yield combine_kernel(other, torch.bfloat16, torch.float32, partials=3, num_sms=num_sms)
    for other, num_sms in ((apart, None), (long, 24), (masked, None)):
        yield combine_kernel(other, torch.bfloat16, torch.bfloat16, by_topk=True, num_sms=num_sms)
