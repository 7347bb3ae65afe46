"""docs/doors.md says what the classes of this tree serve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import doors


def test_the_page_has_the_table_of_this_tree() -> None:
    text = doors.PAGE.read_text()
    assert doors.with_table(text) == text, "python -m tests.doors"


@pytest.mark.parametrize("door", doors.DOORS, ids=lambda door: door.used)
def test_each_page_is_there_and_names_how_it_is_turned_on(door: doors.Door) -> None:
    page = Path(doors.PAGE).with_name(door.page).read_text()
    assert door.turn_on.strip("`") in page + (doors.PAGE.parents[1] / "README.md").read_text()


def five_minutes() -> dict[str, str]:
    """Heading: its section."""
    text = doors.PAGE.read_text()
    parts = re.split(r"^### (.*)\n", text[text.index("## Five minutes") :], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("door", doors.DOORS, ids=lambda door: door.used)
def test_each_door_has_a_program_of_few_lines_and_what_it_prints(door: doors.Door) -> None:
    """tests/package/test_readme.py runs it."""
    ((code, printed),) = re.findall(
        r"^```python run\n(.*?)```\n\n```text\n(.*?)```$",
        five_minutes()[door.heading],
        re.MULTILINE | re.DOTALL,
    )
    assert len(code.splitlines()) <= 15
    assert printed.startswith(f"{door.heading}: ")
    assert door.as_.rpartition(".")[2] in code


def test_each_engine_that_has_five_minutes_has_a_command() -> None:
    """tests/engines/test_doors.py looks for its options in the engine's files."""
    text = doors.PAGE.read_text()
    linked = re.findall(r"^\| \[([^\]]+)\]\(#[\w-]+\) \| (?:experts|weights)", text, re.MULTILINE)
    assert linked == ["vLLM", "SGLang", "Megatron-Core", "verl"]
    assert all("\n```\n" in five_minutes()[name] for name in linked)


def test_a_call_that_only_raises_is_refused_and_others_are_served() -> None:
    def refuses() -> None:
        """With a reason."""
        raise NotImplementedError("here")

    def raises_later(value: int) -> int:
        if value:
            raise NotImplementedError("here")
        return value

    def does_nothing() -> None:
        """Nothing."""

    found = [doors.is_refused(call) for call in (refuses, raises_later, does_nothing)]
    assert found == [True, False, False]
