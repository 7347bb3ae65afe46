"""Names what is waited for long before its deadline, once, and says when that wait was over.

Used where a loop looks at its waits again and again: KV workers, ranks of a weight update.
(Waits of dispatch and combine: csrc/moe/node/wait_watch.h.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moe_p2p import log

# Of the deadline. Less: a prefill that waits in its queue, or an update of many bytes, is named in
# healthy runs.
_SHARE = 0.5


class Wait(NamedTuple):
    """since: of the same clock as `now` below. text: "for a/0: request 'r'", once it is named."""

    since: float
    limit_s: float
    text: Callable[[], str]


class Late:
    """For one thread, or under its owner's lock. count: how many waits were named."""

    def __init__(self, name: str) -> None:
        self._name, self._named = name, dict[Any, tuple[float, str]]()
        self.count = 0

    def look(self, now: float, waits: Mapping[Any, Wait]) -> None:
        """waits: all there are, by what they are; one that was named and is missing is over."""
        for what in [what for what in self._named if what not in waits]:
            since, text = self._named.pop(what)
            log.warning(f"{self._name}: a wait is over after {now - since:.1f} s: {text}")
        for what, wait in waits.items():
            waited = now - wait.since
            if what not in self._named and waited > _SHARE * wait.limit_s:
                text = wait.text()
                self._named[what] = wait.since, text
                self.count += 1
                limit = f"of at most {wait.limit_s:g}"
                log.warning(f"{self._name} has waited {waited:.1f} s, {limit}: {text}")
