"""Calls as NIXL EP's users write them, by position and by keyword, mean the same here.

The table is what `python -m tests.nixl_ep.test_nixl_ep_signatures FOLDER` prints for the folder
`nixl_ep` of ai-dynamo/nixl at 8770b65: parameters in their order, with their defaults.
"""

from __future__ import annotations

import ast
import inspect
import pprint
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import nixl_ep

FILES = {"Buffer": "buffer.py", "EventOverlap": "utils.py"}
SIGNATURES: dict[str, dict[str, str]] = {
    "Buffer": {
        "__init__": "self, disable_ll_nvlink=False, explicitly_destroy=False, rank=0, "
        "low_latency_mode=True, group=None, comm=None, tcp_store_group=None, "
        "timeout_ms=30000",
        "destroy": "self",
        "is_sm90_compiled": "",
        "set_num_sms": "new_num_sms",
        "capture": "",
        "get_low_latency_buffer_size_hint": "num_max_dispatch_tokens_per_rank, hidden, "
        "num_ranks, num_experts",
        "get_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
        "get_comm_stream": "self",
        "get_local_buffer_tensor": "self, dtype, size=None, offset=0, use_rdma_buffer=False",
        "get_dispatch_config": "num_ranks",
        "get_combine_config": "num_ranks",
        "get_dispatch_layout": "self, topk_idx, num_experts, previous_event=None, "
        "async_finish=False, allocate_on_comm_stream=False",
        "low_latency_dispatch": "self, x, topk_idx, num_max_dispatch_tokens_per_rank, "
        "num_experts=None, "
        "cumulative_local_expert_recv_stats=None, "
        "dispatch_wait_recv_cost_stats=None, use_fp8=True, "
        "round_scale=False, use_ue8m0=False, async_finish=False, "
        "return_recv_hook=False",
        "dispatch": "self, *args, **kwargs",
        "low_latency_combine": "self, x, topk_idx, topk_weights, handle, use_logfmt=False, "
        "zero_copy=False, async_finish=False, "
        "return_recv_hook=False, out=None, "
        "combine_wait_recv_cost_stats=None",
        "combine": "self, *args, **kwargs",
        "ht_dispatch": "self, x, handle=None, num_tokens_per_rank=None, "
        "num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
        "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
        "expert_alignment=1, config=None, previous_event=None, "
        "async_finish=False, allocate_on_comm_stream=False",
        "ht_combine": "self, x, handle, topk_weights=None, bias=None, config=None, "
        "previous_event=None, async_finish=False, "
        "allocate_on_comm_stream=False",
        "update_mask_buffer": "self, rank_to_mask, mask=False",
        "query_mask_buffer": "self, mask_status",
        "clean_mask_buffer": "self",
        "get_next_combine_buffer": "self, handle",
        "update_memory_buffers": "self, num_ranks, num_experts_per_rank, num_rdma_bytes, "
        "num_nvl_bytes=0",
        "set_tcp_store_group": "self, tcp_store_group",
        "connect_ranks": "self, remote_ranks, activate=True",
        "disconnect_ranks": "self, remote_ranks",
        "barrier": "self",
    },
    "EventOverlap": {
        "__init__": "self, event=None, extra_tensors=None",
        "current_stream_wait": "self",
    },
}


def signatures_of(folder: Path) -> dict[str, dict[str, str]]:
    """Of the public methods of its classes; static ones have no `self`."""
    found = dict[str, dict[str, str]]()
    for kind, file in FILES.items():
        tree = ast.parse((folder / file).read_text())
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                found[kind] = {
                    each.name: _written(each, constants)
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                    and (each.name == "__init__" or not each.name.startswith("_"))
                }
    return found


def _written(function: ast.FunctionDef, constants: dict[str, ast.Constant]) -> str:
    arguments = function.args
    defaults = [constants.get(ast.unparse(each), each) for each in arguments.defaults]
    plain = len(arguments.args) - len(defaults)
    texts = [each.arg for each in arguments.args[:plain]]
    for each, default in zip(arguments.args[plain:], defaults, strict=True):
        texts.append(f"{each.arg}={ast.unparse(default)}")
    for star, more in (("*", arguments.vararg), ("**", arguments.kwarg)):
        texts += [f"{star}{more.arg}"] if more else []
    return ", ".join(texts)


def written(function: Any) -> str:
    texts = []
    for each in inspect.signature(function).parameters.values():
        star = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        default = "" if each.default is each.empty else f"={each.default!r}"
        texts.append(f"{star}{each.name}{default}")
    return ", ".join(texts)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in SIGNATURES.items() for name in names]
)
def test_parameters_are_those_of_nixl_ep(kind: str, name: str) -> None:
    ours: Any = getattr(nixl_ep, kind)
    found, wanted = written(getattr(ours, name)), SIGNATURES[kind][name]
    if kind == "EventOverlap":  # V1's, whose calls take more
        assert found.startswith(wanted)
    else:
        assert found == wanted
    is_static = isinstance(inspect.getattr_static(ours, name), staticmethod)
    assert is_static != wanted.startswith("self")


if __name__ == "__main__":
    pprint.pprint(signatures_of(Path(sys.argv[1])), width=96, sort_dicts=False)
