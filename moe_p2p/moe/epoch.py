"""One C++ communicator of a meeting: made, and connected. A face (communicator.py) of a fixed world
has one for its life, of a world that changes one after the other (elastic.py).

Control path only. Symbols: W ranks, L ranks per node.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import bytes_from, tensor_from
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.library import call
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.gpu.epoch_memory import EpochMemory
from moe_p2p.moe.rendezvous import mirror
from moe_p2p.moe.rendezvous.agreement import Facts, Host, conclude
from moe_p2p.moe.tuned import Shared

_ops = torch.ops.moe_p2p
Masks = tuple[Tensor, Tensor]  # [W] of the calls and of the NICs: the same on the CPU, two on a GPU


class Epoch(NamedTuple):
    """number: of the C++ object. ended: gives its number in immediates back. memory: on a GPU, what
    of its memory is this epoch's."""

    number: int
    ranks_per_node: int
    masks: Masks | None
    ended: Callable[[], None]
    memory: EpochMemory | None = None

    def connect(self, meeting: Bootstrap) -> None:
        """Connects to the ranks that meet; the others have no address, and are masked."""
        own = bytes_from(call(_ops.all_to_all_address.default, self.number))
        addresses, absent = meeting.exchange(own, mirror.ADDRESSES), set(meeting.absent)
        call(
            _ops.all_to_all_connect.default,
            self.number,
            [
                tensor_from(b"" if rank in absent else address, "address")
                for rank, address in enumerate(addresses)
            ],
        )

    def close(self) -> None:
        """Waits until what was sent has arrived, as AllToAll.close does."""
        try:
            if self.memory is not None:
                self.memory.finish()
        finally:
            _ops.all_to_all_close.default(self.number)
            self.ended()
            if self.memory is not None:
                self.memory.close()  # NICs read it until then


def own_host() -> Host:
    """Where this rank is, for ranks that conclude who share memory."""
    return Host(call(_ops.host_identity.default), platform.node())


def make_epoch(
    meeting: Bootstrap,
    config: AllToAllConfig,
    engine: Engine,
    shared: Shared,
    masks: Masks | None,
    **more: int,
) -> Epoch:
    """Collective. more: settings of communicator_settings.cpp that are not the configuration's."""
    config = shared.with_parts(config, engine.provider)
    host, world_size = own_host(), meeting.world_size
    engine.communicators.reclaim(lambda tag: engine.sever(tag, []), world_size)
    facts = Facts(
        fields=config.agreed(shared.bulk)
        | {"world_size": str(world_size), "arrival_flags": engine.arrivals},
        host=host.key,
        host_name=host.name,
        next_communicator=engine.communicators.next,
        taken=f"{engine.communicators.taken:x}",
        tag=secrets.randbits(62) | 1,
    )
    facts_of_all = [Facts.decode(d) for d in meeting.exchange(facts.encode(), "the configurations")]
    agreed = conclude(facts_of_all, meeting.rank, config.ranks_per_node)
    ended = engine.communicators.take(agreed.communicator, agreed.tag)
    num_threads = config.num_threads
    if num_threads is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // agreed.ranks_on_host)
    settings = config.settings(
        world_size,
        agreed.ranks_per_node,
        rank=meeting.rank,
        communicator=agreed.communicator,
        tag=agreed.tag,
        timeout_s=float(config.timeout_s),
        wait=config.wait,
        num_threads=num_threads,
        arrival_flags=engine.arrivals,
        **more,
    )
    of_nics = None if masks is None else masks[1]
    try:
        number = int(call(_ops.all_to_all_create.default, engine.number, settings, of_nics))
    except BaseException:
        ended()
        raise
    return Epoch(number, agreed.ranks_per_node, masks, ended)
