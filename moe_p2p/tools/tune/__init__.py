"""`python -m moe_p2p tune`: measures this machine once, for moe_p2p/machine/tuned.py.

command.py   options, start of the ranks, the file
world.py     what all measurements share: ranks, communicators, calls, the clock
launches.py  launch shapes of the kernels          shapes.py  which ones are tried
steps.py     which steps go in bulk, and in parts
link.py      writes/s and bytes/s of the NICs
"""
