"""SGLang's expert load balancing (EPLB) over ExpertMover; sglang.py installs it.

SGLang decides which layers move between two forward passes (`eplb_rebalance_layers_per_chunk`), and
that all ranks move the same ones there. `move` stands where it sends experts from rank to rank: all
layers' weights are registered once, and each rank reads what its slots get, into a staging area as
large as SGLang's own. Where ranks are lost, and in a group that has grown, SGLang's own code moves
experts: it loads those that nobody has from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.integrations import optional, put
from moe_p2p.moe.expert_map import ExpertMap
from moe_p2p.moe.expert_mover import ExpertMover

_UPDATER = "sglang.srt.eplb.expert_location_updater"
_TIMEOUT_S = 300.0  # ranks come here after the same forward pass

Layers = Mapping[int, Sequence[Tensor]]


class Movers:
    """The mover of this rank's layers, made anew when they are others. Making one is collective,
    and all ranks' layers change alike."""

    def __init__(self) -> None:
        self._key: Any = None
        self._engine: Engine | None = None
        self._mover: ExpertMover | None = None
        self._maps: list[ExpertMap] = []
        self._moves = 0

    def move(self, weights: Layers, layers: Sequence[int], old: Any, new: Any, rank: int) -> None:
        """old, new: SGLang's metadata, whose maps [layers, slots] name the expert of each slot."""
        known = sorted(weights)
        key = [(n, each.data_ptr(), each.shape, each.dtype) for n in known for each in weights[n]]
        try:
            if self._mover is None or key != self._key:
                self._make(weights, known, old, rank)
                self._key = key
            assert self._mover is not None
            for layer in layers:
                self._mover.move(
                    new.physical_to_logical_map_cpu[layer].tolist(), known.index(layer)
                )
                self._moves += 1
                self._mover.step(self._moves << 32, wait=True)
        except BaseException:
            self.close()  # the next one begins anew, on all ranks
            raise

    def _make(self, weights: Layers, known: list[int], old: Any, rank: int) -> None:
        self.close()
        self._moves = 0
        first = weights[known[0]][0]
        device = first.device
        self._maps = [
            ExpertMap(
                old.physical_to_logical_map_cpu[layer].tolist(),
                num_experts=old.num_logical_experts,
                rank=rank,
                device=device,
            )
            for layer in known
        ]
        self._engine = Engine(
            EngineConfig(timeout_s=_TIMEOUT_S),
            label=f"EPLB of rank {rank}",
            gpu=device.index if device.type == "cuda" else None,
        )
        self._mover = ExpertMover(
            None,
            self._engine,
            [(self._maps[i], list(weights[layer])) for i, layer in enumerate(known)],
            staging_slots=len(first),
        )

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()
        if self._engine is not None:
            self._engine.close()
        self._mover = self._engine = None


def install() -> None:
    """Replaces how SGLang's updater of expert locations moves weights; an SGLang without it stays
    as it is."""
    updater = optional(_UPDATER)
    if updater is None or not hasattr(updater, "_update_expert_weights_raw"):
        return
    theirs: Callable[..., dict[int, list[int]]] = updater._update_expert_weights_raw
    movers = Movers()

    @functools.wraps(theirs)
    def update(
        routed_experts_weights_of_layer: Layers,
        old_expert_location_metadata: Any,
        new_expert_location_metadata: Any,
        update_layer_ids: list[int],
        nnodes: int,
        rank: int,
    ) -> dict[int, list[int]]:
        """Returns {}: experts of layers that no rank has."""
        old, new = old_expert_location_metadata, new_expert_location_metadata
        if not _all_are_there(updater, old):
            movers.close()
            return theirs(routed_experts_weights_of_layer, old, new, update_layer_ids, nnodes, rank)
        movers.move(routed_experts_weights_of_layer, update_layer_ids, old, new, rank)
        return {}

    put({_UPDATER: updater}, {"_update_expert_weights_raw": update})


def _all_are_there(updater: Any, old: Any) -> bool:
    """Whether slots are those of the ranks that began, all of which live."""
    state = updater.ElasticEPStateManager.instance()
    if state is not None and (state.has_scaled or not bool(state.active_ranks_cpu.all())):
        return False
    slots = old.physical_to_logical_map_cpu
    return slots.shape[1] % dist.get_world_size() == 0 and bool((slots >= 0).all())
