"""The scale model against published floors, and against routing drawn at random."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model import Scale, as_sent, copies_per_node, flat_floor, node_floor
from moe_p2p import reference
from moe_p2p.reference import Tokens, Topology, wire


@pytest.mark.parametrize(
    ("ranks", "per_expert", "per_node"),
    [
        (16, (76, 147), (19, 37)),
        (32, (114, 220), (51, 99)),
        (64, (132, 257), (88, 170)),
        (128, (142, 275), (116, 224)),
    ],
)
def test_floors_at_50_gb_per_second(
    ranks: int, per_expert: tuple[int, int], per_node: tuple[int, int]
) -> None:
    scale = Scale(ranks=ranks)
    for floor, want in ((flat_floor(scale), per_expert), (node_floor(scale), per_node)):
        assert (round(floor.dispatch_us), round(floor.combine_us)) == want
    sent, least = as_sent(scale), node_floor(scale)
    assert 1 <= sent.dispatch_us / least.dispatch_us < 1.04  # heads and headers
    assert 1 <= sent.combine_us / least.combine_us < 1.001


def test_agrees_with_drawn_routing() -> None:
    scale = Scale(ranks=8, ranks_per_node=2, tokens=2000, hidden=256, topk=3, experts=16)
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
    sent = as_sent(scale)
    to_bytes = scale.gbps * 1e3 / 8
    # 16,000 tokens of variance below 1: the mean is known to 0.01 of about 2 copies.
    assert sum(d.dispatch for d in drawn) / 8 == pytest.approx(
        sent.dispatch_us * to_bytes, rel=0.01
    )
    assert sum(d.combine for d in drawn) / 8 == pytest.approx(sent.combine_us * to_bytes, rel=0.01)
    assert copies_per_node(scale) < 3 * (1 - 1 / 4) < 3
