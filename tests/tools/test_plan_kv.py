"""`python -m moe_p2p plan --kv` prints the plan, what a request sends, and why rows are packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_p2p import kv
from moe_p2p.__main__ import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["plan", "--kv", *arguments]) == status
    return capsys.readouterr().out


def test_rows_bytes_and_reasons_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--source", "tp=2,page=64", "--target", "tp=2,dcp=2,page=64")
    assert "pack: rows of 576 B reach 6.4 of 50 GB/s at 11.1 M writes/s; CX7 needs 4,505 B" in text
    total = next(line for line in text.splitlines() if line.lstrip().startswith("all "))
    assert total.split()[1] == f"{61 * 4096 * 576:,}"
    assert "plan " in text
    assert " ms, resolved " in text


def test_what_becomes_of_packed_rows_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages of 64 tokens are dealt to 2 ranks: 32 rows of 576 B are one run at the target."""
    sides = ["--source", "tp=2,page=64", "--target", "tp=2,dcp=2,page=64"]
    text = printed(capsys, *sides)
    assert "lands: gathered into runs of 18,432 B, which are written into the pages" in text
    assert "others" not in text
    text = printed(capsys, *sides, "--link", "efa")
    assert "others: writes of up to 4,194,304 B into a ring of 67,108,864 B at the target" in text
    assert "lands" not in text
    assert "all direct: pack is False" in printed(capsys, *sides, "--pack", "never")
    alike = ["--source", "tp=2,page=64", "--target", "tp=2,page=64", "--pack", "always"]
    assert "pack: rows of 36,864 B, because pack is True" in printed(capsys, *alike)


def test_the_rate_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--source", "tp=2,page=64", "--target", "tp=2,dcp=2,page=64"]
    text = printed(capsys, *arguments, "--writes-per-s", "1e9")
    assert "all direct: no row is below the 50 B that CX7 needs" in text


def test_a_prefix_sends_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--target", "tp=8,page=64", "--prefix", "4032")
    assert f"{8 * 61 * 64 * 576:,}" in text


def test_long_tables_are_cut_until_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["--source", "tp=8", "--target", "tp=32", "--kv-heads", "8"]
    assert "and 16 lines more; --all prints them" in printed(capsys, *sides)
    assert "lines more" not in printed(capsys, *sides, "--all")


def test_hybrid_models_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = kv.KVGroup("full", (0, 2), heads=2, k_bytes=8, v_bytes=8, page_size=16)
    state = kv.KVGroup("ssm", (1,), heads=4, k_bytes=32, v_bytes=0, page_size=1, kind="state")
    file = tmp_path / "layout.json"
    file.write_bytes(kv.layout_to_bytes(kv.KVLayout((full, state), tp=2)))
    text = printed(capsys, "--source", str(file), "--target", str(file))
    assert "full" in text
    assert "ssm" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--source", "tp=x"], "plan: moe_p2p [invalid argument] --source: tp='x' is not a number"),
        (["--source", "ep=8"], "--source: 'ep' is not one of order, split, tp"),
        (["--target", "tp=8,order=XYZ"], "order is 'XYZ', must be one of NHD"),
        (["--target", "missing.json"], "No such file"),
        (["--prefix", "5"], "begin=5 lies within a page of the target"),
        (["--source", "tp=1000000"], "--source has 1000000 ranks (tp * pp) and --target 8: more"),
        (["--target", "tp=2097152,pp=61"], "--target 127926272: more than 1,048,576 pairs of them"),
        (["--source", "page=99999999"], "alike again after 51,199,999,488 tokens"),
        (["--layers", "100000000"], "--layers 100000000: at most 4096"),
        (["--tokens", "2000000000"], "--tokens 2000000000: at most 16777216"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in printed(capsys, *arguments, status=2)
