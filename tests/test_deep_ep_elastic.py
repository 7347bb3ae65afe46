"""DeepEP's V2 calls, ElasticBuffer, through moe_p2p.deep_ep, compared with plain torch.

The oracle is deep_ep_oracle.py. Ranks are threads; on a GPU they share the device, with few blocks
each, as gpu_ranks.py explains.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep_oracle import (
    BF16_DIFFERENCE,
    Batch,
    Body,
    Shape,
    StoreGroup,
    combined,
    difference,
    expert,
    few_blocks,
    gather,
    host,
    make_batches,
    owned,
    ranks_of,
    replay,
    rows_by_rank,
    rows_of,
)
from moe_p2p.deep_ep import ElasticBuffer
from ranks import Rank, run_processes, run_threads

SHAPE = Shape()
COUNTS = [[5, 3, 0, 12], [12] * 4, [0] * 4, [0, 0, 9, 0], [1, 2, 3, 4]]


@pytest.fixture(
    name="run_ranks", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module"
)
def make_run_ranks(request: pytest.FixtureRequest) -> Body:
    """run_ranks(W, body, *arguments): body(rank, device, *arguments) of each rank."""
    return ranks_of(request.param)


def make_buffer(rank: Rank, device: str, **options: Any) -> Any:
    group: Any = StoreGroup(rank)
    fields = {"num_max_tokens_per_rank": SHAPE.max_tokens, "explicitly_destroy": True}
    buffer = ElasticBuffer(group, num_gpu_timeout_secs=20.0, **(fields | options))
    if device == "cuda":
        few_blocks(buffer._communicators)
    return buffer


class Call(NamedTuple):
    """What is asked of a dispatch."""

    do_expand: bool = False
    do_cpu_sync: bool = True
    expert_alignment: int = 1
    fp8: bool = False
    num_bias: int = 0
    mode: str = "sync"  # or async


def packed(x: Tensor, num_packs: int = 3) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn, and packs [n, num_packs] that nobody looks into."""
    first = x.view(torch.int16)[:, :num_packs].int()
    return x.to(torch.float8_e4m3fn), first * 65537 + 11


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(*(host(t).flatten().contiguous().view(torch.uint8) for t in (a, b)))


def some_rows(got: Any, rows: slice) -> Any:
    return tuple(part[rows] for part in got) if isinstance(got, tuple) else got[rows]


def align(count: int, to: int) -> int:
    return -(-count // to) * to


def waited(mode: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    event = result[-1]
    assert (event.event is not None) == (mode == "async")
    if mode == "async":
        event.current_stream_wait()
    return result


def dispatch(buffer: Any, mine: Batch, shape: Shape, call: Call, **options: Any) -> tuple[Any, ...]:
    arguments = {
        "x": packed(mine.x) if call.fp8 else mine.x,
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.weights,
        "num_experts": shape.num_experts,
        "num_max_tokens_per_rank": shape.max_tokens,
        "expert_alignment": call.expert_alignment,
        "do_cpu_sync": call.do_cpu_sync,
        "do_expand": call.do_expand,
        "async_with_compute_stream": call.mode == "async",
    }
    return waited(call.mode, buffer.dispatch(**(arguments | options)))


# --- one call, checked ---


def check_handle(handle: Any, batches: list[Batch], rank: int, shape: Shape, call: Call) -> None:
    """Counts, and where each received token came from."""
    num_ranks, local = len(batches), shape.num_experts // len(batches)
    rows = rows_by_rank(batches, rank, shape.num_experts)
    counts = [rows_of(batches, rank * local + i).shape[0] for i in range(local)]
    aligned = [align(count, call.expert_alignment) for count in counts]
    num_rows = rows.shape[0]
    most = num_ranks * shape.max_tokens
    expanded = most * min(shape.topk, local) + (call.expert_alignment - 1) * local
    assert handle.num_recv_tokens_per_expert_list == (aligned if call.do_cpu_sync else [])
    assert handle.num_recv_tokens == (num_rows if call.do_cpu_sync else most)
    assert handle.num_expanded_tokens == (sum(aligned) if call.do_cpu_sync else expanded)
    by_source = host(handle.psum_num_recv_tokens_per_scaleup_rank)
    ends = [int((rows[:, 0] <= source).sum()) for source in range(num_ranks)]
    assert by_source.tolist() == ends
    until = [sum(aligned[: i + 1]) for i in range(local)]
    if call.do_expand:
        until = [sum(aligned[:i]) + counts[i] for i in range(local)]
    assert host(handle.psum_num_recv_tokens_per_expert).tolist() == until
    assert host(handle.num_unaligned_recv_tokens_per_expert).tolist() == counts
    metadata = host(handle.recv_src_metadata)
    assert metadata.shape == (handle.num_recv_tokens, shape.topk + 2)
    metadata = metadata[:num_rows]
    assert torch.equal(metadata[:, 0].long(), rows[:, 0] * shape.max_tokens + rows[:, 1])
    idx = gather(batches, rows, "topk_idx")
    here = owned(idx, rank, local)
    assert torch.equal(metadata[:, 2:] >= 0, here)
    first = rows[:, 0] * shape.topk + here.int().argmax(1)
    assert torch.equal(metadata[:, 1].long(), first)


def check_by_rank(
    result: tuple[Any, ...], batches: list[Batch], rank: int, shape: Shape, call: Call
) -> Tensor:
    """Returns the rows of combine: each the sum of what this rank's experts make of its token."""
    got, recv_idx, recv_weights, handle, _ = result
    local = shape.num_experts // len(batches)
    rows = rows_by_rank(batches, rank, shape.num_experts)
    count = rows.shape[0]
    values = got[0] if call.fp8 else got
    assert values.shape == (handle.num_recv_tokens, shape.hidden_dim)
    x = gather(batches, rows)
    assert same_bits(some_rows(got, slice(count)), packed(x) if call.fp8 else x)
    idx = gather(batches, rows, "topk_idx")
    here = owned(idx, rank, local)
    wanted = torch.where(here, idx - rank * local, -1)
    assert torch.equal(host(recv_idx)[:count], wanted)
    assert (host(recv_idx)[count:] == -1).all()
    weights = gather(batches, rows, "weights")
    assert torch.equal(host(recv_weights)[:count], weights.where(here, 0.0))
    y = torch.full((handle.num_recv_tokens, shape.hidden_dim), 1e4, dtype=torch.bfloat16)
    for row in range(count):
        terms = [expert(int(e), x[row]).float() for e in idx[row][here[row]]]
        y[row] = torch.stack(terms).sum(0).bfloat16()
    return y


def check_expanded(
    result: tuple[Any, ...], batches: list[Batch], rank: int, shape: Shape, call: Call
) -> Tensor:
    """Returns the rows of combine."""
    got, recv_idx, recv_weights, handle, _ = result
    assert recv_idx is None
    local = shape.num_experts // len(batches)
    values = got[0] if call.fp8 else got
    assert values.shape == (handle.num_expanded_tokens, shape.hidden_dim)
    assert recv_weights.shape == (handle.num_expanded_tokens,)
    recv_weights = host(recv_weights)
    row_of = host(handle.recv_src_metadata)[:, 2:]
    sources = rows_by_rank(batches, rank, shape.num_experts)
    y = torch.full((handle.num_expanded_tokens, shape.hidden_dim), 1e4, dtype=torch.bfloat16)
    start = 0
    for i in range(local):
        number = rank * local + i
        rows = rows_of(batches, number)
        end = start + rows.shape[0]
        x = gather(batches, rows)
        assert same_bits(some_rows(got, slice(start, end)), packed(x) if call.fp8 else x)
        hit = gather(batches, rows, "topk_idx") == number
        weights = gather(batches, rows, "weights")[hit]
        assert torch.equal(recv_weights[start:end], weights)
        for row, (source, token) in enumerate(rows.tolist(), start):
            place = ((sources[:, 0] == source) & (sources[:, 1] == token)).nonzero().item()
            k = (batches[source].topk_idx[token] == number).nonzero().item()
            assert int(row_of[place, k]) == row
        y[start:end] = expert(number, x)
        start += align(rows.shape[0], call.expert_alignment)
    return y


def check_combine(
    buffer: Any, y: Tensor, result: tuple[Any, ...], batch: Batch, device: str, call: Call
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    terms = [torch.randn(batch.x.shape, generator=generator).bfloat16() for _ in range(2)]
    bias: Any = [None, terms[0].to(device), tuple(term.to(device) for term in terms)][call.num_bias]
    *_, recv_weights, handle, _ = result
    out, weights, _ = waited(
        call.mode,
        buffer.combine(
            y.to(device),
            handle,
            topk_weights=recv_weights,
            bias=bias,
            async_with_compute_stream=call.mode == "async",
        ),
    )
    out, weights = host(out), host(weights)
    wanted = combined(batch) + sum(term.double() for term in terms[: call.num_bias])
    assert difference(out, wanted) < BF16_DIFFERENCE
    assert torch.equal(weights, batch.weights.where(batch.topk_idx >= 0, 0.0))
    return out, weights


def steps(rank: Rank, device: str, shape: Shape, counts: list[list[int]], call: Call) -> None:
    buffer = make_buffer(rank, device)
    local = shape.num_experts // rank.world_size
    stats = torch.zeros(local, dtype=torch.int32, device=device)
    wanted = torch.zeros(local, dtype=torch.int32)
    check = check_expanded if call.do_expand else check_by_rank
    for seed, of_ranks in enumerate(counts):
        batches = make_batches(seed, of_ranks[: rank.world_size], shape)
        mine = batches[rank.rank].on(device)
        more = {"cumulative_local_expert_recv_stats": stats}
        result = dispatch(buffer, mine, shape, call, **more)
        handle = result[3]
        check_handle(handle, batches, rank.rank, shape, call)
        y = check(result, batches, rank.rank, shape, call)
        check_combine(buffer, y, result, batches[rank.rank], device, call)
        wanted += host(handle.num_unaligned_recv_tokens_per_expert)
    assert torch.equal(host(stats), wanted)
    buffer.destroy()


# --- what they give ---

CALLS = {
    "rows by rank": Call(),
    "rows by rank, no CPU sync": Call(do_cpu_sync=False),
    "rows by rank, fp8, bias": Call(fp8=True, num_bias=1),
    "rows by rank, async": Call(mode="async", expert_alignment=8),
    "expanded": Call(do_expand=True),
    "expanded, no CPU sync": Call(do_expand=True, do_cpu_sync=False, expert_alignment=4),
    "expanded, fp8, biases": Call(do_expand=True, fp8=True, num_bias=2, expert_alignment=8),
    "expanded, async": Call(do_expand=True, mode="async"),
}


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_rows_sums_and_handles(run_ranks: Body, num_ranks: int, name: str) -> None:
    run_ranks(num_ranks, steps, SHAPE, COUNTS, CALLS[name])


@pytest.mark.parametrize("call", [Call(do_cpu_sync=False), Call(do_expand=True)])
def test_many_experts_and_many_k(run_ranks: Body, call: Call) -> None:
    run_ranks(2, steps, Shape(896, 3584, 16, 6), [[6, 4]], call)


@pytest.mark.parametrize("call", [Call(), Call(do_expand=True, do_cpu_sync=False)])
def test_more_tokens_than_a_step_holds(run_ranks: Body, call: Call) -> None:
    run_ranks(2, steps, SHAPE._replace(max_tokens=40), [[40, 17], [0, 29]], call)


# --- handles, formats and repeats ---


def cached(rank: Rank, device: str, call: Call) -> None:
    buffer = make_buffer(rank, device)
    batches = make_batches(4, [12, 7, 0][: rank.world_size], SHAPE)
    mine = batches[rank.rank].on(device)
    first = dispatch(buffer, mine, SHAPE, call)
    handle = first[3]
    check = check_expanded if call.do_expand else check_by_rank
    y = check(first, batches, rank.rank, SHAPE, call)
    sums = check_combine(buffer, y, first, batches[rank.rank], device, call)
    x: Any = packed(mine.x) if call.fp8 else mine.x
    for _ in range(3):
        again = buffer.dispatch(
            x, topk_weights=mine.weights, handle=handle, do_expand=call.do_expand
        )
        assert again[3] is handle
        got = check(again, batches, rank.rank, SHAPE, call)
        assert same_bits(got, y)
        repeated = check_combine(buffer, y, again, batches[rank.rank], device, call)
        assert same_bits(repeated, sums)
    assert buffer.dispatch(x, handle=handle, do_expand=call.do_expand)[2] is None
    buffer.destroy()


@pytest.mark.parametrize(
    "name", ["rows by rank", "rows by rank, no CPU sync", "expanded, fp8, biases"]
)
def test_a_handle_repeats_its_routing(run_ranks: Body, name: str) -> None:
    run_ranks(3, cached, CALLS[name])


def test_handles_may_be_used_in_any_order(run_ranks: Body) -> None:
    """Dispatches without a combine, and several combines of one dispatch, late."""

    def body(rank: Rank, device: str) -> None:
        buffer = make_buffer(rank, device)
        batches = make_batches(5, [12, 8][: rank.world_size], SHAPE)
        mine = batches[rank.rank].on(device)
        results = {}
        for call in (Call(), Call(do_expand=True), Call(do_cpu_sync=False), Call()):
            results[call] = dispatch(buffer, mine, SHAPE, call)
        sums = []
        for call, result in results.items():
            check = check_expanded if call.do_expand else check_by_rank
            y = check(result, batches, rank.rank, SHAPE, call)
            for _ in range(2):
                sums.append(check_combine(buffer, y, result, batches[rank.rank], device, call))
        for first, second in zip(sums[::2], sums[1::2], strict=True):
            assert same_bits(first, second)
        buffer.destroy()

    run_ranks(2, body)


def test_a_handle_keeps_its_own_routing(run_ranks: Body) -> None:
    def body(rank: Rank, device: str) -> None:
        buffer = make_buffer(rank, device)
        batches = make_batches(6, [12, 8][: rank.world_size], SHAPE)
        mine = Batch(*(tensor.clone() for tensor in batches[rank.rank].on(device)))
        copied = dispatch(buffer, mine, SHAPE, Call())[3]
        shared = dispatch(buffer, mine, SHAPE, Call(), do_handle_copy=False)[3]
        assert shared.topk_idx.data_ptr() == mine.topk_idx.data_ptr()
        mine.topk_idx.fill_(-1)
        again = buffer.dispatch(mine.x, handle=copied)
        assert again[0].shape[0] == rows_by_rank(batches, rank.rank, SHAPE.num_experts).shape[0]
        buffer.destroy()

    run_ranks(2, body)


def zero_padding(rank: Rank, device: str) -> None:
    call = Call(do_expand=True, expert_alignment=8)
    buffer = make_buffer(rank, device)
    for seed in range(3):  # memory of an earlier step lies in later ones
        batches = make_batches(seed, [12, 8][: rank.world_size], SHAPE)
        mine = batches[rank.rank].on(device)
        result = dispatch(buffer, mine, SHAPE, call, do_zero_padding=True)
        rows, _, weights, handle, _ = result
        ends = host(handle.psum_num_recv_tokens_per_expert).tolist()
        for end in ends:
            padding = slice(end, align(end, call.expert_alignment))
            assert not host(rows)[padding].any()
            assert not host(weights)[padding].any()
        assert any(end % call.expert_alignment for end in ends)
    buffer.destroy()


def test_padding_may_be_zero(run_ranks: Body) -> None:
    run_ranks(2, zero_padding)


@pytest.mark.parametrize("num_packs", [1, 3, 24])
@pytest.mark.parametrize("do_expand", [False, True])
def test_packs_of_any_width_by_columns(run_ranks: Body, num_packs: int, do_expand: bool) -> None:
    def body(rank: Rank, device: str) -> None:
        buffer = make_buffer(rank, device, use_fp8_dispatch=True)
        batches = make_batches(2, [12, 7][: rank.world_size], SHAPE)
        mine = batches[rank.rank].on(device)
        values, packs = packed(mine.x, num_packs)
        call = Call(do_expand=do_expand)
        plain, columns = (
            dispatch(
                buffer,
                mine,
                SHAPE,
                call,
                x=(values, layout),
                use_tma_aligned_col_major_sf=by_column,
            )
            for by_column, layout in ((False, packs), (True, packs.T.contiguous().T))
        )
        got = columns[0][1]
        assert got.stride() == (1, align(got.shape[0], 4))
        assert got.shape[1] == num_packs
        assert same_bits(plain[0], columns[0])
        buffer.destroy()

    run_ranks(2, body)


@pytest.mark.parametrize("do_expand", [False, True])
def test_repeats_give_the_same_bits(run_ranks: Body, do_expand: bool) -> None:
    def body(rank: Rank, device: str) -> None:
        buffer = make_buffer(rank, device)
        batches = make_batches(9, [12] * rank.world_size, SHAPE)
        mine = batches[rank.rank].on(device)
        call = Call(do_expand=do_expand)
        check = check_expanded if do_expand else check_by_rank
        results = []
        for _ in range(4):
            result = dispatch(buffer, mine, SHAPE, call)
            y = check(result, batches, rank.rank, SHAPE, call)
            out = check_combine(buffer, y, result, batches[rank.rank], device, call)
            results.append((result[0], result[2], *out))
        assert all(same_bits(results[0], again) for again in results[1:])
        buffer.destroy()

    run_ranks(3, body)


def graphs(rank: Rank, device: str, call: Call) -> None:
    buffer = make_buffer(rank, device)

    def pair(place: Batch) -> Tensor:
        rows, idx, weights, handle, _ = dispatch(buffer, place, SHAPE, call)
        if idx is not None:
            weights = weights.sum(1)
        y = rows * 2 * weights.bfloat16().unsqueeze(1)
        out: Tensor = waited(call.mode, buffer.combine(y, handle))[0]
        return out

    replay(rank, SHAPE, pair)
    buffer.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("do_expand", [False, True])
def test_captured_graphs_follow_their_inputs(do_expand: bool) -> None:
    ranks_of("cuda")(4, graphs, Call(do_expand=do_expand, do_cpu_sync=False))


# --- the buffer itself ---


def with_gloo(rank: Rank) -> None:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    group = dist.group.WORLD
    assert group is not None
    hint = ElasticBuffer.get_buffer_size_hint(group, 4096, 7168, num_topk=8)
    assert hint % (2 << 20) == 0
    steps_of = 2 * rank.world_size * 512 * 2 * 2 * 7168  # both ways, two steps of 512 tokens
    assert steps_of < hint < 1.2 * steps_of
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=SHAPE.max_tokens, explicitly_destroy=True)
    assert buffer.get_physical_domain_size() == (1, rank.world_size)
    assert buffer.get_logical_domain_size() == (1, rank.world_size)
    assert (buffer.rank_idx, buffer.num_ranks) == (rank.rank, rank.world_size)
    buffer.barrier()
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
    batches = make_batches(1, [12, 8], SHAPE)
    result = dispatch(buffer, batches[rank.rank], SHAPE, Call())
    y = check_by_rank(result, batches, rank.rank, SHAPE, Call())
    check_combine(buffer, y, result, batches[rank.rank], "cpu", Call())
    buffer.destroy()
    dist.destroy_process_group()


def test_processes_with_a_group_of_gloo() -> None:
    run_processes(2, with_gloo)


def test_num_bytes_bounds_the_steps() -> None:
    def body(rank: Rank) -> None:
        sizes = []
        for num_bytes in (2 << 20, 64 << 20):
            buffer = make_buffer(rank, "cpu", num_max_tokens_per_rank=512, num_bytes=num_bytes)
            batches = make_batches(1, [12, 8], SHAPE)
            handle = dispatch(buffer, batches[rank.rank], SHAPE, Call())[3]
            config = handle.all_to_all.config
            regions = config.plan(world_size=2, ranks_per_node=2)
            assert sum(regions.values()) <= num_bytes
            sizes.append(config.step_tokens)
            buffer.destroy()
        assert sizes[0] < sizes[1] <= 512

    run_threads(2, body)


def test_what_is_refused() -> None:
    def body(rank: Rank) -> None:
        buffer = make_buffer(rank, "cpu")
        mine = make_batches(1, [3], SHAPE)[0]
        handle = dispatch(buffer, mine, SHAPE, Call())[3]
        with pytest.raises(AssertionError, match="give one of them"):
            dispatch(buffer, mine, SHAPE, Call(), handle=handle, do_cpu_sync=None)
        with pytest.raises(AssertionError, match="no CPU sync"):
            buffer.dispatch(mine.x, handle=handle, do_cpu_sync=True)
        with pytest.raises(AssertionError, match="do_expand differs"):
            buffer.dispatch(mine.x, handle=handle, do_expand=True)
        with pytest.raises(AssertionError, match="needs do_expand"):
            dispatch(buffer, mine, SHAPE, Call(), do_zero_padding=True)
        with pytest.raises(NotImplementedError, match="engram_fetch"):
            buffer.engram_fetch(mine.topk_idx)
        buffer.destroy()

    run_threads(1, body)
