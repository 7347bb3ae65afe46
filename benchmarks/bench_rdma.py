"""The verbs provider beside perftest and a bare loop of the library's own calls, over soft-RoCE.

In the machine that tests/rdma/vm.py boots, between two devices on one wire, all in one run:
ib_write_bw and ib_write_lat (which know no write with immediate), then
tests/cpp/verbs_benchmark.cpp, where bare loop and provider take turns. Goals: 95% of the bare loop
for large writes, 1.2 times its cost per posted page of 8 KiB.
"""

from __future__ import annotations

import sys

import cpp_program
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

VM = cpp_program.ROOT / "tests/rdma/vm.py"
RUN_DEADLINE_S = 500
SIZES = {8192: 1000, 65536: 200, 1 << 20: 40}  # bytes of a write: how many

sys.path.insert(0, str(VM.parent))
import vm  # type: ignore[import-not-found]  # noqa: E402

sys.path.pop(0)


def perftest(tool: str, size: int, number: int) -> str:
    """A shell command that prints `tool size result`, with result in the tool's own unit."""
    options = f"-x 1 -s {size} -n {number} -F"
    column = 4 if tool.endswith("bw") else 5  # average MiB/s; typical us
    return (
        f"{tool} -d rxe1 {options} >/dev/null 2>&1 & "
        "for i in $(seq 100); do ss -ltn | grep -q :18515 && break; done; "
        f"timeout 60 {tool} -d rxe0 {options} 10.77.0.2 2>/dev/null | "
        f"awk '$1 == {size} {{print \"{tool}\", $1, ${column}}}'; wait"
    )


@pytest.mark.skipif(bool(vm.why_not()), reason=vm.why_not() or "")
def test_verbs_beside_perftest_and_a_bare_loop(benchmark: BenchmarkFixture) -> None:
    program = cpp_program.build(timeout_s=900)
    commands = [perftest("ib_write_bw", size, number) for size, number in SIZES.items()]
    commands += [perftest("ib_write_lat", 8, 200), f"{program} --no-skip '-tc=benchmark: verbs*'"]
    lines = cpp_program.run(
        benchmark,
        [sys.executable, str(VM), "--", "bash", "-c", "\n".join(commands)],
        name="verbs",
        timeout_s=RUN_DEADLINE_S,
        also=r"ib_write_\w+ .+",
    )
    assert any("bare" in line for line in lines), lines
