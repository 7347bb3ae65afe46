"""The signals of SGLang's single-batch overlap: combine sends rows while the product writes them.

Two products raise two kinds of counters, which the caller clears before each: one for each block of
rows of an expert (DeepGEMM on Hopper), or one for each expert (CuTe on Blackwell).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.moe.ready import ReadyRows


def ready_rows(
    y: Tensor,
    *,
    packed_recv_count: Tensor | None = None,
    comp_signal: Tensor | None = None,
    block_m: int = 0,
    threshold: int = 0,
    num_sms: int = 0,
    src_signals: Tensor | None = None,
    src_signal_expect_value: int = 0,
) -> ReadyRows:
    """Arguments of low_latency_combine(overlap=True). y: [E_local, W * T, H].

    Raises InvalidArgumentError naming what is missing, or two that exclude each other.
    """
    errors.require(
        (comp_signal is None) != (src_signals is None),
        "low_latency_combine(overlap=True): give comp_signal, with block_m, threshold and num_sms, "
        "or src_signals with src_signal_expect_value; "
        + ("both are given" if comp_signal is not None else "neither is given"),
    )
    if packed_recv_count is not None:  # the handle knows the counts
        shape, wanted = tuple(packed_recv_count.shape), tuple(y.shape[:1])
        errors.require(
            shape == wanted,
            f"packed_recv_count has shape {shape}, must have {wanted}, as dispatch's",
        )
    if comp_signal is not None:
        errors.require(
            block_m >= 1 and threshold >= 1,
            f"block_m is {block_m} and threshold {threshold}, must be at least 1: rows of a "
            "counter, and what it comes to when they are written",
        )
        return ReadyRows(counters=comp_signal, want=threshold, rows=block_m, num_sms=num_sms)
    assert src_signals is not None
    want = src_signal_expect_value
    errors.require(
        want >= 1,
        f"src_signal_expect_value is {want}, must be at least 1: what a counter comes to when an "
        "expert's rows are written",
    )
    if num_sms == 0 and y.is_cuda:
        # Each multiprocessor of that product adds 1 for each expert; combine has the others.
        all_sms = torch.cuda.get_device_properties(y.device).multi_processor_count
        errors.require(
            want < all_sms,
            f"src_signal_expect_value is {want}, the GPU has {all_sms} multiprocessors: leave some "
            "to combine, or give num_sms",
        )
        num_sms = all_sms - want
    return ReadyRows(counters=src_signals, want=want, num_sms=num_sms)
