"""Results of timed calls, compared after timing: calls that return at once have the best figures.

Inputs change from round to round, in the memory that graphs have captured. After the last round of
each way of timing it runs once more on new inputs: no rank's communicator may be broken, rows must
equal an eager call's bit for bit, sums must equal a closed form within rounding.

Shapes: T tokens, K top-k, H hidden size, W ranks, R rows at this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import Dispatched
from moe_p2p.bench.cases import Job
from moe_p2p.bench.check import beyond_rounding, bound_of
from moe_p2p.bench.gpu_calls import Calls, Layer
from moe_p2p.bench.gpu_layer import MAX_DIFFERENCE, difference
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools.gather import everyones

COMPARED_SUMS = "after timing, sums of a last run of other inputs within rounding"
COMPARED = f"{COMPARED_SUMS}, and its rows bit for bit those of an eager call"


class Inputs:
    """Tokens whose values change in place, to each of `variants` in turn.

    With one variant rows and weights change; the routing, which decides the time on GPUs, stays.
    """

    def __init__(self, *variants: Tokens) -> None:
        first = variants[0]
        weights = first.topk_weights
        assert weights is not None
        self.tokens = replace(
            first, x=first.x.clone(), topk_idx=first.topk_idx.clone(), topk_weights=weights.clone()
        )
        if len(variants) == 1:
            flipped = replace(first, x=-first.x.flip(0), topk_weights=weights.flip(0) * 0.5)
            variants = first, flipped
        self._variants = variants
        self._number = self._num_new = 0

    def change(self) -> None:
        self._number += 1
        variant = self._variants[self._number % len(self._variants)]
        assert self.tokens.topk_weights is not None
        assert variant.topk_weights is not None
        self.tokens.x.copy_(variant.x)
        self.tokens.topk_idx.copy_(variant.topk_idx)
        self.tokens.topk_weights.copy_(variant.topk_weights)

    def renew(self) -> None:
        """Sets values that no call has had: earlier results cannot pass for the last run's."""
        self.change()
        self._num_new += 1
        assert self.tokens.topk_weights is not None
        for values in (self.tokens.x, self.tokens.topk_weights):
            values.mul_(1 / (1 + self._num_new))


class Watch:
    """Changes inputs between rounds, compares the results of a last one. wrong: its errors."""

    def __init__(self, job: Job, options: Options, rank: int, inputs: Inputs) -> None:
        self._job, self._options, self._rank, self._inputs = job, options, rank, inputs
        self.wrong: dict[Calls, list[str]] = {}

    def change(self) -> None:
        self._inputs.change()

    def look(
        self,
        calls: Calls,
        what: str,
        again: Callable[[], object],
        layer: Layer | None = None,
    ) -> None:
        """Collective. again: repeats the timed run."""
        if calls.last is None or what.startswith("experts"):  # no call
            return
        self._inputs.renew()
        again()
        finish(self._options.device)
        found = [f"broken: {text}" for text in everyones(calls.broken()) if text]
        if not found:  # on all ranks, as the rest is collective too
            found = self._compare(calls, what, layer)
        found_so_far = self.wrong.setdefault(calls, [])
        tokens = self._options.tokens[0]
        name = calls.system if layer is None else f"{calls.system}, {layer.name}"
        found_so_far += [f"T {tokens}, rank {self._rank}: {name}, {what}, {text}" for text in found]

    def _compare(self, calls: Calls, what: str, layer: Layer | None) -> list[str]:
        assert calls.last is not None
        if layer is not None:
            got = layer.out()
            apart = difference(got, layer.run())
            return [] if apart <= MAX_DIFFERENCE else [f"layer is {apart:.3f} of its length away"]
        last = calls.last(what)
        found = []
        if calls.eager is not None:
            found += compare_rows(last, calls.eager())
        # A copy: pickle writes the whole tensor of which the answer is a row.
        answer = last["answer"].cpu().clone()
        answers = torch.stack(self._of_ranks(everyones(answer)))  # [W, H]
        sums, magnitude = constant_sums(self._job, self._inputs.tokens, answers, calls.layout)
        bound = bound_of(magnitude, self._options, partials=calls.partials)
        found += beyond_rounding(last["out"], sums, bound)
        finish(self._options.device)
        return found

    def _of_ranks(self, answers: list[Tensor]) -> list[Tensor]:
        """Returns every rank's answer, of every process's; in a mirror world two play all."""
        if not self._job.mirrored:
            return answers
        own = dist.get_rank()
        partner = answers[(own + 1) % len(answers)]
        return [answers[own], *[partner] * (self._job.topology.world_size - 1)]


def constant_sums(job: Job, tokens: Tokens, answers: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Returns the sums when rank r answers every row with answers[r], fp32 [T, H], and the sums
    of magnitudes."""
    device = tokens.x.device
    answers = answers.float().to(device)
    named = tokens.topk_idx >= 0
    owner = job.topology.owner().to(device)[tokens.topk_idx.clamp_min(0).long()]  # [T, K]
    assert tokens.topk_weights is not None
    weights = tokens.topk_weights.where(named, 0.0)
    if layout == "by_rank":  # one row per rank, whose answer is already the sum
        hits = torch.zeros(len(owner), job.topology.world_size, device=device)
        hits.scatter_add_(1, owner, named.float())
        factors = hits.clamp_max(1.0)
    else:
        factors = torch.zeros(len(owner), job.topology.world_size, device=device)
        factors.scatter_add_(1, owner, weights)
    out = torch.zeros_like(tokens.x, dtype=torch.float32)
    magnitude = torch.zeros_like(out)
    for rank, answer in enumerate(answers):
        out += factors[:, rank, None] * answer
        magnitude += factors[:, rank, None] * answer.abs()
    return out, magnitude


def compare_rows(last: Mapping[str, Tensor], want: Dispatched) -> list[str]:
    """Compares rows that hold a token, bit for bit."""
    if not torch.equal(last["counts"], want.counts):
        return [f"counts are {last['counts'].tolist()}, of an eager call {want.counts.tolist()}"]
    if want.x.dim() == 3:
        room = torch.arange(want.x.shape[1], device=want.x.device)
        used = (room < want.counts[:, None]).flatten()
    else:
        used = torch.arange(want.x.shape[0], device=want.x.device) < want.offsets[-1]
    pairs = {"rows": (last["x"], want.x), "weights": (last["row_weights"], want.row_weights)}
    if want.scales is not None:
        pairs["scales"] = (last["scales"], want.scales)
    return [
        f"{name} are not those of an eager call"
        for name, (mine, theirs) in pairs.items()
        if not torch.equal(_bits(mine, used), _bits(theirs, used))
    ]


def _bits(rows: Tensor, used: Tensor) -> Tensor:
    flat = rows.reshape(len(used), -1).contiguous()
    return flat.view(torch.uint8)[used]
