"""`import deep_ep_v25` where this folder is on the path: gives moe_p2p.deep_ep_v25."""

from moe_p2p.deep_ep_v25 import install

install()  # puts the package in the place of this module
