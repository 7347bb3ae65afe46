"""Rows of bytes with scale rows of any type (nvfp4 and others): they arrive unchanged.

Values of nvfp4 are two to a byte, with one byte of scale for 16 of them. Here bytes are random,
with words of all ones and of zeros, which are flags where rows flag themselves.

Symbols: T tokens, H values of a token, B bytes of them.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, DispatchOptions, InvalidArgumentError, swizzle_scales
from moe_p2p.moe.layouts import RowLayout
from tests.support.cases import finish, make, make_tokens, on_cpu, on_device
from tests.support.ranks import Rank, on_ranks

H, B = 256, 128
LAYOUTS: tuple[RowLayout, ...] = get_args(RowLayout)
COUNTS = [[5, 3, 0, 12], [0] * 4, [12] * 4]


def rows_of(rank: int, seed: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, packed values, a byte of scale for each 16 of them, and one float of the token."""
    tokens = make_tokens(seed, rank, count)
    generator = torch.Generator().manual_seed(77 * seed + rank)
    x = torch.randint(0, 256, (count, B), generator=generator, dtype=torch.uint8)
    x[::2, :32] = 255
    x[1::2, 16:64] = 0
    scales = torch.randint(0, 256, (count, H // 16), generator=generator, dtype=torch.uint8)
    scales[::3] = 255
    return (
        tokens.topk_idx,
        x,
        scales.view(torch.float8_e4m3fn),
        torch.rand(count, 1, generator=generator),
    )


def send(comm: AllToAll, seed: int, counts: list[int], layout: RowLayout, halves: bool) -> None:
    given = [rows_of(rank, seed, counts[rank]) for rank in range(comm.world_size)]
    ids, x, scales, factor = (on_device(comm, t) for t in given[comm.rank])
    options = DispatchOptions(layout=layout, with_source=True, zero_padding=True)
    more: dict[str, Any] = {"options": options, "extras": [scales, factor]}
    if halves:
        live = comm.dispatch_recv(comm.dispatch_send(x, ids, **more))
    else:
        live = comm.dispatch(x, ids, **more)
    finish(comm)
    got = on_cpu(live)
    assert got.source is not None
    for flat in (got.x.reshape(-1, B), got.extras[0].reshape(-1, H // 16)):
        assert len(flat) == len(got.source)
    num = 0
    for row, (source, token) in enumerate(got.source.tolist()):
        if layout == "by_rank" and row >= int(got.offsets[-1]):
            break
        values, row_scales = got.x.reshape(-1, B)[row], got.extras[0].reshape(-1, H // 16)[row]
        if source < 0:
            assert not values.any()
            continue
        num += 1
        assert torch.equal(values, given[source][1][token])
        assert torch.equal(row_scales.view(torch.uint8), given[source][2][token].view(torch.uint8))
        assert torch.equal(got.extras[1].reshape(-1, 1)[row], given[source][3][token])
    local = comm.num_local_experts
    first = comm.rank * local
    named = [(i >= first) & (i < first + local) for i, *_ in given]
    assert num == sum(int((n.any(1) if layout == "by_rank" else n).sum()) for n in named)
    y = torch.ones(*live.x.shape[:-1], H, dtype=torch.bfloat16, device=live.x.device)
    out = comm.combine(y, live, weighted=False)
    finish(comm)
    named_here = given[comm.rank][0] >= 0
    if layout == "by_rank":
        owner = given[comm.rank][0].div(local, rounding_mode="floor")
        want = sum((owner == r).any(1) for r in range(comm.world_size))
    else:
        want = named_here.sum(1)
    assert torch.equal(out.cpu().float(), torch.as_tensor(want).float()[:, None].expand(-1, H))


def run_layouts(comm: AllToAll, rounds: int) -> None:
    for seed, counts in enumerate(COUNTS * rounds):  # slots are used again
        for number, layout in enumerate(LAYOUTS):
            send(comm, seed, counts, layout, (seed + number) % 2 == 1)


CONFIG: dict[str, Any] = {"hidden_dim": H, "dtype": torch.bfloat16}


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("chunk_tokens", [None, 6])
@on_ranks(4)
def test_bytes_arrive_unchanged(rank: Rank, per_node: int, chunk_tokens: int | None) -> None:
    with make(rank, ranks_per_node=per_node, chunk_tokens=chunk_tokens, **CONFIG) as comm:
        run_layouts(comm, 2)


@on_ranks(2)
def test_words_of_scales_go_with_bytes(rank: Rank) -> None:
    """As many int32 as the caller likes, column by column too."""
    with make(rank, **CONFIG) as comm:
        ids, x, _, _ = rows_of(rank.rank, 1, 7)
        words = torch.arange(7 * 5, dtype=torch.int32).view(7, 5) - 9
        options = DispatchOptions(layout="grouped", column_scales=True, with_source=True)
        got = comm.dispatch(x, ids, scales=words, options=options)
        assert got.scales is not None
        assert got.scales.stride(0) == 1
        assert got.source is not None
        for row in range(int(got.counts.sum())):
            assert torch.equal(got.scales[row], words[got.source[row, 1]])


@on_ranks(1)
def test_bytes_that_do_not_fit_are_refused(rank: Rank) -> None:
    ids = make_tokens(0, 0, 3).topk_idx
    with make(rank, **CONFIG) as comm:
        for width, text in (
            (24, "a multiple of 16 bytes"),
            (0, "a multiple"),
            (1600, "extra_bytes"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                comm.dispatch(torch.zeros(3, width, dtype=torch.uint8), ids)
        with pytest.raises(InvalidArgumentError, match="quantize takes"):
            comm.dispatch(torch.zeros(3, B, dtype=torch.uint8), ids, quantize=True)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 6), (3, 200, 16)])
def test_scales_are_swizzled_as_tensor_cores_read_them(shape: tuple[int, ...]) -> None:
    scales = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.int32)
    got = swizzle_scales(scales)
    *lead, rows, columns = shape
    assert got.shape == (*lead, -(-rows // 128) * 128, -(-columns // 4) * 4)
    flat = got.reshape(-1, got.shape[-2] * got.shape[-1])
    for batch, matrix in enumerate(scales.reshape(-1, rows, columns)):
        used = torch.zeros(flat.shape[1], dtype=torch.bool)
        for row in range(0, rows, 7):
            for column in range(columns):
                tile = row // 128 * (got.shape[-1] // 4) + column // 4
                at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
                assert flat[batch, at] == matrix[row, column]
        used = flat[batch] != 0
        assert int(used.sum()) == int((matrix != 0).sum())  # the rest is zero
