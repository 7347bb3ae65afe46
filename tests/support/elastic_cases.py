"""Checks of DeepEP's ElasticBuffer: functions of one rank, on the CPU or on a GPU.

Run by test_deep_ep_elastic.py and test_deep_ep_gpu_calls.py; deep_ep_oracle.py has the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.deep_ep import ElasticBuffer
from tests.support import deep_ep_oracle
from tests.support.deep_ep_oracle import BF16_DIFFERENCE, Batch, Place, Shape
from tests.support.ranks import Rank, StoreGroup

SHAPE = Shape()
SOME = [12, 8, 5, 3]
Counts = list[list[int]]
COUNTS: Counts = [[5, 3, 0, 12], [12] * 4, [0] * 4, [0, 0, 9, 0], [1, 2, 3, 4]]


def make_buffer(rank: Rank, kind: type = ElasticBuffer, **options: Any) -> Any:
    """kind: or EPBuffer."""
    group: Any = StoreGroup(rank)
    fields = {
        "num_max_tokens_per_rank": SHAPE.max_tokens,
        "num_gpu_timeout_secs": 20.0,
        "explicitly_destroy": True,
    }
    return kind(group, **(fields | options))


class Call(NamedTuple):
    """Options of a dispatch."""

    do_expand: bool = False
    do_cpu_sync: bool = True
    expert_alignment: int = 1
    fp8: bool = False
    num_bias: int = 0
    mode: str = "sync"  # or async; of EPBuffer also deferred


def packed(x: Tensor, num_packs: int = 3) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn, and packs [n, num_packs] whose contents do not matter."""
    first = x.view(torch.int16)[:, :num_packs].int()
    return x.to(torch.float8_e4m3fn), first * 65537 + 11


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(
        *(deep_ep_oracle.host(t).flatten().contiguous().view(torch.uint8) for t in (a, b))
    )


def some_rows(got: Any, rows: slice) -> Any:
    return tuple(part[rows] for part in got) if isinstance(got, tuple) else got[rows]


def align(count: int, to: int) -> int:
    return -(-count // to) * to


def waited(mode: str, result: Any) -> tuple[Any, ...]:
    if mode == "deferred":
        return (*result.current_stream_wait(), result)
    event = result[-1]
    assert (event.event is not None) == (mode == "async")
    if mode == "async":
        event.current_stream_wait()
    return result


def later(buffer: Any, mode: str) -> dict[str, Any]:
    """Options of an asynchronous call that runs after all work so far."""
    if mode == "sync":
        return {}
    common = {
        "previous_event": buffer.capture(),
        "async_with_compute_stream": True,
        "allocate_on_comm_stream": True,
    }
    if isinstance(buffer, ElasticBuffer):
        return common | {"previous_event_before_epilogue": buffer.capture()}
    return common | {"defer_epilogue": mode == "deferred"}


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
        **later(buffer, call.mode),
    }
    return waited(call.mode, buffer.dispatch(**(arguments | options)))


# --- one call, checked ---


def check_handle(handle: Any, batches: list[Batch], rank: int, shape: Shape, call: Call) -> None:
    """Counts, and where each received token came from."""
    num_ranks, local = len(batches), shape.num_experts // len(batches)
    rows = deep_ep_oracle.rows_by_rank(batches, rank, shape.num_experts)
    counts = [deep_ep_oracle.rows_of(batches, rank * local + i).shape[0] for i in range(local)]
    aligned = [align(count, call.expert_alignment) for count in counts]
    num_rows = rows.shape[0]
    most = num_ranks * shape.max_tokens
    expanded = most * min(shape.topk, local) + (call.expert_alignment - 1) * local
    expanded = align(expanded, call.expert_alignment)
    assert handle.num_recv_tokens_per_expert_list == (aligned if call.do_cpu_sync else [])
    assert handle.num_recv_tokens == (num_rows if call.do_cpu_sync else most)
    assert handle.num_expanded_tokens == (sum(aligned) if call.do_cpu_sync else expanded)
    by_source = deep_ep_oracle.host(handle.psum_num_recv_tokens_per_scaleup_rank)
    ends = [int((rows[:, 0] <= source).sum()) for source in range(num_ranks)]
    assert by_source.tolist() == ends
    until = [sum(aligned[: i + 1]) for i in range(local)]
    if call.do_expand:
        until = [sum(aligned[:i]) + counts[i] for i in range(local)]
    assert deep_ep_oracle.host(handle.psum_num_recv_tokens_per_expert).tolist() == until
    assert deep_ep_oracle.host(handle.num_unaligned_recv_tokens_per_expert).tolist() == counts
    metadata = deep_ep_oracle.host(handle.recv_src_metadata)
    assert metadata.shape == (handle.num_recv_tokens, shape.topk + 2)
    metadata = metadata[:num_rows]
    assert torch.equal(metadata[:, 0].long(), rows[:, 0] * shape.max_tokens + rows[:, 1])
    idx = deep_ep_oracle.gather(batches, rows, "topk_idx")
    here = deep_ep_oracle.owned(idx, rank, local)
    assert torch.equal(metadata[:, 2:] >= 0, here)
    first = rows[:, 0] * shape.topk + here.int().argmax(1)
    assert torch.equal(metadata[:, 1].long(), first)


def check_by_rank(
    result: tuple[Any, ...], batches: list[Batch], rank: int, shape: Shape, call: Call
) -> Tensor:
    """Returns the rows of combine: sums of this rank's expert outputs for each token."""
    got, recv_idx, recv_weights, handle, _ = result
    local = shape.num_experts // len(batches)
    rows = deep_ep_oracle.rows_by_rank(batches, rank, shape.num_experts)
    count = rows.shape[0]
    values = got[0] if call.fp8 else got
    assert values.shape == (handle.num_recv_tokens, shape.hidden_dim)
    x = deep_ep_oracle.gather(batches, rows)
    assert same_bits(some_rows(got, slice(count)), packed(x) if call.fp8 else x)
    idx = deep_ep_oracle.gather(batches, rows, "topk_idx")
    here = deep_ep_oracle.owned(idx, rank, local)
    wanted = torch.where(here, idx - rank * local, -1)
    assert torch.equal(deep_ep_oracle.host(recv_idx)[:count], wanted)
    assert (deep_ep_oracle.host(recv_idx)[count:] == -1).all()
    weights = deep_ep_oracle.gather(batches, rows, "weights")
    assert torch.equal(deep_ep_oracle.host(recv_weights)[:count], weights.where(here, 0.0))
    y = torch.full((handle.num_recv_tokens, shape.hidden_dim), 1e4, dtype=torch.bfloat16)
    for row in range(count):
        terms = [deep_ep_oracle.expert(int(e), x[row]).float() for e in idx[row][here[row]]]
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
    recv_weights = deep_ep_oracle.host(recv_weights)
    row_of = deep_ep_oracle.host(handle.recv_src_metadata)[:, 2:]
    sources = deep_ep_oracle.rows_by_rank(batches, rank, shape.num_experts)
    y = torch.full((handle.num_expanded_tokens, shape.hidden_dim), 1e4, dtype=torch.bfloat16)
    start = 0
    for i in range(local):
        number = rank * local + i
        rows = deep_ep_oracle.rows_of(batches, number)
        end = start + rows.shape[0]
        x = deep_ep_oracle.gather(batches, rows)
        assert same_bits(some_rows(got, slice(start, end)), packed(x) if call.fp8 else x)
        hit = deep_ep_oracle.gather(batches, rows, "topk_idx") == number
        weights = deep_ep_oracle.gather(batches, rows, "weights")[hit]
        assert torch.equal(recv_weights[start:end], weights)
        for row, (source, token) in enumerate(rows.tolist(), start):
            place = ((sources[:, 0] == source) & (sources[:, 1] == token)).nonzero().item()
            k = (batches[source].topk_idx[token] == number).nonzero().item()
            assert int(row_of[place, k]) == row
        y[start:end] = deep_ep_oracle.expert(number, x)
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
            **later(buffer, call.mode),
        ),
    )
    out, weights = deep_ep_oracle.host(out), deep_ep_oracle.host(weights)
    wanted = deep_ep_oracle.combined(batch) + sum(term.double() for term in terms[: call.num_bias])
    assert deep_ep_oracle.difference(out, wanted) < BF16_DIFFERENCE
    assert torch.equal(weights, batch.weights.where(batch.topk_idx >= 0, 0.0))
    return out, weights


# --- checks: each called on all ranks of a world

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


def steps(place: Place, call: Call, shape: Shape = SHAPE, counts: Counts = COUNTS) -> None:
    """Several steps with changing numbers of tokens, and their statistics."""
    rank, device, buffer = place
    local = shape.num_experts // rank.world_size
    stats = torch.zeros(local, dtype=torch.int32, device=device)
    wanted = torch.zeros(local, dtype=torch.int32)
    check = check_expanded if call.do_expand else check_by_rank
    for seed, of_ranks in enumerate(counts):
        batches = deep_ep_oracle.make_batches(seed, of_ranks[: rank.world_size], shape)
        mine = batches[rank.rank].on(device)
        more = {"cumulative_local_expert_recv_stats": stats}
        result = dispatch(buffer, mine, shape, call, **more)
        handle = result[3]
        check_handle(handle, batches, rank.rank, shape, call)
        y = check(result, batches, rank.rank, shape, call)
        check_combine(buffer, y, result, batches[rank.rank], device, call)
        wanted += deep_ep_oracle.host(handle.num_unaligned_recv_tokens_per_expert)
    assert torch.equal(deep_ep_oracle.host(stats), wanted)


def any_order(place: Place) -> None:
    """Dispatches without a combine, and several combines of one dispatch, late."""
    rank, device, buffer = place
    batches = deep_ep_oracle.make_batches(5, SOME[: rank.world_size], SHAPE)
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


def own_routing(place: Place) -> None:
    rank, device, buffer = place
    batches = deep_ep_oracle.make_batches(6, SOME[: rank.world_size], SHAPE)
    mine = Batch(*(tensor.clone() for tensor in batches[rank.rank].on(device)))
    copied = dispatch(buffer, mine, SHAPE, Call())[3]
    shared = dispatch(buffer, mine, SHAPE, Call(), do_handle_copy=False)[3]
    assert shared.topk_idx.data_ptr() == mine.topk_idx.data_ptr()
    mine.topk_idx.fill_(-1)
    again = buffer.dispatch(mine.x, handle=copied)
    assert (
        again[0].shape[0]
        == deep_ep_oracle.rows_by_rank(batches, rank.rank, SHAPE.num_experts).shape[0]
    )


def columns(place: Place, num_packs: int, do_expand: bool) -> None:
    """Packs of any width arrive unchanged, stored row by row and column by column."""
    rank, device, _ = place
    buffer = make_buffer(rank, type(place.buffer), use_fp8_dispatch=True)
    batches = deep_ep_oracle.make_batches(2, SOME[: rank.world_size], SHAPE)
    mine = batches[rank.rank].on(device)
    values, packs = packed(mine.x, num_packs)
    call = Call(do_expand=do_expand)
    plain, by_columns = (
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
    got = by_columns[0][1]
    assert got.stride() == (1, align(got.shape[0], 4))
    assert got.shape[1] == num_packs
    assert same_bits(plain[0], by_columns[0])
    buffer.destroy()


def repeats(place: Place, do_expand: bool) -> None:
    rank, device, buffer = place
    batches = deep_ep_oracle.make_batches(9, [12] * rank.world_size, SHAPE)
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


def cached(place: Place, call: Call) -> None:
    rank, device, buffer = place
    batches = deep_ep_oracle.make_batches(4, SOME[: rank.world_size], SHAPE)
    mine = batches[rank.rank].on(device)
    first = dispatch(buffer, mine, SHAPE, call)
    handle = first[3]
    check = check_expanded if call.do_expand else check_by_rank
    y = check(first, batches, rank.rank, SHAPE, call)
    sums = check_combine(buffer, y, first, batches[rank.rank], device, call)
    x: Any = packed(mine.x) if call.fp8 else mine.x.T.contiguous().T  # any strides will do
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


def zero_padding(place: Place) -> None:
    call = Call(do_expand=True, expert_alignment=8)
    rank, device, buffer = place
    for seed in range(3):  # later steps reuse memory of earlier ones
        batches = deep_ep_oracle.make_batches(seed, SOME[: rank.world_size], SHAPE)
        mine = batches[rank.rank].on(device)
        result = dispatch(buffer, mine, SHAPE, call, do_zero_padding=True)
        rows, _, weights, handle, _ = result
        ends = deep_ep_oracle.host(handle.psum_num_recv_tokens_per_expert).tolist()
        for end in ends:
            padding = slice(end, align(end, call.expert_alignment))
            assert not deep_ep_oracle.host(rows)[padding].any()
            assert not deep_ep_oracle.host(weights)[padding].any()
        assert any(end % call.expert_alignment for end in ends)


def one_rounding(place: Place, do_expand: bool) -> None:
    """256 + 1 + 1 in bfloat16 is 258, or 256 where 256 + 1 is rounded on the way.

    Rank 0 adds the rows of two of its experts; by rank, the second of two nodes adds for the first.
    """
    rank, device, _ = place
    num_ranks, local = rank.world_size, SHAPE.num_experts // rank.world_size
    last = num_ranks - 1
    experts = [0, 1, SHAPE.num_experts - 1]
    if not do_expand:
        experts = [num_ranks // 2 * local, last * local, 0]
    large = 0 if do_expand else num_ranks // 2  # the rank of the first expert
    x = torch.zeros((1, SHAPE.hidden_dim), dtype=torch.bfloat16)
    mine = Batch(x, torch.tensor([experts]), torch.ones((1, 3))).on(device)
    for allowed in (False, True):
        buffer = make_buffer(rank, type(place.buffer), allow_multiple_reduction=allowed)
        rows, *_, handle, _ = dispatch(buffer, mine, SHAPE, Call(do_expand=do_expand))
        y = torch.ones_like(rows)
        if rank.rank == large:
            y[: num_ranks if do_expand else None] = 256
        for bias, extra in ((None, 0.0), (torch.full_like(x, 4.0).to(device), 4.0)):
            out = deep_ep_oracle.host(buffer.combine(y, handle, bias=bias)[0])
            assert out.dtype == torch.bfloat16
            if not allowed:
                assert (out == 258 + extra).all()
            elif num_ranks > 1 and rank.rank == (last if do_expand else 0):
                assert (out == 256 + extra).all()
        buffer.destroy()


def graphs(place: Place, call: Call) -> None:
    def pair(mine: Batch) -> Tensor:
        rows, idx, weights, handle, _ = dispatch(place.buffer, mine, SHAPE, call)
        if idx is not None:
            weights = weights.sum(1)
        y = rows * 2 * weights.bfloat16().unsqueeze(1)
        more = later(place.buffer, call.mode)
        out: Tensor = waited(call.mode, place.buffer.combine(y, handle, **more))[0]
        return out

    deep_ep_oracle.replay(place.rank, f"ElasticBuffer, expanded: {call.do_expand}", SHAPE, pair)
