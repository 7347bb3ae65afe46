"""A routing that `demo --save-trace` records, and `bench --trace` replays.

Shapes: S recorded steps, W ranks, T tokens of one rank, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_p2p import errors


@dataclass(frozen=True, kw_only=True)
class RecordedRouting:
    """What a router chose."""

    topk_idx: Tensor  # [S, W, T, K] int64
    topk_weights: Tensor  # [S, W, T, K] fp32
    num_experts: int

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded = {
            "topk_idx": self.topk_idx.to(torch.int16),
            "topk_weights": self.topk_weights.to(torch.float16),
            "num_experts": self.num_experts,
        }
        torch.save(recorded, path)

    @staticmethod
    def load(path: Path) -> RecordedRouting:
        try:
            recorded = torch.load(path, weights_only=True)
            return RecordedRouting(
                topk_idx=recorded["topk_idx"].to(torch.int64),
                topk_weights=recorded["topk_weights"].to(torch.float32),
                num_experts=int(recorded["num_experts"]),
            )
        except Exception as error:  # whatever torch.load raises for a file of another kind
            text = f"--trace {path}: not a routing that `demo --save-trace` wrote ({error!r})"
            raise errors.make(errors.InvalidArgumentError, text.splitlines()[0]) from error
