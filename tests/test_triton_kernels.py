"""The Triton kernels: results in the interpreter and on a GPU, and that all compile without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
_NAMES = {  # of types, as Triton writes them
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_SHARED_BYTES = 227 << 10  # what a block may have on sm_90 and sm_100


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "interpret", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpreter", "gpu"]
)
def test_kernels_compute_what_they_should(interpret: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_cases.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout, ran.stdout


def test_importing_the_package_does_not_import_triton() -> None:
    program = "import sys, moe_p2p, moe_p2p.layer; print('triton' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
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
    given = dict(zip(names, launch.args, strict=False))
    given |= {name: value for name, value in launch.kwargs.items() if name in names}
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(given.items()):
        if isinstance(value, Tensor):
            signature[name] = f"*{_NAMES[value.dtype]}"
        elif value is None or value == 1 or name in launch.kwargs:
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        else:
            signature[name] = "i32"
        if isinstance(value, Tensor) or value % 16 == 0:
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
    from moe_p2p.kernels.triton.grouped_ops import grouped_gemm, grouped_swiglu

    x, weight = rows_and_weights(dtype, num_rows, k, n)
    counts = empty(4, dtype=torch.int32)
    grouped_swiglu(x, weight, weight, counts)
    if isinstance(x, Tensor):
        x.requires_grad_()
        weight.requires_grad_()
    y = grouped_gemm(x, weight, counts)
    if isinstance(x, Tensor):
        torch.autograd.grad(y, (x, weight), torch.empty_like(y))


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("num_rows", [64, 8192], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_products_use_tensor_cores(dtype: torch.dtype, num_rows: int, capability: int) -> None:
    instruction = {90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    for launch in launches(products, dtype, num_rows, 7168, 2048):
        made = compile_for(launch, capability)
        assert instruction in made.asm["ptx"]
        assert made.metadata.shared <= _SHARED_BYTES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_products_of_odd_shapes_compile(dtype: torch.dtype, capability: int) -> None:
    for launch in launches(products, dtype, 77, 200, 120):
        assert compile_for(launch, capability).asm["cubin"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_small_kernels_compile(dtype: torch.dtype, capability: int) -> None:
    for launch in launches(small_kernels, dtype):
        made = compile_for(launch, capability)
        assert made.asm["cubin"]
        # Divisions to nearest, and products that are rounded before they are added.
        assert "div.full" not in made.asm["ptx"]
        if "permute" in launch.kernel.fn.__name__:
            assert not re.search(r"\b(mul|add|fma\.rn)\.f32", made.asm["ptx"])
