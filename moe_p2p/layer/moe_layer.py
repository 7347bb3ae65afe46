"""A plain mixture-of-experts layer over dispatch and combine: read it, copy it, change it.

With an AllToAll the experts are spread over its ranks, and every rank passes its own tokens; with
None all experts live in this process and the same mathematics runs without communication. Both
train. Gradients of an expert sum over the tokens of all ranks, as they do in one process; gradients
of the router cover this rank's tokens only: the caller reduces them, as for any replicated weight.

On a GPU the experts are Triton kernels (kernels/triton), in bf16, fp16 or, for inference, fp8:
`quantize_experts`. In inference the host waits for nothing, so a layer runs in CUDA graphs; it
allocates rows for the worst routing. Training keeps its rows until the backward, so ranks exchange
counts first, for which the host waits; compiled, it does not wait and allocates for the worst case.
torch.compile makes one graph of it, on a CPU too; mark the number of tokens as unbacked
(torch._dynamo.decorators.mark_unbacked) and that graph serves 0 and 1 tokens as well (not 0 in
inductor of torch 2.11 on a GPU: its grids divide by the number). Put checkpoints
(torch.utils.checkpoint) around the compiled layer: inside, torch 2.13 fails on ordered operators.

Shapes: T tokens, H hidden size, F width of an expert, E experts, E_local of this rank, K top-k,
R rows at this rank's experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_p2p.layer import experts_cpu
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.row_counts import HostCounts


def local_experts(all_to_all: AllToAll) -> list[int]:
    """Global ids of this rank's experts, in the order of dispatch's rows."""
    owners = all_to_all.config.expert_rank
    if owners is None:
        count = all_to_all.num_local_experts
        return list(range(all_to_all.rank * count, (all_to_all.rank + 1) * count))
    return [expert for expert, owner in enumerate(owners) if owner == all_to_all.rank]


class Router(nn.Module):
    """Softmax over all experts; keeps the K largest, rescaled to sum to one."""

    def __init__(self, hidden_dim: int, num_experts: int, *, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.score = nn.Linear(hidden_dim, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> expert ids int64 [T, K] and their weights fp32 [T, K]."""
        probabilities = self.score(x).float().softmax(dim=-1)  # [T, E]
        weights, topk_idx = probabilities.topk(self.topk, dim=-1)
        return topk_idx, weights / weights.sum(dim=-1, keepdim=True)


class Experts(nn.Module):
    """SwiGLU experts, w_down(silu(w_gate x) * w_up x), on rows that are grouped by expert.

    Expert e starts from the same weights whichever rank holds it: they are drawn from (seed, e).
    """

    def __init__(self, expert_ids: list[int], hidden_dim: int, *, ffn_dim: int, seed: int) -> None:
        super().__init__()
        count = len(expert_ids)
        self.w_gate = nn.Parameter(torch.empty(count, hidden_dim, ffn_dim))
        self.w_up = nn.Parameter(torch.empty(count, hidden_dim, ffn_dim))
        self.w_down = nn.Parameter(torch.empty(count, ffn_dim, hidden_dim))
        for i, expert in enumerate(expert_ids):
            generator = torch.Generator().manual_seed(1_000_003 * seed + expert)
            for weight in (self.w_gate, self.w_up, self.w_down):
                # Drawn on the host, so that the weights do not depend on the device.
                drawn = torch.empty(weight.shape[1:], dtype=weight.dtype, device="cpu")
                drawn.normal_(std=weight.shape[1] ** -0.5, generator=generator)
                weight.data[i] = drawn

    def forward(self, rows: Tensor, counts: Tensor, offsets: Tensor | None = None) -> Tensor:
        """rows [R, H], counts [E_local] rows of each expert, expert by expert -> [R, H].

        offsets: [E_local] or longer, first row of each expert; unused on the CPU. Rows of no expert
        become zero; on a GPU without autograd they are undefined.
        """
        if rows.is_cuda:
            return self._with_kernels(rows, counts, offsets)
        return self._by_products(rows, functools.partial(experts_cpu.grouped_gemm, counts=counts))

    def _with_kernels(self, rows: Tensor, counts: Tensor, offsets: Tensor | None) -> Tensor:
        """The host does not wait for counts, so all of it can be captured in a graph."""
        from moe_p2p.kernels.triton.grouped_ops import grouped_gemm, grouped_swiglu

        starts = counts.cumsum(0) - counts if offsets is None else offsets
        product = functools.partial(grouped_gemm, counts=counts, offsets=starts)
        if torch.is_grad_enabled():
            return self._by_products(rows, functools.partial(product, zero_padding=True))
        w_gate, w_up, w_down = self._weights(rows.dtype)
        return product(grouped_swiglu(rows, w_gate, w_up, counts, offsets=starts), w_down)

    def _by_products(self, rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        w_gate, w_up, w_down = self._weights(rows.dtype)
        return product(functional.silu(product(rows, w_gate)) * product(rows, w_up), w_down)

    def _weights(self, dtype: torch.dtype) -> list[Tensor]:
        return [w.to(dtype) for w in (self.w_gate, self.w_up, self.w_down)]


class Fp8Experts(nn.Module):
    """The same experts with fp8 weights, one scale per 128 x 128 values: inference on a GPU.

    Rows are multiplied in fp8 as dispatch returns them; so are the rows between the matrices.
    """

    w_gate: Tensor  # e4m3 [E_local, H, F], and fp32 scales [E_local, ceil(H / 128), ceil(F / 128)]
    w_gate_scales: Tensor
    w_up: Tensor
    w_up_scales: Tensor
    w_down: Tensor  # [E_local, F, H]
    w_down_scales: Tensor

    def __init__(self, experts: Experts) -> None:
        from moe_p2p.kernels.triton.quantize import quantize_weights

        super().__init__()
        self.dtype = experts.w_down.dtype
        for name in ("w_gate", "w_up", "w_down"):
            weights, scales = quantize_weights(getattr(experts, name))
            self.register_buffer(name, weights)
            self.register_buffer(f"{name}_scales", scales)

    def forward(
        self,
        rows: Tensor,
        counts: Tensor,
        offsets: Tensor | None = None,
        *,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Like Experts. scales: fp32 [R, ceil(H / 128)] of fp8 rows; None: quantizes the rows."""
        from moe_p2p.kernels.triton.grouped_ops import Fp8, grouped_gemm, grouped_swiglu
        from moe_p2p.kernels.triton.quantize import quantize

        starts = counts.cumsum(0) - counts if offsets is None else offsets
        x = Fp8(*quantize(rows)) if scales is None else Fp8(rows, scales)
        gate, up = Fp8(self.w_gate, self.w_gate_scales), Fp8(self.w_up, self.w_up_scales)
        h = grouped_swiglu(x, gate, up, counts, offsets=starts)
        down = Fp8(self.w_down, self.w_down_scales)
        return grouped_gemm(h, down, counts, offsets=starts, out_dtype=self.dtype)


def _host_may_wait(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and not (
        x.is_cuda and torch.cuda.is_current_stream_capturing()
    )


class MoELayer(nn.Module):
    """Router, dispatch, experts, combine."""

    def __init__(
        self,
        hidden_dim: int,
        num_experts: int,
        *,
        topk: int,
        ffn_dim: int,
        all_to_all: AllToAll | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.all_to_all = all_to_all
        self._host_counts = HostCounts()
        self.router = Router(hidden_dim, num_experts, topk=topk)
        mine = list(range(num_experts)) if all_to_all is None else local_experts(all_to_all)
        self.experts: Experts | Fp8Experts = Experts(mine, hidden_dim, ffn_dim=ffn_dim, seed=seed)

    def quantize_experts(self) -> MoELayer:
        """Uses fp8 for experts and dispatched tokens from now on: for inference, on a GPU.

        Call it last, once weights are loaded, converted and on the device.
        """
        if isinstance(self.experts, Experts):
            self.experts = Fp8Experts(self.experts)
        return self.requires_grad_(False)

    def check(self) -> None:
        """Raises the error that broke its communicator. forward does too; graph replays do not."""
        if self.all_to_all is not None:
            self.all_to_all.check()

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] of this rank -> [T, H]."""
        return self.apply_experts(x, *self.router(x))

    def apply_experts(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Like forward, with a given routing: topk_idx and topk_weights [T, K]."""
        if self.all_to_all is None:
            return self._one_process(x, topk_idx, topk_weights)
        fp8 = isinstance(self.experts, Fp8Experts)
        capacity, max_tokens = self._room(topk_idx)
        received = self.all_to_all.dispatch(
            x,
            topk_idx,
            topk_weights,
            layout="grouped",
            quantize=fp8,
            capacity=capacity,
            max_tokens=max_tokens,
        )
        scales = {"scales": received.scales} if fp8 else {}
        y = self.experts(received.x, received.counts, received.offsets, **scales)
        sums: Tensor = self.all_to_all.combine(y, received)
        return sums

    def _room(self, topk_idx: Tensor) -> tuple[int | None, int | None]:
        """Returns this rank's capacity in rows and the most tokens of any rank; None: worst case.

        Collective: ranks exchange how many tokens they have for each expert.
        """
        if not torch.is_grad_enabled() or not _host_may_wait(topk_idx):
            return None, None
        all_to_all = self.all_to_all
        assert all_to_all is not None
        if all_to_all.config.mask_lost_ranks:  # gather_counts would wait for all ranks
            return None, None
        mine = self._host_counts.of(topk_idx, self.num_experts, 1)
        gathered = mine.gather(all_to_all, self.num_experts + 2)[:, 1:]  # [W, E + 1], last column T
        rows = gathered[:, local_experts(all_to_all)].sum()
        return max(1, int(rows)), max(1, int(gathered[:, -1].max()))

    def _one_process(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        expert, order = topk_idx.flatten().sort(stable=True)  # (token, k) pairs, expert by expert
        token = order // topk_idx.shape[1]
        # Not bincount: on a GPU that waits for the largest value.
        counts = expert.new_zeros(self.num_experts).scatter_add(0, expert, torch.ones_like(expert))
        y = self.experts(x[token], counts) * topk_weights.flatten()[order, None]
        out: Tensor = y.new_zeros(x.shape).index_add(0, token, y).to(x.dtype)
        return out
