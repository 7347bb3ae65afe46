"""What `make test` leaves out, and which part of it another run takes.

Hooks of pytest, for conftest.py. Tests and cells marked `more` or `engine` are left out unless

    --all-cells              nothing is left out (make test-all)
    --left-out               they alone run: all of them, or the chosen ones (.ci/run)
    --suites kv,rdma         chosen: files whose path begins so, below tests/
    --fifth 3                chosen too: every fifth of the others, from the third one on
    tests/a/test_b.py::c     a test that is named on the command line runs, marked or not
"""

from __future__ import annotations

import pytest

FIFTHS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cells", action="store_true", help="what is marked `more`, too")
    parser.addoption("--left-out", action="store_true", help="what is marked `more`, alone")
    parser.addoption("--suites", default="", help="of what is left out: paths below tests/")
    parser.addoption("--fifth", type=int, help="of what else is left out: 0 to 4")


def chosen(names: list[str], suites: list[str], fifth: int | None) -> set[str]:
    """Returns which of these left-out tests run; all without suites and fifth. names: their ids."""
    if not suites and fifth is None:
        return set(names)
    own = {name for name in names if name.removeprefix("tests/").startswith(tuple(suites))}
    rest = [name for name in names if name not in own]
    return own | set(rest[fifth % FIFTHS :: FIFTHS] if fifth is not None else ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-cells"):
        return
    more = [
        item.nodeid
        for item in items
        if item.get_closest_marker("more") or item.get_closest_marker("engine")
    ]
    if config.getoption("--left-out"):
        suites = [suite for suite in config.getoption("--suites").split(",") if suite]
        taken = chosen(more, suites, config.getoption("--fifth"))
    else:
        left_out = set(more)
        taken = {item.nodeid for item in items if item.nodeid not in left_out}
        named = _named(config)
        taken |= {nodeid for nodeid in more if nodeid.startswith(named)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
    items[:] = [item for item in items if item.nodeid in taken]


def _named(config: pytest.Config) -> tuple[str, ...]:
    """Returns beginnings of the ids of tests that the command line names."""
    found = []
    for argument in config.args:
        path, separator, test = argument.partition("::")
        place = (config.invocation_params.dir / path).resolve()
        if separator and place.is_relative_to(config.rootpath):
            found.append(f"{place.relative_to(config.rootpath).as_posix()}::{test}")
    return tuple(found)
