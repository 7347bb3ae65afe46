"""Names the rank that a kernel waits for, long before its deadline: kernels say nothing until then.

A thread looks at words of the device's memory now and then, by copies beside the kernels. A kernel
that has begun and not ended for so long waits for a rank that has begun fewer kernels, which hosts
of a node tell each other (csrc/moe/node/progress.h), or for another node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from moe_p2p import log
from moe_p2p.library import call
from moe_p2p.moe.counts import OnDevice

_ops = torch.ops.moe_p2p
_MOST_S = 5.0  # as straggles_after() in csrc/moe/node/wait_watch.h


class _Stall(NamedTuple):
    """begun: the kernel's number. ranks: that were named; None: nobody yet."""

    begun: int
    since: float
    ranks: list[int] | None = None


class Watch:
    """From the set-up's end until close().

    rank, timeout_s: of the communicator; comm(): its number. glance: what the device counts.
    by_kernel: ranks have launched equally many kernels, as where none comes, goes or is masked.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        comm: Callable[[], int],
        glance: Callable[[], OnDevice],
        *,
        by_kernel: bool,
    ) -> None:
        self._rank, self._comm, self._glance, self._by_kernel = rank, comm, glance, by_kernel
        self._after = min(timeout_s / 4, _MOST_S)
        self._preparing = 0  # calls that compile
        self._stall: _Stall | None = None
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe_p2p.watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._after / 8):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        with self._looking:
            self._look(now, self._glance())

    def _look(self, now: float, seen: OnDevice) -> None:
        before, begun = self._stall, seen.begun
        if before is not None and (begun == seen.ended or begun != before.begun):
            self._over(before, now, set(seen.masked))
            before = None
        if before is None and begun != seen.ended:
            before = _Stall(begun, now)
        self._stall = before
        late = before is not None and before.ranks is None and now - before.since >= self._after
        ran_ms = int(1e3 * (now - before.since)) if late and before is not None else 0
        count = seen.kernels if self._by_kernel else seen.next_step
        step = max(seen.next_step - 1, 0)
        more = step, ran_ms, seen.masked
        named = call(_ops.all_to_all_watch.default, self._comm(), count, self._preparing > 0, *more)
        if named and before is not None:
            self._stall = before._replace(ranks=named)

    @contextmanager
    def prepares(self) -> Iterator[None]:
        """Within, kernels are compiled: this rank is late, and its neighbours do not name it."""
        self._preparing += 1
        self.look(time.monotonic())
        try:
            yield
        finally:
            self._preparing -= 1

    def _over(self, stall: _Stall, now: float, masked: set[int]) -> None:
        if stall.ranks is None:
            return
        ranks = ", ".join(f"rank {each}" for each in stall.ranks if each not in masked)
        gone = ", ".join(f"rank {each}" for each in stall.ranks if each in masked)
        how = "; ".join(filter(None, [ranks and f"{ranks} came", gone and f"{gone} masked"]))
        log.warning(f"rank {self._rank} goes on after {1e3 * (now - stall.since):.0f} ms: {how}")

    def close(self) -> None:
        """No op is called afterwards."""
        self._stop.set()
        self._thread.join()
