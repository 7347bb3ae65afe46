"""Small two-sided messages: what arrives at an engine, and a barrier among engines.

    inbox = receiver.messages()                       (before the address is given out)
    give out receiver.address  ------------------->   peer = sender.connect(address)
    message = inbox.wait()     <-------------------   sender.send(peer, b"request 7").wait()

csrc/engine/message_ring.h has the protocol: writes into memory of the receiver, so it runs over
every provider that carries bytes, and the receiver's threads do nothing for what arrives.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from moe_p2p import errors
from moe_p2p.engine.transfers import Owner, Peer, Request, checked, tensor_from
from moe_p2p.library import call

_ops = torch.ops.moe_p2p
MESSAGES, BARRIERS = 0, 1  # Purpose of csrc/engine/message_ring.h
MOST_TAGS = 1 << 32
_Result = TypeVar("_Result")


class Message(NamedTuple):
    """data: what was sent. sender: the label of the engine that sent it, its first 59 bytes.

    sender_id: a number of that connection alone, for `Messages.forget` and for senders of one label
    """

    data: bytes
    sender: str
    sender_id: int


class Size(NamedTuple):
    """Bounds of an inbox: senders, messages of each that nobody has taken, bytes of a message."""

    max_senders: int = 16
    max_messages: int = 64
    max_bytes: int = 4096

    @classmethod
    def of(cls, *given: int | None) -> Size:
        """None: the default."""
        named = dict(zip(cls._fields, given, strict=True))
        for name, value in named.items():
            if value is not None:
                errors.require_int(name, value)
        return cls(**{name: value for name, value in named.items() if value is not None})


class Inbox:
    """What was sent to an engine for one purpose. Any thread, and any event loop."""

    def __init__(self, engine: Owner, size: Size, purpose: int) -> None:
        self._engine = engine
        self._purpose = purpose
        self.size = size

    def take(self) -> Message | None:
        room = bytearray(self.size.max_bytes)
        data = torch.frombuffer(room, dtype=torch.uint8)
        op = _ops.engine_take_message.default
        nbytes, sender_id, sender = call(op, self._engine.number, self._purpose, data)
        return None if nbytes < 0 else Message(bytes(room[:nbytes]), sender, sender_id)

    def wait(self, timeout_s: float) -> Message | None:
        """None: the deadline has passed."""
        ends = time.monotonic() + timeout_s
        while (message := self.take()) is None:
            left = max(0.0, ends - time.monotonic())
            op = _ops.engine_wait_message.default
            if not self._engine._call_waiting(op, self._purpose, left):
                return self.take()
        return message

    async def wait_in_loop(self, timeout_s: float) -> Message | None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        while (message := self.take()) is None and loop.time() < ends:
            # A descriptor of its own: tasks, and loops, each have a reader.
            fd = call(_ops.engine_inbox_fd.default, self._engine.number, self._purpose)
            own, readable = os.dup(int(fd)), asyncio.Event()
            loop.add_reader(own, readable.set)
            try:
                await asyncio.wait_for(readable.wait(), max(0.0, ends - loop.time()))
            except asyncio.TimeoutError:
                continue
            finally:
                loop.remove_reader(own)
                os.close(own)
        return message

    def num_senders(self) -> int:
        return int(call(_ops.engine_num_senders.default, self._engine.number))


class Messages:
    """What other engines `send` to this one. Made by `Engine.messages`.

    Messages of one sender come in the order in which they were sent, each once. `await messages` is
    `wait` in asyncio, and `async for message in messages` is that again and again, each time with
    the engine's timeout. Several threads and tasks may wait: each message goes to one of them.
    """

    def __init__(self, engine: Owner, size: Size) -> None:
        self._engine = engine
        self._inbox = Inbox(engine, size, MESSAGES)
        self.size = size

    def poll(self) -> Message | None:
        """Returns the next message, or None at once."""
        return self._inbox.take()

    def wait(self, timeout_s: float | None = None) -> Message:
        """Returns the next message. timeout_s: seconds; None: the engine's.

        Raises TimeoutError when none comes, ClosedError when the engine is closed meanwhile. A
        sender that has died is not noticed here: it sends no more.
        """
        limit = self._engine.timeout_s if timeout_s is None else timeout_s
        message = self._inbox.wait(limit)
        return self._late(limit) if message is None else message

    def __await__(self) -> Generator[Any, None, Message]:
        limit = self._engine.timeout_s
        message = yield from self._inbox.wait_in_loop(limit).__await__()
        return self._late(limit) if message is None else message

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self

    def _late(self, limit: float) -> Message:
        text = f"{self._engine.label}: no message came within {limit} s; "
        text += (
            f"{self._inbox.num_senders()} of {self.size.max_senders} places are taken by senders"
        )
        raise errors.make(errors.TimeoutError, text)

    def forget(self, sender_id: int) -> bool:
        """Gives the place of a sender that has died to others; False where it has none.

        A sender gives it back itself when it disconnects or closes, but not over libfabric's shm.
        What it has sent and nobody has taken is lost; if it lives on, its next messages fail there.
        Raises TimeoutError as `Memory.unregister` does; call it again.
        """
        errors.require_int("sender_id", sender_id)
        op = _ops.engine_forget_sender.default
        return bool(call(op, self._engine.number, sender_id))

    def __repr__(self) -> str:
        return f"Messages({self._engine!r}, {self.size})"


def send(
    engine: Owner,
    purpose: int,
    peer: Peer,
    data: bytes | bytearray | memoryview,
    priority: int,
    timeout_s: float | None = None,
) -> Request:
    number = engine._call_waiting(
        _ops.engine_send.default,
        checked("peer", peer, Peer).number,
        purpose,
        tensor_from(data, "data"),
        priority,
        engine.timeout_s if timeout_s is None else timeout_s,
    )
    return Request(engine, int(number))


class _Arrival(NamedTuple):
    """The message with which a member comes to a barrier."""

    tag: int
    round: int  # of this tag and these two engines, from 1 on
    member: bytes  # who sends it
    group: bytes  # who takes part


_FORM = struct.Struct("<QQ16s16s")  # of an _Arrival


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


class Barriers:
    """The barriers of one engine. Any thread.

    One of the threads in `wait` takes arrivals for all of them.
    """

    def __init__(self, engine: Owner, size: Size, address: bytes) -> None:
        self._engine = engine
        self._inbox = Inbox(engine, size, BARRIERS)
        self._address = address
        self._changed = threading.Condition()  # guards what follows
        self._taking = False
        self._running = set[int]()  # tags
        self._rounds = dict[tuple[int, bytes], int]()  # begun, by tag and member
        self._arrived = dict[tuple[int, bytes], dict[int, bytes]]()  # and of each round the group

    def wait(self, peers: Sequence[Peer], tag: int, timeout_s: float) -> None:
        ends = time.monotonic() + timeout_s
        members = self._members(peers)
        own = _digest(self._address)
        group = _digest(b"".join(sorted([*members, own])))
        errors.require_int("tag", tag)
        errors.require(0 <= tag < MOST_TAGS, f"tag is {tag}, must be 0 to {MOST_TAGS - 1}")
        with self._changed:
            errors.require(
                tag not in self._running,
                f"{self._engine.label}: a barrier with tag {tag} is under way here; "
                "give those that run side by side different tags",
            )
            self._running.add(tag)
            for member in members:
                self._rounds[tag, member] = self._rounds.get((tag, member), 0) + 1
        try:
            sent = [
                self._tell(index, peer, _Arrival(tag, self._rounds[tag, member], own, group), ends)
                for index, (peer, member) in enumerate(zip(peers, members, strict=True))
            ]
            self._wait_for(members, tag, group, ends, timeout_s)
            for index, request in enumerate(sent):
                _of_peer(index, request.wait, max(0.0, ends - time.monotonic()))
        finally:
            with self._changed:
                self._running.discard(tag)
                for member in members:
                    done, arrived = self._rounds[tag, member], self._arrived.get((tag, member), {})
                    for late in [number for number in arrived if number <= done]:
                        del arrived[late]

    def _members(self, peers: Sequence[Peer]) -> list[bytes]:
        for peer in peers:
            checked("peers", peer, Peer)
            errors.require(
                peer.engine is self._engine,
                f"{self._engine.label}: a peer of a barrier is another engine's",
            )
        members = [_digest(peer.address) for peer in peers]
        errors.require(
            len({*members, _digest(self._address)}) == len(members) + 1,
            "peers of a barrier are different engines, and not this one, which always takes part",
        )
        return members

    def _tell(self, index: int, peer: Peer, arrival: _Arrival, ends: float) -> Request:
        left = max(0.0, ends - time.monotonic())
        return _of_peer(index, send, self._engine, BARRIERS, peer, _FORM.pack(*arrival), 1, left)

    def _wait_for(
        self, members: list[bytes], tag: int, group: bytes, ends: float, timeout_s: float
    ) -> None:
        while missing := self._missing(members, tag, group):
            left = ends - time.monotonic()
            if left <= 0:
                text = f"{self._engine.label}: at barrier {tag} {', '.join(missing)} "
                text += f"of {len(members)} did not arrive within {timeout_s} s"
                raise errors.make(errors.TimeoutError, text)
            with self._changed:
                if self._taking:  # another thread takes what arrives, and notifies this one
                    self._changed.wait(min(left, 0.05))
                    continue
                self._taking = True
            try:
                self._take(left)
            finally:
                with self._changed:
                    self._taking = False
                    self._changed.notify_all()

    def _missing(self, members: list[bytes], tag: int, group: bytes) -> list[str]:
        missing = []
        with self._changed:
            for index, member in enumerate(members):
                arrived = self._arrived.get((tag, member), {})
                found = arrived.get(self._rounds[tag, member])
                if found is None:
                    missing.append(f"peers[{index}]")
                elif found != group:
                    text = f"{self._engine.label}: peers[{index}] is at a barrier of tag {tag} "
                    text += "among other engines; groups that overlap take different tags"
                    raise errors.make(errors.ProtocolError, text)
        return missing

    def _take(self, left: float) -> None:
        message = self._inbox.wait(left)
        if message is None:
            return
        arrival = _Arrival(*_FORM.unpack(message.data))
        with self._changed:
            rounds = self._arrived.setdefault((arrival.tag, arrival.member), {})
            rounds[arrival.round] = arrival.group


def _of_peer(index: int, function: Callable[..., _Result], *args: Any) -> _Result:
    """function(*args), whose errors name the peer."""
    try:
        return function(*args)
    except errors.MoeP2pError as error:
        raise type(error)(f"{error} (peers[{index}] of a barrier)") from None
