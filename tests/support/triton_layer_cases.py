"""The experts of `bench --layer`; run by test_triton_kernels.py, like triton_cases.py."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_p2p import AllToAll, AllToAllConfig, InvalidArgumentError
from moe_p2p.bench import gpu_layer
from moe_p2p.layer import Experts, MoELayer, moe_layer, products
from tests.support import cells
from tests.support.triton_cases import DEVICE, Fp8, ints, quantize, rand

COUNTS = (3, 0, 7, 1, 9)
CAPACITY, HIDDEN, WIDTH = 12, 144, 128


@pytest.fixture(autouse=True)
def _seed() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.manual_seed(5)


class DeepGemm(types.ModuleType):
    """Its masked products, with what deep_gemm of sgl-deep-gemm 0.1.5 asserts on Hopper.

    csrc/apis/gemm.hpp and layout.hpp: K contiguous, scales of a by columns of a multiple of 4 rows
    (others it would copy), int32 rows, bf16 answers.
    """

    num_sms = 132

    def get_num_sms(self) -> int:
        return self.num_sms

    def set_num_sms(self, count: int) -> None:
        assert 0 < count <= 132
        self.num_sms = count

    def m_grouped_bf16_gemm_nt_masked(
        self, a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        groups, m, k = a.shape
        assert (b.shape[0], b.shape[2]) == (groups, k)
        assert d.shape == (groups, m, b.shape[1])
        assert b.shape[1] % 8 == 0
        assert a.dtype == b.dtype == d.dtype == torch.bfloat16
        assert all(each.is_contiguous() for each in (a, b, d, masked_m))
        self._multiply(a.float(), b.float(), d, masked_m, expected_m)

    def fp8_m_grouped_gemm_nt_masked(
        self, a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        assert type(a) is type(b) is tuple  # it takes no other kind of one
        (x, x_scales), (weight, scales) = a, b
        (groups, m, k), n = x.shape, weight.shape[1]
        blocks, rows = -(-k // 128), -(-m // 4) * 4
        assert (weight.shape, d.shape) == ((groups, n, k), (groups, m, n))
        assert n % 8 == 0
        assert x.dtype == weight.dtype == torch.float8_e4m3fn
        assert d.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert weight.is_contiguous()
        assert d.is_contiguous()
        assert x_scales.dtype == scales.dtype == torch.float32
        assert x_scales.shape == (groups, m, blocks)
        assert x_scales.stride() == (blocks * rows, 1, rows)
        assert scales.shape == (groups, -(-n // 128), blocks)
        spread = x_scales.repeat_interleave(128, 2)[..., :k]
        squares = scales.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
        self._multiply(x.float() * spread, weight.float() * squares, d, masked_m, expected_m)

    @staticmethod
    def _multiply(a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
        assert masked_m.dtype == torch.int32
        assert masked_m.shape == (a.shape[0],)
        assert expected_m > 0
        for group, count in enumerate(masked_m.tolist()):
            d[group, :count] = (a[group, :count] @ b[group].t()).to(d.dtype)


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
    made = DeepGemm("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    return made


def twice(gate: Any, up: Any, down: Any) -> gpu_layer.Experts:
    """Another library's products, as bench --gemm takes them."""
    ours = products.TritonProducts(gate, up, down)

    def experts(x: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        return 2 * ours.down(ours.hidden(x, scales, counts, 1), counts, 1)

    return experts


def weights(fp8: bool) -> list[Any]:
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    plain = [rand(5, *shape, dtype=torch.bfloat16) for shape in shapes]
    return [Fp8(*quantize.quantize_weights(each)) for each in plain] if fp8 else plain


def rows(fp8: bool, padded: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows, scales, and which of them hold a token."""
    shape = (5, CAPACITY, HIDDEN) if padded else (24, HIDDEN)
    x = rand(*shape, dtype=torch.bfloat16)
    used = torch.arange(CAPACITY) < torch.tensor(COUNTS)[:, None] if padded else torch.arange(20)
    return (*(quantize.quantize(x) if fp8 else (x, None)), used.to(DEVICE))


def as_it_likes(made: products.Products, scales: Tensor | None) -> Tensor | None:
    if scales is None or not made.column_scales:
        return scales
    return functional.pad(scales, (0, 0, 0, -CAPACITY % 4)).mT.contiguous().mT[:, :CAPACITY]


ALL = cells.few(
    itertools.product([False, True], [False, True]), keep=[(False, True), (True, False)]
)


@pytest.mark.parametrize(("fp8", "padded"), ALL)
def test_experts_of_the_bench_are_alike(fp8: bool, padded: bool, deep_gemm: DeepGemm) -> None:
    given = weights(fp8)
    x, scales, used = rows(fp8, padded)
    counts = ints(*COUNTS)
    want = gpu_layer.plain_experts(*given)(x, scales, counts)[used]
    assert float(want.float().norm()) > 0
    for name, kind in products.MADE_OF.items():
        if kind.layout == "padded" and not padded:
            continue
        made = kind(*given)
        hidden = made.hidden(x, as_it_likes(made, scales), counts, 4)
        got = made.down(hidden, counts, 4)[used]
        # Values of two roundings to fp8 in between, which the plain products have not.
        assert gpu_layer.difference(got, want) < (0.05 if fp8 else 0.01), name
    whole = gpu_layer.products_of(f"{__name__}:twice", *given)
    assert not whole.overlaps
    got = whole.down(whole.hidden(x, scales, counts, 4), counts, 4)[used]
    assert gpu_layer.difference(got / 2, want) < (0.05 if fp8 else 0.01)


@pytest.mark.parametrize("name", products.MADE_OF)
@pytest.mark.parametrize("fp8", [False, True])
def test_products_say_which_rows_they_have_written(
    name: str, fp8: bool, deep_gemm: DeepGemm
) -> None:
    """Counters of whole experts, or of tiles of rows, are what combine waits for."""
    made = products.MADE_OF[name](*weights(fp8))
    x, scales, used = rows(fp8, True)
    counts = ints(*COUNTS)
    hidden = made.hidden(x, as_it_likes(made, scales), counts, 4)
    want = made.down(hidden, counts, 4)
    y, ready = made.unready(hidden, 3)
    assert ready.num_sms == 3
    assert not ready.counters.any()
    y.fill_(float("nan"))
    sms: list[int] = []
    multiply = DeepGemm._multiply
    deep_gemm._multiply = lambda *args: (sms.append(deep_gemm.num_sms), multiply(*args))  # type: ignore[method-assign, assignment]
    made.down_into(y, hidden, counts, 4, ready)
    assert torch.equal(y[used], want[used])
    for expert, count in enumerate(COUNTS):
        blocks = -(-count // (ready.rows or CAPACITY))
        assert bool((ready.counters[expert, :blocks] == ready.want).all())
    if name == "deep_gemm":
        assert {*sms} == {129}  # combine has the others
        assert deep_gemm.num_sms == 132


@pytest.mark.parametrize("capacity", [1, 12, 40])
@pytest.mark.parametrize("width", [8, 128, 200])
@pytest.mark.parametrize("fp8", [False, True])
def test_swiglu_of_the_rows_that_there_are(capacity: int, width: int, fp8: bool) -> None:
    gate, up = halves = rand(3, capacity, 2 * width, dtype=torch.bfloat16).split(width, dim=2)
    counts = [capacity, 0, min(capacity, 7)]
    got = quantize.swiglu(*halves, ints(*counts), quantize=fp8)
    apart = quantize.swiglu(*(each.contiguous() for each in halves), ints(*counts), quantize=fp8)
    want = functional.silu(gate.float()) * up.float()
    for expert, count in enumerate(counts):
        if not fp8:
            assert isinstance(got, Tensor)
            assert isinstance(apart, Tensor)
            assert torch.equal(got[expert, :count], apart[expert, :count])
            torch.testing.assert_close(
                got[expert, :count], want[expert, :count].bfloat16(), rtol=2**-7, atol=1e-5
            )
            continue
        values, scales = got
        assert scales.stride(1) == 1
        assert scales.stride(2) % 4 == 0
        spread = scales[expert, :count].repeat_interleave(128, 1)[:, :width]
        # A step of e4m3 is an eighth of a value; beside zero a 448th of the block's largest one.
        torch.testing.assert_close(
            values[expert, :count].float() * spread,
            want[expert, :count],
            rtol=2**-4 + 1e-3,
            atol=float(spread.max() if count else 0) * 2**-9,
        )
    with pytest.raises(InvalidArgumentError, match=r"must be \[E, C, F\] and alike"):
        quantize.swiglu(gate, up.contiguous(), ints(*counts), quantize=fp8)
    with pytest.raises(InvalidArgumentError, match=r"must be \[3\] of integers"):
        quantize.swiglu(*halves, ints(1, 2), quantize=fp8)


@pytest.mark.parametrize("max_tokens", [40, 600])
def test_a_layer_in_fp8_takes_deep_gemms_products(
    max_tokens: int, deep_gemm: DeepGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows: in the worst room, or, where that is large, in the room that they need."""
    rooms: list[tuple[int, ...]] = []
    first = products.DeepGemmProducts.hidden

    def seen(self: Any, x: Tensor, *rest: Any) -> Any:
        rooms.append(tuple(x.shape))
        return first(self, x, *rest)

    monkeypatch.setattr(products.DeepGemmProducts, "hidden", seen)
    fields = {"num_experts": 6, "hidden_dim": 256, "topk": 2, "dtype": torch.bfloat16}
    config = AllToAllConfig(**fields, max_tokens=max_tokens, device=DEVICE)  # type: ignore[arg-type]
    x = rand(40, 256, dtype=torch.bfloat16)
    made = []
    with AllToAll(dist.HashStore(), config, rank=0, world_size=1) as all_to_all, torch.no_grad():
        for there in (True, False):
            text = "" if there else "not here"
            monkeypatch.setattr(products, "why_not", lambda *_, text=text, **__: text)
            layer = MoELayer(256, 6, topk=2, ffn_dim=128, all_to_all=all_to_all, seed=1)
            torch.manual_seed(2)
            torch.nn.init.normal_(layer.router.score.weight)
            layer.to(DEVICE, torch.bfloat16).quantize_experts()
            made.append(layer(x).float())
        named = layer.router(x)[0].flatten().bincount(minlength=6)
        assert rooms == [(6, 40 if max_tokens == 40 else int(named.max()), 256)]
        # Both multiply the same values; DeepGEMM's rounds to bf16 between its products.
        assert 0 < gpu_layer.difference(made[0], made[1]) < 0.03
        layer.experts.padded = True
        before = layer(x).float()
        layer.experts.w_down_scales.mul_(2)  # type: ignore[union-attr, operator]
        assert torch.equal(layer(x).float(), 2 * before)


def test_a_layer_without_deep_gemm_that_loads_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert products.of_fp8(256, 100, on_gpu=True) == "triton"
    monkeypatch.setattr(products, "why_not", lambda *_, **__: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert products.of_fp8(256, 128, on_gpu=True) == "triton"
    reported = capfd.readouterr().err
    assert "experts in fp8 take this package's products: " in reported
    assert "deep_gemm does not load" in reported


def test_experts_with_room_for_many_rows_take_torchs_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = Experts([0, 1, 2], 64, ffn_dim=40, seed=1).to(DEVICE, torch.bfloat16)
    rows, counts = rand(3 * 257, 64, dtype=torch.bfloat16), ints(300, 0, 77)
    made: list[str] = []
    make = products.make
    monkeypatch.setattr(products, "make", lambda name, *w: (made.append(name), make(name, *w))[1])
    with torch.no_grad():
        want = experts._with_kernels(rows, counts, counts.cumsum(0) - counts)
        assert made == []  # offsets may leave rows out
        if DEVICE == "cpu":  # where it takes none by itself
            monkeypatch.setattr(moe_layer, "_are_many", lambda *_: True)
        got = experts._with_kernels(rows, counts, None)
    assert made == ["torch"]
    assert gpu_layer.difference(got[:377], want[:377]) < 0.01


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # importing it fails
    with pytest.raises(InvalidArgumentError, match=r"deep_gemm does not load with torch .*CUDA_H"):
        products.DeepGemmProducts(*weights(False))
