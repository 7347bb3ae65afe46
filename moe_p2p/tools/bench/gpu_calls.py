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
from moe_p2p.moe.reference import Layout, Tokens
from moe_p2p.tools.bench.gpu_layer import Experts
from moe_p2p.tools.bench.options import Options
from moe_p2p.tools.bench.report import HALVES
from moe_p2p.tools.bench.systems import MoeP2p, System, finish

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


def package_calls(
    system: MoeP2p, options: Options, tokens: Tokens, *, num_sms: int, experts: Experts | None
) -> Calls:
    """`tokens` with scales are quantized already."""
    comm, layout = system.all_to_all, layout_of(options, tokens.x.shape[0])
    given = system.given(tokens, layout=layout)
    reuses = system.reuses and layout == "grouped"  # as exchange and combine do on CPUs
    received: Dispatched | None = None
    out: Tensor | None = None

    def dispatch() -> Dispatched:
        nonlocal received
        received = system.exchange(tokens) if reuses else comm.dispatch(**given)
        return received

    first = dispatch()
    finish(comm.config.device)
    y = answer_like(first.x, options.x_dtype)
    if experts is not None:
        experts(first.x, first.scales, first.counts)  # loads its kernels ahead of later calls

    def combine() -> Tensor:
        nonlocal out
        assert received is not None
        out = system.combine(y) if reuses else comm.combine(y, received, **system.combining)
        return out

    def layer() -> Tensor:
        nonlocal out
        assert experts is not None
        got = dispatch()
        out = comm.combine(experts(got.x, got.scales, got.counts), got, **system.combining)
        return out

    def alone_experts() -> Tensor:
        assert experts is not None
        return experts(first.x, first.scales, first.counts)

    combine()
    finish(comm.config.device)
    halves = Halves(system, y, given)

    def last(what: str) -> dict[str, Tensor]:
        rows, sums = halves.last() if what in HALVES else (received, out)
        assert rows is not None
        assert sums is not None
        found = {"out": sums, "answer": y.reshape(-1, y.shape[-1])[0], "x": rows.x}
        if rows.scales is not None:
            found["scales"] = rows.scales
        return found | {"row_weights": rows.row_weights, "counts": rows.counts}

    halved = options.halves and system.num_steps <= comm.config.steps_in_flight
    return Calls(
        system=system.name,
        dispatch=dispatch,
        combine=combine,
        capturable=True,
        layer=None if experts is None else layer,
        experts=None if experts is None else alone_experts,
        halves=halves.by_name() if halved else {},
        chunk_tokens=comm.config.step_tokens,
        num_steps=system.num_steps,
        num_sms=num_sms,
        layout=layout,
        last=last,
        eager=lambda: comm.dispatch(**alone(given)),
        broken=lambda: comm.broken,
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
