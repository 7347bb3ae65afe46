"""DeepEP's normal calls on GPUs: the checks of the CPU, graphs, and streams that are kept busy.

One process per rank, each with a device of its own as far as there are devices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError
from tests.support import deep_ep_cases as cases
from tests.support import gpu_ranks
from tests.support.deep_ep_cases import Sent
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
_DEADLINE_S = 500.0


def _all_checks(rank: Rank, world: World, names: list[str]) -> None:
    place = cases.open_buffer(rank, "cuda")
    for name in names:
        for check in cases.CHECKS:
            try:
                check(place, cases.SETTINGS[name])
            except BaseException as error:
                raise AssertionError(f"{check.__name__} with {name}") from error
    place.buffer.destroy()


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2)))
def test_all_calls(world: World) -> None:
    names = ["bf16", "fp8", "fp8-packed", "empty-rank-fp8", "nobody-has-tokens"]
    gpu_ranks.run(world, _all_checks, names, processes=True, deadline_s=_DEADLINE_S)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4), devices=True))
def test_all_calls_between_devices(world: World) -> None:
    gpu_ranks.run(world, _all_checks, list(cases.SETTINGS), processes=True, deadline_s=_DEADLINE_S)


def _graph(rank: Rank, world: World, fp8: bool) -> None:
    """Layout, dispatch, experts and combine in one graph, replayed with other tokens each time."""
    place = cases.open_buffer(rank, "cuda")
    setting = replace(cases.SETTINGS["fp8" if fp8 else "bf16"], num_tokens=(6,) * world.ranks)
    sent = cases.send(place, setting)  # makes the communicator, loads kernels
    place.buffer.combine(cases.expert_rows(place, sent), sent.handle, sent.topk_weights)
    mine = cases.make_tokens(setting, rank.rank)
    x, topk_idx, weights = (place.put(t) for t in (mine.x, mine.topk_idx, mine.topk_weights))
    scales = None if mine.scales is None else place.put(mine.scales)

    def step() -> tuple[Sent, Tensor, Tensor | None]:
        layout, _ = cases.layout_of(place.buffer, topk_idx, setting.num_experts)
        rows, row_idx, row_weights, _, handle, _ = place.buffer.dispatch(
            x if scales is None else (x, scales),
            topk_idx=topk_idx,
            topk_weights=weights,
            num_worst_tokens=6 * world.ranks,
            **layout,
        )
        made = sent._replace(
            rows=rows, topk_idx=row_idx, topk_weights=row_weights, layout=sent.layout | layout
        )
        out, summed, _ = place.buffer.combine(
            cases.expert_rows(place, made), handle, topk_weights=row_weights
        )
        return made, out, summed

    step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        made, out, summed = step()
    for seed in range(20):
        now = replace(setting, seed=100 + seed)
        tokens = [cases.make_tokens(now, other) for other in range(world.ranks)]
        mine = tokens[rank.rank]
        x.copy_(mine.x)
        topk_idx.copy_(mine.topk_idx)
        weights.copy_(mine.topk_weights)
        if scales is not None:
            scales.copy_(mine.scales)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        expected = cases.expect_rows(now, tokens, rank.rank)
        got = made._replace(tokens=tokens, expected=expected)
        num_rows = expected.x.shape[0]
        cases.check_rows(got, got.rows)
        assert cases.same(got.topk_idx[:num_rows].cpu(), expected.topk_idx)
        assert (got.topk_idx[num_rows:] == -1).all()
        assert cases.difference(out.cpu(), cases.expect_sum(place, now, got)) < 5e-6
        named = torch.where(mine.topk_idx >= 0, mine.topk_weights, 0.0)
        assert summed is not None
        assert cases.difference(summed.cpu(), named) < 1e-9
    place.buffer.destroy()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2)))
def test_one_graph_of_all_calls_serves_every_routing(world: World, fp8: bool) -> None:
    gpu_ranks.run(world, _graph, fp8, processes=True, deadline_s=_DEADLINE_S)


def _counts_in_a_graph(rank: Rank, _: World) -> None:
    place = cases.open_buffer(rank, "cuda")
    sent = cases.send(place, cases.SETTINGS["bf16"])
    torch.cuda.current_stream().synchronize()
    given = {"topk_idx": place.put(sent.tokens[0].topk_idx), **sent.layout}
    with (
        pytest.raises(InvalidArgumentError, match="pass num_worst_tokens"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.current_stream()),
    ):
        place.buffer.dispatch(sent.x, **given)
    cases.check_dispatch(place, cases.SETTINGS["bf16"])
    place.buffer.destroy()


def test_counts_for_the_host_are_refused_in_a_graph() -> None:
    gpu_ranks.run(World(1, 1), _counts_in_a_graph, processes=True, deadline_s=_DEADLINE_S)


def _busy_streams(rank: Rank, _: World) -> None:
    """Memory of the caller's is written over as soon as the event allows, and not before."""
    place = cases.open_buffer(rank, "cuda")
    setting = replace(cases.SETTINGS["many-steps"], hidden_dim=1024)
    later = {"async_finish": True, "allocate_on_comm_stream": True}
    sent = cases.send(place, setting)
    for _ in range(20):
        x = place.put(sent.tokens[rank.rank].x)
        x.mul_(2).div_(2)  # on the caller's stream, before the event
        rows, *_, event = place.buffer.dispatch(
            x, handle=sent.handle, previous_event=place.buffer.capture(), **later
        )
        del x
        junk = [torch.full_like(rows, -7.0) for _ in range(4)]  # may get memory that was freed
        event.current_stream_wait()
        cases.check_rows(sent, rows)
        y = cases.expert_rows(place, sent._replace(rows=rows))
        out, _, event = place.buffer.combine(
            y, sent.handle, previous_event=place.buffer.capture(), **later
        )
        del y, rows
        junk += [torch.full_like(junk[0], -9.0) for _ in range(4)]
        with event:
            del junk
        assert cases.difference(out.cpu(), cases.expect_sum(place, setting, sent)) < 5e-6
    place.buffer.destroy()


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2)))
def test_memory_is_safe_between_streams(world: World) -> None:
    gpu_ranks.run(world, _busy_streams, processes=True, deadline_s=_DEADLINE_S)
