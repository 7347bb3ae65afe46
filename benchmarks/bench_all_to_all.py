"""Dispatch and combine over shapes: four ranks as threads, two nodes of two.

Compares commits on the same machine; `python -m moe_p2p bench` has processes, a baseline and byte
counts. A round takes the time of its slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from team import Team
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, Dispatched

WORLD, EXPERTS, TOPK, MAX_TOKENS, HIDDEN = 4, 64, 8, 128, 2048
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module", params=DTYPES)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    config = AllToAllConfig(
        num_experts=EXPERTS,
        hidden_dim=HIDDEN,
        topk=TOPK,
        max_tokens=MAX_TOKENS,
        dtype=DTYPES[request.param],
        ranks_per_node=2,
    )
    with Team(config, world_size=WORLD) as team:
        yield team


class Halves:
    """Calls of a rank; makes its buffers once."""

    def __init__(self, tokens: int, *, quantize: bool) -> None:
        self.tokens, self.quantize = tokens, quantize
        self.inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.received: dict[int, Dispatched] = {}
        self.y: dict[int, Tensor] = {}
        self.out: dict[int, Tensor] = {}

    def dispatch(self, comm: AllToAll) -> None:
        if comm.rank not in self.inputs:
            generator = torch.Generator().manual_seed(comm.rank)
            scores = torch.rand(self.tokens, EXPERTS, generator=generator)
            weights, topk_idx = scores.topk(TOPK, dim=1)
            x = torch.randn(self.tokens, HIDDEN, generator=generator)
            self.inputs[comm.rank] = x.to(comm.config.dtype), topk_idx, weights
        pending = comm.dispatch_send(
            *self.inputs[comm.rank], layout="grouped", quantize=self.quantize
        )
        got = comm.dispatch_recv(pending, out=self.received.get(comm.rank))
        self.received[comm.rank] = got
        if comm.rank not in self.y:
            self.y[comm.rank] = torch.zeros(got.x.shape, dtype=comm.config.dtype)

    def combine(self, comm: AllToAll) -> None:
        pending = comm.combine_send(self.y[comm.rank], self.received[comm.rank])
        self.out[comm.rank] = comm.combine_recv(pending, out=self.out.get(comm.rank))

    def pair(self, comm: AllToAll) -> None:
        self.dispatch(comm)
        self.combine(comm)


@pytest.mark.parametrize("tokens", [1, 32, MAX_TOKENS])
@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "fp8"])
def test_pair(benchmark: BenchmarkFixture, team: Team, tokens: int, quantize: bool) -> None:
    halves = Halves(tokens, quantize=quantize)
    _rounds(benchmark, lambda: team.step(halves.pair))


@pytest.mark.parametrize("tokens", [32, MAX_TOKENS])
def test_dispatch(benchmark: BenchmarkFixture, team: Team, tokens: int) -> None:
    halves = Halves(tokens, quantize=False)
    team.step(halves.pair)
    benchmark.pedantic(
        lambda: team.step(halves.dispatch),
        teardown=lambda: team.step(halves.combine),
        rounds=30,
        warmup_rounds=3,
    )


@pytest.mark.parametrize("tokens", [32, MAX_TOKENS])
def test_combine(benchmark: BenchmarkFixture, team: Team, tokens: int) -> None:
    halves = Halves(tokens, quantize=False)
    team.step(halves.pair)
    benchmark.pedantic(
        lambda: team.step(halves.combine),
        setup=lambda: team.step(halves.dispatch),
        rounds=30,
        warmup_rounds=3,
    )


def _rounds(benchmark: BenchmarkFixture, function: Callable[[], None]) -> None:
    benchmark.pedantic(function, rounds=30, warmup_rounds=3)
