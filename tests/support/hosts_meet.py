"""A rank of a torchrun of two hosts: clocks.HostsMeet, as between GPUs of several hosts.

There kernels wait in the order of a stream; here the calls are those of hosts and wait themselves.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from moe_p2p.tools import launch
from moe_p2p.tools.bench.clocks import HostsMeet, host_group
from moe_p2p.tools.bench.gather import everyones
from moe_p2p.tools.bench.options import Options

LATE_S = 0.6
MEETINGS = 40  # more than may be open at a time


def main() -> None:
    with launch.process_group() as (rank, num_ranks):
        options = Options(device="cpu", ranks=num_ranks, ranks_per_node=2, hosts=2)
        here = host_group(options)
        assert everyones(rank, here) == ([0, 1] if rank < 2 else [2, 3])
        hosts = HostsMeet(options)
        for late in range(num_ranks):
            dist.barrier()
            began = time.monotonic()
            if rank == late:
                time.sleep(LATE_S)
            hosts.meet()
            waited = everyones(time.monotonic() - began)
            # Half: ranks leave the barrier at different times.
            assert min(waited) > LATE_S / 2, waited
        for _ in range(MEETINGS):
            hosts.meet()
        hosts.close()
        if rank == 0:
            print("the hosts met")


if __name__ == "__main__":
    main()
