"""Training through DeepEP's calls, as Megatron does: autograd functions around them.

The backward of dispatch is a combine with the gradients of the weights beside the rows; the
backward of combine is a dispatch with the handle of the forward one.

Symbols: T tokens, K top-k, E experts, H hidden size, R rows received.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.deep_ep import Buffer, EventHandle, EventOverlap
from tests.support.deep_ep_cases import layout_of
from tests.support.ranks import Rank, on_ranks, run_threads

E, K, H = 12, 3, 64
LAYERS = 2
NUM_TOKENS = (6, 0, 9, 4)


class Dispatch(torch.autograd.Function):
    """(x, topk_idx, probs) -> (rows, their local experts, their probs, handle)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_idx: Tensor, probs: Tensor, buffer: Buffer, later: bool
    ) -> tuple[Any, ...]:
        options = _options(later)
        layout, event = layout_of(buffer, topk_idx, E, **options)
        layout |= {"topk_idx": topk_idx, "topk_weights": probs}
        rows, row_idx, row_probs, counts, handle, event = buffer.dispatch(
            x, **layout, **options | {"previous_event": event}
        )
        if later:
            event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.later = buffer, handle, later
        assert sum(counts or []) == int((row_idx >= 0).sum())
        ctx.mark_non_differentiable(row_idx)
        return rows, row_idx, row_probs, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_rows, _, grad_probs, _ = grads
        grad_x, grad_topk, event = ctx.buffer.combine(
            grad_rows.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            **_options(ctx.later),
        )
        if ctx.later:
            event.current_stream_wait()
        return grad_x, None, grad_topk, None, None


class Combine(torch.autograd.Function):
    """(rows, handle) -> sums."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, buffer: Buffer, handle: Any, later: bool) -> Tensor:
        out, _, event = buffer.combine(y, handle, **_options(later))
        if later:
            event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.later = buffer, handle, later
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        rows, *_, event = ctx.buffer.dispatch(
            grads[0].contiguous(), handle=ctx.handle, **_options(ctx.later)
        )
        if ctx.later:
            event.current_stream_wait()
        return rows, None, None, None


def _options(later: bool) -> dict[str, Any]:
    if not later:
        return {}
    event = EventOverlap(EventHandle())
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}


def make_weights() -> Tensor:  # [layers, E, H, H]
    generator = torch.Generator().manual_seed(3)
    return torch.randn(LAYERS, E, H, H, generator=generator) / H**0.5


def make_tokens(rank: int) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """x [T, H], of each layer topk_idx and probs [T, K], and the gradient of the result."""
    generator = torch.Generator().manual_seed(50 + rank)
    shape = (NUM_TOKENS[rank], K)
    routes, probs = [], []
    for _ in range(LAYERS):
        scores = torch.rand(NUM_TOKENS[rank], E, generator=generator)
        topk_idx = scores.topk(K, dim=1).indices
        topk_idx[torch.rand(shape, generator=generator) < 0.2] = -1
        routes.append(topk_idx)
        probs.append(torch.rand(shape, generator=generator))
    x, grad = torch.randn(2, NUM_TOKENS[rank], H, generator=generator)
    return x, routes, probs, grad


def apply_experts(x: Tensor, topk_idx: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """Sum over the experts that topk_idx names, of prob * tanh(x W)."""
    out = torch.zeros_like(x)
    for expert in range(weights.shape[0]):
        prob = torch.where(topk_idx == expert, probs, 0.0).sum(1, keepdim=True)
        out = out + prob * torch.tanh(x @ weights[expert])
    return out


def _train(rank: Rank, later: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The result and its gradients, of two micro-batches that accumulate; and what they must be."""
    group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
    buffer = Buffer(group, 1 << 20, explicitly_destroy=True, timeout_s=20.0)
    each = E // rank.world_size
    mine = slice(rank.rank * each, (rank.rank + 1) * each)
    weights = make_weights()[:, mine].clone().requires_grad_()
    x, routes, probs, grad = make_tokens(rank.rank)
    leaves = [x.requires_grad_(), *(prob.requires_grad_() for prob in probs)]
    for _ in range(2):
        h = x
        for layer in range(LAYERS):
            rows, row_idx, row_probs, handle = Dispatch.apply(
                h, routes[layer], probs[layer], buffer, later
            )
            y = apply_experts(rows, row_idx, row_probs, weights[layer])
            h = h + Combine.apply(y, buffer, handle, later)
        h.backward(grad)
    buffer.destroy()
    got = [h.detach(), *(leaf.grad for leaf in leaves), weights.grad]

    whole = make_weights().requires_grad_()
    for other in range(rank.world_size):
        x, routes, probs, grad = make_tokens(other)
        leaves = [x.requires_grad_(), *(prob.requires_grad_() for prob in probs)]
        h = x
        for layer in range(LAYERS):
            h = h + apply_experts(h, routes[layer], probs[layer], whole[layer])
        (2 * h).backward(grad)
        if other == rank.rank:
            expected = [h.detach(), *(leaf.grad for leaf in leaves)]
    return got, [*expected, whole.grad[:, mine]]


@pytest.mark.parametrize("later", [False, True], ids=["in-line", "by-events"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gradients_are_those_of_a_model_without_ranks(world_size: int, later: bool) -> None:
    for got, expected in run_threads(world_size, _train, later):
        for mine, wanted in zip(got, expected, strict=True):
            # fp32 sums of the same terms in another order.
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


@on_ranks(1)
def test_calls_themselves_are_not_recorded(rank: Rank) -> None:
    group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
    buffer = Buffer(group, explicitly_destroy=True, timeout_s=20.0)
    x, routes, probs, _ = make_tokens(0)
    rows, _, row_probs, handle = Dispatch.forward(
        SimpleNamespace(mark_non_differentiable=lambda _: None),
        x.requires_grad_(),
        routes[0],
        probs[0].requires_grad_(),
        buffer,
        False,
    )
    out, _, _ = buffer.combine(rows, handle, row_probs)
    assert torch.is_grad_enabled()
    assert not any(tensor.requires_grad for tensor in (rows, row_probs, out))
    buffer.destroy()
