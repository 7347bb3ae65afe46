"""Ranks as threads of this process that repeat a call together, for the benchmarks here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist

from moe_p2p import AllToAll, AllToAllConfig

DEADLINE_S = 60.0


class Team:
    """One AllToAll per thread. `step(function)` runs function(all_to_all) on all of them.

    A step begins and ends at a barrier of the threads: it takes as long as its slowest rank.
    """

    def __init__(self, config: AllToAllConfig, *, world_size: int) -> None:
        torch.set_num_threads(1)
        self._function: Callable[[AllToAll], None] | None = None
        self._errors: list[BaseException] = []
        self._barrier = threading.Barrier(world_size + 1, timeout=DEADLINE_S)
        store = dist.HashStore()
        self._threads = [
            threading.Thread(target=self._run, args=(store, config, rank, world_size), daemon=True)
            for rank in range(world_size)
        ]
        for thread in self._threads:
            thread.start()
        self._wait()

    def step(self, function: Callable[[AllToAll], None]) -> None:
        self._function = function
        self._wait()
        self._wait()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._function = None
        if not self._errors:
            self._wait()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise self._errors[0] if self._errors else TimeoutError("a rank is late") from None

    def _run(
        self, store: dist.HashStore, config: AllToAllConfig, rank: int, world_size: int
    ) -> None:
        try:
            with AllToAll(store, config, rank=rank, world_size=world_size) as all_to_all:
                self._barrier.wait()
                while True:
                    self._barrier.wait()
                    if self._function is None:
                        return
                    self._function(all_to_all)
                    self._barrier.wait()
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            self._errors.append(error)
            self._barrier.abort()
