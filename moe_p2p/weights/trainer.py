"""The trainers' end of weight updates: converts, writes straight into generators, and commits.

    trainer = WeightTrainer(engine, store, layout, rank, tensors)      once, with all generators
    trainer.update(version)                                            on all trainers, each time

`update` returns when every generator of the fleet has all bytes of the version and the fleet has
decided for it; else it raises, by name, and no generator goes to it. docs/weights.md explains it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moe_p2p.engine import Engine
from moe_p2p.errors import AbortedError, MoeP2pError, ProtocolError, make, require
from moe_p2p.transfers import Memory, Peer, Region, Request
from moe_p2p.weights import attempt
from moe_p2p.weights.attempt import COMMIT, PRIORITY, Keys
from moe_p2p.weights.board import Board, Deadline
from moe_p2p.weights.conversion import Conversions
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import Write

_GRACE = 0.25  # of the timeout, for who waits for ranks that wait themselves


class WeightTrainer:
    """One trainer rank.

    engine: of this rank. store: a torch store that all trainers and generators reach.
    layout: of all trainers. tensors: this rank's, by the layout's names; registered here, once.
    name: of the fleet. timeout_s: of the set-up, which waits for all ranks, and of each update.
    """

    def __init__(
        self,
        engine: Engine,
        store: Any,
        layout: WeightLayout,
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        name: str = "weights",
        timeout_s: float = 30.0,
    ) -> None:
        self.engine, self.rank, self.timeout_s = engine, rank, timeout_s
        self.stages: dict[str, float] = {}  # of the last update: seconds from its begin
        self._board = Board(store, name)
        deadline = Deadline(timeout_s)
        self.plan = attempt.agree_on_plan(self._board, "trainer", rank, layout, deadline)
        self._tensors = dict(tensors)
        self._writes = list(self.plan.of_source(rank))
        self._conversions = Conversions(self.plan, rank, self._tensors)
        sources = {**self._tensors, **self._conversions.staged}
        attempt.check_rows(f"trainer {rank}", self._writes, sources, 0)
        used = dict.fromkeys(write.source_tensor for write in self._writes)
        self._memory: dict[str, Memory] = {each: engine.register(sources[each]) for each in used}
        self._targets = sorted({write.target_rank for write in self._writes})
        self._generations: dict[int, int] = {}  # of the memory that a generator lends
        self._peers: dict[int, Peer] = {}
        self._regions: dict[tuple[int, str], tuple[Region, int]] = {}
        self._requests: list[Request] = []
        self._attempt = 0
        for generator in self._targets:
            self._connect(generator, 0, deadline)
        self._board.put(f"trainer {rank}", {"nics": engine.num_nics})
        self._meet(deadline)

    def _meet(self, deadline: Deadline) -> None:
        trainers = {f"trainer {i}": f"trainer {i}" for i in range(self.plan.source.world_size)}
        self._board.wait({**trainers, **{f"{g} lends 0": g for g in self._generators}}, deadline)

    @property
    def _generators(self) -> list[str]:
        return [f"generator {i}" for i in range(self.plan.target.world_size)]

    def _connect(self, generator: int, generation: int, deadline: Deadline) -> None:
        """generation: a generator lends its memory anew after an update that failed."""
        who = f"generator {generator}"
        key = f"{who} lends {generation}"
        lent = self._board.wait({key: who}, deadline)[key]
        if generator in self._peers:
            with suppress(RuntimeError):  # it may be gone with what failed
                self._peers.pop(generator).disconnect()
        peer = self.engine.connect(bytes.fromhex(lent["address"]), priority=PRIORITY)
        regions = [
            self.engine.resolve(bytes.fromhex(each), peer, priority=PRIORITY)
            for each in lent["to"][str(self.rank)]
        ]
        for tensor, (number, offset) in lent["tensors"].items():
            self._regions[generator, tensor] = regions[number], offset
        self._peers[generator], self._generations[generator] = peer, generation

    def update(
        self,
        version: int,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        verify: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Brings every generator to `version`. All trainers call it, with the same arguments.

        tensors: new values, copied into the registered ones; None: these are as they should be.
        They must be left alone until it returns. verify: 64-bit checksums of all that is written.

        Raises AbortedError, with the name of the rank where it failed, and TimeoutError with the
        ranks that are missing. No generator goes to the version then; it may be called again.
        """
        self._attempt += 1
        keys, deadline = Keys(self._attempt), Deadline(timeout_s or self.timeout_s)
        self.stages, self._began = {}, time.monotonic()
        try:
            self._take(tensors)
            self._send(keys, {"version": version, "verify": verify}, deadline)
            self._commit(keys, version, deadline)
        except Exception as error:
            why = f"trainer {self.rank}: {error}"
            decision = self._board.decide(keys.decision, why)
            self._cancel(deadline)
            if decision == COMMIT:
                return
            if decision == why:
                raise
            raise _failed(version, decision) from error

    def _reached(self, stage: str) -> None:
        self.stages[stage] = time.monotonic() - self._began

    def _take(self, tensors: Mapping[str, Tensor] | None) -> None:
        for name, tensor in (tensors or {}).items():
            mine = self._tensors.get(name)
            require(
                mine is not None and mine.shape == tensor.shape and mine.dtype == tensor.dtype,
                f"update: tensor {name!r} is none of this trainer's, or of another shape or type",
            )
            assert mine is not None
            mine.copy_(tensor)

    def _send(self, keys: Keys, update: dict[str, Any], deadline: Deadline) -> None:
        before = Keys(keys.attempt - 2)
        for key in (before.maxima(self.rank), before.sent(self.rank)):
            self._board.drop(key)
        decided = self._board.decide(keys.update, update)
        if decided != update:
            text = f"this trainer updates to {update}, another one to {decided}"
            raise make(ProtocolError, text)
        self._reached("begin")
        self._conversions.run(lambda mine, peers: self._exchange(keys, deadline, mine, peers))
        self._reached("converted")
        ready = {keys.ready(i): who for i, who in enumerate(self._generators)}
        found = self._wait(keys, ready, deadline)
        for generator in self._targets:
            generation = found[keys.ready(generator)]
            if generation != self._generations[generator]:
                self._connect(generator, generation, deadline)
        self._reached("ready")
        for write in self._writes:
            self._requests.append(self._write(write, attempt.immediate(keys.attempt)))
        self._reached("submitted")
        for write, request in zip(self._writes, self._requests, strict=True):
            self._await(write, request, deadline)
        self._requests.clear()
        self._reached("written")
        self._board.put(keys.sent(self.rank), self._sums() if update["verify"] else {})
        self._reached("sent")

    def _exchange(
        self, keys: Keys, deadline: Deadline, mine: bytes, peers: tuple[int, ...]
    ) -> dict[int, bytes]:
        self._board.put(keys.maxima(self.rank), mine.hex())
        self._reached("maxima")
        found = self._wait(keys, {keys.maxima(i): f"trainer {i}" for i in peers}, deadline)
        return {i: bytes.fromhex(found[keys.maxima(i)]) for i in peers}

    def _write(self, write: Write, imm: int) -> Request:
        region, base = self._regions[write.target_rank, write.target_tensor]
        rows = write.rows
        return self.engine.write_pages(
            self._memory[write.source_tensor],
            region,
            page_bytes=rows.row_bytes * rows.num_rows,
            pages=torch.tensor([a for a, _ in rows.offsets], device="cpu"),
            region_pages=torch.tensor([base + b for _, b in rows.offsets], device="cpu"),
            stride=1,  # pages are given by their first byte
            region_stride=1,
            row_bytes=rows.row_bytes,
            row_stride=rows.source_stride or rows.row_bytes,
            region_row_stride=rows.target_stride or rows.row_bytes,
            imm=imm,
            imm_per_page=False,
            priority=PRIORITY,
        )

    @staticmethod
    def _await(write: Write, request: Request, deadline: Deadline) -> None:
        try:
            request.wait(deadline.left)
        except MoeP2pError as error:
            text = f"writing {write.name} to generator {write.target_rank}: {error}"
            raise make(type(error), text) from error

    def _sums(self) -> dict[str, dict[str, int]]:
        """By target rank and its tensor."""
        tensors = {name: memory.tensor for name, memory in self._memory.items()}
        return {
            str(target): attempt.sums(
                (each for each in self._writes if each.target_rank == target), tensors, 0
            )
            for target in self._targets
        }

    def _commit(self, keys: Keys, version: int, deadline: Deadline) -> None:
        """Trainer 0 decides, once every rank has reported; anybody else can only decide not to."""
        if self.rank == 0:
            wanted = {keys.sent(i): f"trainer {i}" for i in range(self.plan.source.world_size)}
            wanted |= {keys.arrived(i): who for i, who in enumerate(self._generators)}
            self._wait(keys, wanted, deadline.later(_GRACE * deadline.timeout_s))
            self._reached("arrived")
            decision = self._board.decide(keys.decision, COMMIT)
        else:
            later = deadline.later(2 * _GRACE * deadline.timeout_s)
            decision = self._wait(keys, {keys.decision: "trainer 0"}, later)[keys.decision]
        self._reached("decided")
        if decision != COMMIT:
            raise _failed(version, decision)
        if self.rank == 0:
            self._board.put("version", version)

    def _wait(self, keys: Keys, wanted: dict[str, str], deadline: Deadline) -> dict[str, Any]:
        def stop() -> None:
            decision = self._board.get(keys.decision)
            if decision not in (None, COMMIT):
                raise make(AbortedError, decision)

        return self._board.wait(wanted, deadline, stop)

    def _cancel(self, deadline: Deadline) -> None:
        """Ends what is under way, so that the tensors may be changed."""
        for request in self._requests:
            with suppress(RuntimeError):
                request.cancel()
        for request in self._requests:
            with suppress(RuntimeError):
                request.wait(max(deadline.left, 1.0))
        self._requests.clear()

    def live(self) -> Counter[int | None]:
        """How many generators run which version; None: not updated yet, or dirty."""
        return Counter(self._board.get(f"{who} runs") for who in self._generators)


def _failed(version: int, why: str) -> Exception:
    return make(AbortedError, f"the update to version {version} failed: {why}")
