"""Floors of the benchmark: bytes that have to move, over what the links were measured to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moe_p2p import errors
from moe_p2p.bench import floors
from moe_p2p.bench.floors import PhaseBytes, Sizes
from moe_p2p.machine import jit
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens, Topology, wire
from moe_p2p.tools import probe
from tests.tools.test_bench_gpu import LINKS


def test_deepeps_messages_are_counted_by_definition() -> None:
    topology = Topology(world_size=4, ranks_per_node=2, num_experts=12)  # 6 of each node
    topk_idx = draw(4, 12, 3)
    topk_idx[0][0, 1] = -1
    rows = sum(
        expert >= 0 and expert // 6 != source // 2
        for source, idx in enumerate(topk_idx)
        for expert in idx.flatten().tolist()
    )
    assert floors.deepep_messages(topk_idx, topology) == (2 * rows, 2 * 4 * 6)
    alone = Topology(world_size=4, ranks_per_node=4, num_experts=12)
    assert floors.deepep_messages(topk_idx, alone) == (0, 0)


def test_no_provider_knows_a_fence_among_writes() -> None:
    """`fences` is 0 because there is none to post: IBV_SEND_FENCE is 1, FI_FENCE 1 << 21."""
    providers = Path(__file__).resolve().parents[2] / "csrc/provider"
    verbs = (providers / "verbs/api.h").read_text()
    flags = re.search(r"enum SendFlag : unsigned {(.*?)}", verbs)
    assert flags is not None
    assert [int(value) for value in re.findall(r"= (\d+)", flags[1])] == [2, 8]
    libfabric = (providers / "libfabric/api.h").read_text()
    bits = [int(bit) for bit in re.findall(r"= 1ull << (\d+)", libfabric)]
    assert bits
    assert 21 not in bits


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_probe_compiles(arch: str) -> None:
    try:
        jit._nvrtc_version()
    except errors.UnavailableError as error:
        pytest.skip(str(error))
    compiled = jit.compile_only("probe.cu", probe.macros(), arch)
    for name in ("barrier", "push", "flags", "host"):
        assert f".text.moe_p2p_probe_{name}\0".encode() in compiled.cubin
    assert all(usage.spill_store_bytes == 0 for usage in compiled.usage.values())


def draw(world_size: int, num_experts: int, topk: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(20 + rank, num_experts, generator=generator).topk(topk, dim=1).indices
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(("world_size", "local"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("quantize", [False, True])
def test_bytes_are_those_of_the_reference(world_size: int, local: int, quantize: bool) -> None:
    topology = Topology(world_size=world_size, ranks_per_node=local, num_experts=12)
    topk_idx = draw(world_size, 12, 3)
    tokens = [
        Tokens(x=torch.ones(len(idx), 256, dtype=torch.bfloat16), topk_idx=idx) for idx in topk_idx
    ]
    routing = reference.route(topology, tokens, layout="grouped", quantized=quantize)
    copies = floors.token_copies(topk_idx, topology)
    for source in range(world_size):
        mine = routing.source == source
        pairs = torch.stack([routing.token[mine], routing.rank[mine]], dim=1).unique(dim=0)
        assert copies[source].tolist() == pairs[:, 1].bincount(minlength=world_size).tolist()

    sizes = Sizes.of(256, topk=3, item=2, quantize=quantize)
    to_nodes = floors.node_copies(topk_idx, topology)
    for num_steps in (1, 3):
        busiest, total = floors.nic_bytes(to_nodes, topology, sizes, num_steps=num_steps)
        sent = [
            wire.wire_bytes(routing, source, combine_dtype=torch.bfloat16, num_steps=num_steps)
            for source in range(world_size)
        ]
        assert total == PhaseBytes(
            dispatch=sum(w.dispatch for w in sent), combine=sum(w.combine for w in sent)
        )
        each = to_nodes.sum(1)  # and what reaches a gateway, in the order of node and local index
        into = to_nodes.view(-1, local, topology.num_nodes).sum(0).t().flatten()
        extra = max(int(into.max() - each.max()), 0) * sizes.slot
        assert busiest.dispatch == max(w.dispatch for w in sent) + extra
        assert total.combine / world_size <= busiest.combine <= total.combine
    packed = Sizes.of(256, topk=3, item=2, quantize=quantize, combine_dtype="int10_nodes")
    _, total = floors.nic_bytes(to_nodes, topology, packed, num_steps=1)
    sums = [
        wire.wire_bytes(routing, source, combine_dtype=torch.bfloat16, int10=True).combine
        for source in range(world_size)
    ]
    assert total.combine == sum(sums)
    assert (packed.row, packed.far_row) == (sizes.row, 384)  # 336, in lines
    least = [
        wire.floor_bytes(routing, source, combine_dtype=torch.bfloat16).pair
        for source in range(world_size)
    ]
    assert int(to_nodes.sum()) * sizes.payload.pair == sum(least)
    flat = [
        wire.floor_bytes(routing, source, combine_dtype=torch.bfloat16, dedup=False)
        for source in range(world_size)
    ]
    each = sizes.payload.times(floors.expert_copies(topk_idx, topology))
    assert each.dispatch == sum(one.dispatch for one in flat)
    assert each.combine == sum(one.combine for one in flat)


def test_what_passes_a_gpu_is_counted_by_hand() -> None:
    # An expert a rank. Token by token: rank 0 -> {1, 2}, {0, 1}; rank 1 -> {3}; others none.
    none = torch.empty(0, 2, dtype=torch.int64)
    topk_idx = [torch.tensor([[1, 2], [0, 1]]), torch.tensor([[3, -1]]), none, none]
    sizes = Sizes(slot=1000, row=500, far_row=500, payload=PhaseBytes(dispatch=900, combine=500))
    whole = Topology(world_size=4, ranks_per_node=4, num_experts=4)
    header, counts = 128, 128
    copies = floors.token_copies(topk_idx, whole)
    assert copies.tolist() == [[1, 2, 1, 0], [0, 0, 0, 1], [0] * 4, [0] * 4]
    assert floors.nvlink_bytes(copies, whole, sizes) == PhaseBytes(
        dispatch=3000 + 3 * (header + counts),  # rank 0: two to rank 1, one to rank 2
        combine=1500 + 3 * header,  # rank 0 gets three: two of rank 1, one of rank 2
    )
    nodes = Topology(world_size=4, ranks_per_node=2, num_experts=4)
    # Rank 0 -> 1 twice inside; 0 -> 2 lands at rank 2 itself, 1 -> 3 at rank 3 itself.
    assert floors.nvlink_bytes(copies, nodes, sizes) == PhaseBytes(
        dispatch=2000 + header + counts, combine=1000 + header
    )
    to_nodes = floors.node_copies(topk_idx, nodes)
    assert to_nodes.tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]
    busiest, total = floors.nic_bytes(to_nodes, nodes, sizes, num_steps=1)
    assert busiest == PhaseBytes(dispatch=1000 + header + counts, combine=500 + header)
    assert total == PhaseBytes(dispatch=2000 + 4 * (header + counts), combine=1000 + 4 * header)


def test_a_floor_is_the_slower_link() -> None:
    nvlink, nic = PhaseBytes(dispatch=300_000, combine=600_000), PhaseBytes(dispatch=1, combine=0)
    floor = floors.floor_us(nvlink, nic, push_gbs=300.0, gbps=400.0)
    assert (floor.dispatch, floor.combine, floor.pair) == (1.0, 2.0, 3.0)
    slow = floors.floor_us(nvlink, PhaseBytes(dispatch=500_000, combine=0), push_gbs=0, gbps=400.0)
    assert (slow.dispatch, slow.combine) == (10.0, 0.0)


def test_an_arrival_is_the_relayed_way_without_the_way_back() -> None:
    assert LINKS.arrival_us == 2.5


def test_the_floor_is_of_the_busiest_rank() -> None:
    """All ranks send all tokens to rank 2: it gets 3 T slots from others, and sends 3 T rows."""
    topology = Topology(world_size=4, ranks_per_node=4, num_experts=8)
    idx = [torch.full((10, 1), 5) for _ in range(4)]
    sizes = floors.Sizes.of(256, topk=1, item=2, quantize=False)
    found = floors.bounds(idx, topology, sizes, num_steps=1, push_gbs=1.0, gbps=0.0)
    least = floors.PhaseBytes(dispatch=30 * sizes.slot, combine=30 * sizes.row)
    assert 0 <= found.nvlink.dispatch - least.dispatch < 4 * sizes.slot
    assert 0 <= found.nvlink.combine - least.combine < 4 * sizes.row
    assert (found.max_vio, found.busiest) == (7.0, 4.0)
    apart = Topology(world_size=4, ranks_per_node=1, num_experts=8)
    found = floors.bounds(idx, apart, sizes, num_steps=1, push_gbs=0.0, gbps=1.0)
    assert 0 <= found.nic.dispatch - least.dispatch < 4 * sizes.slot
    assert found.floor.dispatch == pytest.approx(found.nic.dispatch * 8e-3)
