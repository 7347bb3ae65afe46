"""`python -m moe_p2p plan`: memory of one rank by region, and of /dev/shm. Needs no ranks.

`plan --kv` is moe_p2p/tools/plan_kv.py, `plan --weights` moe_p2p/tools/plan_weights.py.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from moe_p2p.errors import MoeP2pError
from moe_p2p.machine import tuned
from moe_p2p.moe.config import DEFAULT_CHUNK_TOKENS, AllToAllConfig
from moe_p2p.moe.rendezvous.shared_memory import of_a_rank
from moe_p2p.tools import plan_kv, plan_weights
from moe_p2p.tools.model import phases
from moe_p2p.tools.model.wire import NICS, Job
from moe_p2p.tools.option_types import Parser, parsed_for_model

MIB = 1 << 20
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
ABOUT = {
    "inbox": "tokens from ranks of this node",
    "inbox_flags": "a flag for each of them, on GPUs",
    "outbox": "tokens for other nodes, read by the NICs",
    "landing": "tokens from other nodes, read by every rank of this node",
    "partial_inbox": "sums from ranks of this node",
    "partial_flags": "a flag for each of them, on GPUs",
    "gather": "sums of this node's ranks for tokens from other nodes",
    "combine_outbox": "their totals, read by the NICs",
    "combine_landing": "totals from other nodes",
    "weights_inbox": "weights that ranks of this node send with combine",
    "weights_outbox": "weights for other nodes, read by the NICs",
    "weights_landing": "weights from other nodes, read by every rank of this node",
    "gather_flags": "a flag for each row in gather, on GPUs",
    "signals": "doorbells, arrivals and flags; values of gather_counts",
    "device_state": "words of a GPU's own kernels, on GPUs",
}


def main(arguments: list[str]) -> int:
    """Prints the table; exit code 2 when the numbers do not fit together."""
    if "--kv" in arguments:
        return plan_kv.main([each for each in arguments if each != "--kv"])
    if any(each.split("=")[0] == "--weights" for each in arguments):
        return plan_weights.main(arguments)
    given = parsed_for_model(_parser(), arguments)
    try:
        config = AllToAllConfig(
            num_experts=given.experts,
            hidden_dim=given.hidden,
            topk=given.topk,
            max_tokens=given.tokens,
            chunk_tokens=given.chunk_tokens,
            dtype=DTYPES[given.dtype],
            combine_dtype=DTYPES[given.combine_dtype] if given.combine_dtype else None,
            extra_bytes=given.extra_bytes,
            steps_in_flight=given.steps,
            nics_per_rank=given.nics or None,
            transport_settings=given.transport_settings,
        )
        regions = config.plan(world_size=given.ranks, ranks_per_node=given.ranks_per_node)
        on_hosts = shared_memory_table(
            config, ranks=given.ranks, local=given.ranks_per_node, num_nics=given.nics
        )
    except MoeP2pError as error:
        print(f"plan: {error}")
        return 2
    print(f"{table(regions)}\n\n{on_hosts}")
    if prediction := predicted(given):
        print(f"\n{prediction}")
    print(f"\ntuned: {tuned.describe()}")
    return 0


def predicted(given: argparse.Namespace) -> str:
    """Returns a line with the time of a pair; empty where `python -m moe_p2p model` has none."""
    even = given.ranks % given.ranks_per_node == 0 and given.experts >= given.topk
    if not even or given.dtype == "fp32" or given.combine_dtype == "fp32":
        return ""
    job = Job(
        ranks=given.ranks,
        ranks_per_node=given.ranks_per_node,
        tokens=given.tokens,
        hidden=given.hidden,
        topk=given.topk,
        experts=given.experts,
    )
    pair = phases.ours(job, NICS["cx7"])
    return (
        f"predicted on H200s with a ConnectX-7 each, fp8 there and bf16 back: dispatch "
        f"{pair.dispatch:.0f} us, combine {pair.combine:.0f} us (python -m moe_p2p model)"
    )


def table(regions: dict[str, int]) -> str:
    """One line per region, MiB, then the sum."""
    lines = [
        f"{name:16}{size / MIB:12.3f} MiB  {ABOUT.get(name, '')}".rstrip()
        for name, size in regions.items()
    ]
    lines.append(f"{'total':16}{sum(regions.values()) / MIB:12.3f} MiB  of one rank, all steps")
    return "\n".join(lines)


def shared_memory_table(config: AllToAllConfig, *, ranks: int, local: int, num_nics: int) -> str:
    """Returns a host's need of /dev/shm: one line per device of the tensors and kind of NIC."""
    lines = ["/dev/shm of a host has to hold"]
    for device in ("cpu", "cuda"):
        of_device = dataclasses.replace(config, device=device)
        for nics, kind, on_host in ((num_nics, "software NICs", ranks), (0, "real NICs", local)):
            sizes = of_a_rank(of_device, world_size=ranks, ranks_per_node=local, num_nics=nics)
            of_rank = sum(sizes.values()) / MIB
            rings = sizes.get("rings of software NICs", 0) / MIB
            lines.append(
                f"{on_host * of_rank:12.1f} MiB  tensors on {device}, {kind}: {on_host} ranks of "
                f"{of_rank:.1f} MiB" + (f", {rings:.1f} of them rings" if rings else "")
            )
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m moe_p2p plan",
        description="Memory of one rank, region by region, all steps in flight together.",
        allow_abbrev=False,  # --weight of another plan would pass for --weights of this one
    )
    add = parser.add_argument
    add("--kv", action="store_true", help="a plan of KV transfer instead: see plan --kv --help")
    add("--weights", metavar="MODEL", help="of a weight update instead: see plan --weights --help")
    add("--ranks", type=int, default=16, help="W")
    add("--ranks-per-node", type=int, default=8, help="L")
    add("--tokens", type=int, default=128, help="largest T of any rank and call")
    of_step = "tokens per step; larger calls run in several"
    add("--chunk-tokens", type=int, help=f"{of_step} (--tokens, at most {DEFAULT_CHUNK_TOKENS})")
    add("--hidden", type=int, default=7168, help="H")
    add("--topk", type=int, default=8, help="K")
    add("--experts", type=int, default=256, help="E")
    add("--steps", type=int, default=2, help="steps in flight")
    add("--dtype", choices=DTYPES, default="bf16", help="widest type dispatched")
    add(
        "--combine-dtype",
        choices=("bf16", "fp16", "fp32"),
        help="widest type combined; partials need no more (--dtype; fp8: bf16)",
    )
    add("--nics", type=int, default=2, help="software NICs of a rank; 0: none")
    add("--transport-settings", default="", help="of the software NIC, as ring_kib=256")
    add("--extra-bytes", type=int, default=0, help="extras of one token, rounded up to 16 each")
    return parser
