"""Workers find each other, connect, and notice who is gone. All of it off the path of requests.

    leases = kv.TorchLeases(store)
    with kv.LeaseKeeper(receiver, leases):       and the same for each sender
        receiver.wait_for("prefill-0")

Name, incarnation and lease are a moe_p2p.fleet `Member`'s. After each renewal its thread connects
to senders that are new (receivers connect to senders), and ends pairs whose worker's lease is over,
or whose name another process has; where that is this worker's own name, the worker leaves. It
touches no CUDA. A second thread handles deadlines and fences. Ports are ephemeral and stand in the
lease.
"""

from __future__ import annotations

import atexit
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from moe_p2p import aliases, env, log
from moe_p2p.errors import (
    ClosedError,
    InvalidArgumentError,
    MoeP2pError,
    ProtocolError,
    UnavailableError,
    make,
    require_type,
)
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.leases import TorchLeases
from moe_p2p.fleet.listener import Listener, end, warn_of_strangers
from moe_p2p.fleet.member import Member, Record, name_of
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.kv.channel import Channel, prove, receive
from moe_p2p.kv.pair import Hello, Pair, PairMemory, Worker
from moe_p2p.kv.worker import KVWorker

_BACKLOG = 64
_WARN_S = 10.0  # between warnings of connections that were refused


if not TYPE_CHECKING:
    __getattr__ = aliases.renamed(__name__, {"Membership": "LeaseKeeper"})


class LeaseKeeper:
    """host: address under which others reach this process; it is also the one that listens."""

    def __init__(self, worker: KVWorker, leases: TorchLeases, *, host: str = "127.0.0.1") -> None:
        require_type("LeaseKeeper: worker", worker, KVWorker, "a KVSender or KVReceiver")
        require_type("LeaseKeeper: leases", leases, TorchLeases, "a kv.TorchLeases")
        require_type("LeaseKeeper: host", host, str, "a str")
        self.worker, self.leases = worker, leases
        host = addresses.bare(host)
        try:
            listening = addresses.listen(host, backlog=_BACKLOG)
        except (OSError, InvalidArgumentError) as error:
            text = f"{worker.name}: host={host!r} is no address of this machine: {error}"
            raise make(UnavailableError, text) from error
        secret = env.secret()
        drawn = "" if secret else secrets.token_hex(32)
        self._secret = (secret or drawn).encode()
        warn_of_strangers(
            worker.name,
            host,
            "whoever reaches the store of leases may write to all of its KV memory",
        )
        self._place = dataclasses.replace(
            worker.worker, host=host, port=listening.getsockname()[1], secret=drawn
        )
        self._stop = threading.Event()
        self._left = threading.Event()  # and all pairs are lost
        self._dialing: set[str] = set()
        self._meeting: set[socket.socket] = set()  # not yet a pair's
        self._met = threading.Condition()
        self._begun, self._closing = threading.Event(), threading.Lock()
        self._closed = False
        self._known: dict[str, Worker] = {}
        self._unread: set[str] = set()
        self._warned_at = float("-inf")
        # Before engines are closed at exit: a thread that is in a call of ours when the interpreter
        # ends would end the process by std::terminate.
        atexit.register(self.close)
        with ExitStack() as undo:  # where this process may have no more threads, say
            undo.callback(listening.close)
            undo.callback(atexit.unregister, self.close)
            undo.callback(self._end_steps)
            undo.callback(self._begun.set)
            self._stepping = self._thread("step", self._steps)
            self._member = Member(
                StoreKeys(leases.client, leases.prefix),
                f"{worker.name} ({worker.role})",  # a rank may have a worker of either role
                dataclasses.asdict(self._place),
                worker.timeouts.lease_s,
                leases=leases,
                then=self._look,
            )
            undo.callback(self._member.close)
            limit_s = worker.timeouts.connect_s
            self._listener = Listener(worker.name, listening, self._answer, limit_s)
            undo.pop_all()
        worker.join()
        self._begun.set()

    @property
    def record(self) -> Worker:
        return dataclasses.replace(self._place, incarnation=self._member.id)

    def _thread(self, name: str, run: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(
            target=run, args=args, name=f"{self.worker.name} {name}", daemon=True
        )
        thread.start()
        return thread

    # --- leases ---

    def _look(self, member: Member) -> None:
        """In the member's thread. Raises where the store does not answer: pairs go on as long as
        they can."""
        self._begun.wait(self.worker.timeouts.connect_s)
        if member.replaced:
            text = f"{self.worker.name} was replaced: another process has taken its name"
            log.warning(text)
            self.worker.replace(text)
            self.close()
            return
        found = self._workers(member.members())
        for name, pair in list(self.worker.pairs.items()):
            now = found.get(name)
            if now is None and name in self._known:
                self.worker.lose(pair, f"its lease is over, after {self.worker.timeouts.lease_s} s")
            elif now is not None and now.incarnation != pair.worker.incarnation:
                self.worker.lose(pair, "it was started anew")
        self._known = found
        for other in found.values():
            dials = self.worker.role == "receiver" and other.name not in self.worker.pairs
            if dials and other.name not in self._dialing:
                self._dialing.add(other.name)
                try:
                    self._thread(f"dials {other.name}", self._dial, other)
                except RuntimeError:  # this process may have no more threads; at the next look
                    self._dialing.discard(other.name)
                    raise

    def _workers(self, members: Mapping[str, Record]) -> dict[str, Worker]:
        """Of the other role, by name. Without those whose records this build does not read: others
        go on."""
        found = {}
        for who, record in members.items():
            try:
                worker = Worker.of(record, incarnation=who)
                if worker.role != self.worker.role:
                    found[worker.name] = worker
            except MoeP2pError as error:
                if who not in self._unread:
                    log.warning(f"{self.worker.name}: the lease of {name_of(who)}: {error}")
                self._unread.add(who)
        return found

    # --- connections ---

    def _dial(self, other: Worker) -> None:
        try:
            deadline = Deadline(self.worker.timeouts.connect_s)
            connection = socket.create_connection((other.host, other.port), deadline.left)
            secret = other.secret.encode() if other.secret else self._secret
            self._meet(connection, secret, deadline)
        except (OSError, MoeP2pError) as error:
            if not self._stop.is_set():
                # Mostly a worker that has just ended, whose lease is not over yet.
                log.info(f"{self.worker.name}: cannot connect to {other.name}: {error}; again soon")
        finally:
            self._dialing.discard(other.name)

    def _answer(
        self, connection: socket.socket, deadline: Deadline, proved: Callable[[], None]
    ) -> None:
        try:
            self._meet(connection, self._secret, deadline, proved)
        except (OSError, MoeP2pError) as error:
            now = time.monotonic()
            if not self._stop.is_set() and now - self._warned_at > _WARN_S:
                self._warned_at = now  # strangers do not fill a log
                log.warning(f"{self.worker.name}: refused a connection: {error}")

    def _meet(
        self,
        connection: socket.socket,
        secret: bytes,
        deadline: Deadline,
        proved: Callable[[], None] | None = None,
    ) -> None:
        """Both ends: proof, hello, and a pair that requests may use. proved: where it answers."""
        memory: PairMemory | None = None
        with self._met:
            self._meeting.add(connection)
        try:
            if self._stop.is_set():
                raise make(ClosedError, f"{self.worker.name} leaves")
            connection.settimeout(deadline.timeout_s)  # of what is sent
            prove(connection, secret, deadline, dials=proved is None)
            if proved is not None:
                proved()
            memory = self.worker.register()
            connection.sendall(self.worker.hello(memory, self.record).to_message().to_bytes())
            theirs = Hello.from_message(receive(connection, deadline))
            if theirs.worker.role == self.worker.role:
                raise make(ProtocolError, f"{theirs.worker.name} is a {theirs.worker.role} too")
            channel = Channel(connection, deadline.timeout_s)
            pair = self.worker.meet(memory, theirs, channel)
            memory = None  # the pair's
            self._begin(pair, channel)
        except BaseException:
            connection.close()
            if memory is not None:
                memory.withdraw()
            raise
        finally:
            with self._met:
                self._meeting.discard(connection)
                self._met.notify_all()

    def _begin(self, pair: Pair, channel: Channel) -> None:
        self.worker.attach(pair)
        if self._stop.is_set():  # `close` may have ended all pairs before this one was there
            self.worker.lose(pair, "this worker leaves")
            self._steps()
            return
        try:
            channel.start(
                f"{self.worker.name} with {pair.name}",
                lambda message: self.worker.on_message(pair, message),
                lambda why: self._ended(pair, why),
            )
        except RuntimeError as error:  # this process may have no more threads
            why = f"its messages cannot be read: {error}"
            self.worker.lose(pair, why)
            raise make(UnavailableError, f"{pair.name}: {why}") from error

    def _ended(self, pair: Pair, why: str) -> None:
        if not self._stop.is_set():
            self.worker.lose(pair, why)
            self._member.wake()  # it may be back already

    # --- deadlines and fences ---

    def _steps(self) -> None:
        """Owns the fences: also after `close`, until all have succeeded or the engine is closed."""
        while not self._left.is_set() or self.worker.is_fencing:
            self.worker.wake.clear()
            try:
                pause = self.worker.step()
            except Exception as error:
                log.warning(f"{self.worker.name}: a step failed: {error!r}")
                pause = 0.05
            self.worker.pause(pause)

    def _end_steps(self) -> None:
        self._stop.set()
        self._left.set()
        self.worker.wake.set()

    def close(self) -> None:
        """Leaves: withdraws the lease, ends all pairs and fences them. Idempotent.

        Then no memory is registered. A fence that does not succeed within connect_s is tried again
        afterwards, until the engine is closed. The worker may have another LeaseKeeper then.
        """
        with self._closing:
            if not self._closed:
                self._close()
                self._closed = True  # where Ctrl-C has cut it short, the next call goes on
                atexit.unregister(self.close)

    def _close(self) -> None:
        self._stop.set()
        self.worker.lose_all(self.worker.replaced or "this worker leaves")
        self._end_steps()
        self._member.close()
        self._listener.close()
        with self._met:
            for connection in self._meeting:
                end(connection)
            self._met.wait_for(lambda: not self._meeting, self.worker.timeouts.connect_s)
        self.worker.wait_fenced(self.worker.timeouts.connect_s)
        if not self.worker.is_fencing:
            self._stepping.join(self.worker.timeouts.connect_s)

    def __enter__(self) -> LeaseKeeper:
        if self._closed:
            text = f"{self.worker.name}: its LeaseKeeper is closed; make another one"
            raise make(ClosedError, text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
