"""Rows of bytes on a GPU: every word arrives unchanged, however a row announces itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.moe.test_opaque_rows import CONFIG, run_layouts
from tests.support.gpu_ranks import World, make, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu


def layouts(rank: Rank, world: World, config: dict[str, Any]) -> None:
    with make(rank, world, num_experts=8, **CONFIG | config) as comm:
        run_layouts(comm, 1)


@pytest.mark.parametrize("world", worlds((1, 1), (2, 2), (4, 2)))
@pytest.mark.parametrize("way", ["short steps", "long steps", "bulk"])
def test_bytes_arrive_unchanged(world: World, way: str) -> None:
    long = {"max_tokens": 300, "chunk_tokens": 300}
    config = {"short steps": {}, "long steps": long, "bulk": long | {"num_sms": 8}}[way]
    run(world, layouts, config)
