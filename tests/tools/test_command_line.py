"""`python -m moe_p2p`: what is asked for wrongly is named before any rank starts."""

from __future__ import annotations

import pytest

from moe_p2p.__main__ import COMMANDS, main


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "a command is missing"), (["foo"], "'foo' is not a command"), (["-x"], "'-x' is not")],
)
def test_what_is_no_command_is_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    reported = capsys.readouterr()
    assert reported.err.splitlines()[-1].startswith(f"moe_p2p: {text}")
    assert reported.out == ""


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_what_is_no_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--tokens", "8,x"])
    assert "'8,x' is not a number, or several with commas" in capsys.readouterr().err
