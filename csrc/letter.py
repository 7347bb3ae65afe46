"""The letter: one number for all that ranks must have in common, made of the text of its files.

    python csrc/letter.py          prints it

Ranks send it to each other in the first exchange of their meeting and in every handshake of NICs
(csrc/base/letter.h), and refuse another one by name. setup.py and tests/cpp/build.py compile it
into csrc/base/letter.cpp.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Each pattern finds at least one file: who moves one of them has to say so here.
FILES = (
    "kernels/abi/*.h",
    "csrc/base/wire.h",
    "csrc/engine/memory_region.cpp",
    "csrc/moe/node/exchange*.cpp",
    "csrc/moe/plan/plan.cpp",
    "csrc/provider/loopback/channel.h",
    "csrc/provider/loopback/domain.cpp",
    "csrc/provider/libfabric/peers.cpp",
    "csrc/provider/verbs/proof.cpp",
    "csrc/provider/verbs/wire.cpp",
    "moe_p2p/gpu/fd_exchange.py",
    "moe_p2p/rendezvous/agreement.py",
    "moe_p2p/rendezvous/bootstrap.py",
    "moe_p2p/rendezvous/neighbours.py",
)


def files() -> list[Path]:
    found = {pattern: sorted(ROOT.glob(pattern)) for pattern in FILES}
    missing = [pattern for pattern in FILES if not found[pattern]]
    if missing:
        raise FileNotFoundError(f"csrc/letter.py: there is no {', '.join(missing)}")
    return sorted({path for paths in found.values() for path in paths})


def letter() -> str:
    """16 hexadecimal digits."""
    text = hashlib.sha256()
    for path in files():
        text.update(hashlib.sha256(path.read_bytes()).digest())
    return text.hexdigest()[:16]


def compile_edge(output: str, source: Path, needs: str = "") -> str:
    """Of a build.ninja with a rule `compile` that takes $flags. needs: must be there first."""
    text = f"build {output}: compile {source}" + (f" | {needs}" if needs else "")
    if source.name == "letter.cpp":
        text += f"\n  flags = $flags -DMOE_P2P_LETTER=0x{letter()}"
    return text


if __name__ == "__main__":
    print(letter())
