"""`python -m moe_p2p bench`: checks results, measures times and counts the bytes that are sent.

Every rank is a process, with its own GPU if there are any: started here, or by torchrun on any
number of hosts. README.md names the files. Those whose names begin with gpu also serve CPUs, when
tensors are on them.
"""
