"""Another module with DeepEP's calls: ours, but low-latency combine forgets the last token."""

from __future__ import annotations

from typing import Any

import moe_p2p.deep_ep
from moe_p2p.deep_ep import topk_idx_t

__all__ = ["Buffer", "topk_idx_t"]


class Buffer(moe_p2p.deep_ep.Buffer):
    def low_latency_combine(self, *args: Any, **kwargs: Any) -> Any:
        result = super().low_latency_combine(*args, **kwargs)
        kwargs["out"][-1:] = 0
        return result
