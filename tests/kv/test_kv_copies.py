"""Small rows are gathered and scattered, on the CPU; tests/gpu/test_gpu_pack.py: on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moe_p2p import InvalidArgumentError
from moe_p2p.kv import ring
from moe_p2p.kv.ring import Copier, Rows

CPU = Copier(torch.device("cpu"), 1)


def test_rows_of_units_follow_each_other() -> None:
    """From row 1 of unit 3 to row 0 of unit 2, which are rows 1 to 4 of all."""
    memory = torch.arange(4 * 16, dtype=torch.uint8)
    place = CPU.place(torch.tensor([3, 0, 2]))
    rows = Rows(memory, place, (1, 16, 3, 2, 8), first_row=1)
    packed = torch.zeros(4 * 3, dtype=torch.uint8)
    assert CPU.copy(rows, packed, gather=True).done()
    assert packed.view(4, 3).tolist() == [[at, at + 1, at + 2] for at in (57, 1, 9, 33)]
    target = torch.full_like(memory, 255)
    CPU.copy(rows._replace(memory=target), packed, gather=False).wait()
    written = torch.cat([torch.arange(at, at + 3) for at in (57, 1, 9, 33)])
    assert torch.equal(target[written], memory[written])
    assert int((target != 255).sum()) == 12


@pytest.mark.parametrize(("units", "end"), [([4], 75), ([-1], -5)])
def test_rows_outside_of_memory_are_refused(units: list[int], end: int) -> None:
    memory, packed = torch.zeros(64, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    rows = Rows(memory, CPU.place(torch.tensor(units)), (0, 16, 3, 2, 8), 0)
    with pytest.raises(InvalidArgumentError, match=f"to {end} of KV memory of 64 bytes"):
        CPU.copy(rows, packed, gather=True)
    with pytest.raises(RuntimeError, match=r"row 0 lies at byte -?\d+ of memory of 64 bytes"):
        torch.ops.moe_p2p.copy_rows.default(
            memory, packed, rows.placed.units, *rows.where, 0, False
        )


@pytest.mark.parametrize(
    ("nbytes", "first", "text"),
    [(4, 0, "4 packed bytes are not rows of 3"), (9, 0, "rows 0 to 3 of 2"), (3, -1, "rows -1 to")],
)
def test_what_is_not_whole_rows_is_refused(nbytes: int, first: int, text: str) -> None:
    memory, packed = torch.zeros(64, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    rows = Rows(memory, CPU.place(torch.tensor([0])), (0, 16, 3, 2, 8), first)
    with pytest.raises(InvalidArgumentError, match=text):
        CPU.copy(rows, packed, gather=True)


def test_an_event_is_asked_for_while_another_thread_may_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CUDA does: in the mode that threads begin with the question would break the capture."""
    modes = ["global"]

    @contextmanager
    def relaxed() -> Iterator[None]:
        modes.append("relaxed")
        yield
        modes.pop()

    class Event:
        def query(self) -> bool:
            assert modes[-1] == "relaxed"
            return True

        def synchronize(self) -> None:
            assert self.query()

    monkeypatch.setattr(ring, "relaxed_captures", relaxed)
    copy = ring.Copy(Event())
    copy.wait()
    assert copy.done()
    assert modes == ["global"]
