"""Dispatch and combine in engines: vLLM, SGLang, Megatron."""

from __future__ import annotations

from typing import Any

from moe_p2p.moe.pool import AllToAllPool


def pool_of(shared: dict[Any, AllToAllPool], group: Any) -> AllToAllPool:
    """Returns the pool that all layers of a group share. Raises what broke one of the others."""
    if group not in shared:
        shared[group] = AllToAllPool(group)
    shared[group].check_others()
    return shared[group]
