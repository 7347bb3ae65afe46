"""`python -m moe_p2p`: what is asked for wrongly is named before any rank starts."""

from __future__ import annotations

import argparse
import os
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from moe_p2p import env
from moe_p2p.__main__ import COMMANDS, main
from moe_p2p.bench import harness
from moe_p2p.tools import launch, option_types, output
from moe_p2p.tools.draw import draw
from moe_p2p.version import __version__
from tests.support import warm


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "a command is missing"), (["foo"], "'foo' is not a command"), (["-x"], "'-x' is not")],
)
def test_what_is_no_command_is_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    reported = capsys.readouterr()
    assert reported.err.splitlines()[-1].startswith(f"moe_p2p: {text}")
    assert reported.out == ""


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_what_is_no_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--tokens", "8,x"])
    assert "'8,x' is not a number, or several with commas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["accuracy", "--seed=99999999999999999999"], "--seed: '99999999999999999999' is not a"),
        (["bench", "--ranks=0"], "--ranks: '0' is not a whole number from 1"),
        (["bench", "--ranks-per-node=-2"], "--ranks-per-node: '-2' is not a whole number from 1"),
        (["bench", "--seconds=nan"], "--seconds: 'nan' is not a number above 0"),
        (
            ["bench", "--transport=efa"],
            "--transport efa is none of auto, libfabric, verbs, loopback",
        ),
        (["plan", "--weights"], "--weights: name a model: "),
        (["bench", "--json=/proc/x.json"], "--json: /proc/x.json cannot be written"),
        (["bench", "--api=deep_ep", "--deep-ep-module=."], "no module is named ."),
        (["bench", "--api=kv", "--plot=/proc/x.png"], "--plot: /proc/x.png cannot be written"),
        (["compile", "--num-sms=-1"], "--num-sms: '-1' is not a whole number from 0"),
        (["demo", "--steps=0"], "--steps: '0' is not a whole number from 1"),
        (["demo", "--save-trace=/proc/x"], "--save-trace: /proc/x cannot be written"),
        (["model", "--ranks=0"], "--ranks: '0' is not a whole number from 1"),
        (["model", "--ranks=12"], "--ranks 12 is not a multiple of --ranks-per-node 8"),
        (["model", "--ranks=99999999"], "--ranks 99999999: at most 8192"),
        (["model", "--topk=300", "--ranks=16"], "--topk 300 is more than the 256 experts"),
        (["model", "--gbps=0"], "--gbps: '0' is not a number above 0"),
        (["model", "--latency-us=-1"], "--latency-us: '-1' is not a number from 0 on"),
        (["model", "--json=/proc/x"], "--json: /proc/x cannot be written"),
        (["plan", "--weight=kimi-k2"], "unrecognized arguments: --weight=kimi-k2"),
        (["plan", "--kv", "--tokens=99999999999999"], "--tokens: '99999999999999' is not a whole"),
        (["plan", "--kv", "--k-bytes=1e30"], "--k-bytes: '1e30' is not a whole number from 1"),
        (["tune", "--device=cpu", "--only=launches"], "on CPUs there is nothing of it to measure"),
        (["doctor", "--hosts=a", "--ranks"], "--hosts and --ranks: pass one of them"),
        (["doctor", "--launcher=srun"], "--launcher and --python are of --hosts; name the hosts"),
        (["tune", "--timeout-s=0"], "--timeout-s: '0' is not a number above 0"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name_before_anything_runs(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_plan_has_no_more_nics_than_a_rank_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--nics", "9"]) == 2
    assert "nics_per_rank is 9, must be an integer from 1 to 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--topk=33"], "[invalid argument] topk is 33"),
        (["--trace=/proc/self/comm"], "--trace /proc/self/comm: not a routing that `demo"),
    ],
)
def test_what_ranks_refuse_alike_is_one_line_and_no_traceback(
    more: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--ranks=2", "--tokens=4", "--hidden=256", "--json=", "--plot="]
    assert main(["bench", "--device=cpu", *tiny, *more]) == 2
    reported = capsys.readouterr().err
    assert "bench: ranks 0, 1 failed:\nmoe_p2p [invalid argument] " in reported
    assert text in reported
    assert "Traceback" not in reported


# More than an address space holds: no setting of the kernel promises that, or kills who asked.
def test_no_memory_for_a_table_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", "--tokens=65536", "--hidden=2147483616"]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("accuracy: no memory for 281474972516352 bytes of --tokens 65536 --")
    assert len(reported.splitlines()) == 1


def test_no_memory_for_a_benchmark_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks=1", "--ranks-per-node=1", "--tokens=65536", "--hidden=2147483616"]
    assert main(["bench", "--device=cpu", *sizes, "--json=", "--plot="]) == 2
    reported = capsys.readouterr().err
    assert "bench: rank 0 failed:\nno memory for " in reported
    assert "lower --tokens, --hidden or another size" in reported
    assert "Traceback" not in reported


def two() -> int:
    return 2


def test_ranks_leave_no_folder_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert launch.run_ranks(two, num_ranks=1) == [2]
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]


TERMINATED = """
import os, signal
from multiprocessing import forkserver
from moe_p2p.tools import launch
from tests.support import warm

ensure_running = forkserver.ensure_running
def then_end():
    ensure_running()
    os.kill(os.getpid(), signal.SIGTERM)

forkserver.ensure_running = then_end
launch.run_ranks(os.getpid, num_ranks=1)
"""


def test_a_signal_before_ranks_start_leaves_no_folder(tmp_path: Path) -> None:
    """It once ended the launcher before torchrun's agent had a handler for it."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ran = warm.run("-c", TERMINATED, env=environment, timeout=250)
    assert ran.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def parsers() -> list[str]:
    """Of each command, and of those that an option makes another one."""
    apis = [["bench", "--api", api] for api in ("experts", "kv", "megatron", "weights")]
    plans = [["plan", "--kv"], ["plan", "--weights"]]
    return [" ".join(each) for each in (*([name] for name in COMMANDS), *apis, *plans)]


@pytest.mark.parametrize("command", parsers())
def test_help_says_each_default_in_parentheses_and_names_commands_that_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(option_types.Parser, "parse_args", lambda self, *_: made.append(self) or 0)
    with suppress(AttributeError, TypeError):  # nothing was parsed
        main(command.split())
    (parser,) = made[:1]
    help_of = parser.formatter_class(prog="x")._get_help_string
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and action.default not in (None, ""):
            assert str(help_of(action)).endswith(")"), action
    text = " ".join(parser.format_help().split())
    assert "default:" not in text
    assert "not given" not in text
    monkeypatch.undo()
    for named in {*re.findall(r"\b((?:plan|bench|tune|demo)(?: --\w+)* --help)", text)}:
        with pytest.raises(SystemExit) as ended:
            main(named.split())
        assert ended.value.code == 0, named
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["bench", "tune", "demo", "model", "plan", "plan --weights"])
def test_what_is_wrong_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--ranks=x" if command != "plan --weights" else "--nic=1"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_a_disk_that_is_full_at_the_end_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full may be opened, and takes nothing."""
    assert main(["model", "--ranks=16", "--tokens=8", "--json=/dev/full"]) == 1
    printed = capsys.readouterr()
    assert "dispatch + combine, us, cx7" in printed.out
    assert printed.err == (
        "model: /dev/full could not be written: No space left on device; what was computed is "
        "above\n"
    )


def test_output_that_cannot_be_written_is_one_line() -> None:
    command = ["-m", "moe_p2p", "model", "--ranks=16", "--tokens=8"]
    with Path("/dev/full").open("w") as full:
        ran = warm.run(*command, stdout=full, stderr=PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (
        1,
        "model: what it prints was not written: No space left on device; free space there, or "
        "print elsewhere\n",
    )
    read, write = os.pipe()
    os.close(read)  # as `| head` that has read enough
    with os.fdopen(write, "w") as gone:
        ran = warm.run(*command, stdout=gone, stderr=PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_figures_and_pictures_say_it_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(output.NotWrittenError, match="/dev/full could not be written: No space"):
        harness.write_json("/dev/full", [{"a": 1}])
    (tmp_path / "file").touch()
    with pytest.raises(output.NotWrittenError, match=r"file/x\.png could not be written: File ex"):
        draw(tmp_path / "file/x.png", "", lambda axis: axis.plot([1]))


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults too: bench_out is a file here, as root may write where a mode forbids it."""
    (tmp_path / "bench_out").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(env, "launched", lambda: False)
    for arguments in (["bench"], ["bench", "--api=kv"], ["bench", "--api=deep_ep", "--quick"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--device=cpu"])
        assert ended.value.code == 2
        assert "--json: bench_out/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "--device=cpu", f"--into={tmp_path}/bench_out/tuned.json"])
    assert "bench_out/tuned.json cannot be written" in capsys.readouterr().err


def test_a_look_at_a_file_leaves_no_folder(tmp_path: Path) -> None:
    option_types.output_file(str(tmp_path / "a/b/c.json"))
    assert list(tmp_path.iterdir()) == []


def test_no_loopback_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(launch, "elastic_launch", lambda *_: refuse)
    with pytest.raises(launch.RanksFailedError, match=r"does not answer: is the interface lo up"):
        launch.run_ranks(two, num_ranks=1)
