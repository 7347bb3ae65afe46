"""vLLM's real NixlEPAll2AllManager and NixlEPPrepareAndFinalize over moe_p2p.nixl_ep, on CPU ranks:
grow, warm up alone, lose a rank, shrink, replace it, shrink again.

A manager is made for each size, as vLLM's groups are; each size has a store of its own. The calls
are in the order of elastic_ep/elastic_execute.py: stage, warm up, commit.
"""

from __future__ import annotations

import os
import signal
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from tests.engines import vllm_ranks
from tests.support.ranks import DiedError, Rank, run_processes

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]

MOST, EACH, TOKENS, HIDDEN, TOPK = 4, 2, 6, 2048, 3  # ranks, experts of a rank, tokens of a rank
# Backends that vLLM asks for before this one.
OTHERS = (
    *("use_deepep_ht_kernels", "use_deepep_ll_kernels", "use_deepep_v2_kernels"),
    *("use_mori_kernels", "use_moonep_kernels", "use_ag_rs_all2all_kernels"),
    *("use_fi_nvl_two_sided_kernels", "use_fi_nvl_one_sided_kernels"),
)
BLOCKS = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}


class Layer:
    """A MoE layer of one rank: vLLM's prepare and finalize, experts of torch."""

    def __init__(self, rank: int, store: Any) -> None:
        from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager

        self.rank, self._store, self._kind = rank, store, NixlEPAll2AllManager
        self._kind._mask = torch.zeros(MOST, dtype=torch.int32)  # it makes one on a GPU
        self._layers: dict[bool, Any] = {}

    def manager(self, size: int, generation: str) -> Any:
        """Of a group of `size` ranks."""
        from vllm.distributed.utils import StatelessProcessGroup

        group = types.SimpleNamespace(rank=lambda: self.rank, size=lambda: size)
        store = PrefixStore(f"{generation}, {size} ranks", self._store)
        met = StatelessProcessGroup(rank=self.rank, world_size=size, store=store)
        return self._kind(group, met)

    def make(self, manager: Any) -> None:
        from vllm.model_executor.layers.fused_moe import all2all_utils
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

        moe = types.SimpleNamespace(
            moe_parallel_config=types.SimpleNamespace(
                use_passthrough_all2all=False, use_all2all_kernels=True, sp_size=1
            ),
            **dict.fromkeys(OTHERS, False),
            use_nixl_ep_kernels=True,
            max_num_tokens=TOKENS,
            hidden_dim=HIDDEN,
            num_local_experts=EACH,
        )
        for fp8, quantized in ((False, {}), (True, BLOCKS)):
            self.config = FusedMoEQuantConfig.make(**quantized)
            self._layers[fp8] = (
                all2all_utils.maybe_make_prepare_finalize(
                    moe, self.config, all2all_manager=manager
                ),
                self.config,
            )

    def inputs(self, rank: int, step: int, ranks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens for experts of these ranks."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        experts = torch.tensor([e for r in ranks for e in range(EACH * r, EACH * (r + 1))])
        scores = torch.rand(TOKENS, len(experts), generator=generator)
        ids = experts[scores.topk(min(TOPK, len(experts))).indices]
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
        return x, ids, torch.rand(ids.shape, generator=generator) + 0.1

    def step(self, step: int, ranks: list[int], lost: frozenset[int] = frozenset()) -> None:
        """Compared with the sum of the experts of ranks that are not lost."""
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

        x, ids, weights = self.inputs(self.rank, step, ranks)
        fp8 = step % 2 == 1
        layer, config = self._layers[fp8]
        assert layer.num_dispatchers() == MOST
        rows, scales, metadata, _, _ = layer.prepare(
            x, weights, ids, MOST * EACH, None, False, config
        )
        assert rows.shape == (EACH, MOST * TOKENS, HIDDEN)
        counts = metadata.expert_num_tokens
        wide = rows.float()
        if fp8:
            wide = (wide.unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)
        y = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
        for local in range(EACH):
            number = EACH * self.rank + local
            wanted = [self.inputs(r, step, ranks)[1] for r in ranks if r not in lost]
            assert int(counts[local]) == sum(int((each == number).sum()) for each in wanted)
            y[local, : counts[local]] = (wide[local, : counts[local]] * (number + 1)).to(y.dtype)
        out = torch.empty_like(x)
        layer.finalize(out, y, weights, ids, False, reduce.TopKWeightAndReduceDelegate())
        gone = torch.isin(ids // EACH, torch.tensor(sorted(lost), dtype=torch.int64))
        factor = (weights.masked_fill(gone, 0) * (ids + 1)).sum(1, keepdim=True)
        # Four roundings of 2^-9 (row, partial sum, sum), of e4m3 2^-4 of a value.
        near = {"rtol": 2**-4, "atol": 2.0} if fp8 else {"rtol": 2**-6, "atol": 1e-2}
        torch.testing.assert_close(out.float(), x.float() * factor, **near)  # type: ignore[arg-type]


def together(rank: Rank, name: str, count: int) -> None:
    if rank.store.add(f"came to {name}", 1) == count:
        rank.store.set(name, "")
    rank.store.wait([name])


def comes(layer: Layer, rank: Rank, name: str, members: list[int]) -> Any:
    """A worker that vLLM starts for a larger size: it connects, and warms up alone."""
    manager = layer.manager(len(members), name)
    layer.make(manager)
    with manager.mask_remote_ranks():
        assert manager.query_active_mask().sum() == len(members) - 1
        for step in range(3):
            layer.step(step, [layer.rank])
    together(rank, name, len(members))
    manager.commit_ep_size()
    return manager


def grows(layer: Layer, rank: Rank, name: str, before: list[int], members: list[int]) -> Any:
    manager = layer.manager(len(members), name)
    manager.stage_ep_size()
    for step in range(3, 6):
        layer.step(step, before)
    together(rank, name, len(members))
    manager.commit_ep_size()
    return manager


def shrinks(layer: Layer, name: str, size: int) -> Any:
    manager = layer.manager(size, name)
    manager.stage_ep_size()
    manager.commit_ep_size()
    return manager


def live(rank: Rank) -> str:
    vllm_ranks.begin(rank, as_deep_ep=False)
    from moe_p2p import nixl_ep

    nixl_ep.install()
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    config = vllm_ranks.config()
    config.parallel_config.enable_elastic_ep = True
    config.parallel_config.elastic_ep_max_dp_size = MOST
    config.parallel_config.data_parallel_size = 2
    seat = rank.rank if rank.rank < MOST else 3  # the last process takes the lost one's seat
    if seat in (2, 3):
        config.parallel_config.data_parallel_size = MOST
    vllm_ranks.use(config)
    layer, everyone = Layer(seat, rank.store), [0, 1, 2, 3]
    if rank.rank == MOST:
        rank.store.wait(["seat 3 is lost"])
        manager = comes(layer, rank, "replaced", everyone)
    elif seat < 2:
        manager = layer.manager(2, "first")
        layer.make(manager)
        for step in range(3):
            layer.step(step, [0, 1])
        manager = grows(layer, rank, "grown", [0, 1], everyone)
    else:
        manager = comes(layer, rank, "grown", everyone)
    if rank.rank < MOST:
        for step in range(6, 9):
            layer.step(step, everyone)
        assert not manager.query_fault()
        if seat == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range(9, 12):
            layer.step(step, everyone, frozenset({3}))
        assert manager.query_fault()
        assert manager.query_active_mask().tolist() == [0, 0, 0, 1]
        manager = shrinks(layer, "without seat 3", 3)
        for step in range(12, 14):
            layer.step(step, [0, 1, 2])
        if seat == 0:
            rank.store.set("seat 3 is lost", "")
        manager = grows(layer, rank, "replaced", [0, 1, 2], everyone)
    for step in range(14, 17):
        layer.step(step, everyone)
    assert manager.query_active_mask().tolist() == [0] * MOST
    if seat >= 2:
        return "left"
    manager = shrinks(layer, "small again", 2)
    for step in range(17, 20):
        layer.step(step, [0, 1])
    manager.clean_buffers()
    layer.step(20, [0, 1])
    manager.destroy()
    return "done"


def test_its_manager_grows_shrinks_and_replaces_a_lost_rank() -> None:
    results = run_processes(MOST + 1, live, return_errors=True)
    assert isinstance(results.pop(3), DiedError), results
    assert results == ["done", "done", "left", "left"]
