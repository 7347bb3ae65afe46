"""What /dev/shm has to hold: as `plan` says it, as it is, and as a full one reports it."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from threading import Barrier

import pytest

from moe_p2p import AllToAllConfig
from moe_p2p.moe.rendezvous.shared_memory import of_a_rank
from moe_p2p.tools import plan
from tests.support import hosts, warm
from tests.support.cases import SMALL, make
from tests.support.ranks import Rank, run_threads

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def held() -> dict[int, int]:
    """Bytes of this process's objects in /dev/shm, by inode; names are gone once ranks have met."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/dev/shm/moe_p2p."):
                info = fd.stat()
                found[info.st_ino] = info.st_blocks * 512
        except FileNotFoundError:
            continue  # that of the listing
    return found


@pytest.mark.parametrize(
    ("world_size", "local", "nics", "settings"),
    [(4, 2, 2, ""), (4, 1, 1, "ring_kib=64"), (2, 2, 2, "")],
)
def test_a_host_holds_what_is_planned(
    world_size: int, local: int, nics: int, settings: str
) -> None:
    config = {"ranks_per_node": local, "nics_per_rank": nics, "transport_settings": settings}
    before, made = held(), Barrier(world_size + 1)
    measured = []

    def body(rank: Rank) -> None:
        if rank.rank == world_size:  # looks while the others hold what they have made
            made.wait(30)
            measured.append(sum(size for inode, size in held().items() if inode not in before))
            made.wait(30)
        else:
            with make(Rank(rank.rank, world_size, rank.store), **config):
                made.wait(30)
                made.wait(30)

    run_threads(world_size + 1, body)
    sizes = of_a_rank(
        AllToAllConfig(**(SMALL | config)),
        world_size=world_size,
        ranks_per_node=local,
        num_nics=nics,
    )
    assert measured == [world_size * sum(sizes.values())]


def test_the_command_names_the_rings(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--ranks=4", "--ranks-per-node=2", "--experts=16", "--hidden=512", "--topk=4"]
    assert plan.main([*shape, "--tokens=64"]) == 0
    printed = capsys.readouterr().out
    found = re.search(
        r"([\d.]+) MiB  tensors on cpu, software NICs: 4 ranks of ([\d.]+) MiB, ([\d.]+) of them r",
        printed,
    )
    assert found is not None, printed
    total, of_rank, rings = map(float, found.groups())
    # 14 MiB are too few for these ranks, 16 are enough.
    assert 14 < total < 16
    assert rings > 2  # 2 NICs with a ring of 1 MiB for one other node
    assert abs(4 * of_rank - total) < 0.3
    smaller = [*shape, "--tokens=64", "--transport-settings=ring_kib=256"]
    assert plan.main(smaller) == 0
    assert f"{total:.1f} MiB  tensors" not in capsys.readouterr().out


FULL = """
import sys
from tests.support.cases import make
from moe_p2p import errors
from tests.support.ranks import run_threads
config = {"ranks_per_node": 1, "nics_per_rank": 1, "max_tokens": 64, "hidden_dim": 512}
def body(rank):
    with make(rank, **config):
        return "made"
for result in run_threads(2, body, return_errors=True):
    print(result)
"""


def in_a_shm_of(kib: int) -> str:
    """What the ranks of FULL print where /dev/shm has so much room."""
    mounts = functools.partial(hosts.own_shm, kib)
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100}
    run = warm.run("-c", FULL, preexec_fn=mounts, **options)
    if "PermissionError" in run.stderr:
        pytest.skip(f"no mount of its own: {run.stderr.strip()}")
    return run.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a /dev/shm of its own needs root")
def test_a_full_one_names_what_is_needed_and_what_there_is() -> None:
    reported = in_a_shm_of(2048)
    found = re.search(
        r"/dev/shm has [\d.e-]+ MiB free of 2 MiB\. Enlarge it [^.]* ring_kib .*"
        r"The 2 ranks of this communicator need ([\d.]+) MiB there in all .*chunk_tokens and steps",
        reported,
    )
    assert found is not None, reported
    assert in_a_shm_of(int((float(found[1]) + 0.1) * 1024)).split() == ["made", "made"]
