"""Integrations where the other project is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import torch.distributed as dist

from moe_p2p import InvalidArgumentError
from moe_p2p.row_counts import SizeExchange
from tests.support.cases import make
from tests.support.ranks import Rank


@pytest.mark.parametrize("project", ["vllm", "sglang", "megatron"])
def test_without_the_project_it_imports_and_names_what_is_missing(
    project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == project]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, project, None)  # importlib then finds nothing
    module = importlib.import_module(f"moe_p2p.integrations.{project}")
    with pytest.raises(ImportError, match=rf"integrations\.{project} needs {project}"):
        module.install()
    assert "deep_ep" not in sys.modules


def test_sizes_of_experts_in_any_order_are_refused() -> None:
    alone = Rank(0, 1, dist.HashStore())
    with make(alone, num_experts=4, expert_rank=[0, 0, 0, 0]) as comm:
        idx = torch.zeros(3, 2, dtype=torch.int64)
        with pytest.raises(InvalidArgumentError, match="has expert_rank: count rows"):
            SizeExchange().ask(comm, idx)
    alone = Rank(0, 1, dist.HashStore())
    with make(alone, num_experts=4) as comm:
        assert SizeExchange().ask(comm, idx).counts.tolist() == [6, 0, 0, 0]
