"""A store for ranks that are connected only through mpi4py, DeepEP's `comm`."""

from __future__ import annotations

import socket
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore

from moe_p2p.fleet import addresses


class MpiComm(Protocol):
    """The methods of an mpi4py communicator that are used."""

    def Get_rank(self) -> int: ...  # noqa: N802
    def Get_size(self) -> int: ...  # noqa: N802
    def bcast(self, obj: Any, root: int = 0) -> Any: ...


def store_over(comm: MpiComm) -> tuple[TCPStore, int, int]:
    """Returns a new store, this rank and the number of ranks. Collective."""
    rank, host = comm.Get_rank(), socket.gethostname()
    if rank == 0:
        server = addresses.serve(host)
        comm.bcast((host, server.port), root=0)
        return server, rank, comm.Get_size()
    host, port = comm.bcast(None, root=0)
    return TCPStore(host, port, is_master=False), rank, comm.Get_size()
