"""Calls as DeepEP's users write them, by position and by keyword, mean the same here.

What stands below are facts about DeepEP 1.2.1 (Buffer) and 2.1 (ElasticBuffer): parameters in their
order, with their defaults. Parameters of ours come after them and by keyword only.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from moe_p2p.deep_ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EventHandle,
    EventOverlap,
    HybridEPBuffer,
)

LATER = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
LATER_V2 = (
    "num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, "
    "async_with_compute_stream=False, allocate_on_comm_stream=False"
)
SHAPE = "num_max_dispatch_tokens_per_rank, hidden, num_experts"
NORMAL = {
    "dispatch": (
        "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
        "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
        f"expert_alignment=1, num_worst_tokens=0, config=None, {LATER}"
    ),
    "combine": f"self, x, handle, topk_weights=None, bias=None, config=None, {LATER}",
}
V1 = {
    "__init__": (
        "self, group=None, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, "
        "num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, "
        "use_fabric=False, explicitly_destroy=False, enable_shrink=False, comm=None"
    ),
    "destroy": "self",
    "is_sm90_compiled": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_low_latency_rdma_size_hint": (
        "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts"
    ),
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_comm_stream": "self",
    "get_local_buffer_tensor": "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    "get_dispatch_layout": f"self, topk_idx, num_experts, {LATER}",
    **NORMAL,
    **{f"internode_{name}": text for name, text in NORMAL.items()},
    "clean_low_latency_buffer": f"self, {SHAPE}",
    "low_latency_dispatch": (
        "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
        "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, "
        "use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False, "
        "return_recv_hook=False"
    ),
    "low_latency_combine": (
        "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
        "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None"
    ),
    "get_next_low_latency_combine_buffer": "self, handle",
    "low_latency_update_mask_buffer": "self, rank_to_mask, mask=False",
    "low_latency_query_mask_buffer": "self, mask_status",
    "low_latency_clean_mask_buffer": "self",
}
HINT = (
    "num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True"
)
V2 = {
    "__init__": (
        "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, "
        "num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
        "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, "
        "num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, "
        "explicitly_destroy=False"
    ),
    "destroy": "self",
    "dispatch": (
        "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
        "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, "
        f"{LATER_V2}, handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, "
        "do_zero_padding=False, use_tma_aligned_col_major_sf=False"
    ),
    "combine": f"self, x, handle, topk_weights=None, bias=None, {LATER_V2}",
    "get_buffer_size_hint": f"group, {HINT}",
    "barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "capture": "",
    "get_comm_stream": "self",
    "get_physical_domain_size": "self",
    "get_logical_domain_size": "self",
    "get_theoretical_num_sms": (
        "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
        "sm_read_gbs=200, sm_write_gbs=50"
    ),
    "get_theoretical_num_qps": "self, num_sms",
}
CONFIG = {
    "__init__": (
        "self, num_sms=20, num_max_nvl_chunked_send_tokens=6, "
        "num_max_nvl_chunked_recv_tokens=256, num_max_rdma_chunked_send_tokens=6, "
        "num_max_rdma_chunked_recv_tokens=256"
    ),
    "get_nvl_buffer_size_hint": "self, hidden_bytes, num_ranks",
    "get_rdma_buffer_size_hint": "self, hidden_bytes, num_ranks",
}
EVENTS = {
    "__init__": "self, event=None, extra_tensors=None",
    "current_stream_wait": "self, release_handle=False",
    "register_hook_after_wait": "self, hook_after_wait",
    "__call__": "self, release_handle=False",
}
HYBRID = {  # of the branch hybrid-ep; its calls take arguments by keyword only
    "__init__": (
        "self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, "
        "num_sms_dispatch_api=None, num_sms_combine_api=None, num_sms_preprocessing_api=None, "
        "num_blocks_permute=None, num_blocks_unpermute=None, load_cached_kernels=False, "
        "use_shared_buffer=True, enable_custom_allgather=False, "
        "num_of_hybrid_ep_ranks_per_nvlink_domain=None, use_mnnvl=None"
    ),
    "dispatch_with_permute": (
        "self, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, "
        "num_of_experts=None, use_fp8=None, routing_map=None, probs=None, scaling_factor=None, "
        "num_permuted_tokens=None, pad_multiple=None, handle=None, non_blocking=False, "
        "fuse_permute_dispatch=False, num_dispatched_tokens=None, use_host_meta=None"
    ),
    "combine_with_unpermute": (
        "self, hidden, probs=None, handle=None, pad_multiple=None, fuse_unpermute_combine=False, "
        "num_dispatched_tokens=None"
    ),
}
SIGNATURES = {
    Buffer: V1,
    HybridEPBuffer: HYBRID,
    ElasticBuffer: V2,
    Config: CONFIG,
    EventOverlap: EVENTS,
    EventHandle: {"__init__": "self", "current_stream_wait": "self"},
}


def written(function: Any, *, by_keyword: bool) -> str:
    """Its parameters as above. by_keyword: with those that are by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    kinds |= {inspect.Parameter.KEYWORD_ONLY} if by_keyword else set()
    own = [p for p in parameters if p.kind in kinds]
    texts = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in own]
    return ", ".join(texts)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in SIGNATURES.items() for name in names]
)
def test_parameters_are_those_of_deep_ep(kind: type, name: str) -> None:
    found = written(getattr(kind, name), by_keyword=kind is HybridEPBuffer)
    assert found == SIGNATURES[kind][name]


def test_what_uccl_adds_to_v1_is_taken_by_keyword() -> None:
    """Of uccl-project/uccl, ep/bench/buffer.py at da914a2, which its `deep_ep` gives."""
    assert inspect.signature(Buffer).parameters["is_intranode"].default is None
    assert written(Buffer.reset_rdma_buffer, by_keyword=True) == "self"
    assert written(Buffer.low_latency_combine, by_keyword=True).endswith(
        "combine_wait_recv_cost_stats=None, overlap=False, packed_recv_count=None, "
        "comp_signal=None, block_m=64, threshold=0, num_sms=0, src_signals=None, "
        "src_signal_expect_value=0"
    )


def test_calls_without_an_object_need_none() -> None:
    for kind, names in SIGNATURES.items():
        for name, text in names.items():
            is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
            assert is_static != text.startswith("self"), f"{kind.__name__}.{name}"
