"""Machine code, registers and spills of the kernels of usual calls. Needs NVRTC, and no GPU.

    python benchmarks/code_sizes.py [--tokens 8 32 128 512] [--ranks 8] [--num-sms 24]

DeepSeek-V3's shape: H 7168, top-8 of 256, one node. Code: KiB of all functions of the cubin.
Spills: bytes stored and loaded, as ptxas counts them. --kernel picks rows by a part
of their name.
"""

from __future__ import annotations

import argparse
import struct
import time
from collections.abc import Iterator

import torch

from moe_p2p import AllToAllConfig
from moe_p2p.machine import jit
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.gpu.kernels import combine_kernel, dispatch_kernel
from moe_p2p.moe.gpu.prepared import variants_of
from moe_p2p.moe.gpu.shape_macros import shape_macros
from moe_p2p.moe.layouts import NAMES

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def code_bytes(cubin: bytes) -> int:
    """Sum of the sections of machine code of an ELF file."""
    offset, size, count, names_at = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<HHH", cubin, 58),
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    names = sections[names_at][4]
    return sum(s[5] for s in sections if cubin[names + s[0] :].startswith(b".text."))


def kernels_of(tokens: int, num_ranks: int, num_sms: int | None) -> Iterator[tuple[str, Kernel]]:
    """Yields names and kernels of calls of this many tokens, in one chunk."""
    config = AllToAllConfig(
        num_experts=256,
        hidden_dim=7168,
        topk=8,
        max_tokens=tokens,
        chunk_tokens=tokens,
        num_sms=num_sms,
    )
    shape = shape_macros(config, world_size=num_ranks, ranks_per_node=num_ranks)
    kernels = {
        "dispatch": dispatch_kernel(shape, BF16, quantize=True, num_sms=num_sms),
        "dispatch by rank, fp8": dispatch_kernel(
            shape, FP8, quantize=False, layout=NAMES.index("by_rank"), num_sms=num_sms
        ),
        "combine": combine_kernel(shape, BF16, BF16, num_sms=num_sms),
    }
    for name, kernel in kernels.items():
        general, plain, *_ = variants_of(kernel)
        yield f"{name}, plain", plain
        yield f"{name}, general", general


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128, 512, 4096])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--num-sms", type=int)
    parser.add_argument("--kernel", default="")
    args = parser.parse_args()
    print("| kernel | T | threads x blocks | registers | code, KiB | spills, B | seconds |")
    print("|---|---|---|---|---|---|---|")
    for tokens in args.tokens:
        for name, kernel in kernels_of(tokens, args.ranks, args.num_sms):
            if args.kernel not in name:
                continue
            began, macros = time.monotonic(), kernel.macros
            compiled = jit.compile_only(kernel.source, macros, "sm_90a")
            usage, took = compiled.usage[kernel.entry], time.monotonic() - began
            threads, blocks = macros["MOE_P2P_BLOCK_THREADS"], macros["MOE_P2P_BLOCKS_PER_SM"]
            print(
                f"| {name} | {tokens} | {threads} x {blocks} | {usage.registers} | "
                f"{code_bytes(compiled.cubin) / 1024:.0f} | "
                f"{usage.spill_store_bytes}, {usage.spill_load_bytes} | "
                f"{'-' if compiled.cached else f'{took:.1f}'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
