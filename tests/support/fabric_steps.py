"""Steps for tests of fabric_ranks.py, which run as ranks of torchrun; prints how each has ended.

python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.support.fabric_steps
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch.distributed as dist

from moe_p2p import env
from moe_p2p.bench import fabric_ranks
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones

SOON_S, LONG_S = 3.0, 300.0


def well(given: str) -> str:
    """A collective: ranks meet in each step anew."""
    with launch.process_group() as (rank, _):
        return f"{given} {everyones(rank)}"


def raises(_: object) -> None:
    """One rank; the other would wait for it."""
    if env.rank() == 1:
        raise RuntimeError("no such fabric, as secret-of-the-test knows")
    time.sleep(LONG_S)


def hangs(_: object) -> None:
    """Also when it is asked to end; with a process of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"process {os.fork()}", flush=True)
    time.sleep(LONG_S)


def killed(_: object) -> None:
    if env.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with launch.process_group():
        dist.barrier()


def main() -> None:
    launch.END_S = 1
    fabric_ranks.GRACE_S = 1.0
    ranks = fabric_ranks.Ranks(
        __spec__.name,
        most_s=LONG_S,
        cleaned=lambda value: json.loads(json.dumps(value).replace("secret-of-the-test", "gone")),
    )
    ranks.gather(ranks.rank)
    for step, given, deadline_s in (
        (well, "first", LONG_S),
        (raises, None, LONG_S),
        (hangs, None, SOON_S),
        (killed, None, LONG_S),
        (well, "last", LONG_S),
    ):
        for rank, ended in enumerate(ranks.run(step, given, deadline_s)):
            line = [step.__name__, rank, ended.how, ended.value, ended.output[-300:]]
            print("ENDED", json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
