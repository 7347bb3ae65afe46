"""docs/doors.md says what the classes of this tree serve."""

from __future__ import annotations

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
