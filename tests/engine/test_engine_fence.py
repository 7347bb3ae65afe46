"""Memory that is taken back from a peer that was stopped in the middle of a write: nothing of it
lands any more when the peer goes on, whoever takes it back, and other peers notice nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from moe_p2p import Engine, EngineConfig, TimeoutError, mooncake
from moe_p2p.errors import make
from tests.support import warm
from tests.support.ranks import repeated

NBYTES = 64 << 20  # of a write: sockets and rings hold some of it, never all
OVER = {
    "loopback": ("loopback", ""),
    "tcp": ("libfabric", "provider=tcp,interfaces=lo,timeout_ms=2000"),
}

# Writes only: the other side has never connected to it.
WRITER = """
import sys
import torch
from tests.engine import test_engine_fence as t

over, nbytes, descriptor = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with t.engine(over) as engine:
    memory = engine.register(torch.full((nbytes,), 7, dtype=torch.uint8))
    region = engine.resolve(bytes.fromhex(descriptor))
    print("ready", flush=True)
    for _ in sys.stdin:
        try:
            engine.write(memory, region, nbytes=nbytes, imm=1).wait(30)
            print("done", flush=True)
        except Exception as error:
            print(f"failed: {error}", flush=True)
"""


def engine(over: str) -> Engine:
    transport, settings = OVER[over]
    return Engine(EngineConfig(transport=transport, transport_settings=settings))


@contextmanager
def writer(over: str, nbytes: int, descriptor: bytes) -> Iterator[subprocess.Popen[str]]:
    command = ("-c", WRITER, over, str(nbytes), descriptor.hex())
    child = warm.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.communicate()


def begin(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def ended(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def cut_in_two(child: subprocess.Popen[str], cache: torch.Tensor) -> bool:
    """Stops the child while its write lands. Returns whether it was in time."""
    looks = cache.numpy()[:: 1 << 18]
    deadline = time.monotonic() + 30
    while not looks.any():
        assert time.monotonic() < deadline
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 0.2  # what is in the sockets
    while time.monotonic() < deadline and not looks.all():
        time.sleep(0.01)
    return not looks.all()


TakeBack = Callable[[], None]  # raises moe_p2p.TimeoutError: again
Way = Callable[[Engine, torch.Tensor], tuple[bytes, TakeBack]]


def by_unregister(receiver: Engine, cache: torch.Tensor) -> tuple[bytes, TakeBack]:
    memory = receiver.register(cache)
    return memory.descriptor, memory.unregister


def by_revoke(receiver: Engine, cache: torch.Tensor) -> tuple[bytes, TakeBack]:
    grant = receiver.grant(receiver.register(cache), "a peer")
    return grant.descriptor, grant.revoke


def by_mooncake(receiver: Engine, cache: torch.Tensor) -> tuple[bytes, TakeBack]:
    endpoint, at = mooncake.TransferEngine(), cache.data_ptr()
    with mock.patch.object(endpoint, "_connections", return_value=(receiver, None)):
        assert endpoint.register_memory(at, NBYTES) == 0

    def take_back() -> None:
        if (code := endpoint.unregister_memory(at)) != 0:
            assert code == -1
            raise make(TimeoutError, "unregister_memory returned -1")

    return endpoint._memory.at(at).descriptor, take_back


def by_nothing(receiver: Engine, cache: torch.Tensor) -> tuple[bytes, TakeBack]:
    return receiver.register(cache).descriptor, lambda: None


def is_taken(take_back: TakeBack) -> bool:
    try:
        take_back()
    except TimeoutError:
        return False
    return True


@contextmanager
def busy_peer(receiver: Engine, over: str) -> Iterator[None]:
    """Another peer writes all the while, and none of its writes fails."""
    other = torch.zeros(2 << 20, dtype=torch.uint8)
    answers = []
    with writer(over, other.numel(), receiver.register(other).descriptor) as child:

        def write() -> None:
            begin(child)
            answers.append(ended(child))

        with repeated(write):
            yield
    assert answers
    assert set(answers) == {"done\n"}


def late_writes(receiver: Engine, over: str, way: Way, stops: int) -> int:
    """How many of so many stops were followed by bytes that land after memory was taken back."""
    halves = late = 0
    for _ in range(2 * stops + 3):
        cache = torch.zeros(NBYTES, dtype=torch.uint8)
        descriptor, take_back = way(receiver, cache)
        with writer(over, NBYTES, descriptor) as child:
            begin(child)
            halves += cut_in_two(child, cache)
            taken = is_taken(take_back)
            if not taken:  # not before the peer goes on, or ends
                assert over == "tcp"
                os.kill(child.pid, signal.SIGKILL if halves % 3 == 2 else signal.SIGCONT)
                deadline = time.monotonic() + 30
                while not is_taken(take_back):
                    assert time.monotonic() < deadline
            cache.fill_(99)
            if taken:
                os.kill(child.pid, signal.SIGCONT)
            ended(child)
        late += bool((cache != 99).any())
        if halves == stops:
            break
    assert halves, "no write was cut in two"
    return late


@pytest.mark.parametrize("way", [by_unregister, by_revoke, by_mooncake])
@pytest.mark.parametrize("over", OVER)
def test_memory_that_was_taken_back_is_written_no_more(over: str, way: Way) -> None:
    with engine(over) as receiver, busy_peer(receiver, over):
        assert late_writes(receiver, over, way, 2) == 0


@pytest.mark.parametrize("over", OVER)
def test_memory_that_was_not_taken_back_is_written_late(over: str) -> None:
    with engine(over) as receiver:
        assert late_writes(receiver, over, by_nothing, 2) > 0


# Reads, of memory that its owner gives back meanwhile.
READER = """
import sys
import torch
from tests.engine import test_engine_fence as t

over, nbytes = sys.argv[1], int(sys.argv[2])
with t.engine(over) as engine:
    into = engine.register(torch.zeros(nbytes, dtype=torch.uint8))
    print("ready", flush=True)
    for line in sys.stdin:
        region = engine.resolve(bytes.fromhex(line))
        into.tensor.zero_()
        request = engine.read(into, region, nbytes=nbytes)
        print("begun", flush=True)
        try:
            request.wait(30)
            print("done", *into.tensor.unique().tolist(), flush=True)
        except Exception as error:
            print(f"failed: {error}", flush=True)
"""


def wrong_reads(owner: Engine, over: str, *, gives_back: bool, turns: int) -> list[str]:
    """What a reader takes for the owner's bytes, of reads that were under way, and the reader
    stopped, as the memory was given back and filled anew."""
    found, cache = [], torch.zeros(NBYTES, dtype=torch.uint8)
    child = warm.popen(
        *("-c", READER, over, str(NBYTES)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdin is not None
        assert ended(child) == "ready\n"
        for _ in range(turns):
            memory = owner.register(cache.fill_(7))
            child.stdin.write(f"{memory.descriptor.hex()}\n")
            child.stdin.flush()
            assert ended(child) == "begun\n"
            os.kill(child.pid, signal.SIGSTOP)
            if gives_back and not is_taken(memory.unregister):
                os.kill(child.pid, signal.SIGCONT)
                deadline = time.monotonic() + 30
                while not is_taken(memory.unregister):
                    assert time.monotonic() < deadline
            cache.fill_(99)
            os.kill(child.pid, signal.SIGCONT)
            found.append(ended(child))
            if not gives_back:
                memory.unregister()
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.communicate()
    return [each for each in found if "failed" not in each and each != "done 7\n"]


@pytest.mark.parametrize("over", OVER)
def test_a_read_of_memory_that_was_given_back_brings_none_of_its_later_bytes(over: str) -> None:
    """`unregister` waits for answers that the owner has begun, or they fail."""
    with engine(over) as owner:
        assert wrong_reads(owner, over, gives_back=True, turns=3) == []


@pytest.mark.parametrize("over", OVER)
def test_a_read_of_memory_that_was_not_given_back_brings_later_bytes(over: str) -> None:
    with engine(over) as owner:
        assert wrong_reads(owner, over, gives_back=False, turns=3) != []
