"""The model: its NICs by hand, its bytes against drawn routing, DeepEP's phases against published
times. `python -m moe_p2p model --check` compares all 39 points."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_p2p.__main__ import main
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens, Topology, wire
from moe_p2p.tools.model import command, phases, published
from moe_p2p.tools.model.phases import Pair
from moe_p2p.tools.model.wire import NICS, Job, Message, Nic, arrivals

NIC = Nic(gbps=8, goodput=1.0, latency_us=10, post_us=1, writes_per_us=2)  # 1000 bytes: 1 us


# --- NICs ---


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert arrivals(NIC, [Message(3, 0, 1, 5000)]) == [3 + 10 + 5]
    assert arrivals(NIC, [Message(0, 0, 1, 1)]) == [10 + 0.5]  # two writes a us at most
    assert arrivals(NIC, []) == []


def test_a_sender_sends_one_message_at_a_time() -> None:
    sent = [Message(0, 0, 1, 5000), Message(0, 0, 2, 1000), Message(20, 0, 2, 1000)]
    assert arrivals(NIC, sent) == [15, 16, 31]


def test_a_receiver_receives_one_message_at_a_time_and_holds_up_no_sender() -> None:
    sent = [Message(0, 0, 2, 5000), Message(0, 1, 2, 5000), Message(0, 1, 3, 1000)]
    assert arrivals(NIC, sent) == [15, 20, 16]


def test_what_is_ready_first_leaves_first() -> None:
    sent = [Message(7, 0, 1, 1000), Message(0, 0, 1, 1000), Message(7, 0, 2, 1000)]
    assert arrivals(NIC, sent) == [18, 11, 19]


# --- bytes ---


@pytest.mark.parametrize(
    ("ranks", "dispatch_us", "combine_us"),
    [(16, 19, 37), (32, 51, 99), (64, 88, 170), (128, 116, 224)],
)
def test_floors_of_128_tokens_at_50_gb_per_second(
    ranks: int, dispatch_us: int, combine_us: int
) -> None:
    job = Job(ranks=ranks, tokens=128)
    copies = job.tokens * job.distinct(job.nodes) * (job.nodes - 1) / job.nodes
    slots = phases.slot_bytes(job)
    assert copies * (7168 + 4 * 56) / 50e3 == pytest.approx(dispatch_us, abs=0.5)
    assert 1 <= slots.dispatch / (7168 + 4 * 56) < 1.04  # the head
    assert copies * slots.combine / 50e3 == pytest.approx(combine_us, abs=0.5)


def test_copies_and_slots_agree_with_the_specification() -> None:
    job = Job(ranks=8, ranks_per_node=2, tokens=2000, hidden=256, topk=3, experts=16)
    generator = torch.Generator().manual_seed(4)
    tokens = [
        Tokens(
            x=torch.zeros(2000, 256, dtype=torch.bfloat16),
            topk_idx=torch.rand(2000, 16, generator=generator).topk(3, dim=1).indices,
        )
        for _ in range(8)
    ]
    topology = Topology(world_size=8, ranks_per_node=2, num_experts=16)
    routing = reference.route(topology, tokens, layout="grouped", quantized=True)
    drawn = [wire.wire_bytes(routing, source, combine_dtype=torch.bfloat16) for source in range(8)]
    copies = job.tokens * job.distinct(4) * 3 / 4
    for phase, what in enumerate(("dispatch", "combine")):
        wanted = copies * phases.slot_bytes(job)[phase] + 3 * phases._headers(job)[phase]
        # 16,000 tokens of variance below 1: the mean is known to 0.01 of about 2 copies.
        assert sum(getattr(d, what) for d in drawn) / 8 == pytest.approx(wanted, rel=0.01)


def test_drawn_routing_has_the_expected_copies() -> None:
    job = Job(ranks=32, tokens=100)
    nodes = [len({t // 8 for t in targets}) for _, targets in job.routing()]
    assert len(nodes) == 3200
    assert sum(nodes) / 3200 == pytest.approx(job.distinct(4), rel=0.01)


# --- phases ---


def test_deepeps_phases_are_near_what_was_published() -> None:
    points = published.deepep_points()
    assert len(points) == 39
    fits = published.deepep_fits(points)
    few = [point for point in points if point.tokens in (2, 8, 32, 64)]
    for found in published.check(few, fits):
        assert found.holds(0), found
        assert found.holds(1), found
    # Of the NIC's rate, and of launches and flags: what was fitted is no number without a meaning.
    for fitted in fits:
        assert 0.9 < fitted.goodput <= 1.0
        assert 10 < fitted.fixed_us < 25


def test_a_point_far_from_the_model_is_found() -> None:
    point = published.Point("", 16, 8, Pair(100.0, 10.0))
    near, far = published.Checked(point, Pair(109, 18)), published.Checked(point, Pair(89, 19))
    assert (near.holds(0), near.holds(1)) == (True, True)
    assert (far.holds(0), far.holds(1)) == (False, False)
    text, good = command.checked([near, far])
    assert not good
    assert text.count("!") == 2


def test_ours_on_one_node_is_what_was_measured() -> None:
    for tokens, measured in ((8, 16.8), (32, 25.7), (128, 60.1)):
        pair = phases.ours(Job(ranks=8, tokens=tokens), NICS["cx7"])
        assert pair.total == pytest.approx(measured, rel=0.01)


def test_ours_between_nodes_adds_up() -> None:
    """2 x 1 with 8 tokens: the hops of a ConnectX-7, written down apart, sum up to 42 us."""
    pair = phases.ours(Job(ranks=2, ranks_per_node=1, tokens=8), NICS["cx7"])
    assert pair.total == pytest.approx(42, rel=0.1)


def test_more_of_anything_takes_longer() -> None:
    cx7, job = NICS["cx7"], Job(ranks=32, tokens=32)
    usual = phases.ours(job, cx7)
    for slower in (
        phases.ours(replace(job, tokens=64), cx7),
        phases.ours(replace(job, ranks=64), cx7),
        phases.ours(job, cx7, flat=True),
        phases.ours(job, NICS["efa"]),
        phases.ours(job, replace(cx7, gbps=200)),
    ):
        assert slower.dispatch > usual.dispatch
        assert slower.combine > usual.combine


# --- the command ---


def test_the_command_prints_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    sizes = ["--ranks", "8", "16", "--tokens", "8"]
    assert main(["model", *sizes, "--json", str(file), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert command.PREDICTION in printed
    one, two = json.loads(file.read_text())
    assert one["measured"] is None
    assert two["measured"] == {"dispatch": 23.6, "combine": 36.2}
    assert f"{two['ours']['dispatch']:.0f} + {two['ours']['combine']:.0f}" in printed
    assert plot.stat().st_size > 10_000 or "matplotlib is not installed" in printed


def test_plan_prints_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "16"]) == 0
    pair = phases.ours(Job(ranks=16, tokens=128), NICS["cx7"])
    assert f"dispatch {pair.dispatch:.0f} us, combine {pair.combine:.0f} us" in (
        capsys.readouterr().out
    )


def test_the_table_of_docs_is_what_the_model_predicts() -> None:
    text = (Path(__file__).parents[2] / "docs/figures.md").read_text()
    fits = published.deepep_fits(published.deepep_points())
    lines = re.findall(r"^\| EP(\d+) \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 3
    for ranks, cells in lines:
        shown = cells.replace(" µs", "").split(" | ")
        for tokens, pair in zip((8, 128), (shown[:2], shown[2:]), strict=True):
            row = command.predict(Job(ranks=int(ranks), tokens=tokens), NICS["cx7"], fits)
            assert pair == [command._cell(row.ours), command._cell(row.measured)]
