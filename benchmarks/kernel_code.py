"""Whether two trees have the same machine code in every kernel, for each GPU that we build for.

    python benchmarks/kernel_code.py BASE [--arch sm_90a] [--jobs 2]

BASE: another tree, whose extension is built. Kernels: all that configurations can ask for
(moe_p2p/moe/gpu/variants.py, with their plain variants) and those of no communicator, by NVRTC, and
the Triton kernels of tests/gpu/test_triton_kernels.py, not probe.cu of the benchmark. Needs no GPU;
NVRTC's cubins stay in the kernel cache. Compared are instructions, literals and resources, not
names. The exit code is 1 where they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("sm_90a", "sm_100a")
ALONE = ("copy.cu", "rows.cu", "count.cu", "signal.cu", "pack.cu", "map.cu")
_NOBITS = 8
# Instructions, literals, and the memory that they take. Left out are names, line numbers, and
# .nv.global.init, where every constant of a header is, used or not.
_KEPT = (b".text.", b".nv.constant0.", b".nv.constant2.", b".nv.constant3", b".nv.shared.")


def digest_of(cubin: bytes) -> str:
    """Hash of an ELF file's instructions, literals, registers and memory, without names."""
    offset, size, count, names_at = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<HHH", cubin, 58),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    names = sections[names_at][4]
    digests = []
    for name, kind, _, _, at, length, _, info, align, _ in sections:
        kept = [each for each in _KEPT if cubin[names + name :].startswith(each)]
        if not kept:
            continue
        registers = info >> 24 if kept == [b".text."] else 0
        held = b"" if kind == _NOBITS else cubin[at : at + length]
        digest = hashlib.sha256(repr((kept, length, align, registers)).encode() + held)
        digests.append(digest.hexdigest())
    return hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()


def compiled_by_nvrtc(arch: str, jobs: int) -> Iterator[tuple[str, str]]:
    """Yields the name and the digest of each CUDA kernel."""
    from moe_p2p.machine import jit
    from moe_p2p.moe.gpu.variants import every_kernel

    asked: list[tuple[str, dict[str, int]]] = [
        (each.source, each.macros) for each in every_kernel()
    ]
    asked += [(source, {}) for source in ALONE]
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda each: jit.compile_only(each[0], each[1], arch).cubin, asked)
        for i, ((source, _), cubin) in enumerate(zip(asked, made, strict=True)):
            yield f"{source} {i}", digest_of(cubin)


def compiled_by_triton(arch: str) -> Iterator[tuple[str, str]]:
    """The same of each Triton kernel, for the arguments that its test launches it with."""
    try:
        importlib.import_module("triton")
    except ImportError:
        print("Triton is not installed: its kernels are left out", file=sys.stderr)
        return
    tests: Any = importlib.import_module("tests.gpu.test_triton_kernels")
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    asked = [
        *((tests.small_kernels, dtype) for dtype in types),
        *((tests.products, dtype, 77, 200, 120) for dtype in types),
        *itertools.product((tests.weights_in_blocks,), types[:2], (2048, 330)),
    ]
    for i, launch in enumerate(each for how in asked for each in tests.launches(*how)):
        made = tests.compile_for(launch, int(arch.removeprefix("sm_").rstrip("a")))
        yield f"{launch.kernel.fn.__name__} {i}", digest_of(made.asm["cubin"])


def digests(tree: Path, archs: list[str], jobs: int) -> dict[str, str]:
    """Compiles the kernels of a tree, in a process of its own; returns the digest of each."""
    command = [sys.executable, __file__, "", "--jobs", str(jobs), "--arch", *archs]
    # With line numbers ptxas schedules one of Triton's kernels by where its functions stand.
    environment = os.environ | {"PYTHONPATH": str(tree), "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("--arch", nargs="+", default=ARCHS)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if not args.base:  # called by digests()
        made = {
            f"{name} {arch}": digest
            for arch in args.arch
            for part in (compiled_by_nvrtc(arch, args.jobs), compiled_by_triton(arch))
            for name, digest in part
        }
        print(json.dumps(made))
        return 0
    ours, theirs = (
        digests(tree, args.arch, args.jobs) for tree in (ROOT, Path(args.base).resolve())
    )
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    for name in sorted(differing):
        print(f"{name}: {'differs' if name in ours and name in theirs else 'is in one tree only'}")
    print(f"{len(ours)} kernels compared, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
