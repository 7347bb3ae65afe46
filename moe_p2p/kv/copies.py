"""Copies of small rows between KV pages and the ring: on the CPU, or on a stream of the GPU.

Used by moe_p2p/kv/packing.py (gather) and moe_p2p/kv/unpacking.py (scatter).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import require
from moe_p2p.kv.memory import KVRequest
from moe_p2p.library import call
from moe_p2p.machine import jit
from moe_p2p.machine.driver import relaxed_captures


class Placed(NamedTuple):
    """Units where a copy reads them, and the lowest and the highest one."""

    units: Tensor
    least: int
    most: int


class Rows(NamedTuple):
    """Row r of unit u of `units` begins at offset + u * unit + r * row_stride of `memory`; rows are
    numbered across units, and the copy is of those from first_row on."""

    memory: Tensor
    placed: Placed
    where: tuple[int, int, int, int, int]  # offset, unit, row_bytes, num_rows, row_stride
    first_row: int

    def check(self) -> None:
        """A kernel would not."""
        offset, unit, row_bytes, num_rows, row_stride = self.where
        begin = offset + self.placed.least * unit
        end = offset + self.placed.most * unit + (num_rows - 1) * row_stride + row_bytes
        nbytes = self.memory.numel() * self.memory.element_size()
        require(
            begin >= 0 and end <= nbytes,
            f"rows at bytes {begin} to {end} of KV memory of {nbytes} bytes",
        )


def rows_of_request(request: KVRequest, *, at_source: bool) -> tuple[int, int, int, int, int]:
    shape = request.move.shape
    if at_source:
        offset, unit, stride = request.source.offset, shape.source_unit, shape.source_row_stride
    else:
        offset, unit, stride = request.target.offset, shape.target_unit, shape.target_row_stride
    return offset, unit, shape.row_bytes, shape.num_rows, stride


class Copy:
    """One that was started. event: None where it is done already."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        if self._event is None:
            return True
        with relaxed_captures():
            return bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            with relaxed_captures():
                self._event.synchronize()


def pack_kernel(device: torch.device) -> int:
    """Returns kernels/pack.cu."""
    return jit.load(device.index or 0, "pack.cu", "moe_p2p_pack", {})


class Copier:
    """num_sms: multiprocessors that a copy on a GPU takes. Its stream is its own, so neither the
    user's kernels nor these wait for each other; whoever needs the bytes asks the `Copy`. Any
    thread may call it, also while another one captures a CUDA graph."""

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self._stream: Any = None
        self._on_gpu = (0, 0, 0)  # last arguments of the op
        if device.type == "cuda":
            with relaxed_captures():
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._on_gpu = (pack_kernel(device), num_sms, self._stream.cuda_stream)

    def place(self, units: Tensor) -> Placed:
        bounds = int(units.min()), int(units.max())
        if self._stream is None:
            return Placed(units, *bounds)
        with self._on_stream():
            return Placed(units.to(self._stream.device), *bounds)

    def copy(self, rows: Rows, packed: Tensor, *, gather: bool) -> Copy:
        """As many rows as `packed` has room for."""
        rows.check()
        flat = rows.memory.reshape(-1).view(torch.uint8)
        where = (rows.placed.units, *rows.where, rows.first_row)
        arguments = (flat, packed, *where, gather, *self._on_gpu)
        if self._stream is None:
            call(torch.ops.moe_p2p.copy_rows.default, *arguments)
            return Copy(None)
        with relaxed_captures():
            call(torch.ops.moe_p2p.copy_rows.default, *arguments)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Copy(event)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On its device, also in threads whose current device is another."""
        with relaxed_captures(), torch.cuda.stream(self._stream):
            yield
