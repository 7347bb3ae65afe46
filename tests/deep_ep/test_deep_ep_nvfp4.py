"""Low-latency dispatch of nvfp4: rows and scales where DeepEP's branch hybrid-ep puts them.

Bit for bit the cast of each token; and the cast against all values that nvfp4 has.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_p2p.deep_ep import Buffer, nvfp4
from tests.support.ranks import Rank, StoreGroup, run_threads

E, H, K, T = 8, 256, 3, 40
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decoded(values: Tensor, scales: Tensor, global_scale: float) -> Tensor:
    """[n, H / 2] and [n, H / 16] -> [n, H] float32."""
    codes = torch.stack((values & 15, values >> 4), 2).flatten(1).long()
    signed = VALUES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return signed * (scales.float() / global_scale).repeat_interleave(16, 1)


def test_each_value_is_the_nearest() -> None:
    x = torch.linspace(-6, 6, 64 * 97).view(-1, 64)
    x[:, ::16] = 6.0  # so that every block has the scale 1
    values, scales = nvfp4.quantize(x, torch.ones(1))
    assert (scales.float() == 1).all()
    got = decoded(values, scales, 1.0)
    every = torch.cat((VALUES, -VALUES))
    nearest = (x[..., None] - every).abs().amin(2)
    assert torch.equal((got - x).abs(), nearest)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat_interleave(4)
    row = torch.cat((torch.full((4,), 6.0), ties)).view(1, 32)
    row[0, 16] = 6.0
    got = decoded(*nvfp4.quantize(row, torch.ones(1)), 1.0)[0]
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]).repeat_interleave(4)
    kept = torch.arange(28) != 12
    assert torch.equal(got[4:][kept], even[kept])
    nothing = nvfp4.quantize(torch.zeros(2, 32), torch.ones(1))
    assert not any(part.view(torch.uint8).any() for part in nothing)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_rows_and_scales(hook: bool, per_token: bool) -> None:
    made = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(T - 9 * rank, H, generator=generator).bfloat16()
        ids = torch.rand(len(x), E, generator=generator).topk(K)[1]
        made.append((x, ids, torch.rand(len(x) if per_token else 1, generator=generator) * 50 + 20))

    def body(rank: Rank) -> None:
        group = StoreGroup(rank)
        buffer = Buffer(group, low_latency_mode=True, explicitly_destroy=True)  # type: ignore[arg-type]
        x, ids, scale = made[rank.rank]
        for _ in range(3):
            got, counts, handle, _, receive = buffer.low_latency_dispatch(
                x, ids, T, E, use_nvfp4=True, x_global_scale=scale, return_recv_hook=hook
            )
            if receive is not None:
                receive()
            rows, scales = got
            assert rows.shape == (2 * T, H // 2, E // 2)
            assert scales.shape == (32, 4, 1, 4, H // 64, E // 2)
            for expert in range(E // 2):
                number = rank.rank * (E // 2) + expert
                want = [
                    [part[token] for part in nvfp4.quantize(x_, scale_)]
                    for x_, ids_, scale_ in made
                    for token in (ids_ == number).any(1).nonzero().flatten().tolist()
                ]
                assert int(counts[expert]) == len(want)
                for m, (values, of_row) in enumerate(want):
                    assert torch.equal(rows[m, :, expert], values)
                    mine = scales[m % 32, m // 32 % 4, m // 128, :, :, expert].float()
                    assert torch.equal(mine.T.flatten(), of_row.float())
            y = torch.ones(E // 2, 2 * T, H, dtype=torch.bfloat16)
            weights = torch.ones(ids.shape)
            out, _, _ = buffer.low_latency_combine(y, ids, weights, handle)
            assert (out == K).all()
        with pytest.raises(AssertionError, match="needs x_global_scale"):
            buffer.low_latency_dispatch(x, ids, T, E, use_nvfp4=True)
        buffer.destroy()

    run_threads(2, body)
