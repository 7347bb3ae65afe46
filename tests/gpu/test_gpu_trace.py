"""Phases of kernels in a trace: by stamps of kernels that are compiled for it, beside proxies."""

from __future__ import annotations

from pathlib import Path

import pytest

import moe_p2p
from moe_p2p.moe.gpu import kernels
from moe_p2p.tools.trace.recorded import BEGUN, RINGS, RUNG
from moe_p2p.tools.trace.steps import arrivals, judge, steps
from tests.gpu.test_gpu import call
from tests.gpu.test_gpu import steps as run_steps
from tests.support.gpu_ranks import World, run, worlds

pytestmark = pytest.mark.gpu

NUM_STEPS = 4


@pytest.mark.parametrize("world", worlds((2, 1), (4, 2), (2, 2)))
def test_kernels_and_proxies_are_on_one_clock(world: World, tmp_path: Path) -> None:
    calls = [call(world, seed) for seed in range(NUM_STEPS)]
    with moe_p2p.tracing(tmp_path / "trace.json") as found:
        run(world, run_steps, calls, {})
    assert not kernels.measuring
    trace = found.trace
    assert trace is not None
    (process,) = trace.ranks
    assert sorted(each.rank for each in process.communicators) == [*range(world.ranks)]
    whole = steps(trace)
    assert len(whole) >= NUM_STEPS
    error = trace.error_ns(0)
    came = arrivals(trace)
    for each in whole:
        for of in (each.dispatch, each.combine):
            assert sorted(of) == [*range(world.ranks)]
            for phase in of.values():
                assert phase.begin <= phase.sent <= phase.waited <= phase.end
        for rank in range(world.ranks):
            assert each.dispatch[rank].end <= each.combine[rank].begin + error
            for source in range(world.ranks):  # nothing is published before its sender began
                for (name, step, phase, at, by), time in came.items():
                    if (name, step, at, by) == (each.communicator, each.number, rank, source):
                        begun = (each.dispatch if phase == "dispatch" else each.combine)[source]
                        assert time >= begun.begin - error
    judged = judge(whole)
    assert judged is not None
    assert judged.took > 0
    bells = [row[1:] for each in process.communicators for row in each.stamps]
    for stamps in bells:
        if world.ranks > world.per_node:
            assert stamps[BEGUN] < stamps[RINGS] <= stamps[RUNG]
        else:
            assert stamps[RINGS] == stamps[RUNG] == 0
