"""The Triton kernels: results in the interpreter and on a GPU, and that all compile without one."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support import cells, warm

ROOT = Path(__file__).resolve().parents[2]
_NAMES = {  # of types, as Triton writes them
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
CASES = (
    *(f"tests/support/triton_{which}cases.py" for which in ("", "number_", "layer_")),
    "tests/support/expert_rows_cases.py",
)
_SHARED_BYTES = 227 << 10  # what a block may have on sm_90 and sm_100


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("interpret", "option"),
    [
        pytest.param(True, "-q", id="interpreter"),
        pytest.param(True, "--left-out", marks=pytest.mark.more, id="interpreter, other cells"),
        pytest.param(False, "--all-cells", marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_kernels_compute_what_they_should(interpret: bool, option: str) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if interpret and triton.__version__.startswith("3.6."):
        numpy = pytest.importorskip("numpy").__version__
        if tuple(map(int, numpy.split(".")[:2])) >= (2, 4):
            pytest.skip(f"the interpreter of Triton 3.6 fails with numpy 2.4 and later ({numpy})")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    ran = warm.run(
        *("-m", "pytest", "-q", option, "-p", "no:cacheprovider", *CASES),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout, ran.stdout


def test_importing_the_package_does_not_import_triton() -> None:
    program = "import sys, moe_p2p, moe_p2p.layer; print('triton' in sys.modules)"
    run = warm.without_moe_p2p().run
    ran = run("-c", program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


# --- compiled ahead of time ----------------------------------------------------------------------


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def compile_for(launch: Launch, capability: int) -> Any:
    """What Triton would compile for these arguments on a GPU of that capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = launch.kernel.arg_names
    as_given = {each.name for each in launch.kernel.params if each.do_not_specialize}
    given = dict(zip(names, launch.args, strict=False))
    given |= {name: value for name, value in launch.kwargs.items() if name in names}
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(given.items()):
        if isinstance(value, Tensor):
            signature[name] = f"*{_NAMES[value.dtype]}"
        elif value is None or name in launch.kwargs or (value == 1 and name not in as_given):
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        else:
            signature[name] = "i32"
        if isinstance(value, Tensor) or (value % 16 == 0 and name not in as_given):
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.kwargs.items() if name not in names}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def rows_and_weights(dtype: torch.dtype, num_rows: int, k: int, n: int) -> tuple[Any, Any]:
    from moe_p2p.kernels.triton.grouped_ops import Fp8

    if dtype != torch.float8_e4m3fn:
        return empty(num_rows, k, dtype=dtype), empty(4, k, n, dtype=dtype)
    blocks_k, blocks_n = -(-k // 128), -(-n // 128)
    x = Fp8(empty(num_rows, k, dtype=dtype), empty(num_rows, blocks_k, dtype=torch.float32))
    values = empty(4, n, k, dtype=dtype).mT
    return x, Fp8(values, empty(4, blocks_k, blocks_n, dtype=torch.float32))


def products(dtype: torch.dtype, num_rows: int, k: int, n: int) -> None:
    """Forward, and backward where there is one."""
    from moe_p2p import ReadyRows
    from moe_p2p.kernels.triton import grouped_ops
    from moe_p2p.kernels.triton.grouped_ops import grouped_gemm, grouped_swiglu

    x, weight = rows_and_weights(dtype, num_rows, k, n)
    counts = empty(4, dtype=torch.int32)
    grouped_swiglu(x, weight, weight, counts)
    padded, _ = rows_and_weights(dtype, 4 * num_rows, k, n)
    padded = (
        padded.unflatten(0, (4, -1))
        if isinstance(padded, Tensor)
        else type(padded)(*(each.unflatten(0, (4, -1)) for each in padded))
    )
    y, ready = grouped_ops.make_unready(padded, weight, num_sms=1)
    grouped_ops.grouped_gemm_into(y, padded, weight, counts, ready)
    counters = empty(4, -(-num_rows // 128), dtype=torch.int32)
    late = empty(1, dtype=torch.int64)
    arriving = ReadyRows(counters=counters, want=512, rows=128, num_sms=8, late=late)
    grouped_swiglu(padded, weight, weight, counts, ready=arriving)
    if isinstance(x, Tensor):
        x.requires_grad_()
        weight.requires_grad_()
    y = grouped_gemm(x, weight, counts)
    if isinstance(x, Tensor):
        torch.autograd.grad(y, (x, weight), torch.empty_like(y))


def activation(num_rows: int, n: int) -> None:
    from moe_p2p.kernels.triton.quantize import swiglu

    halves = empty(4, num_rows, 2 * n, dtype=torch.bfloat16).split(n, dim=2)
    for fp8 in (False, True):
        swiglu(*halves, empty(4, dtype=torch.int32), quantize=fp8)


def small_kernels(dtype: torch.dtype) -> None:
    from moe_p2p.kernels.triton import permute, quantize

    x, index = empty(64, 7168, dtype=dtype), empty(64, 8, dtype=torch.int64)
    weights, count = empty(64, 8, dtype=torch.float32), empty(1, dtype=torch.int32)
    permute.permute_rows(x, index[:, 0])
    if dtype == torch.float8_e4m3fn:
        quantize.dequantize(x, empty(64, 56, dtype=torch.float32), num_rows=count)
        return
    permute.permute_rows(x, index[:, 0], weights=weights[:, 0])
    permute.unpermute_sum(x, index, weights)
    permute.unpermute_sum(x, index)
    for num_rows in (None, count):
        quantize.quantize(x, num_rows=num_rows)


def grouped_by_expert(dtype: torch.dtype, probs: torch.dtype) -> None:
    """Of Megatron's fused permutation, with and without probabilities."""
    from moe_p2p.kernels.triton import expert_rows

    places = expert_rows.list_places(empty(64, 16, dtype=torch.bool))
    x, rows = empty(64, 7168, dtype=dtype), empty(512, 7168, dtype=dtype)
    for given in (None, empty(64, 16, dtype=probs)):
        expert_rows.to_rows(x, places, 512, weights=given, probs=given)
        of_rows = None if given is None else empty(512, dtype=probs)
        expert_rows.sum_rows(rows, places, weights=given, row_probs=of_rows)
    expert_rows.dots(x, rows, places, probs)
    sizes = empty(32, dtype=torch.int64)
    expert_rows.chunk_index(sizes, sizes, 512)


def weights_in_blocks(dtype: torch.dtype, columns: int) -> None:
    """A shard of an expert in blocks of 128 x 128."""
    from moe_p2p.weights import Blocks, Param, Shard, WeightLayout, dtype_name, weight_plan
    from moe_p2p.weights.conversion import Conversions

    shape = (512, columns)
    source = Param("w", shape, dtype_name(dtype), range(2), placements=(Shard(0),))
    target = Param("w", shape, "float8_e4m3fn", (0,), tensor="q", blocks=Blocks("s"))
    plan = weight_plan(WeightLayout((source,), 2), WeightLayout((target,), 1))
    tensors = {"w": empty(256, columns, dtype=dtype)}
    made = Conversions([plan], 0, tensors, device=torch.device("cpu"), triton=True)
    made.allocate()
    made.maxima(made.batches())
    made.convert(made.batches()[0])


def launches(body: Callable[..., None], *arguments: Any) -> list[Launch]:
    """The kernels that body would launch."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: Triton does not compile")
    seen: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append(Launch(kernel, args, kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", record)
        body(*arguments)
    assert seen
    return seen


def test_checksums_of_long_rows_fit_a_grid_on_the_memorys_device() -> None:
    """A row may be a whole parameter. The thread that sums has another current device, maybe."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from moe_p2p.kernels.triton import kv_checksum

    class Device:
        entered: Any = None

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __enter__(self) -> None:
            Device.entered = self.tensor

        def __exit__(self, *_: object) -> None:
            Device.entered = None

    grids: list[tuple[int, ...]] = []

    def record(_: Any, *__: Any, grid: tuple[int, ...], **___: Any) -> None:
        assert Device.entered is memory, "launched on whatever device is current"
        grids.append(grid)

    memory = torch.empty(1 << 30, dtype=torch.uint8)  # no page of it is touched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", record)
        patch.setattr(torch.cuda, "device_of", Device)
        kv_checksum.rows_checksum(
            memory, torch.zeros(1, dtype=torch.int64), (0, 0, 1 << 30, 1, 0), 0
        )
    (grid,) = grids
    assert grid[0] < 1 << 31
    assert all(size <= 65_535 for size in grid[1:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "capability"),
    cells.pairwise([torch.bfloat16, torch.float8_e4m3fn], [64, 8192], [90, 100]),
)
def test_products_use_tensor_cores(dtype: torch.dtype, num_rows: int, capability: int) -> None:
    instruction = {90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    for launch in launches(products, dtype, num_rows, 7168, 2048):
        made = compile_for(launch, capability)
        assert instruction in made.asm["ptx"]
        assert made.metadata.shared <= _SHARED_BYTES


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "capability"),
    cells.few(
        itertools.product([torch.float32, torch.float16, torch.float8_e4m3fn], [90, 100]),
        keep=[(torch.float32, 90), (torch.float16, 100), (torch.float8_e4m3fn, 90)],
    ),
)
def test_products_of_odd_shapes_compile(dtype: torch.dtype, capability: int) -> None:
    for launch in launches(products, dtype, 77, 200, 120):
        assert compile_for(launch, capability).asm["cubin"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_rows", "n", "capability"), [(77, 120, 90), (8192, 2048, 100)])
def test_activations_compile(num_rows: int, n: int, capability: int) -> None:
    for launch in launches(activation, num_rows, n):
        assert compile_for(launch, capability).asm["cubin"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "capability"),
    cells.few(
        itertools.product(
            [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], [90, 100]
        ),
        keep=[
            (torch.float32, 100),
            (torch.bfloat16, 90),
            (torch.float16, 90),
            (torch.float8_e4m3fn, 100),
        ],
    ),
)
def test_small_kernels_compile(dtype: torch.dtype, capability: int) -> None:
    for launch in launches(small_kernels, dtype):
        made = compile_for(launch, capability)
        assert made.asm["cubin"]
        # Divisions to nearest, and products that are rounded before they are added.
        assert "div.full" not in made.asm["ptx"]
        if "permute" in launch.kernel.fn.__name__:
            assert not re.search(r"\b(mul|add|fma\.rn)\.f32", made.asm["ptx"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "probs", "capability"),
    cells.few(
        itertools.product(
            [torch.float32, torch.bfloat16], [torch.float32, torch.float64], [90, 100]
        ),
        keep=[
            (torch.bfloat16, torch.float32, 90),
            (torch.float32, torch.float64, 100),
        ],
    ),
)
def test_rows_of_experts_compile(dtype: torch.dtype, probs: torch.dtype, capability: int) -> None:
    for launch in launches(grouped_by_expert, dtype, probs):
        made = compile_for(launch, capability)
        assert made.asm["cubin"]
        name = launch.kernel.fn.__name__
        if name in ("_to_rows_kernel", "_sum_kernel"):
            # Products are rounded before they are added; rows move 16 bytes at a time.
            assert not re.search(r"\bfma\.rn\.f(32|64)", made.asm["ptx"])
            assert "st.global.v4" in made.asm["ptx"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "columns", "capability"),
    cells.few(
        itertools.product([torch.bfloat16, torch.float32], [2048, 330], [90, 100]),
        keep=[(torch.bfloat16, 2048, 90), (torch.float32, 330, 100)],
    ),
)
def test_weights_in_blocks_compile(dtype: torch.dtype, columns: int, capability: int) -> None:
    for launch in launches(weights_in_blocks, dtype, columns):
        made = compile_for(launch, capability)
        assert "div.full" not in made.asm["ptx"]
        if columns % 8 == 0:  # eight elements are one load
            assert "ld.global.v4" in made.asm["ptx"]


# --- at the size of a real layer -----------------------------------------------------------------

NUM_EXPERTS, HIDDEN_DIM, FFN_DIM, NUM_ROWS = 32, 7168, 2048, 8192


def random_counts() -> Tensor:
    """Rows of each expert, some without, in all at most NUM_ROWS."""
    share = torch.rand(NUM_EXPERTS) * (torch.arange(NUM_EXPERTS) % 5 != 2)
    return (share / share.sum() * (NUM_ROWS - 100)).to(torch.int32).cuda()


def by_hand(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """fp32 [rows with an expert, N]."""
    sizes = counts.tolist()
    parts = torch.split(x[: sum(sizes)], sizes)
    return torch.cat([part.float() @ w.float() for part, w in zip(parts, weight, strict=True)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_a_real_layer(dtype: torch.dtype) -> None:
    from moe_p2p.kernels.triton.grouped_ops import grouped_gemm

    torch.manual_seed(2)
    counts = random_counts()
    x = torch.randn(NUM_ROWS, HIDDEN_DIM, device="cuda", dtype=dtype).requires_grad_()
    weight = torch.randn(NUM_EXPERTS, HIDDEN_DIM, FFN_DIM, device="cuda", dtype=dtype)
    weight = (weight * HIDDEN_DIM**-0.5).requires_grad_()
    y = grouped_gemm(x, weight, counts, zero_padding=True)
    want = by_hand(x, weight, counts)
    # One rounding to 8 bits or more; fp32 sums of 7168 products of size 1 / 85 in another order.
    torch.testing.assert_close(y[: len(want)].float(), want, rtol=2**-8, atol=1e-3)
    assert not y[len(want) :].any()
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, weight), grad)
    want_x, want_weight = torch.autograd.grad(want, (x, weight), grad[: len(want)].float())
    # Gradients of weights are sums of up to a thousand products of size 1.
    torch.testing.assert_close(got[0].float(), want_x.float(), rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(got[1].float(), want_weight.float(), rtol=2**-7, atol=2e-2)


@pytest.mark.gpu
def test_fp8_of_a_real_layer() -> None:
    from moe_p2p.kernels.triton import quantize
    from moe_p2p.kernels.triton.grouped_ops import Fp8, grouped_gemm
    from moe_p2p.moe import reference

    torch.manual_seed(2)
    counts = random_counts()
    plain = torch.randn(NUM_ROWS, HIDDEN_DIM).bfloat16() * torch.logspace(-6, 3, NUM_ROWS)[:, None]
    x = Fp8(*quantize.quantize(plain.cuda()))
    want_q, want_scales = reference.quantize(plain)
    assert torch.equal(x.scales.cpu(), want_scales)
    assert torch.equal(x.values.cpu().view(torch.uint8), want_q.view(torch.uint8))
    del want_q, want_scales
    x = Fp8(*quantize.quantize(torch.randn(NUM_ROWS, HIDDEN_DIM, device="cuda")))
    weight = torch.randn(NUM_EXPERTS, HIDDEN_DIM, FFN_DIM, device="cuda") * HIDDEN_DIM**-0.5
    weights = Fp8(*quantize.quantize_weights(weight))
    scales = weights.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    want = by_hand(
        quantize.dequantize(*x, dtype=torch.float32), weights.values.float() * scales, counts
    )
    got = grouped_gemm(x, weights, counts)[: len(want)]
    # The tensor cores keep 14 bits or so of each of 56 sums of 128 products.
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_layer_takes_the_counts_of_each_replay(fp8: bool) -> None:
    from moe_p2p.layer import Experts, Fp8Experts

    torch.manual_seed(2)
    plain = Experts(list(range(8)), 1024, ffn_dim=512, seed=1).cuda().bfloat16()
    experts = Fp8Experts(plain) if fp8 else plain
    rows = torch.randn(600, 1024, device="cuda", dtype=torch.bfloat16)
    counts = torch.zeros(8, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        experts(rows, counts)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(rows, counts)
        for sizes in ([600, 0, 0, 0, 0, 0, 0, 0], [1, 70, 0, 64, 128, 200, 0, 9], [0] * 8):
            counts.copy_(torch.tensor(sizes))
            graph.replay()
            used = sum(sizes)
            assert torch.equal(y[:used], experts(rows, counts)[:used])
