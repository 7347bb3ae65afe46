"""What an engine rank has of one attempt: immediates counted, sums compared. Used by
engine_rank.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import ProtocolError, make
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.weights import attempt
from moe_p2p.weights.attempt import Keys
from moe_p2p.weights.engine_buffers import EngineBuffers
from moe_p2p.weights.plan import Write


class Arrivals:
    """who: id of the engine rank. nics: of each trainer."""

    def __init__(
        self,
        engine: Engine,
        words: StoreKeys,
        buffers: EngineBuffers,
        who: str,
        nics: Sequence[int],
    ) -> None:
        self._engine, self._words, self._buffers = engine, words, buffers
        self._who, self._nics = who, nics
        self._expected: Sequence[Write] = ()
        self._sources: list[int] = []  # trainers that write them
        self._counts: dict[int, int] = {}  # immediates by trainer

    def begin(self, expected: Sequence[Write]) -> None:
        self._expected, self._counts = expected, {}
        self._sources = sorted({write.source_rank for write in expected})

    def _count(self, keys: Keys) -> int | None:
        """Returns how many immediates the attempt has; None until all trainers have said so."""
        if not self._counts:
            found = {}  # of all of them: the store may fail in between
            for trainer in self._sources:
                theirs: dict[str, Any] | None = self._words.get(keys.requests(trainer))
                if theirs is None:
                    return None
                found[trainer] = int(theirs.get(self._who, 0)) * self._nics[trainer]
            self._counts = found
        return sum(self._counts.values())

    def counted(self, keys: Keys) -> bool:
        """Returns whether all immediates have arrived, and so all bytes."""
        expected = self._count(keys)
        if expected is None:
            return False
        counted = self._engine.imm_value(attempt.immediate(keys))
        if counted > expected:
            text = f"counted {counted} immediates, the trainers sent {expected}"
            raise make(ProtocolError, text)
        if counted == expected and expected:  # for kernels that follow
            self._engine.wait_imm(attempt.immediate(keys), expected)
        return counted == expected

    def checked(self, keys: Keys) -> bool:
        """Compares sums; False until the trainers have given theirs."""
        for trainer in self._sources:
            theirs = self._words.get(keys.sent(trainer))
            if theirs is None:
                return False
            ours = self._buffers.sums(w for w in self._expected if w.source_rank == trainer)
            wrong = [name for name, each in ours.items()
                     if theirs.get(self._who, {}).get(name) != each]  # fmt: skip
            if wrong:
                text = f"what trainer {trainer} wrote to {', '.join(wrong)} is not what it sent"
                raise make(ProtocolError, text)
        return True

    def missing(self, keys: Keys) -> str:
        late = [f"trainer {i}" for i in self._sources if self._words.get(keys.sent(i)) is None]
        counted = self._engine.imm_value(attempt.immediate(keys))
        return f"{counted} immediates counted; not done: {', '.join(late) or 'none'}"
