"""docs/providers.md is about this code: its settings are all there are, its error texts exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moe_p2p
from moe_p2p.tools.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
HEADERS = {
    "verbs": "verbs/config.h",
    "libfabric": "libfabric/config.h",
    "timed": "loopback/timed.h",
}
TEXT = (ROOT / "docs/providers.md").read_text()


def section(title: str, mark: str) -> str:
    return TEXT.split(f"{mark}{title}{mark if mark == '**' else ''}\n", 1)[1].split("\n**")[0]


def quoted(column: str) -> list[str]:
    return re.findall(r"`([^`]+)`", column)


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in `text`, without its head."""
    lines = text[text.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def valid_keys(provider: str) -> set[str]:
    with pytest.raises(moe_p2p.InvalidArgumentError) as refused:
        moe_p2p.Engine(
            moe_p2p.EngineConfig(
                transport=provider, nics_per_rank=1, transport_settings="no_such_key=1"
            )
        )
    return set(re.findall(r"\w+", str(refused.value).split("keys")[-1]))


@pytest.mark.parametrize("provider", HEADERS)
def test_every_setting_stands_there_with_its_default(provider: str) -> None:
    reported = [name for row in rows(section(provider, "**")) for name in quoted(row[0])]
    assert {name.split("=")[0] for name in reported} == valid_keys(provider)
    source = (ROOT / "csrc/provider" / HEADERS[provider]).read_text()
    defaults = set(re.findall(r"^//   .*", source, re.MULTILINE))
    for name in reported:
        # `key=` has no default; the comment goes on behind it.
        assert any(re.search(rf"\b{re.escape(name)}(\s|$)", line) for line in defaults), name


def test_every_error_text_is_in_the_code() -> None:
    sources = [*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("moe_p2p/**/*.py")]
    # Literals that follow each other are one, across lines.
    code = re.sub(r'"\s*\n\s*"', "", "\n".join(path.read_text() for path in sources))
    for row in rows(section("Errors", "## ")):
        for text in quoted(row[0]):
            assert text in code, text


def test_doctors_output_names_what_doctor_looks_for() -> None:
    shown = section("Doctor", "## ").split("software\n", 1)[1].split("memory\n")[0]
    names = re.findall(r"^  (\S+(?: \S+)*)  ", shown, re.MULTILINE)
    assert names == ["NVIDIA driver", *examine.LIBRARIES, *examine.PACKAGES]
