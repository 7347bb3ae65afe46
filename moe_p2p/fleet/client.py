"""A client of a torch store whose calls run on a thread of its own, each with a deadline.

torch waits for the answer of a TCPStore's server in C++, without a deadline, and never connects
again. Here a call that gets no answer in time fails by name; after a failure the next call connects
anew, and repeats this member's words where the store lost them. Used by store_keys.py and
leases.py.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moe_p2p.errors import ClosedError, TransportError, make
from moe_p2p.fleet import addresses

T = TypeVar("T")
_Request = tuple[Future[Any], Callable[[Store], Any]]

# Of a call without a deadline. Too short: a store of many ranks that is only slow counts as gone.
_ANSWER_S = 10.0
# Of a call whose deadline is over, as the word that an update failed.
_LEAST_S = 0.5
# A call without an answer for so long is left behind with its thread, and another client connects:
# its server's host may be gone. Doubled each time, so that few are left behind.
_PATIENCE_S = 30.0
# An answer that takes longer: leases may not have been renewed meanwhile.
_SILENCE_S = 2.5
_AGAIN_S = 0.02  # between two looks at where a thread waits whose call is to end
# Numbers of the system calls in which torch waits for an answer: recv, and poll for a first one.
_RECVFROM, _POLL = (207, 73) if platform.machine() == "aarch64" else (45, 7)
_LEFT = "this member has left its fleet"
_NOTHING = "?"  # no value is this
_PROBE_S = 1.0  # torch tries for minutes to connect; a socket says at once that nobody serves


class Deadline:
    def __init__(self, timeout_s: float, *, at: float | None = None) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s if at is None else at

    def later(self, grace_s: float) -> Deadline:
        """For who waits for ranks that wait too: the one that is missing is named, not these."""
        return Deadline(self.timeout_s + grace_s, at=self.at + grace_s)

    @property
    def left(self) -> float:
        return max(self.at - time.monotonic(), 0.0)


class StoreError(TransportError):
    """The store does not answer."""


class _Shared:
    """What a client and its threads both have. It keeps no store of the caller's, who may serve it:
    it would not end."""

    def __init__(self, store: Store, connect: Callable[[], Store] | None) -> None:
        self.store, self._connect = store, connect
        self.words: dict[str, str] = {}  # that this client has put, and not dropped
        self.returns = 0  # how often the store was away, or silent, and answered again
        self._failing = False

    def answered(self, *, silent: bool) -> None:
        """silent: only after a while."""
        self.returns += silent or self._failing
        self._failing = False

    def fails(self) -> None:
        self._failing = True

    def connect(self) -> Store:
        if self._connect is not None:
            self.store = self._connect()
        elif hasattr(self.store, "clone"):
            if _address(self.store):
                place = addresses.split(_address(self.store), "the address of the store")
                socket.create_connection(place, _PROBE_S).close()
            self.store = self.store.clone()
        for key, value in list(self.words.items()):
            self.store.set(key, value)
        return self.store


class _Thread:
    def __init__(self, shared: _Shared, store: Store | None) -> None:
        self.requests: SimpleQueue[_Request | None] = SimpleQueue()
        self.since: float | None = None  # when the call began that it is in
        self._shared, self._over = shared, False
        self.thread = threading.Thread(
            target=self._serve, args=(shared, store), name="store", daemon=True
        )
        self.thread.start()

    def _serve(self, shared: _Shared, store: Store | None) -> None:
        while (request := self.requests.get()) is not None:
            answer, access = request
            if self._over:
                answer.cancel()
            with suppress(RuntimeError, InvalidStateError):  # who asked has closed meanwhile
                if answer.set_running_or_notify_cancel():
                    self.since = began = time.monotonic()
                    try:
                        if store is None:
                            store = shared.connect()
                        found = access(store)
                        silent = time.monotonic() - began > _SILENCE_S
                        shared.answered(silent=silent)
                        answer.set_result(found)
                    except BaseException as error:
                        store = None
                        shared.fails()
                        answer.set_exception(error)
                self.since = None
            del request, answer, access

    def end(self, patience_s: float) -> None:
        """Waits so long for calls that are about to return, then ends the call that it is in."""
        self.requests.put(None)
        if self.thread is threading.current_thread():
            return
        self.thread.join(patience_s)
        self._over = True
        until = time.monotonic() + _LEAST_S
        while self.thread.is_alive() and time.monotonic() < until:
            _hang_up(self.thread, _address(self._shared.store))
            self.thread.join(_AGAIN_S)


class Client:
    """store: any torch store. alone: no other thread uses it meanwhile; else this one connects by
    `store.clone()`. connect: how to do so anew; None: by `clone` again."""

    def __init__(
        self, store: Store, *, alone: bool = False, connect: Callable[[], Store] | None = None
    ) -> None:
        self._name = _address(store) or type(store).__name__
        self._shared, self._first = _Shared(store, connect), store if alone else None
        self._lock, self._patience, self._closed = threading.Lock(), _PATIENCE_S, False
        self._putting, self._left = threading.Lock(), False  # words go out in one order
        self._pending: set[Future[Any]] = set()
        self._limits = threading.local()
        self.words = self._shared.words
        weakref.finalize(self, _end, threads := list[_Thread]())
        self._threads = threads  # the one that runs

    @property
    def returns(self) -> int:
        """Rises when the store answers again after it was away or silent."""
        return self._shared.returns

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Calls of this thread end by then."""
        before = getattr(self._limits, "deadline", None)
        self._limits.deadline = deadline
        try:
            yield
        finally:
            self._limits.deadline = before

    def run(self, access: Callable[[Store], T]) -> T:
        """Returns what `access` does with the store. Raises StoreError."""
        return self.wait(self.post(access))

    def wait(self, answer: Future[T]) -> T:
        """For what was posted."""
        deadline: Deadline | None = getattr(self._limits, "deadline", None)
        limit = _ANSWER_S if deadline is None else max(deadline.left, _LEAST_S)
        try:
            return answer.result(limit)
        except ClosedError:
            raise
        except Exception as error:
            text = f"the store {self._name} does not answer: {error}"
            if not answer.done():
                self._leave_behind()
                text = f"the store {self._name} gives no answer within {limit:.1f} s"
            raise StoreError(str(make(TransportError, text))) from error
        finally:
            answer.cancel()
            self._pending.discard(answer)

    def post(self, access: Callable[[Store], T]) -> Future[T]:
        """The same without waiting."""
        if self._closed:
            raise make(ClosedError, _LEFT)
        answer: Future[T] = Future()
        with self._lock:
            if not self._threads:
                self._threads.append(_Thread(self._shared, self._first))
                self._first = None
            self._pending.add(answer)
            self._threads[0].requests.put((answer, access))
        answer.add_done_callback(self._pending.discard)
        return answer

    def put(self, at: str, word: str) -> Future[None]:
        """Posts a word, which is put again where the store loses it."""
        with self._putting:
            if self._left:
                raise make(ClosedError, _LEFT)
            self.words[at] = word
            return self.post(lambda store: store.set(at, word))

    def take_back(self, over: Callable[[str], bool], *, leaves: bool) -> None:
        """Deletes words, but for those that another member has put over this one's. leaves: none is
        put from here on."""
        with self._putting:
            self._left = self._left or leaves
            gone = {at: self.words.pop(at).encode() for at in list(self.words) if over(at)}
            if not gone:
                return

            def delete(store: Store) -> None:
                for at, word in gone.items():
                    if read(store, at) == word:
                        store.delete_key(at)

            answer = self.post(delete)
        with suppress(StoreError):  # a store that cannot delete keeps them
            self.wait(answer)

    def close(self) -> None:
        """Who waits for an answer raises ClosedError."""
        self._closed = True
        for each in list(self._pending):
            with suppress(Exception):  # it has one
                each.set_exception(make(ClosedError, _LEFT))
        _end(self._threads)

    def _leave_behind(self) -> None:
        with self._lock:
            since = self._threads[0].since if self._threads else None
            if since is None or time.monotonic() - since <= self._patience:
                return
            left = self._threads.pop()
            self._patience *= 2
            self._shared.fails()
        left.end(0)


def _end(threads: list[_Thread]) -> None:
    """A thread that came back from C++ when the interpreter has ended would end the process by
    std::terminate."""
    for each in threads:
        each.end(_LEAST_S)


def _hang_up(thread: threading.Thread, address: str) -> None:
    """Shuts down the connection to `address` where the thread waits in torch, which has no call for
    that: the call fails. Does nothing where the system does not say where it waits."""
    with suppress(OSError, ValueError, LookupError):
        port = int(address.rpartition(":")[2])
        call = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
        number, first = int(call[0]), int(call[1], 16)
        if number == _POLL:
            with open("/proc/self/mem", "rb", buffering=0) as memory:  # it may be gone by now
                memory.seek(first)
                first = int.from_bytes(memory.read(4), sys.byteorder)
        if number in (_RECVFROM, _POLL):
            with socket.socket(fileno=os.dup(first)) as connection:
                if connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)


def read(store: Store, at: str) -> bytes:
    """b"" where nothing is. One request: `get` waits for a key that was deleted after `check`."""
    found = bytes(store.compare_set(at, _NOTHING, _NOTHING))
    return b"" if found == _NOTHING.encode() else found


def _address(store: Store) -> str:
    """HOST:PORT of a TCPStore; "" of others."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""
