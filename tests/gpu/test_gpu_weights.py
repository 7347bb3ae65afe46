"""Weights between an engine's captures: what a thread of their own computes on the engine's GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from moe_p2p import Engine
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, WeightTrainer

pytestmark = pytest.mark.gpu

BF16, SHAPE, UPDATES = "bfloat16", (64, 128), 5


def values(version: int, device: torch.device) -> Tensor:
    return torch.full(SHAPE, float(version), dtype=torch.bfloat16, device=device)


@pytest.mark.timeout(400)
def test_finalize_computes_on_the_gpu_of_the_tensors_while_graphs_are_captured() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(0)
    cpu = torch.device("cpu")
    where: list[tuple[int, bool]] = []

    def finalize(received: Any, tensors: Any) -> None:
        default = torch.cuda.current_stream() == torch.cuda.default_stream()
        where.append((torch.cuda.current_device(), default))
        doubled = torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda")
        torch.mul(received["w"], 2, out=doubled)
        tensors["w"].copy_(doubled)

    source = WeightLayout([Param("w", SHAPE, BF16, (0,))], 1)
    target = WeightLayout([Param("w", SHAPE, BF16, (0,), finalize="doubled")], 1)
    store, live, errors = HashStore(), values(0, device), list[BaseException]()
    captured = torch.zeros(SHAPE, device=device)

    def train() -> None:
        try:
            # On the host: a trainer's own kernels beside a capture are its caller's concern.
            with (
                Engine() as engine,
                WeightTrainer(engine, store, source, 0, {"w": values(0, cpu)}) as trainer,
            ):
                for version in range(1, UPDATES + 1):
                    trainer.update(version, {"w": values(version, cpu)})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with (
            Engine(gpu=device.index) as engine,
            WeightEngineRank(
                engine, store, target, 0, {"w": live}, finalize=finalize, poison=True
            ) as engine_rank,
        ):
            while engine_rank.version != UPDATES and not errors:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.device(device), torch.cuda.graph(graph):
                    torch.add(live.float(), 1, out=captured)
                engine_rank.step()
                graph.replay()
            torch.cuda.synchronize(device)
            assert not errors
            assert torch.equal(live, values(2 * UPDATES, device))
            graph.replay()
            torch.cuda.synchronize(device)
            assert bool((captured == 2 * UPDATES + 1).all())
    finally:
        thread.join(60)
    assert set(where) == {(device.index, False)}
