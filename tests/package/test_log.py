"""MOE_P2P_LOG: levels in any case, and another word is named."""

from __future__ import annotations

import os

import pytest

from moe_p2p import Engine, log
from tests.support import warm


@pytest.fixture(autouse=True)
def _warned_of_nothing() -> None:
    log._known.cache_clear()


@pytest.mark.parametrize("name", ["info", "INFO", "Debug"])
def test_levels_are_known_in_any_case(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_P2P_LOG", name)
    Engine(label="one").close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("moe_p2p info ")
    assert log.shows("debug") == (name == "Debug")


def test_another_word_is_named_once_and_means_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_P2P_LOG", "nonsense")
    for _ in range(2):
        Engine(label="one").close()
    (line,) = capfd.readouterr().err.splitlines()
    wanted = "MOE_P2P_LOG is 'nonsense', must be one of error, warning, info, debug"
    assert line.endswith(f"{wanted}; warning is used")
    assert log.shows("warning")
    assert not log.shows("info")


def test_nothing_given_means_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, ""):
        if given is None:
            monkeypatch.delenv("MOE_P2P_LOG", raising=False)
        else:
            monkeypatch.setenv("MOE_P2P_LOG", given)
        assert log.shows("warning")
        assert not log.shows("info")


PINNED = """
from moe_p2p import Engine, EngineConfig
Engine(EngineConfig(transport_settings="proxy_cpu=1000")).close()
"""


def test_levels_of_the_extension_are_known_in_any_case() -> None:
    """It reads the environment once, at its first line: here that no core has such a number."""
    for name, lines in (("ERROR", 0), ("Warning", 1)):
        environment = os.environ | {"MOE_P2P_LOG": name}
        ran = warm.run("-c", PINNED, env=environment, capture_output=True, timeout=250)
        assert ran.returncode == 0
        assert ran.stderr.count(b"could not be pinned to cpu 1000") == lines
