"""How ranks of an inference engine go to a version in the same step. Used by engine_rank.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Smallest of what an engine's ranks give it, on each of them; called once a step.
Agree = Callable[[int], int]


def agree_in(group: Any) -> Agree:
    """Over a CPU process group of the engine's ranks."""

    def smallest(number: int) -> int:
        value = torch.tensor([number], device="cpu")
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN, group=group)
        return int(value)

    return smallest
