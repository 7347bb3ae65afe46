"""The end of `make release`: is all there, and small enough; then checksums and release notes.

    python contrib/release/finish.py DIST

Writes SHA256SUMS, as `sha256sum --check` reads it, and NOTES.md, which is this version's part of
CHANGELOG.md with a table of the files.
"""

from __future__ import annotations

import hashlib
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Name behind the version, and the most MiB. 2_34: RHEL 9, Amazon Linux 2023, Ubuntu 22.04.
WANTED = {
    "moe_p2p-{}-cp310-abi3-manylinux_2_34_x86_64.whl": 2,
    "moe_p2p-{}-cp310-abi3-manylinux_2_34_aarch64.whl": 2,
    "moe_p2p_kernels-{}-py3-none-any.whl": 16,
    "moe_p2p-{}.tar.gz": 8,
}


def version() -> str:
    return str(runpy.run_path(str(ROOT / "moe_p2p/version.py"))["__version__"])


def problems(dist: Path) -> list[str]:
    """Returns what a release lacks, or has too much of."""
    wanted = {name.format(version()): most for name, most in WANTED.items()}
    found = {file.name: file.stat().st_size / 2**20 for file in dist.iterdir()}
    return [
        *(f"{name} is not there" for name in wanted if name not in found),
        *(f"{name} is no part of a release" for name in found if name not in wanted),
        *(
            f"{name} has {found[name]:.1f} MiB, at most {most} are allowed"
            for name, most in wanted.items()
            if found.get(name, 0) > most
        ),
    ]


def notes(changelog: str, sums: dict[str, str], sizes: dict[str, int]) -> str:
    """Returns the release notes. Raises SystemExit if CHANGELOG.md has nothing of this version."""
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)
    own = [part for part in parts if re.match(rf"{re.escape(version())}\b", part)]
    if len(own) != 1:
        raise SystemExit(f"CHANGELOG.md has {len(own)} headings of {version()}, must have one")
    heading, _, text = own[0].partition("\n")
    rows = [f"| {name} | {sizes[name] / 2**20:.1f} | `{sums[name]}` |" for name in sums]
    table = ["| file | MiB | SHA256 |", "|---|---|---|", *rows]
    return "\n".join([f"# moe_p2p {heading}", "", text.strip(), "", *table, ""])


def main(dist: Path) -> int:
    for made in ("SHA256SUMS", "NOTES.md"):
        (dist / made).unlink(missing_ok=True)
    if found := problems(dist):
        print("\n".join(["no release:", *found]))
        return 1
    files = sorted(dist.iterdir())
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    sizes = {file.name: file.stat().st_size for file in files}
    text = notes((ROOT / "CHANGELOG.md").read_text(), sums, sizes)
    (dist / "NOTES.md").write_text(text)
    (dist / "SHA256SUMS").write_text("".join(f"{sums[name]}  {name}\n" for name in sums))
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    print(f"{dist}/SHA256SUMS and NOTES.md: docs/release.md has what follows")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
