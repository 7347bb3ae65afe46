"""Makes `import deep_ep` give this package. Four ways:

In a program:         import moe_p2p.deep_ep; moe_p2p.deep_ep.install()
By the environment:   MOE_P2P_AS_DEEP_EP=1, and any Python where the wheel is installed finds it (a
                      line that setup.py adds). In a source tree, `import moe_p2p` installs.
A program as it is:   python -m moe_p2p.deep_ep script.py ...    or    -m module ...
Any process:          PYTHONPATH=$(python -m moe_p2p.deep_ep --path)
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).with_name("path")  # a folder where `import deep_ep` finds a module
# DeepEP's modules that users import, in the spellings of both versions.
_ALIASES = {
    "deep_ep": "moe_p2p.deep_ep",
    "deep_ep.buffer": "moe_p2p.deep_ep.buffer",
    "deep_ep.buffers": "moe_p2p.deep_ep",
    "deep_ep.buffers.elastic": "moe_p2p.deep_ep.elastic",
    "deep_ep.buffers.legacy": "moe_p2p.deep_ep.buffer",
    "deep_ep.hybrid_ep_buffer": "moe_p2p.deep_ep.hybrid",
    "deep_ep.utils": "moe_p2p.deep_ep.utils",
    "deep_ep.utils.envs": "moe_p2p.deep_ep.utils.envs",
    "deep_ep.utils.event": "moe_p2p.deep_ep.event",
    "deep_ep.utils.math": "moe_p2p.deep_ep.utils.math",
    "deep_ep.utils.testing": "moe_p2p.deep_ep.utils.testing",
}
_replaced: dict[str, ModuleType] = {}


def install(*, force: bool = False) -> None:
    """Makes `import deep_ep` give this package from now on. Idempotent.

    force: also after the real one was imported; modules that hold the real one keep it.

    Raises ImportError when the real one was imported and force is not set.
    """
    theirs = {name: module for name, module in sys.modules.items() if _is_theirs(name, module)}
    if theirs and not force:
        file = getattr(next(iter(theirs.values())), "__file__", None)
        raise ImportError(
            f"deep_ep is imported already, from {file}: call moe_p2p.deep_ep.install() before, "
            "or install(force=True) if modules may keep the one they imported"
        )
    _replaced.update(theirs)
    for name in theirs:
        del sys.modules[name]
    for alias, name in _ALIASES.items():
        sys.modules[alias] = importlib.import_module(name)


def uninstall() -> None:
    """Undoes install: `import deep_ep` behaves as before."""
    for alias in _ALIASES:
        if not _is_theirs(alias, sys.modules.get(alias)):
            sys.modules.pop(alias, None)
    sys.modules.update(_replaced)
    _replaced.clear()


def _is_theirs(name: str, module: ModuleType | None) -> bool:
    """Whether this is a module of the real deep_ep."""
    if module is None or name.partition(".")[0] != "deep_ep":
        return False
    file = getattr(module, "__file__", None)
    return file is None or Path(__file__).parent not in Path(file).parents
