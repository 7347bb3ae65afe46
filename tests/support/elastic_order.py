"""V2's sums in DeepEP's order, of one rank, on the CPU or on a GPU, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.deep_ep_oracle import Place, host, make_batches
from tests.support.elastic_cases import COUNTS, SHAPE, Call, dispatch, later, make_buffer, waited


def ordered_sum(rows: list[Tensor], first: Tensor) -> Tensor:
    total = first.clone()
    for row in rows:
        total += row.float()
    return total.bfloat16()


def deep_ep_order(place: Place, call: Call, allowed: bool) -> None:
    """Bit for bit in DeepEP's order: bias, then k ascending.

    A rank's sum, where ranks add up, is added at the last k of its experts. Rows are so large, or
    small, that another order gives other bits.
    """
    rank, device, _ = place
    local = SHAPE.num_experts // rank.world_size
    factor = torch.tensor([1.0, 2.0**24, -(2.0**24), 3.0] * SHAPE.num_experts)
    buffer = make_buffer(rank, type(place.buffer), allow_multiple_reduction=allowed)
    differs = False
    for seed, of_ranks in enumerate([*COUNTS, *[[12] * 4] * 4]):
        batches = make_batches(seed, of_ranks[: rank.world_size], SHAPE)
        batch = batches[rank.rank]
        rows, _, _, handle, _ = dispatch(buffer, batch.on(device), SHAPE, call)
        y = torch.zeros_like(host(rows))
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        for row, (source, _, *at) in enumerate(host(handle.recv_src_metadata)[:count].tolist()):
            of_rank, token = divmod(source, SHAPE.max_tokens)
            x, ids = batches[of_rank].x[token], batches[of_rank].topk_idx[token].tolist()
            mine = {k: x * factor[ids[k]] for k in range(SHAPE.topk) if at[k] >= 0}
            if call.do_expand:
                for k, result in mine.items():
                    y[at[k]] = result
            else:
                y[row] = ordered_sum(list(mine.values()), 0 * x.float())
        terms = [torch.randn_like(batch.x) for _ in range(call.num_bias)]
        on_device = tuple(term.to(device) for term in terms)
        given: Any = on_device[0] if len(on_device) == 1 else on_device or None
        made = buffer.combine(y.to(device), handle, bias=given, **later(buffer, call.mode))
        out = host(waited(call.mode, made)[0])
        first = sum((term.float() for term in terms), torch.zeros(batch.x.shape))
        for token, experts in enumerate(batch.topk_idx.tolist()):
            parts: dict[int, list[Tensor]] = {}
            for k, expert_id in enumerate(experts):
                if expert_id < 0:
                    continue
                part = (batch.x[token] * factor[expert_id]).bfloat16()
                apart = call.do_expand and not allowed
                key = k if apart else expert_id // local
                parts[key] = [*parts.pop(key, []), part]  # at the last k
            sums = [ordered_sum(of_rank, 0 * first[token]) for of_rank in parts.values()]
            assert torch.equal(out[token], ordered_sum(sums, first[token]))
            owners = [experts[key] // local if apart else key for key in parts]
            by_rank = [s for _, s in sorted(zip(owners, sums, strict=True), key=lambda p: p[0])]
            differs = differs or not torch.equal(ordered_sum(by_rank, first[token]), out[token])
    assert differs or rank.world_size < 3  # two addends have one order
    buffer.destroy()
