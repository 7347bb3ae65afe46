"""How ranks meet: an all-gather of bytes through a torch.distributed Store.

Control path only. Rank 0 assembles each exchange: every rank sets one key, rank 0 deletes all W
keys and publishes one value, for which the others wait. An exchange of W ranks makes O(W) requests
to the store: a few per rank, then a few per second for each rank that waits. Every exchange has a
deadline and names the missing ranks. A rank that fails reports it in its next exchange, so the
others need not wait for the deadline. After the first exchange the ranks of a host watch each
other's processes (neighbours.py) and report one that is killed. A rank that is killed earlier, or
is alone on its host, is noticed at the deadline.
The first payload begins with the rank's version and its letter (csrc/letter.py); rank 0 refuses a
mix of letters and names them. So the format of that beginning and of refusals must never change.

Waits poll the store for a key. The store's own wait() blocks Ctrl-C until its deadline, and called
in slices it logs two lines for each (torch 2.13). A request that the store's server does not answer
ends at a deadline too, and by Ctrl-C (requests.py).

Keys, all below moe_p2p/. A is the attempt, M the meeting, a random name that rank 0 chooses:
    attempt/{rank}     attempts of this rank since the last meeting that succeeded
    {A}/0/{rank}       the rank's first payload, after a line with its version and letter, a line
                       with the identity of its process and a line with what it came for
    {A}/answer/{rank}  rank 0's answer to it: M, or why the meeting failed. Only `rank` reads it
    {M}/{stage}/{rank} the rank's payload of a later exchange
    {M}/{stage}/all    the result that rank 0 publishes, in pieces small enough for a store
    {M}/left           number of ranks that have left, and how many of them failed
When all ranks have left, no key remains (a killed rank never leaves). The attempt counts, and notes
of ranks that failed before they met, remain until the next meeting: they keep attempts apart.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_p2p import errors
from moe_p2p.fleet.client import read
from moe_p2p.fleet.neighbours import Neighbours, own_identity
from moe_p2p.fleet.requests import Requests
from moe_p2p.version import __version__

T = TypeVar("T")
_OK, _FAILED = b"+", b"-"
# A TCPStore closes the connection of a client that sets a value of more than 8 MiB.
_PIECE_BYTES = 4 << 20
# Extra time for rank 0 to publish an exchange in which all ranks have arrived, and for a request's
# answer. Too short: ranks whose deadline passes give up a meeting that would have succeeded.
_PATIENCE_S = 10.0
_MOST_NAMED = 16
# Pause between two polls of a wait: at least the first, or the second times W, so that many ranks
# do not flood the store; then half of the time waited; at most the last. Too long: slower set-up.
_FIRST_PAUSE_S, _PAUSE_OF_A_RANK_S, _LAST_PAUSE_S = 0.001, 0.0004, 0.25
_ONE_FAILED = 1 << 32  # in {M}/left: upper half failed ranks, lower half ranks that left


def store_of(
    group_or_store: dist.ProcessGroup | Store | None, rank: int | None, world_size: int | None
) -> tuple[Store, int, int]:
    """Returns the store of a group (None: the default group), this rank in it, and its size."""
    if isinstance(group_or_store, Store):
        if rank is None or world_size is None:
            text = "a Store was given without rank and world_size"
            raise errors.make(errors.InvalidArgumentError, text)
        whole = hasattr(rank, "__index__") and hasattr(world_size, "__index__")
        text = f"rank is {rank!r} of {world_size!r}, must be an integer from 0 to world_size - 1"
        errors.require(whole and 0 <= rank < world_size, text)
        return group_or_store, rank, world_size
    errors.require(
        rank is None and world_size is None,
        "rank and world_size go with a Store; a process group knows its own",
    )
    if group_or_store is None:
        errors.require(
            dist.is_initialized(),
            "no group was given and there is no default group: call "
            "torch.distributed.init_process_group first, or pass a Store with rank and world_size",
        )
        group_or_store = dist.group.WORLD
    if not hasattr(group_or_store, "get_group_store"):
        text = f"a ProcessGroup, a Store or None is needed, not {type(group_or_store).__name__}"
        raise errors.make(errors.InvalidArgumentError, text)
    assert group_or_store is not None
    return group_or_store.get_group_store(), group_or_store.rank(), group_or_store.size()


class Bootstrap:
    """One meeting of W ranks. All ranks make the same exchanges in the same order.

    group_or_store: a ProcessGroup, None for the default one, or a Store with rank and world_size.
    timeout_s: deadline of each exchange, in seconds.
    present: the ranks that meet, in order, where others are left out (roll_call.py); the first of
        them is rank 0 of what stands above. Exchanges then have its payload for absent ranks.

    A context manager: at its end the rank leaves, and reports to the others if the block raised.
    """

    def __init__(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        *,
        rank: int | None,
        world_size: int | None,
        timeout_s: float,
        present: Sequence[int] | None = None,
    ) -> None:
        self.store, self.rank, self.world_size = store_of(group_or_store, rank, world_size)
        self.ranks = range(self.world_size) if present is None else present
        self._leader = self.ranks[0]
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._stage = 0
        # Only its last word, the letter, is compared.
        self._version = f"moe_p2p {__version__}, letter {torch.ops.moe_p2p.letter.default()}"
        self._met = False  # this rank knows M
        self._admitted = False  # all ranks can know M
        self._failure: tuple[int, str] | None = (
            None  # the rank that failed, and why, to be reported
        )
        self._reported = False  # the meeting's failure is in the store; no report is due from here
        self._published: list[str] = []  # keys of the last value that all read
        self.neighbours = Neighbours()  # filled by the first exchange
        self.num_refused = 0  # connections that gpu/fd_exchange.py refused
        if len(self.ranks) == 1:
            return
        self._requests = Requests()
        # Each rank counts its own attempts; counts agree because all ranks meet in one order.
        self._attempt = int(self._guarded(lambda: self.store.add(self._attempts(self.rank), 1)))
        self._name = f"moe_p2p/{self._attempt}"

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if len(self.ranks) == 1:
            return
        try:
            if error is not None and not self._reported:
                self._report(*self._failure or (self.rank, str(error) or type(error).__name__))
            if self._met:
                self._leave(failed=error is not None)
        except errors.TransportError:
            if error is None:
                raise
            # The store is gone too: let the block's own error through.
        finally:
            self.neighbours.close()
            self._requests.close()

    @property
    def name(self) -> str:
        """After the first exchange: of this meeting and no other, the same on all ranks."""
        return self._name if len(self.ranks) > 1 else f"alone/{os.getpid()}/{id(self)}"

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Returns the payloads of all ranks, in rank order. `what` names the exchange in errors.

        Raises TimeoutError naming the missing ranks, AbortedError when a rank failed, PeerDeadError
        when the process of a rank on this host has ended.
        """
        if len(self.ranks) == 1:
            return [payload] * self.world_size
        self._deadline = time.monotonic() + self._timeout_s
        # Answered already: this rank is late, or ended or gave up just before it was admitted.
        if self.rank != self._leader and not self._met and self._has_all([self._answer(self.rank)]):
            self._take_answer(what)
        first = not self._met
        if first:
            payload = f"{self._version}\n{own_identity()}\n{what}\n".encode() + payload
        self._set(self._key(self.rank), _OK + payload)
        payloads = self._collect(what) if self.rank == self._leader else self._read(what)
        self._stage += 1
        if first:
            parted = [one.split(b"\n", 2) for one in payloads]
            identities = dict(
                zip(self.ranks, (each.decode() for each, _, _ in parted), strict=True)
            )
            self.neighbours.add([identities.get(rank, "") for rank in range(self.world_size)])
            payloads = [one for _, _, one in parted]
        by_rank = dict(zip(self.ranks, payloads, strict=True))
        return [by_rank.get(rank, payloads[0]) for rank in range(self.world_size)]

    # Rank 0.

    def _collect(self, what: str) -> list[bytes]:
        """Gathers the payloads of all ranks and publishes them."""
        keys, old = self._keys(self._stage), self._published
        if not self._wait(keys, what):
            self._check_all_came(what)
        values = self._guarded(lambda: self.store.multi_get(keys))
        for rank, value in zip(self.ranks, values, strict=True):
            if value[:1] == _FAILED:
                text = value[1:].decode(errors="replace")
                self._report(rank, text)
                self._delete(keys)
                raise _aborted(rank, text, what)
        if not self._met:
            try:
                values = self._checked_versions(values)
                self._check_same(values, what)
            except errors.ProtocolError as error:
                self._report(self.rank, str(error))
                self._delete(keys)
                raise
        # Keys are deleted only once the others can see that all arrived; see _wait_for_rank_0.
        joined = self._met
        if not joined:
            self._admit(keys)
        payloads = [value[1:] for value in values]
        self._publish(_pack(payloads))
        if joined:
            self._delete([*keys, *old])  # a rank that arrived here has read the previous result
        return payloads

    def _checked_versions(self, values: list[bytes]) -> list[bytes]:
        """Strips versions from the first exchange's values. ProtocolError if letters differ."""
        parted = [value[1:].partition(b"\n") for value in values]
        texts = [text.decode(errors="replace") for text, _, _ in parted]
        for rank, text in zip(self.ranks, texts, strict=True):
            if text.split(" ")[-1] != self._version.split(" ")[-1]:
                known = text if text.startswith("moe_p2p ") else "a version without a letter"
                raise errors.make(
                    errors.ProtocolError,
                    f"ranks run versions that do not fit together: rank {self.rank} has "
                    f"{self._version}, rank {rank} has {known}. Install one version on all ranks",
                )
        return [_OK + payload for _, _, payload in parted]

    def _check_same(self, values: list[bytes], what: str) -> None:
        """ProtocolError naming a rank that came for something else, as its first payload states."""
        for rank, value in zip(self.ranks, values, strict=True):
            theirs = value.split(b"\n", 2)[1].decode(errors="replace")
            if theirs != what:
                raise errors.make(
                    errors.ProtocolError,
                    f"rank {self.rank} waits for {what}, and rank {rank} for {theirs}: all ranks "
                    "must make, and destroy, the same objects in the same order",
                )

    def _admit(self, joins: list[str]) -> None:
        """Called when all ranks have joined: from here on key names contain M.

        The next attempt may reuse this attempt's key names, so they are all deleted before ranks go
        on, which is when the first exchange is published.
        """
        ranks = self.ranks
        self._name, self._met = f"moe_p2p/{secrets.token_hex(8)}", True
        self._answer_all(_OK + self._name.encode())
        self._admitted = True
        self._delete(joins)
        self._delete(map(self._attempts, ranks))
        for attempt in range(1, self._attempt):
            earlier = f"moe_p2p/{attempt}"
            self._delete(f"{earlier}/{part}/{rank}" for part in ("0", "answer") for rank in ranks)

    def _answer_all(self, value: bytes) -> None:
        # One by one: when a multi_set arrives in several pieces, a TCPStore's server applies its
        # start more than once, which restores keys deleted in between (torch 2.13).
        for rank in self.ranks[1:]:
            self._set(self._answer(rank), value)

    def _publish(self, data: bytes) -> None:
        pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        self._published = self._result_keys(self._stage, len(pieces))
        pieces[0] = _OK + struct.pack("<I", len(pieces)) + pieces[0]
        # The first piece last: the others wait for it.
        for key, piece in reversed(list(zip(self._published, pieces, strict=True))):
            self._set(key, piece)

    # The other ranks.

    def _read(self, what: str) -> list[bytes]:
        """Returns the payloads that rank 0 publishes."""
        all_came = not self._met
        if not self._met:
            self._wait_for_rank_0(self._answer(self.rank), what)
            self._take_answer(what, joins=True)
        first = self._result_keys(self._stage, 1)[0]
        self._wait_for_rank_0(first, what, all_came=all_came)
        value = self._get(first)
        self._raise_if_failed(value, what)
        (num_pieces,) = struct.unpack_from("<I", value, 1)
        self._published = self._result_keys(self._stage, num_pieces)
        data = value[5:] + b"".join(map(self._get, self._published[1:]))
        return _unpack(data, len(self.ranks))

    def _take_answer(self, what: str, *, joins: bool = False) -> None:
        """Reads and deletes rank 0's answer. joins: the meeting that it names."""
        key = self._answer(self.rank)
        value = self._get(key)
        if joins and value[:1] == _OK:  # from here on rank 0 hears of failures by this name
            self._name, self._met = value[1:].decode(), True
        self._delete([key])
        self._raise_if_failed(value, what)

    def _raise_if_failed(self, value: bytes, what: str) -> None:
        """Raises AbortedError when rank 0 published a failure."""
        if value[:1] == _FAILED:
            self._reported = True
            if not self._met:
                self._delete([self._key(self.rank)])
            rank, text = json.loads(value[1:])
            raise _aborted(rank, text, what)

    def _wait_for_rank_0(self, key: str, what: str, *, all_came: bool = False) -> None:
        if self._wait([key], what):
            return
        if not all_came:
            try:
                self._check_all_came(what)
            except errors.TimeoutError:
                if self._has_all([key]):  # all arrived, and rank 0 has deleted the keys
                    return
                raise
        self._deadline = time.monotonic() + _PATIENCE_S
        if self._wait([key], what):
            return
        raise errors.make(
            errors.TimeoutError,
            f"rank {self.rank} of {self.world_size}: all ranks came with {what}, but rank "
            f"{self._leader} did not pass it on within {self._timeout_s} s and {_PATIENCE_S:.0f} "
            "more",
        )

    # Failure and end.

    def _report(self, rank: int, text: str) -> None:
        """Stores the failure of `rank` where all others, late ones too, poll next."""
        self._failure = self._failure or (rank, text)
        note = _FAILED + json.dumps([rank, text]).encode()
        if self.rank != self._leader:
            self._report_to_rank_0(rank, text)
        elif self._met:  # others may or may not have read the result of this stage: as below
            for stage in (self._stage, self._stage + 1):
                self._set(self._result_keys(stage, 1)[0], note)
        if self.rank == self._leader and not self._admitted:
            self._answer_all(note)
        self._reported = True

    def _report_to_rank_0(self, rank: int, text: str) -> None:
        # Rank 0 may or may not have taken the payload of `rank` already: write to both stages.
        stages = (self._stage, self._stage + 1) if self._met else (0,)
        places = [(self._name, stage) for stage in stages]
        if not self._met:  # it may have been admitted, and not have got the answer
            answer = self._get_if_there(self._answer(self.rank))
            if answer[:1] == _OK:
                places += [(answer[1:].decode(), stage) for stage in (0, 1)]
        for name, stage in places:
            self._set(f"{name}/{stage}/{rank}", _FAILED + text.encode())

    @property
    def absent(self) -> list[int]:
        """Ranks that do not meet."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    def refused(self) -> None:
        """A rank of this host has refused a connection: set-up says so where it fails."""
        self.num_refused += 1

    def check_neighbours(self, rank: int | None, what: str) -> None:
        """The rank's process ended: raises AbortedError if it reported why, else PeerDeadError."""
        if rank is None:
            return
        value = self._get_if_there(self._key(rank))
        if value[:1] == _FAILED:
            raise _aborted(rank, value[1:].decode(errors="replace"), what)
        text = f"the process of rank {rank} has ended. See what it printed last"
        if rank == self._leader:  # publish in its place
            note = _FAILED + json.dumps([rank, text]).encode()
            self._set(self._result_keys(self._stage, 1)[0], note)
        elif self.rank != self._leader:
            self._report_to_rank_0(rank, text)
        else:
            self._report(rank, text)
        raise errors.make(
            errors.PeerDeadError,
            f"rank {self.rank} of {self.world_size}: waiting for {what}, {text}",
        )

    def _leave(self, *, failed: bool) -> None:
        """Counts this rank as gone. The last one deletes keys that others might still have read."""
        key, one = f"{self._name}/left", 1 + (_ONE_FAILED if failed else 0)
        left = int(self._guarded(lambda: self.store.add(key, one)))
        if left % _ONE_FAILED == len(self.ranks):
            self._delete([key, *self._published])
            if left > _ONE_FAILED:
                # A failed rank may be an exchange behind the others, or ahead of them.
                for stage in range(max(0, self._stage - 1), self._stage + 3):
                    self._delete([*self._keys(stage), *self._result_keys(stage, 1)])

    def _check_all_came(self, what: str) -> None:
        missing = self._find_missing(self.ranks)[:_MOST_NAMED]
        if missing:
            more = ", ..." if len(missing) == _MOST_NAMED else ""
            raise errors.make(
                errors.TimeoutError,
                f"rank {self.rank} of {self.world_size}: waiting for {what}, "
                f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}{more} "
                f"did not come within {self._timeout_s} s. See what they printed last; where they "
                "are only slow to start, raise timeout_s on all ranks",
            )

    def _find_missing(self, ranks: Sequence[int]) -> list[int]:
        """Bisects, so that finding a few missing ranks among many takes few requests."""
        if self._has_all([self._key(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        found = self._find_missing(ranks[:half])
        return found if len(found) >= _MOST_NAMED else found + self._find_missing(ranks[half:])

    # Keys and the store.

    @staticmethod
    def _attempts(rank: int) -> str:
        return f"moe_p2p/attempt/{rank}"

    def _answer(self, rank: int) -> str:
        return f"moe_p2p/{self._attempt}/answer/{rank}"

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._stage}/{rank}"

    def _keys(self, stage: int) -> list[str]:
        return [f"{self._name}/{stage}/{rank}" for rank in self.ranks]

    def _result_keys(self, stage: int, num_pieces: int) -> list[str]:
        key = f"{self._name}/{stage}/all"
        return [key, *(f"{key}.{piece}" for piece in range(1, num_pieces))]

    def _set(self, key: str, value: bytes) -> None:
        # The type stub of set() allows only str.
        self._guarded(lambda: self.store.set(key, value))  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes:
        return self._guarded(lambda: self.store.get(key))

    def _get_if_there(self, key: str) -> bytes:
        return self._guarded(lambda: read(self.store, key))

    def _has_all(self, keys: list[str]) -> bool:
        return self._guarded(lambda: self.store.check(keys))

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._guarded(lambda key=key: self.store.delete_key(key))  # type: ignore[misc]

    def _wait(self, keys: list[str], what: str) -> bool:
        """Waits until all keys are there; returns False at the deadline."""
        began = time.monotonic()
        first = max(_FIRST_PAUSE_S, _PAUSE_OF_A_RANK_S * self.world_size)
        while not self._has_all(keys):
            now = time.monotonic()
            if now >= self._deadline:
                return False
            pause = max(first, min((now - began) / 2, _LAST_PAUSE_S))
            ended = self.neighbours.wait(min(pause, self._deadline - now))
            # A rank that is done may end before this rank has seen the keys: poll once more.
            if ended is not None and not self._has_all(keys):
                self.check_neighbours(ended, what)
        return True

    def _guarded(self, access: Callable[[], T]) -> T:
        try:
            return self._requests.run(access, self._timeout_s + _PATIENCE_S)
        except (RuntimeError, TimeoutError) as error:
            raise errors.make(
                errors.TransportError, f"rank {self.rank}: the store failed: {error}"
            ) from None


def meets(store: Store, rank: int) -> bool:
    """Whether a rank has come to a meeting that has not yet succeeded."""
    return store.check([Bootstrap._attempts(rank)])


def _aborted(rank: int, text: str, what: str) -> errors.MoeP2pError:
    return errors.make(errors.AbortedError, f"rank {rank} failed before {what}: {text}")


def _pack(payloads: list[bytes]) -> bytes:
    """Compressed, because the payloads of ranks are mostly alike."""
    lengths = struct.pack(f"<{len(payloads)}I", *map(len, payloads))
    return zlib.compress(lengths + b"".join(payloads), 1)


def _unpack(data: bytes, count: int) -> list[bytes]:
    raw = zlib.decompress(data)
    payloads, end = [], 4 * count
    for length in struct.unpack_from(f"<{count}I", raw):
        payloads.append(raw[end : end + length])
        end += length
    return payloads
