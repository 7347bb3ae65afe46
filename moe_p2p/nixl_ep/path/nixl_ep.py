"""`import nixl_ep` where this folder is on the path: gives moe_p2p.nixl_ep."""

from moe_p2p.nixl_ep import install

install()  # puts the package in the place of this module
