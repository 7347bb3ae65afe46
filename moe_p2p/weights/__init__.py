"""RL weight updates: trainers write straight into the tensors of inference engines, by a plan
between the layouts of both sides, and all inference engines switch to a version together, or
`update` raises and names the rank.

docs/weights.md explains it.
"""

from typing import TYPE_CHECKING

from moe_p2p import aliases
from moe_p2p.weights import copies
from moe_p2p.weights.copies import block_amax, merge, quantize, scales
from moe_p2p.weights.engine_rank import WeightEngineRank, agree_in
from moe_p2p.weights.layout import (
    Blocks,
    Param,
    Placement,
    Replicate,
    Shard,
    WeightLayout,
    dtype_name,
    layout_of,
    of_tensor,
)
from moe_p2p.weights.plan import Copy, Counts, Gathered, Maxima, WeightPlan, Write, weight_plan
from moe_p2p.weights.recorder import Recording, record
from moe_p2p.weights.trainer import WeightTrainer

__all__ = [
    "Blocks",
    "Copy",
    "Counts",
    "Gathered",
    "Maxima",
    "Param",
    "Placement",
    "Recording",
    "Replicate",
    "Shard",
    "WeightEngineRank",
    "WeightLayout",
    "WeightPlan",
    "WeightTrainer",
    "Write",
    "agree_in",
    "block_amax",
    "copies",
    "dtype_name",
    "layout_of",
    "merge",
    "of_tensor",
    "quantize",
    "record",
    "scales",
    "weight_plan",
]

if not TYPE_CHECKING:  # which would let any name pass
    __getattr__ = aliases.renamed(__name__, {"WeightGenerator": "WeightEngineRank"})
