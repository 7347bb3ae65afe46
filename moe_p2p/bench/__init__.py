"""`python -m moe_p2p bench`: is it right, how long does it take, how many bytes does it send.

Every rank is a process. First dispatch and combine are compared bit for bit with
moe_p2p/reference.py over several steps with changing token counts; then they are timed, interleaved
with a baseline that does the same job over torch.distributed.all_to_all_single.

    options     what the user asked for
    cases       inputs: routing (uniform, skewed, replayed) and rows
    systems     what is timed: the package;  baseline: torch.distributed
    check       comparison with the reference
    worker      one rank: check, then measure
    report      rows as a table, JSON and a plot;  progress: the bar on a terminal
"""
