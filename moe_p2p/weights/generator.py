"""The generators' end of weight updates: counts what arrives, and goes to a version with its fleet.

    generator = WeightGenerator(engine, store, layout, rank, tensors)  once, with all trainers
    generator.step()                                                   between forward passes

An engine's ranks go to a version after the same step, so that no forward pass sees two. A version
that failed anywhere is nobody's: a shadow keeps the old one, in place the target is dirty.
docs/weights.md explains it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

from moe_p2p import log
from moe_p2p.engine import Engine
from moe_p2p.errors import AbortedError, ProtocolError, TimeoutError, make, require
from moe_p2p.weights import attempt
from moe_p2p.weights.attempt import COMMIT, Keys
from moe_p2p.weights.board import Board, Deadline
from moe_p2p.weights.inbox import Finalize, Inbox
from moe_p2p.weights.layout import WeightLayout

Mode = Literal["shadow", "in_place"]
# Smallest of what an engine's ranks give it, on each of them; called once a step.
Agree = Callable[[int], int]


def agree_in(group: Any) -> Agree:
    """Over a CPU process group of the engine's ranks."""

    def smallest(number: int) -> int:
        value = torch.tensor([number], device="cpu")
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN, group=group)
        return int(value)

    return smallest


class WeightGenerator:
    """One generator rank.

    engine, store, name, timeout_s: as of `WeightTrainer`. layout: of all generators of the fleet.
    tensors: what this rank's kernels read, by the layout's names, and derived ones; contiguous.
    mode: "shadow": updates land in a second buffer while the engine generates. "in_place": they
        land in the tensors; the engine pauses for `begin` until `wait` has returned.
    engine_ranks: ranks of the inference engine that this rank is of; (): alone. agree: takes the
        smallest of their numbers, over the engine's own control path.
    finalize: makes derived tensors, and those of parameters that arrive in checkpoint layout.
    poison: what an update will write is NaN until it is written.
    """

    def __init__(
        self,
        engine: Engine,
        store: Any,
        layout: WeightLayout,
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        mode: Mode = "shadow",
        engine_ranks: Sequence[int] = (),
        agree: Agree | None = None,
        finalize: Finalize | None = None,
        poison: bool = False,
        name: str = "weights",
        timeout_s: float = 30.0,
    ) -> None:
        require(mode in ("shadow", "in_place"), f"mode is {mode!r}, must be 'shadow' or 'in_place'")
        require(
            mode == "in_place" or len(engine_ranks) < 2 or agree is not None,
            f"generator {rank}: ranks {tuple(engine_ranks)} of an engine go to a version together; "
            "pass agree",
        )
        self.engine, self.rank, self.mode, self.timeout_s = engine, rank, mode, timeout_s
        self.version: int | None = None  # what the tensors hold
        self.dirty = False
        self._shared = len(engine_ranks) > 1
        self.stages: dict[str, float] = {}  # of the last update: seconds since it was seen
        self._agree: Agree = agree or (lambda number: number)
        self._poison = poison
        self._board = Board(store, name)
        deadline = Deadline(timeout_s)
        self.plan = attempt.agree_on_plan(self._board, "generator", rank, layout, deadline)
        self._tensors = dict(tensors)
        self._inbox = Inbox(
            engine, self.plan, rank, tensors, shadow=mode == "shadow", finalize=finalize
        )
        self._sources = self.plan.of_target(rank)
        self._generation = 0
        self._lend()
        found = self._board.wait({f"trainer {i}": f"trainer {i}" for i in self._trainers}, deadline)
        self._expected = sum(
            counts.writes * int(found[f"trainer {i}"]["nics"])
            for i, counts in self._sources.items()
        )
        self._attempt = 1
        self._committed = 0  # the last attempt that this rank knows the fleet decided for
        self._update: dict[str, Any] | None = None
        self._deadline: Deadline | None = None
        self._began = time.monotonic()
        self._open = self._arrived = False
        self.failure = ""  # of the last attempt
        if mode == "shadow":
            self._offer()

    @property
    def _trainers(self) -> range:
        return range(self.plan.source.world_size)

    def _lend(self) -> None:
        lent = self._inbox.lend([*self._sources])
        self._board.put(f"generator {self.rank} lends {self._generation}", lent)

    def _offer(self) -> None:
        """Trainers may write from here on."""
        self._update, self._deadline, self._arrived, self._open = None, None, False, True
        if self._poison:
            self._inbox.poison()
        self._board.put(Keys(self._attempt).ready(self.rank), self._generation)

    # --- the engine's side ---

    def step(self) -> int | None:
        """Between forward passes: returns the version of the next one.

        Does not wait, but for `agree`, which all ranks of the engine call in the same step. In
        place it refuses to go on, with ProtocolError, while the tensors are dirty.
        """
        if self.mode == "in_place":
            self.require_clean()
            return self.version
        self._progress()
        if self._agree(self._committed) >= self._attempt:
            self._commit()
            self._offer()
        return self.version

    def require_clean(self) -> None:
        """Before an engine continues."""
        if self.dirty:
            why = self.failure or f"update {self._attempt} is not complete"
            text = (
                f"generator {self.rank}: its tensors are dirty, a mix of versions, until an update "
                f"is complete: {why}"
            )
            raise make(ProtocolError, text)

    def begin(self) -> None:
        """In place: the engine is paused, and its tensors may be overwritten. Then `wait`."""
        require(self.mode == "in_place", "begin: a shadow is always open; call step, or wait")
        require(not self._open, "begin: the update before is not over; call wait")
        while self._board.get(Keys(self._attempt).decision) is not None:
            self._attempt += 1  # failed, since this rank took no part
        self.dirty, self.failure = True, ""
        self._board.put(f"generator {self.rank} runs", None)
        self._offer()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Until the update under way, or the next one, is over; returns the version.

        Raises AbortedError with why it failed, and TimeoutError when nothing began.
        """
        require(
            self.mode == "in_place" or not self._shared,
            "wait: ranks of an engine go to a version in the same step; call step on all of them",
        )
        deadline, number = Deadline(timeout_s or self.timeout_s), self._attempt
        while self._attempt == number:
            if self.mode == "shadow":
                self.step()
            else:
                self._progress()
                if self._committed == number:
                    self._commit()
            if not deadline.left and self._attempt == number:
                self._give_up(f"no update was over within {deadline.timeout_s:g} s")
                raise make(TimeoutError, f"generator {self.rank}: {self.failure}")
            time.sleep(0.001)
        if self.failure:
            raise make(AbortedError, f"generator {self.rank}: the update failed: {self.failure}")
        return self.version

    def _give_up(self, why: str) -> None:
        """In place an open target would be written to later, when the caller does not expect it."""
        self.failure = why
        if self.mode == "in_place":
            decision = self._board.decide(Keys(self._attempt).decision, self._says(why))
            if decision == COMMIT:
                self._commit()
            else:
                self._fail(decision)

    # --- an attempt ---

    def _progress(self) -> None:
        keys = Keys(self._attempt)
        if not self._open or self._committed == self._attempt:
            return
        decision = self._board.get(keys.decision)
        if decision == COMMIT:
            self._committed = self._attempt
        elif decision is not None:
            self._fail(decision)
        else:
            try:
                self._receive(keys)
            except Exception as error:  # of finalize, too: the engine goes on with what it has
                self._board.decide(keys.decision, self._says(str(error)))

    def _receive(self, keys: Keys) -> None:
        if self._update is None:
            self._update = self._board.get(keys.update)
            if self._update is None:
                return
            self._deadline, self._began = Deadline(self.timeout_s), time.monotonic()
            self.stages = {}
            self._reached("begin")
        if self._arrived:
            if self._deadline is not None and not self._deadline.left:
                text = f"no decision of trainer 0 within {self._deadline.timeout_s:g} s"
                raise make(TimeoutError, text)
        elif self._counted(keys) and self._checked(keys):
            self._inbox.finish()
            self._board.put(keys.arrived(self.rank), self._update["version"])
            self._arrived, self._deadline = True, Deadline(2 * self.timeout_s)  # after trainer 0's
            self._reached("arrived")
        elif self._deadline is not None and not self._deadline.left:
            raise make(TimeoutError, self._missing(keys))

    def _reached(self, stage: str) -> None:
        self.stages[stage] = time.monotonic() - self._began

    def _counted(self, keys: Keys) -> bool:
        counted = self.engine.imm_value(attempt.immediate(keys.attempt))
        if counted > self._expected:
            text = f"counted {counted} immediates, the plan has {self._expected}"
            raise make(ProtocolError, text)
        return counted == self._expected

    def _checked(self, keys: Keys) -> bool:
        """False until the trainers have given their sums."""
        assert self._update is not None
        for trainer in self._sources if self._update["verify"] else ():
            theirs = self._board.get(keys.sent(trainer))
            if theirs is None:
                return False
            ours = self._inbox.sums(trainer)
            wrong = [name for name, each in ours.items()
                     if theirs.get(str(self.rank), {}).get(name) != each]  # fmt: skip
            if wrong:
                text = f"what trainer {trainer} wrote to {', '.join(wrong)} is not what it sent"
                raise make(ProtocolError, text)
        return True

    def _missing(self, keys: Keys) -> str:
        late = [f"trainer {i}" for i in self._sources if self._board.get(keys.sent(i)) is None]
        counted = self.engine.imm_value(attempt.immediate(keys.attempt))
        return (
            f"{counted} of {self._expected} immediates within {self.timeout_s:g} s; not done: "
            f"{', '.join(late) or 'none'}"
        )

    def _says(self, why: str) -> str:
        return f"generator {self.rank}: {why}"

    def _commit(self) -> None:
        if self._update is None:  # it was decided between two looks
            self._update = self._board.get(Keys(self._attempt).update)
        assert self._update is not None
        self._reached("decided")
        self._inbox.commit()
        self._reached("copied")
        self.version, self.dirty, self.failure = int(self._update["version"]), False, ""
        self._board.put(f"generator {self.rank} runs", self.version)
        self._next()

    def _fail(self, why: str) -> None:
        """Keys of this attempt are void before the next one may write."""
        log.warning(f"generator {self.rank}: the weight update failed: {why}")
        self.failure = why
        self._inbox.fence()
        self._generation += 1
        self._lend()
        self._next()
        if self.mode == "shadow":
            self._offer()

    def _next(self) -> None:
        with suppress(RuntimeError):
            self.engine.free_imm(attempt.immediate(self._attempt))
        self._board.drop(Keys(self._attempt - 1).ready(self.rank))
        self._board.drop(Keys(self._attempt - 1).arrived(self.rank))
        self._attempt, self._open = self._attempt + 1, False

    # --- truth ---

    def checksums(self) -> dict[str, int]:
        """64 bits for each tensor as it is now."""
        return {name: attempt.whole_sum(tensor) for name, tensor in self._tensors.items()}

    def check_equal(self, reference: Mapping[str, Tensor]) -> None:
        """Compares every byte with what the receiver's own conversion made, by checksums.

        Raises ProtocolError with the tensors that differ. `poison=True` makes sure that nothing is
        equal because an earlier update wrote it.
        """
        self.require_clean()
        absent = [name for name in self._tensors if name not in reference]
        require(not absent, f"check_equal: the reference lacks {', '.join(absent[:3])}")
        ours = self.checksums()
        wrong = [name for name, each in ours.items()
                 if attempt.whole_sum(reference[name].contiguous()) != each]  # fmt: skip
        if wrong:
            text = f"generator {self.rank} at version {self.version}: {', '.join(wrong)} differ"
            raise make(ProtocolError, text)
