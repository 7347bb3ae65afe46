"""`python -m moe_p2p tune`: a run on CPU ranks, its file, who uses it, what is ignored and why."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_p2p import AllToAllConfig, Engine, InvalidArgumentError, MoeP2pError, kv
from moe_p2p.__main__ import main
from moe_p2p.kv.link import measured_link
from moe_p2p.machine import tuned
from moe_p2p.machine.launches import BULK_STEP, BulkSteps, LaunchShape, TunedLaunch
from moe_p2p.machine.tuned import Parts, Rates, Tuned
from moe_p2p.moe.gpu.launch_shape import Job, num_threads
from moe_p2p.moe.tuned import Shared
from moe_p2p.tools.doctor import examine, judge
from moe_p2p.tools.tune import shapes, steps
from moe_p2p.tools.tune.world import best
from tests.support import cases, warm
from tests.support.ranks import Rank, run_threads

JOB: dict[str, Any] = {"num_experts": 8, "hidden_dim": 256, "topk": 2, "max_tokens": 600}
RATES = {
    "transport": "loopback",
    "memory": "cpu",
    "nics": 2,
    "writes_per_s": 3e6,
    "bytes_per_s": 6e9,
}
SHAPE = {
    "block_threads": 256,
    "token_workers": 2,
    "slot_workers": 1,
    "blocks_per_sm": 2,
    "token_blocks": 9,
    "slot_blocks": 100,
}
LAUNCH = {
    "kernel": "dispatch",
    "few": False,
    "ranks": 8,
    "row_bytes": 7168,
    "least_tokens": 17,
    "most_tokens": 32,
    "shape": SHAPE,
}
SECTIONS: dict[str, Any] = {
    "launches": [LAUNCH],
    "bulk": {"few": 64, "above": 511, "blocks": 40},
    "parts": {"transport": "loopback", "memory": "cpu", "part_bytes": 64},
    "rates": RATES,
}


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "cache"))
    for name in ("MOE_P2P_TUNED", "MOE_P2P_TRANSPORT", "MOE_P2P_TRANSPORT_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    tuned._read.cache_clear()
    tuned._warn_once.cache_clear()
    yield
    tuned._read.cache_clear()


def written(**sections: Any) -> Path:
    path = tuned.path_here()
    tuned.write(path, "2026-11-25T08:00:00+00:00", sections or SECTIONS)
    return path


def test_a_run_on_cpu_ranks_writes_what_a_new_process_uses() -> None:
    sizes = ["--tokens=4,8", "--hidden=64", "--experts=4", "--topk=2", "--seconds=0.02"]
    command = ("-m", "moe_p2p", "tune", "--device=cpu", *sizes)
    ran = warm.run(*command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout
    assert "parts: 8 tokens, 2 nodes over loopback" in printed
    assert "it is found by itself" in printed
    data = json.loads(tuned.path_here().read_text())
    assert set(data) == {"version", "letter", "machine", "measured", "parts", "rates"}
    text = "from moe_p2p import Engine, kv; e = Engine()\n"
    text += "link = kv.link_of(e); e.close(); print(link.name, link.writes_per_s, link.pack)"
    done = warm.run("-c", text, capture_output=True, text=True, check=True, timeout=250)
    assert done.stdout.split()[-2:] == [str(data["rates"]["writes_per_s"]), "False"]
    assert done.stdout.startswith("loopback as measured")


def test_what_it_measures_again_replaces_the_old_and_keeps_the_rest() -> None:
    path = written()
    tuned.write(path, "later", {"rates": RATES | {"nics": 1}})
    data = json.loads(path.read_text())
    assert data["measured"] == "later"
    assert data["rates"]["nics"] == 1
    assert data["bulk"] == SECTIONS["bulk"]
    path.write_text(json.dumps(data | {"version": "0.0.1"}))
    tuned.write(path, "now", {"rates": RATES})
    assert "bulk" not in json.loads(path.read_text()), "of another build"
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no file is left over"


def test_nothing_is_written_that_could_not_be_read() -> None:
    with pytest.raises(InvalidArgumentError, match="writes_per_s is 0"):
        written(rates=RATES | {"writes_per_s": 0})
    assert not tuned.path_here().exists()


def test_all_values_are_read() -> None:
    path = written()
    found = tuned.find()
    shape = LaunchShape(**SHAPE)
    assert found == Tuned(
        path=path,
        measured="2026-11-25T08:00:00+00:00",
        launches=(TunedLaunch(False, False, 8, 7168, 17, 32, shape),),
        bulk=BulkSteps(64, 511, 40),
        parts=Parts("loopback", "cpu", 64),
        rates=Rates("loopback", "cpu", 2, 3e6, 6e9),
    )
    assert tuned.launch_as_json(found.launches[0]) == LAUNCH


def test_commands_say_which_file_is_used_and_from_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    assert f"tuned: none: {tuned.path_here()} is not there" in capsys.readouterr().out
    path = written()
    for command in (["plan"], ["plan", "--kv", "--layers=2"], ["doctor", "--no-writes"]):
        main(command)
        printed = capsys.readouterr().out
        assert f"{path}, measured 2026-11-25T08:00:00+00:00: 1 launch shapes" in printed, command


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "0.0.1"}, "it was measured with version 0.0.1, this is"),
        ({"letter": "x"}, "it was measured with letter x"),
        ({"machine": {"gpu": "NVIDIA H200", "gpus": 8, "nics": ""}}, "on 8 x NVIDIA H200"),
    ],
    ids=["version", "letter", "machine"],
)
def test_a_file_of_another_build_or_machine_is_ignored_with_a_line(
    change: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert tuned.find() == tuned.find() == Tuned()
    logged = capfd.readouterr().err
    assert logged.count(f"{path} is ignored: ") == 1
    assert why in logged
    assert "is of another build or machine" in tuned.describe()


def test_a_file_that_is_named_and_not_there_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_P2P_TUNED", "/nowhere/tuned.json")
    assert tuned.find() == Tuned()
    assert "MOE_P2P_TUNED names /nowhere/tuned.json, which is not there" in capfd.readouterr().err
    monkeypatch.setenv("MOE_P2P_TUNED", "none")
    assert tuned.find() == Tuned()
    assert tuned.describe() == "not used: MOE_P2P_TUNED=none"


def changed(**fields: Any) -> str:
    data = {**tuned.build(), "machine": tuned.machine()._asdict(), "measured": "now"}
    return json.dumps(data | SECTIONS | fields)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (lambda: "{", "Expecting property name"),
        (lambda: "[]", "not an object"),
        (lambda: changed(bulk={"few": 64}), "KeyError: 'above'"),
        (lambda: changed(bulk={"few": 300, "above": 0, "blocks": 0}), "few is 300"),
        (lambda: changed(bulk={"few": 64, "above": 100, "blocks": 8}), "above is 100"),
        (lambda: changed(bulk={"few": 64, "above": 511, "blocks": 100}), "with 100 blocks"),
        (lambda: changed(rates=RATES | {"bytes_per_s": "fast"}), "bytes_per_s is 'fast'"),
        (
            lambda: changed(launches=[LAUNCH | {"shape": SHAPE | {"token_workers": 3}}]),
            "256 threads are not 3 workers",
        ),
    ],
)
def test_a_broken_file_is_an_error_that_says_what_to_do(text: Any, why: str) -> None:
    path = tuned.path_here()
    path.parent.mkdir(parents=True)
    path.write_text(text())
    with pytest.raises(InvalidArgumentError) as raised:
        tuned.find()
    message = str(raised.value)
    assert str(path) in message
    assert why in message
    assert "delete it, or measure anew with `python -m moe_p2p tune`" in message
    assert tuned.describe() == f"{tuned.BROKEN}: {message}"
    report = examine.examine(writes=False)
    assert [each.what for each in judge.judge(report)].count(report.tuned) == 1


# --- who uses it ---


def parts_of(rank: Rank, mine: list[Tuned], explicit: list[int | None]) -> Shared:
    _this.tuned = mine[rank.rank]
    more = {} if explicit[rank.rank] is None else {"part_bytes": explicit[rank.rank]}
    with cases.make(rank, ranks_per_node=1, **more) as comm:
        return comm._communicator._shared


_this = threading.local()


@pytest.fixture(name="by_rank")
def _found_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads of this process find different files."""
    monkeypatch.setattr(tuned, "find", lambda: getattr(_this, "tuned", Tuned()))


@pytest.mark.usefixtures("by_rank")
def test_what_ranks_do_alike_is_what_rank_0_has_measured() -> None:
    mine = [
        Tuned(parts=Parts("loopback", "cpu", 64), bulk=BulkSteps(64, 511, 40)),
        Tuned(parts=Parts("loopback", "cpu", 4096), bulk=BulkSteps(256)),
    ]
    found = run_threads(2, parts_of, mine, [None, None])
    assert found == [Shared(BulkSteps(64, 511, 40), 64)] * 2
    found = run_threads(2, parts_of, [Tuned(), mine[1]], [None, None])
    assert [shared.part_bytes for shared in found] == [None, None]
    run_threads(2, parts_of, mine, [0, 0])  # what is given goes first


@pytest.mark.usefixtures("by_rank")
def test_ranks_that_are_given_other_values_are_refused_by_name() -> None:
    mine = [Tuned(parts=Parts("loopback", "cpu", 64))] * 2
    errors = run_threads(2, parts_of, mine, [None, 4096], return_errors=True)
    for error in errors:
        assert isinstance(error, MoeP2pError)
        assert "part_bytes differs between ranks: rank 0 has 64, rank 1 has 4096" in str(error)


def test_parts_of_another_transport_or_memory_are_not_used() -> None:
    found = Tuned(parts=Parts("loopback", "cpu", 64))
    assert found.shared("loopback", "cpu")[-1] == 64
    assert found.shared("verbs", "cpu")[-1] == found.shared("loopback", "cuda")[-1] == -1
    assert tuned.transport_name("loopback", "seed=7,gbps=400,proxy_cpu=2") == "loopback gbps=400"


def test_long_steps_take_the_blocks_that_were_best() -> None:
    shared = Shared(BulkSteps(64, 511, 40), 4096)
    config = AllToAllConfig(**JOB, chunk_tokens=512)
    assert shared.on_gpu(config, 8, 8, "verbs").num_sms == 40
    assert shared.on_gpu(config, 8, 8, "verbs").part_bytes == 4096
    assert shared.on_gpu(config, 8, 4, "verbs").num_sms is None, "nodes are not reached in bulk"
    short = AllToAllConfig(**JOB, chunk_tokens=511)
    assert shared.on_gpu(short, 8, 8, "verbs").num_sms is None
    given = AllToAllConfig(**JOB, chunk_tokens=512, num_sms=132, part_bytes=0)
    assert shared.on_gpu(given, 8, 8, "verbs") == given, "what is given goes first"
    masked = AllToAllConfig(**JOB, mask_lost_ranks=True)
    assert shared.on_gpu(masked, 8, 8, "verbs").num_sms is None
    # The format of rows follows from rank 0's number: ranks of both kinds are refused from 65 on.
    few = AllToAllConfig(**JOB, chunk_tokens=100, num_sms=24, device="cuda")
    assert few.agreed()["num_sms"] == "any"
    assert few.agreed(shared.bulk)["num_sms"] == "few"


def test_kv_links_are_as_measured() -> None:
    with Engine() as engine:
        assert kv.link_of(engine).name == "the software NIC"
        written()
        link = kv.link_of(engine)
        assert (link.writes_per_s, link.bytes_per_s, link.small_row_bytes) == (3e6, 6e9, 2000)
        written(rates=RATES | {"transport": "verbs"})
        assert kv.link_of(engine).name == "the software NIC"
        nic = measured_link()
        assert nic is not None
        assert nic.name == "verbs as measured"
        assert nic.why_packed(1024), "packed below 2,000 B"


# --- what is chosen ---


def test_less_than_noise_changes_nothing() -> None:
    assert best({"a": 100.0, "b": 98.5}, "a") == "a"
    assert best({"a": 100.0, "b": 97.0, "c": 97.5}, "a") == "b"


def test_the_step_from_which_on_bulk_wins() -> None:
    few = [(32, 10.0, 14.0), (64, 20.0, 19.0), (128, 40.0, 30.0), (256, 80.0, 50.0)]
    assert steps.last_without_bulk(few) == 32
    assert steps.last_without_bulk([(32, 9.0, 8.0), (64, 20.0, 10.0)]) == 16, "half of the shortest"
    even = [(tokens, 10.0, 10.1) for tokens in (32, 64, 128, 256)]
    assert steps.last_without_bulk(even) == 128, "as shipped"
    never = [(tokens, 10.0, 20.0) for tokens in (32, 64, 128, 256)]
    assert steps.last_without_bulk(never) == BULK_STEP
    spans = {512: {0: 10.0, 24: 11.0, 40: 10.5}, 4096: {0: 80.0, 24: 90.0, 40: 70.0}}
    assert steps.first_with_bulk(spans) == (4095, 40)
    assert steps.first_with_bulk({512: {0: 10.0, 24: 11.0}}) == (0, 0)
    assert steps.first_with_bulk(spans | {512: {0: 10.0, 24: 9.0, 40: 9.5}}) == (511, 40)


@pytest.mark.parametrize("row_bytes", [2048, 7168, 14336, 28672])
@pytest.mark.parametrize("tokens", [8, 32, 128, 256, 512, 4096])
@pytest.mark.parametrize("num_sms", [None, 24])
def test_shapes_that_are_tried_can_be_launched(
    row_bytes: int, tokens: int, num_sms: int | None
) -> None:
    for adds in (False, True):
        job = Job(adds, False, False, many_ranks=True, ranks=8)
        tried = shapes.alternatives(row_bytes, tokens, num_sms, job, 132)
        assert 1 <= len(tried) <= 8
        for shape in tried:
            each = {"kernel": "dispatch", "few": False, "ranks": 8, "row_bytes": row_bytes}
            more = {"least_tokens": 1, "most_tokens": 16, "shape": shape._asdict()}
            assert tuned._launch(each | more).shape == shape
            assert shape.block_threads * shape.blocks_per_sm <= 2048
    assert num_threads(row_bytes) <= 512


def test_classes_of_steps_meet() -> None:
    ends = [shapes.class_of(tokens) for tokens in (1, 17, 33, 129, 257, 513)]
    assert ends[0][0] == 1
    assert [low for low, _ in ends[1:]] == [high + 1 for _, high in ends[:-1]]
