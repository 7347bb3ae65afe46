"""The letter: one number for all that ranks must have in common, made of the code of its files.

Comments, docstrings and blanks do not count: builds that differ in words alone fit together.

    python csrc/letter.py          prints it

Ranks send it to each other in the first exchange of their meeting and in every handshake of NICs
(csrc/base/letter.h), and refuse another one by name. Members of KV and weight fleets do so in
their first words (moe_p2p/fleet/letter.py). setup.py and tests/cpp/build.py compile it into
csrc/base/letter.cpp.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Each pattern finds at least one file: who moves one of them has to say so here.
FILES = (
    "kernels/abi/*.h",
    "csrc/base/letter.cpp",
    "csrc/base/wire.h",
    "csrc/engine/memory_region.cpp",
    "csrc/moe/node/exchange*.cpp",
    "csrc/moe/plan/plan.cpp",
    "csrc/provider/loopback/channel.h",
    "csrc/provider/loopback/domain.cpp",
    "csrc/provider/loopback/segment.cpp",
    "csrc/provider/null/domain.cpp",
    "csrc/provider/libfabric/peers.cpp",
    "csrc/provider/libfabric/writers.h",
    "csrc/provider/verbs/proof.cpp",
    "csrc/provider/verbs/queue_pair.h",
    "csrc/provider/verbs/wire.cpp",
    "moe_p2p/deep_ep_v25/balance.py",
    "moe_p2p/engine/checksum.py",
    "moe_p2p/engine/strides.py",
    "moe_p2p/fleet/[a-z]*.py",
    "moe_p2p/moe/expert_map.py",
    "moe_p2p/moe/expert_mover.py",
    "moe_p2p/moe/gpu/fd_exchange.py",
    "moe_p2p/kv/[a-z]*.py",
    "moe_p2p/machine/phases.py",
    "moe_p2p/moe/rendezvous/agreement.py",
    "moe_p2p/moe/votes.py",
    "moe_p2p/tools/trace/hub.py",
    "moe_p2p/tools/trace/recorded.py",
    "moe_p2p/weights/[a-z]*.py",
)


def files() -> list[Path]:
    found = {pattern: sorted(ROOT.glob(pattern)) for pattern in FILES}
    missing = [pattern for pattern in FILES if not found[pattern]]
    if missing:
        raise FileNotFoundError(f"csrc/letter.py: there is no {', '.join(missing)}")
    return sorted({path for paths in found.values() for path in paths})


# A comment, a string, a word or a sign. Not Python's tokenize, whose tokens depend on its version.
_CPP = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<end>\w*)\(.*?\)(?P=end)"|\w[\w']*"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S""",
    re.DOTALL,
)
_PYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>[A-Za-z]*(?P<quotes>\"{3}|'{3}|"|')"""
    r"""(?:\\.|(?!(?P=quotes)).)*(?P=quotes))|(?P<line>\n[ ]*)|\w+|\S""",
    re.DOTALL,
)


def _cpp(text: str) -> Iterator[str]:
    return (found[0] for found in _CPP.finditer(text) if not found["comment"])


def _python(text: str) -> Iterator[str]:
    """Yields the tokens; each line that is not within brackets begins with its indent."""
    depth, line, strings = 0, ["\n"], 0
    for found in _PYTHON.finditer(text + "\n"):
        if found["line"] and depth == 0:
            if len(line) > 1 + strings or strings > 1:  # neither blank nor a docstring
                yield from line
            line, strings = [found["line"]], 0
        elif not found["line"] and not found["comment"]:
            line.append(found[0])
            strings += found["string"] is not None
            depth += (found[0] in "([{") - (found[0] in ")]}")


def tokens(path: Path, text: str) -> list[str]:
    """Returns the code of a file with this text: no comments, docstrings and blanks."""
    return list(_python(text) if path.suffix == ".py" else _cpp(text))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def letter(read: Callable[[Path], str] = read) -> str:
    """16 hexadecimal digits."""
    code = hashlib.sha256()
    for path in files():
        code.update(hashlib.sha256("\0".join(tokens(path, read(path))).encode()).digest())
    return code.hexdigest()[:16]


def compile_edge(output: str, source: Path, needs: str = "") -> str:
    """Of a build.ninja with a rule `compile` that takes $flags. needs: must be there first."""
    text = f"build {output}: compile {source}" + (f" | {needs}" if needs else "")
    if source.name == "letter.cpp":
        text += f"\n  flags = $flags -DMOE_P2P_LETTER=0x{letter()}"
    return text


if __name__ == "__main__":
    print(letter())
