"""One transfer of a TransferEngine: its pieces, and its repetition if the peer has changed.

A peer may unregister memory and register it anew, at other keys; or another transfer's failure may
have ended the connection. So a transfer that failed asks the peer once more, and is repeated if the
same engine answers with other memory, or if only the connection was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moe_p2p import errors
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory, PageRows, Region, Request
from moe_p2p.mooncake.codes import TransferOpcode
from moe_p2p.mooncake.peers import Peers

_STOP_S = 1.0  # of a request that was cancelled; then its connection is closed


class _UnknownError(errors.InvalidArgumentError):
    """The peer has not said that it has this memory."""


class Piece(NamedTuple):
    here: int  # addresses
    there: int
    nbytes: int


class Transfer:
    """Begins at once. find: what is registered here, by address and bytes."""

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        find: Callable[[int, int], tuple[Memory, int] | None],
        session: str,
        pieces: Sequence[Piece],
        opcode: TransferOpcode,
    ) -> None:
        self._engine, self._peers, self._find = engine, peers, find
        self._session, self._pieces, self._opcode = session, pieces, opcode
        self._requests: list[Request] = []
        self._error: errors.MoeP2pError | None = None
        self._ended = self._goes_again = False
        self._remote = peers.take(session)
        try:
            try:
                self._submit()
            except _UnknownError:  # it may have registered it since
                now = peers.take(session, asks=True)
                peers.give_back(self._remote)
                self._remote = now
                self._submit()
        except BaseException:
            if self._requests:
                self._stop()
            peers.give_back(self._remote)
            raise

    def done(self) -> bool:
        """True once it has ended, well or not."""
        if not self._ended and all(request.done() for request in self._requests):
            self._collect(0)
        return self._ended

    def wait(self) -> None:
        """Returns when all bytes are there. Where it raises, no piece is under way any more."""
        while not self._ended:
            self._collect(None)
        if self._error is not None:
            raise self._error

    def _submit(self) -> None:
        """One request for all pieces of one size between the same memories."""
        groups: dict[tuple[Memory, Region, int], tuple[list[int], list[int]]] = {}
        for here, there, nbytes in self._pieces:
            if nbytes == 0:
                continue
            local, far = self._find(here, nbytes), self._remote.find(there, nbytes)
            if local is None:
                text = f"{nbytes} bytes at {here:#x} are not registered memory"
                raise errors.make(errors.InvalidArgumentError, text)
            if far is None:
                text = f"{nbytes} bytes at {there:#x} are not within memory that the engine at "
                text += f"{self._session} has registered"
                error = errors.make(errors.InvalidArgumentError, text)
                raise _UnknownError(str(error))
            offsets, far_offsets = groups.setdefault((local[0], far[0], nbytes), ([], []))
            offsets.append(local[1])
            far_offsets.append(far[1])
        writes = self._opcode is TransferOpcode.Write
        move = self._engine.write_pages if writes else self._engine.read_pages
        for (registered, region, nbytes), (offsets, far_offsets) in groups.items():
            request = move(
                registered,
                region,
                rows=PageRows(page_bytes=nbytes, stride=1, region_stride=1),  # pages are offsets
                pages=torch.tensor(offsets, dtype=torch.int64, device="cpu"),
                region_pages=torch.tensor(far_offsets, dtype=torch.int64, device="cpu"),
            )
            self._requests.append(request)

    def _collect(self, timeout_s: float | None) -> None:
        try:
            for request in self._requests:
                request.wait(timeout_s)
        except errors.MoeP2pError as error:
            self._stop()
            if self._begun_again(error):
                return
            self._error = error
        self._ended = True
        self._peers.give_back(self._remote)

    def _stop(self) -> None:
        """Nothing of it uses memory afterwards, and the next transfer asks the peer."""
        for request in self._requests:
            try:
                request.cancel()
                request.wait(_STOP_S)
            except errors.TimeoutError:
                self._remote.disconnect()
            except errors.MoeP2pError:
                pass  # it has ended
        self._peers.drop(self._session, self._remote)

    def _begun_again(self, error: errors.MoeP2pError) -> bool:
        if self._goes_again or isinstance(error, errors.TimeoutError | errors.ClosedError):
            return False
        self._goes_again, before = True, self._remote
        try:
            now = self._peers.take(self._session, asks=True)
        except errors.MoeP2pError:
            return False
        moved = any(before.key_of(*p[1:]) != now.key_of(*p[1:]) for p in self._pieces)
        refused = isinstance(error, errors.RemoteAccessError)
        if now.id != before.id or (refused and not moved):
            self._peers.give_back(now)
            return False
        self._peers.give_back(before)
        self._remote, self._requests = now, []
        try:
            self._submit()
        except errors.MoeP2pError:
            self._stop()
            return False
        return True
