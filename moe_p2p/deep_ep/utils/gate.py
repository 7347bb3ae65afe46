"""deep_ep.utils.gate: scores of a gate whose rank 0 gets more tokens than others. In plain torch.

Symbols: T tokens, E experts, W ranks, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_p2p import errors

_HALVINGS = 20  # of the factor's bracket: far finer than one token of 2**17
_MOST_FACTOR = 100.0  # rank 0 then gets nearly every expert of a token


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Returns float32 scores [T, E] in [0, 1) or [0, 100): by the experts of the K largest, rank 0
    gets `ratio` times as many tokens as the mean of the other ranks.

    A rank has E / W experts in order, and gets a token once. The tensor is on the current GPU, or
    on the CPU without one.

    precise: the other ranks get equally many tokens, to one, and a token that would need more ranks
        than the ratio leaves it is sent to fewer. Otherwise scores are uniform, multiplied by a
        factor at rank 0: as a real gate is, and the ratio holds only as far as one draw can.

    Raises InvalidArgumentError for a ratio below 1, experts that do not divide among ranks, and, if
    precise, for K experts that do not fit into the ranks that the ratio leaves a token.
    """
    errors.require(
        ratio >= 1 and num_experts % num_ranks == 0,
        f"the ratio is {ratio}, must be at least 1, and {num_experts} experts must divide among "
        f"{num_ranks} ranks",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=device)
    if precise:
        return _precise(drawn, num_ranks, num_topk, ratio)
    return drawn if ratio == 1 else _by_factor(drawn, num_ranks, num_topk, ratio)


def _tokens_of_ranks(scores: Tensor, num_ranks: int, num_topk: int) -> Tensor:
    """Returns [T, W]: whether a rank has one of a token's K experts."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(num_topk, dim=1).indices, True)
    return chosen.view(len(scores), num_ranks, -1).any(dim=2)


def _by_factor(drawn: Tensor, num_ranks: int, num_topk: int, ratio: float) -> Tensor:
    """Bisects for the factor: rank 0's share only grows with it, as the draw stays the same."""
    num_local = drawn.shape[1] // num_ranks
    least, most = 1.0, _MOST_FACTOR
    for _ in range(_HALVINGS):
        factor = (least + most) / 2
        scores = drawn.clone()
        scores[:, :num_local] *= factor
        counts = _tokens_of_ranks(scores, num_ranks, num_topk).sum(dim=0).float()
        if counts[0] > ratio * counts[1:].mean():
            most = factor
        else:
            least = factor
    drawn[:, :num_local] *= least
    return drawn


def _precise(drawn: Tensor, num_ranks: int, num_topk: int, ratio: float) -> Tensor:
    num_tokens, num_experts = drawn.shape
    num_local, device = num_experts // num_ranks, drawn.device
    fewest = max(1, -(-num_topk // num_local))
    most = min(num_topk, num_ranks, int((num_ranks - 1) / ratio) + 1)
    errors.require(
        fewest <= most,
        f"top-{num_topk} needs {fewest} ranks of {num_local} experts each, and with a ratio of "
        f"{ratio} a token goes to at most {most} of {num_ranks}",
    )
    sizes = _tokens_of_ranks(drawn, num_ranks, num_topk).sum(dim=1).clamp(fewest, most)  # [T]
    # Rank 0 gets its share of all copies; first tokens that go to every rank, then any.
    share = round(float(sizes.sum()) * ratio / (num_ranks - 1 + ratio))
    order = (
        torch.rand(num_tokens, dtype=torch.float32, device=device) + (sizes == num_ranks)
    ).argsort(descending=True)
    at_first = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    at_first[order[:share]] = True
    # The others are dealt to in a circle, so that their counts differ by one at most.
    dealt = sizes - at_first.to(sizes.dtype)
    begin = dealt.cumsum(0) - dealt
    place = torch.arange(num_ranks - 1, device=device)
    named = (place - begin[:, None]) % max(1, num_ranks - 1) < dealt[:, None]  # [T, W - 1]
    named = named[:, torch.randperm(num_ranks - 1, device=device)]
    ranks = torch.cat([at_first[:, None], named], dim=1)
    # One expert of each of a token's ranks above all, then the ranks' others, then the rest.
    drawn = drawn.view(num_tokens, num_ranks, num_local)
    best = torch.zeros_like(drawn).scatter_(2, drawn.argmax(dim=2, keepdim=True), 1)
    tier = ranks[:, :, None] * (1 + best)
    return ((tier + drawn) / 3).flatten(1)
