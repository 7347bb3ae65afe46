"""Dispatch and combine on the GPUs of one node: chained pairs, eager and replayed from a graph.

    python benchmarks/bench_gpu.py --ranks 8 --tokens 8,32,128 --json FILE

The figure is the period of a chain of pairs, on the slowest rank: nothing but the package's kernels
between two events, a device-side delay first so that the host runs ahead. One row per number of
tokens and way of launching.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_p2p import AllToAll, AllToAllConfig, Dispatched, device_kernels


def routing(tokens: int, topk: int, experts: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, experts, generator=generator).topk(topk, dim=1).indices


def period_us(run: Any, repeats: int) -> float:
    """Time of one call of run() in a chain of `repeats`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats


def measure_calls(
    comm: AllToAll, tokens: int, arguments: argparse.Namespace, meet: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Periods of a pair in microseconds, eager and replayed from a graph."""
    x = torch.randn(tokens, arguments.hidden, device="cuda").bfloat16()
    idx = routing(tokens, arguments.topk, arguments.experts, comm.rank).cuda()
    weights = torch.full(idx.shape, 1 / arguments.topk, device="cuda")
    shape = comm.dispatch(x, idx, weights, quantize=arguments.fp8)
    y = torch.zeros(shape.x.shape, dtype=torch.bfloat16, device="cuda")
    comm.combine(y, shape)

    def dispatch() -> Dispatched:
        return comm.dispatch(x, idx, weights, quantize=arguments.fp8)

    def pair() -> None:
        comm.combine(y, dispatch())

    for _ in range(5):
        pair()
    torch.cuda.synchronize()
    meet()
    eager = [period_us(pair, 20) for _ in range(9)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(20):
            pair()
    torch.cuda.synchronize()
    meet()
    replayed = [period_us(graph.replay, 1) / 20 for _ in range(15)]
    meet()
    return sorted(eager), sorted(replayed)


def measure(rank: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.cuda.set_device(rank)
    device_kernels.NUM_TOKEN_BLOCKS, device_kernels.NUM_SLOT_BLOCKS = arguments.blocks
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    rounds = 0

    def meet() -> None:
        nonlocal rounds
        rounds += 1
        if store.add(f"come/{rounds}", 1) == arguments.ranks:
            store.set(f"go/{rounds}", "")
        store.wait([f"go/{rounds}"])  # as long as the store waits: five minutes

    for tokens in arguments.tokens:
        config = AllToAllConfig(
            num_experts=arguments.experts,
            hidden_dim=arguments.hidden,
            topk=arguments.topk,
            max_tokens=tokens,
            chunk_tokens=tokens,
            device="cuda",
            num_sms=arguments.sms,
        )
        with AllToAll(store, config, rank=rank, world_size=arguments.ranks) as comm:
            results.put((rank, tokens, *measure_calls(comm, tokens, arguments, meet)))
            meet()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument(
        "--tokens", type=lambda text: [int(t) for t in text.split(",")], default=[8, 32, 128]
    )
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=int)
    parser.add_argument("--bf16", dest="fp8", action="store_false")
    parser.add_argument(
        "--blocks",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[device_kernels.NUM_TOKEN_BLOCKS, device_kernels.NUM_SLOT_BLOCKS],
        help="most blocks of the token half and of the slot half of a kernel",
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, server.port, arguments, results))
        for rank in range(arguments.ranks)
    ]
    for process in ranks:
        process.start()
    rows = []
    for tokens in arguments.tokens:
        got = [results.get(timeout=120) for _ in ranks]

        def slowest(which: int, got: list[Any] = got) -> float:
            return max(r[which][len(r[which]) // 2] for r in got)

        row = {
            "tokens": tokens,
            "ranks": arguments.ranks,
            "fp8": arguments.fp8,
            "sms": arguments.sms,
            "blocks": arguments.blocks,
            "eager_pair_us": round(slowest(2), 2),
            "graph_pair_us": round(slowest(3), 2),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    for process in ranks:
        process.join()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
