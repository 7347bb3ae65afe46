"""Workers come and go: leases, incarnations, secrets, and what a lost worker takes with it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

from moe_p2p import (
    AbortedError,
    Engine,
    EngineConfig,
    MoeP2pError,
    PeerDeadError,
    ProtocolError,
    errors,
    kv,
)
from moe_p2p.fleet.client import Client, Deadline
from moe_p2p.fleet.member import Member
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations.kv.worker import _SERVED, join_store, leases_store, serve_store
from moe_p2p.kv.channel import Message, prove, receive
from moe_p2p.kv.pair import Hello
from tests.support.kv_fakes import Clock, cache_of
from tests.support.kv_workers import QUICK, random_cache, some_pages, workers

GROUP = kv.KVGroup("kv", (0, 1), heads=2, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT = kv.KVLayout((GROUP,))
PAGES = {"kv": some_pages(4, 32, 1)}


def eventually(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_lease_ends_by_the_readers_clock() -> None:
    store, clock = HashStore(), Clock()
    writer, reader = kv.TorchLeases(store, 5, clock), kv.TorchLeases(store, 5, clock)
    writer.renew("a", b"1")
    assert reader.members() == {"a": b"1"}
    clock.now = 4
    writer.renew("a", b"1")
    assert reader.members() == {"a": b"1"}
    clock.now = 8.9
    assert reader.members() == {"a": b"1"}
    clock.now = 9.1
    assert reader.members() == {}
    writer.renew("a", b"2")
    assert reader.members() == {"a": b"2"}
    writer.withdraw("a")
    assert reader.members() == {}


def test_places_of_leases_are_used_again() -> None:
    """Of workers that left, and of workers that died once somebody has seen it for a while."""
    store, clock = HashStore(), Clock()
    witness = kv.TorchLeases(store, 5, clock)
    for number in range(20):
        leases = kv.TorchLeases(store, 5, clock)
        leases.renew(f"worker {number}", b"")
        assert witness.members() == {f"worker {number}": b""}
        if number % 2:
            leases.withdraw(f"worker {number}")
        for _ in range(2):
            clock.now += 6
            assert witness.members() == {}
    assert store.add("moe_p2p/kv/places", 0) == 1


def test_a_worker_that_was_stopped_does_not_overwrite_another_ones_lease() -> None:
    store, clock = HashStore(), Clock()
    stopped, witness, other = (kv.TorchLeases(store, 5, clock) for _ in range(3))
    stopped.renew("stopped", b"1")
    witness.members()
    clock.now += 11
    witness.members()
    other.renew("other", b"2")
    stopped.renew("stopped", b"1")
    assert witness.members() == {"stopped": b"1", "other": b"2"}


def test_leases_in_a_file(tmp_path: object) -> None:
    first, other = (kv.TorchLeases(FileStore(f"{tmp_path}/store", 2), 5) for _ in range(2))
    first.renew("a", b"1")
    other.renew("b", b"2")
    assert first.members() == other.members() == {"a": b"1", "b": b"2"}


def test_workers_meet_again_in_a_store_that_was_lost() -> None:
    """A worker of its host serves it anew; pairs stay, and who is new is met."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert serve_store(address) is not None
    config = EngineConfig(transport="loopback")
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(config)) for _ in range(3)]
        kinds = (kv.KVReceiver, kv.KVSender, kv.KVSender)
        decode, old, new = (
            kind(engine, cache_of(LAYOUT, 0, 32), instance=name, timeouts=QUICK)
            for kind, engine, name in zip(kinds, engines, ("decode", "p0", "p1"), strict=True)
        )
        leases = [kv.TorchLeases(leases_store(address), QUICK.lease_s) for _ in range(2)]
        stack.enter_context(kv.LeaseKeeper(decode, leases[0]))
        stack.enter_context(kv.LeaseKeeper(old, leases[1]))
        decode.wait_for("p0", 20)
        pair = decode.pairs["p0/0"]
        del _SERVED[address]  # its process has ended
        eventually(lambda: address in _SERVED)
        late = kv.TorchLeases(join_store(address), QUICK.lease_s)
        stack.enter_context(kv.LeaseKeeper(new, late))
        decode.wait_for("p1", 20)
        assert decode.pairs["p0/0"] is pair


def test_a_dead_prefiller_does_not_fail_the_decoder() -> None:
    """Its requests fail by name; a new process under its name, and others, go on."""
    store = HashStore()
    config = EngineConfig(transport="loopback")
    leases = [kv.TorchLeases(store, QUICK.lease_s) for _ in range(4)]
    with (
        Engine(config) as one,
        Engine(config) as other,
        Engine(config) as third,
        Engine(config) as new,
    ):
        common = {"timeouts": QUICK}
        receiver = kv.KVReceiver(one, cache_of(LAYOUT, 0, 32), instance="decode", **common)
        senders = [
            kv.KVSender(engine, cache_of(LAYOUT, 0, 32), instance=name, **common)
            for engine, name in ((other, "p0"), (third, "p1"), (new, "p0"))
        ]
        with kv.LeaseKeeper(receiver, leases[0]), kv.LeaseKeeper(senders[1], leases[2]):
            dying = kv.LeaseKeeper(senders[0], leases[1])
            for name in ("p0", "p1"):
                receiver.wait_for(name, 20)
            doomed = receiver.reserve("doomed", "p0", PAGES, total=16)
            pages = {"kv": torch.tensor([p for p in range(32) if p not in PAGES["kv"]]).int()[:4]}
            lives = receiver.reserve("lives", "p1", pages, total=16)
            dying.close()
            with pytest.raises(
                PeerDeadError, match=r"request 'doomed', .*: lost p0/0: its connect"
            ):
                doomed.wait(20)
            doomed.wait_reusable(20)
            sending = senders[1].start("lives", "decode", pages, total=16)
            for layer in (0, 1):
                sending.layer(layer)
            sending.commit()
            lives.wait(20)
            with kv.LeaseKeeper(senders[2], leases[3]) as new_one:
                eventually(lambda: "p0/0" in receiver.pairs)
                assert receiver.pairs["p0/0"].worker == new_one.record


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_name_another_process_takes_stops(role: str) -> None:
    """Its requests fail by name, its pages come back, and others meet the new one."""
    with workers(LAYOUT, LAYOUT) as found, Engine() as engine:
        of_role: dict[str, Any] = {"prefill": found.senders[0], "decode": found.receivers[0]}
        old, other = of_role.pop(role), of_role.popitem()[1]
        reservation = found.receivers[0].reserve("r", "prefill", PAGES, total=16)
        sending = found.senders[0].start("r", "decode", PAGES, total=16)
        new = type(old)(engine, cache_of(LAYOUT, 0, 32), instance=role, timeouts=QUICK)
        with kv.LeaseKeeper(
            new, kv.TorchLeases(found.keepers[old.name].leases.client, QUICK.lease_s)
        ) as it:
            for request in (reservation, sending):
                with pytest.raises(PeerDeadError, match="request 'r'"):
                    request.wait(20)
                request.wait_reusable(20)
            eventually(lambda: bool(old.replaced))
            ours = "decode" if role == "prefill" else "prefill"
            text = f"{role}/0 was replaced: another process has taken its name"
            for call in (
                lambda: (old.start if role == "prefill" else old.reserve)(
                    "again", ours, PAGES, total=16
                ),
                lambda: old.wait_for(ours, 20),
            ):
                with pytest.raises(AbortedError, match=text):
                    call()
            eventually(lambda: getattr(other.pairs.get(new.name), "worker", 0) == it.record)
            new.wait_for(ours, 20)
            workers_now = {role: new, ours: other}
            random_cache(workers_now["prefill"].cache, 1)
            reservation = workers_now["decode"].reserve("s", "prefill", PAGES, total=16)
            sending = workers_now["prefill"].start("s", "decode", PAGES, total=16)
            for layer in (0, 1):
                sending.layer(layer)
            sending.commit()
            reservation.wait(20)
            found.keepers[old.name].close()
            old.check_withdrawn()


def test_nothing_in_the_store_grows_with_restarts() -> None:
    """By one name, and by a name of its own each time."""
    store, counts = HashStore(), list[int]()
    with Engine(EngineConfig(transport="loopback")) as engine:
        for number in range(20):
            for name in ("prefill", f"prefill-{number}"):
                worker = kv.KVSender(engine, cache_of(LAYOUT, 0, 32), instance=name, timeouts=QUICK)
                with kv.LeaseKeeper(worker, kv.TorchLeases(store, QUICK.lease_s)) as found:
                    eventually(lambda it=found: bool(it.leases.members()))
            counts.append(store.num_keys())
    assert counts[-1] == counts[1], store.list_keys()


class Refuses:
    """A store that goes away in the middle of its first answers."""

    def __init__(self, store: HashStore, times: int) -> None:
        self.store, self.times = store, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def connect(self) -> Refuses:
        return self

    def compare_set(self, *words: str) -> bytes:
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("the store is away")
        return bytes(self.store.compare_set(*words))


def test_a_worker_that_begins_while_the_store_is_away_claims_its_name_later() -> None:
    """It is not replaced by the process that had the name before."""
    store = HashStore()
    before = StoreKeys(Client(store))
    before.swap("p/0 (sender) is", None, {"id": "p/0 (sender)#0", "claim": 1})
    quick = dataclasses.replace(QUICK, lease_s=0.4)
    with Engine() as one, Engine() as two, ExitStack() as stack:
        for kind, engine, name in ((kv.KVSender, one, "p"), (kv.KVReceiver, two, "d")):
            worker = kind(engine, cache_of(LAYOUT, 0, 4), instance=name, timeouts=quick)
            client = Client(object(), connect=Refuses(store, 2).connect)
            stack.enter_context(kv.LeaseKeeper(worker, kv.TorchLeases(client, QUICK.lease_s)))
        worker.wait_for("p", 20)


def test_a_lease_that_is_over_ends_the_pair() -> None:
    """A host that is gone closes no connection."""
    with workers(LAYOUT, LAYOUT, timeouts=dataclasses.replace(QUICK, lease_s=2)) as found:
        receiver, member = found.receivers[0], found.keepers["prefill/0"]
        pair = receiver.pairs["prefill/0"]
        member.leases.renew = lambda name, record: None  # type: ignore[method-assign]
        reservation = receiver.reserve("r", "prefill", PAGES, total=16)
        with pytest.raises(PeerDeadError, match=r"lost prefill/0: its lease is over, after 2 s"):
            reservation.wait(20)
        reservation.wait_reusable(20)
        assert pair.fenced


def test_a_store_that_does_not_answer_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with workers(LAYOUT, LAYOUT, timeouts=dataclasses.replace(QUICK, lease_s=0.2)) as found:
        receiver = found.receivers[0]
        before = dict(receiver.pairs)

        def gone() -> dict[str, bytes]:
            raise RuntimeError("the store is gone")

        for member in found.keepers.values():
            member.leases.members = gone  # type: ignore[method-assign]
        eventually(lambda: "the store of leases does not answer" in capfd.readouterr().err)
        until = time.monotonic() + 1
        eventually(lambda: time.monotonic() > until)
        assert receiver.pairs == before


def test_waiting_for_nobody_names_who_is_missing() -> None:
    with workers(kv.KVLayout((GROUP,), tp=2), LAYOUT) as found:
        receiver = found.receivers[0]
        receiver.wait_for("prefill", 0.0)
        receiver.lose(receiver.pairs["prefill/1"], "test")
        receiver.pairs.pop("prefill/1", None)
        with pytest.raises(
            errors.TimeoutError, match=r"waited 0.05 s in phase connect for any ran"
        ):
            receiver.wait_for("other", 0.05)


def test_a_stranger_is_refused_and_nobody_else() -> None:
    """It does not know the secret, sends what is no message, or stays silent."""
    with workers(LAYOUT, LAYOUT) as found:
        record = found.keepers["prefill/0"].record
        listener = found.keepers["prefill/0"]._listener
        for limit_s, sent in ((0.5, b""), (20, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)):
            listener._limit_s = limit_s
            with socket.create_connection((record.host, record.port), 10) as stranger:
                stranger.sendall(sent)
                with suppress(ConnectionResetError):  # there were bytes that it did not read
                    while stranger.recv(4096):  # its nonce, then the end
                        pass
        with (
            socket.create_connection((record.host, record.port), 10) as stranger,
            pytest.raises((ProtocolError, OSError, PeerDeadError)),
        ):
            prove(stranger, b"a wrong secret", Deadline(20), dials=True)
        with socket.create_connection((record.host, record.port), 10) as stranger:
            prove(stranger, record.secret.encode(), Deadline(20), dials=True)
            hello = receive(stranger)
            assert hello.kind == "hello"
            stranger.sendall(Message("hello", {"letter": "another"}).to_bytes())
            while stranger.recv(4096):
                pass
        for letter in ("another", None):
            other = Message("hello", {**hello.fields, "letter": letter}, hello.arrays)
            with pytest.raises(ProtocolError, match="prefill/0 runs another version of moe_p2p"):
                Hello.from_message(other)
        reservation = found.receivers[0].reserve("r", "prefill", PAGES, total=16)
        reservation.cancel()
        reservation.wait_reusable(20)


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[]", b'{"kind":"x","arrays":[9]}', b'{"kind":"x","arrays":[-1]}', b"\xff"],
)
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Message.parse(body, len(body))


def test_messages_survive_the_wire() -> None:
    message = Message("open", {"nonce": (1 << 63) - 1, "request": "ü"}, (b"", b"abc"))
    data = message.to_bytes()
    assert Message.parse(data[8:], int.from_bytes(data[4:8], "little")) == message


def test_workers_may_share_an_engine() -> None:
    """Each has memory, connections and numbers of its own: requests of one name do not mix."""
    store, names = HashStore(), ("a", "b")
    with Engine(EngineConfig(transport="loopback")) as one, contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}
        for name in names:
            for kind, at in ((kv.KVSender, f"p-{name}"), (kv.KVReceiver, f"d-{name}")):
                found[at] = kind(one, cache_of(LAYOUT, 0, 32), instance=at, timeouts=QUICK)
                leases = kv.TorchLeases(store, QUICK.lease_s)
                stack.enter_context(kv.LeaseKeeper(found[at], leases))
        for name in names:
            for other in names:
                found[f"d-{name}"].wait_for(f"p-{other}", 20)
            random_cache(found[f"p-{name}"].cache, ord(name))
        for number in range(8):
            held = [found[f"d-{name}"].reserve("r", f"p-{name}", PAGES, total=16) for name in names]
            sent = [found[f"p-{name}"].start("r", f"d-{name}", PAGES, total=16) for name in names]
            for layer in (0, 1):
                for sending in sent[:: 1 if number % 2 else -1]:
                    sending.layer(layer)
            for sending, reservation in zip(sent, held, strict=True):
                sending.commit()
                reservation.wait(20)
                sending.wait(20)
                reservation.wait_reusable(20)
        for name in names:
            ours, theirs = (found[f"{at}-{name}"].cache.tensors[0] for at in "pd")
            pages = PAGES["kv"].long()
            assert torch.equal(theirs.view(2, 32, -1)[:, pages], ours.view(2, 32, -1)[:, pages])


@pytest.mark.parametrize("which", ["dials prefill/0", "with decode/0 read", "with prefill/0 write"])
def test_workers_that_may_have_no_more_threads_meet_later(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = threading.Thread.start, list[str]()

    def full(thread: threading.Thread) -> None:
        if which in thread.name and len(failed) < 2:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    with workers(LAYOUT, LAYOUT) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        names = itertools.count()

        def works() -> bool:
            name = f"request {next(names)}"
            held: list[Any] = []
            try:
                held.append(receiver.reserve(name, "prefill", PAGES, total=16))
                held.append(sender.start(name, "decode", PAGES, total=16))
                for layer in GROUP.layers:
                    held[1].layer(layer)
                held[1].commit()
                until = time.monotonic() + 20
                while not held[0].done():  # never, if the other one is of another meeting
                    if held[1].done():
                        held[1].wait(0)
                    assert time.monotonic() < until
                    time.sleep(0.001)
                held[0].wait(0)
            except MoeP2pError:  # of a pair that is lost again
                for each in held:
                    each.cancel()
                    each.wait_reusable(20)
                return False
            return len(failed) == 2

        eventually(works)


def test_a_close_that_was_interrupted_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C; at exit it is called, too."""
    with workers(LAYOUT, LAYOUT) as found:
        receiver = found.receivers[0]
        membership = found.keepers[receiver.name]
        wait_fenced = receiver.wait_fenced

        def interrupted(timeout_s: float) -> None:
            receiver.wait_fenced = wait_fenced  # type: ignore[method-assign]
            raise KeyboardInterrupt

        left = []
        monkeypatch.setattr(receiver, "wait_fenced", interrupted)
        monkeypatch.setattr(atexit, "unregister", left.append)
        with pytest.raises(KeyboardInterrupt):
            membership.close()
        assert not left
        membership.close()
        receiver.check_withdrawn()
        assert left == [membership.close]
        assert not membership._stepping.is_alive()


def test_nothing_is_registered_after_close_while_others_connect() -> None:
    """vLLM's sleep mode then unmaps the memory."""
    store, made = HashStore(), list[Any]()
    with Engine(label="p") as of_sender, Engine(label="d") as of_receiver:
        sender = kv.KVSender(of_sender, cache_of(LAYOUT, 0, 4), instance="p", timeouts=QUICK)
        receiver = kv.KVReceiver(of_receiver, cache_of(LAYOUT, 0, 4), instance="d", timeouts=QUICK)
        register, begun = sender.register, threading.Event()
        keeper = kv.LeaseKeeper(sender, kv.TorchLeases(store))

        def slow_register() -> Any:
            made.append(register())
            begun.set()
            keeper._left.wait(QUICK.connect_s)
            threading.Event().wait(0.3)
            return made[-1]

        sender.register = slow_register  # type: ignore[method-assign]
        with kv.LeaseKeeper(receiver, kv.TorchLeases(store)):
            assert begun.wait(QUICK.connect_s)
            keeper.close()
            assert not any(memory.is_registered for memory in made)
            sender.check_withdrawn()
            sender.register = register  # type: ignore[method-assign]
            with kv.LeaseKeeper(sender, kv.TorchLeases(store)):
                receiver.wait_for("p")


def test_a_name_that_was_taken_and_left_is_not_taken_back() -> None:
    """By a process that was stopped meanwhile: others may have read what the one after it did."""
    store = HashStore()
    stopped, after = (Member(StoreKeys(store, "fleet"), "trainer 0", {}, 60) for _ in range(2))
    after.close()
    stopped._beat.look()
    assert stopped.replaced
    stopped.close()
