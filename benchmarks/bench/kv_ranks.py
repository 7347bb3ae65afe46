"""The two processes of `bench --api kv`: rank 0 prefills, rank 1 decodes. Both run the same steps;
after each run they exchange times, and rank 0 keeps them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import Engine, EngineConfig, env, kv
from moe_p2p.bench import kv_systems
from moe_p2p.bench.harness import Common, file, finish, in_turns, option, store_of, use_device
from moe_p2p.bench.kv_compute import CLOCK_ERRORS, LIMIT_S, Captured, Compute, computed
from moe_p2p.bench.options import NICS_OF_A_GPU
from moe_p2p.engine.transfers import Report
from moe_p2p.errors import require
from moe_p2p.kv.stats import KVTransferStats
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.option_types import some_of

LOOPBACK_NICS = 2  # of an engine that is not told otherwise
FREE = 0xEE  # in memory of decode that nothing was written to
GROUP = "kv"
OURS = ("signals", "graph", "by layer", "at the end")  # graph: signals of a replayed CUDA graph
SIGNALLED = ("signals", "graph")


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tokens: int = option(2048, "of the request", cuda=4096)
    layers: int = option(16, "of the model", cuda=94)
    token_bytes: int = option(512, "of a layer: K and V of one head")
    page_kib: tuple[int, ...] = option((1, 4, 16, 64), "of a layer, with commas")
    repeats: int = option(5, "of each figure")
    compute_ms: float = option(
        2.0,
        "of a layer, slept, as a GPU leaves the CPU alone; 0: matmuls of the shapes of a TP4 "
        "rank of Qwen3-235B, on CPUs an eighth as wide (2; 0)",
        cuda=0.0,
    )
    gbps: float = option(0.0, "link model of all NICs of a side, 0: none (0; 400)", cuda=400.0)
    timed: str = option(
        "",
        "over the timed NIC instead: also its latency, and its time for each write",
        choices=list(NICS_OF_A_GPU),
    )
    systems: tuple[str, ...] = option(
        tuple(kv_systems.NAMES), "beside ours", type=some_of(kv_systems.NAMES)
    )
    json: str = file("kv.json", "figures")
    plot: str = file("kv.png", "PNG")

    @property
    def layer_bytes(self) -> int:
        return self.tokens * self.token_bytes


@dataclass(frozen=True)
class Case:
    page_bytes: int
    num_pages: int  # of a layer


@dataclass
class Measured:
    """Seconds, by system; writes: of one request."""

    case: Case
    request_s: dict[str, list[float]] = field(default_factory=dict)
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    spans_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    wrong_bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Sent:
    """What prefill knows of one run: began, its layers, and when all was there."""

    began: float
    ended: float
    ready: list[float] = field(default_factory=list)
    called: list[float] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)


def run(options: Options) -> list[Measured]:
    with launch.process_group() as (rank, _):
        device = use_device(options.device)
        if options.gbps and not options.timed:
            env.model_link(f"gbps={options.gbps / LOOPBACK_NICS:g}")
        compute = Compute(options.tokens, options.compute_ms, device)
        found = []
        for kib in options.page_kib:
            case = Case(kib * 1024, options.layer_bytes // (kib * 1024))
            with opened(options, case, rank, device) as side:
                found.append(_measure(options, side, compute))
        return found


def _config(options: Options) -> EngineConfig | None:
    """None: what the environment says, else the software NIC."""
    if not options.timed:
        return None
    nics = NICS_OF_A_GPU[options.timed]
    settings = f"preset={options.timed}"
    return EngineConfig(transport="timed", transport_settings=settings, nics_per_rank=nics)


@contextlib.contextmanager
def opened(options: Options, case: Case, rank: int, device: torch.device) -> Iterator[Side]:
    """One side of a pair of workers, and of the other systems, connected."""
    with contextlib.ExitStack() as stack:
        made = Engine(_config(options), label=f"rank {rank}", gpu=device.index)
        side = Side(options, case, rank, stack.enter_context(made), device)
        store = store_of(rank, LIMIT_S)
        stack.enter_context(kv.LeaseKeeper(side.worker, kv.TorchLeases(store)))
        side.worker.wait_for("decode" if rank == 0 else "prefill", LIMIT_S)
        if side.signals is not None:
            stack.callback(side.signals.close)
        for name in options.systems:
            reason = kv_systems.why_not(name)
            if reason:
                side.notes.append(reason)
                continue
            system = kv_systems.NAMES[name](side.memory, everyones, rank)
            stack.callback(system.close)
            side.systems.append(system)
        yield side
        dist.barrier()


class Side:
    """rank 0: prefill, 1: decode. Both know the pages of both, and what the source holds."""

    def __init__(
        self, options: Options, case: Case, rank: int, engine: Engine, device: torch.device
    ) -> None:
        self.options, self.case, self.rank, self.engine = options, case, rank, engine
        half = options.token_bytes // 2
        group = kv.KVGroup(
            GROUP,
            tuple(range(options.layers)),
            heads=1,
            k_bytes=half,
            v_bytes=half,
            page_size=case.page_bytes // options.token_bytes,
        )
        layout, pool = kv.KVLayout((group,)), 2 * case.num_pages
        places, (size,) = kv.dense_memory(layout, 0, pool)
        generator = torch.Generator().manual_seed(1)
        shape = (options.layers, pool, case.page_bytes)
        source = torch.randint(0, FREE, shape, generator=generator, dtype=torch.uint8)
        self.pages = [torch.randperm(pool, generator=generator)[: case.num_pages] for _ in range(2)]
        self.expected = torch.full_like(source, FREE)
        self.expected[:, self.pages[1]] = source[:, self.pages[0]]
        self.expected = self.expected.to(device)
        self.memory = source.view(-1).to(device)
        require(size == self.memory.numel(), "a page is not what the layout says")
        cache = kv.KVCache(layout, 0, places.layers, (self.memory,), {GROUP: pool})
        self.worker: Any
        self.signals: kv.KVSignals | None = None
        if rank:
            self.worker = kv.KVReceiver(engine, cache, instance="decode", verify="off")
        else:
            self.worker = _Sender(engine, cache, instance="prefill")
            self.signals = kv.KVSignals(self.worker)
        self.captured: Captured | None = None
        self.systems: list[kv_systems.System] = []
        self.notes: list[str] = []
        self.names = itertools.count()

    # --- prefill ---

    def send(self, how: str, compute: Compute | None) -> Sent:
        """One request of ours; `how` is one of OURS."""
        pages = {GROUP: self.pages[0].int()}
        sending = self.worker.start(
            f"r{next(self.names)}", "decode", pages, total=self.options.tokens
        )
        _until(
            lambda: sending.transfers[0].state is kv.TransferState.OPEN,
            "decode has not opened a request",
        )
        sent = Sent(time.monotonic(), 0.0)
        if how in SIGNALLED:
            self._signalled(compute, sending, sent, in_graph=how == "graph")
        else:
            layers = computed(compute, self.options.layers)
            for layer, (ready, _) in enumerate(list(layers) if how == "at the end" else layers):
                sent.ready.append(ready)
                sent.called.append(time.monotonic())
                sending.layer(layer)
        sending.commit()
        sending.wait(LIMIT_S)
        sent.ended = time.monotonic()
        stats = sending.stats
        assert isinstance(stats, _Reports)
        sent.reports = sorted(stats.reports, key=lambda report: report.first_post_at or 0.0)
        return sent

    def _signalled(
        self, compute: Compute | None, sending: kv.KVSending, sent: Sent, *, in_graph: bool
    ) -> None:
        """The engine's thread sends a layer when it sees the word that `signal` writes."""
        signals, layers = self.signals, self.options.layers
        assert signals is not None
        graph = self._graph(compute) if in_graph and compute is not None else None
        with signals.step([(sending, None)]):
            if graph is not None:
                times = graph.replayed()
            else:
                times = computed(compute, layers, lambda at: signals.signal(at, self.memory))
            for ready, called in times:
                sent.ready.append(ready)
                sent.called.append(called)

    def _graph(self, compute: Compute) -> Captured:
        """The whole pass, signals included, captured once."""
        signals = self.signals
        assert signals is not None
        if self.captured is None:
            self.captured = Captured(
                compute, self.options.layers, lambda at: signals.signal(at, self.memory)
            )
        return self.captured

    def send_by(self, system: kv_systems.System, compute: Compute | None) -> Sent:
        sent = Sent(time.monotonic(), 0.0)
        for _ in computed(compute, self.options.layers):
            pass
        ours, theirs = (self._offsets(each) for each in self.pages)
        system.send(ours, theirs, self.case.page_bytes)
        sent.ended = time.monotonic()
        return sent

    def _offsets(self, pages: Tensor) -> list[int]:
        size, pool = self.case.page_bytes, 2 * self.case.num_pages
        page_bytes = [page * size for page in pages.tolist()]
        return [
            layer * pool * size + at for layer in range(self.options.layers) for at in page_bytes
        ]

    # --- decode ---

    def receive(self) -> list[float]:
        """When each layer, and then all, was seen here."""
        reservation = self.worker.reserve(
            f"r{next(self.names)}",
            "prefill",
            {GROUP: self.pages[1].int()},
            total=self.options.tokens,
        )
        imm, nics = reservation.transfers[0].slot.imm, reservation.transfers[0].pair.theirs.num_nics
        seen = []
        for layer in range(self.options.layers):
            self.engine.wait_imm(imm, nics * (layer + 1), LIMIT_S)
            seen.append(time.monotonic())
        reservation.wait(LIMIT_S)
        return [*seen, time.monotonic()]

    def clear(self) -> None:
        if self.rank:
            self.memory.fill_(FREE)
            finish(self.memory.device)

    def wrong_bytes(self) -> int:
        return int((self.memory != self.expected.view(-1)).sum()) if self.rank else 0


class _Reports(KVTransferStats):
    """Keeps the engine's reports: one of each layer, and one of the footer."""

    def __init__(self, request: str, side: str, queued_at: float) -> None:
        super().__init__(request, side, queued_at)
        self.reports: list[Report] = []

    def add(self, report: Report) -> None:
        super().add(report)
        self.reports.append(report)


class _Sender(kv.KVSender):
    def new_stats(self, request: str) -> KVTransferStats:
        return _Reports(request, self.role, self.clock())


def _measure(options: Options, side: Side, compute: Compute) -> Measured:
    measured = Measured(side.case, notes=side.notes)
    runs: list[tuple[str, Callable[[Compute | None], Sent] | None]] = [("compute", None)]
    runs += [
        (how, functools.partial(side.send, how)) for how in OURS if how != "graph" or compute.on_gpu
    ]
    runs += [(each.name, functools.partial(side.send_by, each)) for each in side.systems]
    for repeat in range(options.repeats + 1):
        # The first is not timed, but compared.
        times = measured if repeat else Measured(side.case, wrong_bytes=measured.wrong_bytes)
        for name, call in in_turns(runs, repeat):
            if call is None:
                _compute_alone(side, compute, times)
                continue
            for given in (None, compute):
                if given is None and name in ("at the end", "graph"):
                    continue  # the same as by layer, or signals
                _one(side, name, call, given, times)
    if CLOCK_ERRORS:
        measured.notes.append(
            f"clocks of GPU and host were matched to {max(CLOCK_ERRORS) * 1e6:.1f} us at worst"
        )
    return measured


def _compute_alone(side: Side, compute: Compute, times: Measured) -> None:
    dist.barrier()
    if side.rank == 0:
        began = time.monotonic()
        # One thread launches all, as an engine does that sends nothing.
        for _ in computed(compute, side.options.layers, lambda _: None):
            pass
        times.ttft_s.setdefault("compute", []).append(time.monotonic() - began)
    dist.barrier()


def _one(
    side: Side,
    name: str,
    call: Callable[[Compute | None], Sent],
    given: Compute | None,
    times: Measured,
) -> None:
    side.clear()
    dist.barrier()
    ours = name in OURS
    mine: Any = None
    if side.rank == 0:
        mine = call(given)
    elif ours:
        mine = side.receive()
    sent, seen = everyones(mine)
    wrong = sum(everyones(side.wrong_bytes()))
    times.wrong_bytes[name] = times.wrong_bytes.get(name, 0) + wrong
    if given is None:
        times.request_s.setdefault(name, []).append(sent.ended - sent.began)
        if ours:
            times.writes[name] = sum(report.writes for report in sent.reports)
        return
    ended = seen[-1] if ours else sent.ended
    times.ttft_s.setdefault(name, []).append(ended - sent.began)
    if ours and name != "at the end":
        _spans(sent, seen, times.spans_s.setdefault(name, {}), signalled=name in SIGNALLED)


def _spans(
    sent: Sent, seen: list[float], spans: dict[str, list[float]], *, signalled: bool
) -> None:
    layers = len(sent.ready)
    require(
        len(sent.reports) == layers + 1, f"{len(sent.reports)} writes are known of {layers} layers"
    )
    rows = zip(sent.ready, sent.called, sent.reports[:layers], seen[:layers], strict=True)
    for ready, called, report, arrived in rows:
        posted = report.first_post_at
        assert posted is not None
        spans.setdefault("signal", []).append(called - ready)
        # The engine may post before `signal` has returned to Python.
        spans.setdefault("post", []).append(posted - (ready if signalled else called))
        spans.setdefault("wire", []).append(report.ended_at - posted)
        spans.setdefault("arrival", []).append(arrived - posted)


def _until(ready: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        require(time.monotonic() < deadline, f"waited {LIMIT_S} s: {why}")
        time.sleep(0.0001)
