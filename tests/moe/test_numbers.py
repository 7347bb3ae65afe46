"""Numbers of kernels/abi that Python asks for, and settings that it passes to the extension."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_p2p import AllToAllConfig
from moe_p2p.library import numbers_of, settings_text
from moe_p2p.moe.gpu.shape_macros import shape_macros
from moe_p2p.moe.shape import layout
from tests.support.cases import make
from tests.support.ranks import Rank

ROOT = Path(__file__).resolve().parents[2]
ops = torch.ops.moe_p2p


def test_the_arrays_of_a_handle_follow_each_other() -> None:
    config = {"topk": 3, "max_tokens": 12, "chunk_tokens": 4, "ranks_per_node": 1}
    with make(Rank(0, 1, dist.HashStore()), **config) as comm:
        number = comm._comm
        at = numbers_of(ops.handle_layout(number, 5, 10))
        assert at["num_slots"] == 4
        assert at["slot_counts"] == layout().handle_meta_words
        assert at["slot_rows"] - at["slot_counts"] == 3  # chunks of one rank
        assert at["slot_ranks"] - at["slot_rows"] in (36, 37)  # at an even word
        assert at["send_slots"] - at["slot_ranks"] == 2 * 12
        assert at["total"] - at["send_slots"] == 5 * 2
        assert at["total"] == comm._shape.handle_words(5, 10)
        with pytest.raises(RuntimeError, match="made for at most 12"):
            ops.handle_layout(number, 5, 13)


def test_kernels_are_compiled_with_every_number_of_the_shape() -> None:
    text = (ROOT / "kernels/abi/shape.h").read_text().split("struct Shape {")[1]
    fields = re.findall(r"^  (?:i32|u64) (\w+);", text.split("constexpr")[0], re.MULTILINE)
    shape = AllToAllConfig(
        num_experts=5, hidden_dim=48, topk=3, max_tokens=9, extra_bytes=32, part_bytes=7,
        dtype=torch.float32, combine_dtype=torch.bfloat16, expert_rank=(0, 1, 1, 1, 0),
    )  # fmt: skip
    made = shape_macros(shape, world_size=2, ranks_per_node=2)
    assert {f"MOE_P2P_{name.upper()}" for name in fields} <= made.keys()
    assert made["MOE_P2P_MAX_LOCAL_EXPERTS"] == 3
    assert made["MOE_P2P_PART_BYTES"] == 0  # nothing goes to another node
    assert made["MOE_P2P_MAX_TOKEN_BYTES"] == 4 * 48 + 32
    assert made["MOE_P2P_MAX_PARTIAL_BYTES"] == 2 * 48 + 4 * 3
    assert shape_macros(shape, world_size=2, ranks_per_node=1)["MOE_P2P_PART_BYTES"] == 7
    small = dataclasses.replace(shape, hidden_dim=16, dtype=torch.float8_e4m3fn, extra_bytes=0)
    made = shape_macros(small, world_size=2, ranks_per_node=2)
    assert made["MOE_P2P_MAX_TOKEN_BYTES"] == 16 + 16  # values, and a scale to a multiple of 16


def test_settings_of_device_memory_and_kernels_are_checked() -> None:
    memory = {"ordinal": -1, "data": [1], "peer_data": [0], "num_sms": 0} | dict.fromkeys(
        ("state", "expert_rank", "expert_local", "fault", "fault_device", "world"), 64
    )
    with make(Rank(0, 1, dist.HashStore())) as comm:
        number = comm._comm
        for change, text in [
            ({"state": None}, "device settings: state is missing"),
            ({"ordinal": None}, "ordinal is missing"),
            ({"fault": -64}, "fault=-64 is refused; it must be an integer from 1 to"),
            ({"sms": 3}, '"sms=3" is not understood; write key=value'),
            ({}, "for communicators of GPU tensors"),
        ]:
            given = {k: v for k, v in (memory | change).items() if v is not None}
            with pytest.raises(RuntimeError, match=text):
                ops.all_to_all_use_device(number, settings_text(**given))
        with pytest.raises(RuntimeError, match="num_threads=0 is refused"):
            ops.all_to_all_set_combine_kernel(
                number, torch.bfloat16, torch.bfloat16, "handle=1,num_threads=0"
            )
