"""Stalls that are planted in real runs, recorded, and replayed in another process."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig
from moe_p2p.__main__ import main
from moe_p2p.tools import recording
from moe_p2p.tools.recording import Rank as Recorded
from tests.support import cases, warm
from tests.support.gpu_ranks import meet
from tests.support.ranks import Rank, run_processes, run_threads

STALL_S = 1.0


def stall(rank: Rank, local: int, num_events: int, settings: str, options: dict[str, Any]) -> Any:
    """Steps, then one that rank 1 does not begin. Returns the error, and what was recorded.

    options: `late`: the recorder is switched on between the steps; `kv`: others use the engine;
    `closes`: rank 1 closes, and has no recording; others are fields of the configuration.
    """
    config = EngineConfig(transport="loopback", nics_per_rank=2, transport_settings=settings)
    with Engine(config, label=f"rank {rank.rank}") as engine:
        if not options.get("late"):
            engine.record(num_events)
        fields = {key: options[key] for key in options.keys() - {"late", "kv", "closes"}}
        comm = cases.make(rank, ranks_per_node=local, engine=engine, timeout_s=STALL_S, **fields)
        error = ""
        try:
            for _ in range(3):
                cases.steps(comm)
            if options.get("late"):
                meet(rank, "half of it")
                engine.record(num_events)
                meet(rank, "recording")
                for _ in range(3):
                    cases.steps(comm)
            if options.get("kv"):
                other = engine.register(torch.ones(1000))
                engine.write(other, engine.resolve(other.descriptor), imm=3).wait()
            if rank.rank == 1 and options.get("closes"):
                comm.close()
            if rank.rank != 1:
                tokens = cases.make_tokens(2, rank.rank, 7)
                comm.dispatch(tokens.x, tokens.topk_idx)
        except moe_p2p.MoeP2pError as raised:
            error = str(raised)
        meet(rank, "stalled")
        recorded = None
        if not comm.closed:
            recorded = recording.of_communicator(comm, engine.record(0))
        meet(rank, "recorded")
        comm.close()
        return error, recorded


def stalled(
    world: int, local: int = 1, num_events: int = 1 << 14, settings: str = "", **options: Any
) -> tuple[list[str], list[Recorded]]:
    errors, recorded = zip(
        *run_threads(world, stall, local, num_events, settings, options), strict=True
    )
    return list(errors), list(recorded)


@pytest.fixture(scope="module")
def two() -> tuple[list[str], list[Recorded]]:
    return stalled(2)


def replayed(*files: Path, options: tuple[str, ...] = (), status: int = 0) -> str:
    """What another process prints."""
    command = ("-m", "moe_p2p", "replay", *map(str, files), *options)
    done = warm.run(*command, capture_output=True, text=True, timeout=250)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr == ""
    return str(done.stdout)


def waits_of(error: str) -> str:
    """Who waits for what, in an error of a call."""
    found = re.search(r"(?:dispatch|combine) of step \d+ waits for .*", error)
    assert found, error
    return found[0].strip()


def test_a_peer_that_stops_stalls_the_replay_with_the_same_text(
    two: tuple[list[str], list[Recorded]], tmp_path: Path
) -> None:
    (error, _), recorded = two
    assert "waits for rank 1 (node 1, 0 of 2 immediates came)" in error
    assert [each.whole_from for each in recorded] == [0, 0]
    recording.save(tmp_path / "stall.jsonl", recorded)
    printed = replayed(tmp_path / "stall.jsonl").splitlines()
    assert f"rank 0: {waits_of(error)}" in printed
    assert f"rank 0: as in its error: {error.strip()}" in "\n".join(printed)
    assert "rank 1: waits for nothing" in printed
    assert not [line for line in printed if "otherwise" in line or "not completed" in line]


def traced(rank: Rank, path: str) -> str:
    """Steps in a trace, then one that rank 1 does not begin. Returns rank 0's error."""
    error = ""
    with cases.make(rank, ranks_per_node=1, timeout_s=STALL_S) as comm:
        cases.steps(comm)
        with moe_p2p.tracing(path, rank.store, rank.rank, rank.world_size) as found:
            other = cases.make(rank, ranks_per_node=1)
            cases.steps(other)
            for _ in range(4):
                cases.steps(comm)
            try:
                if rank.rank == 0:
                    tokens = cases.make_tokens(2, rank.rank, 7)
                    comm.dispatch(tokens.x, tokens.topk_idx)
            except moe_p2p.MoeP2pError as raised:
                error = str(raised)
            meet(rank, "stalled")
            other.close()
        if found.trace is not None:
            name = comm._communicator.name
            with pytest.raises(moe_p2p.InvalidArgumentError, match="has 2 communicators"):
                recording.of_trace(found.trace)
            recording.save(path, recording.of_trace(found.trace, name))
    return error


def test_a_trace_has_what_a_replay_needs(tmp_path: Path) -> None:
    path = tmp_path / "stall.jsonl"
    error, _ = run_processes(2, traced, str(path))
    assert "waits for rank 1" in error
    lines = replayed(path).splitlines()
    assert f"rank 0: {waits_of(error)}" in lines
    assert f"rank 0: as in its error: {error.strip()}" in "\n".join(lines)
    assert "rank 1: waits for nothing" in lines
    # One that was open before is whole from where no partner can be further ahead.
    assert "whole from step 0" not in "\n".join(lines)


def test_each_rank_may_have_a_file_of_its_own_or_none(
    two: tuple[list[str], list[Recorded]], tmp_path: Path
) -> None:
    (error, _), recorded = two
    files = [tmp_path / f"{rank}.jsonl" for rank in range(2)]
    for file, each in zip(files, recorded, strict=True):
        recording.save(file, [each])
    for some in (files[:1], files, files[::-1]):
        assert f"rank 0: {waits_of(error)}" in replayed(*some).splitlines()


@pytest.mark.parametrize(
    ("settings", "options"), [("", {"late": True}), ("seed=3", {}), ("", {"kv": True})]
)
def test_a_recorder_switched_on_late_beside_others_or_on_unordered_nics(
    settings: str, options: dict[str, bool], tmp_path: Path
) -> None:
    errors, recorded = stalled(2, settings=settings, **options)
    for each in recorded:
        assert (each.whole_from == 0) == ("late" not in options)
    recording.save(tmp_path / "stall.jsonl", recorded)
    assert f"rank 0: {waits_of(errors[0])}" in replayed(tmp_path / "stall.jsonl").splitlines()


def test_ranks_of_one_node_and_of_others_stall_as_they_did(tmp_path: Path) -> None:
    errors, recorded = stalled(4, 2)
    recording.save(tmp_path / "stall.jsonl", recorded)
    printed = replayed(tmp_path / "stall.jsonl").splitlines()
    for rank in (0, 2, 3):
        assert waits_of(errors[rank]) in "\n".join(line for line in printed if f"k {rank}:" in line)
        assert f"rank {rank}: as in its error: {errors[rank].strip()}" in "\n".join(printed)
    assert "rank 1: waits for nothing" in printed
    # Without the file of rank 2 it is not known what reached rank 3's node there.
    recording.save(tmp_path / "three.jsonl", [recorded[rank] for rank in (0, 1, 3)])
    lines = replayed(tmp_path / "three.jsonl").splitlines()
    assert f"rank 3: {waits_of(errors[3])}" in lines


def test_a_ring_that_was_overwritten_is_whole_from_a_step_on(tmp_path: Path) -> None:
    errors, recorded = stalled(2, num_events=150)
    recording.save(tmp_path / "stall.jsonl", recorded)
    printed = replayed(tmp_path / "stall.jsonl").splitlines()
    for each in recorded:
        assert each.overwritten > 0
        assert each.whole_from is not None
        assert each.whole_from > 3
        line = f"{len(each.events)} events over loopback, {each.overwritten} earlier ones "
        assert (
            f"rank {each.rank}: {line}overwritten, whole from step {each.whole_from} on" in printed
        )
    assert f"rank 0: {waits_of(errors[0])}" in printed


def test_a_ring_that_is_too_small_says_so(tmp_path: Path) -> None:
    _, recorded = stalled(2, num_events=20)
    recording.save(tmp_path / "stall.jsonl", recorded)
    printed = replayed(tmp_path / "stall.jsonl")
    assert "rank 0: its recording is whole from step" in printed or "no step begins" in printed
    assert printed.count("record more") == 2


def test_a_write_that_failed_fails_again(tmp_path: Path) -> None:
    # Of each NIC of both ranks.
    errors, recorded = stalled(2, settings="fail_nth=7")
    assert any("the write of" in error for error in errors), errors
    recording.save(tmp_path / "stall.jsonl", recorded)
    printed = replayed(tmp_path / "stall.jsonl")
    for rank, error in enumerate(errors):
        failed = re.search(
            r"the write of (dispatch|combine) of step \d+ to rank \d .*?failed: t\w+", error
        )
        if failed:
            assert failed[0] in printed
            assert f"rank {rank}: as in its error" in printed


def test_a_peer_that_closed_is_named_as_it_was(tmp_path: Path) -> None:
    errors, recorded = stalled(2, closes=True)
    assert "rank 1 (node 1) has closed its communicator; dispatch of step 15 waits" in errors[0]
    recording.save(tmp_path / "stall.jsonl", recorded[:1])
    assert errors[0].strip() in replayed(tmp_path / "stall.jsonl").splitlines()


def test_masked_ranks_are_not_waited_for(tmp_path: Path) -> None:
    errors, recorded = stalled(4, mask_lost_ranks=True)
    assert errors == [""] * 4
    assert [each.masked for each in recorded] == [[1], [], [1], [1]]
    recording.save(tmp_path / "stall.jsonl", recorded)
    printed = replayed(tmp_path / "stall.jsonl").splitlines()
    assert printed[4:] == [f"rank {rank}: waits for nothing" for rank in range(4)]


def without(recorded: Recorded, wanted: str, **changes: Any) -> Recorded:
    """Without the last event of a kind: as if it had not come."""
    events = list(recorded.events)
    del events[max(at for at, event in enumerate(events) if event.kind == wanted)]
    return Recorded(**{**vars(recorded), "events": events, **changes})


def test_a_completion_that_did_not_come_is_named(
    two: tuple[list[str], list[Recorded]], tmp_path: Path
) -> None:
    recording.save(tmp_path / "stall.jsonl", [without(two[1][1], "completed")])
    printed = replayed(tmp_path / "stall.jsonl")
    assert re.search(
        r"rank 1: NIC \d has not completed a write of \d+ bytes \(combine, step slot 0, part 0\), "
        r"posted \d+\.\d{3} ms before the end",
        printed,
    )


def test_an_exchange_that_does_otherwise_is_reported(
    two: tuple[list[str], list[Recorded]], tmp_path: Path
) -> None:
    recording.save(tmp_path / "stall.jsonl", [without(two[1][1], "doorbell")])
    printed = replayed(tmp_path / "stall.jsonl", status=1)
    assert "rank 1: this version does otherwise: event" in printed
    assert "was recorded to post" in printed


def test_steps_are_printed_one_by_one(
    two: tuple[list[str], list[Recorded]], tmp_path: Path
) -> None:
    recording.save(tmp_path / "stall.jsonl", two[1][:1])
    printed = replayed(tmp_path / "stall.jsonl", options=("--step", "7")).splitlines()
    # A proxy takes what was rung meanwhile in any order: the combine of step 6 may come behind the
    # dispatch of step 7, and that of step 7 behind the dispatch of step 8. Peers may be ahead.
    doorbells = [line for line in printed if "doorbell: " in line]
    steps = [int(re.findall(r", step (\d+), ", line)[0]) for line in doorbells]
    assert "phase dispatch, step 7, " in doorbells[0]
    assert set(steps) <= {6, 7}
    waits = [line.strip() for line in printed if line.startswith("    ")]
    waited = r"rank 0: (dispatch|combine) of step [67] waits for rank 1 \(node 1, [01] of 2 imm.*"
    assert waits
    assert all(re.fullmatch(waited, line) or line == "waits for nothing" for line in waits)
    last = replayed(tmp_path / "stall.jsonl", options=("--step", "15"))
    assert f"rank 0: {waits_of(two[0][0])}" in last.splitlines()


def test_a_step_that_no_recording_has_is_refused(
    two: tuple[list[str], list[Recorded]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It printed that nobody waits."""
    recording.save(tmp_path / "stall.jsonl", two[1])
    assert main(["replay", str(tmp_path / "stall.jsonl"), "--step", "16"]) == 2
    text = "--step 16: whole in these recordings are steps 0 to 15"
    assert text in capsys.readouterr().out


def test_it_ends_when_it_is_told(
    two: tuple[list[str], list[Recorded]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = two[1][0]
    recording.save(tmp_path / "stall.jsonl", [rank])
    (last,) = (e.time_ns for e in rank.events if e.kind == "doorbell" and e.a == 15)
    for until, stalls in ((last - 1, False), (last, True)):
        ms = (until - rank.events[0].time_ns) / 1e6
        assert main(["replay", str(tmp_path / "stall.jsonl"), "--until", f"{ms:.6f}"]) == 0
        assert (f"rank 0: {waits_of(two[0][0])}" in capsys.readouterr().out.splitlines()) == stalls


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_has_what_was_recorded_and_nothing_of_the_machine(
    two: tuple[list[str], list[Recorded]], tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "stall.jsonl"
    recording.save(path, two[1])
    assert recording.load(path) == [
        Recorded(
            **{
                **vars(each),
                "events": [
                    e._replace(peer=0) if e.kind == "posted" or e.kind == "immediate" else e
                    for e in each.events
                ],
            }
        )
        for each in two[1]
    ]
    assert max(line["id"] for line in lines_of(path) if line.get("event") == "posted") < 100


BROKEN: dict[str, tuple[Any, str]] = {
    "empty": (lambda lines: [], "the file is empty"),
    "foreign": (lambda lines: ['{"model": 1}'], "not a recording that"),
    "no json": (lambda lines: ["PK\x03"], r":1: 'PK\\x03' is no JSON object"),
    "list": (lambda lines: ["[1]"], ":1: '\\[1\\]' is no JSON object"),
    "newer": (
        lambda lines: [lines[0].replace(":1,", ":2,", 1), *lines[1:]],
        r"a recording of format 2, written by moe_p2p \S+; this version, \S+, reads format 1",
    ),
    "cut": (lambda lines: lines[:-3], "the file ends early; was it cut off"),
    "cut in a line": (lambda lines: [*lines[:-1], lines[-1][:20]], "is no JSON object"),
    "joined": (lambda lines: [*lines, *lines], "a line behind the last event; were files joined"),
    "event": (
        lambda lines: [*lines[:5], re.sub('"event":"[a-z]+"', '"event":"x"', lines[5]), *lines[6:]],
        ":6: not an event: ",
    ),
    "field": (
        lambda lines: [*lines[:5], lines[5].replace('"ns":', '"us":'), *lines[6:]],
        ":6: not an event: ",
    ),
    "facts": (
        lambda lines: [lines[0], lines[1].replace('"nics"', '"nicks"'), *lines[2:]],
        ":2: the facts of a rank lack, or have beside: nicks, nics",
    ),
    "type": (
        lambda lines: [lines[0], re.sub('"nics":[^a-z]*,', '"nics":["a"],', lines[1]), *lines[2:]],
        ":2: nics is ",
    ),
    "settings": (
        lambda lines: [lines[0], lines[1].replace("world_size=2,", ""), *lines[2:]],
        "rank 0: its settings have no world_size",
    ),
    "rank": (
        lambda lines: [lines[0], lines[1].replace('"rank":0', '"rank":1'), *lines[2:]],
        ":2: the settings are of rank 0",
    ),
    "masked": (
        lambda lines: [lines[0], lines[1].replace('"masked":[]', '"masked":[7]'), *lines[2:]],
        "rank 7 is masked, of 2",
    ),
    "negative": (
        lambda lines: [lines[0], lines[1].replace('"whole_from":0', '"whole_from":-1'), *lines[2:]],
        ":2: whole_from is '-1'",
    ),
    "twice": (
        lambda lines: [lines[0].replace('"ranks":1', '"ranks":2'), *lines[1:], *lines[1:]],
        "several recordings are of rank",
    ),
    "shape": (
        lambda lines: [lines[0], re.sub('"nics":[^a-z]*,', '"nics":[2],', lines[1]), *lines[2:]],
        "NICs of 1 nodes, there are 2",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_files_that_are_no_recording_are_refused(
    two: tuple[list[str], list[Recorded]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    path = tmp_path / "stall.jsonl"
    recording.save(path, two[1][:1])
    change, text = BROKEN[fault]
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))
    assert main(["replay", str(path)]) == 2
    assert re.search(text, capsys.readouterr().out)


def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("none", "No such file"), ("bytes", "it is no text")):
        (tmp_path / "bytes").write_bytes(bytes([200, 201, 0]))
        assert main(["replay", str(tmp_path / name)]) == 2
        printed = capsys.readouterr().out
        assert text in printed
        assert str(tmp_path / name) in printed


def damaged(lines: list[str], draw: random.Random) -> Iterator[str]:
    """A file with one number of one event changed."""
    at = draw.randrange(1, len(lines))
    for i, line in enumerate(lines):
        if i == at:
            numbers = list(re.finditer(r"(?<=:)\d+", line))
            found = draw.choice(numbers)
            value = draw.choice([0, 1, 2, 3, 200, 1 << 31, 1 << 40, (1 << 64) - 1])
            line = f"{line[: found.start()]}{value}{line[found.end() :]}"
        yield line + "\n"


def test_no_damaged_number_does_worse_than_an_error_text(
    two: tuple[list[str], list[Recorded]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stall.jsonl"
    recording.save(path, two[1][:1])
    lines, draw = path.read_text().splitlines(), random.Random(5)
    for _ in range(40):
        path.write_text("".join(damaged(lines, draw)))
        assert main(["replay", str(path)]) in (0, 1, 2)
        assert capsys.readouterr().out
