"""`import mooncake.engine` where this folder is on the path: gives moe_p2p.mooncake.engine."""

from moe_p2p.mooncake import install

install()  # puts the module in the place of this one
