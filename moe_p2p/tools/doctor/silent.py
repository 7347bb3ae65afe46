"""Facts by which programs take TCP, or another package than this, and do not say so.

Four ways of a server that works and is slow (awslabs/awsome-distributed-ai, #1215): another
`deep_ep` is found before the one that was meant; the program runs another Python than the one that
has it; a library is there twice, and the wrong one is loaded; and a transport that nobody named is
TCP. Used by examine.py; faults.py judges.
"""

from __future__ import annotations

import importlib.machinery
import json
import re
import shutil
import sys
from pathlib import Path

from moe_p2p import env
from moe_p2p.tools.doctor.surroundings import output_of

MODULES = ("deep_ep", "mooncake", "mooncake.engine", "nixl_ep", "vllm", "sglang", "megatron.core")
LIBRARIES = ("libfabric.so.1", "libibverbs.so.1", "libnccl-net.so")
# Prints what the Python that runs it would import, as imports() below.
_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
names = [n for n in sys.argv[1].split(",") if "." not in n and u.find_spec(n)]
try: names.append("moe_p2p " + m.version("moe_p2p"))
except m.PackageNotFoundError: pass
print(json.dumps({"prefix": sys.prefix, "has": names}))
"""


def imports() -> dict[str, str]:
    """Module: the file that `import` finds for it in this environment. Imports nothing."""
    found = {}
    for name in MODULES:
        spec = getattr(sys.modules.get(name), "__spec__", None) or _spec(name)
        if spec is not None:
            found[name] = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return found


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """As importlib.util.find_spec, which imports the packages that a module is in."""
    parts, places = name.split("."), None
    spec = None
    for depth in range(1, len(parts) + 1):
        try:
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), places)
        except ImportError:
            return None
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return spec


def python3() -> dict[str, str]:
    """The python3 of PATH, where it is another than this one, and what it can import."""
    path = shutil.which("python3") or ""
    if not path:
        return {}
    try:
        found = json.loads(output_of(path, "-c", _ASK, ",".join(MODULES)))
    except ValueError:
        return {}
    if Path(found["prefix"]).resolve() == Path(sys.prefix).resolve():
        return {}
    return {"path": path, "has": ", ".join(found["has"])}


def loader(variables: dict[str, str]) -> dict[str, str]:
    """Library: the file that a program gets which opens it by its bare name."""
    cache = output_of("ldconfig", "-p")
    found = {}
    for name in LIBRARIES:
        folders = filter(None, variables.get("LD_LIBRARY_PATH", "").split(":"))
        places = [Path(folder, name) for folder in folders]
        if known := re.search(rf"^\s*{re.escape(name)} .*=> (\S+)$", cache, re.MULTILINE):
            places.append(Path(known[1]))
        if path := next(filter(Path.exists, places), None):
            found[name] = str(path.resolve())
    return found


def variables() -> dict[str, str]:
    """Those of the environment that choose transports, libraries and modules."""
    return env.of_transports()
