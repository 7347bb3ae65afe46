"""Names ranks that are late on GPUs, long before a deadline: kernels say nothing until then.

A thread looks at words of the device's memory now and then, by copies beside the kernels. Ranks
make the same calls in one order, so whoever has not begun for so long what this rank's kernels have
begun is late. Hosts of a node tell each other (csrc/moe/node/progress.h); of other nodes they know
what has arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from moe_p2p import log
from moe_p2p.library import call
from moe_p2p.moe.counts import OnDevice

_ops = torch.ops.moe_p2p
_MOST_S = 5.0  # as straggles_after() in csrc/moe/node/wait_watch.h


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
        self._count = self._since = 0.0  # how far it is, and since when
        self._named: set[int] = set()  # ranks that are behind
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe_p2p.watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._after / 8):
            try:
                self.look(time.monotonic())
            except RuntimeError as error:  # the device has failed, and calls raise that
                log.info(f"rank {self._rank}: nobody is named any more: {error}")
                return
        if self._named:  # whether they came is said, too
            with suppress(RuntimeError):
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        with self._looking:
            self._look(now, self._glance())

    def _look(self, now: float, seen: OnDevice) -> None:
        count = seen.kernels if self._by_kernel else seen.next_step
        if count == 0:
            return  # nothing has begun
        moved = count != self._count
        if moved and self._named:
            self._over(now, set(seen.masked))
        if moved:
            self._count, self._since = count, now
        late = now - self._since >= self._after and not self._named
        waited_ms = round(1e3 * (now - self._since)) if late else 0
        more = max(seen.next_step - 1, 0), waited_ms, seen.masked
        behind = call(
            _ops.all_to_all_watch.default, self._comm(), count, self._preparing > 0, *more
        )
        if late:
            self._named = set(behind)
        elif self._named and not self._named.intersection(behind):
            self._over(now, set(seen.masked))
            self._since = now

    def _over(self, now: float, masked: set[int]) -> None:
        came, gone = (
            ", ".join(f"rank {each}" for each in sorted(ranks))
            for ranks in (self._named - masked, self._named & masked)
        )
        self._named = set()
        how = "; ".join(filter(None, [came and f"{came} came", gone and f"{gone} masked"]))
        log.warning(f"rank {self._rank} goes on after {1e3 * (now - self._since):.0f} ms: {how}")

    @contextmanager
    def prepares(self) -> Iterator[None]:
        """Within, kernels are compiled: this rank is late, and its neighbours do not name it."""
        self._preparing += 1
        self.look(time.monotonic())
        try:
            yield
        finally:
            self._preparing -= 1

    def close(self) -> None:
        """No op is called afterwards."""
        self._stop.set()
        self._thread.join()
