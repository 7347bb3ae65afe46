"""`python -m moe_p2p bench`: is it right, how long does it take, how many bytes does it send.

Every rank is a process, with a GPU of its own where there are any. First dispatch and combine are
compared bit for bit with moe_p2p.reference over several steps with changing token counts; then
they are timed, interleaved with baselines that do the same job.

    options     what the user asked for
    cases       inputs: routing (uniform, skewed, replayed) and rows
    systems     what is timed: the package;  baseline: torch.distributed
    check       comparison with the reference
    worker      one rank on a CPU: check, then measure
    report      rows as a table, JSON and a plot;  progress: the bar on a terminal

On GPUs:

    gpu_worker  one rank: check, then measure;  gpu_measure: in which ways;  gpu_timing: by events
    gpu_calls   the package and the baseline on device tensors;  deep_ep: DeepEP's calls
    gpu_layer   experts for the full layer
    probe       what the links do (kernels/probe.cu);  floors: what follows for the job
    gpu_report  rows as a table and JSON;  gpu_plot: as plots

Through DeepEP's calls (--api deep_ep), on CPUs and GPUs:

    api_worker  one rank: the shim, AllToAll and, if named, another module with those calls
    api_report  rows as a table and JSON
"""
