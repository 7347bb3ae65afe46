"""Timed calls, of the package and of others, on tensors that stay where they are.

Shapes: T tokens, K top-k, H hidden size, R rows at this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_p2p import Dispatched, DispatchOptions
from moe_p2p.bench.gpu_layer import Experts
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.bench.report import HALVES
from moe_p2p.bench.systems import MoeP2p, System
from moe_p2p.moe.reference import Layout, Tokens

PADDED_UP_TO = 512  # most tokens of a call for which layout "auto" is padded, for decoding


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """combine follows dispatch; both may be repeated, in CUDA graphs where capturable."""

    system: str
    dispatch: Callable[[], object]
    combine: Callable[[], object]
    capturable: bool
    chunk_tokens: int = 0  # 0: it has no chunks
    num_steps: int = 1
    num_sms: int = 0  # its limit; 0: not limited
    layout: str = "grouped"
    partials: str | None = None  # of its sums, where they are not those of the options
    layer: Callable[[], Tensor] | None = None  # dispatch, experts and combine
    experts: Callable[[], Tensor] | None = None  # alone, on rows of an earlier dispatch
    halves: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # report.HALVES
    # (name of a way) -> out, answer and rows of its last run; None: not kept.
    last: Callable[[str], dict[str, Tensor]] | None = None
    eager: Callable[[], Dispatched] | None = None  # a dispatch of the same inputs, by itself
    broken: Callable[[], str] = str
    # Seconds that the host has waited for the GPU in calls so far; None: not known.
    waited_s: Callable[[], float] | None = None

    def pair(self) -> None:
        self.dispatch()
        self.combine()


def on_device(tokens: Tokens, device: str) -> Tokens:
    names = ("x", "topk_idx", "topk_weights", "scales")
    parts: dict[str, Any] = {name: getattr(tokens, name) for name in names}
    parts = {name: part.to(device) for name, part in parts.items() if part is not None}
    return replace(tokens, extras=tuple(extra.to(device) for extra in tokens.extras), **parts)


def layout_of(options: Options, tokens: int) -> Layout:
    if options.layout != "auto":
        return options.layout
    return "padded" if tokens <= PADDED_UP_TO else "grouped"


def answer_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the answer of timed experts: not zeros, which links and memory favour."""
    row = torch.randn(x.shape[-1], device=x.device).to(dtype)
    return row.expand(x.shape).contiguous()


class Halves:
    """The halves of a pair, called in this order."""

    def __init__(self, system: MoeP2p, y: Tensor, given: dict[str, Any]) -> None:
        self._comm, self._y, self._given = system.all_to_all, y, given
        self._combining = system.combining

    def dispatch_send(self) -> None:
        self._sent = self._comm.dispatch_send(**self._given)

    def dispatch_recv(self) -> None:
        self._received = self._comm.dispatch_recv(self._sent)

    def combine_send(self) -> None:
        self._answered = self._comm.combine_send(self._y, self._received, **self._combining)

    def combine_recv(self) -> None:
        self._out = self._comm.combine_recv(self._answered)

    def last(self) -> tuple[Dispatched, Tensor]:
        return self._received, self._out

    def by_name(self) -> dict[str, Callable[[], object]]:
        steps = (self.dispatch_send, self.dispatch_recv, self.combine_send, self.combine_recv)
        return dict(zip(HALVES, steps, strict=True))


def alone(given: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of a dispatch without a combine, made from another dispatch's."""
    rest = {name: value for name, value in given.items() if name not in ("layout", "quantize")}
    options = DispatchOptions(
        layout=given["layout"], quantize=given.get("quantize", False), solo=True
    )
    return rest | {"options": options}


class _Package:
    """Calls of the package on one rank's tokens, which may be quantized already."""

    def __init__(
        self, system: MoeP2p, options: Options, tokens: Tokens, experts: Experts | None
    ) -> None:
        self.system, self.tokens, self.experts = system, tokens, experts
        self.comm, self.layout = system.all_to_all, layout_of(options, tokens.x.shape[0])
        self.given = system.given(tokens, layout=self.layout)
        # As exchange and combine do on CPUs.
        self.reuses = system.reuses and self.layout == "grouped"
        self.first = self.dispatch()
        finish(self.comm.config.device)
        self.y = answer_like(self.first.x, options.x_dtype)
        if experts is not None:
            self.alone_experts()  # loads kernels ahead of later calls
        self.combine()
        finish(self.comm.config.device)
        self.halves = Halves(system, self.y, self.given)

    def dispatch(self) -> Dispatched:
        self.received = (
            self.system.exchange(self.tokens) if self.reuses else self.comm.dispatch(**self.given)
        )
        return self.received

    def combine(self) -> Tensor:
        if self.reuses:
            self.out = self.system.combine(self.y)
        else:
            self.out = self.comm.combine(self.y, self.received, **self.system.combining)
        return self.out

    def layer(self) -> Tensor:
        assert self.experts is not None
        got = self.dispatch()
        y = self.experts(got.x, got.scales, got.counts)
        self.out = self.comm.combine(y, got, **self.system.combining)
        return self.out

    def alone_experts(self) -> Tensor:
        assert self.experts is not None
        return self.experts(self.first.x, self.first.scales, self.first.counts)

    def last(self, what: str) -> dict[str, Tensor]:
        rows, sums = self.halves.last() if what in HALVES else (self.received, self.out)
        found = {"out": sums, "answer": self.y.reshape(-1, self.y.shape[-1])[0], "x": rows.x}
        if rows.scales is not None:
            found["scales"] = rows.scales
        return found | {"row_weights": rows.row_weights, "counts": rows.counts}


def package_calls(
    system: MoeP2p, options: Options, tokens: Tokens, *, num_sms: int, experts: Experts | None
) -> Calls:
    """`tokens` with scales are quantized already."""
    made, config = _Package(system, options, tokens, experts), system.all_to_all.config
    halved = options.halves and system.num_steps <= config.steps_in_flight
    return Calls(
        system=system.name,
        dispatch=made.dispatch,
        combine=made.combine,
        capturable=True,
        layer=None if experts is None else made.layer,
        experts=None if experts is None else made.alone_experts,
        halves=made.halves.by_name() if halved else {},
        chunk_tokens=config.step_tokens,
        num_steps=system.num_steps,
        num_sms=num_sms,
        layout=made.layout,
        last=made.last,
        eager=lambda: made.comm.dispatch(**alone(made.given)),
        broken=lambda: made.comm.broken,
        waited_s=lambda: system.waited_s,
    )


def system_calls(
    system: System, options: Options, tokens: Tokens, *, experts: Experts | None
) -> Calls:
    y = answer_like(system.dispatch(tokens).x, options.x_dtype)
    out = system.combine(y)

    def combine() -> None:
        nonlocal out
        out = system.combine(y)

    def layer() -> Tensor:
        nonlocal out
        assert experts is not None
        got = system.dispatch(tokens)
        out = system.combine(experts(got.x, got.scales, got.counts))
        return out.clone()  # later calls reuse the buffers

    return Calls(
        system=system.name,
        dispatch=lambda: system.dispatch(tokens),
        combine=combine,
        capturable=False,
        layer=None if experts is None else layer,
        last=lambda _: {"out": out.clone(), "answer": y[0]},
        waited_s=lambda: system.waited_s,
    )
