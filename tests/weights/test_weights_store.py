"""What a fleet of weight updates asks of its store, also while that is stopped or gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from moe_p2p import MoeP2pError
from moe_p2p.fleet import client
from moe_p2p.fleet.client import Client, Deadline, StoreError
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, WeightTrainer, job
from moe_p2p.weights.attempt import Keys
from moe_p2p.weights.engine_buffers import Arrivals
from tests.support import warm
from tests.support.blocking_store import LONG_S, STEP_CPU_S, STEPS, Blocking
from tests.support.store_clients import clients_of
from tests.support.weights_fleet import engine_of

LAYOUT = WeightLayout([Param("w", (4, 4), "bfloat16", (0,))], 1)
LIMITS = {"timeout_s": 3.0, "lease_s": 1.0}


def test_a_rank_adds_one_client_to_the_callers() -> None:
    """No call waits in the store, so what ranks say to each other and leases share it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = clients_of(store.port)
    assert before == 1
    with pair(store):
        assert clients_of(store.port) == before + 2


class Pair:
    def __init__(self, trainer: WeightTrainer, engine_rank: WeightEngineRank, pool: Any) -> None:
        self.trainer, self.engine_rank, self.pool = trainer, engine_rank, pool
        self.live = engine_rank._tensors["w"]

    def update(self, version: int) -> None:
        self.trainer._tensors["w"].fill_(version)
        running = self.pool.submit(self.trainer.update, version)
        until = time.monotonic() + LONG_S
        while self.engine_rank.version != version and not running.done():
            assert time.monotonic() < until
            self.engine_rank.step()
            time.sleep(0.001)
        running.result(LONG_S)
        while self.engine_rank.version != version:
            assert time.monotonic() < until
            self.engine_rank.step()
        assert self.live.unique().tolist() == [version]

    def steps(self, count: int = STEPS) -> None:
        """None takes more CPU of its thread than a forward pass would notice, or any wait."""
        cpu, began = time.thread_time(), time.monotonic()
        for _ in range(count):
            self.engine_rank.step()
        assert time.thread_time() - cpu < count * STEP_CPU_S
        assert time.monotonic() - began < LONG_S

    def fails(self, version: int, error: str) -> None:
        """An update, by its deadline; the deadline's word and the fence may take a second each."""
        began = time.monotonic()
        with pytest.raises(StoreError, match=error):
            self.trainer.update(version)
        assert time.monotonic() - began < LIMITS["timeout_s"] + 4


@contextmanager
def pair(store: Any, engine_ranks: Any = None, **how: Any) -> Iterator[Pair]:
    """A trainer and an engine rank. engine ranks: the store of the second."""
    ours, theirs = ({"w": torch.zeros(4, 4, dtype=torch.bfloat16)} for _ in range(2))
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_of(f"{i}", i)) for i in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        made = pool.submit(WeightEngineRank, engines[1], engine_ranks or store, LAYOUT, 0, theirs,
                           **LIMITS, **how)  # fmt: skip
        trainer = stack.enter_context(WeightTrainer(engines[0], store, LAYOUT, 0, ours, **LIMITS))
        yield Pair(trainer, stack.enter_context(made.result(LONG_S)), pool)


def test_steps_touch_no_store() -> None:
    store = HashStore()
    blocking = Blocking(store)
    with pair(store, blocking) as found:
        found.update(1)
        blocking.block()
        try:
            found.engine_rank.step()
            until = time.monotonic() + LONG_S
            while not blocking.blocked:  # the thread asks
                assert time.monotonic() < until
            found.steps()
            assert found.engine_rank.version == 1
        finally:
            blocking.go_on()
        found.update(2)


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """Returns process and port of a store."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, store.port.to_bytes(2, "big"))
        signal.pause()
    try:
        yield child, int.from_bytes(os.read(read, 2), "big")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_store_that_is_stopped_stops_no_engine() -> None:
    with server() as (process, port):
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        with pair(store) as found:
            found.update(1)
            os.kill(process, signal.SIGSTOP)
            found.steps()
            found.fails(2, "gives no answer within")
            found.steps()
            assert found.engine_rank.version == 1
            os.kill(process, signal.SIGCONT)
            until_it_works(lambda: found.update(3))


def test_a_store_that_fails_between_two_words_leaves_no_half_count() -> None:
    """An engine rank that took the first trainer's number for all would report, and run `finalize`,
    before the bytes of the second one are there."""
    answers: list[Any] = [{"generator 0#1": 3}, StoreError("away"), {"generator 0#1": 3}, None]
    answers += [{"generator 0#1": 3}, {"generator 0#1": 4}]

    def get(key: str) -> Any:
        word = answers.pop(0)
        if isinstance(word, Exception):
            raise word
        return word

    nothing: Any = None
    words: Any = SimpleNamespace(get=get)
    engine: Any = SimpleNamespace(imm_value=lambda imm: 3, wait_imm=lambda *_: None)
    arrivals = Arrivals(engine, words, nothing, "generator 0#1", [1, 1])
    write: Any = SimpleNamespace
    arrivals.begin([write(source_rank=rank) for rank in (0, 1)])
    keys = Keys(1, 1)
    with pytest.raises(StoreError):
        arrivals.counted(keys)
    assert not arrivals.counted(keys)  # the second one has not said its number yet
    assert not arrivals.counted(keys)  # three of seven
    assert not answers


def test_a_store_that_is_lost_as_trainers_begin_anew_stops_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, lost = HashStore(), list[str]()
    with pair(store) as found, engine_of("2", 2) as engine:
        found.update(1)
        engine_rank, get = found.engine_rank, found.engine_rank._words.get
        before = engine_rank._job.number

        def forgets(key: str) -> Any:
            if key == job.NOW and engine_rank._job.number != before and not lost:
                lost.append(key)
                return None
            return get(key)

        monkeypatch.setattr(engine_rank._words, "get", forgets)
        found.trainer.close()
        tensors = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
        begun = found.pool.submit(WeightTrainer, engine, store, LAYOUT, 0, tensors, **LIMITS)
        until = time.monotonic() + LONG_S
        while not begun.done():
            assert time.monotonic() < until
            engine_rank.step()
            time.sleep(0.001)
        with begun.result() as found.trainer:
            found.update(2)
        assert lost


def until_it_works(update: Callable[[], None]) -> None:
    """The first attempts after a store came back may find that it has just lost the word."""
    until = time.monotonic() + LONG_S
    while True:
        try:
            return update()
        except MoeP2pError:
            assert time.monotonic() < until


def served(port: int = 0) -> Any:
    until = time.monotonic() + LONG_S
    while True:
        try:
            return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        except RuntimeError:  # the one before has just ended
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_store_that_was_lost_is_found_again_at_its_address(mode: str) -> None:
    master = served()
    port = master.port
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with pair(store, mode=mode) as found:
        if mode == "in_place":
            found.update = lambda version: in_place(found, version)  # type: ignore[method-assign]
        found.update(1)
        del master
        found.steps()
        found.fails(2, "does not answer")
        found.steps()
        master = served(port)
        until_it_works(lambda: found.update(3))
        until = time.monotonic() + LONG_S
        while found.trainer.live() != {3: 1}:  # it reports so after the copy
            assert time.monotonic() < until
        del master


def in_place(found: Pair, version: int) -> None:
    found.trainer._tensors["w"].fill_(version)
    found.engine_rank.begin()
    running = found.pool.submit(found.trainer.update, version)
    try:
        found.engine_rank.wait()
    finally:
        running.result(LONG_S)
    assert found.live.unique().tolist() == [version]


def test_a_store_whose_host_is_gone_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer never comes, and neither does an error: another client is made."""
    monkeypatch.setattr(client, "_PATIENCE_S", 0.2)
    gone, there = Blocking(HashStore()), HashStore()
    found = Client(gone, connect=lambda: there, alone=True)
    words = StoreKeys(found, "fleet")
    words.put("word", 1)
    gone.block()
    with found.within(Deadline(0.5)), pytest.raises(StoreError, match="Blocking gives no answer"):
        words.get("word")
    assert words.get("word") == 1  # and what the old one has lost is said again
    assert found.returns
    found.close()
    with pytest.raises(MoeP2pError, match="has left its fleet"):
        words.get("word")
    gone.go_on()


LEAVES = """
import os, signal, sys, time
from torch.distributed import TCPStore
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.member import Member
from moe_p2p.fleet.store_keys import StoreKeys

process, port, alone = (int(each) for each in sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
words = StoreKeys(store, "fleet", alone=bool(alone))
member = Member(words, "trainer 0", {}, 60.0)
os.kill(process, signal.SIGSTOP)
while True:  # one of its threads may still answer
    try:
        with words.within(Deadline(0.05)):
            words.get("word")
    except StoreError:
        break
print("leaves at", time.monotonic())


class Last:
    def __del__(self, kill=os.kill, store=(process, signal.SIGKILL), sleep=time.sleep):
        kill(*store)
        sleep(0.2)  # a call that waits for the store would return now


last = Last()
"""


@pytest.mark.parametrize("alone", [True, False])
def test_an_interpreter_that_ends_leaves_no_call_in_a_stopped_store(alone: bool) -> None:
    """One that came back from C++ would end the process by std::terminate."""
    with server() as (process, port):
        program = ("-c", LEAVES, str(process), str(port), str(int(alone)))
        done = warm.run(*program, capture_output=True, text=True, timeout=LONG_S)
        assert done.returncode == 0, done.stderr
        took = time.monotonic() - float(done.stdout.split()[-1])
    assert took < LONG_S / 2, "two seconds of it wait for the store, which torch would for minutes"
