"""How the ranks of one `connect_ranks` find each other: all of them have to name the same ranks.

Words in the store that the caller has set, below one prefix:

    wants/{rank}   the card of the rank's latest call: a fresh id, the ranks it names, what it has
    saw/{id}       the ids of the cards that the owner of that card saw, in order of ranks

A meeting is over for a rank once all cards name the same ranks and all their owners saw the same
cards. A card of an earlier call, or of a process that has ended, is in nobody's latest view.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from moe_p2p import errors
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.neighbours import has_ended, own_identity
from moe_p2p.fleet.store_keys import StoreKeys

# Between two looks at the store: at first, and at most. Longer: a change takes longer.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.05
_KEPT = 2  # meetings whose words stay: a slower rank may not have read the latest one

Card = dict[str, Any]


class Meetings:
    """Of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._over = deque[str]()  # ids of own cards

    def meet(
        self, words: StoreKeys, ranks: Callable[[], set[int]], about: Card, deadline: Deadline
    ) -> dict[int, Card]:
        """Returns the card of each rank, with what it says about itself.

        ranks: whom this rank names, itself included; may change while it waits, as ranks are lost.
        Raises TimeoutError naming who did not come, or named others.
        """
        mine: Card = {}
        seen: dict[int, Card] = {}
        pause = _FIRST_PAUSE_S
        with words.within(deadline):
            while True:
                named = sorted(ranks())
                if mine.get("ranks") != named:
                    who = {"id": secrets.token_hex(8), "process": own_identity()}
                    mine = about | who | {"ranks": named}
                    words.put(f"wants/{self._rank}", mine)
                    seen = {}
                if seen and self._agreed(words, seen):
                    self._keep(words, mine["id"])
                    return seen
                cards = self._cards(words, named)
                whole = len(cards) == len(named)
                whole = whole and all(card["ranks"] == named for card in cards.values())
                if whole and _ids(cards) != _ids(seen):
                    seen, pause = cards, _FIRST_PAUSE_S
                    words.put(f"saw/{mine['id']}", _ids(seen))
                    continue
                if not deadline.left:
                    raise self._missing(named, cards, deadline)
                time.sleep(min(pause, deadline.left))
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def _cards(self, words: StoreKeys, named: list[int]) -> dict[int, Card]:
        found = {rank: words.get(f"wants/{rank}") for rank in named}
        return {r: card for r, card in found.items() if card and not has_ended(card["process"])}

    def _agreed(self, words: StoreKeys, seen: dict[int, Card]) -> bool:
        ids = _ids(seen)
        return all(words.get(f"saw/{each}") == ids for each in ids)

    def _keep(self, words: StoreKeys, own: str) -> None:
        self._over.append(own)
        if len(self._over) > _KEPT:
            words.drop(f"saw/{self._over.popleft()}")

    def _missing(
        self, named: list[int], cards: dict[int, Card], deadline: Deadline
    ) -> errors.MoeP2pError:
        absent = [rank for rank in named if rank not in cards]
        others = [
            f"rank {rank} connects {card['ranks']}"
            for rank, card in cards.items()
            if card["ranks"] != named
        ]
        said = [*(f"rank {rank} has not called" for rank in absent), *others]
        text = f"rank {self._rank}: connect_ranks waited {deadline.timeout_s:g} s for ranks {named}"
        text += f" to connect the same ranks, itself included: {'; '.join(said) or 'no answer'}"
        return errors.make(errors.TimeoutError, text)


def _ids(cards: dict[int, Card]) -> list[str]:
    return [card["id"] for card in cards.values()]
