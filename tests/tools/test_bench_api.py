"""`bench --api deep_ep` on a tiny job over CPU ranks: ours, AllToAll and another module."""

from __future__ import annotations

import importlib.util
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_p2p.reference import Tokens
from moe_p2p.tools.bench import api_worker, command, gpu_timing
from moe_p2p.tools.bench.api_report import ApiRow, HostTime, plot, table
from moe_p2p.tools.bench.cases import make_job
from moe_p2p.tools.bench.gpu_calls import Calls
from moe_p2p.tools.bench.gpu_measure import Timed
from moe_p2p.tools.bench.options import INTERFACES, INTERFACES_ON_CUDA, Options, parse

TINY = ["--api=deep_ep", "--device=cpu", "--ranks=2", "--hidden=512", "--topk=2", "--experts=4"]
TINY += ["--seconds=0.05", "--plot="]


def test_checks_and_measures_every_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    assert command.main([*TINY, f"--json={out}"]) == 0
    rows = json.loads(out.read_text())
    systems = ("moe_p2p", "moe_p2p.deep_ep")
    assert [(r["interface"], r["tokens"], r["system"], r["what"]) for r in rows] == [
        (interface, tokens, system, what)
        for interface, counts in INTERFACES.items()
        for tokens in counts
        for system in systems
        for what in ("pair eager", "dispatch", "combine")
    ]
    for row in rows:
        assert row["correct"] is True
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
        assert row["host_us"] is row["host_alone_us"] is None
        assert (row["dtype"], row["device"], row["hidden"]) == ("fp8", "cpu", 512)
    assert "low-latency" in capsys.readouterr().out


def test_another_module_runs_beside_ours_and_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    arguments = [
        *TINY,
        "--tokens=4",
        "--dtype=bf16",
        "--deep-ep-module=tests.support.fakes.deep_ep",
    ]
    assert command.main([*arguments, f"--json={out}"]) == 1  # a figure that is not correct
    rows = json.loads(out.read_text())
    right = {(r["interface"], r["system"]): r["correct"] for r in rows}
    others = ("moe_p2p", "moe_p2p.deep_ep")
    assert right == {
        **{(interface, system): True for interface in INTERFACES for system in others},
        ("low-latency", "tests.support.fakes.deep_ep"): False,
        ("normal", "tests.support.fakes.deep_ep"): True,
    }
    printed = capsys.readouterr()
    assert "tests.support.fakes.deep_ep v2: this deep_ep has no V2" in printed.out
    assert "WRONG: tests.support.fakes.deep_ep low-latency" in printed.err


def test_calls_that_are_right_only_while_they_are_checked_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, module = tmp_path / "rows.json", "tests.support.fakes.lazy_deep_ep"
    arguments = [*TINY, "--tokens=4", f"--deep-ep-module={module}", f"--json={out}"]
    assert command.main(arguments) == 1
    wrong = {(r["interface"], r["system"]) for r in json.loads(out.read_text()) if not r["correct"]}
    assert wrong == {("low-latency", module)}
    assert "WRONG: " in capsys.readouterr().err


def test_defaults_are_those_of_the_targets() -> None:
    (options,) = parse(["--api", "deep_ep", "--device", "cpu"])
    assert (options.dtype, options.ranks_per_node, options.tokens) == ("fp8", options.ranks, ())
    assert INTERFACES_ON_CUDA["low-latency"] == (8, 32, 128)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--deep-ep-module=x"], "--deep-ep-module is for --api deep_ep"),
        (["--api=deep_ep", "--deep-ep-module=no.such"], "no module is named no.such"),
        (["--api=deep_ep", "--dtype=fp16"], "DeepEP's calls take fp8 and bf16"),
        (["--api=deep_ep", "--ranks-per-node=2"], "ranks of this machine are one node"),
    ],
)
def test_refuses_what_makes_no_sense(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device=cpu", *arguments])
    assert text in capsys.readouterr().err


def test_host_time_is_of_pairs_in_a_row_and_of_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host whose first two pairs after it has waited take longer."""
    now, waited, since = 0.0, 0, 0

    def synchronize() -> None:
        nonlocal waited, since
        waited, since = waited + 1, 0

    def dispatch() -> None:
        nonlocal now, since
        now += 50e-6 if since < 2 else 3e-6
        since += 1

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(api_worker.dist, "barrier", lambda: None)
    monkeypatch.setattr(api_worker.dist, "all_reduce", lambda spans, _: spans.add_(1))
    monkeypatch.setattr(api_worker.time, "perf_counter", lambda: now)
    calls = Calls(system="any", dispatch=dispatch, combine=lambda: None, capturable=False)
    other = replace(calls, dispatch=lambda: None)
    hosts = api_worker._host_times([calls, other])
    assert hosts[calls] == HostTime(us=4.0, alone_us=51.0)  # the slowest rank's is 1 us more
    assert hosts[other] == HostTime(us=1.0, alone_us=1.0)
    rounds = gpu_timing.MIN_ROUNDS + 1  # all_reduce says that one takes a second
    assert waited == 2 * (2 * rounds + 1)


def a_row(what: str = "dispatch") -> ApiRow:
    (options,) = parse(["--api=deep_ep", "--device=cpu", "--tokens=4"])
    calls = Calls(system="ours", dispatch=int, combine=int, capturable=False)
    timed = Timed(calls=calls, what=what, chain=1, spans_us=torch.tensor([7250.0]))
    host = HostTime(us=12.5, alone_us=90.0)
    return ApiRow.of(options, make_job(options), "normal", timed, host=host, story=[])


def test_the_table_has_both_host_times() -> None:
    row = replace(a_row(), device="a GPU")
    head, line = (text.split() for text in table([row]).splitlines())
    assert head[-4:] == ["host", "host", "alone", "correct"]
    assert line[-3:] == ["12.5", "90.0", "yes"]
    assert (row.as_json()["host_us"], row.as_json()["host_alone_us"]) == (12.5, 90.0)


def test_on_cpus_the_table_has_milliseconds_and_no_columns_of_gpus() -> None:
    head, line = (text.split() for text in table([a_row()]).splitlines())
    assert head == ["calls", "T", "system", "pair", "eager", "dispatch", "combine", "correct"]
    assert line == ["normal", "4", "ours", "-", "7.25", "-", "yes"]


def test_the_plot_has_a_bar_for_each_system(tmp_path: Path) -> None:
    pair = a_row("pair eager")
    rows = [pair, replace(pair, system="theirs"), replace(pair, interface="v2"), a_row()]
    reason = plot(rows, tmp_path / "rows.png")
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "rows.png").stat().st_size > 10_000
    else:
        assert reason is not None
        assert reason.startswith("matplotlib is not installed")


@pytest.mark.parametrize("interface", INTERFACES)
def test_direct_calls_get_and_return_what_those_of_deep_ep_do(
    interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    class System:
        all_to_all = None
        close = int

        def __init__(self, *_: object, **__: object) -> None: ...

    def made(_: object, options: Options, tokens: Tokens, **__: object) -> str:
        asked[interface] = options.layout, tokens.x.dtype, tokens.scales is not None
        return "calls"

    (options,) = parse(["--api=deep_ep", "--device=cpu", "--tokens=4", "--hidden=256"])
    job = make_job(options)
    monkeypatch.setattr(api_worker, "MoeP2p", System)
    monkeypatch.setattr(api_worker, "package_calls", made)
    monkeypatch.setattr(api_worker.dist, "get_rank", lambda: 0)
    for name in ("verify_whole", "verify_by_rank"):
        monkeypatch.setattr(api_worker, name, lambda *_: [])
    with ExitStack() as stack:
        tokens = job.tokens_of(0, 0, 4)
        api_worker._all_to_all(options, job, tokens, stack, interface=interface, num_sms=None)
    given = ("padded", torch.bfloat16, False)
    assert asked[interface] == (
        given if interface == "low-latency" else ("by_rank", torch.float8_e4m3fn, True)
    )
