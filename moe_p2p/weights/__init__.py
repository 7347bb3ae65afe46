"""RL weight updates: layouts of both sides, the plan between them, fp8 without gathering, and a
recorder of what a receiver's own loader does.

docs/weights.md explains it.
"""

from moe_p2p.weights import copies
from moe_p2p.weights.fp8 import block_amax, merge, quantize, scales
from moe_p2p.weights.layout import Blocks, Param, WeightLayout, dtype_name, of_tensor
from moe_p2p.weights.placement import Placement, Replicate, Shard
from moe_p2p.weights.plan import Copy, Counts, Gathered, Maxima, WeightPlan, Write, weight_plan
from moe_p2p.weights.recorder import Recording, record

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
    "WeightLayout",
    "WeightPlan",
    "Write",
    "block_amax",
    "copies",
    "dtype_name",
    "merge",
    "of_tensor",
    "quantize",
    "record",
    "scales",
    "weight_plan",
]
