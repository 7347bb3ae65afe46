"""Ranks of this node whose process has ended are masked on the GPU at once: kernels know the
deadline alone, and a wait of theirs ends where it finds its rank masked.

What such a rank had sent counts as absent, also where it had arrived. A rank that has closed its
communicator sent all before, and is left to the deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_p2p import log
from moe_p2p.library import call

_ops = torch.ops.moe_p2p
_EVERY_S = 0.05  # a system call for each rank of the node


class Lookout:
    """A thread, from the set-up's end until close(). masks: int32 [W], of the kernels."""

    def __init__(self, comm: int, masks: Tensor) -> None:
        self._comm, self._masks = comm, masks
        self._copies: tuple[torch.cuda.Stream, Tensor] | None = None
        if masks.is_cuda:  # a copy engine is free while kernels that wait have all multiprocessors
            stream = torch.cuda.Stream(masks.device)  # type: ignore[no-untyped-call]
            self._copies = stream, torch.ones(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._stop, self._lock, self._known = threading.Event(), threading.Lock(), set[int]()
        self._thread = threading.Thread(target=self._run, name="moe_p2p.lookout", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        for rank in call(_ops.all_to_all_ended.default, self._comm):
            if rank not in self._known:
                log.warning(f"rank {rank} is masked: its process has ended")
                self._known.add(rank)
            self._mask(rank)  # again each time: clean_masks may have taken it back

    def _mask(self, rank: int) -> None:
        if self._copies is None:
            self._masks[rank] = 1
            return
        stream, one = self._copies
        with torch.cuda.stream(stream):
            self._masks[rank : rank + 1].copy_(one, non_blocking=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, another epoch is entered: who was lost of the one before is not masked in it."""
        with self._lock:
            if self._copies is not None:
                self._copies[0].synchronize()
            yield
            self._known.clear()

    def close(self) -> None:
        """No mask is written afterwards."""
        self._stop.set()
        self._thread.join()
        if self._copies is not None:
            self._copies[0].synchronize()
