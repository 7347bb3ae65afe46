"""A rank of a CollectiveX cell on CPUs: its adapter, its inputs and its oracle, as they are.

torch.cuda.synchronize, which they call everywhere, does nothing, and torch.compile gives what it is
given; nothing else is changed. `import deep_ep` finds ours.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import moe_p2p.deep_ep
from tests.support.ranks import Rank

ADAPTERS = {"deepep-v2": "ep_deepep_v2", "uccl-ep": "ep_uccl", "moe-p2p": "ep_moe_p2p"}
ROOT = Path(__file__).resolve().parents[2]


class Cell(NamedTuple):
    backend: str
    mode: str
    precision: str
    tokens: tuple[int, ...]
    hidden: int = 512
    topk: int = 4
    experts: int = 16


class Verdict(NamedTuple):
    tokens: int
    passed: bool
    error: float  # largest relative one of combine
    report: dict[str, Any]  # the oracle's


def arguments_of(cell: Cell, world_size: int) -> types.SimpleNamespace:
    """Of run_ep.py, for ranks of one scale-up domain."""
    return types.SimpleNamespace(
        mode=cell.mode,
        precision=cell.precision,
        phase="decode",
        tokens_ladder=" ".join(map(str, cell.tokens)),
        hidden=cell.hidden,
        topk=cell.topk,
        experts=cell.experts,
        routing="uniform",
        seed=67,
        scale_up_domain=world_size,
        gpus_per_node=world_size,
        scale_up_transport="nvlink",
        scale_out_transport="none",
        scope="scale-up",
        runner="cpu",
        case_id="cell",
        suite="ep-core",
    )


def judge(rank: Rank, folder: str, scratch: str, cell: Cell) -> list[Verdict]:
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.compile = lambda made=None, **_: made or (lambda given: given)  # type: ignore[assignment]
    moe_p2p.deep_ep.install()
    sys.path[:0] = [f"{folder}/bench", str(ROOT / "contrib" / "collectivex")]
    os.environ["EP_JIT_CACHE_DIR"] = f"{scratch}/jit"
    store = dist.FileStore(f"{scratch}/store", rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    harness, routing = importlib.import_module("ep_harness"), importlib.import_module("routing")
    adapter = importlib.import_module(ADAPTERS[cell.backend])
    (kind,) = (
        each
        for each in vars(adapter).values()
        if isinstance(each, type) and getattr(each, "name", "") == cell.backend
    )
    arguments = arguments_of(cell, rank.world_size)
    backend = kind(arguments, rank.rank, rank.world_size, rank.rank, torch.device("cpu"))
    spec = backend.make_inputs(arguments)
    backend.create_buffer(spec)
    verdicts = []
    for tokens in spec.ladder:
        point = spec.points[tokens]
        problem = backend.make_problem(
            tokens, point.topk_idx, point.topk_weights, point.activations
        )
        backend.warm(problem, 2)
        report = harness._run_expert_oracle(
            torch,
            routing,
            backend,
            problem,
            point.global_idx,
            point.global_weights,
            rank.rank,
            cell.experts // rank.world_size,
            rank.world_size,
            arguments.seed,
        )
        error = report["max_elementwise_relative_error"]
        verdicts.append(Verdict(tokens, report["passed"], error, report))
    assert backend.finalize(0) == 0
    return verdicts
