"""Makes `import deep_ep` give this package. Four ways:

In a program:         import moe_p2p.deep_ep; moe_p2p.deep_ep.install()
By the environment:   MOE_P2P_AS_DEEP_EP=1, and any Python where the wheel is installed finds it (a
                      line that setup.py adds). In a source tree, `import moe_p2p` installs.
A program as it is:   python -m moe_p2p.deep_ep script.py ...    or    -m module ...
Any process:          PYTHONPATH=$(python -m moe_p2p.deep_ep --path)
"""

from __future__ import annotations

from pathlib import Path

from moe_p2p.aliases import Aliases

PATH = Path(__file__).with_name("path")  # a folder where `import deep_ep` finds a module
# DeepEP's modules that users import, in the spellings of both versions.
_ALIASES = Aliases(
    "deep_ep",
    "moe_p2p.deep_ep",
    {
        "deep_ep": "moe_p2p.deep_ep",
        "deep_ep.buffer": "moe_p2p.deep_ep.buffer",
        "deep_ep.buffers": "moe_p2p.deep_ep",
        "deep_ep.buffers.elastic": "moe_p2p.deep_ep.elastic",
        "deep_ep.buffers.legacy": "moe_p2p.deep_ep.buffer",
        "deep_ep.hybrid_ep_buffer": "moe_p2p.deep_ep.hybrid",
        "deep_ep.utils": "moe_p2p.deep_ep.utils",
        "deep_ep.utils.envs": "moe_p2p.deep_ep.utils.envs",
        "deep_ep.utils.event": "moe_p2p.deep_ep.event",
        "deep_ep.utils.gate": "moe_p2p.deep_ep.utils.gate",
        "deep_ep.utils.math": "moe_p2p.deep_ep.utils.math",
        "deep_ep.utils.refs": "moe_p2p.deep_ep.utils.refs",
        "deep_ep.utils.testing": "moe_p2p.deep_ep.utils.testing",
    },
)
install, uninstall = _ALIASES.install, _ALIASES.uninstall
