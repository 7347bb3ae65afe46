"""Ranges of NVTX: NVIDIA's library with a tool that writes down what it gets, and without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
# A profiler, as far as NVTX knows it: it takes two functions of the table of CORE (nvtxTypes.h:
# NVTX_ETID_CALLBACKS 1, NVTX_CB_MODULE_CORE 1, NVTX_CBID_CORE_RangePushA 9, RangePop 11).
TOOL = """
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <sys/syscall.h>
namespace {
void put(const char* word) {
  static FILE* const out = std::fopen(std::getenv("RANGES_OUT"), "a");
  std::fprintf(out, "%ld %s\\n", static_cast<long>(syscall(SYS_gettid)), word);
  std::fflush(out);
}
int push(const char* name) { put(name); return 0; }
int pop() { put("end"); return 0; }
struct Callbacks {
  size_t bytes;
  int (*table)(int module, void**** functions, unsigned* count);
};
}  // namespace
extern "C" int InitializeInjectionNvtx2(const void* (*table)(uint32_t)) {
  const auto* callbacks = static_cast<const Callbacks*>(table(1));
  void*** functions = nullptr;
  unsigned count = 0;
  if (!callbacks || !callbacks->table(1, &functions, &count) || count <= 11) return 0;
  *functions[9] = reinterpret_cast<void*>(&push);
  *functions[11] = reinterpret_cast<void*>(&pop);
  return 1;
}
"""
CALLS = """
import torch
from torch.distributed import HashStore
from moe_p2p import AllToAll, AllToAllConfig, Engine, EngineConfig, PageRows
from moe_p2p.machine.ranges import span
config = AllToAllConfig(num_experts=2, hidden_dim=64, topk=1, max_tokens=4)
with AllToAll(HashStore(), config, rank=0, world_size=1) as comm:
    x, idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
    got = comm.dispatch(x, idx)
    comm.combine(got.x, got)
    got = comm.dispatch_recv(comm.dispatch_send(x, idx))
    comm.combine_recv(comm.combine_send(got.x, got))
    try:
        comm.dispatch(x, idx + 7)
    except RuntimeError:
        pass
with Engine(EngineConfig(transport="loopback")) as one:
    memory = one.register(torch.ones(64, dtype=torch.uint8))
    region = one.resolve(memory.descriptor)
    pages = torch.tensor([0])
    with span("outer"):
        rows = PageRows(page_bytes=8)
        one.write_pages(memory, region, pages=pages, region_pages=pages + 1, rows=rows).wait()
"""
WANTED = (
    "dispatch end combine end dispatch_send end dispatch_recv end combine_send end combine_recv "
    "end dispatch end outer write_pages end end"
)


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool")
    source, library = folder / "tool.cpp", folder / "libtool.so"
    source.write_text(TOOL)
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", "-o", library, source], check=True)
    return library


def run(text: str, **more: str) -> str:
    """What it prints to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
    server = warm.without_moe_p2p()
    ran = server.run("-c", text, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return str(ran.stderr)


def has_library() -> bool:
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return any(list(Path(each).glob("*/lib/libnvtx3interop.so.1")) for each in folders)


@pytest.mark.skipif(not has_library(), reason="needs nvidia-nvtx")
@pytest.mark.parametrize("asked", ["1", "0"])
def test_a_profiler_sees_calls_by_name_where_it_is_asked_for(
    asked: str, tool: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ranges"
    more = {"NVTX_INJECTION64_PATH": str(tool), "RANGES_OUT": str(out), "MOE_P2P_NVTX": asked}
    assert "NVTX" not in run(CALLS, **more)
    if asked == "0":
        assert not out.exists()
        return
    threads, names = zip(*(line.split(" ") for line in out.read_text().splitlines()), strict=True)
    assert " ".join(name.removeprefix("moe_p2p.") for name in names) == WANTED
    assert len(set(threads)) == 1


@pytest.mark.skipif(not has_library(), reason="needs nvidia-nvtx")
def test_without_a_profiler_they_do_nothing() -> None:
    assert run(CALLS, MOE_P2P_NVTX="1") == ""


def test_a_library_that_is_missing_is_warned_of(tmp_path: Path) -> None:
    """It is asked for and cannot be opened: calls go on, and the text says what to install."""
    hidden = (
        "import sys, importlib.util\n"
        "found = importlib.util.find_spec\n"
        "hides = lambda name, *more: None if name == 'nvidia' else found(name, *more)\n"
        "importlib.util.find_spec = hides\n"
        "import moe_p2p.machine.ranges as ranges\n"
        "assert ranges._in_wheels() == []\n"
        "ranges._FILES = ('libnot_there.so.1',)\n"
        "import os; os.environ['MOE_P2P_NVTX'] = '1'\n"
        "ranges.turn_on_if_asked()\n"
    )
    err = run(hidden + CALLS, MOE_P2P_NVTX="0")
    text = "MOE_P2P_NVTX is set, and there are no ranges: moe_p2p [unavailable] a library of NVTX"
    assert f"{text} cannot be opened: libnot_there.so.1" in err
    assert "pip install nvidia-nvtx, or unset MOE_P2P_NVTX" in err
