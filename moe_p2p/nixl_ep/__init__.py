"""NIXL EP's Buffer (ai-dynamo/nixl, examples/device/ep) over AllToAll: ranks come and go.

    import moe_p2p.nixl_ep as nixl_ep            # change the import, or keep imports as they are:
    moe_p2p.nixl_ep.install()                    # from now on `import nixl_ep` gives this package

installation.py has more ways to keep imports. Names, arguments, shapes and meanings are NIXL EP's;
docs/nixl_ep.md has what differs.
"""

import torch

from moe_p2p.deep_ep.config import Config
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.nixl_ep.buffer import Buffer
from moe_p2p.nixl_ep.installation import install, uninstall

topk_idx_t = torch.int64  # type that NIXL EP's users create; int32 works too

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "install",
    "topk_idx_t",
    "uninstall",
]
