"""How ranks meet: they exchange bytes through a torch.distributed Store until all have all of them.

Control path only. Rank 0 puts each exchange together: every rank sets one key, rank 0 takes all W
keys away and publishes one value, which the others wait for. An exchange of W ranks is so O(W)
requests at the store, a few for each rank, and then a few a second for each that waits. Every
exchange has a deadline and names who is missing; a rank that fails says so in its next exchange, so
that the others need not wait for the deadline. For one that is killed the ranks of its host say it,
who watch its process once the first exchange was made (neighbours.py). One that is killed before it
came to that, or that is alone on its host, is missed at the deadline.
What a rank brings to the first exchange begins with its version and its letter (csrc/letter.py):
rank 0 refuses a mix of letters by name. So this start must never change, nor how refusals look.

Waits ask the store now and then whether a key is there. Its own wait() holds up Ctrl-C until its
deadline, and in slices it writes two lines to the log for each (torch 2.13). So Ctrl-C waits only
for a request that the store's server does not answer.

Keys, all below moe_p2p/. A is the attempt, M the meeting, a random name that rank 0 chooses:
    attempt/{rank}     how often this rank has tried to meet since a meeting last came about
    {A}/0/{rank}       what a rank brings to the first exchange, behind its version and letter and
                       its process, a line each
    {A}/answer/{rank}  rank 0's answer to it: M, or why there will be none. Only `rank` reads it
    {M}/{stage}/{rank} what a rank brings to a later exchange
    {M}/{stage}/all    what rank 0 made of it, in pieces that a store takes
    {M}/left           ranks that will not come back, and how many of them failed
No key is left when all ranks have left (one that is killed does not). The counts of attempts, with
the notes of ranks that failed before they met, stay until the next meeting: they keep apart what
belongs to different attempts.
"""

from __future__ import annotations

import json
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
from moe_p2p.rendezvous.neighbours import Neighbours, own_identity
from moe_p2p.version import __version__

T = TypeVar("T")
_OK, _FAILED = b"+", b"-"
# A TCPStore closes the connection of whoever sets a value of more than 8 MiB.
_PIECE_BYTES = 4 << 20
# Rank 0 works on an exchange to which all have come. When it is too short, ranks whose deadline is
# then over give up on a meeting that would have come about.
_PATIENCE_S = 10.0
_MOST_NAMED = 16
# Between two questions of a wait: at first; for each rank, so that many do not ask always; then
# half of what it has waited; at last. Too long: set-up takes longer.
_FIRST_PAUSE_S, _PAUSE_OF_A_RANK_S, _LAST_PAUSE_S = 0.001, 0.0004, 0.25
_ONE_FAILED = 1 << 32  # in {M}/left; the ranks that left are the lower half


def _store_of(group: dist.ProcessGroup | None) -> tuple[Store, int, int]:
    """The store behind a group (None: the default one), this rank in it and its size."""
    if not dist.is_initialized():
        raise errors.make(
            errors.InvalidArgumentError,
            "there is no process group: call torch.distributed.init_process_group first, or pass "
            "a Store with rank and world_size",
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen.get_group_store(), dist.get_rank(chosen), dist.get_world_size(chosen)


class Bootstrap:
    """One meeting of W ranks. All ranks make the same exchanges in the same order.

    group_or_store: a ProcessGroup, None for the default one, or a Store with rank and world_size.
    timeout_s: deadline of each exchange, in seconds.

    A context manager: at its end the rank leaves, and tells the others when the block failed here.
    """

    def __init__(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        *,
        rank: int | None,
        world_size: int | None,
        timeout_s: float,
    ) -> None:
        if isinstance(group_or_store, Store):
            errors.require(
                rank is not None and world_size is not None,
                "a Store was given without rank and world_size",
            )
            assert rank is not None
            assert world_size is not None
            errors.require(
                0 <= rank < world_size, f"rank is {rank}, must be from 0 to {world_size - 1}"
            )
            self.store, self.rank, self.world_size = group_or_store, rank, world_size
        else:
            errors.require(
                rank is None and world_size is None,
                "rank and world_size go with a Store; a process group knows its own",
            )
            errors.require(
                group_or_store is None or isinstance(group_or_store, dist.ProcessGroup),
                f"a ProcessGroup, a Store or None is needed, not {type(group_or_store).__name__}",
            )
            self.store, self.rank, self.world_size = _store_of(group_or_store)
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._stage = 0
        # Its last word is compared.
        self._version = f"moe_p2p {__version__}, letter {torch.ops.moe_p2p.letter.default()}"
        self._met = False  # this rank knows M
        self._told = False  # this meeting has failed, and whoever asks is told without this rank
        self._published: list[str] = []  # keys of the last value that all read
        self.neighbours = Neighbours()  # none before the first exchange was made
        self.num_refused = 0  # strangers, where ranks pass each other descriptors
        if self.world_size == 1:
            return
        # Each rank counts its own attempts; all count alike because all make them in one order.
        self._attempt = int(self._guarded(lambda: self.store.add(self._attempts(self.rank), 1)))
        self._name = f"moe_p2p/{self._attempt}"

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.world_size == 1:
            return
        try:
            if error is not None and not self._told:
                self._tell(self.rank, str(error) or type(error).__name__)
            if self._met:
                self._leave(failed=error is not None)
        except errors.TransportError:
            if error is None:
                raise
            # The store is gone too; the error at hand is the one to raise.
        finally:
            self.neighbours.close()

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Payloads of all ranks, in rank order. `what` stands in errors.

        Raises TimeoutError naming the ranks that did not come, AbortedError when one failed, and
        PeerDeadError when the process of one of this host has ended.
        """
        if self.world_size == 1:
            return [payload]
        self._deadline = time.monotonic() + self._timeout_s
        # Either this rank is late, or it died or gave up when it was about to be admitted.
        if self.rank and not self._met and self._has_all([self._answer(self.rank)]):
            self._take_answer(what)
        first = not self._met
        if first:
            payload = f"{self._version}\n{own_identity()}\n".encode() + payload
        self._set(self._key(self.rank), _OK + payload)
        payloads = self._collect(what) if self.rank == 0 else self._read(what)
        self._stage += 1
        if first:
            parted = [one.partition(b"\n") for one in payloads]
            self.neighbours.add([identity.decode() for identity, _, _ in parted])
            payloads = [one for _, _, one in parted]
        return payloads

    # Rank 0.

    def _collect(self, what: str) -> list[bytes]:
        """Takes what all ranks brought, and publishes it."""
        keys, old = self._keys(self._stage), self._published
        if not self._wait(keys, what):
            self._check_all_came(what)
        values = self._guarded(lambda: self.store.multi_get(keys))
        for rank, value in enumerate(values):
            if value[:1] == _FAILED:
                text = value[1:].decode(errors="replace")
                self._tell(rank, text)
                self._delete(keys)
                raise _aborted(rank, text, what)
        if not self._met:
            try:
                values = self._checked_versions(values)
            except errors.ProtocolError as error:
                self._tell(0, str(error))
                self._delete(keys)
                raise
        # Keys go after the others can know that all have come; see _wait_for_rank_0.
        joined = self._met
        if not joined:
            self._admit(keys)
        payloads = [value[1:] for value in values]
        self._publish(_pack(payloads))
        if joined:
            self._delete([*keys, *old])  # whoever came has read what was published before
        return payloads

    def _checked_versions(self, values: list[bytes]) -> list[bytes]:
        """The values of the first exchange without the versions, which have one letter."""
        parted = [value[1:].partition(b"\n") for value in values]
        texts = [text.decode(errors="replace") for text, _, _ in parted]
        for rank, text in enumerate(texts):
            if text.split(" ")[-1] != self._version.split(" ")[-1]:
                known = text if text.startswith("moe_p2p ") else "a version without a letter"
                raise errors.make(
                    errors.ProtocolError,
                    f"ranks run versions that do not fit together: rank 0 has {self._version}, "
                    f"rank {rank} has {known}. Install one version on all ranks",
                )
        return [_OK + payload for _, _, payload in parted]

    def _admit(self, joins: list[str]) -> None:
        """All ranks have joined: from here on the keys have M in their names.

        The next attempt may use the names of this one again, so nothing of it may be left when a
        rank goes on, which it does when the first exchange is published.
        """
        ranks = range(self.world_size)
        self._name, self._met = f"moe_p2p/{secrets.token_hex(8)}", True
        self._answer_all(_OK + self._name.encode())
        self._delete(joins)
        self._delete(map(self._attempts, ranks))
        for attempt in range(1, self._attempt):
            earlier = f"moe_p2p/{attempt}"
            self._delete(f"{earlier}/{part}/{rank}" for part in ("0", "answer") for rank in ranks)

    def _answer_all(self, value: bytes) -> None:
        # One by one: of a multi_set that comes in several pieces the server of a TCPStore applies
        # the start more than once, which brings back keys deleted in between (torch 2.13).
        for rank in range(1, self.world_size):
            self._set(self._answer(rank), value)

    def _publish(self, data: bytes) -> None:
        pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        self._published = self._result_keys(self._stage, len(pieces))
        pieces[0] = _OK + struct.pack("<I", len(pieces)) + pieces[0]
        # The others wait for the first.
        for key, piece in reversed(list(zip(self._published, pieces, strict=True))):
            self._set(key, piece)

    # The other ranks.

    def _read(self, what: str) -> list[bytes]:
        """What rank 0 publishes."""
        all_came = not self._met
        if not self._met:
            self._wait_for_rank_0(self._answer(self.rank), what)
            self._name, self._met = self._take_answer(what), True
        first = self._result_keys(self._stage, 1)[0]
        self._wait_for_rank_0(first, what, all_came=all_came)
        value = self._get(first)
        self._heed(value, what)
        (num_pieces,) = struct.unpack_from("<I", value, 1)
        self._published = self._result_keys(self._stage, num_pieces)
        data = value[5:] + b"".join(map(self._get, self._published[1:]))
        return _unpack(data, self.world_size)

    def _take_answer(self, what: str) -> str:
        """The name of the meeting that this rank has joined."""
        key = self._answer(self.rank)
        value = self._get(key)
        self._delete([key])
        self._heed(value, what)
        return value[1:].decode()

    def _heed(self, value: bytes, what: str) -> None:
        """Raises AbortedError when rank 0 published a failure."""
        if value[:1] == _FAILED:
            self._told = True
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
                if self._has_all([key]):  # rank 0 has it from all, and has taken away the keys
                    return
                raise
        self._deadline = time.monotonic() + _PATIENCE_S
        if self._wait([key], what):
            return
        raise errors.make(
            errors.TimeoutError,
            f"rank {self.rank} of {self.world_size}: all ranks came with {what}, but rank 0 did "
            f"not pass it on within {self._timeout_s} s and {_PATIENCE_S:.0f} more",
        )

    # Failure and end.

    def _tell(self, rank: int, text: str) -> None:
        """`rank` failed: the others learn it when they next look, those that are late too."""
        self._told = True
        note = _FAILED + json.dumps([rank, text]).encode()
        if self.rank:
            self._tell_rank_0(rank, text)
        elif self._met:
            self._set(self._result_keys(self._stage, 1)[0], note)
        else:
            self._answer_all(note)

    def _tell_rank_0(self, rank: int, text: str) -> None:
        # It is unknown whether rank 0 has taken what `rank` brought to the exchange.
        stages = (self._stage, self._stage + 1) if self._met else (0,)
        for stage in stages:
            self._set(f"{self._name}/{stage}/{rank}", _FAILED + text.encode())

    def check_neighbours(self, rank: int | None, what: str) -> None:
        """The process has ended: raises PeerDeadError, or AbortedError where it said why."""
        if rank is None:
            return
        brought = self._key(rank)
        value = self._get(brought) if self._has_all([brought]) else b""
        if value[:1] == _FAILED:
            raise _aborted(rank, value[1:].decode(errors="replace"), what)
        text = f"the process of rank {rank} has ended. See what it printed last"
        if rank == 0:  # nobody else publishes
            note = _FAILED + json.dumps([rank, text]).encode()
            self._set(self._result_keys(self._stage, 1)[0], note)
        elif self.rank:
            self._tell_rank_0(rank, text)
        else:
            self._tell(rank, text)
        raise errors.make(
            errors.PeerDeadError,
            f"rank {self.rank} of {self.world_size}: waiting for {what}, {text}",
        )

    def _leave(self, *, failed: bool) -> None:
        """The last rank that leaves deletes what the others may still have wanted to read."""
        key, one = f"{self._name}/left", 1 + (_ONE_FAILED if failed else 0)
        left = int(self._guarded(lambda: self.store.add(key, one)))
        if left % _ONE_FAILED == self.world_size:
            self._delete([key, *self._published])
            if left > _ONE_FAILED:
                # One that fails may be an exchange behind the others, or ahead of them.
                for stage in range(max(0, self._stage - 1), self._stage + 3):
                    self._delete([*self._keys(stage), *self._result_keys(stage, 1)])

    def _check_all_came(self, what: str) -> None:
        missing = self._find_missing(range(self.world_size))[:_MOST_NAMED]
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
        """Halves the ranks, so that to find a few missing ones of many costs few requests."""
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
        return [f"{self._name}/{stage}/{rank}" for rank in range(self.world_size)]

    def _result_keys(self, stage: int, num_pieces: int) -> list[str]:
        key = f"{self._name}/{stage}/all"
        return [key, *(f"{key}.{piece}" for piece in range(1, num_pieces))]

    def _set(self, key: str, value: bytes) -> None:
        # The stub of set() knows str only.
        self._guarded(lambda: self.store.set(key, value))  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes:
        return self._guarded(lambda: self.store.get(key))

    def _has_all(self, keys: list[str]) -> bool:
        return self._guarded(lambda: self.store.check(keys))

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._guarded(lambda key=key: self.store.delete_key(key))  # type: ignore[misc]

    def _wait(self, keys: list[str], what: str) -> bool:
        """Until all keys are there; False at the deadline."""
        began = time.monotonic()
        first = max(_FIRST_PAUSE_S, _PAUSE_OF_A_RANK_S * self.world_size)
        while not self._has_all(keys):
            now = time.monotonic()
            if now >= self._deadline:
                return False
            pause = max(first, min((now - began) / 2, _LAST_PAUSE_S))
            ended = self.neighbours.wait(min(pause, self._deadline - now))
            # One that has all that it needs may end before this rank has seen the keys.
            if ended is not None and not self._has_all(keys):
                self.check_neighbours(ended, what)
        return True

    def _guarded(self, access: Callable[[], T]) -> T:
        try:
            return access()
        except RuntimeError as error:
            raise errors.make(
                errors.TransportError, f"rank {self.rank}: the store failed: {error}"
            ) from None


def _aborted(rank: int, text: str, what: str) -> errors.MoeP2pError:
    return errors.make(errors.AbortedError, f"rank {rank} failed before {what}: {text}")


def _pack(payloads: list[bytes]) -> bytes:
    """Compressed: most of what ranks say of themselves is alike."""
    lengths = struct.pack(f"<{len(payloads)}I", *map(len, payloads))
    return zlib.compress(lengths + b"".join(payloads), 1)


def _unpack(data: bytes, count: int) -> list[bytes]:
    raw = zlib.decompress(data)
    payloads, end = [], 4 * count
    for length in struct.unpack_from(f"<{count}I", raw):
        payloads.append(raw[end : end + length])
        end += length
    return payloads
