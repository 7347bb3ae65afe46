"""The specification in plain torch: results (routing), fp8 rows (fp8), bytes on the wire (wire),
partial sums as 10-bit integers (int10) and in blocks of 16-bit values (block16)."""

from moe_p2p.machine.fp8 import FP8, ScaleFormat, dequantize, pack_ue8m0, quantize
from moe_p2p.moe.reference.routing import (
    Layout,
    Received,
    Routing,
    Tokens,
    Topology,
    combine,
    combine_scalars,
    dispatch,
    merge_duplicates,
    route,
)

__all__ = [
    "FP8",
    "Layout",
    "Received",
    "Routing",
    "ScaleFormat",
    "Tokens",
    "Topology",
    "combine",
    "combine_scalars",
    "dequantize",
    "dispatch",
    "merge_duplicates",
    "pack_ue8m0",
    "quantize",
    "route",
]
