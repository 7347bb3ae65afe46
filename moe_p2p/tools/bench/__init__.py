"""`python -m moe_p2p bench`: checks results, measures times and counts the bytes that are sent.

Every rank is a process, with its own GPU if there are any: started here, or by torchrun on any
number of hosts. First dispatch and combine are compared bit for bit with moe_p2p.moe.reference over
several steps with changing token counts; then they are timed, interleaved with baselines that do
the same job. `--check` compares alone, everything that the ranks at hand allow.

    options       what the user asked for;  command: starts ranks or joins them, prints, writes
    conformance   one rank of --check
    worker        one rank: check, then measure;  contestants: who takes part
    cases         inputs: routing (uniform, skewed, replayed) and rows
    systems       the package;  baseline: torch.distributed;  deep_ep: DeepEP's calls, of any module
    gpu_calls     their calls as they are timed;  gpu_layer: experts for the full layer
    check         comparison with the reference;  gpu_last: comparison of timed calls
    clocks        how spans are taken;  gpu_measure: ways of timing;  gpu_timing: by events
    probe         measures the links (kernels/probe.cu);  floors: least times that follow
    megatron      --api megatron, by itself;  megatron_layer: Megatron's layer and its dispatchers
    kv            --api kv, by itself;  kv_ranks: its two processes;  kv_compute: what a layer takes
    kv_systems    the same pages by Mooncake's calls and NIXL
    report        rows as a table and JSON;  plot: as a picture;  progress: the bar on a terminal

Files whose names begin with gpu also serve CPUs, when tensors are on them.
"""
