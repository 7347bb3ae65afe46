"""One rank of `bench --check`: correctness alone, a line for each case that the ranks allow.

An owner of new NICs or GPUs runs it first. Rows and sums are compared bit for bit with
moe_p2p.moe.reference; every rank must report a deliberate fault in time. Faults run last, each with
its own communicator.

Shapes: W ranks, T tokens, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

import faulthandler
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, Dispatched
from moe_p2p.bench.check import answer, answer_by_rank, beyond_rounding, bound_of
from moe_p2p.bench.conformance_faults import Spare, faults
from moe_p2p.bench.conformance_halves import Halves
from moe_p2p.bench.conformance_ranks import LAYOUTS, SOON_S, TYPES, Call, Ranks, Wrong
from moe_p2p.bench.harness import finish, use_device
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import experts_of_rows
from moe_p2p.machine.transport import SOFTWARE
from moe_p2p.moe.options import PARTIALS
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools import launch
from moe_p2p.tools.gpu_timing import captured

EXTRA_BYTES = 64  # of _with_extras: 24 and 20 bytes, each in units of 16


def run(options: Options) -> Wrong:
    """Runs the whole check of one rank; returns the errors of all ranks, the same on each."""
    with Spare(options) as spare, launch.process_group() as (rank, _):
        use_device(options.device)
        ranks = Ranks(options, rank)
        ranks.set_deadline()
        try:
            for part in (
                world,
                payloads,
                integers,
                unusual,
                halves,
                graphs,
                training,
                masks,
                functools.partial(faults, spare=spare),
            ):
                part(ranks)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return ranks.wrong


def world(ranks: Ranks) -> None:
    """Says what is here."""
    with ranks.make() as comm:
        ranks.see(is_software=comm.engine.provider in SOFTWARE)
        nics = f"{len(comm.counters())} {comm.engine.provider} NICs a rank"
    nodes, hosts = f"nodes of {ranks.options.ranks_per_node}", ranks.options.hosts
    where = "CPUs" if ranks.options.device == "cpu" else torch.cuda.get_device_name()
    ranks.print(f"{ranks.size} ranks on {where} of {hosts} hosts, {nodes}, {nics}")


def payloads(ranks: Ranks) -> None:
    with ranks.make() as comm:
        for layout in LAYOUTS:
            for kind in TYPES:
                ranks.line(f"{layout}, {kind}", ranks.steps, comm, kind=kind, layout=layout)
    with ranks.make(chunk_tokens=-(-ranks.options.tokens[0] // 3)) as comm:
        for layout in LAYOUTS:
            ranks.line(f"{layout}, calls of three steps", ranks.steps, comm, layout=layout)


def integers(ranks: Ranks) -> None:
    """Partial sums that travel as 10-bit integers, or in blocks of 16-bit values."""
    with ranks.make() as comm:
        for layout in LAYOUTS:
            for sent in PARTIALS:
                how = {"layout": layout, "partials": sent}
                ranks.line(f"{layout}, combine sends {sent}", ranks.steps, comm, **how)


def unusual(ranks: Ranks) -> None:
    """Tensors that travel along, and rows with NaN and infinities."""
    with ranks.make(extra_bytes=EXTRA_BYTES) as comm:
        for layout in LAYOUTS:
            ranks.line(f"{layout}, extras", ranks.steps, comm, change=_with_extras, layout=layout)
        for layout in LAYOUTS:
            for kind in ("bf16", "fp8, quantized inside"):
                name = f"{layout}, {kind}, NaN and infinities"
                ranks.line(name, ranks.steps, comm, change=_with_specials, kind=kind, layout=layout)


def _with_extras(tokens: Tokens, rank: int) -> Tokens:
    generator = torch.Generator().manual_seed(rank)
    count = tokens.x.shape[0]
    packed = torch.randint(256, (count, 24), generator=generator).to(torch.uint8)
    return replace(tokens, extras=(packed, torch.randn(count, 5, generator=generator)))


def _with_specials(tokens: Tokens, rank: int) -> Tokens:
    """Every third row has NaN, the next +infinity, the next -infinity, each at one place."""
    x = tokens.x.clone()
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[i::3, (rank + 37 * i) % x.shape[1]] = value
    return replace(tokens, x=x)


def halves(ranks: Ranks) -> None:
    with ranks.make() as comm:
        halves = Halves(ranks, comm)
        for layout in LAYOUTS:
            for name, way in halves.ways().items():
                ranks.line(f"{layout}, {name}", halves.steps, way, layout=layout)


def graphs(ranks: Ranks) -> None:
    if ranks.options.device != "cuda":
        ranks.skip("graphs", "ranks are on CPUs")
        return
    with ranks.make() as comm:
        for layout in LAYOUTS:
            for kind in ("bf16", "fp8, quantized inside"):
                name = f"{layout}, {kind}, replayed from a CUDA graph"
                ranks.line(name, _replayed, ranks, comm, kind=kind, layout=layout)


def _replayed(ranks: Ranks, comm: AllToAll, **how: Any) -> Wrong:
    held, results = ranks.call(0, full=True, **how), list[Any]()

    def pair() -> None:
        got = comm.dispatch(**held.given)
        results[:] = got, comm.combine(held.y, got)

    pair()  # loads the kernels
    finish(ranks.options.device)
    replay = captured(pair, repeats=1)

    def step(number: int) -> Wrong:
        call = ranks.call(number, full=True, **how)
        for name in ("x", "topk_idx", "topk_weights"):
            held.given[name].copy_(call.given[name])
        held.y.copy_(call.y)
        finish(ranks.options.device)
        replay()
        got, out = results
        return ranks.rows(call, got) + ranks.sums(call, out)

    return ranks.each_step(step)


def training(ranks: Ranks) -> None:
    with ranks.make() as comm:
        for layout in LAYOUTS:
            check = functools.partial(_gradients, ranks, comm, layout)
            ranks.line(f"{layout}, gradients", ranks.each_step, check)


def _gradients(ranks: Ranks, comm: AllToAll, layout: str, step: int) -> Wrong:
    """Compares gradients of tokens and weights with a model's that does not communicate."""
    call = ranks.call(step, kind="fp32", layout=layout)
    x, weights = (call.given[name].requires_grad_() for name in ("x", "topk_weights"))
    got = comm.dispatch(**call.given)
    finish(ranks.options.device)
    answers_here = _answers(ranks, call, got)
    # A kernel of torch at its first use would stop a call that is under way, and NICs with it.
    answers_here.register_hook(  # type: ignore[no-untyped-call]
        lambda _: finish(ranks.options.device)
    )
    out = comm.combine(answers_here, got)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
    torch.autograd.backward([out], [grad.to(out.device)])
    finish(ranks.options.device)
    alone, idx = x.detach().cpu().requires_grad_(), call.given["topk_idx"].cpu()
    weights_alone = weights.detach().cpu().requires_grad_()
    e = idx[..., None] / call.job.topology.num_experts
    present = torch.where(idx >= 0, weights_alone, 0)[..., None]  # [T, K, 1]
    answers = answer(alone[:, None], e)  # [T, K, H]
    torch.autograd.backward([(answers * present).sum(1)], [grad])
    sizes = {
        "x": (present * (answer(torch.ones(1), e) - answer(torch.zeros(1), e))).sum(1) * grad.abs(),
        "topk_weights": (answers * grad[:, None]).abs().sum(-1),
    }
    exact = replace(ranks.options, dtype="fp32")
    pairs = {"x": (x, alone), "topk_weights": (weights, weights_alone)}
    return [
        f"gradient of {name}: {text}"
        for name, (mine, want) in pairs.items()
        for text in beyond_rounding(mine.grad.cpu(), want.grad, bound_of(sizes[name], exact))
    ]


def _answers(ranks: Ranks, call: Call, got: Dispatched) -> Tensor:
    """Returns the answers of this rank's experts, [R, H], differentiable; 0 without a token."""
    rows = call.expected.received.rows().to(got.x.device)
    x = got.x.reshape(-1, got.x.shape[-1])
    if got.row_topk is None:
        expert = experts_of_rows(call.job, ranks.rank, got.counts)
        answers = answer(x[rows], expert[:, None] / call.job.topology.num_experts)
    else:
        row = x[rows], got.row_topk[rows], got.row_weights[rows]
        answers = answer_by_rank(call.job, ranks.rank, *row)
    return torch.zeros_like(x).index_copy(0, rows, answers)


def masks(ranks: Ranks) -> None:
    name = "a rank that stays away is masked, the others go on"
    if ranks.size == 1:
        ranks.skip(name, "there is one rank")
    elif ranks.nodes > 1 and ranks.options.ranks_per_node > 1:
        ranks.skip(name, "masks are for one node, or one rank a node")
    else:
        with ranks.make(mask_lost_ranks=True) as comm:  # on GPUs kernels are compiled here
            for layout in LAYOUTS:
                found = f"{layout}, with masks, all ranks are there"
                ranks.line(found, ranks.steps, comm, layout=layout)
        with ranks.make(mask_lost_ranks=True, timeout_s=SOON_S) as comm:
            ranks.line(name, _masked, ranks, comm)


def _masked(ranks: Ranks, comm: AllToAll) -> Wrong:
    if ranks.rank == ranks.last:
        return []
    found = []
    for step, layout in enumerate(LAYOUTS):
        found += ranks.whole(comm, ranks.call(step, gone=True, layout=layout))
    lost = comm.masked.cpu().nonzero().flatten().tolist()
    return found + ([] if lost == [ranks.last] else [f"masked are {lost}"])
