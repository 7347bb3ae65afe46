"""A model of a step's time at sizes that no machine here has: `python -m moe_p2p model`.

wire.py simulates NICs, event by event; phases.py describes the phases of DeepEP V1's low-latency
calls and of ours; published.py has other people's measurements, on which the first is checked.
"""
