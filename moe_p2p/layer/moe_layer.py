"""A plain mixture-of-experts layer over dispatch and combine: read it, copy it, change it.

With an AllToAll the experts are spread over its ranks, and every rank passes its own tokens; with
None all experts live in this process and the same mathematics runs without communication. Both
train. Gradients of an expert sum over the tokens of all ranks, as they do in one process; gradients
of the router cover this rank's tokens only: the caller reduces them, as for any replicated weight.

On a GPU the experts are Triton kernels (kernels/triton), in bf16, fp16 or, for inference, fp8:
`quantize_experts`. Not compiled, inference takes others' products (products.py) where they are
faster and there: DeepGEMM's in fp8, on Hopper; torch's in bf16, for rooms of many rows. In
inference the host waits for nothing, so a layer runs in CUDA graphs; it allocates rows for the
worst routing. But with DeepGEMM and max_tokens above 512, whose worst room is large, an eager call
exchanges counts first, as training does, which keeps its rows until the backward; the host waits
for them. A captured call of such a layer takes Triton's products. Compiled, training does not wait
and allocates for the worst case.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_p2p.layer import experts_cpu, products
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.options import DispatchOptions
from moe_p2p.moe.row_counts import HostCounts

_FEW_TOKENS = 512  # of a rank: up to here padded rows have the room of the worst routing
_FEW_ROWS = 256  # of an expert's room: up to here reading weights takes most of the time
_FIRST = ("w_gate", "w_up")
_PADDED = DispatchOptions(layout="padded", quantize=True, column_scales=True)


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

        offsets: [E_local] or longer, first row of each expert, None: one after the other; unused on
        the CPU. Rows of no expert become zero; on a GPU without autograd they are undefined.
        """
        if rows.is_cuda:
            return self._with_kernels(rows, counts, offsets)
        return self._by_products(rows, functools.partial(experts_cpu.grouped_gemm, counts=counts))

    def _with_kernels(self, rows: Tensor, counts: Tensor, offsets: Tensor | None) -> Tensor:
        """The host does not wait for counts, so all of it can be captured in a graph."""
        from moe_p2p.kernels.triton.grouped_ops import grouped_gemm, grouped_swiglu

        if offsets is None and _are_many(rows, counts) and rows.dtype == torch.bfloat16:
            made = products.make("torch", *self._weights(rows.dtype))
            return made.down(made.hidden(rows, None, counts, 1), counts, 1)
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
    padded: it takes padded rows too, with scales column by column, for DeepGEMM's products.
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
        down = experts.w_down
        self.dtype = down.dtype
        library = products.of_fp8(down.shape[2], down.shape[1], on_gpu=down.is_cuda)
        self.padded = library == "deep_gemm"
        self._products: products.Products | None = None
        self._made_of: list[tuple[int, int]] = []
        parts = {name: getattr(experts, name).detach() for name in ("w_gate", "w_up", "w_down")}
        made = {name: quantize_weights(weight) for name, weight in parts.items()}
        if self.padded:  # one product: in memory up follows gate, expert by expert
            both = torch.cat([made[name][0].mT.view(torch.uint8) for name in _FIRST], dim=1)
            halves = both.view(torch.float8_e4m3fn).mT.chunk(2, dim=2)
            for name, half in zip(_FIRST, halves, strict=True):
                made[name] = half, made[name][1]
        for name, (weights, scales) in made.items():
            self.register_buffer(name, weights)
            self.register_buffer(f"{name}_scales", scales)

    def forward(
        self,
        rows: Tensor,
        counts: Tensor,
        offsets: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        mean: int = 1,
    ) -> Tensor:
        """Like Experts. scales: fp32 [R, ceil(H / 128)] of fp8 rows; None: quantizes the rows.

        rows: also [E_local, C, H], with scales; mean: how many an expert of them can expect.
        """
        if rows.dim() == 3:
            found = self._current()
            hidden = found.hidden(rows, scales, counts, mean)
            return found.down(hidden, counts, mean).to(self.dtype)
        from moe_p2p.kernels.triton.grouped_ops import Fp8, grouped_gemm, grouped_swiglu
        from moe_p2p.kernels.triton.quantize import quantize

        starts = counts.cumsum(0) - counts if offsets is None else offsets
        x = Fp8(*quantize(rows)) if scales is None else Fp8(rows, scales)
        gate, up = Fp8(self.w_gate, self.w_gate_scales), Fp8(self.w_up, self.w_up_scales)
        h = grouped_swiglu(x, gate, up, counts, offsets=starts)
        down = Fp8(self.w_down, self.w_down_scales)
        return grouped_gemm(h, down, counts, offsets=starts, out_dtype=self.dtype)

    def _current(self) -> products.Products:
        """Returns DeepGEMM's products of the weights as they are now: scales are copied there."""
        from moe_p2p.kernels.triton.grouped_ops import Fp8

        seen = [(each.data_ptr(), each._version) for each in self.buffers()]
        if self._products is None or seen != self._made_of:
            names = (*_FIRST, "w_down")
            pairs = (Fp8(getattr(self, name), getattr(self, f"{name}_scales")) for name in names)
            self._products, self._made_of = products.DeepGemmProducts(*pairs), seen
        return self._products


def _are_many(rows: Tensor, counts: Tensor) -> bool:
    """Whether torch's products of grouped rows, one expert after the other, are the faster ones."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not rows.is_cuda:
        return False
    return rows.shape[0] > _FEW_ROWS * len(counts) and not products.why_not("torch", on_gpu=True)


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
        padded = self._pads(topk_idx)
        capacity, max_tokens = self._room(topk_idx, padded=padded)
        form: dict[str, Any] = {"layout": "grouped", "quantize": fp8}
        received = self.all_to_all.dispatch(
            x,
            topk_idx,
            topk_weights,
            **({"options": _PADDED} if padded else form),
            capacity=capacity,
            max_tokens=max_tokens,
        )
        more: dict[str, Any] = {"scales": received.scales} if fp8 else {}
        if padded:
            ranks, experts = self.all_to_all.world_size, self.num_experts
            more["mean"] = max(1, ranks * topk_idx.numel() // experts)
        many = not fp8 and _are_many(received.x, received.counts)
        offsets = None if many else received.offsets
        y = self.experts(received.x, received.counts, offsets, **more)
        sums: Tensor = self.all_to_all.combine(y, received)
        return sums

    def _pads(self, topk_idx: Tensor) -> bool:
        """Whether rows are padded, for DeepGEMM: the same on all ranks."""
        experts, all_to_all = self.experts, self.all_to_all
        assert all_to_all is not None
        if torch.compiler.is_compiling() or not getattr(experts, "padded", False):
            return False
        config = all_to_all.config
        waits = _host_may_wait(topk_idx) and not config.mask_lost_ranks
        return config.max_tokens <= _FEW_TOKENS or waits

    def _room(self, topk_idx: Tensor, *, padded: bool) -> tuple[int | None, int | None]:
        """Returns this rank's capacity in rows, padded of an expert, and the most tokens of any
        rank; None: worst case.

        Collective: ranks exchange how many tokens they have for each expert.
        """
        all_to_all = self.all_to_all
        assert all_to_all is not None
        large = padded and all_to_all.config.max_tokens > _FEW_TOKENS
        if not (torch.is_grad_enabled() or large) or not _host_may_wait(topk_idx):
            return None, None
        if all_to_all.config.mask_lost_ranks:  # gather_counts would wait for all ranks
            return None, None
        mine = self._host_counts.of(topk_idx, self.num_experts, 1)
        gathered = mine.gather(all_to_all, self.num_experts + 2)[:, 1:]  # [W, E + 1], last column T
        of_experts = gathered[:, local_experts(all_to_all)].sum(0)
        rows = of_experts.max() if padded and len(of_experts) else of_experts.sum()
        return max(1, int(rows)), max(1, int(gathered[:, -1].max()))

    def _one_process(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        expert, order = topk_idx.flatten().sort(stable=True)  # (token, k) pairs, expert by expert
        token = order // topk_idx.shape[1]
        # Not bincount: on a GPU that waits for the largest value.
        counts = expert.new_zeros(self.num_experts).scatter_add(0, expert, torch.ones_like(expert))
        y = self.experts(x[token], counts) * topk_weights.flatten()[order, None]
        out: Tensor = y.new_zeros(x.shape).index_add(0, token, y).to(x.dtype)
        return out
