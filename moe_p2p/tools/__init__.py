"""The commands of `python -m moe_p2p`, and what starts ranks for them."""
