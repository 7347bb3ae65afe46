"""moe_p2p.machine.jit: kernels compile without a GPU, once for all processes, and load on one."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p import AllToAllConfig, DispatchOptions, errors
from moe_p2p.machine import driver, jit
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.prepared import usual_calls
from moe_p2p.moe.gpu.shape_macros import of_changing, shape_macros
from moe_p2p.moe.gpu.variants import every_kernel
from moe_p2p.moe.layouts import KERNELS, NAMES
from tests.support import ranks, warm

ARCHS = ("sm_90a", "sm_100a")
# Kernels of the software NIC, and of calls without a communicator.
ALONE: list[tuple[str, dict[str, int]]] = [
    (f"{source}.cu", {}) for source in ("copy", "rows", "count", "signal", "pack", "map", "clock")
]
KERNEL = """
#include <cuda_fp8.h>

#include "kernels/abi/shape.h"
#include "part.h"

extern "C" __global__ void multiply_add(float* values) {
  __shared__ float row[64];
  row[threadIdx.x] = values[threadIdx.x] * PART_SCALE;
  __syncthreads();
  values[threadIdx.x] = row[63 - threadIdx.x] + float(ADDEND) + float(moe_p2p::abi::kLine);
}
extern "C" __global__ void second(float* values) { values[0] = float(__nv_fp8_e4m3(values[1])); }
"""
PART = "#define PART_SCALE 1.5f\n"


def why_no_nvrtc() -> str | None:
    try:
        jit._nvrtc_version()
    except errors.UnavailableError as error:
        return str(error)
    return None


SIZES: dict[str, Any] = {"num_experts": 8, "hidden_dim": 512, "topk": 2, "max_tokens": 8}


@pytest.fixture(name="source")
def kernel_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with a header beside it; the cache is a folder of this test."""
    if reason := why_no_nvrtc():
        pytest.skip(reason)
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "cache"))
    (tmp_path / "part.h").write_text(PART)
    path = tmp_path / "kernel.cu"
    path.write_text(KERNEL)
    return path


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_a_gpu(source: Path, arch: str) -> None:
    compiled = jit.compile_only(source, {"ADDEND": 3}, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert not compiled.cached
    assert set(compiled.usage) == {"multiply_add", "second"}
    usage = compiled.usage["multiply_add"]
    assert usage.shared_bytes == 64 * 4
    assert 0 < usage.registers < 64
    assert usage.spill_store_bytes == usage.spill_load_bytes == 0


def test_a_cache_hit_does_not_compile(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile_only(source, {"ADDEND": 3}, "sm_90a")

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jit, "_compile", refuse)
    again = jit.compile_only(source, {"ADDEND": 3}, "sm_90a")
    assert again == first._replace(cached=True)


def _edit_source(source: Path) -> None:
    source.write_text(KERNEL.replace("row[63", "row[62"))


def _edit_header(source: Path) -> None:
    (source.parent / "part.h").write_text('#include "deep.h"\n')


def _nothing(source: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("edit", "addend", "arch"),
    [
        (_edit_source, 3, "sm_90a"),
        (_edit_header, 3, "sm_90a"),
        (_nothing, 4, "sm_90a"),
        (_nothing, 3, "sm_100a"),
    ],
    ids=["source", "included header", "macro", "architecture"],
)
def test_a_change_compiles_anew(
    source: Path, edit: Callable[[Path], None], addend: int, arch: str
) -> None:
    (source.parent / "deep.h").write_text("#define PART_SCALE 2.5f\n")
    first = jit.compile_only(source, {"ADDEND": 3}, "sm_90a")
    edit(source)
    second = jit.compile_only(source, {"ADDEND": addend}, arch)
    assert not second.cached
    assert second.cubin != first.cubin


def test_a_header_of_a_header_is_part_of_the_key(source: Path) -> None:
    deep = source.parent / "deep.h"
    deep.write_text("#define PART_SCALE 2.5f\n")
    _edit_header(source)
    first = jit.cache_key(source, [])
    deep.write_text("#define PART_SCALE 3.5f\n")
    assert jit.cache_key(source, []) != first


def test_an_update_of_the_compiler_compiles_anew(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = jit._nvrtc_version()
    assert jit._nvrtc_build().startswith(f"V{major}.{minor}.")
    first = jit.cache_key(source, [])
    monkeypatch.setattr(jit, "_nvrtc_build", lambda: f"V{major}.{minor}.99999")
    assert jit.cache_key(source, []) != first


@pytest.mark.parametrize("suffix", [".cubin", ".log", ".sha256"])
def test_a_damaged_file_of_the_cache_is_replaced(source: Path, tmp_path: Path, suffix: str) -> None:
    first = jit.compile_only(source, {"ADDEND": 3}, "sm_90a")
    (file,) = (tmp_path / "cache").glob(f"*{suffix}")
    good = file.read_bytes()
    # One bit, in what is still an ELF file.
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not jit.is_compiled(source, {"ADDEND": 3}, "sm_90a")
    second = jit.compile_only(source, {"ADDEND": 3}, "sm_90a")
    assert not second.cached
    assert jit.compile_only(source, {"ADDEND": 3}, "sm_90a") == second._replace(cached=True)
    # NVRTC 13.0 has a cache of its own, and what comes out of that has no assembler's log.
    assert second.usage in (first.usage, {})


def test_compiles_where_the_cache_cannot_be_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_P2P_CACHE", str(source / "a file is no folder"))
    assert not jit.compile_only(source, {"ADDEND": 3}, "sm_90a").cached


def _compile_together(rank: ranks.Rank, source: str, cache: str) -> bool:
    os.environ["MOE_P2P_CACHE"] = cache
    jit._nvrtc_version()
    rank.store.add("ready", 1)
    while rank.store.add("ready", 0) < rank.world_size:
        pass
    return jit.compile_only(Path(source), {"ADDEND": 3}, "sm_90a").cached


def test_processes_compile_once(source: Path, tmp_path: Path) -> None:
    cached = ranks.run_processes(3, _compile_together, str(source), str(tmp_path / "cache"))
    assert sorted(cached) == [False, True, True]
    files = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert files == [".cubin", ".lock", ".log", ".sha256"]


def test_threads_compile_once(source: Path, tmp_path: Path) -> None:
    cached = ranks.run_threads(3, _compile_together, str(source), str(tmp_path / "cache"))
    assert sorted(cached) == [False, True, True]


def test_an_error_carries_the_compilers_log(source: Path) -> None:
    with pytest.raises(errors.UnavailableError) as caught:
        jit.compile_only(source, {}, "sm_90a")
    text = str(caught.value)
    assert 'kernel.cu(11): error: identifier "ADDEND" is undefined' in text
    assert "does not compile for sm_90a" in text


@pytest.mark.parametrize(
    ("name", "macros", "arch", "text"),
    [
        ("absent.cu", {}, "sm_90a", "there is no kernel source"),
        ("abi/shape.h", {}, "gfx942", "arch is 'gfx942'"),
        ("abi/shape.h", {"A B": 1}, "sm_90a", "macro A B"),
        ("abi/shape.h", {"A": "1"}, "sm_90a", "macro A"),
    ],
)
def test_bad_arguments_are_named(name: str, macros: dict[str, int], arch: str, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        jit.compile_only(name, macros, arch)


def test_usage_adds_up_functions_that_are_not_inlined() -> None:
    log = (
        "ptxas info    : Compiling entry function 'outer' for 'sm_90a'\n"
        "ptxas info    : Function properties for outer\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 72 registers, used 1 barriers, 2048 bytes smem\n"
        "ptxas info    : Function properties for inner\n"
        "    0 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n"
        "ptxas info    : Compiling entry function 'empty' for 'sm_90a'\n"
        "ptxas info    : Function properties for empty\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 4 registers, used 0 barriers\n"
    )
    assert jit.parse_usage(log) == {
        "outer": jit.Usage(72, 2048, 16, 9, 6),
        "empty": jit.Usage(4, 0, 0, 0, 0),
    }


def test_importing_the_package_imports_nothing_of_cuda() -> None:
    # torch itself may: only what comes on top of it counts.
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import moe_p2p, moe_p2p.machine.jit, moe_p2p.moe.gpu.memory\n"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] == 'cuda'])"
    )
    run = warm.without_moe_p2p().run
    done = run("-c", code, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(errors.UnavailableError, match="pip install cuda-bindings"):
        jit._nvrtc("nvrtcVersion")


def _compile_error(job: tuple[str, dict[str, int], str]) -> str:
    try:
        compiled = jit.compile_only(*job)
    except errors.UnavailableError as error:
        return str(error)
    entries = [kernel.entry for kernel in every_kernel() if kernel.source == job[0]]
    if entries and entries[0] not in compiled.usage:
        return f"{job}: profilers will not find {entries[0]} in {list(compiled.usage)}"
    return "" if compiled.usage else f"{job}: the assembler's log was not understood"


# One in so many is compiled for an architecture, others for the other one; no factor of 6: the last
# ones repeat dispatch, dispatch by rank, combine, each also plain. MOE_P2P_ALL_KERNELS=1: all.
SAMPLES = [11, pytest.param(5, marks=pytest.mark.more)]


def _jobs(one_in: int) -> list[tuple[str, dict[str, int], str]]:
    asked = [(kernel.source, kernel.macros) for kernel in every_kernel()]
    return [
        (*each, arch)
        for first, arch in enumerate(ARCHS)
        for each in [*asked[2 * first % one_in :: one_in], *ALONE]
    ]


@pytest.mark.parametrize("one_in", [11, 5])
def test_a_sample_of_the_kernels_has_all_kinds(one_in: int) -> None:
    asked = [macros for _, macros, _ in _jobs(one_in)]
    names = ("BULK", "MASKS", "QUANTIZE", "UNIFORM_EXPERTS", "SELF_FLAGGED", "PLAIN")
    for name in names:
        found = {macros[f"MOE_P2P_{name}"] for macros in asked if f"MOE_P2P_{name}" in macros}
        assert found == ({0, 1, 2} if name == "MASKS" else {0, 1}), name  # 2: fixed ones
    assert any("MOE_P2P_READY" in macros for macros in asked)
    layouts = {macros["MOE_P2P_LAYOUT"] for macros in asked if "MOE_P2P_LAYOUT" in macros}
    assert layouts == set(KERNELS)
    nodes = {(m["MOE_P2P_RANKS_PER_NODE"], m["MOE_P2P_WORLD_SIZE"]) for m in asked if m}
    assert any(local == world for local, world in nodes)
    assert any(local == 1 < world for local, world in nodes)
    assert any(1 < local < world for local, world in nodes)


@pytest.mark.parametrize("source", ["dispatch.cu", "combine.cu"])
def test_kernels_of_traces_compile(source: str) -> None:
    if reason := why_no_nvrtc():
        pytest.skip(reason)
    macros = next(kernel.macros for kernel in every_kernel() if kernel.source == source)
    assert _compile_error((source, macros | {"MOE_P2P_STAMPS": 1}, "sm_90a")) == ""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("one_in", SAMPLES)
def test_a_sample_of_all_kernels_compiles(
    one_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a user's configuration can ask for, by sample; here a sample of that."""
    if reason := why_no_nvrtc():
        pytest.skip(reason)
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path))
    sources = {path.name for path in (jit.kernels_root() / "kernels").glob("*.cu")}
    alone = {source for source, _ in ALONE}
    assert {kernel.source for kernel in every_kernel()} == sources - alone - {"probe.cu"}
    jobs = _jobs(1 if "MOE_P2P_ALL_KERNELS" in os.environ else one_in)
    with ThreadPoolExecutor(ranks.cpu_count()) as pool:
        outcomes = list(pool.map(_compile_error, jobs))
    failures = [text for text in outcomes if text]
    assert not failures, f"{len(failures)} of {len(jobs)}:\n" + "\n".join(failures)


def _launch(function: int, threads: int, *arguments: object, kinds: tuple[type, ...]) -> None:
    with driver.primary_context(0):
        driver.call("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, 0, (arguments, kinds), 0)
        driver.call("cuCtxSynchronize")


@pytest.mark.gpu
def test_a_loaded_kernel_runs(source: Path) -> None:

    function = jit.load(0, source, "multiply_add", {"ADDEND": 3}, dynamic_shared_bytes=100_000)
    assert jit.load(0, source, "multiply_add", {"ADDEND": 3}, dynamic_shared_bytes=100_000) == (
        function
    )
    assert jit.load(0, source, "multiply_add", {"ADDEND": 4}) != function
    values = torch.arange(64, dtype=torch.float32, device="cuda:0")
    expected = values.flip(0) * 1.5 + 3 + 128
    torch.cuda.synchronize()
    _launch(function, 64, values.data_ptr(), kinds=(ctypes.c_void_p,))
    assert torch.equal(values, expected)
    loaded = next(one for one in jit.report() if one.macros == {"ADDEND": 3})
    assert loaded.usage is not None
    assert (loaded.entry, loaded.registers) == ("multiply_add", loaded.usage.registers)
    assert loaded.shared_bytes == 256


def test_a_communicators_kernels_are_prepared_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled together, and passed to the communicator one after the other: it has one caller."""
    six, config = threading.Barrier(6, timeout=20), AllToAllConfig(**SIZES)  # each also plain
    caller, passed = threading.current_thread(), list[str]()

    def pass_on(kind: str) -> Callable[..., None]:
        def prepare(*_: object) -> None:
            assert threading.current_thread() is caller
            assert six.n_waiting == 0
            passed.append(kind)

        return prepare

    side = object.__new__(kernels.DeviceSide)
    side._shape = shape_macros(config, world_size=2, ranks_per_node=2)
    side._num_sms = None
    monkeypatch.setattr(side, "_open", lambda _: six.wait())
    for kind in ("dispatch", "combine"):
        monkeypatch.setattr(side, f"prepare_{kind}", pass_on(kind))
    side.prepare(*usual_calls(config))
    assert passed == ["dispatch", "dispatch", "combine"]

    def fails(kernel: kernels.Kernel) -> None:
        if "combine" in kernel.source:
            raise errors.make(errors.UnavailableError, "no NVRTC")

    monkeypatch.setattr(side, "_open", fails)
    with pytest.raises(errors.UnavailableError, match="no NVRTC"):
        side.prepare(*usual_calls(config))


def test_no_kernel_is_compiled_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    side, config = object.__new__(kernels.DeviceSide), AllToAllConfig(**SIZES)
    side._shape = shape_macros(config, world_size=2, ranks_per_node=2)
    side._num_sms, side._ready = None, set()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    options = DispatchOptions(layout="by_rank", quantize=True, scale_format="ue8m0")
    call = r"DispatchOptions\(layout='by_rank', quantize=True, scale_format='ue8m0'\), x_dtype="
    with pytest.raises(errors.UnavailableError, match=rf"prepare\({call}torch.bfloat16\), before"):
        side.prepare_dispatch(torch.bfloat16, options.number)
    with pytest.raises(errors.UnavailableError, match=r"out_dtype=torch\.float32, order='topk'"):
        side.prepare_combine(torch.bfloat16, torch.float32, True)
    side._ready.add((torch.bfloat16, torch.float32, True, 0))
    side.prepare_combine(torch.bfloat16, torch.float32, True)


def test_kernels_of_fixed_worlds_know_nothing_of_epochs() -> None:
    """So their machine code is what it was; those of a world that changes know masks, always."""
    for masks, lost in ((False, None), (True, None), (True, "drop"), (True, "poison")):
        config = AllToAllConfig(**SIZES, mask_lost_ranks=masks, lost=lost)  # type: ignore[arg-type]
        fixed = shape_macros(config, world_size=2, ranks_per_node=2)
        assert "MOE_P2P_ELASTIC" not in fixed
        assert fixed.get("MOE_P2P_LOST") == {None: None, "drop": 1, "poison": 2}[lost]
        changing = fixed | of_changing(config)
        assert changing["MOE_P2P_ELASTIC"] == 1
        assert changing["MOE_P2P_MASKS"] == (1 if masks else 2)
        assert changing.get("MOE_P2P_LOST") == (2 if masks and lost != "drop" else lost and 1)


def test_lines_are_for_profilers(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    monkeypatch.setenv("MOE_P2P_LOG", "warning")
    assert "-lineinfo" not in jit._options(source, {}, "sm_90a")
    monkeypatch.setenv("MOE_P2P_LOG", "debug")
    assert "-lineinfo" in jit._options(source, {}, "sm_90a")


@pytest.mark.gpu
def test_a_product_is_rounded_before_it_is_added(source: Path) -> None:

    source.write_text('extern "C" __global__ void fused(float* x) { x[3] = x[0] * x[1] + x[2]; }\n')
    function = jit.load(0, source, "fused", {})
    # a * a is 1 + 2**-11 + 2**-24, which rounds to 1 + 2**-11: a fused multiply-add leaves 2**-24.
    a = 1 + 2**-12
    values = torch.tensor([a, a, -(1 + 2**-11), 7.0], device="cuda:0")
    torch.cuda.synchronize()
    _launch(function, 1, values.data_ptr(), kinds=(ctypes.c_void_p,))
    assert values[3].item() == 0.0


@pytest.mark.gpu
def test_an_entry_that_is_not_there_is_named(source: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r'extern "C" kernel absent'):
        jit.load(0, source, "absent", {"ADDEND": 3})


@pytest.mark.parametrize(("ranks", "combine", "dispatch"), [(2, 10, 9), (4, 12, 10)])
def test_of_two_ranks_senders_of_rows_by_rank_leave_blocks_to_receivers(
    ranks: int, combine: int, dispatch: int
) -> None:
    """Half of these rows stay where they are."""
    config = AllToAllConfig(num_experts=64, hidden_dim=1024, topk=8, max_tokens=512, num_sms=24)
    shape = shape_macros(config, world_size=ranks, ranks_per_node=ranks)
    kernel = kernels.combine_kernel(shape, torch.bfloat16, torch.bfloat16, num_sms=24)
    away, recv = kernel.max_away_blocks, kernel.max_recv_blocks
    assert 24 * away // (away + recv) == combine
    assert kernel.max_copy_blocks == recv < kernel.max_send_blocks
    given = kernels.dispatch_kernel(
        shape, torch.float8_e4m3fn, quantize=False, layout=NAMES.index("by_rank"), num_sms=24
    )
    sent, received = given.max_send_blocks, given.max_recv_blocks
    assert 24 * sent // (sent + received) == dispatch


def test_steps_of_a_class_share_kernels() -> None:
    """Where M is a number that the host passes; elsewhere each M has its own."""

    def made(tokens: int, local: int, num_sms: int | None) -> list[kernels.Kernel]:
        config = AllToAllConfig(
            num_experts=64, hidden_dim=1024, topk=8, max_tokens=tokens, num_sms=num_sms
        )
        shape = shape_macros(config, world_size=8, ranks_per_node=local)
        bf16 = torch.bfloat16
        return [
            kernels.dispatch_kernel(shape, bf16, quantize=True, num_sms=num_sms),
            kernels.combine_kernel(shape, bf16, bf16, num_sms=num_sms),
        ]

    assert made(100, 8, None) == made(65, 8, None) == made(128, 8, None)
    assert made(5, 8, 24) == made(16, 8, 24) != made(17, 8, 24)
    assert made(128, 8, None) != made(129, 8, None)
    assert made(300, 8, 24) != made(301, 8, 24), "in bulk"
    assert made(100, 4, None) != made(128, 4, None), "between nodes"
