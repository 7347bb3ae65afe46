"""The calls that the benchmark times on GPUs: while one runs, it asks the GPU for nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import CombineOptions
from moe_p2p.bench import cases, check, gpu_calls, systems
from moe_p2p.bench.gpu_layer import LayerParts, Whole
from moe_p2p.bench.options import Options

TINY = Options(ranks=2, ranks_per_node=1, tokens=(6,), hidden=256, topk=2, experts=4)


class Launches(TorchDispatchMode):
    """A communicator of a GPU that does nothing, and what is asked of the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.config = SimpleNamespace(
            device=torch.device("cuda"), on_gpu=True, step_tokens=6, steps_in_flight=2
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append("torch")
        return func(*args, **kwargs or {})

    def dispatch(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        rows, weights = x.new_zeros(12, x.shape[1]), torch.zeros(12)
        counts = torch.zeros(2, dtype=torch.int32)
        self.log.append("call")
        return SimpleNamespace(x=rows, scales=None, row_weights=weights, counts=counts)

    def combine(self, y: torch.Tensor, _: Any, *, options: Any) -> torch.Tensor:
        assert options == CombineOptions()
        out = y.new_zeros(6, y.shape[1])
        self.log.append("call")
        return out

    def synchronize(self) -> None:
        self.log.append("wait")


def test_nothing_is_asked_of_a_gpu_before_a_call_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy or a first launch would keep the software NIC from the driver, and the call would
    # end by its deadline.
    launches = Launches()
    monkeypatch.setattr(systems, "AllToAll", lambda *_: launches)
    monkeypatch.setattr(torch.cuda, "synchronize", launches.synchronize)
    job = cases.make_job(TINY)
    tokens = job.tokens(0, [6, 6])
    system = systems.MoeP2p(TINY, job)
    with launches:
        check.verify(system, tokens[0], check.expect(job, TINY, 0, tokens), exact=True)
        check.verify_whole(system, job, TINY, 0, tokens[0])
        twice = Whole(lambda x, *_: 2 * x)
        parts = LayerParts(products={"twice": twice}, reference=twice, mean=1, weight_bytes=0)
        calls = gpu_calls.package_calls(system, TINY, tokens[0], num_sms=0, layer=parts)
    log = launches.log
    assert log.count("call") == 10
    assert all(log[i + 1] == "wait" for i, what in enumerate(log) if what == "call")

    del log[:]  # while the clock runs nobody waits
    calls.pair()
    assert log == ["call", "call"]


def test_padded_is_for_small_calls() -> None:
    assert gpu_calls.layout_of(TINY, 512) == "padded"
    assert gpu_calls.layout_of(TINY, 513) == "grouped"
    assert gpu_calls.layout_of(replace(TINY, layout="by_rank"), 8) == "by_rank"
