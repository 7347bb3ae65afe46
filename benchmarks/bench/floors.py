"""Least time of the job on this machine: bytes of the busiest rank over measured links.

Nothing here touches a device. It counts bytes of slots, partial rows and headers as they are sent,
one copy per (token, rank) inside a node and one per (token, node) between nodes.

Shapes: W ranks, L ranks per node, N = W / L nodes, T tokens of a rank, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_p2p.moe.options import Partials
from moe_p2p.moe.reference import Topology, int10
from moe_p2p.moe.reference.wire import LINE, align, slot_head_bytes

if TYPE_CHECKING:
    from moe_p2p.bench.cases import Job
    from moe_p2p.bench.options import Options


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    dispatch: int
    combine: int

    @property
    def pair(self) -> int:
        return self.dispatch + self.combine

    def times(self, count: int) -> PhaseBytes:
        return PhaseBytes(dispatch=count * self.dispatch, combine=count * self.combine)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes as they are sent."""

    slot: int  # a token in dispatch
    row: int  # a partial sum in combine, within a node
    far_row: int  # between nodes
    payload: PhaseBytes  # of a token, without heads and padding

    @staticmethod
    def of(
        hidden_dim: int,
        *,
        topk: int,
        item: int,
        quantize: bool,
        combine_dtype: Partials | None = None,
    ) -> Sizes:
        """item: bytes of a value, in dispatch unless it is quantized, and in combine.

        combine_dtype: `partials` of CombineOptions.
        """
        values = hidden_dim * (1 if quantize else item)
        scales = 4 * -(-hidden_dim // 128) if quantize else 0
        near = far = sums = hidden_dim * item
        if combine_dtype == "block16":
            near = far = sums = hidden_dim * 2
        elif combine_dtype:
            far, sums = int10.row_bytes(hidden_dim), hidden_dim * 10 // 8 + hidden_dim // 16
            near = far if combine_dtype == "int10" else near
        return Sizes(
            slot=align(slot_head_bytes(topk) + align(values, 16) + align(scales, 16), LINE),
            row=align(near, LINE),
            far_row=align(far, LINE),
            payload=PhaseBytes(dispatch=values + scales, combine=sums),
        )


def token_copies(topk_idx: Sequence[Tensor], topology: Topology) -> Tensor:
    """[W, W] int64: tokens of the source (row) that have an expert at the rank (column).

    topk_idx: [T, K] of each source, -1: none.
    """
    owner = torch.cat([topology.owner(), torch.tensor([topology.world_size])])  # -1: nobody
    copies = []
    for idx in topk_idx:
        hit = torch.zeros(idx.shape[0], topology.world_size + 1, dtype=torch.bool)
        hit.scatter_(1, owner[idx.long()], True)
        copies.append(hit[:, :-1].sum(0))
    return torch.stack(copies)


def node_copies(topk_idx: Sequence[Tensor], topology: Topology) -> Tensor:
    """[W, N] int64: tokens of the source that have an expert on the node; 0 for its own node."""
    local = topology.ranks_per_node
    nodes = Topology(
        world_size=topology.num_nodes,
        ranks_per_node=1,
        num_experts=topology.num_experts,
        expert_rank=tuple((topology.owner() // local).tolist()),
    )
    own = torch.arange(topology.world_size) // local
    away = torch.arange(topology.num_nodes)[None, :] != own[:, None]
    return token_copies(topk_idx, nodes) * away


def expert_copies(topk_idx: Sequence[Tensor], topology: Topology) -> int:
    """Pairs (token, expert on another node) of all sources: copies without dedup."""
    node = torch.cat([topology.owner() // topology.ranks_per_node, torch.tensor([-1])])
    return sum(
        int(((idx >= 0) & (node[idx.long()] != source // topology.ranks_per_node)).sum())
        for source, idx in enumerate(topk_idx)
    )


def deepep_messages(topk_idx: Sequence[Tensor], topology: Topology) -> tuple[int, int]:
    """Writes and flags between nodes of a pair by DeepEP V1's low-latency scheme, of all sources.

    Each way a write for each (token, expert on another node), and a flag for each (source, expert
    on another node): dispatch's count of that expert's rows, combine's word that they are back.
    """
    node = topology.owner() // topology.ranks_per_node
    own = torch.arange(topology.world_size) // topology.ranks_per_node
    flags = int((node[None, :] != own[:, None]).sum())
    return 2 * expert_copies(topk_idx, topology), 2 * flags


def nvlink_bytes(copies: Tensor, topology: Topology, sizes: Sizes) -> PhaseBytes:
    """Bytes that leave or reach the busiest GPU over NVLink in each phase.

    Dispatch: slots pushed to ranks of the own node, and slots of other nodes that the ranks of this
    node read at the gateway, which has the source's local index. Combine: the same copies go back.
    Both ways that is every copy between ranks of different local index.
    """
    rank = torch.arange(topology.world_size)
    local, node = rank % topology.ranks_per_node, rank // topology.ranks_per_node
    crossing = torch.where(local[:, None] != local[None, :], copies, torch.zeros_like(copies))
    # A slot leaves the GPU with the source's local index on the node of the expert's rank.
    leaves = torch.zeros(topology.world_size, dtype=torch.int64)
    gateway = node[None, :] * topology.ranks_per_node + local[:, None]  # [source, expert rank]
    leaves.scatter_add_(0, gateway.flatten(), crossing.flatten())
    busiest = int(max(leaves.max(), crossing.sum(0).max()))  # in combine the other way
    neighbours = topology.ranks_per_node - 1
    counts = align(4 * (topology.max_local_experts() + 1), LINE)
    return PhaseBytes(
        dispatch=busiest * sizes.slot + neighbours * (LINE + counts),
        combine=busiest * sizes.row + neighbours * LINE,
    )


def nic_bytes(
    sent: Tensor, topology: Topology, sizes: Sizes, *, num_steps: int
) -> tuple[PhaseBytes, PhaseBytes]:
    """Bytes that leave or reach the NICs of one GPU between nodes: of the busiest GPU, and of all.

    sent: result of node_copies. num_steps: chunks of the call; with several each phase also carries
    the empty half of the steps that it closes or opens.
    """
    local, others = topology.ranks_per_node, topology.num_nodes - 1
    # Combine: the rank of the source's local index on each node sends that node's sums back.
    back = sent.view(topology.num_nodes, local, topology.num_nodes).sum(0).t().flatten()
    counts = align(4 * local * (topology.max_local_experts() + 1), LINE)
    empty = LINE if num_steps > 1 else 0
    more = num_steps * others
    dispatch = sent.sum(1) * sizes.slot + more * (LINE + counts + empty)
    combine = back * sizes.far_row + more * (LINE + empty)
    # What one direction of a phase is to a rank, the other is in the other phase.
    busiest = int(max(sent.sum(1).max(), back.max()))
    return (
        PhaseBytes(
            dispatch=busiest * sizes.slot + more * (LINE + counts + empty),
            combine=busiest * sizes.far_row + more * (LINE + empty),
        ),
        PhaseBytes(dispatch=int(dispatch.sum()), combine=int(combine.sum())),
    )


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Microseconds; 0: not known."""

    dispatch: float
    combine: float

    @property
    def pair(self) -> float:
        return self.dispatch + self.combine


def floor_us(nvlink: PhaseBytes, nic: PhaseBytes, *, push_gbs: float, gbps: float) -> Floor:
    """Returns the slower of NVLink and NICs in each phase.

    push_gbs: GB/s of NVLink, gbps: Gbit/s of all NICs of a GPU; 0: not known or not limited.
    """

    def slower(nvlink_bytes: int, nic_bytes: int) -> float:
        links = nvlink_bytes / (push_gbs * 1e3) if push_gbs else 0.0
        return max(links, nic_bytes * 8 / (gbps * 1e3) if gbps else 0.0)

    return Floor(
        dispatch=slower(nvlink.dispatch, nic.dispatch), combine=slower(nvlink.combine, nic.combine)
    )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bytes that one call has to move, and the least time for them."""

    nvlink: PhaseBytes  # of the busiest GPU, out of it or into it
    nic: PhaseBytes  # of the NICs of the busiest GPU, likewise
    wire: PhaseBytes  # between nodes, all ranks
    payload: PhaseBytes  # of wire, rows and scales alone
    flat: PhaseBytes  # of payload, were each token sent once for each expert
    floor: Floor
    deepep: tuple[int, int]  # deepep_messages
    max_vio: float  # of experts: (largest load - mean) / mean
    busiest: float  # rank: rows that reach it, each token once, over the mean


def bounds(
    topk_idx: Sequence[Tensor],
    topology: Topology,
    sizes: Sizes,
    *,
    num_steps: int,
    push_gbs: float,
    gbps: float,
) -> Bounds:
    """topk_idx: [T, K] of each source. The rest as in the functions above."""
    sent, copies = node_copies(topk_idx, topology), token_copies(topk_idx, topology)
    nvlink = nvlink_bytes(copies, topology, sizes)
    named = torch.cat([idx[idx >= 0].long() for idx in topk_idx])
    nic, wire = nic_bytes(sent, topology, sizes, num_steps=num_steps)
    return Bounds(
        nvlink=nvlink,
        nic=nic,
        wire=wire,
        payload=sizes.payload.times(int(sent.sum())),
        flat=sizes.payload.times(expert_copies(topk_idx, topology)),
        floor=floor_us(nvlink, nic, push_gbs=push_gbs, gbps=gbps),
        deepep=deepep_messages(topk_idx, topology),
        max_vio=_over_mean(named.bincount(minlength=topology.num_experts)) - 1,
        busiest=_over_mean(copies.sum(0)),
    )


def _over_mean(loads: Tensor) -> float:
    """The largest over the mean; 1 where there are none."""
    return float(loads.max() / loads.double().mean()) if loads.any() else 1.0


def bounds_of(
    options: Options, job: Job, step: int, *, num_steps: int, push_gbs: float, gbps: float
) -> Bounds:
    """Of a step of the bench's job with its first number of tokens."""
    return bounds(
        [job.routing(step, rank, options.tokens[0])[0] for rank in range(options.ranks)],
        job.topology,
        Sizes.of(
            job.hidden_dim,
            topk=job.topk,
            item=job.x_dtype.itemsize,
            quantize=options.quantize,
            combine_dtype=options.combine_dtype,
        ),
        num_steps=num_steps,
        push_gbs=push_gbs,
        gbps=gbps,
    )
