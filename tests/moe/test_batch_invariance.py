"""A token's result has the same bits whatever else is in its batch: README and docs/protocol.md,
section 10."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_p2p.moe.reference import Tokens
from tests.support.cases import LAYOUTS, check_step, make, make_tokens
from tests.support.ranks import Rank, on_ranks

WORLD = 4
COUNTS = [3, 1, 2, 3]
OTHERS = [4, 9, 0, 7]  # tokens that come along, of other lengths on each rank


def among_others(tokens: Tokens, rank: int) -> Tokens:
    """Behind others, and in the opposite order."""
    others = make_tokens(7, rank, OTHERS[rank], dtype=tokens.x.dtype)
    return Tokens(
        x=torch.cat([others.x, tokens.x.flip(0)]),
        topk_idx=torch.cat([others.topk_idx, tokens.topk_idx.flip(0)]),
        topk_weights=torch.cat([others.topk_weights, tokens.topk_weights.flip(0)]),
    )


@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "more",
    [{}, {"chunk_tokens": 5}, {"quantize": True}],
    ids=["whole", "in chunks", "fp8"],
)
@on_ranks(WORLD)
def test_a_result_does_not_depend_on_the_batch(
    rank: Rank, ranks_per_node: int, layout: str, more: dict[str, Any]
) -> None:
    """Of a few tokens alone, and among others. check_step compares both with the reference."""
    config = {name: value for name, value in more.items() if name == "chunk_tokens"}
    options = {name: value for name, value in more.items() if name not in config}
    few = [make_tokens(1, r, count, dtype=torch.bfloat16) for r, count in enumerate(COUNTS)]
    many = [among_others(tokens, r) for r, tokens in enumerate(few)]
    with make(rank, ranks_per_node=ranks_per_node, dtype=torch.bfloat16, **config) as comm:
        _, alone = check_step(comm, few, layout=layout, **options)
        _, among = check_step(comm, many, layout=layout, **options)
    assert torch.equal(alone, among[-COUNTS[rank.rank] :].flip(0))
