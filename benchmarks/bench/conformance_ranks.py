"""What checks of `bench --check` are made of: lines, calls of all ranks, comparisons.

Shapes: W ranks, T tokens, K top-k, E experts, H hidden size, R rows.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, DispatchOptions, errors
from moe_p2p.bench.cases import Job, changing_counts, make_job
from moe_p2p.bench.check import Expected, compare_rows, compare_sums, expect
from moe_p2p.bench.gpu_calls import on_device
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import make_config
from moe_p2p.moe import reference
from moe_p2p.moe.layouts import NAMES
from moe_p2p.moe.options import CombineOptions, Partials
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools.gather import everyones

LAYOUTS = NAMES
GIVEN = "fp8 with scales of the caller"
# Name -> --dtype, and how dispatch quantizes.
TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "fp32": ("fp32", {}),
    "fp8, quantized inside": ("fp8", {"quantize": True}),
    "fp8, scales are powers of two": ("fp8", {"quantize": True, "scale_format": "power_of_two"}),
    "fp8, scales are ue8m0": ("fp8", {"quantize": True, "scale_format": "ue8m0"}),
    GIVEN: ("fp8", {}),
}
GIVEN_NAMES = ("x", "topk_idx", "topk_weights", "scales", "extras")
SOON_S = 5.0  # timeout_s where a rank stays away on purpose
CHECK_S = 240.0  # deadline of a check beyond timeout_s; on a GPU its first call compiles kernels
OTHERS_S = 5.0  # the rank that stops ends first, and says where; others wait for it

Wrong = list[str]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One dispatch and combine of all ranks, as this rank makes it, and the expected results."""

    given: dict[str, Any]  # arguments of dispatch
    y: Tensor  # [R, H] rows of combine
    expected: Expected
    job: Job
    partials: Partials | None = None


class Ranks:
    """All ranks, seen from one. wrong: errors so far, of any rank."""

    def __init__(self, options: Options, rank: int) -> None:
        self.options, self.rank = options, rank
        self.size, self.last = options.ranks, options.ranks - 1
        self.nodes = options.ranks // options.ranks_per_node
        self.is_software = False  # whether the NICs are software
        self.wrong: Wrong = []

    def see(self, *, is_software: bool) -> None:
        self.is_software = is_software

    # --- lines ---

    def print(self, text: str, end: str = "\n") -> None:
        if self.rank == 0:
            print(text, end=end, flush=True)

    def skip(self, name: str, why: str) -> None:
        self.print(f"{name} ... skipped: {why}")

    def line(self, name: str, check: Callable[..., Wrong], *args: Any, **how: Any) -> None:
        """check(*args, **how): what is wrong on this rank. Collective.

        The name is printed when the check begins, so a check that stops is the last name.
        """
        self.print(f"{name} ... ", end="")
        began = time.monotonic()
        self.set_deadline()
        try:
            found = check(*args, **how)
        except errors.MoeP2pError as error:
            found = [f"{type(error).__name__}: {error}"]
        self.set_deadline(OTHERS_S)
        every = [f"rank {r}: {text}" for r, one in enumerate(everyones(found)) for text in one]
        self.print(f"{'WRONG' if every else 'ok'}, {time.monotonic() - began:.1f} s")
        for text in every[:8]:
            self.print(f"         {text}")
        self.wrong += [f"{name}: {text}" for text in every]
        self.set_deadline()  # of what is made before the next check, too

    def set_deadline(self, more_s: float = 0.0) -> None:
        """Ends this process, with the place where each thread is, if none follows in time."""
        faulthandler.dump_traceback_later(CHECK_S + self.options.timeout_s + more_s, exit=True)

    # --- calls ---

    def make(self, **fields: Any) -> AllToAll:
        """Makes a communicator with room for every type."""
        config = make_config(self.options, make_job(self.options))
        wide = {"dtype": torch.float32, "combine_dtype": torch.float32}
        return AllToAll(None, replace(config, **wide | fields))

    def call(
        self,
        step: int,
        *,
        kind: str = "bf16",
        gone: bool = False,
        full: bool = False,
        change: Callable[[Tokens, int], Tokens] | None = None,
        partials: Partials | None = None,
        **how: Any,
    ) -> Call:
        """gone: the last rank has no tokens, and no rank has any for its experts.

        change: makes other tokens out of a rank's.
        """
        dtype, quantization = TYPES[kind]
        options = replace(self.options, dtype=dtype, combine_dtype=partials)
        job, (most,) = make_job(options), options.tokens
        counts = changing_counts(0 if full else step, self.size, most)
        if gone:
            counts[self.last] = 0
        lost = job.topology.local_experts(self.last) if gone else torch.empty(0)
        tokens = [self._with_gaps(t, step, lost) for t in job.tokens(step, counts)]
        if change is not None:
            tokens = [change(t, rank) for rank, t in enumerate(tokens)]
        if kind == GIVEN:
            tokens = [_quantized(t) for t in tokens]
        scale_format = {k: v for k, v in quantization.items() if k == "scale_format"}
        layout = {"layout": how.get("layout", "padded")}
        expected = expect(
            job, options, self.rank, tokens, max_tokens=most, **layout, **scale_format
        )
        mine = on_device(tokens[self.rank], options.device)
        given = {name: getattr(mine, name) for name in GIVEN_NAMES}
        y = expected.y.to(options.device)
        given["options"] = DispatchOptions(**quantization, **how)
        return Call(given=given, y=y, expected=expected, job=job, partials=partials)

    @staticmethod
    def _with_gaps(tokens: Tokens, step: int, lost: Tensor) -> Tokens:
        """Removes the expert from some entries."""
        generator = torch.Generator().manual_seed(step)
        none = torch.rand(tokens.topk_idx.shape, generator=generator) < 0.1
        none |= torch.isin(tokens.topk_idx, lost)
        return replace(tokens, topk_idx=tokens.topk_idx.masked_fill(none, -1))

    def rows(self, call: Call, got: Dispatched) -> Wrong:
        finish(self.options.device)
        return compare_rows(got, call.expected.received)

    def sums(self, call: Call, out: Tensor) -> Wrong:
        finish(self.options.device)
        return compare_sums(out.cpu(), call.expected)

    def whole(self, comm: AllToAll, call: Call) -> Wrong:
        got = comm.dispatch(**call.given)
        found = self.rows(call, got)
        out = comm.combine(call.y, got, options=CombineOptions(partials=call.partials))
        return found + self.sums(call, out)

    def each_step(self, check: Callable[[int], Wrong]) -> Wrong:
        steps = range(self.options.checks)
        return [f"step {step}: {text}" for step in steps for text in check(step)]

    def steps(self, comm: AllToAll, **how: Any) -> Wrong:
        """Makes whole calls with tokens at all ranks, at some, at none."""
        return self.each_step(lambda step: self.whole(comm, self.call(step, **how)))


def _quantized(tokens: Tokens) -> Tokens:
    x, scales = reference.quantize(tokens.x)
    return replace(tokens, x=x, scales=scales)
