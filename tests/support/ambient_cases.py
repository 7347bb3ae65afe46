"""All public calls, on objects made once; test_ambient.py runs them in several states of torch.

The calls name the device and type of every tensor they create, as programs for any state must.

Symbols: T tokens, K top-k, E experts, H hidden size, W ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p import (
    AllToAll,
    AllToAllConfig,
    CombineOptions,
    DispatchOptions,
    Engine,
    EngineConfig,
    PageRows,
    deep_ep,
)
from moe_p2p.engine.transfers import Slice
from moe_p2p.layer import MoELayer
from moe_p2p.moe.reference import Tokens, Topology, combine, dispatch, route
from tests.support.deep_ep_cases import layout_of
from tests.support.ranks import Rank, StoreGroup

TIMED = CombineOptions(with_wait_ticks=True)
T, K, E, H, W = 6, 2, 4, 256, 2
BF16, FP32 = torch.bfloat16, torch.float32
Results = dict[str, list[Tensor]]


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Given(NamedTuple):
    x: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K]
    weights: Tensor  # [T, K]

    def copies(self) -> Given:
        """Returns copies, created in the current state."""
        return Given._make(tensor.clone() for tensor in self)


def given_to(rank: int, device: str) -> Given:
    generator = torch.Generator().manual_seed(rank)
    host: dict[str, Any] = {"generator": generator, "dtype": FP32, "device": "cpu"}
    x, scores = torch.randn(T, H, **host), torch.rand(T, E, **host)
    weights, topk_idx = scores.topk(K, dim=1)
    return Given(x.to(device, BF16), topk_idx.to(device), weights.to(device))


class Made:
    """All objects of one rank."""

    def __init__(self, rank: Rank, device: str) -> None:
        self.rank, self.device = rank, device
        fields: dict[str, Any] = {"num_experts": E, "hidden_dim": H, "topk": K, "max_tokens": T}
        fields |= {"device": device, "timeout_s": 100.0, "num_threads": 1, "extra_bytes": 16}
        place = {"rank": rank.rank, "world_size": rank.world_size}
        self.config = AllToAllConfig(**fields)
        self.comm = AllToAll(rank.store, self.config, **place)
        self.masking = AllToAll(rank.store, AllToAllConfig(**fields, mask_lost_ranks=True), **place)
        group: Any = StoreGroup(rank)
        self.low_latency = deep_ep.Buffer(
            group, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True
        )
        self.normal = deep_ep.Buffer(group, explicitly_destroy=True)
        self.elastic = deep_ep.ElasticBuffer(
            group, num_max_tokens_per_rank=T, explicitly_destroy=True
        )
        self.hybrid = deep_ep.HybridEPBuffer(group, H, T, E // W)
        self.engines = [
            Engine(EngineConfig(transport="loopback")),
            Engine(EngineConfig(transport="loopback")),
        ]
        # A module's weights get torch's default device and type.
        with torch.inference_mode(False), torch.device(device), default_dtype(BF16):
            self.layer = MoELayer(H, E, topk=K, ffn_dim=32, all_to_all=self.comm)
            self.layer.router.score.weight.data.copy_(given_to(7, device).x[:E])

    def close(self) -> None:
        self.comm.close()
        self.masking.close()
        for buffer in (self.low_latency, self.normal, self.elastic):
            buffer.destroy()
        for engine in self.engines:
            engine.close()

    def results(self, given: Given) -> Results:
        """Returns the results of all calls, on the CPU; of training too where autograd is on."""
        calls = [self.whole, self.halves, self.masks, self.low_latency_calls]
        calls += [self.normal_calls, self.elastic_calls, self.hybrid_calls, self.transfers]
        calls += [self.sizes, self.model]
        if torch.is_grad_enabled():
            calls += [self.training, self.layer_training]
        return {
            call.__name__: [on_host(tensor) for tensor in call(given.copies())] for call in calls
        }

    def whole(self, given: Given) -> Iterator[Tensor]:
        x, topk_idx, weights = given
        for layout, quantize in itertools.product(("padded", "grouped", "by_rank"), (False, True)):
            got = self.comm.dispatch(
                x,
                topk_idx,
                weights,
                extras=[topk_idx] if layout == "grouped" else (),
                options=DispatchOptions(
                    layout=layout,  # type: ignore[arg-type]
                    quantize=quantize,
                    zero_padding=True,
                    with_source=True,
                    with_wait_ticks=True,
                    copy_topk=True,
                ),
            )
            rows = got.x.to(BF16)
            yield from (got.counts, got.offsets, got.x.float(), got.topk_idx)
            yield self.comm.combine(rows, got, bias=x)
        got = self.comm.dispatch(x, topk_idx, num_tokens=T - 1)
        out = torch.empty((T, H), dtype=BF16, device=self.device)
        rows = got.x.nan_to_num(0.0)
        yield self.comm.combine(rows, got, options=TIMED, topk_weights=weights, out=out)[0]
        self.comm.release(self.comm.dispatch(x, topk_idx))
        values = torch.arange(3, dtype=torch.int32, device="cpu") + self.rank.rank
        yield self.comm.gather_counts(values)

    def halves(self, given: Given) -> Iterator[Tensor]:
        x, topk_idx, weights = given
        with torch.no_grad():
            got = self.comm.dispatch_recv(self.comm.dispatch_send(x, topk_idx, weights))
            rows = got.x.nan_to_num(0.0)
            yield got.counts
            yield self.comm.combine_recv(self.comm.combine_send(rows, got))
            self.comm.release(self.comm.dispatch_send(x, topk_idx, weights))

    def masks(self, given: Given) -> Iterator[Tensor]:
        """Each rank masks all others; in objects that were used before they are masked already."""
        self.masking.mask_ranks(other for other in range(W) if other != self.rank.rank)
        x, topk_idx, weights = given
        with torch.no_grad():
            got = self.masking.dispatch(
                x, topk_idx, weights, options=DispatchOptions(zero_padding=True)
            )
            yield self.masking.combine(got.x, got)
        yield self.masking.masked

    def training(self, given: Given) -> Iterator[Tensor]:
        for weighted in (True, False):  # False: no gradient comes back to the weights' rows
            x, weights = given.x.detach().requires_grad_(), given.weights.detach().requires_grad_()
            got = self.comm.dispatch(x, given.topk_idx, weights, layout="grouped")
            out = self.comm.combine(got.x * 2, got, weighted=weighted)
            out.float().square().sum().backward()
            assert x.grad is not None
            yield from (out, x.grad)
            assert weights.grad is not None
            yield weights.grad

    def low_latency_calls(self, given: Given) -> Iterator[Tensor]:
        x, topk_idx, weights = given
        buffer = self.low_latency
        status = torch.empty(W, dtype=torch.int32, device=self.device)
        buffer.low_latency_query_mask_buffer(status)
        yield status
        stats = torch.zeros(E // W, dtype=torch.int32, device=self.device)
        ticks = torch.zeros(W, dtype=torch.int64, device=self.device)
        for use_fp8, hook in itertools.product((False, True), (False, True)):
            rows, counts, handle, _, receive = buffer.low_latency_dispatch(
                x,
                topk_idx,
                T,
                E,
                use_fp8=use_fp8,
                return_recv_hook=hook,
                cumulative_local_expert_recv_stats=stats,
                dispatch_wait_recv_cost_stats=ticks,
            )
            if receive is not None:
                receive()
            y = buffer.get_next_low_latency_combine_buffer(handle)
            y.copy_((rows[0] if use_fp8 else rows).to(BF16).nan_to_num(0.0))
            out, _, receive = buffer.low_latency_combine(
                y, topk_idx, weights, handle, return_recv_hook=hook, zero_copy=True
            )
            if receive is not None:
                receive()
            yield from (counts, out)
        yield stats
        buffer.low_latency_update_mask_buffer(1 - self.rank.rank, True)
        buffer.low_latency_query_mask_buffer(status)
        yield status
        buffer.low_latency_clean_mask_buffer()

    def normal_calls(self, given: Given) -> Iterator[Tensor]:
        x, topk_idx, weights = given
        layout, _ = layout_of(self.normal, topk_idx, E)
        yield from (tensor for tensor in layout.values() if tensor is not None)
        rows, row_idx, row_weights, counts, handle, _ = self.normal.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, **layout
        )
        assert isinstance(rows, Tensor)
        assert row_idx is not None
        assert row_weights is not None
        yield from (rows, row_idx, row_weights, torch.tensor(counts, device="cpu"))
        out, summed, _ = self.normal.combine(rows, handle, topk_weights=row_weights, bias=x)
        yield from (out, summed)  # type: ignore[misc]
        again = self.normal.dispatch(x, handle=handle)[0]
        assert isinstance(again, Tensor)
        yield again

    def elastic_calls(self, given: Given) -> Iterator[Tensor]:
        x, topk_idx, weights = given
        for expand, sync in itertools.product((False, True), (False, True)):
            rows, _, row_weights, handle, _ = self.elastic.dispatch(
                x,
                topk_idx,
                weights,
                num_experts=E,
                num_max_tokens_per_rank=T,
                do_expand=expand,
                do_cpu_sync=sync,
                do_zero_padding=expand,
            )
            assert isinstance(rows, Tensor)
            num_rows = handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
            yield num_rows
            yield handle.psum_num_recv_tokens_per_expert
            yield handle.recv_src_metadata[: int(num_rows)]
            out, summed, _ = self.elastic.combine(rows, handle, topk_weights=row_weights)
            assert summed is not None
            yield from (out, summed)
        self.elastic.barrier()

    def hybrid_calls(self, given: Given) -> Iterator[Tensor]:
        x, topk_idx, weights = given
        zeros = torch.zeros((T, E), dtype=FP32, device=self.device)
        probs = zeros.scatter(1, topk_idx, weights)
        routing = zeros.scatter(1, topk_idx, 1.0).bool()
        for budget in (None, W * T * K + 4 * E):
            rows, row_probs, _, per_expert, handle = self.hybrid.dispatch_with_permute(
                hidden=x,
                routing_map=routing,
                probs=probs,
                pad_multiple=4,
                num_permuted_tokens=budget,
                non_blocking=budget is not None,
            )
            assert row_probs is not None
            yield from (rows, row_probs, per_expert)
            out, back = self.hybrid.combine_with_unpermute(
                hidden=rows, probs=row_probs, handle=handle
            )
            assert back is not None
            yield from (out, back)

    def model(self, given: Given) -> Iterator[Tensor]:
        with torch.no_grad():
            yield self.layer(given.x)

    def layer_training(self, given: Given) -> Iterator[Tensor]:
        x = given.x.detach().requires_grad_()
        self.layer.zero_grad()
        self.layer(x).float().square().sum().backward()
        assert x.grad is not None
        yield x.grad
        for weight in self.layer.parameters():
            assert weight.grad is not None
            yield weight.grad

    def transfers(self, _: Given) -> Iterator[Tensor]:
        """Between two engines of this rank, in host memory."""
        sender, receiver = self.engines
        source = torch.arange(64, dtype=torch.int32, device="cpu")
        target = torch.zeros(64, dtype=torch.int32, device="cpu")
        memory, landing = sender.register(source), receiver.register(target)
        peer = sender.connect(receiver.address)
        region = sender.resolve(landing.descriptor, peer)
        sender.write(memory, region, nbytes=128).wait()
        pages = torch.tensor([8, 10], dtype=torch.int64, device="cpu")
        request = sender.write_pages(
            memory, region, rows=PageRows(page_bytes=16), pages=pages, region_pages=pages + 1
        )
        request.wait()
        sender.scatter(memory, [Slice(0, region, 224, 32)]).wait()
        count = receiver.imm_value(3) + 1
        sender.send_imm(peer, 3).wait()
        receiver.wait_imm(3, count)
        assert sender.counters()[0]["bytes_written"] > 0
        yield target
        memory.unregister()
        landing.unregister()

    def sizes(self, given: Given) -> Iterator[Tensor]:
        """The plan, and the specification in plain torch."""
        plan = self.config.plan(world_size=W, ranks_per_node=W)
        yield torch.tensor(list(plan.values()), device="cpu")
        tokens = Tokens(
            x=given.x.cpu(), topk_idx=given.topk_idx.cpu(), topk_weights=given.weights.cpu()
        )
        topology = Topology(world_size=1, ranks_per_node=1, num_experts=E)
        for scale_format in ("float32", "power_of_two", "ue8m0"):
            routing = route(
                topology,
                [tokens],
                layout="grouped",
                quantized=True,
                scale_format=scale_format,  # type: ignore[arg-type]
            )
            got = dispatch(routing, 0)
            assert got.scales is not None
            yield from (got.scales, got.x.float(), got.row_weights)
            yield combine(routing, 0, [got.x.float()], out_dtype=BF16)


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()


def difference(got: Results, expected: Results) -> list[str]:
    return [
        f"{name}[{i}]"
        for name in got.keys() & expected.keys()
        for i, (a, b) in enumerate(zip(got[name], expected[name], strict=True))
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]
