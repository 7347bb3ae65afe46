"""Gathers values of all ranks: torch's own all_gather_object needs numpy."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist


def everyones(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns `value` of every rank of a gloo group; None: the default group. Collective."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.zeros(dist.get_world_size(group), 1, dtype=torch.int64)
    dist.all_gather(list(sizes), torch.tensor([len(data)]), group)
    parts = torch.zeros(len(sizes), int(sizes.max()), dtype=torch.uint8)
    padded = torch.nn.functional.pad(data, (0, parts.shape[1] - len(data)))
    dist.all_gather(list(parts), padded, group)
    return [pickle.loads(bytes(part.tolist())) for part in parts]
