"""`bench --mirror` without a GPU: options, inputs, whole runs of one rank on an emulated GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_p2p.bench import cases, floors, options, report, worker
from moe_p2p.bench.options import Options
from moe_p2p.tools import gpu_timing, launch
from tests.support import cells, emulated_gpu
from tests.tools.test_bench_gpu import LINKS, TINY, run_by_the_clock

MIRRORED = replace(
    TINY, mirror=1, ranks=4, ranks_per_node=4, experts=8, baseline=False, dtype="fp8", chunks=("T",)
)
needs_an_emulated_gpu = pytest.mark.skipif(
    bool(emulated_gpu.why_not()), reason=emulated_gpu.why_not() or "it can run"
)


@pytest.mark.parametrize(("num_gpus", "mirror"), [(1, 1), (2, 2), (8, 2)])
def test_one_or_two_gpus_play_all_ranks(
    num_gpus: int, mirror: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for api in ("all_to_all", "deep_ep"):
        (found,) = options.parse(["--mirror", "8", "--api", api, "--num-sms", "24"])
        assert (found.ranks, found.ranks_per_node, found.experts) == (8, 8, 256)
        assert (found.mirror, found.processes, found.baseline) == (mirror, mirror, False)
        assert found.sms == (24,)
    (found,) = options.parse([])
    assert (found.mirror, found.processes) == (0, num_gpus)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mirror=1"], "--mirror 1: a world of 2 ranks or more"),
        (["--mirror=8", "--ranks=8"], "not with --ranks"),
        (["--mirror=8", "--check"], "not with --check"),
        (["--mirror=8", "--experts=12"], "--experts 12 is not a multiple of --ranks 8"),
    ],
)
def test_what_a_mirror_world_cannot_be(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert text in capsys.readouterr().err


def test_every_rank_has_the_tokens_of_rank_0_for_other_experts() -> None:
    job = cases.make_job(MIRRORED)
    counts = cases.changing_counts(3, 4, 6, mirrored=True)
    assert len(set(counts)) == 1
    first, *others = job.tokens(3, [6] * 4)
    for rank, tokens in enumerate(others, 1):
        assert torch.equal(tokens.x, first.x)
        assert torch.equal(tokens.topk_weights, first.topk_weights)  # type: ignore[arg-type]
        assert torch.equal(tokens.topk_idx, (first.topk_idx + 2 * rank) % 8)
    assert job.number_of(torch.tensor([0, 1, 6, 7])).tolist() == [0, 1, 0, 1]
    copies = floors.token_copies([t.topk_idx for t in job.tokens(3, [6] * 4)], job.topology)
    assert torch.equal(copies.sum(0), copies.sum(1))  # each receives what it sends


def on_an_emulated_gpu(given: Options) -> worker.Results:
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu_timing, "MIN_ROUNDS", 2)
    patch.setattr(gpu_timing, "MAX_ROUNDS", 2)
    patch.setattr(gpu_timing, "MAX_CHAIN", 2)
    patch.setattr(worker, "INTERFACES_ON_CUDA", {"normal": ()})  # others: test_gpu_mirror.py
    emulated_gpu.install(patch)
    return run_by_the_clock(given)


def run_alone(given: Options) -> worker.Results:
    results: worker.Results = launch.run_ranks(on_an_emulated_gpu, given, num_ranks=1)[0]
    return results


@needs_an_emulated_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", cells.few(["grouped", "by_rank"], keep=["grouped"]))
def test_a_run_is_checked_and_named(layout: Any) -> None:
    results = run_alone(replace(MIRRORED, layout=layout))
    assert report.MIRROR in results.notes
    ways = {"pair graph", "pair eager", "dispatch", "combine"}
    assert {row.what for row in results.rows} == ways
    for row in results.rows:
        assert row.correct, row.wrong
        assert (row.ranks, row.mirrored_on, row.system) == (4, 1, "moe_p2p")
        assert row.floor_us > 0
    printed = report.text(results.rows, results.notes)
    assert printed.startswith("mirrored EP4 on 1 GPU of a clock, H 256")
    assert report.links_line(LINKS) in printed


@needs_an_emulated_gpu
@pytest.mark.timeout(600)
def test_a_layers_combine_begins_before_the_experts_end() -> None:
    given = replace(MIRRORED, layer="given", ffn=32, overlap=(2,), dtype="bf16")
    rows = run_alone(given).rows
    assert [row.wrong for row in rows if row.wrong] == []
    assert {row.overlap_sms for row in rows if row.what == "layer graph"} == {0, 2}


@needs_an_emulated_gpu
@pytest.mark.skipif(
    "MOE_P2P_ALL_MIRRORS" not in os.environ, reason="takes long: set MOE_P2P_ALL_MIRRORS=1"
)
@pytest.mark.timeout(600)
def test_a_run_through_deep_ep_is_checked() -> None:
    results = run_alone(replace(MIRRORED, api="deep_ep", tokens=(6,)))
    assert results.notes == [report.MIRROR]
    seen = {(row.interface, row.system) for row in results.rows}
    assert seen == {("normal", "moe_p2p"), ("normal", "moe_p2p.deep_ep")}
    for row in results.rows:
        assert row.correct, row.wrong
