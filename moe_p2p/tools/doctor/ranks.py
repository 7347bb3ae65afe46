"""The reports of hosts on which ranks run already: torchrun, or anything that sets its variables.

Local rank 0 of each host examines it, and rank 0 judges and prints; the others wait for the exit
status. Used by command.py.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moe_p2p import env, errors
from moe_p2p.tools.doctor.examine import examine
from moe_p2p.tools.doctor.job import Answer, read_answer
from moe_p2p.tools.doctor.report import Problem

_PREFIX = "moe_p2p doctor"
POLL_S = 0.05


def meet(timeout_s: float) -> Store:
    """The store of the ranks. Raises UnavailableError where it does not answer."""
    host, port = env.master_address(), env.master_port()
    serves = env.rank() == 0 and not env.of_agent()
    try:
        store = TCPStore(
            host,
            port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise errors.make(
            errors.UnavailableError,
            f"rank {env.rank()}: the ranks' store at {host}:{port} does not answer: {error}",
        ) from None
    return PrefixStore(_PREFIX, store)


def answers(store: Store, timeout_s: float, *, writes: bool) -> dict[str, Answer]:
    """Collective. Rank 0 gets what each host answered, the others nothing."""
    rank = env.rank()
    if rank == 0:
        store.set("asked", str(time.time()))
    ends = time.monotonic() + timeout_s
    if env.local_rank() == 0:
        report = examine(writes=writes)
        body = {"rank": rank, "name": platform.node(), "report": asdict(report)}
        store.set(f"answer {rank}", json.dumps(body))
    if rank:
        return {}
    found: dict[str, Answer] = {}
    for other in range(0, env.world_size(), env.local_world_size()):
        label, answer = _of_rank(store, other, ends, timeout_s)
        found[label if label not in found else f"{label} (rank {other})"] = answer
    return found


def _of_rank(store: Store, rank: int, ends: float, timeout_s: float) -> tuple[str, Answer]:
    key = f"answer {rank}"
    while not store.check([key]):
        if time.monotonic() > ends:
            return f"host of rank {rank}", Answer(
                None,
                Problem(
                    f"did not answer within {timeout_s:g} s",
                    "see the output of its launcher; --timeout for a longer wait",
                ),
            )
        time.sleep(POLL_S)
    body = json.loads(store.get(key))
    asked = float(store.get("asked"))
    mend = "install the same build on all hosts"
    return str(body["name"]), read_answer(body["report"], asked, time.time(), mend)


def share_status(store: Store, status: int | None, timeout_s: float) -> int:
    """Rank 0 gives the exit status, which all return; it waits until the others have it."""
    rank, others = env.rank(), env.world_size() - 1
    if status is not None:
        store.set("status", str(status))
        ends = time.monotonic() + timeout_s
        while store.add("seen", 0) < others and time.monotonic() < ends:
            time.sleep(POLL_S)
        return status
    store.wait(["status"], timedelta(seconds=2 * timeout_s))
    found = int(store.get("status"))
    store.add("seen", 1)
    assert rank
    return found
