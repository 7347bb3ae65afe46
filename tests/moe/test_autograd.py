"""Gradients of dispatch and combine against a dense layer in one process that knows no ranks.

Tolerances: everything is fp32 and sums of at most a few dozen products of size one, in another
order than the dense layer's, so 1e-5 is ten times what rounding can do.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import moe_p2p
from moe_p2p import AllToAll, Dispatched, DispatchOptions, InvalidArgumentError
from moe_p2p.moe import row_dots
from tests.moe.test_compile import next_step
from tests.support.cases import HIDDEN_DIM, TOPK, in_options, make
from tests.support.ranks import Rank, on_ranks, run_threads

NUM_EXPERTS = 8
COUNTS = [5, 0, 7, 2]


class Inputs(NamedTuple):
    x: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K]
    grad: Tensor  # [T, H] of the output


class Gradients(NamedTuple):
    out: Tensor  # [T, H]
    x: Tensor | None
    topk_weights: Tensor | None
    experts: Tensor | None  # [E_local, H, H]


def expert_weights() -> Tensor:
    """[E, H, H]"""
    generator = torch.Generator().manual_seed(77)
    return torch.randn(NUM_EXPERTS, HIDDEN_DIM, HIDDEN_DIM, generator=generator) / HIDDEN_DIM**0.5


def inputs(rank: int, *, step: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = COUNTS[(rank + step) % len(COUNTS)]
    scores = torch.rand(count, NUM_EXPERTS, generator=generator)
    topk_idx = scores.topk(TOPK)[1]
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.2] = -1
    return Inputs(
        x=torch.randn(count, HIDDEN_DIM, generator=generator),
        topk_idx=topk_idx,
        topk_weights=torch.rand(count, TOPK, generator=generator),
        grad=torch.randn(count, HIDDEN_DIM, generator=generator),
    )


def dense(
    world_size: int, *, num_tokens: int | None = None, layers: int = 1, step: int = 0
) -> tuple[list[Gradients], Tensor]:
    """Results of every rank's tokens, and the gradient of all experts over all ranks' tokens."""
    experts = expert_weights().requires_grad_()
    results = []
    for rank in range(world_size):
        given = inputs(rank, step=step)
        x = given.x.requires_grad_()
        weights = given.topk_weights.requires_grad_()
        present = given.topk_idx >= 0
        if num_tokens is not None:
            present = present & (torch.arange(len(x)) < num_tokens)[:, None]
        out = x
        for _ in range(layers):
            y = torch.einsum("th,tkhf->tkf", out, experts[given.topk_idx.clamp_min(0)]).tanh()
            out = (y * (weights * present)[..., None]).sum(1)
        out.backward(given.grad)
        results.append(Gradients(out.detach(), x.grad, weights.grad, None))
    assert experts.grad is not None
    return results, experts.grad


def apply_experts(received: Dispatched, experts: Tensor) -> Tensor:
    """tanh(rows @ expert), by rank its weighted sum; garbage stays where no token is."""
    rows, offsets = received.x, received.offsets
    if received.row_topk is not None:
        # Entries of other ranks meet an expert too: their weight is 0, and has no gradient.
        chosen = experts[received.row_topk.clamp_min(0).long()]  # [R, K, H, H]
        y = torch.einsum("rh,rkhf->rkf", rows, chosen).tanh()
        return (y * received.row_weights[..., None]).sum(1)
    if rows.dim() == 3:
        return torch.bmm(rows, experts).tanh()
    owner = torch.bucketize(
        torch.arange(len(rows), device=rows.device), offsets[1:].long(), right=True
    )
    return torch.einsum("rh,rhf->rf", rows, experts[owner.clamp_max(len(experts) - 1)]).tanh()


ZEROED = DispatchOptions(zero_padding=True)


def layer(
    comm: AllToAll, x: Tensor, given: Inputs, weights: Tensor, experts: Tensor, **options: Any
) -> Tensor:
    received = comm.dispatch(x, given.topk_idx, weights, **in_options(**options))
    y = apply_experts(received, experts)
    return comm.combine(y, received)


def run(rank: Rank, config: dict[str, Any], options: dict[str, Any], layers: int) -> Gradients:
    with make(rank, num_experts=NUM_EXPERTS, **config) as comm:
        local = NUM_EXPERTS // rank.world_size
        experts = expert_weights()[rank.rank * local :][:local].clone().requires_grad_()
        given = inputs(rank.rank)
        x = given.x.requires_grad_()
        weights = given.topk_weights.requires_grad_()
        out = x
        for _ in range(layers):
            out = layer(comm, out, given, weights, experts, **options)
        out.backward(given.grad)
        return Gradients(out.detach(), x.grad, weights.grad, experts.grad)


def check(
    world_size: int, config: dict[str, Any], options: dict[str, Any], layers: int = 1
) -> None:
    wanted, experts = dense(world_size, num_tokens=options.get("num_tokens"), layers=layers)
    results = run_threads(world_size, run, config, options, layers)
    local = NUM_EXPERTS // world_size
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.x, want.x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=1e-5, atol=1e-5)
        mine = experts[rank * local :][:local]
        torch.testing.assert_close(got.experts, mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "grouped", "alignment": 4}, {"layout": "by_rank"}],
    ids=["", "grouped", "by_rank"],
)
def test_matches_a_dense_layer(
    world_size: int, ranks_per_node: int, options: dict[str, Any]
) -> None:
    check(world_size, {"ranks_per_node": ranks_per_node}, options)


@pytest.mark.parametrize("layout", ["grouped", "by_rank"])
def test_several_chunks(layout: str) -> None:
    check(4, {"ranks_per_node": 2, "chunk_tokens": 2}, {"layout": layout})


@pytest.mark.parametrize("layout", ["padded", "by_rank"])
def test_several_layers_in_one_backward(layout: str) -> None:
    check(4, {"ranks_per_node": 1}, {"layout": layout}, layers=3)


@on_ranks(2)
def test_bias_gets_the_gradient_of_the_result(rank: Rank) -> None:
    with make(rank) as comm:
        given = inputs(rank.rank)
        bias = tuple(torch.randn_like(given.x).requires_grad_() for _ in range(2))
        received = comm.dispatch(given.x, given.topk_idx, options=ZEROED)
        without = comm.combine(received.x, received)
        out = comm.combine(received.x, received, bias=bias)
        torch.testing.assert_close(out, without + bias[0] + bias[1])
        out.backward(given.grad)
        for term in bias:
            assert term.grad is not None
            assert torch.equal(term.grad, given.grad)


@on_ranks(2)
def test_a_combine_with_weights_of_its_own_has_no_gradient(rank: Rank) -> None:
    with make(rank) as comm:
        given = inputs(rank.rank)
        received = comm.dispatch(given.x, given.topk_idx, options=ZEROED)
        weights = given.topk_weights.requires_grad_()
        with pytest.raises(moe_p2p.InvalidArgumentError, match="give them to dispatch"):
            comm.combine(received.x, received, topk_weights=weights)
        comm.combine(received.x, received, topk_weights=weights.detach())


def test_rows_that_do_not_count_get_no_gradient() -> None:
    def body(rank: Rank) -> Gradients:
        with make(rank) as comm:
            given = inputs(rank.rank)
            x = given.x.requires_grad_()
            weights = given.topk_weights.requires_grad_()
            local = NUM_EXPERTS // rank.world_size
            experts = expert_weights()[rank.rank * local :][:local]
            count = min(1, len(x))
            out = layer(comm, x, given, weights, experts, num_tokens=torch.tensor(count))
            out.backward(given.grad)
            return Gradients(out.detach(), x.grad, weights.grad, None)

    wanted, _ = dense(2, num_tokens=1)
    for got, want in zip(run_threads(2, body), wanted, strict=True):
        torch.testing.assert_close(got.x, want.x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_garbage_in_padding_never_reaches_a_gradient(rank: Rank) -> None:
    with make(rank, ranks_per_node=1) as comm:
        given = inputs(rank.rank)
        weights = given.topk_weights.requires_grad_()
        received = comm.dispatch(given.x, given.topk_idx, weights, options=ZEROED)
        has_token = (received.row_weights > 0).view(received.x.shape[:2])
        y = torch.where(has_token[..., None], received.x, torch.nan)
        y = y.detach().requires_grad_()
        # What dispatch leaves in row_weights of empty rows may be anything too.
        unknown = torch.where(has_token.flatten(), received.row_weights, torch.nan)
        out = comm.combine(y, received._replace(row_weights=unknown))
        out.sum().backward()
        assert weights.grad is not None
        assert not out.isnan().any()
        assert y.grad is not None
        assert not y.grad.isnan().any()
        assert not y.grad[~has_token].any()
        assert not weights.grad.isnan().any()


@pytest.mark.parametrize("which", ["x", "weights", "experts", "none"])
def test_only_what_is_asked_for(which: str) -> None:
    def body(rank: Rank) -> Gradients:
        with make(rank, num_experts=NUM_EXPERTS) as comm:
            given = inputs(rank.rank)
            local = NUM_EXPERTS // rank.world_size
            experts = expert_weights()[rank.rank * local :][:local].clone()
            x, weights = given.x, given.topk_weights
            chosen = {"x": x, "weights": weights, "experts": experts}.get(which)
            if chosen is not None:
                chosen.requires_grad_()
            # Dispatch cannot see that only the experts train.
            zeroed = True if which == "experts" else None
            out = layer(comm, x, given, weights, experts, zero_padding=zeroed)
            assert out.requires_grad == (chosen is not None)
            if chosen is not None:
                out.backward(given.grad)
            return Gradients(out.detach(), x.grad, weights.grad, experts.grad)

    wanted, experts = dense(2)
    for rank, (got, want) in enumerate(zip(run_threads(2, body), wanted, strict=True)):
        torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
        pairs = {
            "x": (got.x, want.x),
            "weights": (got.topk_weights, want.topk_weights),
            "experts": (got.experts, experts[4 * rank :][:4]),
        }
        for name, (mine, theirs) in pairs.items():
            if name == which:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            else:
                assert mine is None


@on_ranks(2)
def test_training_on_rows_that_are_not_zeroed_is_refused(rank: Rank) -> None:
    with make(rank) as comm:
        given = inputs(rank.rank)
        received = comm.dispatch(given.x, given.topk_idx, given.topk_weights)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="pass zero_padding=True"):
            comm.combine(received.x * torch.ones(1, requires_grad=True), received)
        comm.combine(received.x, received)


@on_ranks(2)
def test_gradients_that_do_not_exist_are_refused_before_anything_is_sent(rank: Rank) -> None:
    with make(rank) as comm:
        given = inputs(rank.rank)
        extra = torch.ones(given.x.shape[0], 2, requires_grad=True)
        scalars = torch.ones(comm.dispatch(given.x, given.topk_idx).x.shape[:-1].numel())
        if rank.rank == 0:  # alone: the next calls pair with those of rank 1
            with pytest.raises(moe_p2p.InvalidArgumentError, match=r"extras\[0\] requires grad"):
                comm.dispatch(given.x, given.topk_idx, extras=[extra])
            x = given.x.to(torch.float8_e4m3fn).requires_grad_()
            with pytest.raises(moe_p2p.InvalidArgumentError, match="x requires grad"):
                comm.dispatch(x, given.topk_idx, scales=torch.ones(1))
        received = comm.dispatch(given.x, given.topk_idx)
        if rank.rank == 0:
            with pytest.raises(moe_p2p.InvalidArgumentError, match="row_scalars requires grad"):
                comm.combine(received.x, received, row_scalars=scalars.requires_grad_())
        comm.combine(received.x, received)


@on_ranks(2)
def test_errors_of_a_backward_have_their_type(rank: Rank) -> None:
    comm = make(rank)
    given = inputs(rank.rank)
    x = given.x.requires_grad_()
    received = comm.dispatch(x, given.topk_idx, given.topk_weights)
    out = comm.combine(received.x, received)
    comm.close()
    with pytest.raises(moe_p2p.ClosedError, match="is closed"):
        out.backward(given.grad)


def test_weights_applied_by_the_experts() -> None:
    def body(rank: Rank) -> tuple[Gradients, Gradients]:
        with make(rank) as comm:
            results = []
            for weighted in (True, False):
                given = inputs(rank.rank)
                x, weights = given.x.requires_grad_(), given.topk_weights.requires_grad_()
                received = comm.dispatch(x, given.topk_idx, weights)
                y = received.x.square()
                if not weighted:
                    y = y * received.row_weights.view(*y.shape[:2], 1)
                out = comm.combine(y, received, weighted=weighted)
                out.backward(given.grad)
                results.append(Gradients(out.detach(), x.grad, weights.grad, None))
            return results[0], results[1]

    for first, second in run_threads(2, body):
        for a, b in zip(first[:3], second[:3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@on_ranks(4)
def test_training_leaves_the_object_ready_for_inference(rank: Rank) -> None:
    with make(rank, ranks_per_node=1) as comm:
        for step in range(6):
            given = inputs(rank.rank, step=step)
            local = NUM_EXPERTS // rank.world_size
            experts = expert_weights()[rank.rank * local :][:local].requires_grad_(step % 2 == 0)
            out = layer(
                comm, given.x, given, given.topk_weights, experts, zero_padding=step % 2 == 0
            )
            if step % 2 == 0:
                out.backward(given.grad)
            with torch.no_grad():
                again = layer(comm, given.x, given, given.topk_weights, experts)
            assert torch.equal(again, out)


@on_ranks(2)
def test_bf16_keeps_its_type(rank: Rank) -> None:
    with make(rank, dtype=torch.bfloat16) as comm:
        given = inputs(rank.rank)
        x = given.x.bfloat16().requires_grad_()
        weights = given.topk_weights.requires_grad_()
        received = comm.dispatch(x, given.topk_idx, weights)
        out = comm.combine(received.x * 2, received)
        out.backward(given.grad.bfloat16())
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16
        # Each step rounds to 8 bits; three roundings of sums of up to three terms.
        total = (weights.detach() * (given.topk_idx >= 0)).sum(1, keepdim=True)
        expected = 2 * given.grad * total
        torch.testing.assert_close(x.grad.float(), expected, rtol=0.05, atol=0.05)
        assert weights.grad is not None


class LargestFloat32(TorchDispatchMode):
    """Values of the largest fp32 tensor that an operator makes."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor) and made.dtype == torch.float32:
                self.values = max(self.values, made.numel())
        return result


def test_a_backward_makes_no_fp32_copies_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Rank(0, 1, torch.distributed.HashStore())
    with make(alone, dtype=torch.bfloat16) as comm:
        given = inputs(0)
        assert len(given.x) > 2
        gradients = []
        for at_once in (1 << 30, 100):
            monkeypatch.setattr(row_dots, "_VALUES_AT_ONCE", at_once)
            x = given.x.bfloat16()
            received = comm.dispatch(x, given.topk_idx, given.topk_weights, options=ZEROED)
            y = (received.x * 2).requires_grad_()
            weights = received.row_weights.clone().requires_grad_()
            out = comm.combine(y, received._replace(row_weights=weights))
            with LargestFloat32() as largest:
                out.backward(given.grad.bfloat16())
            assert y.grad is not None
            assert weights.grad is not None
            gradients.append((y.grad, weights.grad))
            # [R] of row weights and their gradients is all that is as long as there are rows.
            assert (largest.values < y.numel()) == (at_once == 100)
        for whole, in_pieces in zip(*gradients, strict=True):
            assert torch.equal(whole, in_pieces)
            assert in_pieces.any()


@on_ranks(2)
def test_a_second_derivative_of_weights_is_refused_before_a_call_is_made(rank: Rank) -> None:
    with make(rank) as comm:
        given = inputs(rank.rank)
        weights = given.topk_weights.requires_grad_()
        received = comm.dispatch(given.x, given.topk_idx, weights)
        out = comm.combine(received.x.square(), received)
        step = next_step(comm)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="no gradient of its own"):
            torch.autograd.grad(
                out, weights, given.grad.clone().requires_grad_(), create_graph=True
            )
        assert next_step(comm) == step + 2  # that step, and the gradient of combine


@on_ranks(2)
def test_a_combine_of_a_wider_type_trains(rank: Rank) -> None:
    """Its gradient travels in the type of y, which the slots of dispatch hold."""
    with make(rank, dtype=torch.bfloat16, combine_dtype=torch.float32) as comm:
        given = inputs(rank.rank)
        weights = given.topk_weights.requires_grad_()
        gradients = []
        for out_dtype in (torch.float32, torch.bfloat16):
            x = given.x.bfloat16().requires_grad_()
            received = comm.dispatch(x, given.topk_idx, weights, options=ZEROED)
            out = comm.combine(received.x, received, out_dtype=out_dtype)
            gradients.append(torch.autograd.grad(out, (x, weights), given.grad.to(out_dtype)))
        for wide, narrow in zip(*gradients, strict=True):
            assert torch.equal(wide, narrow)
            assert wide.any() or len(given.x) == 0


FORWARD = "is a dual tensor, and dispatch and combine have no forward-mode derivative"
TRANSFORM = "x is a tensor of a transform of torch.func"


@on_ranks(1)
def test_forward_mode_and_transforms_are_refused_by_name(rank: Rank) -> None:
    x = torch.ones(4, HIDDEN_DIM)
    weights = torch.ones(4, 2)
    idx = torch.tensor([[0, 1]] * 4)
    with make(rank, topk=2) as comm:

        def pair(x: Tensor, weights: Tensor = weights) -> Tensor:
            got = comm.dispatch(x, idx, weights, layout="grouped")
            return cast(Tensor, comm.combine(got.x, got))

        def halves(x: Tensor) -> Tensor:
            pending = comm.dispatch_send(x, idx, weights)
            got = comm.dispatch_recv(pending)
            return cast(Tensor, comm.combine_recv(comm.combine_send(got.x, got)))

        for call in (pair, halves):
            with pytest.raises(InvalidArgumentError, match="x " + FORWARD):
                torch.func.jvp(call, (x,), (x,))
            with pytest.raises(InvalidArgumentError, match=TRANSFORM):
                torch.func.vmap(call)(x[None].expand(2, -1, -1))
        with pytest.raises(InvalidArgumentError, match=TRANSFORM):
            torch.func.grad(lambda x: pair(x).sum())(x)
        with forward_ad.dual_level():
            assert torch.equal(pair(x), pair(x))  # a level alone is no tangent
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    with pytest.raises(InvalidArgumentError, match="topk_weights " + FORWARD):
                        pair(x, forward_ad.make_dual(weights, weights))
                    got = comm.dispatch(x, idx, weights, layout="grouped")
                    dual = forward_ad.make_dual(got.x, got.x)
                    for refused in (
                        lambda dual=dual, got=got: comm.combine(dual, got),
                        lambda dual=dual, got=got: comm.combine_send(dual, got),
                        lambda got=got: comm.combine(got.x, got, bias=forward_ad.make_dual(x, x)),
                    ):
                        with pytest.raises(InvalidArgumentError, match=FORWARD):
                            refused()
                    comm.combine(got.x, got)


@on_ranks(1)
def test_what_is_written_to_a_given_tensor_is_known_to_autograd(rank: Rank) -> None:
    x, idx = torch.ones(4, HIDDEN_DIM), torch.tensor([[0, 1]] * 4)
    with make(rank, topk=2) as comm:

        def write(out: Tensor, in_halves: bool) -> None:
            got = comm.dispatch(x, idx, layout="grouped")
            try:
                if not in_halves:
                    comm.combine(got.x, got, out=out)
                    return
                sent = comm.combine_send(got.x, got)
            except InvalidArgumentError:
                comm.combine(got.x, got)
                raise
            try:
                comm.combine_recv(sent, out)
            except InvalidArgumentError:
                comm.combine_recv(sent)
                raise

        for in_halves in (False, True):
            leaf = torch.zeros(4, HIDDEN_DIM, requires_grad=True)
            for out in (leaf, leaf * 1):
                with pytest.raises(InvalidArgumentError, match="out requires grad"):
                    write(out, in_halves)
                assert not out.any()
                with torch.no_grad():
                    write(out, in_halves)
                assert out.any()
            factor = torch.ones_like(x)
            product = torch.ones_like(x).requires_grad_() * factor
            write(factor, in_halves)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
        with torch.inference_mode():  # such tensors have no versions
            write(torch.zeros_like(x), False)
        pending = comm.dispatch_send(x, idx, layout="grouped")
        earlier = comm.dispatch_recv(pending)
        product = torch.ones_like(earlier.x).requires_grad_() * earlier.x
        comm.combine(earlier.x, earlier)
        later = comm.dispatch_recv(comm.dispatch_send(x, idx, layout="grouped"), earlier)
        comm.combine(later.x, later)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
