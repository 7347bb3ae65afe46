"""contrib/release/: the wheel of compiled kernels, and what `make release` refuses and writes."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from contrib.release import finish, kernels
from moe_p2p import env
from moe_p2p.machine import kernel_cache

ROOT = Path(__file__).resolve().parents[2]
CUBIN, LOG = b"\x7fELF of a kernel", "no spills"


@pytest.fixture(name="compiled")
def folder_of_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as `compile --into` leaves it: a kernel, by one build of NVRTC, and its lock."""
    folder = tmp_path / "compiled"
    monkeypatch.setenv("MOE_P2P_CACHE", str(folder))
    with kernel_cache.exclusive("50c3-0001") as writable:
        assert writable
        kernel_cache.write("50c3-0001", CUBIN, LOG)
    return folder


def test_kernels_of_the_wheel_serve_every_build_of_the_compiler(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip puts them where the package looks; a name without the build is no other kernel's."""
    wheel = kernels.write(compiled, tmp_path)
    assert wheel.name == f"moe_p2p_kernels-{kernels.version()}-py3-none-any.whl"
    site = tmp_path / "site"
    options = ["--no-index", "--no-deps", "--quiet", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True, timeout=250)
    place = site / env._PACKAGED.relative_to(ROOT)
    assert sorted(file.name for file in place.iterdir()) == [
        f"50c3.{end}" for end in ("cubin", "log", "sha256")
    ]
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(env, "_PACKAGED", place)
    monkeypatch.setattr(env, "_one_folder", False)
    for build in ("0001", "0002"):
        assert kernel_cache.read(f"50c3-{build}") == (CUBIN, LOG)
    assert kernel_cache.read("50c4-0001") is None
    # The cache of this user, and MOE_P2P_KERNELS, have the compiler's own.
    monkeypatch.setenv("MOE_P2P_CACHE", str(compiled))
    monkeypatch.setattr(env, "_PACKAGED", tmp_path / "nothing")
    assert kernel_cache.read("50c3-0002") is None


def test_the_wheel_asks_for_its_own_version_of_moe_p2p(compiled: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(kernels.write(compiled, tmp_path)) as wheel:
        about = f"moe_p2p_kernels-{kernels.version()}.dist-info"
        text = wheel.read(f"{about}/METADATA").decode()
        assert not any("lock" in name for name in wheel.namelist())
    assert f"Requires-Dist: moe-p2p=={kernels.version()}" in text


def test_kernels_of_two_compilers_or_of_none_are_refused(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 builds of NVRTC"):
        kernels.write(tmp_path, tmp_path)
    with kernel_cache.exclusive("50c3-0002"):
        kernel_cache.write("50c3-0002", CUBIN, LOG)
    with pytest.raises(SystemExit, match="2 builds of NVRTC, must be of one"):
        kernels.write(compiled, tmp_path)
    assert not list(tmp_path.glob("*.whl"))


@pytest.fixture(name="dist")
def folder_of_a_release(tmp_path: Path) -> Path:
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in finish.WANTED:
        (dist / name.format(finish.version())).write_text(name)
    return dist


def test_a_release_has_checksums_and_the_notes_of_its_version(
    dist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish.main(dist) == finish.main(dist) == 0  # what the first wrote is no part
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    checked = subprocess.run(check, cwd=dist, check=True, capture_output=True, text=True)
    assert checked.stdout.count(": OK\n") == len(finish.WANTED)
    text = (dist / "NOTES.md").read_text()
    assert text.startswith(f"# moe_p2p {finish.version()}")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    own = changelog[changelog.index(f"## {finish.version()}") :].splitlines()[2]
    assert own in text
    assert all(name.format(finish.version()) in text for name in finish.WANTED)


def test_notes_are_of_one_version_alone() -> None:
    version = finish.version()
    text = f"# Changes\n\n## {version}, 2026-12-01\n\n* new\n\n## {version}9\n\n* old\n"
    made = finish.notes(text, {"a.whl": "00"}, {"a.whl": 1 << 20})
    assert made.startswith(f"# moe_p2p {version}, 2026-12-01\n\n* new\n\n| file |")
    assert "* old" not in made
    with pytest.raises(SystemExit, match="0 headings"):
        finish.notes("# Changes\n", {}, {})


def test_a_release_that_lacks_a_part_or_is_too_large_is_refused(
    dist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = finish.version()
    arm = f"moe_p2p-{version}-cp310-abi3-manylinux_2_34_aarch64.whl"
    (dist / arm).rename(dist / arm.replace("manylinux_2_34", "linux"))
    with open(dist / f"moe_p2p-{version}.tar.gz", "wb") as large:
        large.truncate(9 << 20)
    assert finish.main(dist) == 1
    assert capsys.readouterr().out.splitlines() == [
        "no release:",
        f"{arm} is not there",
        f"{arm.replace('manylinux_2_34', 'linux')} is no part of a release",
        f"moe_p2p-{version}.tar.gz has 9.0 MiB, at most 8 are allowed",
    ]
    assert not (dist / "NOTES.md").exists()
