"""Timed calls, of the package and of others, on tensors that stay where they are.

Shapes: T tokens, K top-k, H hidden size, R rows at this rank's experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_p2p import Dispatched, DispatchOptions
from moe_p2p.bench.gpu_layer import LayerParts
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.bench.report import HALVES
from moe_p2p.bench.systems import MoeP2p, System
from moe_p2p.layer.products import Products
from moe_p2p.moe.reference import Layout, Tokens

ROOM = 128  # rows by which a layer's room grows
PADDED_UP_TO = 512  # most tokens of a call for which layout "auto" is padded, for decoding


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    gemm: str
    layout: str
    run: Callable[[], Tensor]  # dispatch, experts and combine
    out: Callable[[], Tensor]  # of the last run, or of the graph that was captured last
    experts: Callable[[], Tensor] | None = None  # alone, on rows of an earlier dispatch
    overlap_sms: int = 0  # that combine holds beside the last product; 0: it follows the product

    @property
    def name(self) -> str:
        return f"{self.gemm}, overlap on {self.overlap_sms}" if self.overlap_sms else self.gemm


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
    layers: Sequence[Layer] = ()
    # dispatch, the experts that all layers are compared with, and combine
    reference: Callable[[], Tensor] | None = None
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

    def __init__(self, system: MoeP2p, options: Options, tokens: Tokens) -> None:
        self.system, self.tokens = system, tokens
        self.comm, self.layout = system.all_to_all, layout_of(options, tokens.x.shape[0])
        self.given = system.given(tokens, layout=self.layout)
        # As exchange and combine do on CPUs.
        self.reuses = system.reuses and self.layout == "grouped"
        self.first = self.dispatch()
        finish(self.comm.config.device)
        self.y = answer_like(self.first.x, options.x_dtype)
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

    def last(self, what: str) -> dict[str, Tensor]:
        rows, sums = self.halves.last() if what in HALVES else (self.received, self.out)
        found = {"out": sums, "answer": self.y.reshape(-1, self.y.shape[-1])[0], "x": rows.x}
        if rows.scales is not None:
            found["scales"] = rows.scales
        return found | {"row_weights": rows.row_weights, "counts": rows.counts}


class _Layer:
    """Dispatch, products of one library, combine. overlap_sms: see Layer.

    Above PADDED_UP_TO tokens a GPU's rows have the room that this routing needs, as callers make it
    who exchange counts first; below it, and on CPUs, the room of the worst routing.
    """

    def __init__(
        self, package: _Package, options: Options, made: Products, mean: int, overlap_sms: int
    ) -> None:
        self._package, self._made, self._mean = package, made, mean
        self._overlap_sms = overlap_sms
        self.layout: Layout = "padded" if overlap_sms else made.layout or package.layout
        given, counts = dict(package.given), package.first.counts
        del given["layout"]
        kind = DispatchOptions(
            layout=self.layout,
            quantize=given.pop("quantize"),
            column_scales=made.column_scales and options.quantize,
        )
        self._given = given | {"options": kind}
        if options.device == "cuda" and options.tokens[0] > PADDED_UP_TO:
            rows = int(counts.max() if self.layout == "padded" else counts.sum())
            self._given["capacity"] = -(-max(rows, 1) // ROOM) * ROOM
        self.out: Tensor = package.out
        self._side: Any = None
        if overlap_sms:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._first = package.comm.dispatch(**self._given)
        finish(package.comm.config.device)
        self._load()

    def _load(self) -> None:
        """Loads kernels ahead of other calls: no kernel may wait for one that is not loaded."""
        got, made = self._first, self._made
        if not self._overlap_sms:
            self._package.comm.combine(self.experts(), got, **self._package.system.combining)
        else:
            hidden = made.hidden(got.x, got.scales, got.counts, self._mean)
            y, ready = made.unready(hidden, self._overlap_sms)
            made.down_into(y, hidden, got.counts, self._mean, ready)
            finish("cuda")
            combining = self._package.system.combining
            pending = self._package.comm.combine_send(y, got, ready=ready, **combining)
            self._package.comm.combine_recv(pending)
        finish(self._package.comm.config.device)

    def experts(self) -> Tensor:
        """Alone, on the rows of the first dispatch."""
        got, made = self._first, self._made
        hidden = made.hidden(got.x, got.scales, got.counts, self._mean)
        return made.down(hidden, got.counts, self._mean)

    def run(self) -> Tensor:
        package, made = self._package, self._made
        got = package.comm.dispatch(**self._given)
        hidden = made.hidden(got.x, got.scales, got.counts, self._mean)
        if self._side is None:
            y = made.down(hidden, got.counts, self._mean)
            self.out = package.comm.combine(y, got, **package.system.combining)
            return self.out
        y, ready = made.unready(hidden, self._overlap_sms)
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        # First: a product that has taken all multiprocessors would leave it none.
        pending = package.comm.combine_send(y, got, ready=ready, **package.system.combining)
        with torch.cuda.stream(self._side):
            made.down_into(y, hidden, got.counts, self._mean, ready)
        main.wait_stream(self._side)
        self.out = package.comm.combine_recv(pending)
        return self.out


def _layers(package: _Package, options: Options, parts: LayerParts) -> Iterator[Layer]:
    """Yields all products, each without overlap and with each of the options' where it can."""
    tokens = package.tokens.x.shape[0]
    mean = parts.rows(tokens)
    whole = package.system.num_steps <= package.comm.config.steps_in_flight
    for name, made in parts.products.items():
        # Where padded rows have the worst room, products of all of them would be timed.
        roomy = made.layout == "grouped" and tokens <= PADDED_UP_TO
        for sms in (0, *(options.overlap if made.overlaps and whole and not roomy else ())):
            one = _Layer(package, options, made, mean, sms)
            alone = None if sms else one.experts
            yield Layer(
                gemm=name,
                layout=one.layout,
                run=one.run,
                out=functools.partial(getattr, one, "out"),
                experts=alone,
                overlap_sms=sms,
            )


def package_calls(
    system: MoeP2p, options: Options, tokens: Tokens, *, num_sms: int, layer: LayerParts | None
) -> Calls:
    """`tokens` with scales are quantized already."""
    made, config = _Package(system, options, tokens), system.all_to_all.config
    layers: list[Layer] = []
    reference: Callable[[], Tensor] | None = None
    if layer is not None:
        layers += _layers(made, options, layer)
        reference = _Layer(made, options, layer.reference, 1, 0).run
    halved = options.halves and system.num_steps <= config.steps_in_flight
    return Calls(
        system=system.name,
        dispatch=made.dispatch,
        combine=made.combine,
        capturable=True,
        layers=layers,
        reference=reference,
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
    system: System, options: Options, tokens: Tokens, *, layer: LayerParts | None
) -> Calls:
    y = answer_like(system.dispatch(tokens).x, options.x_dtype)
    out = system.combine(y)

    def combine() -> None:
        nonlocal out
        out = system.combine(y)

    mean = 0 if layer is None else layer.rows(tokens.x.shape[0])

    def run(made: Products) -> Tensor:
        nonlocal out
        got = system.dispatch(tokens)
        hidden = made.hidden(got.x, got.scales, got.counts, mean)
        out = system.combine(made.down(hidden, got.counts, mean))
        return out.clone()  # later calls reuse the buffers

    layers = [
        Layer(
            gemm=name, layout="grouped", run=functools.partial(run, made), out=lambda: out.clone()
        )
        for name, made in (layer.products.items() if layer is not None else ())
        if made.layout in (None, "grouped")
    ]
    return Calls(
        system=system.name,
        dispatch=lambda: system.dispatch(tokens),
        combine=combine,
        capturable=False,
        layers=layers,
        last=lambda _: {"out": out.clone(), "answer": y[0]},
        waited_s=lambda: system.waited_s,
    )
