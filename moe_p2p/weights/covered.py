"""What writes cover of their targets, in as few parts as can be. Pure; used by engine_buffers.py.

A model with many experts has thousands of writes to some hundred tensors. On a GPU a kernel for
each write would take longer than the update itself; writes that follow each other without a gap are
one part here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from moe_p2p.weights import attempt
from moe_p2p.weights.plan import Write


class Span(NamedTuple):
    """Rows of a tensor: `begin`, row_bytes and stride are bytes."""

    tensor: str
    begin: int
    num_rows: int
    row_bytes: int
    stride: int

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns a view of its bytes, [num_rows, row_bytes]."""
        data = attempt.as_bytes(tensors[self.tensor])
        at = int(data.storage_offset()) + self.begin
        return data.as_strided((self.num_rows, self.row_bytes), (self.stride, 1), at)


def covered(writes: Iterable[Write]) -> list[Span]:
    """Returns the bytes that the writes change, and no other byte."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    found: list[Span] = []
    for write in writes:
        rows, tensor = write.rows, write.target_tensor
        stride, nbytes = rows.target_stride or rows.row_bytes, rows.row_bytes * rows.num_rows
        for _, begin in rows.offsets:
            if rows.num_rows == 1 or stride == rows.row_bytes:
                spans[tensor].append((begin, begin + nbytes))
            else:
                found.append(Span(tensor, begin, rows.num_rows, rows.row_bytes, stride))
    for tensor, each in spans.items():
        found += [Span(tensor, a, 1, b - a, b - a) for a, b in _joined(each)]
    return found


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first byte, end) where spans touch as one."""
    first = end = -1
    for begin, after in sorted(spans):
        if begin > end:
            if end >= 0:
                yield first, end
            first = begin
        end = max(end, after)
    if end >= 0:
        yield first, end
