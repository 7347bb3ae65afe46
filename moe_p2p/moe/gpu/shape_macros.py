"""What every kernel of a communicator is compiled with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_p2p.library import call, numbers_of
from moe_p2p.machine.launches import BulkSteps
from moe_p2p.moe.gpu.launch_shape import can_go_in_bulk, flags_itself, step_class

if TYPE_CHECKING:
    from moe_p2p.moe.config import AllToAllConfig

_ops = torch.ops.moe_p2p


def shape_macros(
    config: AllToAllConfig,
    *,
    world_size: int,
    ranks_per_node: int,
    bulk: BulkSteps | None = None,
) -> dict[str, int]:
    """Returns the macros that kernels/device/shape.cuh reads. bulk: of all ranks; None: shipped."""
    settings = config.settings(world_size, ranks_per_node)
    shape = numbers_of(call(_ops.shape.default, settings))
    named = {f"MOE_P2P_{name.upper()}": number for name, number in shape.items()}
    if config.mask_lost_ranks and config.lost is not None:
        named["MOE_P2P_LOST"] = 2 if config.lost == "poison" else 1
    return named | {
        "MOE_P2P_HIDDEN_DIM": config.hidden_dim,
        "MOE_P2P_EXTRA_BYTES": config.extra_bytes,
        "MOE_P2P_UNIFORM_EXPERTS": int(config.expert_rank is None),
        "MOE_P2P_MASKS": int(config.mask_lost_ranks),
        "MOE_P2P_SELF_FLAGGED": int(
            flags_itself(
                config.step_tokens,
                masks=config.mask_lost_ranks,
                bulk=can_go_in_bulk(world_size, ranks_per_node, config.num_sms),
                steps=bulk,
            )
        ),
    }


def of_changing(config: AllToAllConfig) -> dict[str, int]:
    """What kernels are compiled with in addition, or instead, where the world changes."""
    grow = config.mask_lost_ranks
    lost = {"MOE_P2P_LOST": 1 if config.lost == "drop" else 2} if grow else {}
    masks = {"MOE_P2P_MASKS": 1 if grow else 2, "MOE_P2P_SELF_FLAGGED": 0}
    return {"MOE_P2P_ELASTIC": 1} | masks | lost


def of_any_length(shape: dict[str, int]) -> dict[str, int]:
    """The shape of kernels that take steps of this class, not in bulk (shape.cuh, kFixedPlaces)."""
    if shape["MOE_P2P_WORLD_SIZE"] != shape["MOE_P2P_RANKS_PER_NODE"]:
        return shape
    return shape | {"MOE_P2P_CHUNK_TOKENS": step_class(shape["MOE_P2P_CHUNK_TOKENS"])}


def of_arrivals(comm: int) -> dict[str, int]:
    """What kernels are compiled with where they see arrivals by flags; of a connected communicator.

    A constant: kernels between nodes that look for flags, too, spill more registers.
    """
    flags = str(_ops.all_to_all_arrival_flags.default(comm)) in ("write", "gdrcopy")
    return {"MOE_P2P_ARRIVAL_FLAGS": 1} if flags else {}
