"""Makes `import mooncake.engine` give this package's. Four ways:

In a program:         import moe_p2p.mooncake; moe_p2p.mooncake.install()
By the environment:   MOE_P2P_AS_MOONCAKE=1, and any Python where the wheel is installed finds it (a
                      line that setup.py adds). In a source tree, `import moe_p2p` installs.
A program as it is:   python -m moe_p2p.mooncake script.py ...    or    -m module ...
Any process:          PYTHONPATH=$(python -m moe_p2p.mooncake --path)

Other modules of an installed Mooncake, such as mooncake.store, stay its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from moe_p2p.aliases import Aliases

PATH = Path(__file__).with_name("path")  # a folder where `import mooncake.engine` finds a module
_OURS = "moe_p2p.mooncake"
_ALIASES = Aliases("mooncake.engine", _OURS, {"mooncake.engine": f"{_OURS}.engine"})


def install(*, force: bool = False) -> None:
    """Makes `import mooncake.engine` give this package's from now on. Idempotent.

    force: also after the real one was imported; modules that hold the real one keep it.

    Raises ImportError when the real one was imported and force is not set.
    """
    _ALIASES.install(force=force)
    if "mooncake" not in sys.modules and importlib.util.find_spec("mooncake") is None:
        sys.modules["mooncake"] = importlib.import_module(_OURS)


def uninstall() -> None:
    """Undoes install: imports behave as before."""
    _ALIASES.uninstall()
    if getattr(sys.modules.get("mooncake"), "__name__", "") == _OURS:
        del sys.modules["mooncake"]
