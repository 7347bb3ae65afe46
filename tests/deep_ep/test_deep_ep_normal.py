"""DeepEP's normal calls on ranks of the CPU, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_p2p import AllToAllConfig, InvalidArgumentError, MoeP2pError, ResourceExhaustedError
from moe_p2p.moe import pool
from moe_p2p.moe.routing_counts import count_routing
from tests.support import deep_ep_cases as cases
from tests.support.deep_ep_cases import Place, Setting
from tests.support.ranks import Rank, on_ranks, run_threads

_Check = Callable[[Place, Setting], None]


def _body(rank: Rank, check: _Check, setting: Setting, num_nvl_bytes: int) -> None:
    place = cases.open_buffer(rank, "cpu", num_nvl_bytes=num_nvl_bytes)
    check(place, setting)
    place.buffer.destroy()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__[6:])
def test_in_worlds_of_any_size(check: _Check, world_size: int) -> None:
    run_threads(world_size, _body, check, cases.SETTINGS["bf16"], 16 << 20)


@pytest.mark.parametrize("world_size", [5, 6, 7])
def test_in_worlds_that_deep_ep_refuses(world_size: int) -> None:
    setting = Setting(num_tokens=(3, 1, 4, 0, 5, 2, 6), num_experts=2 * world_size)
    for check in (cases.check_dispatch, cases.check_combine, cases.check_worst):
        run_threads(world_size, _body, check, setting, 1 << 20)


@pytest.mark.parametrize("name", [name for name in cases.SETTINGS if name != "bf16"])
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__[6:])
def test_with_tokens_of_any_kind(check: _Check, name: str) -> None:
    world_size = 4 if name == "wide" else 3
    # Little memory, so that some settings take several steps.
    run_threads(world_size, _body, check, cases.SETTINGS[name], (8 if name == "wide" else 1) << 20)


@pytest.mark.parametrize("shape", [(2, 1), (4, 2)], ids=["2-nodes-of-1", "2-nodes-of-2"])
@pytest.mark.parametrize("name", ["bf16", "fp8", "many-steps"])
def test_between_nodes(shape: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of this host as several nodes; many-steps has partial sums rounded on the way."""
    world_size, per_node = shape
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: per_node)
    for check in (cases.check_dispatch, cases.check_combine, cases.check_worst):
        run_threads(world_size, _body, check, cases.SETTINGS[name], 1 << 20)


def _chunks(rank: Rank) -> list[int]:
    """Tokens of a step for some sizes of memory, most of which they take."""
    chunks = []
    for nvl, rdma, low_latency in ((1, 0, False), (8, 8, False), (8, 8, True), (0, 0, False)):
        place = cases.open_buffer(
            rank,
            "cpu",
            num_nvl_bytes=nvl << 20,
            num_rdma_bytes=rdma << 20,
            low_latency_mode=low_latency,
        )
        config = cases.send(place, cases.SETTINGS["bf16"]).handle.all_to_all.config
        chunks.append(config.step_tokens)
        given = (nvl if low_latency else nvl + rdma) << 20
        if given:
            assert _size(rank, config) <= given
            assert (
                _size(rank, replace(config, chunk_tokens=config.step_tokens + 64))
                > given * 31 // 32
            )
        place.buffer.destroy()
    return chunks


def _size(rank: Rank, config: AllToAllConfig) -> int:
    regions = config.plan(world_size=rank.world_size, ranks_per_node=rank.world_size)
    return sum(regions.values())


def test_a_step_is_as_large_as_the_memory_that_was_given() -> None:
    small, large, reserved, default = run_threads(2, _chunks)[0]
    assert 64 < small < reserved < large
    assert small % 64 == reserved % 64 == large % 64 == 0
    assert default == 512


@on_ranks(2)
def test_all_shapes_together_take_no_more_than_was_given(rank: Rank) -> None:
    """Shapes share what was given: the first may take nearly all of it, then an error says so."""
    given = 2 << 20
    place = cases.open_buffer(rank, "cpu", num_nvl_bytes=given)
    first, fp8 = cases.SETTINGS["bf16"], cases.SETTINGS["fp8"]
    taken = []
    for setting in (first, fp8, replace(first, topk=2)):
        taken.append(cases.send(place, setting).handle.all_to_all)
    assert taken[0] is taken[1]  # another type of values is no other shape
    assert sum(_size(rank, each.config) for each in taken[1:]) <= given
    with pytest.raises(ResourceExhaustedError, match=r"of the 2097152 bytes .* are left, .*7168"):
        cases.send(place, replace(first, hidden_dim=7168))
    cases.check_dispatch(place, first)
    place.buffer.destroy()


@on_ranks(2)
def test_one_buffer_serves_several_shapes(rank: Rank) -> None:
    """Calls of both take turns, and handles of one stay good while the other is used."""
    place = cases.open_buffer(rank, "cpu")
    narrow, wide = cases.SETTINGS["bf16"], replace(cases.SETTINGS["fp8"], hidden_dim=512, topk=2)
    sent = cases.send(place, narrow)
    cases.check_cached(place, wide)
    again, *_ = place.buffer.dispatch(sent.x, handle=sent.handle)
    cases.check_rows(sent, again)
    cases.check_combine(place, narrow)
    place.buffer.destroy()


@on_ranks(2)
def test_every_call_of_a_buffer_raises_what_broke_one_of_its_shapes(rank: Rank) -> None:
    """By a call that the buffer did not make, as the replay of a graph would."""
    place = cases.open_buffer(rank, "cpu")
    narrow, wide = cases.SETTINGS["bf16"], replace(cases.SETTINGS["fp8"], hidden_dim=512, topk=2)
    sent = cases.send(place, narrow)
    cases.check_dispatch(place, wide)
    place.buffer.check()
    broken = sent.handle.all_to_all
    of_both_ranks = torch.tensor([[0, 1, broken.config.num_experts - 1]])
    x = torch.zeros(1, broken.config.hidden_dim, dtype=torch.bfloat16)
    with pytest.raises(MoeP2pError, match=r"capacity is 0|gave up"):
        broken.dispatch(x, of_both_ranks, capacity=0)
    for call in (place.buffer.check, lambda: cases.send(place, wide)):
        with pytest.raises(MoeP2pError) as error:
            call()
        assert str(error.value) == broken.broken


@on_ranks(2)
def test_refuses_before_anything_is_sent(rank: Rank) -> None:
    place = cases.open_buffer(rank, "cpu")
    setting = cases.SETTINGS["bf16"]
    sent = cases.send(place, setting)
    with pytest.raises(InvalidArgumentError, match="give one or the other"):
        place.buffer.dispatch(sent.x, handle=sent.handle, topk_idx=sent.topk_idx)
    with pytest.raises(InvalidArgumentError, match=r"x has \d tokens.* each of the 2 ranks may"):
        cases.send(place, setting, num_worst_tokens=4)
    with pytest.raises(InvalidArgumentError, match="needs previous_event and async_finish"):
        place.buffer.combine(sent.rows, sent.handle, allocate_on_comm_stream=True)
    with pytest.raises(InvalidArgumentError, match=r"topk_weights has 4 columns.* had 3"):
        place.buffer.combine(sent.rows, sent.handle, torch.zeros(sent.rows.shape[0], 4))
    with pytest.raises(InvalidArgumentError, match="multiple of the number of ranks 2"):
        place.buffer.get_dispatch_layout(sent.topk_idx, 13)
    with pytest.raises(AssertionError, match="is_token_in_rank is missing"):
        place.buffer.dispatch(sent.x, topk_idx=sent.topk_idx)
    cases.check_dispatch(place, setting)  # nothing of this was sent
    place.buffer.destroy()


@on_ranks(16)
def test_more_than_eight_ranks_have_the_other_handle(rank: Rank) -> None:
    place = cases.open_buffer(rank, "cpu")
    setting = Setting(num_tokens=(2, 1) * 8, num_experts=32)
    sent = cases.send(place, setting)
    cases.check_rows(sent, sent.rows)
    source = sent.expected.source
    in_rank, per_node = sent.layout["is_token_in_rank"], sent.layout["num_tokens_per_rdma_rank"]
    assert in_rank is not None
    assert per_node is not None
    assert per_node.tolist() == in_rank.view(-1, 2, 8).any(2).sum(0).tolist()
    assert len(sent.handle) == 10
    assert sent.handle[0] is in_rank
    assert sent.handle[6].tolist() == [int((source[:, 0] <= i).sum()) for i in range(16)]
    assert torch.equal(sent.handle[7], source[:, 1])
    rows, *_ = place.buffer.internode_dispatch(sent.x, handle=sent.handle)
    cases.check_rows(sent, rows)
    out, _, _ = place.buffer.internode_combine(cases.expert_rows(place, sent), sent.handle)
    assert cases.difference(out, cases.expect_sum(place, setting, sent)) < 5e-6
    place.buffer.destroy()


def test_counts_tokens_for_nodes_of_eight_ranks() -> None:
    topk_idx = torch.tensor([[0, 5, 17], [9, 31, -1], [-1, -1, -1], [16, 17, 30]])
    counts = count_routing(topk_idx, 32, 16, num_nodes=2)
    assert counts.num_tokens_per_node is not None
    assert counts.num_tokens_per_node.tolist() == [2, 3]
    assert counts.num_tokens_per_rank.nonzero().flatten().tolist() == [0, 2, 4, 8, 15]
