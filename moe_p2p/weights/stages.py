"""Stages of what a rank of weight updates does: when it reached each, for people and for traces."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from moe_p2p.machine import phases
from moe_p2p.machine.phases import TRANSFER, WAIT, Mark, Phase

# What ends with each stage. WAIT of an engine rank ends with the first immediate.
OF_TRAINER = {
    "begin": "announce",
    "maxima": "maxima",
    "ready": "await buffers",
    "converted": "conversion",
    "written": TRANSFER,
    "sent": "report",
    "arrived": "await arrivals",
    "decided": "commit",
}
OF_ENGINE_RANK = {
    "planned": "plan",
    "registered": "register",
    "read": "read from peers",
    "waited": WAIT,
    "arrived": TRANSFER,
    "decided": "commit",
    "copied": "copy",
    "offered": "finish",
}


class Stages(dict[str, float]):
    """Seconds from the beginning of the set-up, or of the last attempt, to each stage."""

    def __init__(self, track: str, engine: int, parts: Mapping[str, str]) -> None:
        super().__init__()
        self._track, self._engine, self._parts = track, engine, parts
        self._what: tuple[int | None, list[int]] = None, []
        self._goes_on = False
        self.begin()

    def begin(self, version: int | None = None, imm: int | None = None) -> None:
        """imm: of the attempt, where it arrives here. None: of the set-up."""
        self.clear()
        self.began = time.monotonic()
        self._what, self._goes_on = (version, [] if imm is None else [imm]), True

    def reached(self, stage: str) -> None:
        self[stage] = time.monotonic() - self.began

    def over(self, why: str = "", marks: Sequence[Mark] = ()) -> None:
        """why: it failed; "": it did not. marks: as of a Phase."""
        if self._goes_on and phases.take is not None:
            phases.take(self._phase(is_over=True, why=why, marks=marks))
        self._goes_on = False

    def under_way(self, marks: Sequence[Mark] = ()) -> list[Phase]:
        return [self._phase(is_over=False, why="", marks=marks)] if self._goes_on else []

    def _phase(self, *, is_over: bool, why: str, marks: Sequence[Mark]) -> Phase:
        version, imms = self._what
        reached = {stage: self.began + after for stage, after in list(self.items())}
        parts = [(part, reached.get(stage)) for stage, part in self._parts.items()]
        if is_over and (why or not reached):
            parts.append(("failed" if why else "end", time.monotonic()))
        return Phase(
            track=self._track,
            user="weights",
            name="set-up" if version is None else f"update to version {version}",
            begin=self.began,
            parts=parts,
            is_over=is_over,
            args={"failed": why} if why else {},
            marks=[each for each in marks if each[1] >= self.began],
            engine=self._engine,
            imms=imms,
        )
