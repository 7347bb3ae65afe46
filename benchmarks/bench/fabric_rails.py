"""What each rail reaches by the engine: latency of a small write, bandwidth of pages. Collective.

A rail is a NIC as a rank uses it. Each is measured alone, an engine with this NIC at both ends and
all other ranks idle, then all NICs of all ranks together. Ranks write to the rank of the same place
on the next host; on one host, to the next rank. Memory is the GPU's where ranks have GPUs. All that
arrived is compared with what was sent.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import Engine, EngineConfig, PageRows, env
from moe_p2p.bench.harness import at, finish, use_device
from moe_p2p.engine.config import Wait
from moe_p2p.engine.transfers import Memory, Region
from moe_p2p.machine import topology, transport
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones

SMALL_BYTES = 8
IN_FLIGHT = 4  # requests, each of all pages
PING, PONG, LAST = 1, 2, 3  # immediates
FIRST_PINGS, MOST_PINGS = 10, 2000  # the first ones connect, and say how many fit
NULL_WRITES = 200
MOST_S = 0.5  # of one figure
ALONE, TOGETHER = "alone", "together"


class Given(NamedTuple):
    """page_bytes: sizes of pages; request_bytes: of one request; total_s: of all measurements;
    timeout_s: of a wait: a rail that does not answer costs each rank this."""

    device: str
    page_bytes: list[int]
    request_bytes: int
    total_s: float
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rail, or all of a rank together. None: not measured, `problem` says why."""

    rank: int  # the sender
    host: int
    peer: int
    way: str  # ALONE or TOGETHER
    provider: str = ""
    nics: list[str]
    rate_gbps: float = 0.0  # of the NICs, as sysfs says; 0: not known
    memory: str
    latency_us: float | None = None  # one way: half of a ping and its answer, median
    latency_p99_us: float | None = None
    calls_us: float | None = None  # of the latency: what a write costs here without a NIC
    gbytes_per_s: dict[str, float] = field(default_factory=dict)  # by page_bytes
    problem: str = ""


class Lane:
    """An engine at this rank, and its way to the peer and back to the rank that writes to here."""

    def __init__(self, config: EngineConfig, given: Given, row: Row) -> None:
        rank, size = row.rank, dist.get_world_size()
        self._given, self._timeout_s, self.peer = given, given.timeout_s, row.peer
        self.source_rank = (2 * rank - row.peer) % size
        device = torch.device(given.device)
        gpu = launch.device_index() if given.device == "cuda" else None
        share = env.local_rank(), env.local_world_size()
        self.engine = Engine(config, label=f"rail of rank {rank}", gpu=gpu, share=share)
        self.sent = pattern(rank, given.request_bytes).to(device)
        self.inbox = torch.zeros_like(self.sent)
        finish(device)
        self._source: Memory = self.engine.register(self.sent)
        self.descriptor = self.engine.register(self.inbox).descriptor
        self._regions: dict[int, Region] = {}
        self._counted = dict.fromkeys((PING, PONG, LAST), 0)

    def connect(self, descriptors: list[bytes]) -> None:
        for rank in {self.peer, self.source_rank}:
            self._regions[rank] = self.engine.resolve(descriptors[rank])

    def pings(self, count: int) -> list[float]:
        """Microseconds one way of so many, to the peer, which calls `answer`."""
        spans = list[float]()
        for _ in range(count):
            began = time.perf_counter()
            self._small(self.peer, PING)
            self._wait(PONG)
            spans.append((time.perf_counter() - began) / 2 * 1e6)
        return spans

    def answer(self, count: int) -> None:
        """Answers so many pings of the rank that writes to here."""
        for _ in range(count):
            self._wait(PING)
            self._small(self.source_rank, PONG)

    def _small(self, rank: int, imm: int) -> None:
        region = self._regions[rank]
        self.engine.write(self._source, region, nbytes=SMALL_BYTES, imm=imm).wait(self._timeout_s)

    def _wait(self, imm: int) -> None:
        self._counted[imm] += self.engine.num_nics
        self.engine.wait_imm(imm, self._counted[imm], self._timeout_s)

    def stream(self, page_bytes: int, seconds: float) -> float:
        """GB/s to the peer, which calls `check_arrived`; at least IN_FLIGHT requests, but of one
        that takes longer than a figure may, one."""
        pages, there = page_order(self._given.request_bytes // page_bytes)
        under_way: deque[Any] = deque()

        def begin(imm: int | None = None) -> None:
            how: Any = {
                "pages": pages,
                "region_pages": there,
                "rows": PageRows(page_bytes=page_bytes),
            }
            region = self._regions[self.peer]
            under_way.append(
                self.engine.write_pages(self._source, region, **how, imm=imm, imm_per_page=False)
            )

        connects = self.engine.write(self._source, self._regions[self.peer], nbytes=SMALL_BYTES)
        connects.wait(self._timeout_s)
        before = time.perf_counter()
        begin()
        under_way.popleft().wait(self._timeout_s)
        began = time.perf_counter()
        in_flight = IN_FLIGHT if began - before < seconds else 1
        done, ends = 0, began + seconds
        while time.perf_counter() < ends or done < in_flight:
            while len(under_way) < in_flight:
                begin()
            under_way.popleft().wait(self._timeout_s)
            done += 1
        took = time.perf_counter() - began
        while under_way:
            under_way.popleft().wait(self._timeout_s)
        begin(LAST)
        under_way.popleft().wait(self._timeout_s)
        return done * self._given.request_bytes / took / 1e9

    def check_arrived(self, page_bytes: int) -> None:
        """Waits for the last request of a stream to here, and compares its bytes."""
        self._wait(LAST)
        pages, there = page_order(self._given.request_bytes // page_bytes)
        finish(self.inbox.device)
        got = self.inbox.cpu().view(-1, page_bytes)[there]
        want = pattern(self.source_rank, self._given.request_bytes).view(-1, page_bytes)[pages]
        right = torch.equal(got, want)
        self.inbox.zero_()
        finish(self.inbox.device)
        if not right:
            raise RuntimeError(f"other bytes arrived than rank {self.source_rank} wrote")


def pattern(rank: int, nbytes: int) -> Tensor:
    """[nbytes] uint8 that a rank writes."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def page_order(count: int) -> tuple[Tensor, Tensor]:
    """Pages here and there, in an order in which the engine merges none."""
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(count, generator=generator)
    return order, order.flip(0)


def measure(given: Given) -> list[dict[str, Any]]:
    """Rows of all ranks, on rank 0; elsewhere none."""
    with launch.process_group() as (rank, size):
        use_device(given.device)
        local, calls_us = env.local_world_size(), _calls_us(given.timeout_s)
        step = local if size > local else 1
        rows, lanes = list[Row](), list(_lanes(given))
        figures = size * (len(lanes) - 1) * (1 + len(given.page_bytes))
        seconds = min(MOST_S, given.total_s / figures)
        for way, config in lanes:
            names = transport.named_in(config.transport, config.transport_settings)
            row = Row(
                rank=rank,
                host=rank // local,
                peer=(rank + step) % size,
                way=way,
                nics=names,
                rate_gbps=_rate(names),
                memory=given.device,
                calls_us=calls_us if way == ALONE else None,
            )
            rows.append(_measured(row, config, given, seconds))
        found = everyones([asdict(row) for row in rows])
        return [row for of_rank in found for row in of_rank] if rank == 0 else []


def _lanes(given: Given) -> Iterator[tuple[str, EngineConfig]]:
    """Each NIC of this rank by itself, as many as the rank with the most has; then all of them."""
    provider, local = transport.choose("auto").provider, env.local_world_size()
    fields: dict[str, Any] = {
        "transport": provider,
        "wait": _wait(),
        "timeout_s": given.timeout_s,
    }
    pci = transport.pci_of(launch.device_index()) if given.device == "cuda" else ""
    wish = transport.Wish(pci=pci, share=(env.local_rank(), local))
    opening = transport.open_with(provider, EngineConfig(**fields).provider_settings, wish)
    known = transport.PROVIDERS.get(provider)
    key = known.names_key if known else "devices"
    names = list(dict.fromkeys(transport.named_in(provider, opening.settings))) or [""]
    rest = transport.without(env.transport_settings(), key)
    for number in range(max(everyones(len(names)))):
        name = names[number % len(names)]
        settings = ",".join(filter(None, [rest, f"{key}={name}" if name else ""]))
        yield ALONE, EngineConfig(**fields, nics_per_rank=1, transport_settings=settings)
    yield TOGETHER, EngineConfig(**fields, transport_settings=opening.settings)


def _wait() -> Wait:
    """How engines wait. Where cores are few, two ranks that yield to each other keep the NIC's own
    work from running: a ping over soft-RoCE took 41 to 64 ms on two emulated cores, asleep 4 to 7
    (tests/rdma/fabric_check.py).
    """
    enough = len(os.sched_getaffinity(0)) >= 4 * env.local_world_size()
    return "spin" if enough else "sleep"


def _calls_us(timeout_s: float) -> float:
    """What a write costs from Python, to its completion, where no NIC does anything."""
    config = EngineConfig(
        transport="null",
        nics_per_rank=1,
        transport_settings="max_in_flight=64",  # not the environment's, which are of the NICs
        wait=_wait(),
    )
    with Engine(config) as engine:
        memory = engine.register(torch.zeros(SMALL_BYTES, dtype=torch.uint8, device="cpu"))
        region, spans = engine.resolve(memory.descriptor), list[float]()
        for _ in range(NULL_WRITES):
            began = time.perf_counter()
            engine.write(memory, region, imm=PING).wait(timeout_s)
            spans.append(time.perf_counter() - began)
    return round(statistics.median(spans) * 1e6, 2)


def _rate(names: list[str]) -> float:
    """Gbit/s of these NICs together; 0: sysfs does not know one of them."""
    known = {nic.name: nic.rate_gbps for nic in topology.read_host().nics}
    rates = [known.get(name.removesuffix("-rdm"), 0.0) for name in names]
    return sum(rates) if all(rates) else 0.0


class _Together:
    """Calls of all ranks, of which any may fail: then all have the reason. Collective."""

    problem = ""

    def well(self, call: Callable[..., object], *args: object) -> bool:
        mine = ""
        try:
            call(*args)
        except RuntimeError as error:  # those of the package are
            mine = str(error)
        problems: list[str] = everyones(mine)
        if any(problems):
            first = next(rank for rank, text in enumerate(problems) if text)
            self.problem = mine or f"rank {first}: {problems[first]}"
        return not any(problems)


def _measured(row: Row, config: EngineConfig, given: Given, seconds: float) -> Row:
    """The row of this rank; any rank's failure ends what is left of this lane, for all."""
    ranks, lanes = _Together(), list[Lane]()
    found: dict[str, Any] = {}
    if ranks.well(lambda: lanes.append(Lane(config, given, row))):
        found["provider"] = lanes[0].engine.provider
        descriptors: list[bytes] = everyones(lanes[0].descriptor)
        if ranks.well(lanes[0].connect, descriptors):
            measure_lane = _alone if row.way == ALONE else _all
            found |= measure_lane(lanes[0], given.page_bytes, seconds, ranks)
    dist.barrier()  # no rank closes what another still uses
    for lane in lanes:
        lane.engine.close()
    return replace(row, **found, problem=ranks.problem)


def _alone(lane: Lane, pages: Sequence[int], seconds: float, ranks: _Together) -> dict[str, Any]:
    """One rank after the other writes."""
    rank, found, spans = dist.get_rank(), dict[str, Any](), list[float]()
    rates = dict[str, float]()

    def ping(turn: int, count: int) -> None:
        if rank == turn:
            spans[:] = lane.pings(count)
        if lane.source_rank == turn:
            lane.answer(count)

    for turn in range(dist.get_world_size()):
        if not ranks.well(ping, turn, FIRST_PINGS):
            break
        one_s = statistics.median(spans) * 2e-6 if spans else 0.0
        count = everyones(min(MOST_PINGS, 10 + int(seconds / one_s)) if one_s else 0)[turn]
        if not ranks.well(ping, turn, count):
            break
        if not all(ranks.well(_stream, lane, page, seconds, rates, turn) for page in pages):
            break
    if spans:
        found = {
            "latency_us": round(statistics.median(spans), 2),
            "latency_p99_us": round(at(spans, 99), 2),
        }
    return found | {"gbytes_per_s": rates}


def _all(lane: Lane, pages: Sequence[int], seconds: float, ranks: _Together) -> dict[str, Any]:
    """All ranks write at once, and are written to."""
    rates = dict[str, float]()
    for page_bytes in pages:
        if not ranks.well(_stream, lane, page_bytes, seconds, rates):
            break
    return {"gbytes_per_s": rates}


def _stream(
    lane: Lane, page_bytes: int, seconds: float, rates: dict[str, float], turn: int | None = None
) -> None:
    """turn: the rank that writes; None: all do."""
    if turn in (None, dist.get_rank()):
        rates[str(page_bytes)] = round(lane.stream(page_bytes, seconds), 3)
    if turn in (None, lane.source_rank):
        lane.check_arrived(page_bytes)
