"""The verbs provider beside perftest and bare loops of the library's own calls, over soft-RoCE.

In the machine that tests/rdma/vm.py boots, between devices on one wire, all in one run: ib_write_bw
and ib_write_lat (which have no write with immediate), then the benchmarks of tests/cpp, where bare
loop and provider take turns; libfabric's verbs;ofi_rxm too. Goals: 95% of the bare loop's rate for
large writes, 1.2 times its cost per posted page of 8 KiB.

test_two_nics_against_one: the same on two wires at once. Its links carry 40 Mbit/s each; without
that limit (`-k unlimited`) both wires share the two cores that emulate the devices, and perftest on
both at once shows how far they scale. Goal: two NICs reach 1.8 times one where the wires do.
"""

from __future__ import annotations

import sys

import cpp_program
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

VM = cpp_program.ROOT / "tests/rdma/vm.py"
RUN_DEADLINE_S, BUILD_DEADLINE_S = 500, 900
SIZES = {8192: 1000, 65536: 200, 1 << 20: 40}  # bytes of a write: number of writes

sys.path.insert(0, str(VM.parent))
import vm  # type: ignore[import-not-found]  # noqa: E402

sys.path.pop(0)


def perftest(tool: str, size: int, number: int, wire: tuple[int, int] = (0, 1)) -> str:
    """Returns a shell command that prints `tool size result`, result in the tool's own unit."""
    source, target = wire
    port = 18515 + source
    options = f"-x 1 -u 18 -s {size} -n {number} -F -p {port}"
    column = 4 if tool.endswith("bw") else 5  # average MiB/s; typical us
    return (
        f"{tool} -d rxe{target} {options} >/dev/null 2>&1 & "
        f"for i in $(seq 100); do ss -ltn | grep -q :{port} && break; done; "
        f"timeout 60 {tool} -d rxe{source} {options} 10.77.0.{target + 1} 2>/dev/null | "
        f"awk '$1 == {size} {{print \"{tool} rxe{source}\", $1, ${column}}}'; wait"
    )


def in_machine(benchmark: BenchmarkFixture, commands: list[str], *options: str) -> list[str]:
    return cpp_program.run(
        benchmark,
        [
            *("env", "FI_UNIVERSE_SIZE=8", sys.executable, str(VM), *options),
            *("--timeout", str(RUN_DEADLINE_S - 20), "--", "bash", "-c", "\n".join(commands)),
        ],
        name="soft-RoCE",
        timeout_s=RUN_DEADLINE_S,
        also=r"ib_write_\w+ .+",
    )


@pytest.mark.timeout(RUN_DEADLINE_S + BUILD_DEADLINE_S)
@pytest.mark.skipif(bool(vm.why_not()), reason=vm.why_not() or "")
@pytest.mark.parametrize("cases", ["verbs*", "transfers*", "libfabric*"])
def test_beside_perftest_and_bare_loops(benchmark: BenchmarkFixture, cases: str) -> None:
    program = cpp_program.build(timeout_s=BUILD_DEADLINE_S)
    commands = []
    if cases == "verbs*":
        commands = [perftest("ib_write_bw", size, number) for size, number in SIZES.items()]
        commands += [perftest("ib_write_lat", size, 200) for size in (8, 8192, 65536)]
    commands.append(f"{program} --no-skip '-tc=benchmark: {cases}'")
    lines = in_machine(benchmark, commands)
    assert any("bare" in line for line in lines), lines


@pytest.mark.timeout(RUN_DEADLINE_S + BUILD_DEADLINE_S)
@pytest.mark.skipif(bool(vm.why_not()), reason=vm.why_not() or "")
@pytest.mark.parametrize("netem", ["rate 40mbit", ""], ids=["40 Mbit/s", "unlimited"])
def test_two_nics_against_one(benchmark: BenchmarkFixture, netem: str) -> None:
    program = cpp_program.build(timeout_s=BUILD_DEADLINE_S)
    one, other = (perftest("ib_write_bw", 1 << 20, 16, wire) for wire in ((0, 2), (1, 3)))
    commands = [one, f"({one}) & ({other}) & wait", f"{program} --no-skip '-tc=benchmark: rails*'"]
    lines = in_machine(benchmark, commands, "--devices", "4", "--netem", netem)
    assert any("two NICs" in line for line in lines), lines
