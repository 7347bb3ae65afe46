"""`python -m moe_p2p compile`: kernels of given shapes into a folder, ahead of the first call.

Needs NVRTC and no GPU. Processes that are to use the folder have the same version of moe_p2p and of
NVRTC, installed at the same path, as in a container made of one image.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moe_p2p import env
from moe_p2p.errors import MoeP2pError, require
from moe_p2p.machine import jit, tuned
from moe_p2p.machine.transport import VERBS
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.gpu.kernels import alone_kernels, combine_kernel, dispatch_kernel
from moe_p2p.moe.gpu.launch_shape import Chosen
from moe_p2p.moe.gpu.prepared import usual_calls, variants_of
from moe_p2p.moe.gpu.shape_macros import of_changing, shape_macros
from moe_p2p.moe.layouts import NAMES
from moe_p2p.moe.options import (
    PARTIALS,
    QUANTIZE,
    SCALE_FORMATS,
    DispatchOptions,
    partials_of,
    rows_of,
    scale_format_of,
    variant_of,
)
from moe_p2p.moe.tuned import Shared
from moe_p2p.tools.option_types import Parser, each_at_least_0, each_at_least_1, parsed_for_model

NODE_RANKS = 8
_USUAL_ARCH = "sm_90a"


def main(arguments: list[str]) -> int:
    """Compiles; exit code 1 when a kernel does not compile or cannot be kept, 2 for bad input."""
    given = parsed_for_model(_parser(), arguments)
    if given.into is not None:
        env.use_cache_folder(given.into.absolute())
    try:
        shape = given.experts, given.hidden, given.topk
        if None in shape:
            print("compile: give --model, or --experts, --hidden and --topk")
            return 2
        wanted = list(dict.fromkeys(_identity(kernel) for kernel in _kernels(given, *shape)))
        arch = given.arch or _arch()
        require(given.jobs is None or given.jobs > 0, f"--jobs is {given.jobs}, must be above 0")
    except MoeP2pError as error:
        print(f"compile: {error}")
        return 2
    threads = given.jobs or len(os.sched_getaffinity(0))
    print(f"{len(wanted)} kernels for {arch}, {threads} at a time, into {env.cache_folder()}")
    with ThreadPoolExecutor(threads) as pool:
        ends = list(pool.map(lambda each: _compile(each[0], dict(each[1]), arch), wanted))
    for why, count in Counter(filter(None, ends)).items():
        print(f"compile: {count} of {len(wanted)} kernels: {why}")
    return 1 if any(ends) else 0


def _identity(kernel: Kernel) -> tuple[str, tuple[tuple[str, int], ...]]:
    return kernel.source, tuple(sorted(kernel.macros.items()))


def _compile(source: str, macros: dict[str, int], arch: str) -> str:
    """Prints what was compiled; returns what went wrong."""
    began = time.monotonic()
    try:
        compiled = jit.compile_only(source, macros, arch)
        kept = jit.is_compiled(source, macros, arch)
    except MoeP2pError as error:
        return str(error)
    usage = next(iter(compiled.usage.values()), None)
    used = ""
    if usage is not None:
        spilled = usage.spill_store_bytes + usage.spill_load_bytes
        used = f"{usage.registers:3} registers, {spilled:4} B spilled, "
    took = "was there" if compiled.cached else f"{time.monotonic() - began:.1f} s"
    kernel, tokens = source.removesuffix(".cu"), macros["MOE_P2P_CHUNK_TOKENS"]
    end = "" if kept else "; NOT KEPT: the folder cannot be written"
    size = f"{len(compiled.cubin) >> 10:4} KiB"
    print(f"  {kernel:8} step of {tokens:5} tokens, {size}, {used}{took}{end}", flush=True)
    return "" if kept else f"{env.cache_folder()} cannot be written"


def _kernels(given: argparse.Namespace, experts: int, hidden: int, topk: int) -> Iterator[Kernel]:
    """Yields what AllToAll prepares for these shapes, and dispatches with the options given."""
    local = given.ranks_per_node or math.gcd(given.ranks, NODE_RANKS)
    measured = tuned.find()
    shared = Shared.of(measured.shared("", ""))
    for tokens, num_sms in itertools.product(given.tokens, given.num_sms):
        config = AllToAllConfig(
            num_experts=experts,
            hidden_dim=hidden,
            topk=topk,
            max_tokens=tokens,
            chunk_tokens=min(tokens, given.chunk_tokens or tokens),
            num_sms=num_sms or None,
            mask_lost_ranks=given.masks,
            lost=given.lost,
        )
        config = shared.on_gpu(config, given.ranks, local, VERBS)  # nodes have NICs
        shape = shape_macros(config, world_size=given.ranks, ranks_per_node=local, bulk=shared.bulk)
        if given.elastic:
            shape |= of_changing(config)
        yield from alone_kernels(shape)
        chosen = shared.chosen(measured)
        for kernel in _of_calls(given, config, shape, chosen):
            yield from variants_of(kernel)


def _of_calls(
    given: argparse.Namespace,
    config: AllToAllConfig,
    shape: dict[str, int],
    chosen: Chosen,
) -> Iterator[Kernel]:
    dispatches, combines = usual_calls(config)
    options = DispatchOptions(
        layout=given.layout, quantize=given.quantize, scale_format=given.scale_format
    )
    dispatches.append((config.dtype, options.number, 0))
    if given.fp8:
        fp8 = DispatchOptions(layout=given.layout)
        dispatches.append((torch.float8_e4m3fn, fp8.number, 0))
    for dtype, number, _ in dispatches:
        variant = variant_of(number)
        yield dispatch_kernel(
            shape,
            dtype,
            quantize=bool(variant & QUANTIZE),
            scale_format=scale_format_of(variant),
            layout=rows_of(variant).kernel,
            num_sms=config.num_sms,
            tuned=chosen.launches,
            steps=chosen.bulk,
        )
    if given.combine_dtype:
        bf16, partials = torch.bfloat16, partials_of(given.combine_dtype)
        combines.append((bf16, bf16, False, partials))
    for y_dtype, out_dtype, by_topk, partials in combines:
        yield combine_kernel(
            shape,
            y_dtype,
            out_dtype,
            by_topk=by_topk,
            partials=partials,
            num_sms=config.num_sms,
            tuned=chosen.launches,
            steps=chosen.bulk,
        )


def _arch() -> str:
    """Of this machine's GPU, else the usual one."""
    return jit.arch_of(0) if torch.cuda.is_available() else _USUAL_ARCH


def _parser() -> Parser:
    parser = Parser(
        prog="python -m moe_p2p compile",
        description="Compiles what an AllToAll of these shapes prepares when it is made, and "
        "dispatches with the options given. Set MOE_P2P_KERNELS to the folder where it is used.",
    )
    add = parser.add_argument
    add("--experts", type=int, help="E; needed, as the next two, without --model")
    add("--hidden", type=int, help="H")
    add("--topk", type=int, help="K")
    add("--ranks", type=int, default=8, help="W")
    add("--ranks-per-node", type=int, help="L (the most up to 8 that divide W)")
    add(
        "--tokens",
        type=each_at_least_1,
        default=[128],
        help="largest T of any rank, several with commas",
    )
    add("--chunk-tokens", type=int, help="tokens per step (T)")
    add(
        "--num-sms",
        type=each_at_least_0,
        default=[0],
        help="as in AllToAllConfig, several; 0: all (0)",
    )
    add("--layout", choices=NAMES, default=NAMES[0], help="of rows")
    add("--quantize", action="store_true", help="dispatches that quantize, in that layout")
    add("--scale-format", choices=SCALE_FORMATS, default=SCALE_FORMATS[0], help="with --quantize")
    add("--fp8", action="store_true", help="also dispatches of fp8 given by the caller")
    add("--combine-dtype", choices=PARTIALS, help="also combines of it, of bf16 (none)")
    add("--masks", action="store_true", help="with mask_lost_ranks (Buffer(enable_shrink=True))")
    add("--lost", choices=("poison", "drop"), help="as in AllToAllConfig; nixl_ep: drop (none)")
    add(
        "--elastic",
        action="store_true",
        help="of a world that changes (members=, join=, nixl_ep), of at most --ranks",
    )
    add("--arch", help="as sm_90a (of this machine's GPU, without one sm_90a)")
    add("--into", type=Path, help="folder (the one of MOE_P2P_CACHE)")
    add("--jobs", type=int, help="kernels at a time (cores of this process)")
    return parser
