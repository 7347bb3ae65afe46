"""`python -m moe_p2p doctor --fence`: may KV workers here take memory back by queue pair?

On each RDMA device two engines of this process write and are fenced, again and again, while writes
are under way. After each fence the memory is filled with other bytes, which must not change. A yes
holds for these devices, drivers and this host: PCIe and firmware decide, and others may differ.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Request
from moe_p2p.errors import MoeP2pError
from moe_p2p.machine import topology, transport

ROUNDS = 20
NBYTES, WRITES = 8 << 20, 64  # of a round: 64 times the same 8 MiB
LIMIT_S = 10.0
LINGER_S = 0.02  # in which a write that was not stopped would land
AFTER = 0xCC


@dataclass
class Outcome:
    """Of one device and kind of memory. Milliseconds: of each fence."""

    device: str
    memory: str
    busy: int = 0  # rounds with writes under way
    rounds: int = 0
    changed: int = 0  # rounds in which a byte changed after the fence
    sever_ms: list[float] = field(default_factory=list)
    revoke_ms: list[float] = field(default_factory=list)  # of a key, for comparison
    problem: str = ""

    def add_round(self, *, busy: bool, changed: bool) -> None:
        self.rounds += 1
        self.busy += busy
        self.changed += changed

    @property
    def good(self) -> bool:
        return not self.problem and not self.changed and 2 * self.busy >= self.rounds > 0

    def text(self) -> str:
        head = f"  {self.device:10} {self.memory:12}"
        if self.problem:
            return f"{head} {self.problem}"
        times = ", ".join(
            f"{name} {statistics.median(each):.2f} ms ({max(each):.2f} at most)"
            for name, each in (("queue pair", self.sever_ms), ("key", self.revoke_ms))
        )
        found = f"bytes changed after {self.changed} of them" if self.changed else "nothing changed"
        return f"{head} {self.rounds} fences, {self.busy} with writes under way: {found}; {times}"


def main() -> int:
    """0: yes; 1: no, or nothing to ask."""
    names = [
        nic.name for nic in topology.read_host().nics if nic.kind == "verbs" and not nic.problem
    ]
    if not names:
        print("no: there is no active RDMA device of verbs; MOE_P2P_KV_FENCE=key stays")
        return 1
    memories = ["host"]
    memories += [f"cuda:{i}" for i in range(torch.cuda.device_count())][:1]
    outcomes = []
    for name in names:
        for memory in memories:
            outcomes.append(probe(name, memory))
            print(outcomes[-1].text(), flush=True)
    if all(each.good for each in outcomes):
        soft = any(name.startswith("rxe") for name in names)
        more = "; soft-RoCE has no PCIe, so this says nothing about other devices" if soft else ""
        print(f"yes: MOE_P2P_KV_FENCE=queue_pair holds here{more}")
        return 0
    print("no: MOE_P2P_KV_FENCE=key stays")
    return 1


def probe(device: str, memory: str, *, rounds: int = ROUNDS) -> Outcome:
    outcome = Outcome(device, memory)
    where = torch.device("cpu" if memory == "host" else memory)
    config = EngineConfig(
        transport=transport.VERBS, nics_per_rank=1, nics=device, timeout_s=LIMIT_S
    )
    try:
        with ExitStack() as stack:
            sender, receiver = (
                stack.enter_context(Engine(config, label=label, gpu=where.index))
                for label in ("probe's sender", "probe's receiver")
            )
            data = torch.ones(NBYTES, dtype=torch.uint8, device=where)
            inbox = torch.zeros_like(data)
            _synchronize(where)
            for _ in range(rounds):
                one_round(outcome, sender, receiver, data, inbox)
    except (MoeP2pError, RuntimeError) as error:
        outcome.problem = str(error)
    return outcome


def one_round(
    outcome: Outcome, sender: Engine, receiver: Engine, data: torch.Tensor, inbox: torch.Tensor
) -> None:
    tag = random.getrandbits(62) + 1
    source, target = sender.register(data), receiver.register(inbox, in_order=True)
    grant = receiver.grant(target, "nobody")
    peer = sender.connect(receiver.address, tag=tag)
    region = sender.resolve(target.descriptor, peer)
    requests = [sender.write(source, region) for _ in range(WRITES)]
    until = time.monotonic() + LIMIT_S
    while not requests[0].done() and time.monotonic() < until:
        pass
    time.sleep(random.random() * 0.002)
    outcome.sever_ms.append(_took_ms(lambda: receiver.sever(tag, [target], timeout_s=LIMIT_S)))
    inbox.fill_(AFTER)
    _synchronize(inbox.device)
    time.sleep(LINGER_S)
    peer.disconnect()
    stopped = [_failed(request) for request in requests]
    time.sleep(LINGER_S)
    outcome.add_round(busy=any(stopped), changed=bool((inbox != AFTER).any()))
    outcome.revoke_ms.append(_took_ms(grant.revoke))
    source.unregister()
    target.unregister()


def _failed(request: Request) -> bool:
    try:
        request.wait(LIMIT_S)
    except MoeP2pError:
        return True
    return False


def _took_ms(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
