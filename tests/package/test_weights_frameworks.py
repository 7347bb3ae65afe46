"""Code of docs/weights_frameworks.md compiles, and what it takes from this package exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import moe_p2p
import moe_p2p.weights
from moe_p2p.integrations.weights import engine as engine_weights
from moe_p2p.integrations.weights import sglang as sglang_weights
from moe_p2p.integrations.weights import vllm as vllm_weights

PAGE = (Path(__file__).resolve().parents[2] / "docs/weights_frameworks.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OURS = ("WeightTrainer", "WeightLayout", "Param", "Shard", "of_tensor", "Engine")


@pytest.mark.parametrize("block", BLOCKS)
def test_it_compiles_and_calls_what_there_is(block: str) -> None:
    used = {node.id for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Name)}
    for name in used.intersection(OURS):
        assert hasattr(moe_p2p.weights, name) or hasattr(moe_p2p, name), name


def test_names_of_adapters_exist() -> None:
    assert "MoeP2pTrainerInit" in vllm_weights._OURS
    assert sglang_weights.LOADER in PAGE
    assert {"host", "port", "mode"} <= engine_weights.Fleet.__dataclass_fields__.keys()
