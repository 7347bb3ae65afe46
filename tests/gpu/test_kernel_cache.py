"""machine/kernel_cache.py: not run: what others may write; compiled anew: what does not load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_p2p import env, errors
from moe_p2p.machine import driver as cuda_driver
from moe_p2p.machine import jit, kernel_cache

KEY, CUBIN, LOG = "k" * 8, b"\x7fELF of a kernel", "no spills"


@pytest.fixture(name="folder")
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test that has one kernel."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOE_P2P_CACHE", str(folder))
    monkeypatch.setenv("MOE_P2P_LOG", "warning")
    kernel_cache._warn_once.cache_clear()
    with kernel_cache.exclusive(KEY) as writable:
        assert writable
        kernel_cache.write(KEY, CUBIN, LOG)
    assert kernel_cache.read(KEY) == (CUBIN, LOG)
    return folder


def _refused(capfd: pytest.CaptureFixture[str], why: str) -> bool:
    """Nothing is read or written, and one line says why."""
    for _ in range(2):
        assert kernel_cache.read(KEY) is None
        with kernel_cache.exclusive(KEY) as writable:
            assert not writable
    lines = [line for line in capfd.readouterr().err.splitlines() if "kernel cache" in line]
    return len(lines) == 1 and why in lines[0] and "moe_p2p warning" in lines[0]


def test_a_folder_of_ones_own_is_private(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], mode: int
) -> None:
    folder.chmod(mode)
    assert _refused(capfd, "others may write to it")
    folder.chmod(0o755)
    assert kernel_cache.read(KEY) == (CUBIN, LOG)


def test_a_folder_of_another_user_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = folder.stat().st_uid
    if owner == 0:  # the folder of root serves everybody
        os.chown(folder, 12345, -1)
        owner = 12345
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert _refused(capfd, f"it belongs to user {owner}")


def test_a_file_that_was_put_into_an_open_folder_is_not_taken(folder: Path) -> None:
    """It stays there when the folder's rights are mended."""
    (folder / f"{KEY}.cubin").chmod(0o666)
    assert kernel_cache.read(KEY) is None


def test_a_relative_folder_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("MOE_P2P_CACHE", "cache")
    assert _refused(capfd, "working directory")


def test_a_second_folder_is_read_and_never_written(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    monkeypatch.setenv("MOE_P2P_CACHE", str(own))
    assert kernel_cache.read(KEY) is None
    monkeypatch.setenv("MOE_P2P_KERNELS", str(folder))
    assert kernel_cache.read(KEY) == (CUBIN, LOG)
    before = sorted(folder.iterdir())
    with kernel_cache.exclusive("other") as writable:
        assert writable
        kernel_cache.write("other", CUBIN + b"2", LOG)
    assert sorted(folder.iterdir()) == before
    assert kernel_cache.read("other") == (CUBIN + b"2", LOG)
    folder.chmod(0o777)
    assert kernel_cache.read(KEY) is None
    assert "MOE_P2P_KERNELS" in capfd.readouterr().err


def test_kernels_that_came_with_the_package_are_read_and_never_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write there: what Python runs lies beside them."""
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(env, "_PACKAGED", folder)
    monkeypatch.setattr(env, "_one_folder", False)
    folder.chmod(0o777)
    assert kernel_cache.read(KEY) == (CUBIN, LOG)
    before = sorted(folder.iterdir())
    with kernel_cache.exclusive("other") as writable:
        assert writable
        kernel_cache.write("other", CUBIN, LOG)
    assert sorted(folder.iterdir()) == before
    (folder / f"{KEY}.cubin").write_bytes(CUBIN[:-1])  # damaged
    assert kernel_cache.read(KEY) is None
    (folder / f"{KEY}.cubin").write_bytes(CUBIN)
    env.use_cache_folder(tmp_path / "into")
    assert kernel_cache.read(KEY) is None


def test_a_kernel_of_other_sources_or_of_another_compiler_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key names both, and not the place of the installation."""
    monkeypatch.setattr(jit, "_nvrtc_build", lambda: "V13.0.48")
    trees = [tmp_path / "here", tmp_path / "there"]
    keys = []
    for tree in trees:
        (tree / "kernels").mkdir(parents=True)
        (tree / "kernels" / "k.cu").write_text('#include "kernels/k.h"\n')
        (tree / "kernels" / "k.h").write_text("int a;\n")
        monkeypatch.setattr(jit, "kernels_root", lambda tree=tree: tree)
        keys.append(jit.cache_key(tree / "kernels" / "k.cu", ["-DA=1", f"-I{tree}"]))
    assert keys[0] == keys[1]
    source = trees[1] / "kernels" / "k.cu"
    assert jit.cache_key(source, ["-DA=2"]) != keys[0]
    monkeypatch.setattr(jit, "_nvrtc_build", lambda: "V13.0.88")
    assert jit.cache_key(source, ["-DA=1"]) != keys[0]
    monkeypatch.setattr(jit, "_nvrtc_build", lambda: "V13.0.48")
    (trees[1] / "kernels" / "k.h").write_text("int b;\n")
    assert jit.cache_key(source, ["-DA=1"]) != keys[0]


def test_without_a_home_the_folder_is_private_and_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOE_P2P_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # neither HOME nor an entry
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert env.cache_folder() == tmp_path / f"moe_p2p-{os.getuid()}"
    with kernel_cache.exclusive(KEY):
        kernel_cache.write(KEY, CUBIN, LOG)
    assert kernel_cache.read(KEY) == (CUBIN, LOG)


class Driver:
    """Of CUDA, as far as a kernel is loaded: it takes the modules in `good` and no others."""

    def __init__(self) -> None:
        self.good: set[bytes] = set()
        self.answer: errors.MoeP2pError = errors.make(
            errors.TransportError, "cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE"
        )
        self.loads: list[bytes] = []

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuModuleLoadData":
            self.loads.append(arguments[0])
            if arguments[0] not in self.good:
                raise self.answer
        return 7


@pytest.fixture(name="driver")
def fake_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """jit.load compiles to `fresh` and loads into a fake driver; the cache has `stale`."""
    driver = Driver()

    @contextlib.contextmanager
    def context(_: int) -> Iterator[None]:
        yield

    attributes = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_NUM_REGS=0,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES=2,
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=3,
    )
    monkeypatch.setattr(cuda_driver, "call", driver.call)
    monkeypatch.setattr(cuda_driver, "primary_context", context)
    monkeypatch.setattr(
        cuda_driver, "module", lambda: SimpleNamespace(CUfunction_attribute=attributes)
    )
    monkeypatch.setattr(jit, "arch_of", lambda _: "sm_90a")
    monkeypatch.setattr(jit, "_options", lambda *_: [])
    monkeypatch.setattr(jit, "cache_key", lambda *_: KEY)
    monkeypatch.setattr(jit, "_compile", lambda *_: (FRESH, LOG))
    monkeypatch.setattr(jit, "_handles", {})
    monkeypatch.setattr(jit, "_loaded", [])
    monkeypatch.setattr(jit, "_modules", [])
    kernel_cache.write(KEY, STALE, LOG)
    return driver


STALE, FRESH = b"\x7fELF.text.entry\0 stale", b"\x7fELF.text.entry\0 fresh"


def test_a_cached_kernel_that_does_not_load_is_compiled_anew_once(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    driver.good = {FRESH}
    assert jit.load(0, "copy.cu", "entry", {}) == 7
    assert driver.loads == [STALE, FRESH]
    assert kernel_cache.read(KEY) == (FRESH, LOG)
    assert not jit.report()[0].cached
    assert "compiled anew: moe_p2p [transport] cuModuleLoadData" in capfd.readouterr().err


def test_a_kernel_that_never_loads_is_an_error_after_one_more_try(driver: Driver) -> None:
    with pytest.raises(errors.TransportError, match="INVALID_IMAGE"):
        jit.load(0, "copy.cu", "entry", {})
    assert driver.loads == [STALE, FRESH]


def test_a_device_without_memory_is_no_reason_to_compile(driver: Driver) -> None:
    driver.answer = errors.make(errors.ResourceExhaustedError, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(errors.ResourceExhaustedError):
        jit.load(0, "copy.cu", "entry", {})
    assert driver.loads == [STALE]
    assert kernel_cache.read(KEY) == (STALE, LOG)
