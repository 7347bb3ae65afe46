"""Mooncake's Python TransferEngine over moe_p2p.Engine.

    from moe_p2p.mooncake import TransferEngine  # change the import, or keep imports as they are:
    moe_p2p.mooncake.install()                   # from now on `import mooncake.engine` gives this

Importers are vLLM's MooncakeConnector, SGLang, checkpoint-engine and verl; installation.py has more
ways to keep their imports. Names, arguments and return codes are Mooncake's (docs/mooncake.md).
"""

from moe_p2p.mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from moe_p2p.mooncake.installation import install, uninstall

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode", "install", "uninstall"]
