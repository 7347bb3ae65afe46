"""Fetching engines' packages: what is kept, what is fetched again, and what a failure leaves."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.engines import packages


class Pip:
    """Downloads wheels of made-up contents."""

    def __init__(self, version: str | None = None) -> None:
        self.version, self.calls = version, list[str]()

    def __call__(self, *arguments: str) -> None:
        self.calls.append(arguments[-1])
        if arguments[0] == "install":
            folder = Path(arguments[arguments.index("--target") + 1])
            (folder / "pydantic").mkdir(parents=True)
            return
        project, _, version = arguments[-1].partition("==")
        folder = Path(arguments[arguments.index("-d") + 1])
        name = f"{project.replace('-', '_')}-{self.version or version}-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(folder / name, "w") as wheel:
            wheel.writestr("engine/__init__.py", "there = True\n")
            wheel.writestr("engine/_C.abi3.so", b"\x7fELF")


@pytest.fixture(name="cache", autouse=True)
def an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path))
    monkeypatch.delenv("ENGINES", raising=False)
    return tmp_path


def test_python_files_are_kept_and_found_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    monkeypatch.setattr(packages, "_pip", pip)
    assert packages.find("vllm") is None
    assert "make test-engines" in packages.why_not("vllm")
    packages.fetch_all()
    assert len(pip.calls) == 1 + len(packages.PINNED)
    for project, version in packages.PINNED.items():
        found = packages.find(project)
        assert found == cache / "engines" / f"{project}-{version}"
        compiled = ["_C.abi3.so"] if project in packages.WHOLE else []
        assert sorted(path.name for path in found.rglob("*.*")) == [*compiled, "__init__.py"]
    packages.fetch_all()
    assert len(pip.calls) == 1 + len(packages.PINNED), "nothing is fetched twice"
    assert not list((cache / "engines").glob("tmp*"))


def test_the_newest_are_fetched_beside_the_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_pip", Pip())
    packages.fetch_all()
    monkeypatch.setenv("ENGINES", "newest")
    assert packages.find("vllm") is None
    newest = Pip("99.1")
    monkeypatch.setattr(packages, "_pip", newest)
    packages.fetch_all()
    assert set(newest.calls) == set(packages.PINNED)
    assert packages.where("vllm").name == "vllm-99.1"
    monkeypatch.delenv("ENGINES")
    assert packages.where("vllm").name == f"vllm-{packages.PINNED['vllm']}"


def test_a_failure_says_so_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: str) -> None:
        raise subprocess.CalledProcessError(1, ["pip", *arguments])

    monkeypatch.setattr(packages, "_pip", fails)
    monkeypatch.setattr(packages, "BY_GIT", {})
    monkeypatch.setattr(packages, "BY_SOURCE", {})
    monkeypatch.setattr("sys.argv", ["packages"])
    assert packages.main() == 1
    assert "could not fetch the engines' packages" in capsys.readouterr().out
    assert list((cache / "engines").iterdir()) == []
    assert packages.find("vllm") is None


# --- what git fetches ---


@pytest.fixture(name="repository")
def a_repository(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> packages.Repository:
    """One whose folder "inside" is wanted; beside it lies what must not be fetched."""
    (cache / "engines").mkdir()
    at = tmp_path / "origin"
    for name in ("inside/bench", "beside"):
        (at / name).mkdir(parents=True)
        (at / name / "file.py").write_text("there = True\n")
    git = ("git", "-C", str(at), "-c", "user.name=x", "-c", "user.email=x@x")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    subprocess.run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"], check=True)
    subprocess.run([*git, "config", "uploadpack.allowFilter", "true"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    made = packages.Repository(f"file://{at}", commit, "inside", "MOE_P2P_X", "bench/file.py")
    monkeypatch.setattr(packages, "BY_GIT", {"x": made})
    monkeypatch.delenv("MOE_P2P_X", raising=False)
    return made


def test_a_folder_of_a_repository_is_checked_out_once(repository: packages.Repository) -> None:
    assert packages.find("x") is None
    assert "and MOE_P2P_X names no folder of it" in packages.why_not("x")
    assert packages.fetch_by_git("x").endswith(f"fetched from {repository.url}")
    found = packages.where("x")
    assert found.name == "inside"
    assert (found / "bench" / "file.py").is_file()
    assert not (found.parent / "beside").exists()
    assert packages.fetch_by_git("x") == f"x: in {found} already"


def test_a_named_folder_comes_first(
    repository: packages.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.fetch_by_git("x")
    monkeypatch.setenv("MOE_P2P_X", str(tmp_path / "nowhere"))
    assert packages.find("x") is None
    monkeypatch.setenv("MOE_P2P_X", str(tmp_path / "origin" / "inside"))
    assert packages.find("x") == tmp_path / "origin" / "inside"


def test_what_git_does_not_reach_is_skipped_with_the_reason(
    cache: Path, repository: packages.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = repository._replace(url=f"{repository.url}-gone")
    monkeypatch.setattr(packages, "BY_GIT", {"x": gone})
    assert packages.fetch_by_git("x").startswith("x: not fetched, its tests are skipped: ")
    assert packages.find("x") is None
    assert not list((cache / "engines").iterdir())


# --- source archives ---


def test_parts_of_a_source_archive_are_kept_though_its_build_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "engines").mkdir()
    source = packages.Source("vllm", ("vllm", "tests/moe"), "MOE_P2P_X", "tests/moe/it.py")
    monkeypatch.setattr(packages, "BY_SOURCE", {"x": source})
    monkeypatch.delenv("MOE_P2P_X", raising=False)

    def unpacks(*arguments: str, env: dict[str, str]) -> None:
        assert arguments[-1] == f"vllm=={packages.PINNED['vllm']}"
        for name in ("vllm/a.py", "tests/moe/it.py", "tests/other/b.py"):
            file = Path(env["TMPDIR"], "pip-download-1", "vllm_1", name)
            file.parent.mkdir(parents=True)
            file.write_text("")

    monkeypatch.setattr(packages, "_run_pip", lambda *_, **__: None)
    assert packages.fetch_source("x").endswith("its tests are skipped")
    assert "and MOE_P2P_X names no checkout of it" in packages.why_not("x")
    monkeypatch.setattr(packages, "_run_pip", unpacks)
    assert "unpacked" in packages.fetch_source("x")
    found = packages.where("x")
    names = [str(file.relative_to(found)) for file in sorted(found.rglob("*.py"))]
    assert names == ["tests/moe/it.py", "vllm/a.py"]
    assert packages.fetch_source("x") == f"x: in {found} already"
    monkeypatch.setenv("MOE_P2P_X", str(tmp_path / "nowhere"))
    assert packages.find("x") is None
    assert not list((cache / "engines").glob("tmp*"))
