"""A pair of calls between nodes taken apart into hops, to be added up beside the time of the pair.

Kernels that are compiled for it note when they begin, ring and see an arrival
(kernels/device/stamps.cuh), proxies note when they take a bell and publish an arrival. The timed
NIC's time is arithmetic. Clocks of GPUs and of the host are never compared with each other: the
kernels' wait from bell to arrival, averaged over both ranks, is the way to the proxies, their
turns, the wire, and the way back. The pair is timed in kernels without stamps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch

from moe_p2p import AllToAll, library
from moe_p2p.bench.cases import Job
from moe_p2p.bench.gpu_calls import package_calls
from moe_p2p.bench.harness import finish
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import MoeP2p
from moe_p2p.machine.transport import TIMED
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.gpu_timing import Align, captured, cuda

CHAIN, ROUNDS = 8, 200
# kernels/abi/params.h: StepStamps, of each phase.
STAMPS = 6
BEGUN, _, RINGS, RUNG, ARRIVED, _ = range(STAMPS)
WAYS = ("dispatch", "combine")


class Stamps(NamedTuple):
    """Nanoseconds of one rank in one round."""

    kernels: tuple[float, float, float]  # before the first bell, between, behind the last arrival
    rings: tuple[float, float]
    far: tuple[float, float]  # from a bell until its partner's arrival is passed on
    taken: tuple[int, int]  # by the proxy
    published: tuple[int, int]


def can_be_taken_apart(options: Options) -> bool:
    """Two nodes over the timed NIC: of several partners the last one counts, whichever it is."""
    nodes = options.ranks // options.ranks_per_node
    return options.device == "cuda" and options.transport == TIMED and nodes == 2


def measure(
    options: Options, job: Job, tokens: Tokens, align: Align, wire_bytes: Mapping[str, int]
) -> dict[str, float]:
    """Returns hop -> microseconds of a pair on all multiprocessors, the mean of all ranks.

    Empty where the pair takes several steps: their hops overlap. Collective. wire_bytes: of all
    ranks, by phase.
    """
    kernels.measuring["MOE_P2P_STAMPS"] = 1
    try:
        system = MoeP2p(options, job)
        try:
            if system.num_steps > 1:
                return {}
            stamps = _rounds(system, options, tokens, align)
        finally:
            finish(options.device)
            everyones(None)  # no rank closes what another still uses
            system.close()
    finally:
        del kernels.measuring["MOE_P2P_STAMPS"]
    share = options.ranks * options.nics
    wire = [_wire_ns(options, wire_bytes[way] / share) for way in WAYS]
    return hops_of(everyones(stamps), wire, options.ranks_per_node)


def hops_of(
    ranks: list[list[Stamps]], wire_ns: list[float], ranks_per_node: int
) -> dict[str, float]:
    """Returns the median of each hop over the rounds, of its mean over the ranks."""
    rounds = []
    for of_ranks in zip(*ranks, strict=True):
        partners = [of_ranks[(r + ranks_per_node) % len(of_ranks)] for r in range(len(of_ranks))]
        mean = statistics.fmean
        hops: dict[str, float] = {}
        names = ("before dispatch's bell", "between", "after combine's arrival")
        for i, name in enumerate(names):
            hops[f"kernels, {name}"] = mean(stamps.kernels[i] for stamps in of_ranks)
        for i, way in enumerate(WAYS):
            hosts = mean(
                own.published[i] - other.taken[i]
                for own, other in zip(of_ranks, partners, strict=True)
            )
            hops[f"{way}: ring"] = mean(stamps.rings[i] for stamps in of_ranks)
            hops[f"{way}: bell and relay"] = mean(s.far[i] for s in of_ranks) - hosts
            hops[f"{way}: proxies' turns"] = hosts - wire_ns[i]
            hops[f"{way}: wire"] = wire_ns[i]
        rounds.append(hops)
    return {
        name: round(statistics.median(hops[name] for hops in rounds) / 1e3, 2) for name in rounds[0]
    }


def _rounds(system: MoeP2p, options: Options, tokens: Tokens, align: Align) -> list[Stamps]:
    calls = package_calls(system, options, tokens, num_sms=0, layer=None)
    times(system.all_to_all)  # noted from now on
    replay = captured(calls.pair, repeats=CHAIN)
    found = []
    for _ in range(ROUNDS):
        cuda.synchronize()
        align()
        replay()
        cuda.synchronize()
        found.append(read(system.all_to_all))
    return found


def times(comm: AllToAll) -> list[int]:
    """Nanoseconds: dispatch's last bell taken, its last arrival published; those of combine.

    Noted from the first call on.
    """
    return list(library.call(torch.ops.moe_p2p.all_to_all_times.default, comm._comm))


def read(comm: AllToAll) -> Stamps:
    """Takes the last pair but one apart, whose end is the begin of the last."""
    assert comm._device is not None
    words = comm._device.stamps.cpu()[:, 1:]
    stamps = words.reshape(len(words), -1, STAMPS)
    last = int(stamps[:, 0, BEGUN].argmax())
    dispatch, combine = stamps[(last - 1) % len(stamps), :2].tolist()
    end = int(stamps[last, 0, BEGUN])
    noted = times(comm)
    return Stamps(
        kernels=(
            dispatch[RINGS] - dispatch[BEGUN],
            combine[RINGS] - dispatch[ARRIVED],
            end - combine[ARRIVED],
        ),
        rings=(dispatch[RUNG] - dispatch[RINGS], combine[RUNG] - combine[RINGS]),
        far=(dispatch[ARRIVED] - dispatch[RUNG], combine[ARRIVED] - combine[RUNG]),
        taken=(noted[0], noted[2]),
        published=(noted[1], noted[3]),
    )


def _wire_ns(options: Options, num_bytes: float) -> float:
    """Time of a write on the modelled link (csrc/provider/loopback/link_model.h)."""
    link = library.call(torch.ops.moe_p2p.timed_link.default, options.transport_settings)
    gbps, latency_ns, post_ns, message_ns = map(float, link)
    return latency_ns + post_ns + max(num_bytes * 8 / gbps, message_ns)
