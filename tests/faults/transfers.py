"""A KV request and a weight update with a fault in their middle, in a process of their own.

All workers are threads of it, so that a link that goes down is the loopback interface of its own
network namespace. Killed and stopped workers are processes: `killed_senders`, `lost_ranks`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import pytest
import torch

from moe_p2p import MoeP2pError, kv
from tests.faults import causes
from tests.kv import test_kv_stopped_sender as stopped
from tests.support import weights_fleet, weights_killed, weights_stopped
from tests.support.hosts import Place
from tests.support.kv_workers import random_cache, some_pages, workers
from tests.support.ranks import Rank
from tests.support.weights_fleet import MODELS

LAYERS, PAGES, TOKENS = 3, 32, 18
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT = kv.KVLayout((GROUP,))
FAULTY, TIMES = 1, 3  # of the requests and updates
WAIT_S = 15.0  # an update's timeout_s where it is what ends a wait
END_S = 100.0  # KVTimeouts of QUICK one after the other, twice, and slack; an update's own


class Case(NamedTuple):
    fault: str
    point: str
    over: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.point}, {self.over}".replace(" ", "_")

    @property
    def needs_links(self) -> bool:
        return self.over == "tcp" and self.fault in causes.LINK

    @property
    def waits(self) -> bool:
        """As of calls.Case: for the end of a lease, or of a request."""
        return self.fault in ("kill", "stop") or (self.fault, self.over) == ("NIC error", "tcp")

    @property
    def happens(self) -> bool:
        """In the middle; else settings or a condition are the fault."""
        of_settings = (self.over, self.fault) == ("loopback", "NIC error")
        return self.fault not in causes.CONDITIONS and not of_settings

    def settings(self) -> dict[str, str]:
        found = causes.settings_of(self.over, self.fault)
        if (self.over, self.fault) == ("loopback", "NIC error"):
            found["transport_settings"] = "fail_nth=2"
        return found


def run_case(rank: Rank, case: Case, places: list[Place]) -> list[str]:
    """Returns the error of each request or update, empty where it was right."""
    if places:
        causes.enter(places[0])
    if case.fault == "no locked memory":
        causes.forbid_locking()
    if case.point == "KV push":
        return push(case)
    return lost_ranks(case) if case.fault in ("kill", "stop") else update(case)


# --- KV ------------------------------------------------------------------------------------------


def push(case: Case) -> list[str]:
    settings = case.settings()
    found, texts = settings["transport_settings"], []
    with workers(LAYOUT, LAYOUT, transport=settings["transport"], settings=found) as made:
        sender, receiver = made.senders[0], made.receivers[0]
        for number in range(TIMES):
            lasts = case.fault == "NIC error" and case.over == "tcp"
            if lasts and number > FAULTY:
                break  # it has no link any more
            random_cache(sender.cache, number)
            texts.append(one_request(case, sender, receiver, number))
    return texts


def one_request(case: Case, sender: kv.KVSender, receiver: kv.KVReceiver, number: int) -> str:
    """Pages are whole or the request has failed; they come back, and nothing lands in them then."""
    ours, theirs = some_pages(5, PAGES, number), some_pages(5, PAGES, 100 + number)
    memory = receiver.cache.tensors[0].view(LAYERS, PAGES, -1)
    memory.fill_(99)
    began, text = time.monotonic(), ""
    reservation = receiver.reserve(f"{number}", "prefill", {"kv": theirs}, total=TOKENS)
    sending = sender.start(f"{number}", "decode", {"kv": ours}, total=TOKENS)
    try:
        for layer in range(LAYERS):
            if case.happens and number == FAULTY and layer == 1:
                causes.cause(case.fault)
            sending.layer(layer)
        sending.commit()
        reservation.wait(40)
        sent = sender.cache.tensors[0].view(LAYERS, PAGES, -1)[:, ours.long()]
        assert torch.equal(memory[:, theirs.long()], sent)
        sending.wait(40)
    except MoeP2pError as error:
        text = f"{type(error).__name__}: {error}"
        reservation.cancel("the test gives up")
        sending.cancel()
    reservation.wait_reusable(60)
    assert time.monotonic() - began < END_S, text
    others = torch.ones(PAGES, dtype=torch.bool)
    others[theirs.long()] = False
    assert bool((memory[:, others] == 99).all()), "bytes in pages of nobody"
    memory.fill_(99)
    if text:
        time.sleep(1.0)  # for what would be late
        assert bool((memory == 99).all()), "late bytes"
    return text


class Kills(stopped.Stops):
    """Its sender is killed in the middle of writes, and a new one sends the request again."""

    def __init__(self, over: str) -> None:
        super().__init__(over)
        self.texts: list[str] = []

    def round(self) -> None:
        child = self.start()
        assert child.stdin is not None
        assert child.stdout is not None
        instance = f"p{self.children}"
        self.receiver.wait_for(instance, 30)
        self.memory.zero_()
        self.rounds += 1
        reservation = self._ask(child, instance, "first")
        half = self.cut_in_two(child.pid)
        self.halves += half
        os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(MoeP2pError) as caught:
            reservation.wait(60)
        self.texts.append(f"{type(caught.value).__name__}: {caught.value}")
        reservation.wait_reusable(60)
        assert time.monotonic() - began < stopped.TIMEOUTS.lease_s + 30
        self.memory.fill_(99)
        self.end()
        time.sleep(0.2)
        self.late += bool((self.memory != 99).any())
        child = self.start()
        assert child.stdout is not None
        instance = f"p{self.children}"
        self.receiver.wait_for(instance, 30)
        reservation = self._ask(child, instance, "second")
        reservation.wait(60)
        assert bool((self.memory == 7).all())
        assert child.stdout.readline() == "done\n"
        self.end()

    def _ask(self, child: Any, instance: str, name: str) -> kv.KVReservation:
        name = f"{name} of {self.rounds}"
        made = self.receiver.reserve(name, instance, stopped.ALL, total=stopped.PAGES)
        child.stdin.write(name + "\n")
        child.stdin.flush()
        return made


def killed_senders(over: str) -> list[str]:
    """Returns what the receiver reported of each."""
    found = Kills(over)
    found.run(2, 6)
    assert found.halves == 2, "no request was cut in two"
    assert not found.late
    for number, text in enumerate(found.texts):
        assert f"p{2 * number + 1}/0" in text, found.texts
    return found.texts


# --- weights -------------------------------------------------------------------------------------


def update(case: Case) -> list[str]:
    texts: list[str] = []
    try:
        _update(case, texts)
    except MoeP2pError as error:  # at close nobody answers over a link that is gone
        if not (case.needs_links and "may have sent half a write" in str(error)):
            raise
        assert any(texts), "nothing failed"
    return texts


def _update(case: Case, texts: list[str]) -> None:
    weights_fleet.OVER.update(case.settings())
    how = {"timeout_s": WAIT_S} if case.waits else {}
    with weights_fleet.fleet(MODELS["fused"], **how) as fleet:
        writer = fleet.trainers[1]._buffers.writer
        write, left = writer.write, [1] if case.happens else []

        def faulty(*args: Any) -> None:
            if left and number == FAULTY:
                left.pop()
                causes.cause(case.fault)
            write(*args)

        writer.write = faulty  # type: ignore[method-assign, assignment]
        for number in range(TIMES):
            try:
                fleet.finish(fleet.train(number + 1))
                fleet.check(number + 1)
                texts.append("")
            except MoeP2pError as error:
                texts.append(f"{type(error).__name__}: {error}")
        assert not left, "nothing happened"


def lost_ranks(case: Case) -> list[str]:
    """The runs of weights_killed.py over another transport, or with tensors on a GPU;
    weights_stopped.py likewise."""
    if case.over == "gpu":
        weights_fleet.DEVICES.append("cuda")
    else:
        weights_fleet.OVER.update(case.settings())
    if case.fault == "stop":
        assert weights_stopped.main() == 0
        return []
    wrong = []
    for run in (
        weights_killed.Run("shadow", "trainer", 1, "one write"),
        weights_killed.Run("in_place", "trainer", 1, "one write", "replicas"),
        weights_killed.Run("in_place", "generator", 0, "arrived", "replicas"),
    ):
        wrong += [f"{run}: {each}" for each in weights_killed.begin(run).faults()]
    assert not wrong, wrong
    return []
