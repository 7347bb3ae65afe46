"""Traces: files are as Chrome's format wants, events are those that were counted, clocks are right
within what is stated, and a rank that comes late is named."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import socket
import struct
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import HashStore

import moe_p2p
from moe_p2p import AllToAll, AllToAllConfig, Engine, errors
from moe_p2p.__main__ import main
from moe_p2p.engine import lifetime
from moe_p2p.engine.recording import decode
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.moe.gpu import kernels
from moe_p2p.tools import recording
from moe_p2p.tools.trace import hub, shown
from moe_p2p.tools.trace.hub import Bounds, Hub, bounds_of
from moe_p2p.tools.trace.perfetto import document
from moe_p2p.tools.trace.recorded import Clock, Trace
from moe_p2p.tools.trace.session import Session
from moe_p2p.tools.trace.steps import PAIR, judge, steps
from tests.support import kv_workers, weights_fleet
from tests.support.ranks import Rank, repeated, run_processes, run_threads
from tests.support.weights_fleet import MODELS

CONFIG = AllToAllConfig(num_experts=8, hidden_dim=256, topk=2, max_tokens=16)
RANKS, STEPS, SLEEP_S, LATE = 4, 5, 0.3, 2
OFFSET_NS = 10_000_000
ROUNDED = 1e-6  # us, in sums of times
# Of each kind of event, besides `ph`: members that it has to have, with their types.
NUMBER = (int, float)
MEMBERS: dict[str, dict[str, Any]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "dur": NUMBER},
    "b": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "id": str},
    "e": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "id": str},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "id": int},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "id": int, "bp": str},
}


def problems(document: dict[str, Any]) -> list[str]:
    """What Chrome's trace event format forbids, or viewers show as nonsense."""
    found = []
    by_thread = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    ends: Counter[tuple[str, Any]] = Counter()
    for event in document["traceEvents"]:
        wanted = MEMBERS.get(event.get("ph"))
        if wanted is None:
            found.append(f"ph is {event.get('ph')}: {event}")
            continue
        wrong = [
            f"{name} is {event.get(name)!r}: {event}"
            for name, kind in wanted.items()
            if not isinstance(event.get(name), kind) or isinstance(event.get(name), bool)
        ]
        found += wrong
        if wrong:
            continue
        if event.get("ts", 0) < 0 or event.get("dur", 0) < 0:
            found.append(f"a time before the first, or a length below 0: {event}")
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "besf":
            ends[event["cat"], event["id"]] += {"b": 1, "e": -1, "s": 1, "f": -1}[event["ph"]]
    found += [f"begun and ended unequally often: {key}" for key, count in ends.items() if count]
    for thread, slices in by_thread.items():
        stack: list[float] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while stack and stack[-1] <= begin + ROUNDED:
                stack.pop()
            if stack and end > stack[-1] + ROUNDED:
                found.append(f"slices of {thread} overlap at {begin}")
            stack.append(end)
    return found


class Traced(NamedTuple):
    document: dict[str, Any]
    trace: Trace


def step(comm: AllToAll, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 256, generator=generator).to(torch.bfloat16)
    got = comm.dispatch(x, torch.rand(16, 8, generator=generator).topk(2).indices)
    comm.combine(got.x, got)


def in_turns(rank: Rank, path: str, late: int) -> Trace | None:
    """Steps before, inside and behind a trace; another communicator, made and closed inside."""
    config = dataclasses.replace(CONFIG, ranks_per_node=rank.world_size // 2)
    with AllToAll(rank.store, config, rank=rank.rank, world_size=rank.world_size) as comm:
        step(comm, 0)
        with moe_p2p.tracing(path, rank.store, rank.rank, rank.world_size) as found:
            for seed in range(STEPS):
                if rank.rank == late:
                    time.sleep(SLEEP_S)
                step(comm, seed)
            with AllToAll(rank.store, config, rank=rank.rank, world_size=rank.world_size) as more:
                step(more, 7)
        step(comm, 9)
        assert not lifetime.watchers
        assert not kernels.measuring
        assert len(comm.engine.record(0).events) == 0
        return found.trace


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace, *others = run_processes(RANKS, in_turns, str(path), LATE)
    assert others == [None] * (RANKS - 1)
    assert trace is not None
    return Traced(json.loads(path.read_text()), trace)


def test_the_file_is_what_the_format_wants_with_all_ranks(traced: Traced) -> None:
    assert problems(traced.document) == []
    named = [each for each in traced.document["traceEvents"] if each["name"] == "process_name"]
    assert [each["args"]["name"] for each in named] == [f"rank {rank}" for rank in range(RANKS)]
    assert {each["pid"] for each in traced.document["traceEvents"]} == {*range(RANKS)}
    assert not traced.document["otherData"]["lost"]


def test_problems_are_found() -> None:
    good = {"ph": "X", "name": "a", "cat": "c", "pid": 0, "tid": 1, "ts": 0.0, "dur": 5.0}
    for wrong in ({"dur": -1.0}, {"ts": "0"}, {"ph": "Q"}, {"ts": 3.0, "dur": 5.0}):
        assert problems({"traceEvents": [good, good | wrong]})
    assert problems({"traceEvents": [good | {"ph": "b", "id": "1"}]})
    assert not problems({"traceEvents": [good, good | {"ts": 1.0, "dur": 4.0}]})


def test_events_are_those_that_the_engines_counted(traced: Traced) -> None:
    shown_events = Counter(
        (each["pid"], each["name"].partition(":")[0])
        for each in traced.document["traceEvents"]
        if each["ph"] == "X"
    )
    for process, recorded in enumerate(traced.trace.ranks):
        assert len(recorded.engines) == 2
        total: Counter[str] = Counter()
        for engine in recorded.engines:
            total.update(engine.counters)
        # Each step is a dispatch and a combine to another node, over two NICs.
        assert total["immediates_received"] >= 2 * 2 * (STEPS + 1)
        assert shown_events[process, "post"] == total["writes"] + total["reads"]
        assert shown_events[process, "immediate"] == total["immediates_received"]
        assert shown_events[process, "doorbell"] >= 2 * (STEPS + 1)
        assert shown_events[process, "arrival"] >= 2 * (STEPS + 1)
        assert shown_events[process, "completion"] > 0


def test_steps_are_whole_and_their_phases_in_order(traced: Traced) -> None:
    found = steps(traced.trace)
    assert len(found) == STEPS + 1
    assert len({each.communicator for each in found}) == 2
    for each in found:
        for of in (each.dispatch, each.combine):
            assert sorted(of) == [*range(RANKS)]
            for phase in of.values():
                assert phase.begin < phase.sent <= phase.waited < phase.end
        for rank in range(RANKS):
            assert each.dispatch[rank].end < each.combine[rank].begin
    inside = Counter(
        (each["pid"], each["name"])
        for each in traced.document["traceEvents"]
        if each["ph"] == "X" and each["cat"] in ("phase", "send", "receive")
    )
    wanted = [name for phase in PAIR for name in (phase, f"{phase}: send", f"{phase}: receive")]
    assert inside == {(rank, name): STEPS + 1 for rank in range(RANKS) for name in wanted}


def test_nothing_arrives_before_it_was_posted(traced: Traced) -> None:
    begun, ended = (
        {each["id"]: each for each in traced.document["traceEvents"] if each["ph"] == ph}
        for ph in "sf"
    )
    assert len(begun) >= RANKS * 2 * 2 * (STEPS + 1)
    for number, end in ended.items():
        assert end["ts"] >= begun[number]["ts"]
        assert end["pid"] // 2 != begun[number]["pid"] // 2  # between nodes


def test_the_rank_that_sleeps_is_named(traced: Traced, tmp_path: Path) -> None:
    found = [each for each in steps(traced.trace) if each.took > SLEEP_S * 1e9]
    judged = judge(found)
    assert judged is not None
    assert judged.straggler is not None
    assert judged.straggler.rank == LATE
    assert judged.straggler.late > 0.9 * SLEEP_S * 1e9
    text = shown.text(traced.trace, judged, shown.Floor(20.0, 10.0, "bytes over a rate"))
    assert text.splitlines()[-1].startswith(f"straggler: rank {LATE}, waited for")
    assert "rank 0 waits" in text
    assert "no error between them" in text
    assert "floor 30.0 (20.0 + 10.0: bytes over a rate)" in text
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shown, "draw", lambda _, heading, *__, **___: drawn.append(heading))
        shown.picture(tmp_path / "x.png", "T 16", traced.trace, judged)
    assert drawn[0].endswith(f"rank {LATE} is waited for")
    floor = shown.Floor(2e5, 1e5)
    assert shown.picture(tmp_path / "trace.png", "T 16", traced.trace, judged, floor) is None
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_phases_that_are_missing_are_named(traced: Traced, tmp_path: Path) -> None:
    """As where one of the communicators is of GPUs and was made before the trace."""
    assert traced.document["otherData"]["without_phases"] == []
    names = [each.name for each in traced.trace.ranks[0].communicators]
    ranks = [
        dataclasses.replace(
            recorded,
            communicators=[
                dataclasses.replace(each, stamped=each.name != names[0])
                for each in recorded.communicators
            ],
        )
        for recorded in traced.trace.ranks
    ]
    trace = dataclasses.replace(traced.trace, ranks=ranks)
    (text,) = trace.without_phases()
    assert text.startswith(f"no phases of communicator {names[0]} (4 ranks, 2 a node): its kernels")
    assert text in shown.text(trace, None).splitlines()
    made = document(trace)
    assert problems(made) == []
    assert made["otherData"]["without_phases"] == [text]
    said = {each["pid"] for each in made["traceEvents"] if each["name"] == text}
    assert said == {*range(RANKS)}
    judged = judge(steps(trace))
    assert judged is not None
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shown, "draw", lambda _, heading, *__, **___: drawn.append(heading))
        shown.picture(tmp_path / "x.png", "T 16", trace, judged)
    assert "not in it: kernels of 1 communicator made before the trace" in drawn[0]


# --- clocks ---


def test_pings_bound_the_difference_of_clocks() -> None:
    """The way there takes ten times the way back: half of a round trip would be far off."""
    pings = [(at, at + 1_000 + OFFSET_NS, at + 1_100) for at in range(0, 100_000, 5_000)]
    found = bounds_of(pings)
    assert abs(found.offset - OFFSET_NS) <= found.error == 550


def test_clocks_that_drift_are_interpolated() -> None:
    """The other clock is 10 ms ahead and gains 100 us in 10 s."""
    clock = Clock(Bounds(0, 10_000_000, 10_000_000), Bounds(10**10, 10_100_000, 10_100_000))
    assert clock.drift_ppm == pytest.approx(10)
    for at in (0, 5 * 10**9, 10**10):
        other = at + 10_000_000 + at // 100_000
        assert clock.other(other) == pytest.approx(at, abs=2)


def planted(rank: Rank) -> list[Bounds]:
    """Rank 1's clock is 10 ms ahead; rank 2 has the same one as rank 0."""
    off = OFFSET_NS if rank.rank == 1 else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "clock_name", lambda: "other" if rank.rank == 1 else "one")
        meeting = Bootstrap(rank.store, rank=rank.rank, world_size=rank.world_size, timeout_s=30.0)
        with meeting:
            made = Hub(meeting, timeout_s=30.0, clock=lambda: time.monotonic_ns() + off)
    found = made.match()
    made.close()
    return found


def test_a_planted_offset_is_found_within_the_stated_error() -> None:
    found, *_ = run_processes(3, planted)
    assert abs(found[1].offset - OFFSET_NS) <= found[1].error
    assert 0 < found[1].error < OFFSET_NS / 2
    assert (found[2].low, found[2].high) == (0, 0)


def _in_another_clock() -> None:
    """From here on children have a monotonic clock that is 10 ms ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x80) != 0:  # CLONE_NEWTIME
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"monotonic 0 {OFFSET_NS}\n")


def elsewhere(rank: Rank, path: str) -> str:
    """Rank 1 is a child in another time namespace, C++ and all."""
    if rank.rank == 0:
        trace = in_turns(rank, path, -1)
        assert trace is not None
        offset, error = trace.hosts[1].first.offset, trace.hosts[1].error
        assert abs(offset - OFFSET_NS) <= error, (offset, error)
        document = json.loads(Path(path).read_text())
        assert not problems(document)
        begun, ended = (
            {each["id"]: each["ts"] for each in document["traceEvents"] if each["ph"] == ph}
            for ph in "sf"
        )
        assert begun
        for number, at in ended.items():  # 10 ms wrong they would be in half of the ways
            assert begun[number] - 2 * error / 1e3 <= at < begun[number] + 9_000
        assert f"right within {shown.us(error)} us (of rank 1)" in shown.text(trace, None)
        return ""
    try:
        _in_another_clock()
    except OSError as failed:
        return str(failed)
    child = os.fork()
    if not child:
        in_turns(rank, path, -1)
        os._exit(0)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _may_have_another_clock() -> bool:
    child = os.fork()
    if not child:
        try:
            _in_another_clock()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not _may_have_another_clock(), reason="no time namespaces may be made here")
def test_ranks_of_different_clocks_are_put_on_one(tmp_path: Path) -> None:
    found = run_processes(2, elsewhere, str(tmp_path / "trace.json"))
    assert found == ["", "0"]


# --- KV and weights, and what is left ---


def categories(path: Path) -> Counter[str]:
    document = json.loads(path.read_text())
    assert problems(document) == []
    return Counter(each.get("cat", "") for each in document["traceEvents"])


def test_a_push_of_kv_is_in_it(tmp_path: Path) -> None:
    group = moe_p2p.kv.KVGroup("kv", (0, 1), heads=4, k_bytes=16, v_bytes=16, page_size=4)
    layout = moe_p2p.kv.KVLayout((group,))
    with moe_p2p.tracing(tmp_path / "kv.json") as found, kv_workers.workers(layout, layout) as both:
        pages = {"kv": torch.arange(4, dtype=torch.int32)}
        reservation = both.receivers[0].reserve("r", "prefill", pages, total=16)
        sending = both.senders[0].start("r", "decode", pages, total=16)
        for layer in range(2):
            sending.layer(layer, 16)
        sending.commit(b"token")
        reservation.wait(20)
        sending.wait(20)
    counted = categories(tmp_path / "kv.json")
    assert counted["kv"] >= 4  # posts and their immediates
    assert counted["request kv"] >= 2
    assert found.trace is not None
    labels = {each.label for each in found.trace.ranks[0].engines}
    assert {"prefill/0", "decode/0"} <= labels


def test_an_update_of_weights_is_in_it(tmp_path: Path) -> None:
    with weights_fleet.fleet(MODELS["mixed"]) as fleet:
        with moe_p2p.tracing(tmp_path / "weights.json"):
            fleet.finish(fleet.train(1))
        fleet.check(1)
    assert categories(tmp_path / "weights.json")["weights"] >= 4


def test_a_block_that_raises_leaves_each_ranks_own_events(tmp_path: Path) -> None:
    def body(rank: Rank) -> None:
        engine = Engine(label=f"of {rank.rank}")
        with (
            pytest.raises(ZeroDivisionError),
            engine,
            moe_p2p.tracing(tmp_path / "t.json", rank.store, rank.rank, rank.world_size),
        ):
            raise ZeroDivisionError

    run_threads(1, body)
    assert problems(json.loads((tmp_path / "t.rank0.json").read_text())) == []
    assert not (tmp_path / "t.json").exists()
    assert not lifetime.watchers


def left_alone(rank: Rank, path: str, reset: bool) -> str:
    """Rank 1's block raises, or rank 1 is gone without a farewell. Returns rank 0's error."""
    tracing = moe_p2p.tracing(path, rank.store, rank.rank, rank.world_size)
    with Engine():
        tracing.__enter__()
        if rank.rank == 0:
            with pytest.raises(errors.PeerDeadError) as found:
                tracing.__exit__(None, None, None)
            return str(found.value)
        if reset:
            line = tracing._hub._lines[0]._connection
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tracing._hub.close()
        tracing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    return ""


@pytest.mark.parametrize("reset", [False, True])
def test_a_rank_that_is_left_alone_names_the_other_and_keeps_its_events(
    tmp_path: Path, reset: bool
) -> None:
    text, _ = run_processes(2, left_alone, str(tmp_path / "t.json"), reset)
    assert "rank 1 has ended its connection" in text
    assert "see what it printed last" in text
    for rank in range(2):
        assert problems(json.loads((tmp_path / f"t.rank{rank}.json").read_text())) == []
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("num_events", [0, -1, 1.5, "4"])
def test_counts_of_events_that_are_none_are_refused(tmp_path: Path, num_events: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"num_events is {num_events!r}, must be"):
        moe_p2p.tracing(tmp_path / "t.json", num_events=num_events).__enter__()


def test_a_forked_child_that_leaves_the_block_ends_nothing(tmp_path: Path) -> None:
    with moe_p2p.tracing(tmp_path / "t.json") as traced:
        if (child := os.fork()) == 0:
            try:
                traced.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert not (tmp_path / "t.json").exists()
        with Engine(label="after"):
            pass
    assert traced.trace is not None
    assert "after" in {each.label for each in traced.trace.ranks[0].engines}


def test_communicators_of_a_trace_are_named_where_none_was_meant(tmp_path: Path) -> None:
    with (
        AllToAll(HashStore(), CONFIG, rank=0, world_size=1),
        moe_p2p.tracing(tmp_path / "t.json") as traced,
    ):
        pass
    (name,) = {each.name for each in traced.trace.ranks[0].communicators}
    text = f"1 communicators, and none of the name 'x'; name one of these: {name}"
    with pytest.raises(errors.InvalidArgumentError, match=text):
        recording.of_trace(traced.trace, "x")
    with moe_p2p.tracing(tmp_path / "t.json") as traced:
        pass
    text = "the trace has 0 communicators; none was open inside the block"
    with pytest.raises(errors.InvalidArgumentError, match=text):
        recording.of_trace(traced.trace)


def test_a_second_trace_is_refused(tmp_path: Path) -> None:
    with moe_p2p.tracing(tmp_path / "one.json"):
        text = "a trace is recorded already in this process"
        with pytest.raises(errors.InvalidArgumentError, match=text):
            moe_p2p.tracing(tmp_path / "two.json").__enter__()
    with moe_p2p.tracing(tmp_path / "two.json"):
        pass


def test_events_that_were_overwritten_are_reported(tmp_path: Path) -> None:
    with Engine(label="one") as one, Engine(label="other") as other:
        memory = one.register(torch.zeros(4096, dtype=torch.uint8))
        inbox = other.register(torch.zeros(4096, dtype=torch.uint8))
        region = one.resolve(inbox.descriptor)
        with moe_p2p.tracing(tmp_path / "t.json", num_events=4) as found:
            for _ in range(8):
                one.write(memory, region, imm=1).wait()
        assert found.trace is not None
        (text,) = [each for each in found.trace.ranks[0].lost if "'one'" in each]
        assert text.endswith("events of engine 'one' were overwritten; raise num_events")


def test_engines_have_counted_its_events_where_others_write_meanwhile() -> None:
    """As ranks do that are done with a trace before this one, or have not yet begun it."""
    with Engine(label="one") as one, Engine(label="other") as other:
        memory = one.register(torch.zeros(4096, dtype=torch.uint8))
        inbox = other.register(torch.zeros(4096, dtype=torch.uint8))
        region = one.resolve(inbox.descriptor)
        with repeated(lambda: one.write(memory, region, imm=1).wait()):
            for _ in range(20):
                session = Session(1 << 14)
                session.begin()
                time.sleep(0.002)
                session.stop()
                for engine in session.recorded(0).engines:
                    kinds = Counter(decode(row).kind for row in engine.events)
                    assert kinds["posted"] == engine.counters["writes"]
                    assert kinds["immediate"] == engine.counters["immediates_received"]


# --- the command ---


def test_the_command_writes_a_file_a_picture_and_a_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "trace.json", tmp_path / "trace.png"
    small = ["--ranks=2", "--ranks-per-node=1", "--tokens=8", "--hidden=256", "--experts=8"]
    record = tmp_path / "record.jsonl"
    more = ["--topk=2", "--steps=4", f"--out={out}", f"--plot={plot}", f"--record={record}"]
    assert main(["trace", "--device=cpu", *small, *more]) == 0
    printed = capfd.readouterr().out
    for each in ("2 ranks in nodes of 1, T 8", "4 steps: ", "; floor ", "GB/s of a copy", "cost: "):
        assert each in printed
    assert "us without a trace and" in printed
    assert printed.splitlines()[-3:] == [
        f"wrote {out}: open it at https://ui.perfetto.dev",
        f"wrote {plot}",
        f"wrote {record}: step through it with python -m moe_p2p replay {record}",
    ]
    assert problems(json.loads(out.read_text())) == []
    assert main(["replay", str(record), "--step=2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    for rank in range(2):
        first = next(each for each in lines if each.startswith(f"rank {rank}: "))
        assert first.endswith(" events over loopback, whole from step 0 on")
        assert f"rank {rank}: waits for nothing" in lines
        for what in ("doorbell", "posted", "completed", "immediate", "published"):
            assert [each for each in lines if each.startswith(f"rank {rank} ") and what in each]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens=8,16"], "--tokens: one number; a trace is of one job"),
        (["--steps=0"], "--steps: '0' is not a whole number from 1"),
        (["--out=/proc/x"], "--out: /proc/x cannot be written"),
        (["--ranks=2", "--ranks-per-node=2", "--record=x"], "--record: ranks of one node send"),
        (["--out="], "--out: name a file"),
        (["--out=x.json", "--record=./x.json"], "--out, --plot and --record name one file"),
        (["--ranks=3"], "moe_p2p trace: error: --ranks 3 is not a multiple of --ranks-per-node 2"),
        (["--check"], "unrecognized arguments: --check"),
        (["--topk=9", "--experts=8"], "--topk 9 is more than --experts 8"),
    ],
)
def test_what_has_no_meaning_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--device=cpu", *arguments])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_files_that_cannot_be_written_do_not_cost_what_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """/dev/full may be opened, and takes nothing; no rank waits for another one's deadline."""
    job = "--device=cpu --ranks=2 --ranks-per-node=1 --tokens=4 --hidden=256 --experts=8 --topk=2"
    plot = f"--plot={tmp_path / 'x.txt'}"
    assert main(["trace", *job.split(), "--steps=2", "--out=/dev/full", plot]) == 1
    printed = capfd.readouterr()
    assert "2 steps: " in printed.out
    assert "cost: a pair takes" in printed.out
    assert f"no picture: {tmp_path / 'x.txt'}: matplotlib writes no .txt" in printed.out
    assert "wrote" not in printed.out
    why = "/dev/full could not be written: No space left on device"
    assert f"trace: {why}; what was computed is above\n" in printed.err
    assert "Traceback" not in printed.err
    out = f"--out={tmp_path / 'x.json'}"
    assert main(["trace", *job.split(), "--steps=2", out, "--plot=", "--record=/dev/full"]) == 1
    printed = capfd.readouterr()
    assert "cost: a pair takes" in printed.out
    assert f"wrote {tmp_path / 'x.json'}" in printed.out
    assert f"trace: {why}" in printed.err
