"""Cost of the transfer engine itself, and bandwidth of the software NIC.

The `null` provider completes every write at once and moves nothing, so only the engine is measured.
Goals: 150 ns per page of a 10,000-page write with an immediate each, 1 us at the median from a
doorbell to the first post; of pages without, 20 ns each, and 25 ns a row of several.
"""

from __future__ import annotations

from collections.abc import Iterator

import cpp_program
import pytest
import torch
from cpp_program import median_s
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine.transfers import Memory, Region

NUM_PAGES, PAGE_BYTES = 10_000, 4096


@pytest.fixture(params=[1, 2, 4], ids=lambda nics: f"{nics} NICs")
def null_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        EngineConfig(transport="null", nics_per_rank=request.param, wait="yield")
    ) as engine:
        yield engine


def _random_pages(
    engine: Engine, num_pages: int, page_bytes: int
) -> tuple[Memory, Region, dict[str, Tensor]]:
    """Memory of so many pages, itself as a peer's, and their numbers on both sides, shuffled."""
    memory = engine.register(torch.zeros(num_pages * page_bytes, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(1)
    pages = {
        name: torch.randperm(num_pages, generator=generator) for name in ("pages", "region_pages")
    }
    return memory, engine.resolve(memory.descriptor), pages


def test_write_pages(benchmark: BenchmarkFixture, null_engine: Engine) -> None:
    """10,000 pages, from the Python call to completion."""
    memory, region, pages = _random_pages(null_engine, NUM_PAGES, PAGE_BYTES)

    def write() -> None:
        rows = PageRows(page_bytes=PAGE_BYTES)
        null_engine.write_pages(memory, region, rows=rows, **pages, imm=1).wait()

    benchmark.pedantic(write, rounds=100, warmup_rounds=5)
    benchmark.extra_info["ns_per_page"] = median_s(benchmark) / NUM_PAGES * 1e9


def _pages_ns(
    benchmark: BenchmarkFixture,
    engine: Engine,
    num_pages: int,
    rows: int = 1,
    imm: int | None = None,
) -> tuple[float, float]:
    """Nanoseconds a row of 128 bytes, from the Python call to completion; nothing can be merged.

    The median, and the least: where the machine is busy the median is of the other work, as caller
    and polling thread want a core each.
    """
    memory, region, pages = _random_pages(engine, num_pages, rows * 256)

    def write() -> None:
        layout = PageRows(
            page_bytes=rows * 128,
            row_bytes=128,
            row_stride=256,
            region_row_stride=256,
            stride=rows * 256,
            region_stride=rows * 256,
        )
        engine.write_pages(memory, region, rows=layout, **pages, imm=imm, imm_per_page=False).wait()

    benchmark.pedantic(write, rounds=200, warmup_rounds=10)
    assert benchmark.stats is not None
    least_s = float(benchmark.stats.stats.min)
    scale = 1e9 / (num_pages * rows)
    return median_s(benchmark) * scale, least_s * scale


@pytest.mark.parametrize(("num_pages", "rows", "goal_ns"), [(18_880, 1, 20), (1_180, 16, 25)])
def test_kv_pages(
    benchmark: BenchmarkFixture, null_engine: Engine, num_pages: int, rows: int, goal_ns: int
) -> None:
    """18,880 writes of one request. Goals: 20 ns a page, 25 ns a row, 1 ms for all."""
    ns, least = _pages_ns(benchmark, null_engine, num_pages, rows, imm=1)
    benchmark.extra_info |= {"ns_per_row": ns, "least_ns_per_row": least}
    all_ms, least_ms = (each * num_pages * rows / 1e6 for each in (ns, least))
    print(
        f"\n{num_pages} pages of {rows} rows, {null_engine.num_nics} NICs, median (least): "
        f"{ns:.1f} ({least:.1f}) ns a row, goal {goal_ns}; {all_ms:.3f} ({least_ms:.3f}) ms for "
        "all, goal 1"
    )


def test_one_write(benchmark: BenchmarkFixture, null_engine: Engine) -> None:
    """One write through ops, mailbox and poller, and back to the waiter."""
    memory = null_engine.register(torch.zeros(1 << 20, dtype=torch.uint8))
    region = null_engine.resolve(memory.descriptor)
    benchmark(lambda: null_engine.write(memory, region, imm=1).wait())


@pytest.mark.parametrize("nbytes", [4 << 10, 64 << 10, 1 << 20, 16 << 20], ids=lambda n: f"{n} B")
def test_loopback_bandwidth(benchmark: BenchmarkFixture, nbytes: int) -> None:
    """Single writes from one engine of this process to another, 16 in flight (4 for 16 MiB)."""
    in_flight = 4 if nbytes > 1 << 20 else 16
    with (
        Engine(EngineConfig(transport="loopback", wait="yield")) as here,
        Engine(EngineConfig(transport="loopback", wait="yield")) as there,
    ):
        source = here.register(torch.ones(nbytes, dtype=torch.uint8))
        target = there.register(torch.zeros(in_flight * nbytes, dtype=torch.uint8))
        region = here.resolve(target.descriptor)

        def write() -> None:
            requests = [
                here.write(source, region, region_offset=i * nbytes) for i in range(in_flight)
            ]
            for request in requests:
                request.wait()

        benchmark.pedantic(write, rounds=30, warmup_rounds=3)
        assert bool(target.tensor.all())
    benchmark.extra_info["gigabytes_per_s"] = in_flight * nbytes / median_s(benchmark) / 1e9


def test_engine_alone(benchmark: BenchmarkFixture) -> None:
    """The same, and the doorbell, without Python: tests/cpp/engine_benchmark.cpp."""
    program = cpp_program.build(timeout_s=280)
    command = [program, "--no-skip", "-tc=benchmark: engine*"]
    cpp_program.run(benchmark, command, name="engine")
