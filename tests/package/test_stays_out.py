"""Each row of "What stays out" (docs/engines.md) is refused, or said by name, by a test: the words
of the row that are given here stand in the test, too."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError
from moe_p2p.integrations.weights import sglang as sglang_weights
from moe_p2p.integrations.weights import vllm as vllm_weights
from moe_p2p.weights import Blocks, Param, Replicate, WeightLayout, checks, weight_plan
from tests.package.test_docs import rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/engines.md").read_text()
VLLM, SGLANG = "tests/engines/vllm_kv_scenarios.py", "tests/engines/sglang_kv_scenarios.py"
HERE, REFUSED = "tests/package/test_stays_out.py", "what_is_not_carried_is_refused_by_name"

# By how the row begins: tests, each with words of it.
SHOWN: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "KV of states (": [(VLLM, REFUSED, ("MambaSpec",)), (SGLANG, REFUSED, ("mamba",))],
    "KV of states of several": [
        (VLLM, REFUSED, ("states of ", " tokens, or on the host")),
        (SGLANG, "pages_that_are_not_carried_fail_their_request", ("KV pages in host memory",)),
    ],
    "KV of a draft model": [(SGLANG, REFUSED, ("KV of a draft model",))],
    "KV between pipeline": [
        (VLLM, REFUSED, ("pipeline_parallel_size=2", "stage 0 of 2", "cache groups")),
        (SGLANG, REFUSED, ("pp_size=2",)),
    ],
    "KV of context": [
        (VLLM, REFUSED, ("prefill_context_parallel_size", "decode_context_parallel_size")),
        (SGLANG, REFUSED, ("attn_cp_size", "dcp_size", "kv_shard_size")),
    ],
    "KV layers of one group": [
        (VLLM, REFUSED, ("strides", "LBHNC")),
        (SGLANG, REFUSED, ("layers differ in their bytes a page",)),
    ],
    "a KV request for a role": [
        (VLLM, "a_request_for_the_other_role_is_computed_here", ("kv_role is ",))
    ],
    "KV from decode to prefill": [(VLLM, REFUSED, ("bidirectional_kv_xfer",))],
    "prefix sharing": [
        (VLLM, "a_request_for_the_other_role_is_computed_here", ("remote_engine_id",))
    ],
    "`prefill_complete`": [(SGLANG, REFUSED, ("prefill_complete",))],
    "weights: single elements": [(HERE, "test_elements_alone", ("no generator gets",))],
    "weights: LoRA": [
        (
            "tests/weights/test_weights_engine_workers.py",
            "test_a_parameter_that_lands_nowhere_is_named_to_workers_and_trainers",
            ("no worker", "leave it"),
        )
    ],
    "weights: MXFP8": [(HERE, "test_other_types_than_fp8_of_e4m3", ("does not become ",))],
    "weights: draft": [
        (HERE, "test_drafts_are_not_updated", ("supports_draft_weight_update", "target"))
    ],
    "weights: vLLM's `WeightSource`": [
        (HERE, "test_a_source_without_shards_is_whole_on_each_trainer", ("iter_local",))
    ],
    "weights: slime": [
        (
            "tests/engines/slime_weights_scenarios.py",
            REFUSED,
            ("compressed-tensors", "pp_size=2"),
        )
    ],
    "weights: a second generator": [
        (
            "tests/engines/torchtitan_weights_scenarios.py",
            "a_second_generator_is_refused_by_name",
            ("moe_p2p serves one",),
        )
    ],
}
ROWS = [" | ".join(row) for row in rows(PAGE[PAGE.index("## What stays out") :], "what")]


def body_of(path: str, name: str) -> str:
    text = (ROOT / path).read_text()
    (found,) = [each for each in ast.parse(text).body if getattr(each, "name", "") == name]
    return ast.get_source_segment(text, found) or ""


def test_each_row_has_its_tests() -> None:
    assert len(ROWS) == len(SHOWN)
    for row in ROWS:
        (begin,) = [begin for begin in SHOWN if row.startswith(begin)]
        for path, name, words in SHOWN[begin]:
            text = body_of(path, name)
            for word in words:
                assert word in row, (row, word)
                assert word in text, (path, name, word)


def test_there_is_one_table() -> None:
    """Others link to it."""
    for page in ("kv.md", "weights_frameworks.md"):
        text = (ROOT / "docs" / page).read_text()
        assert "(engines.md#what-stays-out)" in text
        assert not any(row.split(" | ")[0] in text for row in ROWS)


def test_elements_alone() -> None:
    with pytest.raises(InvalidArgumentError, match="no generator gets w\\[0\\]"):
        checks.check_update(1, ["w[0]"], False, ["w"])


@pytest.mark.parametrize(
    "dtype", ["float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float4_e2m1fn_x2"]
)
def test_other_types_than_fp8_of_e4m3(dtype: str) -> None:
    source = WeightLayout([Param("w", (8, 8), "bfloat16", (0,))], 1)
    target = WeightLayout([Param("w", (8, 8), dtype, (0,))], 1)
    with pytest.raises(InvalidArgumentError, match=f"w: bfloat16 does not become {dtype}"):
        weight_plan(source, target)
    with pytest.raises(InvalidArgumentError, match="w: has blocks, so dtype must be float8_e4m3fn"):
        Param("w", (8, 8), dtype, (0,), tensor="x", blocks=Blocks("s", 0, (8, 8)))


def test_drafts_are_not_updated() -> None:
    assert vllm_weights.Receiver.supports_draft_weight_update is False
    updates, selected = sglang_weights.SglangUpdates.__new__(sglang_weights.SglangUpdates), []
    updates._number, updates._ranks = 0, range(0)  # type: ignore[assignment]
    updates._call = lambda name, **fields: selected.append(fields.get("selector"))
    updates._raise_errors = lambda do: None  # type: ignore[method-assign]
    updates._session("begin")
    assert selected == ["target", "target", None]


def test_a_source_without_shards_is_whole_on_each_trainer() -> None:
    """Though it knows how they are placed."""
    meta = SimpleNamespace(
        name="w",
        dtype=torch.bfloat16,
        shape=(8, 8),
        owners=(0, 1),
        mesh_shape=(2,),
        placements=(SimpleNamespace(dim=0),),
    )
    source: Any = SimpleNamespace(metadata=[meta], implements_iter_local=lambda: False)
    (param,) = vllm_weights.layout_of(source, 2).params
    assert (param.shape, param.placements) == ((8, 8), (Replicate(),))
