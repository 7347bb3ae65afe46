"""kernels/count.cu and its twin on hosts: what they count, and what they give to the host."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe_p2p import InvalidArgumentError
from moe_p2p.moe.routing_counts import count_routing
from moe_p2p.moe.row_counts import Given, HostCounts
from tests.support import gpu_ranks

ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    return "cpu" if request.param == "cpu" else gpu_ranks.DEVICE


def routing(num_tokens: int, topk: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    idx = torch.rand(num_tokens, num_experts, generator=generator).topk(topk, 1).indices
    idx[torch.rand(idx.shape, generator=generator) < 0.3] = -1
    return idx.to(dtype)


def words_of(given: Given, num_counts: int) -> list[int]:
    """Waits for the call's number behind the counts, and returns them."""
    words = (ctypes.c_int32 * (num_counts + 1)).from_address(given.host)
    end = time.monotonic() + 20
    while words[num_counts] != given.number:
        assert time.monotonic() < end, "the counts did not come"
    return list(words[:num_counts])


# T, K, E, W, N: nobody, one word, several warps, more ranks than a word has bits, many in all.
SHAPES = [(0, 2, 4, 2, 0), (7, 3, 12, 4, 0), (130, 5, 64, 16, 2), (70, 9, 260, 130, 0)]
SHAPES += [(33, 4, 144, 72, 9), (1100, 8, 256, 8, 1)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_nodes_and_experts_are_counted(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    num_tokens, topk, num_experts, num_ranks, num_nodes = shape
    idx = routing(num_tokens, topk, num_experts, dtype)
    named = functional.one_hot(idx.long() + 1, num_experts + 1)[..., 1:].sum(1)  # [T, E]
    ranks = named.view(-1, num_ranks, num_experts // num_ranks).any(2)
    nodes = ranks.view(-1, max(1, num_nodes), num_ranks // max(1, num_nodes)).any(2)
    host = HostCounts()
    made = host.count(idx.to(device), num_experts, num_ranks, num_nodes=num_nodes)
    assert torch.equal(made.is_token_in_rank.cpu(), ranks)
    assert made.num_tokens_per_rank.tolist() == ranks.sum(0).tolist()
    assert made.num_tokens_per_expert.tolist() == named.sum(0).tolist()
    if num_nodes:
        assert made.num_tokens_per_node is not None
        assert made.num_tokens_per_node.tolist() == nodes.sum(0).tolist()
    else:
        assert made.num_tokens_per_node is None
    wanted = [*ranks.sum(0).tolist(), *named.sum(0).tolist(), num_tokens]
    counts = made.num_tokens_per_rank, made.num_tokens_per_expert
    given = host.given(*counts, num_tokens)
    assert words_of(given, len(wanted)) == wanted
    assert host.given(*counts, num_tokens) == given, "they were given once more"
    # The caller's own tensors are given too.
    again = host.given(counts[0].clone(), counts[1].clone(), num_tokens)
    assert again != given
    assert words_of(again, len(wanted)) == wanted


def test_counts_of_several_calls_stay_apart(device: str) -> None:
    host = HostCounts()
    made = [(host.count(routing(n, 2, 4, torch.int64).to(device), 4, 2), n) for n in range(9)]
    for counts, num_tokens in made:  # the oldest are given once more
        pair = counts.num_tokens_per_rank, counts.num_tokens_per_expert
        got = words_of(host.given(*pair, num_tokens), 7)
        assert got == [*pair[0].tolist(), *pair[1].tolist(), num_tokens]


def test_numbers_that_do_not_divide_are_refused(device: str) -> None:
    idx = torch.zeros((3, 2), dtype=torch.int64, device=device)
    with pytest.raises(InvalidArgumentError, match="num_experts is 5, must be a multiple"):
        count_routing(idx, 5, 2)
    with pytest.raises(InvalidArgumentError, match="num_nodes is 3, must divide 4"):
        count_routing(idx, 8, 4, num_nodes=3)
    with pytest.raises(InvalidArgumentError, match=r"topk_idx is torch\.float32"):
        count_routing(idx.float(), 8, 4)
