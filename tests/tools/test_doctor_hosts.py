"""`doctor --hosts` over stand-ins of ssh and srun that are as strict as the real ones; `--ranks`.

ssh joins its words with blanks and gives them to the host's shell, in an environment of the host's
own; srun calls execvp with its words, and its steps wait for each other unless they may overlap.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from moe_p2p import InvalidArgumentError, UnavailableError
from moe_p2p.tools.doctor import command, examine, hosts
from moe_p2p.version import __version__
from tests.support import warm
from tests.support.hosts import Hosts, why_not

# getopt's order as in OpenSSH's ssh.c: options, the host, and all that follows is the command.
SSH = r"""
while :; do
  case "$1" in
    -o) case "$2" in
          BatchMode=*|ConnectTimeout=*) shift 2 ;;
          *) echo "command-line: line 0: Bad configuration option: ${2%%=*}" >&2; exit 255 ;;
        esac ;;
    -p) shift 2 ;;
    -T) shift ;;
    -*) echo "unknown option -- ${1#-}" >&2; exit 255 ;;
    *) break ;;
  esac
done
host="$1"; shift
home="HOSTS/$host"
[ -d "$home" ] || { echo "ssh: Could not resolve hostname $host: Name not known" >&2; exit 255; }
[ -e "$home/silent" ] && { echo "debug: waiting" >&2; exec sleep 1000; }
[ -e "$home/refuses" ] && { echo "$host: Permission denied (publickey)." >&2; exit 255; }
[ -e "$home/greeting" ] && cat "$home/greeting"
cd "$home" && exec env -i HOME="$home" PATH=/usr/bin:/bin sh -c "$*"
"""
SRUN = r"""
while :; do
  case "$1" in
    --nodes=1|--ntasks=1|--partition=*) shift ;;
    --overlap) overlap=1; shift ;;
    --nodelist=*) host="${1#*=}"; shift ;;
    -*) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
    *) break ;;
  esac
done
home="HOSTS/$host"
[ -d "$home" ] || { echo "srun: error: Unable to create step for job 7: Requested node\
 configuration is not available" >&2; exit 1; }
[ -n "$overlap" ] || { echo "srun: Job 7 step creation temporarily disabled, retrying" >&2
  exec sleep 1000; }
[ -e "$home/silent" ] && exec sleep 1000
cd "$home" || exit 1
[ -x "$1" ] || { echo "slurmstepd: error: execve(): $1: No such file or directory" >&2; exit 2; }
HOME="$home" "$@"; status=$?
[ $status = 0 ] || echo "srun: error: $host: task 0: Exited with exit code $status" >&2
exit $status
"""
# The Python of the hosts, in a folder with a blank and a quote, so that quoting counts.
PYTHON = r"""
[ "$1 $2 $3 $4 $5 $#" = "-m moe_p2p doctor --json --no-writes 5" ] || { echo "got: $*"; exit 9; }
[ -e "$HOME/report.json" ] || { echo "$0: No module named moe_p2p" >&2; exit 1; }
cat "$HOME/report.json"
exit 1
"""


class Cluster:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.hosts = folder, folder / "hosts"
        self.hosts.mkdir()
        (folder / "it's python").mkdir()
        self.python = self.program("it's python/python", PYTHON)
        for name, script in (("ssh", SSH), ("srun", SRUN)):
            self.program(name, script.replace("HOSTS", str(self.hosts)))
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def program(self, name: str, script: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh{script}")
        path.chmod(0o755)
        return str(path)

    def host(self, name: str, report: Any = None, **files: str) -> None:
        home = self.hosts / name
        home.mkdir()
        if report is not None:
            files["report.json"] = json.dumps(report, indent=2)
        for file, text in files.items():
            (home / file).write_text(text)

    def doctor(self, names: str, *arguments: str) -> int:
        return command.main(
            [f"--hosts={names}", "--no-writes", f"--python={self.python}", *arguments]
        )


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of this machine, as it would be healthy, over a transport that reaches other hosts."""
    found = dataclasses.asdict(examine.examine(writes=False))
    found["transport"] = {"provider": "verbs", "why": "a test says so"}
    return found | {"problems": [], "time_s": time.time()}


LAUNCHERS = ("ssh", "ssh -p 2222", "srun", "srun --partition=gpu")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_healthy_hosts_end_with_0(
    launcher: str, cluster: Cluster, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        cluster.host(name, report | {"time_s": time.time() + 0.5})
    assert cluster.doctor("a,b", f"--launcher={launcher}") == 0
    text = capsys.readouterr().out
    assert text.startswith("2 hosts\n  a  ")
    assert text.endswith("problems\n  none\n")


def test_a_host_that_is_silent_is_named_and_the_others_are_not_lost(
    cluster: Cluster, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.host("b", silent="")
    cluster.host("a", report)
    for launcher in ("ssh", "srun"):
        assert cluster.doctor("b", f"--launcher={launcher}", "--timeout=0.2", "--json") == 1
        found = json.loads(capsys.readouterr().out)
        (problem,) = found["problems"]
        assert problem["hosts"] == ["b"]
        assert problem["what"].startswith("did not answer within 0.2 s")
        assert problem["remedy"].startswith(f"{launcher} -" if launcher == "srun" else "ssh -o")
    asked = hosts.ask(["b", "a"], ["ssh"], [cluster.python, *["-m", "moe_p2p", "doctor"], "--json",
                                            "--no-writes"], 5.0)  # fmt: skip
    assert asked["a"].report is not None
    assert asked["b"].problem is not None


@pytest.mark.parametrize(
    ("files", "launcher", "what", "remedy"),
    [
        (None, "ssh", "cannot be reached: ssh: Could not resolve hostname b", "b true"),
        (None, "srun", "(status 1): srun: error: Unable to create step", "--nodelist=b"),
        ({"refuses": ""}, "ssh", "cannot be reached: b: Permission denied", "ssh -o BatchMode"),
        ({}, "ssh", "moe_p2p is not installed there", f"-m pip install moe_p2p=={__version__}"),
        ({}, "srun", "moe_p2p is not installed there", f"-m pip install moe_p2p=={__version__}"),
        (
            {"report.json": "Segmentation fault\n"},
            "ssh",
            "gave no report (status 1): Segmen",
            "ssh",
        ),
        (
            {"report.json": '{\n"machine": {}\n}'},
            "ssh",
            "it runs moe_p2p of an older",
            "pip install",
        ),
        (
            {"report.json": '{\n"machine": {}, "form": 1, "software": {"moe_p2p": "1.2"}\n}'},
            *("ssh", "its report cannot be read", "pip install"),
        ),
    ],
)
def test_a_host_without_a_report_is_named_with_the_reason(
    files: dict[str, str] | None,
    launcher: str,
    what: str,
    remedy: str,
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if files is not None:
        cluster.host("b", **files)
    assert cluster.doctor("b", f"--launcher={launcher}", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"] == {"b": None}
    (problem,) = found["problems"]
    assert what in problem["what"]
    assert remedy in problem["remedy"]


@pytest.mark.parametrize("launcher", ["ssh", "srun"])
def test_the_remedies_are_commands_that_run(
    launcher: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.host("b")
    cluster.doctor("b", f"--launcher={launcher}", "--json")
    remedy = json.loads(capsys.readouterr().out)["problems"][0]["remedy"]
    ran = os.popen(f"{remedy} 2>&1").read()
    assert f"got: -m pip install moe_p2p=={__version__}" in ran


def test_what_a_shell_greets_with_is_passed_over(
    cluster: Cluster, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.host("a", report | {"time_s": time.time() + 0.5}, greeting="Welcome\n{\nnot json\n")
    assert cluster.doctor("a") == 0
    assert "problems\n  none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hosts", "-oProxyCommand=x"], "'-oProxyCommand=x' is no name of a host"),
        (["--hosts", "n[1-2]"], "scontrol show hostnames"),
        (["--hosts", "a,b,a"], "--hosts names a more than once"),
        (["--hosts", ","], "must be names with commas"),
        (["--hosts", "a", "--launcher", "mpirun -np 2"], "must be ssh or srun"),
        (["--hosts", "a", "--launcher", "/nowhere/ssh"], "/nowhere/ssh is not installed here"),
        (["--ranks"], "torchrun started no ranks here"),
    ],
)
def test_wrong_arguments_are_one_line_and_2(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    arguments = [f"{arguments[0]}={arguments[1]}", *arguments[2:]] if arguments[1:] else arguments
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert len(printed.err.splitlines()) == 1


def test_names_of_hosts() -> None:
    assert hosts.names_of("a, me@b.example,10.0.0.1,fe80::1%eth0") == [
        *("a", "me@b.example", "10.0.0.1", "fe80::1%eth0")
    ]
    with pytest.raises(InvalidArgumentError):
        hosts.names_of("a b")
    with pytest.raises(UnavailableError):
        hosts.split_launcher("/nowhere/srun -c 4")


# --- ranks ---


def _ranks(present: int, world: int, *arguments: str, **variables: str) -> list[Any]:
    started = []
    for rank in range(present):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MOE_P2P_TRANSPORT": "libfabric",
            **variables,
        }
        started.append(
            warm.popen(
                *("-m", "moe_p2p", "doctor", "--ranks", "--no-writes", "--json", *arguments),
                env=environment,
                stdout=-1,
                stderr=-1,
                text=True,
            )
        )
    return [(*each.communicate(timeout=250), each.returncode) for each in started]


def test_ranks_that_run_give_one_page_and_one_status() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300))
    (out, err, status), (quiet, _, other) = _ranks(
        *(2, 2, "--timeout=200"),
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    found = json.loads(out)
    assert len(found["hosts"]) == 2, err
    assert all(found["hosts"].values())
    assert status == other == (1 if found["problems"] else 0)
    assert quiet == ""


def test_a_rank_that_does_not_come_is_named() -> None:
    """Rank 0 serves the store itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ((out, err, status),) = _ranks(1, 2, "--timeout=1", MASTER_PORT=str(port))
    assert status == 1, err
    assert json.loads(out)["hosts"]["host of rank 1"] is None
    assert "did not answer within 1 s" in out


# --- namespaces ---


@pytest.mark.more
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_hosts_that_are_namespaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ssh enters a namespace, whose sysfs shows its own interfaces; the rest is as it is."""
    root = Path(__file__).parents[2]
    with Hosts(2) as spaces:
        subprocess.run(
            ["ip", "-n", spaces.names[1], "link", "set", "eth0", "mtu", "1400"], check=True
        )
        ssh = tmp_path / "ssh"
        ssh.write_text(
            '#!/bin/sh\nshift 3\nhost="$1"; shift\nexec ip netns exec "$host" env -i '
            f"PATH=/usr/sbin:/usr/bin:/bin HOME={tmp_path} PYTHONPATH={root} "
            "MOE_P2P_TRANSPORT=libfabric MOE_P2P_TRANSPORT_SETTINGS=provider=tcp "
            'sh -c "$*"\n'
        )
        ssh.chmod(0o755)
        status = command.main(
            [
                f"--hosts={','.join(spaces.names)}",
                f"--launcher={ssh}",
                f"--python={sys.executable}",
                *("--no-writes", "--json", "--timeout=280"),
            ]
        )
    found = json.loads(capsys.readouterr().out)
    assert status == 1
    wrong = [p for p in found["problems"] if p["hosts"] != spaces.names]  # not of this machine
    assert [(p["hosts"], p["what"]) for p in wrong] == [
        ([spaces.names[1]], "eth0 has MTU 1400, on the others 1500")
    ]
    assert wrong[0]["remedy"] == "ip link set dev eth0 mtu 1500"
    assert found["same"]["transport"] == "libfabric"
