"""SGLang's NixlEPDispatcher, ElasticEPStateManager and EPLBManager over moe_p2p.nixl_ep, on CPU
ranks: a group grows; a rank is killed, masked, and its experts move to the others.

SGLang admits ranks to torch's default group by Mooncake's process group (`mooncake.pg`), which is
compiled for one torch with CUDA, and model_runner.py imports its servers. So these are not run:
`try_admit_scale_ranks`, `try_recover_ranks`, `join_process_groups`, and with them a new process of
a lost rank; the calls of `_finalize_scale_up` are made here, in its order.
"""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import sglang_layers
from tests.support.ranks import DiedError, Rank, run_processes

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(400)]

MOST, SLOTS, LOGICAL, LAYERS = 3, 4, 7, 2
TOKENS, HIDDEN, TOPK = 6, 2048, 3


class Recorder:
    """What SGLang's recorder says of the load, which is that of a program and not of a test."""

    recording = True

    def on_deepep_dispatch_low_latency(self, counts: Tensor) -> None:
        assert counts.shape == (SLOTS,)

    def dump_record(self, output_mode: str) -> dict[str, Any]:
        load = torch.ones(1, LAYERS, LOGICAL, dtype=torch.int64)
        load[..., 0] = 1000  # so it gets all replicas, and others are on one rank alone
        return {"logical_count": load, "average_utilization_rate_over_window": None}


def begin(rank: Rank, ranks: int, offset: int) -> None:
    """SGLang's files on a CPU. ranks: of this process's launch; offset: of its ranks in all."""
    from moe_p2p import nixl_ep

    alone = Rank(0, 1, dist.HashStore())
    sglang_layers.begin(rank if ranks > 1 else alone)
    nixl_ep.install()
    from moe_p2p.integrations.moe import sglang_eplb

    sglang_eplb.install()
    from sglang.srt.elastic_ep import elastic_ep
    from sglang.srt.environ import envs
    from sglang.srt.eplb import eplb_manager, expert_location, expert_location_updater
    from sglang.srt.eplb.eplb_algorithms import EplbAlgorithm
    from sglang.srt.layers.moe.token_dispatcher import nixl

    envs.SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.set(TOKENS)
    envs.SGLANG_NIXL_EP_BF16_DISPATCH.set(True)
    moe = types.SimpleNamespace(
        elastic_ep_backend="nixl",
        ep_dispatch_algorithm=None,
        ep_join_mode="scale" if offset else None,
        ep_num_redundant_experts=MOST * SLOTS - LOGICAL,
        eplb_algorithm=EplbAlgorithm.elasticity_aware.name,
        eplb_rebalance_layers_per_chunk=1,
        eplb_rebalance_num_iterations=3,
        expert_distribution_recorder_buffer_size=1,
        is_ep_joiner=bool(offset),
        moe_a2a_backend="nixl",
    )
    parallel = types.SimpleNamespace(
        elastic_ep_initial_size=None,
        ep_join_rank_offset=offset,
        ep_size=MOST,
        max_ep_size=MOST,
        max_world_size=MOST,
        nnodes=1,
        tp_rank=dist.get_rank(),
        tp_size=dist.get_world_size(),
    )
    model = types.SimpleNamespace(model_path="model", load_format="auto")
    buffers, store = types.SimpleNamespace(buffers={}, expert_location_metadata=None), rank.store
    recorder = Recorder()
    said: dict[str, Any] = {
        "get_exec": lambda: types.SimpleNamespace(moe=moe),
        "get_parallel": lambda: parallel,
        "get_model": lambda: model,
        "get_resources": lambda: buffers,
        "get_device": lambda: types.SimpleNamespace(device="cpu"),
        "get_global_tcp_store": lambda: store,
        "get_global_expert_distribution_recorder": lambda: recorder,
    }
    for module in (elastic_ep, eplb_manager, expert_location, expert_location_updater, nixl):
        for name, value in said.items():
            if hasattr(module, name):
                setattr(module, name, value)
    wanted = types.SimpleNamespace(num_layers=LAYERS, num_logical_experts=LOGICAL, num_groups=None)
    expert_location.ModelConfigForExpertLocation.from_model_config = staticmethod(lambda _: wanted)
    # What follows is for want of a GPU.
    elastic_ep.ElasticEPStateManager._select_device = staticmethod(lambda: torch.device("cpu"))
    zeros: Any = torch.zeros
    nixl.torch = types.SimpleNamespace(**vars(torch))
    nixl.torch.zeros = lambda *given, device, **more: zeros(*given, **more)
    torch.get_device_module = lambda *_: types.SimpleNamespace(  # type: ignore[assignment]
        synchronize=lambda: None, empty_cache=lambda: None
    )
    elastic_ep.ElasticEPStateManager.init(None)


class Model:
    """Layers whose slots hold a number of their own for each expert."""

    def __init__(self, seat: int) -> None:
        from sglang.srt.eplb import expert_location
        from sglang.srt.layers.moe.token_dispatcher.nixl import NixlEPDispatcher

        self.seat, self.loaded = seat, 0
        self.call = NixlEPDispatcher(
            dist.group.WORLD,
            TOPK,
            num_experts=MOST * SLOTS,
            num_local_experts=SLOTS,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
        )
        metadata = expert_location.ExpertLocationMetadata.init_trivial(None, seat)
        expert_location.set_global_expert_location_metadata(metadata)
        self.where = metadata
        self.routed_experts_weights_of_layer = {
            layer: [torch.zeros(SLOTS, 8)] for layer in range(LAYERS)
        }
        for layer in range(LAYERS):
            self.load(layer, range(LOGICAL))

    def generate_weight_name_filter(self, missing: dict[int, list[int]]) -> Any:
        return missing

    def load(self, layer: int, experts: Iterable[int]) -> None:
        """Of these experts what this rank's slots have; as from a disk."""
        chosen = set(experts)
        held = self.where.physical_to_logical_map_cpu[layer].tolist()
        weights = self.routed_experts_weights_of_layer[layer][0]
        for slot, expert in enumerate(held[self.seat * SLOTS : (self.seat + 1) * SLOTS]):
            if expert in chosen:
                weights[slot] = 10 * layer + expert + 1

    def load_missing(self, path: str, load_format: str, *, weight_name_filter: Any) -> None:
        for layer, experts in weight_name_filter.items():
            self.loaded += len(experts)
            self.load(layer, experts)

    def step(self, step: int, ranks: range, lost: frozenset[int] = frozenset()) -> None:
        """ranks: whose slots tokens go to. Sums are without those of lost ranks."""
        from sglang.srt.layers.moe.token_dispatcher.nixl import NixlEPCombineInput

        generator = torch.Generator().manual_seed(100 * step + self.seat)
        for layer in range(LAYERS):
            slots = self.where.logical_to_all_physical_map[layer]
            ids = torch.stack([torch.randperm(LOGICAL)[:TOPK] for _ in range(TOKENS)])
            physical = torch.empty_like(ids)
            for token, k in torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOPK)).tolist():
                there = [s for s in slots[ids[token, k]].tolist() if s >= 0 and s // SLOTS in ranks]
                physical[token, k] = there[(token + self.seat) % len(there)] if there else -1
            x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
            weights = torch.rand(ids.shape, generator=generator) + 0.1
            got = self.call.dispatch(
                x, types.SimpleNamespace(topk_ids=physical, topk_weights=weights)
            )
            y = torch.full(got.hidden_states.shape, float("nan"), dtype=torch.bfloat16)
            held = self.routed_experts_weights_of_layer[layer][0]
            for slot, count in enumerate(got.masked_m.tolist()):
                if count:
                    rows = got.hidden_states[slot, :count].float() * held[slot, 0]
                    y[slot, :count] = rows.to(y.dtype)
            out = self.call.combine(NixlEPCombineInput(y, got.topk_ids, got.topk_weights))
            gone = (physical < 0) | torch.isin(physical // SLOTS, torch.tensor([*lost, -1]))
            factor = (weights.masked_fill(gone, 0) * (10 * layer + ids + 1)).sum(1, keepdim=True)
            # Four roundings of 2^-9: row, partial sum, sum.
            torch.testing.assert_close(out.float(), x.float() * factor, rtol=2**-6, atol=5e-2)


def together(rank: Rank, name: str, count: int) -> None:
    if rank.store.add(f"came to {name}", 1) == count:
        rank.store.set(name, "")
    rank.store.wait([name])


def loses_one(rank: Rank) -> int:
    """Returns how many experts it loaded anew."""
    begin(rank, MOST, 0)
    from sglang.srt.elastic_ep import elastic_ep
    from sglang.srt.eplb import eplb_manager
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

    model, everyone = Model(rank.rank), range(MOST)
    manager = eplb_manager.EPLBManager(
        model_config=None,
        get_model=lambda: model,
        get_expert_location_updater=lambda: updater,
        get_expert_backup_client=lambda: None,
        get_weight_updater=lambda: types.SimpleNamespace(
            update_weights_from_disk=model.load_missing
        ),
    )
    updater, state = ExpertLocationUpdater(), elastic_ep.ElasticEPStateManager.instance()
    before = model.where.physical_to_logical_map.clone()
    for step in range(8):  # it balances every three, a layer at a time between two steps
        model.step(step, everyone)
        manager.on_forward_pass_end()
    assert not torch.equal(before, model.where.physical_to_logical_map)
    assert not elastic_ep.maybe_rebalance_after_rank_fault(eplb_manager=manager)
    assert state.active_ranks.tolist() == [1, 1, 1]
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(8, 10):
        model.step(step, everyone, frozenset({2}))
    assert state.active_ranks.tolist() == [1, 1, 0]
    assert elastic_ep.maybe_rebalance_after_rank_fault(eplb_manager=manager)
    assert not elastic_ep.maybe_rebalance_after_rank_fault(eplb_manager=manager)
    there = model.where.logical_to_all_physical_map
    for layer in range(LAYERS):
        for slots in there[layer].tolist():
            assert all(slot < 2 * SLOTS for slot in slots)
            assert any(slot >= 0 for slot in slots)  # each expert is somewhere
    for step in range(10, 14):
        model.step(step, range(2))
    return model.loaded


def test_experts_of_a_lost_rank_move_to_the_others() -> None:
    results = run_processes(MOST, loses_one, return_errors=True, deadline_s=300)
    assert isinstance(results.pop(), DiedError), results
    assert sum(results) == 2 * LAYERS, results  # those that were on the lost rank alone


def grows(rank: Rank) -> str:
    comes = rank.rank == 2
    begin(types.SimpleNamespace(rank=rank.rank, world_size=2, store=rank.store), 1 + (not comes),
          2 * comes)  # type: ignore[arg-type]  # fmt: skip
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager as Manager

    model = Model(rank.rank)
    if not comes:
        for step in range(3):
            model.step(step, range(2))
        assert Manager.instance().active_ranks.tolist() == [1, 1, 0]
        assert Manager.request_scale(MOST)
        assert Manager.begin_scale()
        Manager.mark_joining()
        for step in range(3, 6):
            model.step(step, range(2))
        Manager.mark_configuring_data_plane()
        Manager.instance().active_ranks[2] = 1
        Manager.on_scale(2, MOST)
    together(rank, "grown", MOST)
    for step in range(6, 9):
        model.step(step, range(MOST))
    Manager.commit_scale()
    for step in range(9, 12):
        model.step(step, range(MOST))
    assert Manager.get_effective_ep_size() == MOST
    assert Manager.instance().active_ranks.tolist() == [1] * MOST
    together(rank, "end", MOST)
    return "done"


def test_its_group_grows() -> None:
    assert run_processes(MOST, grows, deadline_s=300) == ["done"] * MOST
