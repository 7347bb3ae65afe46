"""`import deep_ep` where this folder is on the path: gives moe_p2p.deep_ep."""

from moe_p2p.deep_ep import install

install()  # puts the package in the place of this module
