"""An MoE layer on AllToAll, to use and to read: router, experts, and gradients through both."""

from moe_p2p.layer.moe_layer import Experts, Fp8Experts, MoELayer, Router, local_experts

__all__ = ["Experts", "Fp8Experts", "MoELayer", "Router", "local_experts"]
