"""The Triton checksum gives the value of the CPU; run by tests/kv/test_kv_checksum.py.

TRITON_INTERPRET=1 python -m pytest tests/support/kv_checksum_cases.py     # on the CPU
python -m pytest tests/support/kv_checksum_cases.py                        # on a GPU
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from moe_p2p.engine.checksum import rows_checksum  # noqa: E402
from moe_p2p.kernels.triton.kv_checksum import rows_checksum as by_triton  # noqa: E402

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
# offset, unit, row_bytes, num_rows, row_stride: words, halves of words, bytes, and a long row.
SHAPES = [
    (0, 64, 64, 1, 64),
    (64, 96, 16, 2, 48),
    (4, 100, 12, 3, 20),
    (3, 71, 7, 2, 31),
    (2, 54, 10, 1, 10),
    (8, 9000, 9000, 1, 9000),
]


@pytest.mark.parametrize("where", SHAPES)
def test_both_give_the_same_value(where: tuple[int, int, int, int, int]) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 256, (80_000,), generator=generator).to(torch.uint8)
    units = torch.tensor([5, 0, 3, 7], dtype=torch.int32)
    offset, unit, row_bytes, num_rows, row_stride = where
    wanted = rows_checksum(
        memory,
        units,
        offset=offset,
        unit=unit,
        row_bytes=row_bytes,
        num_rows=num_rows,
        row_stride=row_stride,
        first_row=11,
    )
    assert int(by_triton(memory.to(DEVICE), units, where, 11)) == wanted != 0
