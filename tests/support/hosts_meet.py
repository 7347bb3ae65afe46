"""A rank of a torchrun of two hosts: HostsMeet as between GPUs of several hosts, then bench.

There kernels wait in the order of a stream; here the calls are those of hosts and wait themselves.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from moe_p2p import env
from moe_p2p.bench import command
from moe_p2p.bench.options import Options
from moe_p2p.tools import launch
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.meeting import HostsMeet, host_group

LATE_S = 0.1  # until it comes; others that did not wait would see that it has not
MEETINGS = 40  # more than may be open at a time


def meet(rank: int, num_ranks: int) -> None:
    options = Options(device="cpu", ranks=num_ranks, ranks_per_node=2, hosts=2)
    here = host_group(options)
    assert everyones(rank, here) == ([0, 1] if rank < 2 else [2, 3])
    server = TCPStore(env.master_address(), env.master_port(), is_master=False)
    store = PrefixStore("late ranks", server)
    hosts = HostsMeet(options)
    for late in range(num_ranks):
        dist.barrier()
        if rank == late:
            time.sleep(LATE_S)
            store.set(str(late), "comes")
        hosts.meet()
        assert store.check([str(late)]), f"rank {rank} met the others without rank {late}"
    for _ in range(MEETINGS):
        hosts.meet()
    hosts.close()
    if rank == 0:
        print("the hosts met")


def main() -> int:
    with launch.process_group() as (rank, num_ranks):
        meet(rank, num_ranks)
        return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
