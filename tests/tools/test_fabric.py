"""`python -m moe_p2p fabric-check`: on two hosts that are network namespaces, and its pieces."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from moe_p2p.__main__ import main
from moe_p2p.bench import fabric, fabric_predicted, fabric_rails, fabric_report
from moe_p2p.bench.fabric_private import Private
from moe_p2p.bench.fabric_ranks import Ended
from moe_p2p.tools.model.wire import NICS
from tests.support import hosts, warm
from tests.support.programs import program, until
from tests.tools import test_bench_hosts
from tests.tools.test_bench_hosts import launched, torchrun

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--quick", "--device=cpu", "--hidden=256", "--topk=2", "--experts=8", "--tokens=4,8")
# Planted: none of these may stand in what is sent back.
SECRET, USER, HOST = "hf-Zx81-planted", "jdoe.planted", "gpu-planted-7"
PLANTED = {
    "HF_TOKEN": SECRET,
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}/aws",
    "NCCL_AUTH_KEY": f"{SECRET}+nccl",
    "USER": USER,
    "SLURMD_NODENAME": HOST,
    "SLURM_JOB_NODELIST": f"{HOST},{HOST}b",
    "NCCL_TOPO_FILE": f"/home/{USER}/topology.xml",
    "NCCL_IB_HCA": "mlx5_0",
    "MOE_P2P_KV_STORE": f"{HOST}c:29500",
    "RES_OPTIONS": "attempts:0",  # no name server is asked in the namespaces
}
FAILS = f"""
print("log in as {USER}@{HOST}.cluster.example.com with {SECRET}, MAC 02:00:0a:4d:00:07")
raise RuntimeError("{HOST} [fe80::1ff:fe23:4567:890a]:4791 and 10.77.0.2:2049 refuse {USER}")
"""
THEIRS = """
from moe_p2p import deep_ep as ours
topk_idx_t = ours.topk_idx_t
class Buffer(ours.Buffer):
    "DeepEP's calls V1, of another package."
__version__ = "1.2.test"
"""
ADDRESS = re.compile(r"10\.77\.\d+\.\d+|fe80:|02:00:0a")


def quick(
    out: Path, monkeypatch: pytest.MonkeyPatch, *more: str, status: int
) -> tuple[str, dict[str, Any]]:
    """A run on two hosts: its output, and the bundle."""
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(test_bench_hosts, "DEADLINE_S", 500.0)
    arguments = ("fabric-check", *SMALL, f"--out={out}", *more)
    (first, printed), (second, other) = test_bench_hosts.run_on_two_hosts("moe_p2p", *arguments)
    assert (first != 0, second) == (status != 0, 0), printed + other
    assert status == 0 or f"exitcode: {status}" in printed
    with tarfile.open(out / "bundle.tar.gz") as archive:
        assert archive.getnames() == ["bundle.json", "report.html"]
        assert {(member.uname, member.mtime) for member in archive.getmembers()} == {("", 0)}
        files = [file.read().decode() for name in archive if (file := archive.extractfile(name))]
    page = (out / "report.html").read_text()
    assert page == files[1]
    for text in files:
        for planted in (SECRET, USER, HOST, os.uname().nodename):
            assert not re.search(rf"(?<!\w){re.escape(planted)}(?!\w)", text, re.I), planted
        assert not ADDRESS.search(text)
    return printed, json.loads(files[0])


@pytest.mark.timeout(600)
def test_rails_and_pairs_of_two_hosts_and_a_package_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "other" / "deep_ep"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(FAILS)
    only = ("--only=facts,rails,pairs,deep_ep", f"--beside=theirs={module.parent}")
    printed, body = quick(tmp_path / "out", monkeypatch, *only, status=2)
    ended = {step["name"]: (step["how"], step["why"]) for step in body["steps"]}
    assert ended["facts of each host"] == ("done", "")
    assert ended["each rail by the engine"] == ("done", "")
    assert ended["dispatch and combine beside gloo (NCCL needs GPUs)"] == ("done", "")
    assert ended["DeepEP's calls beside deep_ep"][0] == "left out"
    assert ended["DeepEP's calls beside UCCL"] == ("left out", "uccl is not installed")
    how, why = ended["DeepEP's calls beside theirs"]
    assert (how, why) == (
        "failed",
        "RuntimeError: host [address]:4791 and address:2049 refuse user",
    )
    assert "failed" in printed

    rails = body["rails"]
    assert [(row["rank"], row["peer"], row["way"], row["nics"]) for row in rails] == [
        (rank, (rank + 2) % 4, way, nics)
        for rank in range(4)
        for way, nics in (
            ("alone", ["eth0"]),
            ("alone", ["eth1"]),
            ("together", ["eth0", "eth1"]),
        )
    ]
    for row in rails:
        assert (row["problem"], row["provider"], row["memory"]) == ("", "libfabric", "cpu")
        assert {*row["gbytes_per_s"]} == {"8192", "65536", "1048576"}
        assert all(rate > 0 for rate in row["gbytes_per_s"].values())
        assert (row["latency_us"] is None) == (row["way"] == "together")
        assert row["predicted"]["gbytes_per_s"][0] == 46.5  # of a ConnectX-7
        assert not row["comparable"]
    pairs = body["pairs"]
    assert {(row["system"], row["tokens"], row["ranks"], row["hosts"]) for row in pairs} == {
        (system, tokens, 4, 2) for system in ("moe_p2p", "torch") for tokens in (4, 8)
    }
    assert all(row["correct"] for row in pairs)
    assert all(bool(row["predicted"]) == (row["system"] == "moe_p2p") for row in pairs)

    assert len(body["facts"]) == 2
    assert body["facts"][0]["settings"]["NCCL_IB_HCA"] == "mlx5_0"
    assert body["facts"][0]["settings"]["NCCL_TOPO_FILE"] == "/home/user/topology.xml"
    assert not {"NCCL_AUTH_KEY", "MOE_P2P_KV_STORE"} & body["facts"][0]["settings"].keys()
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<svg") == 3
    assert "<script" not in page
    tables_of(tmp_path / "out/bundle.tar.gz", monkeypatch)


def tables_of(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = bundle.parent / "all.json"
    monkeypatch.setattr(sys, "argv", ["fabric_bundles", str(bundle), f"--json={out}"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks/fabric_bundles.py"), run_name="__main__")
    assert ended.value.code == 0
    (body,) = json.loads(out.read_text()).values()
    assert len(body["rails"]) == 12


@pytest.mark.more  # its steps are the test's above, and test_bench_check.py's
@pytest.mark.timeout(600)
def test_the_whole_of_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "other" / "deep_ep"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(THEIRS)
    beside = f"--beside=theirs={module.parent}"
    printed, body = quick(tmp_path / "out", monkeypatch, beside, status=0)
    assert {step["how"] for step in body["steps"]} == {"done", "left out"}
    step = body["steps"][-1]
    assert step["name"] == "DeepEP's calls beside theirs"
    assert re.fullmatch("deep_ep v2: this deep_ep has no V2.*", step["why"])
    found = {(row["system"], row["interface"]) for row in body["pairs"]}
    assert {("deep_ep", "low-latency"), ("deep_ep", "normal"), ("moe_p2p", "v2")} <= found
    assert ("deep_ep", "v2") not in found
    assert {row["beside"] for row in body["pairs"]} == {"", "theirs 1.2.test"}
    lines = {line["name"]: line["how"] for line in body["check"]}
    assert len(lines) > 65
    assert lines["a process that is killed is named"].startswith("ok, ")
    assert lines["graphs"] == "skipped: ranks are on CPUs"
    assert "host-1 is " in printed
    assert body["wrong"] == []


@pytest.mark.timeout(200)
def test_a_step_that_fails_hangs_or_dies_is_not_the_end() -> None:
    command = torchrun("--standalone", "-m", "tests.support.fabric_steps")
    done = warm.run(
        *command, cwd=ROOT, capture_output=True, text=True, timeout=180, env=os.environ.copy()
    )
    lines = re.findall(r"^ENDED (.*)$", done.stdout, re.M)
    ended = {(step, rank): rest for step, rank, *rest in map(json.loads, lines)}
    assert len(ended) == 8, done.stdout + done.stderr
    assert ended["well", 0][:2] == ["done", "last [0, 1]"]
    assert [ended["raises", rank][0] for rank in (0, 1)] == ["stopped", "failed"]
    assert "RuntimeError: no such fabric, as gone knows" in ended["raises", 1][2]
    assert [ended["hangs", rank][0] for rank in (0, 1)] == ["late", "late"]
    for number in re.findall(r"process ([1-9]\d*)", ended["hangs", 0][2]):
        until(lambda number=number: not Path(f"/proc/{number}").exists(), "a process stays")  # type: ignore[misc]
    assert ended["killed", 0][0] == "failed"
    assert ended["killed", 1][0] in ("failed", "stopped")


def test_a_signal_as_a_line_is_printed_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    run = fabric.Run(fabric._parse([*SMALL, f"--out={tmp_path}"]), 2)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    ended = [Ended(how=fabric.DONE, value=value) for value in ({"doctor": {"nics": []}}, {})]
    first = next(fabric._steps(run._options))
    monkeypatch.setattr(fabric, "print", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        run._take(first, ended)
    assert run._body("")["facts"] == [ended[0].value]
    assert [step.kind for step in run._steps] == ["facts"]


@pytest.mark.timeout(200)
def test_ctrl_c_leaves_the_report_of_what_was_measured(tmp_path: Path) -> None:
    arguments = ("-m", "moe_p2p", "fabric-check", *SMALL, f"--out={tmp_path}")
    with program(*torchrun("--standalone", *arguments)) as running:
        running.wait_for("[1/6] facts of each host")  # a whole line: the step has ended
        os.killpg(running.process.pid, signal.SIGINT)
        running.process.communicate(timeout=120)
        running.wait_until_gone()
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        file = archive.extractfile("bundle.json")
        assert file is not None
        body = json.load(file)
    assert body["interrupted"] == "interrupted by SIGINT"
    assert [(step["kind"], step["how"]) for step in body["steps"]] == [
        ("facts", "done"),
        ("check", "interrupted"),
    ]
    assert len(body["facts"]) == 1
    assert (
        "correctness: interrupted; interrupted by SIGINT" in (tmp_path / "report.html").read_text()
    )


PRIVATE = Private(["p4ss", "ab"], ["joe", "prod"], [["n1.hpc", "n1", "meet:80"], ["nodeb", "meet"]])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("10.77.0.1:29500, [fe80::1%eth0]:80", "address:29500, [address%eth0]:80"),
        ("::ffff:10.0.0.1 2001:db8::1 fe80::dead:beef", "address address address"),
        ("c8:7e:11:22:33:44 b859:9f03:00aa:1234", "address address"),
        ("joe@n1.hpc /home/anna/x NODEB meet", "user@host-0 /home/user/x host-1 host"),
        (
            "p4ssword ab abc n1 n12 n1_x prod products",
            "secretword secret abc host-0 n12 host-0_x user products",
        ),
        ("a.example.com ip-10-0-1-2 GPU-1234abcd-56", "host host GPU-id"),
        ("hf_abcdefghijk eyJhbGciOiJ.x", "secret secret"),
        # Not private: places of PCI, times, versions, names of C++.
        ("0000:18:00.0 12:30:05 1.17.0", "0000:18:00.0 12:30:05 1.17.0"),
        (
            "1.14.44.0 /usr/lib/libibverbs.so.1.14.44.0",
            "1.14.44.0 /usr/lib/libibverbs.so.1.14.44.0",
        ),
        ("moe_p2p::engine std::dead 99:", "moe_p2p::engine std::dead 99:"),
    ],
)
def test_what_is_private_goes_and_the_rest_stays(text: str, left: str) -> None:
    assert PRIVATE.text(text) == left
    assert PRIVATE.all_of({text: [text, 1, None]}) == {left: [left, 1, None]}


def test_lines_of_a_check_are_found_among_log_lines() -> None:
    output = (
        "moe_p2p warning [pid 1] tcp\npadded, bf16 ... ok, 0.4 s\n"
        "a process that is killed is named ... [W] a line\nmoe_p2p warning\nok, 9.9 s\n"
        "graphs ... skipped: ranks are on CPUs\nby_rank ... WRONG, 1.0 s\n         rank 1: y\n"
    )
    assert [(line["name"], line["how"], line["wrong"]) for line in fabric._lines(output)] == [
        ("padded, bf16", "ok, 0.4 s", False),
        ("a process that is killed is named", "ok, 9.9 s", False),
        ("graphs", "skipped: ranks are on CPUs", False),
        ("by_rank", "WRONG, 1.0 s", True),
    ]


def test_what_a_check_and_a_package_report_is_in_the_report(tmp_path: Path) -> None:
    options = fabric.Options(
        quick=True,
        minutes=None,
        device="cpu",
        out=str(tmp_path),
        only=(),
        beside={},
        sizes={},
    )
    with pytest.MonkeyPatch.context() as patch:
        launched(patch, ranks=2, local=1)
        run = fabric.Run(options, 2)
        output = "padded ... WRONG, 1.0 s\nWRONG: padded: rank 1: other rows\n"
        rest = Ended(how="done")
        check = fabric.Step("check", "correctness", fabric.checked, [])
        run._take(check, [Ended(how="done", output=output, value=1), rest])
        calls = fabric.Step("deep_ep", "theirs", fabric.timed_pairs, ("", "", []))
        value = {"rows": []}
        run._take(calls, [Ended(how="done", output="deep_ep normal: no IB\n", value=value), rest])
        assert run.finish("") == 1
    page = (tmp_path / "report.html").read_text()
    assert "padded: rank 1: other rows" in page
    assert "deep_ep normal: no IB" in page


def test_minutes_move_deadlines_and_what_is_measured_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over soft-RoCE in an emulated machine every step was late."""
    launched(monkeypatch, ranks=2, local=1)
    quick, slow, soon = (
        fabric._parse([*SMALL, f"--out={tmp_path}", *more]).limits
        for more in ([], ["--minutes=20"], ["--minutes=1"])
    )
    assert (slow.total_s, slow.of_step["check"], slow.wait_s) == (1200.0, 700.0, 100.0)
    assert (soon.total_s, soon.of_step["check"], soon.wait_s) == (60.0, 35.0, 10.0)
    for moved in (slow, soon):
        same = {name: getattr(quick, name) for name in ("total_s", "of_step", "wait_s")}
        assert moved._replace(**same) == quick


class Requests:
    """An engine whose requests each take so long, by a clock that stands in between."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.now, self.pages = takes_s, 0.0, list[int | None]()

    def write(self, *_: object, nbytes: int) -> Requests:
        return self

    def write_pages(self, *_: object, imm: int | None, **__: object) -> Requests:
        self.pages.append(imm)
        return self

    def wait(self, _: float) -> None:
        self.now += self.takes_s


@pytest.mark.parametrize(("takes_s", "requests"), [(0.9, 3), (0.01, 1 + 50 + 3 + 1)])
def test_a_rail_that_is_slow_is_sent_few_requests(
    takes_s: float, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a figure of it takes nine times a request, and waits of others pass their deadline."""
    lane, engine = object.__new__(fabric_rails.Lane), Requests(takes_s)
    given = fabric_rails.Given("cpu", [1024], 4096, 1.0, 10.0)
    known = {"_given": given, "_timeout_s": 10.0, "peer": 1, "engine": engine, "_source": None}
    for name, value in {**known, "_regions": {1: None}}.items():
        setattr(lane, name, value)
    monkeypatch.setattr(fabric_rails.time, "perf_counter", lambda: engine.now)
    assert lane.stream(1024, 0.5) == pytest.approx(4096 / takes_s / 1e9)
    assert len(engine.pages) == requests
    assert engine.pages[-1] == fabric_rails.LAST


def row(**more: Any) -> dict[str, Any]:
    sizes = {"ranks": 16, "ranks_per_node": 8, "hidden": 7168, "topk": 8, "experts": 256}
    base = {"system": "moe_p2p", "interface": "", "what": "pair graph", "tokens": 128}
    return base | sizes | more


def test_predictions_have_intervals_and_verdicts() -> None:
    nic = NICS["cx7"]
    middle, least, most = fabric_predicted.of_pair(row(), nic) or []
    apart = [
        fabric_predicted.of_pair(row(what=what), nic) or [] for what in ("dispatch", "combine")
    ]
    assert [middle, least, most] == pytest.approx([sum(each) for each in zip(*apart, strict=True)])
    assert middle - least == pytest.approx(most - middle)
    assert middle - least >= 16.0
    theirs = fabric_predicted.of_pair(row(system="deep_ep", interface="low-latency"), nic)
    assert theirs is not None
    assert theirs[0] > most  # DeepEP V1's pair is slower
    for other in ({"system": "torch"}, {"what": "layer graph"}, {"what": "dispatch send"}):
        assert fabric_predicted.of_pair(row(**other), nic) is None
    for value, word in ((least - 1, "below"), (middle, "within"), (most + 1, "above")):
        assert fabric_predicted.verdict(value, [middle, least, most], comparable=True) == word
    assert fabric_predicted.verdict(middle, [middle, least, most], comparable=False) == ""


def test_a_report_without_figures_says_so_and_quotes_what_it_shows(tmp_path: Path) -> None:
    step = {"kind": "rails", "name": "rails", "how": "late", "rank": 3, "seconds": 9.0}
    body = {
        "format": 1, "version": "0", "made": "", "options": {"quick": True}, "hosts": 2,
        "ranks": 16, "seconds": 1.0, "interrupted": "", "model": {"nic": "cx7", "gbps": 400},
        "steps": [step | {"why": "<b>late</b>", "output": "<script>x</script>"}],
        "facts": [], "check": [], "rails": [], "pairs": [], "wrong": [],
    }  # fmt: skip
    fabric_report.write(body, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "nothing was checked; rails: late" in page
    assert "&lt;script&gt;x" in page
    assert "<script" not in page
    assert "<b>late" not in page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--beside=theirs"], "--beside theirs: give LABEL=FOLDER"),
        (["--only=rails,x"], "x is none of facts, check, rails, pairs, deep_ep"),
        (["--minutes=0"], "--minutes: "),
        (["--out=/proc/x"], "--out: /proc/x/report.html cannot be written"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launched(monkeypatch, ranks=2, local=1)
    with pytest.raises(SystemExit):
        main(["fabric-check", "--device=cpu", *arguments])
    assert text in capsys.readouterr().err


def test_without_a_launcher_it_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        main(["fabric-check"])
    assert "torchrun --nnodes 2 --nproc-per-node 8" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}'])
def test_what_is_no_bundle_is_refused(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    (tmp_path / "bundle.json").write_text(text)
    with tarfile.open(bundle, "w:gz") as archive:
        archive.add(tmp_path / "bundle.json", "bundle.json")
    monkeypatch.setattr(sys, "argv", ["fabric_bundles", str(bundle)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks/fabric_bundles.py"), run_name="__main__")
    assert ended.value.code == 2
    assert str(bundle) in capsys.readouterr().err
