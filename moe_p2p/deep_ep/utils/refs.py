"""deep_ep.utils.refs: what V2's dispatch and combine give, in plain torch.distributed, for tests.

Symbols: T tokens of this rank, W ranks, E experts, K top-k, H hidden size, M the bound on T, R rows
received, P = ceil(H / 128) scales of a row.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.utils.envs import get_global_seed

_MULTIPLIER = 131071  # a prime, so that neighbouring seeds give unlike data
Rows = Tensor | tuple[Tensor, Tensor]


def _gather(t: Tensor, bound: int) -> list[Tensor]:
    """Returns t [T, ...] of every rank; T at most `bound` and its own on each. Collective."""
    sizes = [torch.empty(1, dtype=torch.int64, device=t.device) for _ in range(_world())]
    dist.all_gather(sizes, torch.tensor([t.shape[0]], dtype=torch.int64, device=t.device))
    # As bytes, because a backend need not know float8.
    padded = t.new_zeros((bound, *t.shape[1:]))
    padded[: t.shape[0]] = t
    all_bytes = padded.view(torch.uint8)
    gathered = [torch.empty_like(all_bytes) for _ in sizes]
    dist.all_gather(gathered, all_bytes)
    return [each.view(t.dtype)[: int(size)] for each, size in zip(gathered, sizes, strict=True)]


def _world() -> int:
    return dist.get_world_size()


def dispatch(
    x: Rows,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Rows, Tensor, Tensor | None, Tensor, Tensor]:
    """Returns the rows that this rank receives, in order of source rank and token. Collective.

    x: [T, H], or fp8 [T, H] and scales [T, P]. topk_idx: [T, K], -1: none. topk_weights: [T, K].
    num_max_tokens_per_rank: M, a bound on every rank's T.

    Returns (x [R, H] or its pair, local expert ids [R, K] or -1 where another rank has the expert,
    weights [R, K] as they were sent or None, source rank * M + source token [R] int32, rows from
    each rank [W] int32).

    Raises InvalidArgumentError for experts that do not divide among ranks, T above M, and tensors
    of unlike length.
    """
    num_ranks, rank = _world(), dist.get_rank()
    rows, scales = x if isinstance(x, tuple) else (x, None)
    given = [t for t in (rows, scales, topk_idx, topk_weights) if t is not None]
    num_tokens, bound = rows.shape[0], num_max_tokens_per_rank
    errors.require(
        num_experts % num_ranks == 0,
        f"num_experts is {num_experts}, must be a multiple of {num_ranks} ranks",
    )
    errors.require(
        all(t.shape[0] == num_tokens <= bound for t in given),
        f"tensors of {[t.shape[0] for t in given]} tokens, must be alike and at most {bound}",
    )
    num_local = num_experts // num_ranks
    first = rank * num_local
    ids = _gather(topk_idx, bound)
    mine = [((first <= each) & (each < first + num_local)) for each in ids]
    taken = [each.any(dim=1).nonzero().flatten() for each in mine]  # tokens, by source

    def received(t: Tensor) -> Tensor:
        return torch.cat([each[at] for each, at in zip(_gather(t, bound), taken, strict=True)])

    local = [
        torch.where(here, each - first, -1)[at]
        for each, here, at in zip(ids, mine, taken, strict=True)
    ]
    sources = torch.cat([at + source * bound for source, at in enumerate(taken)])
    got = received(rows)
    return (
        got if scales is None else (got, received(scales)),
        torch.cat(local),
        None if topk_weights is None else received(topk_weights),
        sources.to(torch.int32),
        torch.tensor([len(at) for at in taken], dtype=torch.int32, device=ids[0].device),
    )


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Returns bfloat16 [R, K, H] that depends on the source token, k and the global seed alone.

    src_token_global_idx: [R], as dispatch() returns it. Row k of token s, column h:
    sin((n * 131071 mod m + 1) / m * (h + 1) + sin(seed)), n = s * K + k, m = W * M * K.
    """
    device = src_token_global_idx.device
    most = _world() * num_max_tokens_per_rank * num_topk
    numbers = src_token_global_idx.long()[:, None] * num_topk
    numbers = numbers + torch.arange(num_topk, device=device)  # [R, K]
    slope = ((numbers * _MULTIPLIER % most).float() + 1) / most
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    angle = slope[:, :, None] * columns + math.sin(float(get_global_seed()))
    return torch.sin(angle).to(torch.bfloat16)


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """Adds data [T, K, H] up in float32, in the order of k, and rounds to its type: [T, H].

    initial_value: [T, H], the first addend.
    """
    total = data.new_zeros((data.shape[0], data.shape[2]), dtype=torch.float32)
    if initial_value is not None:
        total += initial_value.float()
    for k in range(data.shape[1]):
        total += data[:, k].float()
    return total.to(data.dtype)


def _add_groups(data: Tensor, group: Tensor) -> Tensor:
    """Adds up, in float32 and in the order of k, rows of a token with one number in group [T, K].

    Returns [T, K, H]: each sum, rounded, at the group's last k, and zeros elsewhere.
    """
    num_tokens, num_topk, _ = data.shape
    sums, tokens = data.float(), torch.arange(num_tokens, device=data.device)
    last = torch.ones_like(group, dtype=torch.bool)
    for k in range(1, num_topk):
        same = group[:, :k] == group[:, k : k + 1]
        before = (same * torch.arange(1, k + 1, device=data.device)).amax(dim=1) - 1  # -1: none
        found = before >= 0
        sums[found, k] = sums[tokens[found], before[found]] + sums[found, k]
        last[tokens[found], before[found]] = False
    return torch.where(last[:, :, None], sums, 0).to(data.dtype)


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """Returns the sums [T, H] of y [T, K, H], rounded after each level that adds.

    topk_idx: [T, K]; W = num_scaleout_ranks * num_scaleup_ranks. Rows of an id below 0 must be 0.
    bias: [T, H], or two, added first. reduce_in_local: a rank adds before it sends.
    reduce_in_scaleup: so does a scale-up domain; it needs reduce_in_local.
    """
    errors.require(
        reduce_in_local or not reduce_in_scaleup, "reduce_in_scaleup needs reduce_in_local"
    )
    num_local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _add_groups(y, topk_idx // num_local)
    if reduce_in_scaleup:
        y = _add_groups(y, topk_idx // (num_local * num_scaleup_ranks))
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    total = sum((each.float() for each in biases[1:]), biases[0].float()) if biases else None
    return ordered_accumulate(y, total)
