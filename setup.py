"""Builds moe_p2p/_C.abi3.so: csrc/ against torch's stable ABI, with ninja and g++, no CUDA toolkit.

One binary serves every Python from 3.10 and every torch from 2.10 on, CPU and CUDA builds alike:
it names no C++ symbol of torch (tests/test_wheel.py looks) and no symbol of Python at all.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch this will load into
PY_LIMITED_API = "0x030a0000"  # 3.10

SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
# The order of floating-point operations is part of the specification: no contraction to fma.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
    f"-DPy_LIMITED_API={PY_LIMITED_API}",
]

extension = CppExtension(
    "moe_p2p._C",
    sources=SOURCES,
    include_dirs=[str(ROOT / "csrc"), str(ROOT)],
    extra_compile_args={"cxx": CXX_FLAGS},
    libraries=["rt", "dl", "pthread"],
    py_limited_api=True,
)

setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
