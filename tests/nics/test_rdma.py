"""Both providers over a real RDMA stack: soft-RoCE, in a machine that tests/rdma/vm.py boots.

libfabric runs over its verbs;ofi_rxm, which has the same rules of memory registration as efa.
Skipped with the reason where that machine cannot run. CI and `make test` install what it needs.
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
RUN_DEADLINE_S = 600
BUILD_DEADLINE_S = 1200
UNIVERSE_SIZE = (
    "8"  # peers that verbs;ofi_rxm makes its queues for; for its 256 rxe's are too small
)

sys.path.insert(0, str(VM.parent))
import vm  # type: ignore[import-not-found]  # noqa: E402

sys.path.pop(0)

pytestmark = pytest.mark.skipif(bool(vm.why_not()), reason=vm.why_not() or "")


def in_machine(*command: str, netem: str = "") -> str:
    """The output of a command that ends well in there. `netem` is what the links do to packets."""
    options = ["--timeout", str(RUN_DEADLINE_S - 60), "--netem", netem]
    done = subprocess.run(
        [sys.executable, str(VM), *options, "--", *command],
        cwd=ROOT,
        env={**os.environ, "FI_UNIVERSE_SIZE": UNIVERSE_SIZE},
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    if done.returncode == vm.BROKEN:
        pytest.skip(f"the RDMA machine did not come up: {done.stderr[-2000:]}")
    assert done.returncode == 0, (
        f"exit status {done.returncode}:\n{done.stdout[-8000:]}{done.stderr}"
    )
    return done.stdout


@pytest.fixture(name="program", scope="module")
def cpp_program() -> str:
    """The C++ tests, built as tests/package/test_cpp.py builds them."""
    built = subprocess.run(
        [sys.executable, str(ROOT / "tests/cpp/build.py")],
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    if "doctest-dev" in built.stderr:
        pytest.skip("doctest is not installed (apt-get install doctest-dev)")
    assert built.returncode == 0, f"build failed:\n{built.stderr[-8000:]}"
    return built.stdout.strip().splitlines()[-1]


SUITES = [
    ("provider contract*", "verbs devices*"),
    ("provider contract*", "*ofi_rxm*"),
    ("engine over libfabric*", "*ofi_rxm*"),
    ("verbs devices*", "*"),  # links, processes and limits
]


@pytest.mark.timeout(BUILD_DEADLINE_S + RUN_DEADLINE_S)
def test_suites_over_soft_roce(program: str) -> None:
    """One machine for all of them; each is run, whether or not the one before it passes."""
    runs = [shlex.join([program, f"-tc={cases}", f"-sc={sub}"]) for cases, sub in SUITES]
    reported = in_machine(
        "bash", "-c", "; ".join([*(f"{run} || bad=1" for run in runs), "exit $bad"])
    )
    assert "skipped:" not in reported
    assert reported.count("Status: SUCCESS") == len(SUITES)


@pytest.mark.timeout(BUILD_DEADLINE_S + RUN_DEADLINE_S)
def test_links_that_lose_and_reorder_packets(program: str) -> None:
    reported = in_machine(
        program,
        "-tc=verbs devices: every kind*,provider contract: payload*,provider contract: a wrong*",
        "-sc=verbs devices*",
        netem="loss 1% delay 200us 100us reorder 25%",
    )
    assert "skipped:" not in reported
    assert "Status: SUCCESS" in reported


@pytest.mark.timeout(RUN_DEADLINE_S)
def test_exchange_over_soft_roce_equals_the_reference_and_survivors_report() -> None:
    python = sys.executable  # not a shim in front of it, which takes many seconds there
    reported = in_machine(
        python, str(ROOT / "tests/rdma/exchange.py"), "verbs,libfabric", "50", "30"
    )
    for transport in ("verbs", "libfabric"):
        assert f"{transport}: 50 steps equal the reference" in reported
        assert f"{transport}: reported after" in reported  # of the rank that was killed then
    assert re.search(r"verbs with loss 1%.*: 30 steps equal the reference", reported)
    assert re.search(
        r"refused \d+ connections to its port \d+ so far", reported
    )  # by rank 0's NICs
