"""libfabric's providers: the Domain beside a raw loop over the same provider, then whole engines.

test_beside_a_raw_loop runs tests/cpp/libfabric_benchmark.cpp and transfer_benchmark.cpp (pages by
size and scatter to n peers, also over the software NIC), with Domain and raw loop in turns. Goals:
large writes at least 0.95 of the raw loop's rate, posting 8 KiB at most 1.2 times its cost. The
others measure two engines of one process, in Python, with a thread each. Over tcp and shm the CPU
copies every byte: the numbers show this machine's cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import cpp_program
import pytest
import torch
from cpp_program import median_s
from pytest_benchmark.fixture import BenchmarkFixture

from moe_p2p import Engine, EngineConfig, PageRows, UnavailableError
from moe_p2p.engine.transfers import Region

SETTINGS = {"tcp": "provider=tcp,interfaces=lo", "shm": "provider=shm"}
TARGET_BYTES = 64 << 20


class Route:
    """Two engines of one process and memory at both ends."""

    def __init__(self, settings: str, num_nics: int) -> None:
        config = EngineConfig(
            transport="libfabric",
            nics_per_rank=num_nics,
            transport_settings=settings,
            wait="yield",
        )
        self.here, self.there = Engine(config), Engine(config)
        self.source = self.here.register(torch.ones(TARGET_BYTES, dtype=torch.uint8))
        self.target = self.there.register(torch.zeros(TARGET_BYTES, dtype=torch.uint8))
        self.region: Region = self.here.resolve(self.target.descriptor)


@pytest.fixture(params=["tcp 1", "tcp 2", "shm 1"], ids=lambda name: f"{name} NICs")
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    provider, num_nics = request.param.split()
    try:
        made = Route(SETTINGS[provider], int(num_nics))
    except UnavailableError as error:
        pytest.skip(str(error))
    yield made
    made.here.close()
    made.there.close()


@pytest.mark.parametrize("nbytes", [8 << 10, 64 << 10, 1 << 20, 16 << 20], ids=lambda n: f"{n} B")
def test_bandwidth(benchmark: BenchmarkFixture, route: Route, nbytes: int) -> None:
    """Single writes, 16 in flight (4 of 16 MiB)."""
    in_flight = 4 if nbytes > 1 << 20 else 16

    def write() -> None:
        requests = [
            route.here.write(route.source, route.region, nbytes=nbytes, region_offset=i * nbytes)
            for i in range(in_flight)
        ]
        for request in requests:
            request.wait(30.0)

    benchmark.pedantic(write, rounds=30, warmup_rounds=3)
    benchmark.extra_info["gigabytes_per_s"] = in_flight * nbytes / median_s(benchmark) / 1e9


@pytest.mark.parametrize("page_bytes", [4 << 10, 32 << 10], ids=lambda n: f"{n} B")
def test_pages(benchmark: BenchmarkFixture, route: Route, page_bytes: int) -> None:
    """1000 pages in a random order."""
    pages = torch.randperm(1000, generator=torch.Generator().manual_seed(1))

    def write() -> None:
        route.here.write_pages(
            route.source,
            route.region,
            rows=PageRows(page_bytes=page_bytes),
            pages=pages,
            region_pages=pages.flip(0),
        ).wait(30.0)

    benchmark.pedantic(write, rounds=30, warmup_rounds=3)
    benchmark.extra_info["us_per_page"] = median_s(benchmark) / 1000 * 1e6


@pytest.mark.parametrize(
    "cases", ["libfabric*", "transfers*"], ids=["providers", "pages and scatter"]
)
def test_beside_a_raw_loop(benchmark: BenchmarkFixture, cases: str) -> None:
    program = cpp_program.build(timeout_s=400)
    command = [program, "--no-skip", f"-tc=benchmark: {cases}"]
    cpp_program.run(benchmark, command, name="beside a raw loop")
