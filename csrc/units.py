"""Which sources are compiled as one unit: most of a compiler's time goes into headers they share.

Used by setup.py, tests/cpp/build.py and tests/lint.py. A unit hides an include that is missing:
tests/package/test_aarch64.py compiles each file by itself. Both builds compile through ccache where
it is installed; CCACHE_DISABLE=1 switches it off.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# By themselves: the letter has flags of its own, and within a unit GCC 13 ends with an internal
# error at the second one.
ALONE = ("letter.cpp", "mapped_gpu_memory.cpp")
# What a unit includes is no header, so types of unnamed namespaces may be members there.
FLAG = "-Wno-subobject-linkage"


def unit_of(source: Path) -> Path:
    """Returns what names the unit. Sources of one unit are compiled together."""
    place = source.relative_to(ROOT)
    if source.name in ALONE or source.stem.endswith("_benchmark"):
        return place.with_suffix("")
    return place.parent if "csrc" in place.parts else place.parent / source.stem.split("_")[0]


def units(folder: Path, sources: list[Path]) -> dict[str, Path]:
    """Returns what to compile, by object: a source, or a file made here that includes several."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for unit, group in itertools.groupby(sorted(sources, key=unit_of), unit_of):
        members, name = sorted(group), "_".join(unit.parts)
        text = "".join(f'#include "{member}"\n' for member in members)
        file = folder / f"{name}.cpp" if len(members) > 1 else members[0]
        if len(members) > 1 and (not file.exists() or file.read_text() != text):
            file.write_text(text)
        made[f"{name}.o"] = file
    return made


def cached(cxx: str) -> str:
    """Returns the command that compiles with this compiler: through ccache, if there is one."""
    return f"ccache {cxx}" if shutil.which("ccache") and "ccache" not in cxx else cxx
