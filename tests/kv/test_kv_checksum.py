"""The checksum of a layer: equal for equal rows, and for nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moe_p2p import InvalidArgumentError
from moe_p2p.engine import checksum
from moe_p2p.engine.checksum import add, rows_checksum
from moe_p2p.kv.receiver import Verify
from tests.support import warm
from tests.support.kv_world import World

ROOT = Path(__file__).resolve().parents[2]


def rows(seed: int, nbytes: int = 4096) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator).to(torch.uint8)


def test_workers_that_meet_load_what_sums_of_their_rows_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU: else the first request that is checked would, and others wait for it."""
    seen: list[int] = []
    monkeypatch.setattr(checksum, "prepare", lambda memory, row_bytes: seen.append(row_bytes))
    pairs = [pair for link in World().links for pair in link.pairs]
    rows = [{move.shape.row_bytes for move in pair.plan.moves} for pair in pairs]
    assert sorted(seen) == sorted(each for found in rows for each in found)


@pytest.mark.parametrize("row_bytes", [1, 7, 8, 12, 64])
def test_it_does_not_depend_on_where_rows_lie(row_bytes: int) -> None:
    data = rows(1, 24 * row_bytes).view(6, 4, row_bytes)
    here, there = torch.zeros(3, 9, 4, row_bytes + 5).byte(), torch.zeros(9, 2, 4, row_bytes).byte()
    ours, theirs = torch.tensor([5, 0, 8, 3, 2, 7]), torch.tensor([1, 2, 3, 4, 6, 0])
    here[1, ours, :, :row_bytes], there[theirs, 1] = data, data
    sums = [
        rows_checksum(
            memory,
            units,
            offset=offset,
            unit=unit,
            row_bytes=row_bytes,
            num_rows=4,
            row_stride=row_stride,
            first_row=3,
        )
        for memory, units, offset, unit, row_stride in (
            (here, ours, 9 * 4 * (row_bytes + 5), 4 * (row_bytes + 5), row_bytes + 5),
            (there, theirs, 4 * row_bytes, 8 * row_bytes, row_bytes),
        )
    ]
    assert sums[0] == sums[1] != 0


def of(data: torch.Tensor, units: list[int], first_row: int = 0) -> int:
    return rows_checksum(
        data,
        torch.tensor(units),
        offset=0,
        unit=64,
        row_bytes=64,
        num_rows=1,
        row_stride=64,
        first_row=first_row,
    )


def test_every_byte_and_every_order_matters() -> None:
    data = rows(2)
    right = of(data, [0, 1, 2, 3])
    for byte in range(0, 256, 5):
        for bit in (0, 7):
            wrong = data.clone()
            wrong[byte] ^= 1 << bit
            assert of(wrong, [0, 1, 2, 3]) != right
    assert len({of(data, order) for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 2])}) == 3
    two = data.clone()
    two[7] ^= 0x80  # the highest bits of two words: they would cancel in a sum of products
    two[15] ^= 0x80
    assert of(two, [0, 1, 2, 3]) != right


def test_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    data, whole = rows(3), list(range(64))
    right = of(data, whole)
    assert add(of(data, whole[:20]), of(data, whole[20:], first_row=20)) == right
    monkeypatch.setattr(checksum, "_PIECE_BYTES", 7 * 64)
    assert of(data, whole) == right


def test_rows_outside_of_memory_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="rows end at byte 4160 of memory of 4096"):
        of(rows(4), [64])


@pytest.mark.parametrize("mode", ["never", "sample:", "sample:2", "sample:-1"])
def test_wrong_modes_are_refused(mode: str) -> None:
    with pytest.raises(InvalidArgumentError, match="verify is"):
        Verify(mode)


def test_a_sample_is_about_its_share() -> None:
    assert Verify("sample:0.25").share == 0.25
    drawn = sum(Verify("sample:0.25").draw() for _ in range(4000))
    assert 800 < drawn < 1200  # 7 sigma
    assert Verify("always").draw()
    assert not Verify("off").draw()


def test_triton_gives_the_same_value() -> None:
    """In its interpreter, which Triton decides about when it is imported."""
    pytest.importorskip("triton")
    done = warm.run(
        *("-m", "pytest", "-q", "tests/support/kv_checksum_cases.py"),
        cwd=warm.ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_a_part_of_a_tensor_has_the_sum_of_its_own_bytes() -> None:
    """Offsets counted from the storage's begin before."""
    data = rows(5)
    part = data[1024:2048]
    assert of(part, [0, 3]) == of(part.clone(), [0, 3]) != of(data, [0, 3])
