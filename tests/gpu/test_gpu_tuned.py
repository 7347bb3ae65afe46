"""Launch shapes from a file of `python -m moe_p2p tune`: they are used, and results stay right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p.machine import tuned
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.launch_shape import job_of
from moe_p2p.tools.tune import launches, shapes
from moe_p2p.tools.tune.world import TuneOptions, World
from tests.gpu.test_gpu import call, steps
from tests.support.gpu_ranks import DEVICE, HIDDEN_DIM, run
from tests.support.gpu_ranks import World as GpuWorld

pytestmark = pytest.mark.gpu

SHAPE = {"blocks_per_sm": 1, "token_blocks": 7, "slot_blocks": 9}
DISPATCH = {"block_threads": 192, "token_workers": 3, "slot_workers": 2, **SHAPE}
COMBINE = {"block_threads": 160, "token_workers": 1, "slot_workers": 5, **SHAPE}


@pytest.fixture(autouse=True)
def _own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MOE_P2P_TUNED", str(tmp_path / "tuned.json"))
    tuned._read.cache_clear()
    yield
    tuned._read.cache_clear()


def entry(kernel: str, row_bytes: int, shape: dict[str, int]) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "few": True,
        "ranks": 2,
        "row_bytes": row_bytes,
        "least_tokens": 1,
        "most_tokens": 16,
        "shape": shape,
    }


def test_shapes_of_a_file_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[kernels.Kernel]()
    load = kernels.DeviceSide._load

    def note(side: kernels.DeviceSide, kernel: kernels.Kernel) -> str:
        made.append(kernel)
        return load(side, kernel)

    monkeypatch.setattr(kernels.DeviceSide, "_load", note)
    row_bytes = 2 * HIDDEN_DIM
    launches_of = [entry("dispatch", row_bytes, DISPATCH), entry("combine", row_bytes, COMBINE)]
    tuned.write(tuned.path_here(), "now", {"launches": launches_of})
    world = GpuWorld(2, 2)
    wanted = [call(world, seed, dtype=torch.bfloat16, layout="grouped") for seed in range(3)]
    run(world, steps, wanted, {})
    for kernel, shape in (("dispatch.cu", DISPATCH), ("combine.cu", COMBINE)):
        used = {
            (each.macros["MOE_P2P_BLOCK_THREADS"], each.macros["MOE_P2P_BULK"])
            for each in made
            if each.source == kernel and _item(each) == 2
        }
        assert used == {(shape["block_threads"], 0)}, kernel


def _item(kernel: kernels.Kernel) -> int:
    """Bytes of a value that travels."""
    macros = kernel.macros
    if kernel.source == "combine.cu":
        return 2 if macros["MOE_P2P_OUT_DTYPE"] < 2 and macros["MOE_P2P_Y_DTYPE"] < 2 else 4
    return 1 if macros["MOE_P2P_QUANTIZE"] else (2, 2, 4, 1)[macros["MOE_P2P_X_DTYPE"]]


def test_shapes_are_tried_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank. All tries have the sums of the shipped shape; one of them is told to be best."""
    one = next(iter(shapes.alternatives(2048, 8, None, job_of({
        "MOE_P2P_RANKS_PER_NODE": 1, "MOE_P2P_WORLD_SIZE": 1, "MOE_P2P_SELF_FLAGGED": 1,
    }, adds=True), 8)))  # fmt: skip
    monkeypatch.setattr(shapes, "alternatives", lambda *_: [one])
    monkeypatch.setattr(launches, "best", lambda medians, shipped: one if one in medians else None)
    options = TuneOptions(
        device=DEVICE,
        processes=1,
        world=1,
        hosts=1,
        tokens=(8,),
        hidden=128,
        topk=2,
        experts=4,
        num_sms=24,
        only=("launches",),
        seconds=0.01,
        timeout_s=100.0,
    )
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=100)
    )
    try:
        world = World(options, 0)
        with world.communicator(8) as comm:
            found = launches._of_step(world, comm, 8, None)
        world.close()
    finally:
        dist.destroy_process_group()
    assert [(each.adds, each.row_bytes, each.shape) for each in found] == [
        (False, 128, one),
        (True, 256, one),
    ]
    printed = capsys.readouterr().out
    assert printed.count("2 of 2 shapes") == 2, printed
    assert "WRONG" not in printed
    assert os.environ["MOE_P2P_TUNED"]
