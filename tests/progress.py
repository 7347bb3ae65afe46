"""Order of tests, their division among workers, and progress lines, for `make test`.

Hooks of pytest, for conftest.py. With pytest-xdist (`-n 2`) several workers run the tests. A file's
tests stay together, except tests of LONG: they start first, one by one, so that all workers end
together. --progress prints a line per twentieth of the tests and per long test, instead of a dot
per test.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# Tests that take minutes, by prefix of their names; the longest first.
LONG = (
    "test_cpp.py",
    "test_emulated_gpu.py",
    "test_rdma.py",
    "test_faults.py",
    "test_lint.py",
    "test_triton_kernels.py",
    "test_jit.py::test_a_sample_of_all",
    "test_aarch64.py",
    "test_compile.py",
    "test_hosts.py",
    "test_soak.py",
    "test_kv_soak.py",
    "test_disaggregated.py",
    "test_masks.py::test_a_slow_rank",
    "test_interrupt.py",
    "test_ambient.py",
    "test_vllm.py",
    "test_sglang.py",
    "test_megatron.py",
    "test_deep_ep_frame.py",
    "test_libfabric.py",
    "test_readme.py",
    "test_wheel.py::test_commands",
)
# Tests of one group are one worker's, in turns: tests of test_rdma.py share a machine, those of
# test_faults.py start each other's processes, and those of the last build in the same folder.
ALONE = (
    ("test_rdma.py",),
    ("test_faults.py",),
    ("test_wheel.py", "test_readme.py", "test_aarch64_wheel.py"),
)
WORTH_A_LINE_S = 20.0


def _name(nodeid: str) -> str:
    """Test id without folders."""
    file, between, test = nodeid.partition("::")
    return Path(file).name + between + test


def _place(nodeid: str) -> int:
    places = (at for at, start in enumerate(LONG) if _name(nodeid).startswith(start))
    return next(places, len(LONG))


def unit_of(nodeid: str) -> str:
    """Returns a test's unit. Tests of a unit run one after the other, in one worker."""
    file = _name(nodeid).split("::")[0]
    for files in ALONE:
        if file in files:
            return files[0]
    return nodeid if _place(nodeid) < len(LONG) else file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="lines with the time, not dots")
    parser.addoption("--apart", action="store_true", help="a file's tests may run side by side")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--progress") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.nodeid))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-not-found]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if config.getoption("--apart") else unit_of(nodeid)

    config.option.loadscopereorder = False  # the order is that of the items
    return Scheduling(config, log)


class Lines:
    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._began, self._done, self._total, self._next = time.monotonic(), 0, 0, 0.05
        self._running: dict[str, float] = {}

    @property
    def _reporter(self) -> Any:
        return self._plugins.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        self._total = len(list(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reporter.showfspath = False
        self._running[nodeid] = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if report.when == "call" and report.passed:
            return "passed", "", ""
        if report.skipped and not hasattr(report, "wasxfail"):
            return "skipped", "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            first = why.strip().partition("\n")[0][:200]
            self._print(f"FAILED {_name(report.nodeid)} ({report.when}) {first}".rstrip())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        took_s = time.monotonic() - self._running.pop(nodeid, time.monotonic())
        self._done += 1
        share = self._done / max(self._total, 1)
        if took_s >= WORTH_A_LINE_S:
            self._print(f"{_name(nodeid)} took {took_s:.0f} s")
        elif share >= self._next:
            self._print(f"{Path(_name(nodeid).split('::')[0]).name}")
        while self._next <= share:
            self._next += 0.05

    def _print(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._reporter.ensure_newline()
        self._reporter.write_line(
            f"{minutes:3}:{seconds:02} {self._done:5} of {self._total} tests  {what}", flush=True
        )
