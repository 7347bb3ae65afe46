"""Matrix products of a rank's experts, by one library: DeepGEMM, torch, or Triton of this package.

    made = make("deep_gemm", gate, up, down)
    hidden = made.hidden(x, scales, counts, mean)     # silu(x gate) * (x up)
    y = made.down(hidden, counts, mean)

The host waits for nothing on a GPU, so all of it runs in CUDA graphs. `unready` and `down_into`
are for a combine that sends rows while they are written (moe_p2p/moe/ready.py).

Shapes: E experts of this rank, H hidden size, F width of an expert, C rows of an expert (capacity),
R rows; x is padded [E, C, H] or grouped [R, H], expert after expert.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from moe_p2p import errors, log
from moe_p2p.layer import experts_cpu
from moe_p2p.machine import driver
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.ready import ReadyRows
from moe_p2p.moe.shape import SCALE_BLOCK

# Of a product that is watched by counters of whole experts: so many calls, one behind the other.
_PARTS = 4


class Products:
    """SwiGLU of weights gate and up [E, H, F] and down [E, F, H]: tensors, or Fp8 with scales."""

    layout: ClassVar[RowLayout | None] = None  # of x, where one is better for it, or the only one
    column_scales: ClassVar[bool] = False  # of fp8 x: as DispatchOptions has it
    overlaps: ClassVar[bool] = True  # it has unready and down_into

    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        self.weights = gate, up, down

    def hidden(self, x: Tensor, scales: Tensor | None, counts: Tensor, mean: int) -> Any:
        """Returns what `down` takes. scales: fp32 [.., ceil(H / 128)] of fp8 x; mean: rows of an
        expert that are expected, at least 1."""
        raise NotImplementedError

    def down(self, hidden: Any, counts: Tensor, mean: int) -> Tensor:
        """Returns rows shaped like x, in bf16 if x is fp8; rows of no expert hold anything."""
        raise NotImplementedError

    def unready(self, hidden: Any, num_sms: int) -> tuple[Tensor, ReadyRows]:
        """Returns room for padded rows and its counters; num_sms: of combine's sending half."""
        rows = hidden if isinstance(hidden, Tensor) else hidden[0]
        width = _parts(self.weights[2])[0].shape[2]
        dtype = rows.dtype if rows.dtype.itemsize > 1 else torch.bfloat16
        y = rows.new_empty((*rows.shape[:2], width), dtype=dtype)
        counters = rows.new_zeros((rows.shape[0], 1), dtype=torch.int32)
        return y, ReadyRows(counters=counters, want=1, num_sms=num_sms)

    def down_into(
        self, y: Tensor, hidden: Any, counts: Tensor, mean: int, ready: ReadyRows
    ) -> None:
        """`down` into what `unready` made; counters rise behind the rows of a few experts."""
        count = -(-y.shape[0] // _PARTS)
        for first in range(0, y.shape[0], count):
            part = slice(first, first + count)
            self._down_part(y, hidden, counts, mean, part, ready.num_sms)
            ready.counters[part].add_(1)  # a kernel of its own, behind the product's last row

    def _down_part(
        self, y: Tensor, hidden: Any, counts: Tensor, mean: int, part: slice, others: int
    ) -> None:
        """Writes y[part]. others: multiprocessors that something else holds."""
        raise NotImplementedError


class TritonProducts(Products):
    """kernels/triton: fp8, bf16, fp16; both layouts."""

    def hidden(self, x: Tensor, scales: Tensor | None, counts: Tensor, mean: int) -> Any:
        from moe_p2p.kernels.triton.grouped_ops import Fp8, grouped_swiglu

        rows = x if scales is None else Fp8(x, scales.contiguous())
        return grouped_swiglu(rows, *self.weights[:2], counts)

    def down(self, hidden: Any, counts: Tensor, mean: int) -> Tensor:
        from moe_p2p.kernels.triton.grouped_ops import grouped_gemm

        return grouped_gemm(hidden, self.weights[2], counts)

    def unready(self, hidden: Any, num_sms: int) -> tuple[Tensor, ReadyRows]:
        from moe_p2p.kernels.triton.grouped_ops import make_unready

        return make_unready(hidden, self.weights[2], num_sms=num_sms)

    def down_into(
        self, y: Tensor, hidden: Any, counts: Tensor, mean: int, ready: ReadyRows
    ) -> None:
        """Counters rise tile by tile."""
        from moe_p2p.kernels.triton.grouped_ops import grouped_gemm_into

        grouped_gemm_into(y, hidden, self.weights[2], counts, ready)


class TorchProducts(Products):
    """torch's: in bf16 where x is fp8, for torch has no grouped product with scales of blocks.

    Grouped x is multiplied by grouped_mm, padded x by bmm, which multiplies all C rows.
    """

    layout = "grouped"

    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        super().__init__(*map(_plain, (gate, up, down)))

    def hidden(self, x: Tensor, scales: Tensor | None, counts: Tensor, mean: int) -> Tensor:
        rows = x if scales is None else self._plain_rows(x, scales, counts)
        gate, up = (_multiply(rows, weight, counts) for weight in self.weights[:2])
        if not rows.is_cuda:
            return functional.silu(gate) * up
        from moe_p2p.kernels.triton.quantize import swiglu

        one_room = gate.dim() == 2  # most of which may be empty
        if one_room:
            gate, up, counts = gate[None], up[None], counts.sum().reshape(1)
        made = swiglu(gate, up, counts, quantize=False)
        assert isinstance(made, Tensor)
        return made[0] if one_room else made

    def down(self, hidden: Any, counts: Tensor, mean: int) -> Tensor:
        return _multiply(hidden, self.weights[2], counts)

    def _plain_rows(self, x: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        if not x.is_cuda:
            spread = scales.repeat_interleave(SCALE_BLOCK, -1)[..., : x.shape[-1]]
            return (x.float() * spread).to(self.weights[0].dtype)
        from moe_p2p.kernels.triton.quantize import dequantize

        used = counts.sum().reshape(1).int() if x.dim() == 2 else None
        return dequantize(x, scales.contiguous(), num_rows=used, dtype=self.weights[0].dtype)

    def _down_part(
        self, y: Tensor, hidden: Any, counts: Tensor, mean: int, part: slice, others: int
    ) -> None:
        torch.bmm(hidden[part], self.weights[2][part], out=y[part])


class DeepGemmProducts(Products):
    """DeepGEMM's of the wheel sgl-deep-gemm, on Hopper: fp8 and bf16, padded x."""

    layout = "padded"
    column_scales = True

    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        super().__init__(gate, up, down)
        _deep_gemm()
        values = [_parts(each)[0] for each in (gate, up, down)]
        width = values[0].shape[2]
        self._fp8 = not isinstance(gate, Tensor)
        errors.require(
            self._fp8 or values[0].dtype == torch.bfloat16,
            f"deep_gemm: weights are {values[0].dtype}, it multiplies fp8 and bf16",
        )
        errors.require(
            not self._fp8 or width % SCALE_BLOCK == 0,
            f"deep_gemm: an expert is {width} wide, must be a multiple of {SCALE_BLOCK} in fp8",
        )
        # [E, N, K] with K contiguous; gate and up are one product.
        self._first = _turned(gate, up)
        self._second = _turned(down)

    def hidden(self, x: Tensor, scales: Tensor | None, counts: Tensor, mean: int) -> Any:
        from moe_p2p.kernels.triton.quantize import swiglu

        both = x.new_empty((*x.shape[:2], _parts(self._first)[0].shape[1]), dtype=torch.bfloat16)
        rows = x if scales is None else (x, scales)
        self._multiply(rows, self._first, both, counts, mean)
        gate, up = both.chunk(2, dim=2)
        return swiglu(gate, up, counts, quantize=self._fp8)

    def down(self, hidden: Any, counts: Tensor, mean: int) -> Tensor:
        rows = _parts(hidden)[0]
        width = _parts(self._second)[0].shape[1]
        y = rows.new_empty((*rows.shape[:2], width), dtype=torch.bfloat16)
        self._multiply(hidden, self._second, y, counts, mean)
        return y

    def _multiply(self, a: Any, b: Any, out: Tensor, counts: Tensor, mean: int) -> None:
        if out.numel() == 0:
            return
        library = _deep_gemm()
        product = (
            library.fp8_m_grouped_gemm_nt_masked
            if self._fp8
            else library.m_grouped_bf16_gemm_nt_masked
        )
        product(a, b, out, counts.int(), min(mean, out.shape[1]))

    def _down_part(
        self, y: Tensor, hidden: Any, counts: Tensor, mean: int, part: slice, others: int
    ) -> None:
        """Its blocks stay until all is done, one on a multiprocessor: none may find it taken."""
        rows, weights = (
            each[part] if isinstance(each, Tensor) else tuple(one[part] for one in each)
            for each in (hidden, self._second)
        )
        library = _deep_gemm()
        all_sms = library.get_num_sms()
        library.set_num_sms(all_sms - others)
        try:
            self._multiply(rows, weights, y[part], counts[part], mean)
        finally:
            library.set_num_sms(all_sms)


MADE_OF: dict[str, type[Products]] = {
    "deep_gemm": DeepGemmProducts,
    "torch": TorchProducts,
    "triton": TritonProducts,
}


def make(name: str, gate: Any, up: Any, down: Any) -> Products:
    """Raises by name where this machine lacks the library."""
    reason = why_not(name, on_gpu=_parts(gate)[0].is_cuda)
    errors.require(not reason, f"products {name}: {reason}")
    return MADE_OF[name](gate, up, down)


def why_not(name: str, *, on_gpu: bool) -> str:
    """Returns what a library lacks here; empty: nothing. Loads none."""
    if name == "torch":
        missing = on_gpu and not hasattr(functional, "grouped_mm")
        return f"torch {torch.__version__} has no grouped_mm, 2.10 has" if missing else ""
    if not on_gpu:
        return "it multiplies on GPUs alone"
    if name == "triton":
        return "" if _is_there("triton") else "no module is named triton"
    if not _is_there("deep_gemm"):
        return "no module is named deep_gemm: pip install sgl-deep-gemm, of this torch's version"
    major, minor = driver.capability(0)  # without a context, which a launcher has no use for
    if major != 9:  # Blackwell's wants scales that are powers of two
        return f"scales of 128 values are for Hopper, this GPU is {major}.{minor}"
    return ""


def of_fp8(hidden_dim: int, width: int, *, on_gpu: bool) -> str:
    """Returns whose products a layer in fp8 takes: DeepGEMM's where it is there, else Triton's."""
    whole = hidden_dim % SCALE_BLOCK == 0 and width % SCALE_BLOCK == 0
    if not whole or why_not("deep_gemm", on_gpu=on_gpu):
        return "triton"
    try:
        _deep_gemm()
    except errors.InvalidArgumentError as error:
        log.warning(f"experts in fp8 take this package's products: {error}")
        return "triton"
    return "deep_gemm"


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _deep_gemm() -> Any:
    """Loads it: an extension for one version of torch, which compiles kernels by nvcc."""
    try:
        return importlib.import_module("deep_gemm")
    except Exception as error:  # its own checks are bare assertions
        text = (
            f"deep_gemm does not load with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}. A build of sgl-deep-gemm is for one torch, and "
            "finds CUDA's toolkit by CUDA_HOME"
        )
        raise errors.make(errors.InvalidArgumentError, text) from error


def _parts(weight: Any) -> tuple[Tensor, Tensor | None]:
    return (weight, None) if isinstance(weight, Tensor) else weight


def _turned(*weights: Any) -> Any:
    """[E, K, N] -> [E, N of all, K], contiguous, and their scales alike."""
    values, scales = zip(*map(_parts, weights), strict=True)
    turned = [each.transpose(1, 2) for each in values]
    joined = _beside(turned)
    if joined is None:  # cat in bytes: torch joins few types of fp8
        kind = turned[0].dtype
        plain = [each.contiguous().view(torch.uint8) for each in turned]
        joined = torch.cat(plain, dim=1).view(kind)
    if scales[0] is None:
        return joined
    return joined, torch.cat([each.transpose(1, 2) for each in scales], dim=1).contiguous()


def _beside(parts: Sequence[Tensor]) -> Tensor | None:
    """Joins [E, N, K] without a copy, where an expert's parts follow each other; None: not so."""
    first = parts[0]
    count, rows, k = first.shape[0], sum(each.shape[1] for each in parts), first.shape[2]
    place = first.data_ptr()
    for each in parts:
        if each.stride() != (rows * k, k, 1) or each.data_ptr() != place:
            return None
        place += each.shape[1] * k * each.element_size()
    return first.as_strided((count, rows, k), first.stride())


def _plain(weight: Any) -> Tensor:
    """Returns weights [E, K, N] without scales, one expert at a time: they may be large."""
    values, scales = _parts(weight)
    if scales is None:
        return values
    out = torch.empty_like(values, dtype=torch.bfloat16)
    for e, (value, scale) in enumerate(zip(values, scales, strict=True)):
        spread = scale.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
        out[e] = value.float() * spread[: value.shape[0], : value.shape[1]]
    return out


def _multiply(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if rows.dim() == 3:
        return torch.bmm(rows, weight)
    if not rows.is_cuda:
        made: Tensor = experts_cpu.grouped_gemm(rows, weight, counts)
        return made
    product: Tensor = functional.grouped_mm(rows, weight, offs=counts.cumsum(0, dtype=torch.int32))
    return product
