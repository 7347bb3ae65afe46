"""Writes/s and bytes/s of the NICs of one rank: rank 0 writes rows to the last rank, by size.

PageRows lie at random places on both sides, as pages of a KV cache do, so none travel as one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine.transfers import Memory, Region
from moe_p2p.machine import tuned
from moe_p2p.machine.tuned import Rates
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.tune.world import TuneOptions, World

SMALL, LARGE = (64, 256, 1024), (64 << 10, 256 << 10, 1 << 20)  # bytes of a row
MIDDLE = (4096, 16384)
MEMORY_BYTES = 64 << 20
MOST_ROWS = 4096
REPEATS = 7


@dataclass(frozen=True)
class Lane:
    """Rank 0's end."""

    engine: Engine
    memory: Memory
    region: Region

    def seconds(self, row_bytes: int, source: torch.Tensor, target: torch.Tensor) -> float:
        began = time.perf_counter()
        request = self.engine.write_pages(
            self.memory,
            self.region,
            # They never follow each other.
            rows=PageRows(page_bytes=row_bytes, stride=2 * row_bytes, region_stride=2 * row_bytes),
            pages=source,
            region_pages=target,
        )
        request.wait()
        return time.perf_counter() - began


def measure(world: World) -> Rates:
    """Returns the same on all ranks."""
    options, last = world.options, world.options.processes - 1
    here = world.rank in (0, last)
    ends = [_engine(options, world.rank) for _ in range(2 if last == 0 else 1)] if here else []
    try:
        device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda")
        memory = [
            end.register(torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=device))
            for end in ends
        ]
        if device.type == "cuda":
            torch.cuda.synchronize()
        mine = memory[-1].descriptor if world.rank == last else b""
        descriptor = everyones(mine)[last]
        found = None
        if world.rank == 0:
            engine = ends[0]
            found = _rates(world, Lane(engine, memory[0], engine.resolve(descriptor)))
        rates: Rates | None = everyones(found)[0]
        assert rates is not None
        dist.barrier()  # nobody closes what another one still writes to
        return rates
    finally:
        for end in ends:
            end.close()


def _engine(options: TuneOptions, rank: int) -> Engine:
    on_gpu = options.device == "cuda"
    local = options.processes // options.hosts
    return Engine(
        EngineConfig(timeout_s=options.timeout_s, wait="spin" if on_gpu else "sleep"),
        label=f"tune, rank {rank}",
        gpu=torch.cuda.current_device() if on_gpu else None,
        share=(rank % local, local),
    )


def _rates(world: World, lane: Lane) -> Rates:
    sizes = (*SMALL, *MIDDLE, *LARGE)
    spans: dict[int, list[float]] = {size: [] for size in sizes}
    rows = {size: min(MOST_ROWS, MEMORY_BYTES // (2 * size)) for size in sizes}
    places = {size: [torch.randperm(n) for _ in range(2)] for size, n in rows.items()}
    for turn in range(REPEATS + 1):
        for size in sizes if turn % 2 else sizes[::-1]:
            took = lane.seconds(size, *places[size])
            if turn:  # the first one warms up
                spans[size].append(took)
    medians = {size: statistics.median(each) for size, each in spans.items()}
    name = tuned.transport_name(lane.engine.provider, lane.engine.opening.settings)
    for size in sizes:
        writes, nbytes = rows[size] / medians[size], rows[size] * size / medians[size]
        world.say(
            f"link: rows of {size:>9,} B over {name}: {writes / 1e6:.3f} M writes/s, "
            f"{nbytes / 1e9:.2f} GB/s"
        )
    return Rates(
        transport=name,
        memory=world.options.device,
        nics=lane.engine.num_nics,
        writes_per_s=max(rows[size] / medians[size] for size in SMALL),
        bytes_per_s=max(rows[size] * size / medians[size] for size in LARGE),
    )
