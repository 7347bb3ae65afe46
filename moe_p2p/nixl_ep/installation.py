"""Makes `import nixl_ep` give this package. Four ways:

In a program:         import moe_p2p.nixl_ep; moe_p2p.nixl_ep.install()
By the environment:   MOE_P2P_AS_NIXL_EP=1, and any Python where the wheel is installed finds it (a
                      line that setup.py adds). In a source tree, `import moe_p2p` installs.
A program as it is:   python -m moe_p2p.nixl_ep script.py ...    or    -m module ...
Any process:          PYTHONPATH=$(python -m moe_p2p.nixl_ep --path)
"""

from __future__ import annotations

from pathlib import Path

from moe_p2p.aliases import Aliases

PATH = Path(__file__).with_name("path")  # a folder where `import nixl_ep` finds a module
_ALIASES = Aliases(
    "nixl_ep",
    "moe_p2p.nixl_ep",
    {
        "nixl_ep": "moe_p2p.nixl_ep",
        "nixl_ep.buffer": "moe_p2p.nixl_ep.buffer",
        "nixl_ep.utils": "moe_p2p.deep_ep.event",
    },
)
install, uninstall = _ALIASES.install, _ALIASES.uninstall
