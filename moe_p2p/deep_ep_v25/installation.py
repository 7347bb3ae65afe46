"""Makes `import deep_ep_v25` give this package. Four ways:

In a program:         import moe_p2p.deep_ep_v25; moe_p2p.deep_ep_v25.install()
By the environment:   MOE_P2P_AS_DEEP_EP_V25=1, and any Python where the wheel is installed finds it
                      (a line that setup.py adds). In a source tree, `import moe_p2p` installs.
A program as it is:   python -m moe_p2p.deep_ep_v25 script.py ...    or    -m module ...
Any process:          PYTHONPATH=$(python -m moe_p2p.deep_ep_v25 --path)
"""

from __future__ import annotations

from pathlib import Path

from moe_p2p.aliases import Aliases

PATH = Path(__file__).with_name("path")  # a folder where `import deep_ep_v25` finds a module
_OURS = {
    "buffers": "",
    "buffers.allocator": ".allocator",
    "buffers.base": ".base",
    "buffers.bucket": ".refused",
    "buffers.engram": ".refused",
    "buffers.ep": ".ep",
    "buffers.pp": ".refused",
    "comm": ".comm",
    "comm.barrier": ".comm",
    "comm.handle": ".comm",
    "comm.stream": ".comm",
}
_OF_V2 = {  # the same files in both
    "utils": "utils",
    "utils.envs": "utils.envs",
    "utils.event": "event",
    "utils.gate": "utils.gate",
    "utils.math": "utils.math",
    "utils.refs": "utils.refs",
    "utils.testing": "utils.testing",
}
_ALIASES = Aliases(
    "deep_ep_v25",
    "moe_p2p.deep_ep_v25",
    {
        "deep_ep_v25": "moe_p2p.deep_ep_v25",
        **{f"deep_ep_v25.{name}": f"moe_p2p.deep_ep_v25{at}" for name, at in _OURS.items()},
        **{f"deep_ep_v25.{name}": f"moe_p2p.deep_ep.{at}" for name, at in _OF_V2.items()},
    },
)
install, uninstall = _ALIASES.install, _ALIASES.uninstall
