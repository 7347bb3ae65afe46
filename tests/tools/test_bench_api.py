"""`bench --api deep_ep` on a tiny job over CPU ranks: ours, AllToAll and another module."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p.bench import clocks, command, contestants
from moe_p2p.bench.cases import make_job
from moe_p2p.bench.clocks import HostTime
from moe_p2p.bench.contestants import Entry
from moe_p2p.bench.gpu_calls import Calls
from moe_p2p.bench.options import INTERFACES, INTERFACES_ON_CUDA, Options, parse
from moe_p2p.bench.plot import lines, plot
from moe_p2p.bench.report import Machine, Row, table
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools import gpu_timing
from tests.support.recorded import assert_keys
from tests.tools.test_bench_report import row as made

TINY = ["--api=deep_ep", "--device=cpu", "--ranks=2", "--hidden=512", "--topk=2", "--experts=4"]
TINY += ["--seconds=0.05", "--plot="]


def test_checks_and_measures_every_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    assert command.main([*TINY, f"--json={out}"]) == 0
    rows = json.loads(out.read_text())
    assert_keys("deep_ep", rows)
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


def test_calls_that_are_right_only_while_they_are_checked_are_reported(
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
        (["--api=deep_ep", "--ranks-per-node=2"], "ranks of a host are one node"),
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
    monkeypatch.setattr(clocks.dist, "barrier", lambda: None)
    monkeypatch.setattr(clocks.dist, "all_reduce", lambda spans, _: spans.add_(1))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now)

    class Adding:
        """A tensor whose launches take 2.5 us."""

        def add_(self, _: int) -> None:
            nonlocal now
            now += 2.5e-6

    monkeypatch.setattr(clocks.torch, "zeros", lambda *_, **__: Adding())
    calls = Calls(system="any", dispatch=dispatch, combine=lambda: None, capturable=False)
    other = replace(calls, dispatch=lambda: None)
    hosts = clocks.host_times([calls, other])
    # The slowest rank's is 1 us more.
    assert hosts[calls] == HostTime(us=4.0, adds_us=6.0, alone_us=51.0)
    assert hosts[other] == HostTime(us=1.0, adds_us=6.0, alone_us=1.0)
    rounds = gpu_timing.MIN_ROUNDS + 1  # all_reduce says that one takes a second
    assert waited == (3 * rounds + 1) + (2 * rounds + 1)


def a_row(what: str, p50_us: float = 7250.0, **changes: object) -> Row:
    shape = {"ranks_per_node": 4, "tokens": 4, "interface": "normal", "chunk_tokens": 0}
    return made(what, p50_us, **shape | changes)


def test_the_table_has_both_host_times() -> None:
    one = a_row("pair eager", system="ours", host_us=12.5, adds_us=10.0, host_alone_us=90.0)
    head, line = (text.split() for text in table([one]).splitlines())
    assert head[0] == "calls"
    assert line[0] == "normal"
    assert head[-8:] == ["host", "two", "add_", "of", "them", "host", "alone", "correct"]
    assert line[-5:] == ["12.5", "10.0", "1.25x", "90.0", "yes"]
    assert [one.as_json()[key] for key in ("host_us", "adds_us", "host_alone_us")] == [12.5, 10, 90]


def test_on_cpus_the_table_has_no_columns_of_gpus() -> None:
    cpu = {"machine": Machine.here(on_cuda=False, hosts=1), "floor_us": 0.0, "system": "ours"}
    rows = [a_row("pair eager", **cpu), a_row("dispatch", 4000.0, **cpu)]
    head, line = (text.split() for text in table(rows).splitlines())
    assert head == [
        "calls", "T", "system", "eager", "p50", "p90", "p99", "dispatch", "p90", "p99",
        "tokens/s", "correct",
    ]  # fmt: skip
    assert line == [
        "normal", "4", "ours", "7,250.0", "7,250.0", "7,251.0", "4,000.0", "4,000.0", "4,001.0",
        "2,207", "yes",
    ]  # fmt: skip


def test_the_plot_has_a_line_for_each_system(tmp_path: Path) -> None:
    pair = a_row("pair eager")
    rows = [pair, replace(pair, system="theirs"), replace(pair, interface="v2"), a_row("dispatch")]
    assert list(lines(rows)) == ["moe_p2p normal EP4", "theirs normal EP4", "moe_p2p v2 EP4"]
    reason = plot(rows, tmp_path / "rows.png")
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "rows.png").stat().st_size > 10_000
    else:
        assert reason is not None
        assert reason.startswith("matplotlib is not installed")


def test_each_kind_of_calls_has_a_panel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one, the legend of three kinds of three systems would hide their lines."""
    pair = a_row("pair eager")
    rows = [pair, replace(pair, system="theirs"), replace(pair, interface="v2"), a_row("dispatch")]
    panels = list[tuple[str, list[str]]]()

    def draw(_: Path, __: str, paint: Callable[[Any], None], **subplots: Any) -> None:
        unused = types.SimpleNamespace(remove=lambda: None)
        paint([[unused] * subplots["ncols"] for _ in range(subplots["nrows"])])

    def latency(_: object, *, series: dict[str, object], what: str) -> None:
        panels.append((what, list(series)))

    module = sys.modules[plot.__module__]
    monkeypatch.setattr(module, "draw", draw)
    monkeypatch.setattr(module, "_latency", latency)
    monkeypatch.setattr(module, "_part_of_push", lambda *_: None)
    plot(rows, Path("unused.png"))
    assert panels == [
        ("pair, normal calls", ["moe_p2p normal EP4", "theirs normal EP4"]),
        ("dispatch and combine apart, normal calls", ["moe_p2p normal EP4 dispatch"]),
        ("pair, v2 calls", ["moe_p2p v2 EP4"]),
    ]


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
    monkeypatch.setattr(contestants, "MoeP2p", System)
    monkeypatch.setattr(contestants, "package_calls", made)
    for name in ("verify_whole", "verify_by_rank"):
        monkeypatch.setattr(contestants, name, lambda *_: [])
    with ExitStack() as stack:
        entry = Entry(
            options=options,
            job=job,
            rank=0,
            tokens=job.tokens_of(0, 0, 4),
            layer=None,
            group=None,
            stack=stack,
            notes=[],
        )
        entry._all_to_all(interface, num_sms=None)
    given = ("padded", torch.bfloat16, False)
    assert asked[interface] == (
        given if interface == "low-latency" else ("by_rank", torch.float8_e4m3fn, True)
    )
