"""Rounds of votes among ranks over an engine: each rank sees every rank's numbers of a round.

    votes = Votes(engine, rank, world_size, 3, imm)
    votes.connect(addresses of all ranks)
    votes.send([7, 8, 9], timeout_s)
    rows = votes.wait(timeout_s)         # [[1, 7, 8, 9], ...]: of each rank the round and its vote

For collectives of hosts that go on beside steps: ExpertMover's, and the balanced experts of
deep_ep_v25. There is no leader: all ranks decide by themselves, from the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from moe_p2p import errors
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory, Peer, Request, Slice
from moe_p2p.fleet.neighbours import has_ended, own_identity

FIRST_IMM = (1 << 29) + 3 * (1 << 20)  # two for each Votes of an engine, one for odd rounds
_PRIORITY = 1  # a vote must not queue behind weights
_LOOK_S = 0.05  # between two looks whether a process that is waited for has ended


class Voter(NamedTuple):
    """How a rank is reached, in hexadecimal where it is bytes."""

    address: str
    board: str
    identity: str


class Votes:
    """One rank's end. num_values: of a vote, int64 each. Calls come from one thread at a time."""

    def __init__(
        self, engine: Engine, rank: int, world_size: int, num_values: int, imm: int
    ) -> None:
        self._engine, self._imm = engine, imm
        self._rank, self._world_size = rank, world_size
        self._fields = 1 + num_values
        self._round = self._decided = 0  # of the last vote, and of the last that was looked at
        self._sent: dict[int, Request] = {}  # by parity of their round
        self._peers: list[Peer] = []
        self._boards: list[Slice] = []
        self._identities: list[str] = []
        with torch.inference_mode(False):  # they are written in any mode
            shape = (2, world_size, self._fields)
            self._board = torch.zeros(shape, dtype=torch.int64, device="cpu")
            self._vote = self._board[:, 0].clone()
        self._landing, self._leaving = engine.register(self._board), engine.register(self._vote)

    @property
    def voter(self) -> Voter:
        """What the others need of this rank."""
        board = self._landing.descriptor.hex()
        return Voter(self._engine.address.hex(), board, own_identity())

    def connect(self, voters: Sequence[Voter]) -> None:
        """voters: of all ranks, in their order."""
        size = 8 * self._fields
        self._identities = [each.identity for each in voters]
        for rank, each in enumerate(voters):
            if rank != self._rank:
                address, board = bytes.fromhex(each.address), bytes.fromhex(each.board)
                peer = self._engine.connect(address, priority=_PRIORITY)
                self._peers.append(peer)
                region = self._engine.resolve(board, peer, priority=_PRIORITY)
                self._boards.append(Slice(0, region, size * self._rank, size))

    @property
    def round_is_open(self) -> bool:
        """Whether this rank has voted, and not yet looked at the votes of that round."""
        return self._round > self._decided

    def send(self, values: Sequence[int], timeout_s: float) -> None:
        """Votes in the next round. timeout_s: for this rank's vote before the last to arrive."""
        number = self._round + 1
        parity = number % 2
        if parity in self._sent:  # two rounds ago: it has arrived, or nobody could have voted since
            self._sent[parity].wait(timeout_s)
        self._round = number
        self._vote[parity] = torch.tensor([number, *values], dtype=torch.int64, device="cpu")
        self._board[parity, self._rank] = self._vote[parity]
        row, size = 8 * self._fields, 8 * self._fields * self._world_size
        slices = [
            each._replace(offset=parity * row, region_offset=parity * size + each.region_offset)
            for each in self._boards
        ]
        if slices:
            self._sent[parity] = self._engine.scatter(
                self._leaving, slices, imm=self._imm + parity, priority=_PRIORITY
            )

    def wait(self, timeout_s: float) -> list[list[int]]:
        """The votes of the round, by rank: its number and the values.

        A rank votes in round n + 1 behind all votes of round n, so at most one round is ahead of
        the one that is waited for: rounds of the other parity, with an immediate of their own.
        Raises PeerDeadError and TimeoutError, which name the ranks that did not vote.
        """
        parity = self._round % 2
        wanted = (self._world_size - 1) * ((self._round + 1) // 2)
        ends = time.monotonic() + timeout_s
        while wanted and self._engine.imm_value(self._imm + parity) < wanted:
            try:
                self._engine.wait_imm(self._imm + parity, wanted, _LOOK_S)
            except errors.TimeoutError:
                late = self._missing()
                for rank in late:
                    if has_ended(self._identities[rank]):
                        text = f"the process of rank {rank} has ended"
                        raise errors.make(errors.PeerDeadError, text) from None
                if time.monotonic() > ends:
                    text = f"ranks {late} did not vote in {timeout_s:g} s"
                    raise errors.make(errors.TimeoutError, text) from None
        self._decided = self._round
        return self._rows()

    def arrived(self) -> list[list[int]]:
        """The votes of this round that are here."""
        return [row for row in self._rows() if row[0] == self._round]

    def _rows(self) -> list[list[int]]:
        return [[int(each) for each in row] for row in self._board[self._round % 2].tolist()]

    def _missing(self) -> list[int]:
        return [rank for rank, row in enumerate(self._rows()) if row[0] != self._round]

    def close(self, timeout_s: float) -> None:
        """Lets the last votes arrive. Before the engine is closed."""
        for request in self._sent.values():
            with suppress(RuntimeError):
                request.wait(timeout_s)
        end(peer.disconnect for peer in self._peers)
        end(memory.unregister for memory in self._memories)
        for parity in self._sent:
            with suppress(RuntimeError):
                self._engine.free_imm(self._imm + parity)

    @property
    def _memories(self) -> tuple[Memory, Memory]:
        return self._landing, self._leaving


def end(calls: Iterable[Callable[[], object]]) -> None:
    """Makes all these calls; what they belong to may be gone with what failed."""
    for each in calls:
        with suppress(RuntimeError):
            each()
