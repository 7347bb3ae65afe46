"""Kernels: compiled by NVRTC at first use, kept on disk, loaded into a device's primary context.

`compile_only` needs no GPU; `load` does. A kernel's file is named by a hash of everything that
determines it: its source, the files of kernels/ that it includes, the options and the build of
NVRTC. When several processes need one kernel, one compiles it and the others wait for the file.
Without a writable cache folder every process compiles for itself.

Not on the data path: callers keep the handle that `load` returned.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p import env, errors, log
from moe_p2p.machine import driver, kernel_cache

_PACKAGE = Path(__file__).resolve().parents[1]
# Products are rounded before they are added: the order of operations is part of the specification.
_OPTIONS = ("-std=c++20", "-fmad=false", "-default-device", "--ptxas-options=-v")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_ARCH = re.compile(r"sm_\d+[af]?")


class Usage(NamedTuple):
    """Resources of a kernel as ptxas reports them: per thread, but shared_bytes per block.

    Spilled registers go through memory: spill bytes should be 0.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


class Compiled(NamedTuple):
    """A source compiled for one architecture. cached: it came from the cache folder."""

    cubin: bytes
    log: str
    arch: str
    cached: bool

    @property
    def usage(self) -> dict[str, Usage]:
        """Usage by entry; empty where the assembler's log has another format."""
        return parse_usage(self.log)


class Loaded(NamedTuple):
    """One line of `report`. local_bytes: per thread, spills and dynamically indexed arrays."""

    device: int
    source: str
    entry: str
    macros: dict[str, int]
    arch: str
    registers: int
    shared_bytes: int
    local_bytes: int
    max_threads: int
    usage: Usage | None
    cached: bool
    ready_s: float  # from the call of load until the kernel can be launched


_handles: dict[tuple[Any, ...], int] = {}
_loaded: list[Loaded] = []
_modules: list[Any] = []  # kept loaded as long as the process lives
_load_lock = threading.Lock()


def load(
    device: int,
    source: str | Path,
    entry: str,
    macros: Mapping[str, int],
    *,
    dynamic_shared_bytes: int = 0,
) -> int:
    """Returns a CUfunction of `device`, as an int, valid in its primary context until process exit.

    device: number of the device, as torch counts.
    source: a file name in kernels/, or the path of another file. It is read once per process.
    entry: name of an extern "C" kernel.
    macros: passed as -DNAME=VALUE.
    dynamic_shared_bytes: the most that any launch will use.

    A repeated call is a look-up. Raises UnavailableError when a package or the driver is missing,
    the source does not compile (with the compiler's log) or the device cannot run it, and
    InvalidArgumentError when there is no such source or entry.
    """
    key = (device, source, entry, frozenset(macros.items()), dynamic_shared_bytes)
    found = _handles.get(key)
    if found is not None:
        return found
    started = time.monotonic()
    compiled = compile_only(source, macros, arch_of(device))
    with _load_lock:
        if key not in _handles:
            try:
                function, facts = _load(device, entry, compiled, dynamic_shared_bytes)
            except (errors.TransportError, errors.UnavailableError) as error:
                if not compiled.cached:
                    raise
                log.warning(f"{source} of the kernel cache is compiled anew: {error}")
                compiled = compile_only(source, macros, compiled.arch, anew=True)
                function, facts = _load(device, entry, compiled, dynamic_shared_bytes)
            _loaded.append(
                Loaded(
                    device=device,
                    source=Path(source).name,
                    entry=entry,
                    macros=dict(macros),
                    arch=compiled.arch,
                    usage=compiled.usage.get(entry),
                    cached=compiled.cached,
                    ready_s=time.monotonic() - started,
                    **facts,
                )
            )
            _handles[key] = function
        return _handles[key]


def report() -> list[Loaded]:
    """Returns the kernels that this process has loaded, in order."""
    with _load_lock:
        return list(_loaded)


def compile_only(
    source: str | Path, macros: Mapping[str, int], arch: str, *, anew: bool = False
) -> Compiled:
    """Returns `source` compiled for `arch` ("sm_90a"), from the cache if possible. Needs no GPU.

    anew: compiles in any case and replaces the cached file. Raises UnavailableError when NVRTC is
    missing or the source does not compile (with its log).
    """
    path = source_path(source)
    options = _options(path, macros, arch)
    key = cache_key(path, options)
    if not anew and (found := kernel_cache.read(key)):
        return Compiled(*found, arch, cached=True)
    with kernel_cache.exclusive(key) as writable:
        if not anew and (found := kernel_cache.read(key)):
            return Compiled(*found, arch, cached=True)
        cubin, text = _compile(path, options, arch)
        if writable:
            kernel_cache.write(key, cubin, text)
    return Compiled(cubin, text, arch, cached=False)


def is_compiled(source: str | Path, macros: Mapping[str, int], arch: str) -> bool:
    """Whether the cache has what `compile_only` would return."""
    path = source_path(source)
    return kernel_cache.read(cache_key(path, _options(path, macros, arch))) is not None


def _options(path: Path, macros: Mapping[str, int], arch: str) -> list[str]:
    errors.require(
        _ARCH.fullmatch(arch) is not None, f"arch is {arch!r}, must be like sm_90a or sm_100a"
    )
    for name, value in macros.items():
        errors.require(
            name.isidentifier() and isinstance(value, int), f"macro {name} = {value!r} must be int"
        )
    return [
        f"-arch={arch}",
        *_OPTIONS,
        *(["-lineinfo"] if log.shows("debug") else []),  # for profilers; doubles a cubin
        *(f"-D{name}={int(value)}" for name, value in sorted(macros.items())),
        *(f"-I{folder}" for folder in include_folders(path)),
    ]


def arch_of(device: int) -> str:
    """Returns the architecture to compile for, with its own features: "sm_90a" for an H200."""
    major, minor = driver.capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def source_path(source: str | Path) -> Path:
    """Returns the file of a name in kernels/ or a path. InvalidArgumentError if there is none."""
    path = (kernels_root() / "kernels" / source).absolute()  # keeps an absolute path as it is
    errors.require(path.is_file(), f"there is no kernel source {path}")
    return path


@functools.cache
def kernels_root() -> Path:
    """The folder that contains kernels/: the package, or the source tree around it."""
    return _PACKAGE if (_PACKAGE / "kernels").is_dir() else _PACKAGE.parent


def include_folders(source: Path) -> list[Path]:
    """Folders that NVRTC searches: kernels/ and all below, the source's own, then CUDA headers."""
    return [kernels_root(), source.parent, *_cuda_headers()]


@functools.cache
def _cuda_headers() -> tuple[Path, ...]:
    """Folders of CUDA's headers and its C++ library's: from the pip packages, else the toolkit."""
    major = _nvrtc_version()[0]
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    bases = [place / f"cu{major}" / "include" for place in places]
    bases += [place / "cuda_runtime" / "include" for place in places]  # until CUDA 12
    bases.append(env.cuda_home() / "include")
    ccls = [place / "cuda_cccl" / "include" for place in places]
    ccls += [folder for base in bases for folder in (base / "cccl", base)]
    found = [next((b for b in bases if (b / "cuda_fp8.h").is_file()), None)]
    found.append(next((c for c in ccls if (c / "cuda" / "atomic").is_file()), None))
    return tuple(dict.fromkeys(folder for folder in found if folder is not None))


def cache_key(source: Path, options: list[str]) -> str:
    """Hash of the source, all files it includes with quotes and the options; "-"; the compiler's.

    Not of the folders that are searched: an installation at another place has the same kernels.
    """
    root = kernels_root()
    given = [option for option in options if not option.startswith("-I")]
    digest = hashlib.sha256(repr((source.name, given)).encode())
    queue, seen = [source], {source}
    while queue:
        path = queue.pop()
        text = path.read_bytes()
        digest.update(f"{os.path.relpath(path, root)} {len(text)}\n".encode() + text)
        for name in _INCLUDE.findall(text):
            for folder in (path.parent, root, source.parent):
                included = Path(os.path.normpath(folder / os.fsdecode(name)))
                if included.is_file():
                    if included not in seen:
                        seen.add(included)
                        queue.append(included)
                    break
    return f"{digest.hexdigest()}-{hashlib.sha256(_nvrtc_build().encode()).hexdigest()[:16]}"


def parse_usage(log: str) -> dict[str, Usage]:
    """Parses the assembler's -v output; returns usage by entry.

    A line "Compiling entry function 'k'" opens a part. Functions that were not inlined have lines
    of their own in it; they are summed.
    """
    result = {}
    for part in log.split("Compiling entry function '")[1:]:
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill st\w+, (\d+) byte", part)
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if used and frames:
            stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
            result[part.split("'", 1)[0]] = Usage(
                int(used[1]), int(shared[1]) if shared else 0, stack, stores, loads
            )
    return result


def _load(
    device: int, entry: str, compiled: Compiled, dynamic_shared_bytes: int
) -> tuple[int, dict[str, int]]:
    attributes = driver.module().CUfunction_attribute

    def get(name: str) -> int:
        return int(
            driver.call(
                "cuFuncGetAttribute", getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}"), function
            )
        )

    with driver.primary_context(device):
        module = driver.call("cuModuleLoadData", compiled.cubin)
        try:
            errors.require(
                f".text.{entry}\0".encode() in compiled.cubin,
                f'the source has no extern "C" kernel {entry}',
            )
            function = driver.call("cuModuleGetFunction", module, entry.encode())
            if dynamic_shared_bytes:
                driver.call(
                    "cuFuncSetAttribute",
                    function,
                    attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    dynamic_shared_bytes,
                )
            # Or the first launch may do it, on a thread that must not wait, while kernels of the
            # device wait for that thread. Drivers before CUDA 12.4 have no such call.
            with contextlib.suppress(AttributeError, RuntimeError):
                driver.module().cuFuncLoad(function)
            facts = {
                "registers": get("NUM_REGS"),
                "shared_bytes": get("SHARED_SIZE_BYTES"),
                "local_bytes": get("LOCAL_SIZE_BYTES"),
                "max_threads": get("MAX_THREADS_PER_BLOCK"),
            }
        except BaseException:
            driver.call("cuModuleUnload", module)
            raise
        _modules.append(module)
    return int(function), facts


def _nvrtc(name: str, *args: Any) -> Any:
    """Calls the NVRTC function `name`; returns its value. Raises UnavailableError."""
    nvrtc = driver.bindings("nvrtc")
    try:
        result, *values = getattr(nvrtc, name)(*args)
    except RuntimeError as error:  # libnvrtc was not found
        raise errors.make(
            errors.UnavailableError,
            f"NVRTC cannot be opened ({error}): pip install nvidia-cuda-nvrtc",
        ) from None
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise errors.make(errors.UnavailableError, f"{name} failed: {result.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = _nvrtc("nvrtcVersion")
    return int(major), int(minor)


@functools.cache
def _nvrtc_build() -> str:
    """Returns the full version, "V13.0.48 CL-36037853", which NVRTC writes in PTX only. 20 ms.

    Updates within 13.0 fix the compiler too, so kernels of an older build are not reused.
    """
    program = _nvrtc("nvrtcCreateProgram", b"", b"version.cu", 0, [], [])
    try:
        _nvrtc("nvrtcCompileProgram", program, 0, [])
        text = _fetch("PTX", program).decode(errors="replace")
    finally:
        driver.bindings("nvrtc").nvrtcDestroyProgram(program)
    found = re.findall(r"\bV\d+\.[\d.]+\b|\bCL-\d+\b", text)
    return " ".join(sorted(found, reverse=True)) or str(_nvrtc_version())


def _fetch(what: str, program: Any) -> bytes:
    """Returns nvrtcGet`what` of a program, which NVRTC writes into the buffer it is passed."""
    size = int(_nvrtc(f"nvrtcGet{what}Size", program))
    buffer = bytes(size + 2)  # the interpreter shares bytes objects of length 0 and 1
    _nvrtc(f"nvrtcGet{what}", program, buffer)
    return buffer[:size]


def _compile(path: Path, options: list[str], arch: str) -> tuple[bytes, str]:
    nvrtc = driver.bindings("nvrtc")
    program = _nvrtc("nvrtcCreateProgram", path.read_bytes(), os.fsencode(path), 0, [], [])
    try:
        (result,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        log = _fetch("ProgramLog", program).rstrip(b"\0 \n").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise errors.make(
                errors.UnavailableError,
                f"{path} does not compile for {arch} ({result.name}), with "
                f"{' '.join(options)}:\n{log}",
            )
        return _fetch("CUBIN", program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
