"""Expert load balancing of vLLM and SGLang over the adapters: their own code decides, plans and
swaps; weights move through engines. Every slot is compared after each change.

test_vllm_elastic.py has vLLM's async worker beside steps, and groups that change.
"""

from __future__ import annotations

import os
import random
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_p2p
from tests.engines import sglang_layers, vllm_ranks
from tests.support.ranks import DiedError, Rank, run_processes

pytestmark = pytest.mark.timeout(400)

WORLD, SLOTS, LOGICAL, LAYERS = 3, 4, 7, (1, 3, 4)


def value(layer: int, expert: int, tensor: int) -> int:
    return 100 * tensor + 10 * layer + expert + 1


def layers_of(rank: int, placement: list[int]) -> dict[int, list[Tensor]]:
    """Two tensors of a layer, one of which has an inner order of its own, as vLLM's fp8 scales."""
    found = {}
    for layer in LAYERS:
        w13 = torch.zeros(SLOTS, 5, 3).to(torch.int16)
        w2 = torch.zeros(SLOTS, 8, 2).transpose(1, 2)
        for slot in range(SLOTS):
            for number, each in enumerate((w13, w2)):
                each[slot] = value(layer, placement[rank * SLOTS + slot], number)
        found[layer] = [w13, w2]
    return found


def check(rank: int, weights: dict[int, list[Tensor]], placements: dict[int, list[int]]) -> None:
    for layer, tensors in weights.items():
        for number, each in enumerate(tensors):
            found = [set(each[slot].flatten().tolist()) for slot in range(SLOTS)]
            mine = placements[layer][rank * SLOTS : (rank + 1) * SLOTS]
            assert found == [{value(layer, expert, number)} for expert in mine], (layer, number)


def placements(seed: int) -> Iterator[list[int]]:
    """Each with every expert, in slots that change on all ranks."""
    chosen = random.Random(seed)
    while True:
        found = [*range(LOGICAL), *chosen.choices(range(LOGICAL), k=WORLD * SLOTS - LOGICAL)]
        chosen.shuffle(found)
        yield found


def run_vllm(rank: Rank) -> None:
    vllm_ranks.begin(rank, as_deep_ep=False)
    from moe_p2p.integrations.moe import vllm, vllm_eplb

    os.environ["MOE_P2P_AS_NIXL_EP"] = "1"
    vllm.plugin()
    from vllm.distributed import nixl_utils
    from vllm.distributed.eplb import eplb_communicator, eplb_state, rebalance_execute

    assert nixl_utils.is_nixl_available()
    create = eplb_state.create_eplb_communicator
    assert create is eplb_communicator.create_eplb_communicator
    following = placements(1)
    held = next(following)
    weights = layers_of(rank.rank, held)
    buffer = [torch.empty_like(each) for each in weights[1]]
    group = types.SimpleNamespace(cpu_group=dist.group.WORLD)
    theirs = create(group, "torch_gloo", list(weights.values()), buffer)
    assert type(theirs) is eplb_communicator.TorchDistGlooStagedEplbCommunicator
    ours = create(group, "nixl", list(weights.values()), buffer)
    assert isinstance(ours, vllm_eplb.Communicator)
    assert isinstance(ours, eplb_communicator.EplbCommunicator)
    for _ in range(8):
        wanted = next(following)
        dist.barrier()  # as vLLM, which sums the ranks' loads first
        rebalance_execute.rearrange_expert_weights_inplace(
            *(torch.tensor([each] * len(LAYERS)) for each in (held, wanted)),
            list(weights.values()),
            buffer,
            dist.group.WORLD,
            ours,
        )
        held = wanted
        check(rank.rank, weights, dict.fromkeys(LAYERS, held))
    batches(rank, ours, weights, buffer, held)
    refused(rank, create, group)


def batches(
    rank: Rank, ours: Any, weights: dict[int, list[Tensor]], buffer: list[Tensor], held: list[int]
) -> None:
    """As the async worker and the main thread call them, with its batches of pairs of ranks."""
    from vllm.distributed.eplb import rebalance_execute

    following, now = placements(2), dict.fromkeys(LAYERS, held)
    for count in range(4):
        wanted = next(following)
        dist.barrier()
        for number, (layer, tensors) in enumerate(weights.items()):
            metadata = rebalance_execute.transfer_layer(
                torch.tensor(now[layer]),
                torch.tensor(wanted),
                tensors,
                buffer,
                dist.group.WORLD,
                ours,
                layer_idx=number,
                enable_migration_batching=count % 2 == 0,
            )
            check(rank.rank, weights, now)  # nothing that is in use has changed
            dist.barrier()
            indices = torch.tensor(wanted).numpy()
            rebalance_execute.move_from_buffer(tensors, buffer, metadata, indices, rank.rank)
            now[layer] = wanted
            check(rank.rank, weights, now)


def refused(rank: Rank, create: Callable[..., Any], group: Any) -> None:
    gaps = torch.zeros(SLOTS, 10)[:, :6]
    with pytest.raises(
        moe_p2p.InvalidArgumentError, match=r"tensor 0 of layer 0 is .4, 6. with st"
    ):
        create(group, "nixl", [[gaps]], [torch.zeros(SLOTS, 6)])
    dist.barrier()
    odd = torch.zeros(SLOTS, 6 + rank.rank)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="strides of experts' weights differ"):
        create(group, "nixl", [[odd]], [odd.clone()])


@pytest.mark.engine("vllm")
def test_vllm_moves_experts_through_engines() -> None:
    run_processes(WORLD, run_vllm, deadline_s=350)


def lose_one(rank: Rank) -> str:
    vllm_ranks.begin(rank, as_deep_ep=False)
    from moe_p2p.integrations.moe import vllm_eplb

    vllm_eplb._TIMEOUT_S = 3.0
    held = next(placements(3))
    weights = list(layers_of(rank.rank, held).values())
    buffer = [each.clone() for each in weights[0]]
    ours = vllm_eplb.Communicator(dist.group.WORLD, weights, buffer)
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ours.set_transfer_context(torch.tensor(held).numpy(), 1)
    if rank.rank == 0:
        ours.add_send([], 2, held[0])
    else:
        rank.store.wait(["rank 0 has its error"])
        ours.add_recv([each[0] for each in buffer], 2, held[2 * SLOTS])
    with pytest.raises(moe_p2p.MoeP2pError, match=f"moving experts, rank {rank.rank}: ") as caught:
        ours.execute()
    rank.store.set(f"rank {rank.rank} has its error", "")
    return str(caught.value)


@pytest.mark.engine("vllm")
def test_a_rank_that_is_lost_is_named() -> None:
    gave, got, lost = run_processes(WORLD, lose_one, deadline_s=350, return_errors=True)
    assert isinstance(lost, DiedError)
    assert "for rank 2 to read 1 experts so far: " in gave
    assert "of layer 1 from rank 2: " in got


def run_sglang(rank: Rank) -> None:
    sglang_layers.begin(rank)
    from moe_p2p.integrations.moe import sglang

    os.environ["MOE_P2P_AS_NIXL_EP"] = "1"
    sglang.plugin()
    from sglang.srt.eplb import expert_location, expert_location_updater

    asked = types.SimpleNamespace(moe=types.SimpleNamespace(ep_dispatch_algorithm=None))
    expert_location.get_exec = lambda: asked
    following = placements(4)
    num_layers = max(LAYERS) + 1

    def metadata(placement: list[int]) -> Any:
        where: list[list[int]] = [[] for _ in range(LOGICAL)]
        for slot, expert in enumerate(placement):
            where[expert].append(slot)
        most = max(map(len, where))
        all_physical = [[*each, *[-1] * (most - len(each))] for each in where]
        return expert_location.ExpertLocationMetadata._init_raw(
            WORLD,
            torch.tensor([placement] * num_layers),
            torch.tensor([all_physical] * num_layers),
        )

    held = next(following)
    now, weights = dict.fromkeys(LAYERS, held), layers_of(rank.rank, held)
    weights = {n: [each.contiguous() for each in tensors] for n, tensors in weights.items()}
    expert_location.set_global_expert_location_metadata(metadata(held))
    updater = expert_location_updater.ExpertLocationUpdater()
    updater._first_execution = False  # it empties a GPU's cache
    theirs: list[int] = []
    single = expert_location_updater.update_expert_weights_single_layer

    def counted(**given: Any) -> Any:
        theirs.append(0)
        return single(**given)

    expert_location_updater.update_expert_weights_single_layer = counted
    for count in range(8):
        wanted = next(following)
        if count == 5:  # its engine has loaded the model anew
            weights = {n: [each.clone() for each in tensors] for n, tensors in weights.items()}
        state = types.SimpleNamespace(has_scaled=count == 7, active_ranks_cpu=torch.ones(WORLD))
        expert_location_updater.ElasticEPStateManager._instance = state
        for chunk in ([1], [3, 4]):
            missing = updater.update(weights, metadata(wanted), chunk, nnodes=1, rank=rank.rank)
            assert missing == {}
            now |= dict.fromkeys(chunk, wanted)
            check(rank.rank, weights, now)
        assert len(theirs) == (len(LAYERS) if count == 7 else 0)


@pytest.mark.engine("sglang")
def test_sglang_moves_experts_through_engines() -> None:
    run_processes(WORLD, run_sglang, deadline_s=350)
