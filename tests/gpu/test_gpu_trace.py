"""Phases of kernels in a trace: by stamps of kernels that are compiled for it, beside proxies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moe_p2p
from moe_p2p import tracing
from moe_p2p.moe.gpu import kernels
from moe_p2p.tools.trace import shown
from moe_p2p.tools.trace.recorded import BEGUN, RINGS, RUNG
from moe_p2p.tools.trace.steps import arrivals, judge, steps
from tests.gpu.test_gpu import call, run_step
from tests.gpu.test_gpu import steps as run_steps
from tests.support import gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import World, meet, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

NUM_STEPS = 4


def traced_later(rank: Rank, world: World, calls: list[Wanted], traces: list[tracing]) -> None:
    """A communicator that was made before; rank 0 traces the process."""
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, calls)
        if rank.rank == 0:
            traces[0].__enter__()
        meet(rank, "begun")
        for each in calls:
            run_step(comm, each)
        meet(rank, "stepped")
        if rank.rank == 0:
            traces[0].__exit__(None, None, None)
        meet(rank, "ended")


@pytest.mark.parametrize("world", worlds((2, 1)))
def test_a_communicator_that_was_made_before_says_what_is_missing(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    found = moe_p2p.tracing(path)
    run(world, traced_later, [call(world, seed) for seed in range(2)], [found])
    trace = found.trace
    assert trace is not None
    assert steps(trace) == []
    (text,) = trace.without_phases()
    assert "made before the trace" in text
    assert text in shown.text(trace, None).splitlines()
    written = json.loads(path.read_text())
    assert written["otherData"]["without_phases"] == [text]
    names = {each["name"] for each in written["traceEvents"]}
    assert names >= {text, "doorbell: dispatch", "post", "immediate", "arrival: combine"}


@pytest.mark.parametrize("world", worlds((2, 1), (4, 2), (2, 2)))
def test_kernels_and_proxies_are_on_one_clock(world: World, tmp_path: Path) -> None:
    calls = [call(world, seed) for seed in range(NUM_STEPS)]
    with moe_p2p.tracing(tmp_path / "trace.json") as found:
        run(world, run_steps, calls, {})
    assert not kernels.measuring
    trace = found.trace
    assert trace is not None
    assert trace.without_phases() == []
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
