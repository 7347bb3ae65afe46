"""Programs small enough to read. `python -m moe_p2p.examples.disaggregated`."""
