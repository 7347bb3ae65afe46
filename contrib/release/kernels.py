"""The wheel moe_p2p_kernels: compiled kernels, for every Python and both kinds of host.

    python contrib/release/kernels.py COMPILED DIST

COMPILED is what `python -m moe_p2p compile --into` has filled, by one build of NVRTC. The wheel
puts them into the folder of moe_p2p where moe_p2p/machine/kernel_cache.py looks last. There their
names are without the build: they serve whatever NVRTC an environment has. They have a wheel of
their own, because they are several times as large as moe_p2p and made for some shapes only.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from wheel.wheelfile import WheelFile

ROOT = Path(__file__).resolve().parents[2]
PLACE = "moe_p2p/machine/compiled"
ENDS = (".cubin", ".log", ".sha256")
METADATA = """\
Metadata-Version: 2.1
Name: moe-p2p-kernels
Version: {version}
Summary: Compiled GPU kernels of moe_p2p for usual shapes: its first calls take no seconds
License: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: moe-p2p=={version}
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: moe_p2p contrib/release/kernels.py
Root-Is-Purelib: true
Tag: py3-none-any
"""


def version() -> str:
    return str(runpy.run_path(str(ROOT / "moe_p2p/version.py"))["__version__"])


def write(compiled: Path, dist: Path) -> Path:
    """Returns the wheel. Raises SystemExit if there are no kernels, or those of two compilers."""
    files = sorted(file for file in compiled.glob("*-*") if file.suffix in ENDS)
    builds = {file.stem.partition("-")[2] for file in files}
    if len(builds) != 1:
        raise SystemExit(
            f"{compiled} has kernels of {len(builds)} builds of NVRTC, must be of one: empty it, "
            "and compile again"
        )
    name, about = f"moe_p2p_kernels-{version()}", f"moe_p2p_kernels-{version()}.dist-info"
    made = dist / f"{name}-py3-none-any.whl"
    with WheelFile(made, "w") as wheel:
        for file in files:
            sources = file.stem.partition("-")[0]
            wheel.writestr(f"{PLACE}/{sources}{file.suffix}", file.read_bytes())
        wheel.writestr(f"{about}/METADATA", METADATA.format(version=version()))
        wheel.writestr(f"{about}/WHEEL", WHEEL)
    return made


if __name__ == "__main__":
    made = write(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB")
