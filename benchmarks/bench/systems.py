"""Timed systems. A system does dispatch and combine; buffers are made once and reused by both.

Shapes: T tokens, H hidden size, K top-k, R rows at this rank's experts, E_local its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, CombineOptions, Dispatched
from moe_p2p.bench.cases import Job
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.moe.reference import Layout, Tokens


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows grouped by expert, one expert after the other."""

    x: Tensor  # [R or more, H]
    scales: Tensor | None  # [R or more, ceil(H / 128)]
    row_weights: Tensor  # [R or more]
    counts: Tensor  # [E_local]


class System(Protocol):
    name: str
    num_steps: int  # steps of a call
    waited_s: float  # seconds that the host has waited for the GPU in calls so far

    def dispatch(self, tokens: Tokens) -> Rows: ...

    def combine(self, y: Tensor) -> Tensor:
        """y [R or more, H], in the rows of the last dispatch -> [T, H]."""
        ...

    def close(self) -> None: ...


def transport_of(options: Options) -> str:
    if options.transport == "auto" and options.transport_settings:
        return "loopback"  # they are its own
    return options.transport


def make_config(
    options: Options, job: Job, *, chunk_tokens: int | None = None, num_sms: int | None = None
) -> AllToAllConfig:
    return AllToAllConfig(
        num_experts=job.topology.num_experts,
        hidden_dim=job.hidden_dim,
        topk=job.topk,
        max_tokens=max(options.tokens),
        chunk_tokens=chunk_tokens,
        dtype=options.wire_dtype,
        combine_dtype=options.x_dtype,
        part_bytes=options.part_bytes,
        ranks_per_node=options.ranks_per_node,
        transport=transport_of(options),
        nics_per_rank=options.nics or None,
        transport_settings=options.transport_settings,
        timeout_s=options.timeout_s,
        wait=options.wait,
        device=options.device,
        num_sms=num_sms,
    )


class Sent(NamedTuple):
    """What NICs have been given between nodes."""

    nbytes: int
    writes: int  # work requests; the providers know no fence among them
    immediates: int


class MoeP2p:
    """The package. Whole calls on GPUs; on CPUs halves, which reuse buffers, where they can.

    dispatch and combine wait for their results, in grouped rows; gpu_calls makes the calls to be
    timed. `given` is the one place that decides how AllToAll is called.
    """

    name = "moe_p2p"
    waited_s = 0.0  # timed calls do not wait

    def __init__(
        self,
        options: Options,
        job: Job,
        *,
        chunk_tokens: int | None = None,
        num_sms: int | None = None,
        group: Any = None,
    ) -> None:
        """group: of AllToAll; None: the default group."""
        self._quantize = options.quantize
        partials = CombineOptions(partials=options.combine_dtype)
        self.combining: dict[str, Any] = {"options": partials}  # of combine
        made = make_config(options, job, chunk_tokens=chunk_tokens, num_sms=num_sms)
        self.all_to_all = AllToAll(group, made)
        config = self.all_to_all.config
        self.num_steps = -(-max(options.tokens) // config.step_tokens)
        self.reuses = not config.on_gpu and self.num_steps <= config.steps_in_flight
        self.received: Dispatched | None = None
        self._out: dict[int, Tensor] = {}

    def given(self, tokens: Tokens, *, layout: Layout = "grouped") -> dict[str, Any]:
        """Returns arguments of AllToAll.dispatch and dispatch_send. With scales: x is quantized."""
        return {
            "x": tokens.x,
            "topk_idx": tokens.topk_idx,
            "topk_weights": tokens.topk_weights,
            "scales": tokens.scales,
            "quantize": self._quantize and tokens.scales is None,
            "layout": layout,
        }

    def exchange(self, tokens: Tokens) -> Dispatched:
        """Dispatches without waiting for the result."""
        given = self.given(tokens)
        if self.reuses:
            pending = self.all_to_all.dispatch_send(**given)
            self.received = self.all_to_all.dispatch_recv(pending, out=self.received)
        else:
            self.received = self.all_to_all.dispatch(**given)
        return self.received

    def dispatch(self, tokens: Tokens) -> Rows:
        got = self.exchange(tokens)
        finish(self.all_to_all.config.device)
        return Rows(x=got.x, scales=got.scales, row_weights=got.row_weights, counts=got.counts)

    def combine(self, y: Tensor) -> Tensor:
        assert self.received is not None, "combine follows dispatch"
        if not self.reuses:
            out: Tensor = self.all_to_all.combine(y, self.received, **self.combining)
            finish(self.all_to_all.config.device)
            return out
        pending = self.all_to_all.combine_send(y, self.received, **self.combining)
        num_tokens = self.received.topk_idx.shape[0]
        out = self.all_to_all.combine_recv(pending, out=self._out.get(num_tokens))
        self._out[num_tokens] = out
        return out

    def sent(self) -> Sent:
        nics = self.all_to_all.counters()
        return Sent(
            sum(nic["bytes_written"] for nic in nics),
            sum(nic["writes"] for nic in nics),
            sum(nic["immediates_sent"] for nic in nics),
        )

    def close(self) -> None:
        self.all_to_all.close()


def experts_of_rows(job: Job, rank: int, counts: Tensor) -> Tensor:
    """Returns the global expert of each row that holds a token, [R]."""
    experts = job.topology.local_experts(rank).to(counts.device)
    return experts.repeat_interleave(counts.to(torch.int64))
