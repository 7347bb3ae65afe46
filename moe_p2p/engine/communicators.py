"""Which numbers the communicators of one engine have in immediates (csrc/engine/imm_counter.h).

The ranks of a communicator agree on a number that is free at all of their engines
(moe/rendezvous/agreement.py). A number returns once nothing can come with it any more: the
connections that lead here with it are severed. That is done late, when healthy partners have ended
theirs long ago, so it ends those of lost and stopped ones alone. Any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from moe_p2p import errors, log

MOST = 512  # ImmKey::kMaxCommunicators


class Communicators:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = dict[int, int]()  # number: tag
        self._ended = deque[tuple[int, int]]()  # number and tag, the longest ago first
        self.next = 0  # behind the last one that was taken: what returns is used as late as can be
        self.taken = 0  # bit n: number n is in use, or partners may still send with it

    def take(self, number: int, tag: int) -> Callable[[], None]:
        """tag: of the communicator's connections, and of no others. Returns what is to be called
        once it is closed here; only the first call does anything."""
        with self._lock:
            errors.require(
                not self.taken >> number & 1,
                f"communicator number {number} was taken on this engine meanwhile: two threads "
                "make communicators on it at a time; make one after the other, in one order on all "
                "ranks",
            )
            self.taken |= 1 << number
            self.next = (number + 1) % MOST
            self._open[number] = tag
        return partial(self._end, number, tag)

    def _end(self, number: int, tag: int) -> None:
        with self._lock:
            if self._open.get(number) == tag:
                del self._open[number]
                self._ended.append((number, tag))

    def reclaim(self, sever: Callable[[int], None], world_size: int) -> None:
        """Gives numbers back until so few are taken that, whichever they are at each rank, one is
        free at all of them. sever: ends the connections of a tag, as Engine.sever does; where it
        cannot, a number never returns."""
        while self.taken.bit_count() > MOST // (world_size + 1):
            with self._lock:
                if not self._ended:
                    return
                number, tag = self._ended.popleft()
            try:
                sever(tag)
            except errors.UnavailableError:
                continue
            except errors.MoeP2pError as error:
                log.warning(f"communicator number {number} is not free yet: {error}")
                with self._lock:
                    self._ended.append((number, tag))  # a later call tries it again
                return
            with self._lock:
                self.taken &= ~(1 << number)
