"""Both providers over a real RDMA stack: soft-RoCE, in a machine that tests/rdma/vm.py boots.

One machine for all tests that are asked for: the first of them waits for it. libfabric runs over
its verbs;ofi_rxm, which has the same rules of memory registration as efa. Skipped with the reason
where that machine cannot run. `make test-all` runs them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VM = ROOT / "tests/rdma/vm.py"
RUN_DEADLINE_S = 2700
PART_DEADLINE_S = 1200
BUILD_DEADLINE_S = 1200
UNIVERSE_SIZE = (
    "8"  # peers that verbs;ofi_rxm makes its queues for; for its 256 rxe's are too small
)
DOCTEST_IS_MISSING = "doctest is not installed (apt-get install doctest-dev)"

sys.path.insert(0, str(VM.parent))
import vm  # type: ignore[import-not-found]  # noqa: E402

sys.path.pop(0)

from tests.support import emulated_gpu  # noqa: E402

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(bool(vm.why_not()), reason=vm.why_not() or ""),
    pytest.mark.timeout(BUILD_DEADLINE_S + RUN_DEADLINE_S),
]

# Cases of the C++ tests, by part.
SUITES = {
    "contract over verbs": ("provider contract*", "verbs devices*"),
    "contract over libfabric": ("provider contract*", "*ofi_rxm*"),
    "engine over libfabric": ("engine over libfabric*", "*ofi_rxm*"),
    "links, processes and limits": ("verbs devices*", "*"),
    "links that lose and reorder packets": (
        "verbs devices: every kind*,provider contract: payload*,provider contract: a wrong*",
        "verbs devices*",
    ),
}
STOPS = "stopped senders of KV"
FABRIC = "fabric-check"
EXCHANGE = "exchange"  # the last part: it leaves links that lose packets
LOSSY = "links that lose and reorder packets"
NETEM = "loss 1% delay 200us 100us reorder 25%"


def commands_of(part: str, program: str) -> list[str]:
    """Lines of a shell. A part runs whether or not the one before it ended well."""
    if part == EXCHANGE:  # sys.executable: a shim in front of it takes many seconds there
        command = [sys.executable, "tests/rdma/exchange.py", "verbs,libfabric", "50", "30"]
        if not emulated_gpu.why_not():
            naps = [f"{name}={value}" for name, value in emulated_gpu.few_cpus().items()]
            command = ["env", *naps, *command, "flags"]
    elif part == FABRIC:  # its correctness step takes minutes there; EXCHANGE has results
        only = "--only=facts,rails,pairs"
        command = [sys.executable, "tests/rdma/fabric_check.py", only]
    elif part == STOPS:
        which = ["--all-cells", "tests/kv/test_kv_stopped_sender.py", "-k", "roce"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which]
    else:
        cases, subcases = SUITES[part]
        command = [program, f"-tc={cases}", f"-sc={subcases}"]
    lines = [
        f"echo '--- {part}'",
        f"timeout {PART_DEADLINE_S} {shlex.join(command)}",
        "echo status $?",
    ]
    if part != LOSSY:
        return lines
    links = ("rn0", "rn1")
    lose = [f"tc qdisc add dev {link} root netem limit 20000 {NETEM}" for link in links]
    return [*lose, *lines, *(f"tc qdisc del dev {link} root" for link in links)]


def build_program() -> str:
    """The C++ tests, built as tests/package/test_cpp.py builds them; empty without doctest."""
    built = subprocess.run(
        [sys.executable, str(ROOT / "tests/cpp/build.py")],
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    if "doctest-dev" in built.stderr:
        return ""
    assert built.returncode == 0, f"build failed:\n{built.stderr[-8000:]}"
    return built.stdout.strip().splitlines()[-1]


def compile_kernels() -> None:
    """For flags: the machine is too slow for it, and has no compiler's cache."""
    if emulated_gpu.why_not():
        return
    command = [sys.executable, "tests/rdma/gpu_flags.py"]
    subprocess.run(command, cwd=ROOT, timeout=BUILD_DEADLINE_S, check=True)


@pytest.fixture(name="reports", scope="module")
def reports_of_one_machine(request: pytest.FixtureRequest) -> dict[str, str]:
    """The output of each part that tests of this run ask for; its last line is its status."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["part"] for item in items if isinstance(item, pytest.Function)}
    parts = [part for part in (*SUITES, STOPS, FABRIC, EXCHANGE) if part in asked]
    program = build_program() if asked & SUITES.keys() else ""
    if not program:
        parts = [part for part in parts if part not in SUITES]
    if not parts:
        return {}
    if EXCHANGE in parts:
        compile_kernels()
    lines = [line for part in parts for line in commands_of(part, program)]
    script = "\n".join([*lines, "exit 0"])
    machine = [sys.executable, str(VM), "--timeout", str(RUN_DEADLINE_S - 60)]
    done = subprocess.run(
        [*machine, "--", "bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "FI_UNIVERSE_SIZE": UNIVERSE_SIZE},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    if done.returncode == vm.BROKEN:
        pytest.skip(f"the RDMA machine did not come up: {done.stderr[-2000:]}")
    assert done.returncode in (0, vm.TIMED_OUT), done.stdout[-8000:] + done.stderr
    named = re.split(r"^--- (.+)\n", done.stdout.replace("\r", ""), flags=re.MULTILINE)
    return dict(zip(named[1::2], named[2::2], strict=True))


def report_of(reports: dict[str, str], part: str) -> str:
    """The output of a part that has ended well."""
    text = reports.get(part, "it has not begun: the machine was stopped at its deadline")
    assert text.rstrip().endswith("status 0"), f"{part}:\n{text[-8000:]}"
    return text


@pytest.mark.parametrize("part", SUITES)
def test_suites_over_soft_roce(part: str, reports: dict[str, str]) -> None:
    if not any(name in reports for name in SUITES):
        pytest.skip(DOCTEST_IS_MISSING)
    text = report_of(reports, part)
    assert "skipped:" not in text
    assert text.count("Status: SUCCESS") == 1


@pytest.mark.parametrize("part", [STOPS])
def test_stopped_senders_write_nothing_later(part: str, reports: dict[str, str]) -> None:
    """And what they write without a fence is seen."""
    assert "2 passed" in report_of(reports, part)


@pytest.mark.parametrize("part", [FABRIC])
def test_fabric_check_and_its_bundle(part: str, reports: dict[str, str]) -> None:
    text = report_of(reports, part)
    for step in ("facts", "rails", "pairs"):
        assert f"fabric-check, {step}: " in text
    assert "fabric-check over verbs: read back" in text


@pytest.mark.parametrize("part", [EXCHANGE])
def test_exchange_equals_the_reference_and_survivors_report(
    part: str, reports: dict[str, str]
) -> None:
    text = report_of(reports, part)
    for transport in ("verbs", "libfabric"):
        assert f"{transport}: 50 steps equal the reference" in text
        assert f"{transport}: reported after" in text  # of the rank that was killed then
    assert "verbs: right with a rank that sleeps" in text
    assert re.search(r"verbs with loss 1%.*: 30 steps equal the reference", text)
    if not emulated_gpu.why_not():
        assert "verbs: 3 steps with flags by write equal the reference" in text
    assert re.search(r"fence by queue pair: .* 3 fences, \d with writes under way: nothing", text)
    assert re.search(r"refused \d+ connections to its port \d+ so far", text)  # by rank 0's NICs
