"""docs/metrics.md lists each metric that there is, with its labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from moe_p2p.engine.metrics import Family
from moe_p2p.kv.stats import KVTotals, families_of
from moe_p2p.moe import counts as moe_counts
from moe_p2p.moe.counts import OnDevice
from moe_p2p.weights import counts as weights_counts
from tests.support.cases import make
from tests.support.ranks import Rank

PAGE = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| ((?:\w+, )*\w+_\w+) \| ([^|]*) \|", re.MULTILINE)
TOTALS = dict.fromkeys(
    ("bytes_written", "requests", "attempts", "failed", "staging_bytes", "updates", "joins",
     "join_ms", "pause_ms", "buffer_bytes"),
    1.0,
)  # fmt: skip


class Worker:
    name, role, totals = "a/0", "sender", KVTotals()


def made() -> list[Family]:
    on_device = OnDevice(kernels=1, next_step=1, masked=[])
    with make(Rank(0, 1, torch.distributed.HashStore())) as comm:
        more = {"epoch": 0, "masked": 0, "refused": 0, "device": on_device}
        return [
            *comm.metrics(),
            *comm.engine.metrics(),
            *moe_counts.families_of(comm._comm, 0, **more),  # type: ignore[arg-type]
            *families_of([Worker()]),
            *weights_counts.of_trainer(0, TOTALS, {"wait": 1.0}, {"begin": 1.0}, 1, 0),
            *weights_counts.of_engine_rank("r", TOTALS, {"begin": 1.0}, 1, 0),
        ]


def test_the_page_lists_what_there_is() -> None:
    listed = {
        f"moe_p2p_{name}": set(re.findall(r"`(\w+)`", labels))
        for names, labels in ROW.findall(PAGE)
        for name in names.split(", ")
    }
    found = {
        family.name: set().union(*(each.labels for each in family.samples)) for family in made()
    }
    found |= {"moe_p2p_kv_stragglers_total": {"worker", "role"}}  # of a worker with an engine
    nic = "moe_p2p_nic_hardware_events_total"
    found[nic] |= {"engine", "name", "nic", "event"}  # empty without RDMA
    assert listed.keys() == found.keys()
    more = {"moe_p2p_weights_part_seconds": {"part"}, "moe_p2p_weights_stage_seconds": {"stage"}}
    for name, labels in found.items():
        assert labels - more.get(name, set()) == listed[name], name
