"""Small messages between engines, and barriers, as users see them.

The protocol over every provider: tests/cpp/messages_test.cpp.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine.messages import Message, Messages, Size
from moe_p2p.engine.transfers import Peer, Slice
from tests.engine.test_engine import loopback
from tests.engine.test_libfabric import SHM, TCP, needs_libfabric
from tests.support.ranks import DiedError, Rank, run_processes

CONFIGS = {
    "loopback": loopback(),
    "reordered": loopback(transport_settings="seed=5,ring_kib=4"),
    "tcp": EngineConfig(transport="libfabric", nics_per_rank=2, transport_settings=TCP),
    "shm": EngineConfig(transport="libfabric", nics_per_rank=1, transport_settings=SHM),
}
over_each = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[needs_libfabric] if name in ("tcp", "shm") else [])
        for name, config in CONFIGS.items()
    ],
)
DEFAULT = loopback()


def connected(sender: Engine, receiver: Engine, **bounds: int) -> tuple[Messages, Peer]:
    inbox = receiver.messages(**bounds)
    return inbox, sender.connect(receiver.address)


def send_when_room(engine: Engine, peer: Peer, data: bytes) -> None:
    ends = time.monotonic() + 60
    while True:
        try:
            engine.send(peer, data)
        except moe_p2p.ResourceExhaustedError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.0005)
        else:
            return


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned, or raised."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


@over_each
def test_messages_arrive_before_anybody_asks(config: EngineConfig) -> None:
    with Engine(config, label="decode") as sender, Engine(config) as receiver:
        inbox, peer = connected(sender, receiver)
        sent: list[bytes | bytearray | memoryview] = [
            b"first",
            b"",
            os.urandom(4096),
            bytearray(b"third"),
            memoryview(b"fourth"),
        ]
        for data in sent:
            sender.send(peer, data).wait()
        arrived = [inbox.wait() for _ in sent]
        assert [message.data for message in arrived] == [bytes(data) for data in sent]
        assert {message.sender for message in arrived} == {"decode"}
        assert len({message.sender_id for message in arrived}) == 1
        assert inbox.poll() is None
        assert receiver.discarded_imms == 0


@over_each
def test_thousands_both_ways_at_once(config: EngineConfig) -> None:
    num = 10_000 if config is CONFIGS["loopback"] else 1000

    def talk(engine: Engine, peer: Peer) -> None:
        for i in range(num):
            send_when_room(engine, peer, i.to_bytes(4, "little") * (i % 9 + 1))

    def listen(inbox: Messages) -> list[int]:
        found = [inbox.wait(60).data for _ in range(num)]
        assert all(len(data) == 4 * (i % 9 + 1) for i, data in enumerate(found))
        return [int.from_bytes(data[-4:], "little") for data in found]

    with Engine(config) as one, Engine(config) as other:
        first, to_first = connected(other, one)
        second, to_second = connected(one, other)
        *_, at_first, at_second = in_threads(
            lambda: talk(one, to_second),
            lambda: talk(other, to_first),
            lambda: listen(first),
            lambda: listen(second),
        )
        assert at_first == at_second == list(range(num))
        assert first.poll() is second.poll() is None


def test_threads_share_a_peer_and_an_inbox() -> None:
    with Engine(DEFAULT) as sender, Engine(DEFAULT) as receiver:
        inbox, peer = connected(sender, receiver, max_messages=8)

        def talk(thread: int) -> None:
            for i in range(100):
                send_when_room(sender, peer, bytes([thread, i]))

        talkers = [lambda t=t: talk(t) for t in range(3)]
        listeners = [lambda: [inbox.wait(60).data for _ in range(150)]] * 2
        *_, one, other = in_threads(*talkers, *listeners)
        assert sorted(one + other) == [bytes([t, i]) for t in range(3) for i in range(100)]


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with Engine(DEFAULT) as sender, Engine(DEFAULT, label="prefill") as receiver:
        early = sender.connect(receiver.address)
        inbox, peer = connected(sender, receiver, max_bytes=100, max_messages=2)
        refused = moe_p2p.InvalidArgumentError
        with pytest.raises(refused, match="no inbox when its address was given out"):
            sender.send(early, b"")
        for wrong in ("text", None, 3, [1, 2], torch.zeros(2, dtype=torch.uint8)):
            with pytest.raises(refused, match=r"data is .*, must be bytes"):
                sender.send(peer, wrong)  # type: ignore[arg-type]
        with pytest.raises(
            refused, match="message of 101 bytes; the peer's inbox takes at most 100"
        ):
            sender.send(peer, b"x" * 101)
        with pytest.raises(refused, match="priority is 3"):
            sender.send(peer, b"", priority=3)
        sender.send(peer, b"1")
        request = sender.send(peer, b"2")
        with pytest.raises(refused, match="message of 1 bytes cannot be taken back"):
            request.cancel()
        with pytest.raises(moe_p2p.ResourceExhaustedError, match="has not taken 2 messages"):
            sender.send(peer, b"3")
        assert [inbox.wait().data, inbox.wait().data] == [b"1", b"2"]
        sender.send(peer, b"4").wait()
        assert inbox.wait().data == b"4"
        with pytest.raises(moe_p2p.TimeoutError, match=r"prefill: no .* 0 s; 1 of 16 places"):
            inbox.wait(0)


def test_bounds_of_an_inbox() -> None:
    refused = moe_p2p.InvalidArgumentError
    with Engine(DEFAULT) as engine:
        with pytest.raises(refused, match="senders is 257, must be 1 to 256"):
            engine.messages(max_senders=257)
        with pytest.raises(refused, match="bytes of a message is 0"):
            engine.messages(max_bytes=0)
        with pytest.raises(refused, match="max_messages is True, must be an int"):
            engine.messages(max_messages=True)
        inbox = engine.messages(max_senders=256, max_messages=1, max_bytes=8)
        assert inbox.size == Size(256, 1, 8)
        assert engine.messages() is engine.messages(max_bytes=8) is inbox
        with pytest.raises(refused, match="was opened with"):
            engine.messages(max_bytes=9)


def test_asyncio_awaits_messages() -> None:
    async def serve(inbox: Messages, num: int) -> list[Message]:
        found = []
        async for message in inbox:
            found.append(message)
            if len(found) == num:
                break
        return found

    async def both(sender: Engine, peer: Peer, inbox: Messages) -> list[list[Message]]:
        serving = [asyncio.create_task(serve(inbox, 20)) for _ in range(2)]
        await asyncio.sleep(0)
        for i in range(40):
            await sender.send(peer, bytes([i]))
            if i % 10 == 0:
                await asyncio.sleep(0.01)
        return [await task for task in serving]

    with Engine(DEFAULT) as sender, Engine(loopback(timeout_s=5)) as receiver:
        inbox, peer = connected(sender, receiver)
        found = asyncio.run(both(sender, peer, inbox))
        assert sorted(m.data[0] for each in found for m in each) == list(range(40))

        async def too_late() -> None:
            await receiver.messages()

        receiver.timeout_s = 0.05
        with pytest.raises(moe_p2p.TimeoutError, match=r"no message came within 0\.05 s"):
            asyncio.run(too_late())


def test_close_ends_every_wait() -> None:
    async def waits(inbox: Messages) -> None:
        await inbox

    with Engine(DEFAULT) as receiver:
        inbox = receiver.messages()
        closing = threading.Timer(0.2, receiver.close)
        closing.start()
        ended = in_threads(lambda: inbox.wait(60), lambda: asyncio.run(waits(inbox)))
        assert [type(error) for error in ended] == [moe_p2p.ClosedError] * 2
        with pytest.raises(moe_p2p.ClosedError):
            inbox.poll()


def test_places_come_back_from_senders_that_leave_or_are_forgotten() -> None:
    with Engine(DEFAULT) as receiver:
        inbox = receiver.messages(max_senders=1)
        for i in range(3):
            with Engine(DEFAULT, label=f"worker {i}") as sender:
                peer = sender.connect(receiver.address)
                send_when_room_after(lambda: inbox.poll() is None, sender, peer)
                other = sender.connect(receiver.address)
                with pytest.raises(moe_p2p.ResourceExhaustedError, match="room for 1 senders"):
                    sender.send(other, b"hello")
                peer.disconnect()
                assert inbox.wait().sender == f"worker {i}"
                send_when_room_after(lambda: inbox.poll() is None, sender, other)
                assert inbox.wait().data == b"again"
        with Engine(DEFAULT) as sender:
            peer = sender.connect(receiver.address)
            send_when_room_after(lambda: inbox.poll() is None, sender, peer)
            message = inbox.wait()
            assert inbox.forget(message.sender_id)
            assert not inbox.forget(message.sender_id)
            with pytest.raises(moe_p2p.MoeP2pError, match="connect again"):
                send_many(sender, peer)
            assert inbox.poll() is None
            again = sender.connect(receiver.address)
            sender.send(again, b"new").wait()
            assert inbox.wait().data == b"new"


def send_many(engine: Engine, peer: Peer) -> None:
    """Until one fails: the failure of a message is that of a later one, too."""
    for _ in range(1000):
        request = engine.send(peer, b"lost")
        with suppress(moe_p2p.MoeP2pError):
            request.wait()


def send_when_room_after(looks: Callable[[], bool], sender: Engine, peer: Peer) -> None:
    """A place comes back when the receiver looks for messages."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        assert looks()
        try:
            sender.send(peer, b"again").wait()
        except moe_p2p.ResourceExhaustedError:
            continue
        return
    raise AssertionError("no place came back")


def send_to_a_rank_that_dies(rank: Rank) -> str:
    with Engine(DEFAULT) as engine:
        inbox = engine.messages()
        rank.store.set(f"address {rank.rank}", engine.address)
        peer = engine.connect(rank.store.get(f"address {1 - rank.rank}"))
        engine.send(peer, b"hello").wait()
        inbox.wait()
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            try:
                engine.send(peer, b"anybody?").wait()
            except moe_p2p.ResourceExhaustedError:
                continue
            except moe_p2p.PeerDeadError as error:
                with pytest.raises(moe_p2p.PeerDeadError, match="connect again"):
                    send_many(engine, peer)
                return str(error)
        raise AssertionError("nobody noticed")


def test_a_dead_receiver_is_named() -> None:
    results = run_processes(2, send_to_a_rank_that_dies, return_errors=True)
    assert isinstance(results[1], DiedError)
    assert "peer dead" in results[0]


# --- barriers ---


class Members:
    """Engines that are connected, each to all others."""

    def __init__(self, num: int, config: EngineConfig = DEFAULT) -> None:
        self._stack = ExitStack()
        self.engines = [
            self._stack.enter_context(Engine(config, label=f"member {i}")) for i in range(num)
        ]
        for engine in self.engines:
            engine.messages(max_messages=4)
        addresses = [engine.address for engine in self.engines]
        self._peers = [
            {j: engine.connect(addresses[j]) for j in range(num) if j != i}
            for i, engine in enumerate(self.engines)
        ]

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def meet(self, member: int, group: list[int], **options: Any) -> None:
        peers = [self._peers[member][other] for other in group if other != member]
        self.engines[member].barrier(peers, **options)


@over_each
def test_nobody_leaves_a_barrier_before_all_have_come(config: EngineConfig) -> None:
    steps = [0] * 3

    def run(member: int) -> None:
        for step in range(1, 21):
            steps[member] = step
            members.meet(member, [0, 1, 2], timeout_s=60)
            assert min(steps) >= step
            assert max(steps) <= step + 1

    with Members(3, config) as members:
        assert in_threads(*(lambda m=m: run(m) for m in range(3))) == [None] * 3


def test_barriers_of_other_groups_and_tags_go_on_side_by_side() -> None:
    num_pairs = 0

    def all_of_them(member: int) -> None:
        for _ in range(5):
            members.meet(member, [0, 1, 2, 3], tag=1, timeout_s=60)

    def own_group(member: int) -> None:  # disjoint ones have one tag
        nonlocal num_pairs
        for _ in range(20):
            members.meet(member, [member & 2, member & 2 | 1], timeout_s=60)
        num_pairs += 1

    with Members(4) as members:
        calls = [lambda m=m, c=c: c(m) for m in range(4) for c in (all_of_them, own_group)]
        assert in_threads(*calls) == [None] * 8
        assert num_pairs == 4
        members.meet(0, [0])  # of nobody else: nothing to wait for


def test_a_barrier_names_who_is_missing_and_counts_on() -> None:
    with Members(3) as members:
        late = pytest.raises(moe_p2p.TimeoutError, match=r"member 0: at barrier 0 peers\[1\] of 2")
        with late:
            in_time = threading.Thread(target=lambda: _missed(members, 1))
            in_time.start()
            members.meet(0, [0, 1, 2], timeout_s=1.5)
        in_time.join()
        with pytest.raises(moe_p2p.TimeoutError):
            members.meet(2, [0, 1, 2], timeout_s=0)  # both had come to this one, and are gone
        for _ in range(2):
            calls = [lambda m=m: members.meet(m, [2, 1, 0], timeout_s=60) for m in range(3)]
            assert in_threads(*calls) == [None] * 3


def _missed(members: Members, member: int) -> None:
    with pytest.raises(moe_p2p.TimeoutError):
        members.meet(member, [0, 1, 2], timeout_s=1)


def test_barriers_that_cannot_be_are_refused_by_name() -> None:
    refused = moe_p2p.InvalidArgumentError
    with Members(3) as members, Engine(DEFAULT) as stranger:
        one, two = members.engines[:2]
        peer = one.connect(two.address)
        with pytest.raises(refused, match="different engines, and not this one"):
            one.barrier([peer, one.connect(two.address)])
        with pytest.raises(refused, match="different engines, and not this one"):
            one.barrier([one.connect(one.address)])
        with pytest.raises(refused, match="is another engine's"):
            two.barrier([peer])
        with pytest.raises(refused, match=r"peers is .*, must be a Peer"):
            one.barrier([two])  # type: ignore[list-item]
        with pytest.raises(refused, match="tag is -1"):
            one.barrier([peer], tag=-1)
        with pytest.raises(refused, match=r"no inbox .*peers\[0\] of a barrier"):
            one.barrier([one.connect(stranger.address)])
        waiting = threading.Thread(target=lambda: _missed(members, 0))
        waiting.start()
        found: set[str] = set()
        while waiting.is_alive() and not found:
            try:
                members.meet(0, [0, 2], timeout_s=0)
            except refused as error:
                found.add(str(error))
            except moe_p2p.TimeoutError:
                pass  # the other one has not begun
        waiting.join()
        assert re.search("a barrier with tag 0 is under way here", found.pop())


def test_groups_that_overlap_with_one_tag_are_named() -> None:
    with Members(3) as members:
        ended = in_threads(
            lambda: members.meet(0, [0, 1, 2], timeout_s=30),
            lambda: members.meet(1, [0, 1], timeout_s=30),
        )
        assert {type(error) for error in ended} == {moe_p2p.ProtocolError}
        assert "groups that overlap take different tags" in str(ended[0])


# --- numbers of NICs that differ ---


def everything(sender: Engine, receiver: Engine) -> None:
    """Each kind of request, with the immediates that the sender's number of NICs makes of it."""
    inbox, peer = connected(sender, receiver)
    data = torch.randint(0, 255, (5000,), dtype=torch.uint8)
    landing = torch.zeros_like(data)
    memory = sender.register(data)
    region = sender.resolve(receiver.register(landing).descriptor)
    sender.write(memory, region, imm=1).wait()
    receiver.wait_imm(1, sender.num_nics)
    assert torch.equal(landing, data)
    landing.zero_()
    pages = torch.arange(50)
    rows = PageRows(page_bytes=100)
    sender.write_pages(memory, region, rows=rows, pages=pages, region_pages=pages, imm=2).wait()
    receiver.wait_imm(2, 50)
    assert torch.equal(landing, data)
    landing.zero_()
    slices = [Slice(i * 1000, region, i * 1000, 1000) for i in range(5)]
    sender.scatter(memory, slices, imm=3).wait()
    receiver.wait_imm(3, 5)
    assert torch.equal(landing, data)
    back = torch.zeros_like(data)
    sender.read(sender.register(back), region).wait()
    assert torch.equal(back, data)
    sender.send_imm(peer, 4).wait()
    receiver.wait_imm(4, 1)
    sender.send(peer, b"hello").wait()
    assert inbox.wait().data == b"hello"


@pytest.mark.parametrize("nics", [(2, 1), (2, 4), (1, 2), (3, 8)])
@over_each
def test_peers_may_have_another_number_of_nics(config: EngineConfig, nics: tuple[int, int]) -> None:
    def of(num: int) -> EngineConfig:
        return EngineConfig(
            transport=config.transport,
            nics_per_rank=num,
            transport_settings=config.transport_settings,
            timeout_s=30,
        )

    with Engine(of(nics[0])) as one, Engine(of(nics[1])) as other:
        everything(one, other)
        everything(other, one)
