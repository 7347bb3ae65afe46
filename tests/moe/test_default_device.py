"""A default device passes no call of ours to torch's Python, nor changes what other modes see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from moe_p2p import InvalidArgumentError, deep_ep
from tests.support.ambient_cases import default_device
from tests.support.cases import make, make_tokens
from tests.support.ranks import Rank

T, K, E = 5, 3, 8


def pairs(rank: Rank) -> Iterator[Callable[[], Any]]:
    """Calls of all kinds; each is made once before."""
    group = dist.ProcessGroup(rank.store, 0, 1)
    comm = make(rank)
    buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=T, explicitly_destroy=True)
    tokens = make_tokens(0, 0, T)
    x, idx, weights = tokens.x.bfloat16(), tokens.topk_idx, tokens.topk_weights

    def whole() -> None:
        received = comm.dispatch(tokens.x, idx, weights)
        comm.combine(received.x, received)

    def halves() -> None:
        received = comm.dispatch_recv(comm.dispatch_send(tokens.x, idx, weights))
        comm.combine_recv(comm.combine_send(received.x, received))

    def low_latency() -> None:
        rows, _, handle, _, receive = buffer.low_latency_dispatch(
            x, idx, T, E, use_fp8=False, return_recv_hook=True
        )
        assert receive is not None
        receive()
        assert isinstance(rows, torch.Tensor)
        buffer.low_latency_combine(rows, idx, weights, handle)

    def normal() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
        given: Any = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert}
        rows, *_, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, is_token_in_rank=in_rank, **given
        )
        buffer.combine(rows, handle)

    def v2() -> None:
        rows, *_, handle, _ = elastic.dispatch(x, idx, weights, num_experts=E)
        assert isinstance(rows, torch.Tensor)
        elastic.combine(rows, handle)

    with torch.no_grad():
        for pair in (whole, halves, low_latency, normal, v2):
            pair()
            yield pair
    comm.close()
    buffer.destroy()
    elastic.destroy()


def test_a_default_device_sees_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def see(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

    for pair in pairs(Rank(0, 1, dist.HashStore())):
        with monkeypatch.context() as patch:
            patch.setattr(DeviceContext, "__torch_function__", see)
            with default_device("meta"):
                pair()
        assert not any("moe_p2p" in name for name in seen), (pair.__name__, seen)
        assert len(seen) <= 2, (pair.__name__, seen)  # what the test itself asks a tensor for
        seen.clear()


def test_other_modes_see_what_a_call_does() -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    pair = next(pairs(Rank(0, 1, dist.HashStore())))
    with default_device("meta"), Seeing() as seeing:
        pair()
    assert any("dispatch" in name for name in seeing.names)


def test_a_call_that_fails_leaves_the_default_device_as_it_was() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    tokens = make_tokens(0, 0, T)
    x, idx = tokens.x.bfloat16(), tokens.topk_idx
    wrong = idx.float()
    buffer.low_latency_dispatch(x, idx, T, E)
    with default_device("meta"):
        with pytest.raises(InvalidArgumentError, match="topk_idx") as failed:
            buffer.low_latency_dispatch(x, wrong, T, E)
        assert torch.empty(1).is_meta, failed
        buffer.low_latency_dispatch(x, idx, T, E)
        assert torch.empty(1).is_meta
    buffer.destroy()
