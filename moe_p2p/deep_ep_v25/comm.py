"""deep_ep_v25.comm: functions of buffers and groups; EPBuffer has the first four as methods.

There are no communicators of NCCL here, so what makes one is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.deep_ep import elastic
from moe_p2p.deep_ep.elastic import ElasticBuffer

_NO_NCCL = (
    "moe_p2p has no communicator of NCCL: EPBuffer takes the group itself, of any backend, and "
    "connects its ranks by itself"
)


def _calls_of(buffer: Any) -> ElasticBuffer | None:
    """None: a group."""
    found: ElasticBuffer | None = getattr(buffer, "elastic", None)
    return found


def _calls(buffer: Any) -> ElasticBuffer:
    found = _calls_of(buffer)
    if found is None:
        raise errors.wrong_type("buffer", buffer, "an EPBuffer")
    return found


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """Orders later work of the current stream after the work so far of all ranks' streams.

    wait_comm_stream: has no effect, calls of a buffer are in one order on any streams; neither has
    `sequential`. with_cpu_sync: the host waits too. context_idx: a buffer has one context, so None.
    Collective.
    """
    errors.require(
        context_idx is None,
        f"context_idx is {context_idx}, must be None: only BucketBuffer has several contexts",
    )
    _calls(buffer).barrier(wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: Any) -> torch.cuda.Stream:
    """The stream of asynchronous calls of this buffer."""
    return _calls(buffer).get_comm_stream()


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Returns (number of nodes, ranks per node); a node's ranks share memory. Collective, where a
    group is given."""
    calls = _calls_of(group_or_buffer)
    if calls is None:
        return elastic.get_physical_domain_size(group_or_buffer)
    return calls.get_physical_domain_size()


def get_logical_domain_size(
    group_or_buffer: Any, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """Returns (1, W): counts are by rank on any topology."""
    calls = _calls_of(group_or_buffer)
    return 1, group_or_buffer.size() if calls is None else calls.num_ranks


class NCCLCommHandle:
    """Not served: there is no communicator of NCCL."""

    def __init__(self, nccl_comm: int, managed: bool) -> None:
        raise NotImplementedError(f"deep_ep_v25.comm.NCCLCommHandle: {_NO_NCCL}")


def get_nccl_comm_handle(group: dist.ProcessGroup, force_new_comm: bool = False) -> NoReturn:
    """Not served: there is no communicator of NCCL."""
    raise NotImplementedError(f"deep_ep_v25.comm.get_nccl_comm_handle: {_NO_NCCL}")


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: there is none."""
