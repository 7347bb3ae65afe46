"""What `bench --api weights` puts beside an update: a peer copy, and what trainers do today.

That is: gather each parameter, broadcast whole tensors from rank 0 in buckets, and load them.
Trainers and engine ranks as in weights_ranks.py.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.bench.weights_loader import Loader, buckets
from moe_p2p.tools import launch

MIB = 1 << 20
PEER_BYTES, PEER_COPIES = 64 * MIB, 20


def peer_copy(device: torch.device) -> float | None:
    """GB/s of 64 MiB copied to the next GPU by torch; on CPUs, in memory."""
    other = device
    if device.type == "cuda":
        if torch.cuda.device_count() < 2:
            return None
        other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    source = torch.ones(PEER_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(PEER_BYTES, dtype=torch.uint8, device=other)
    target.copy_(source)
    for each in {device, other}:
        if each.type == "cuda":
            torch.cuda.synchronize(each)
    began = time.monotonic()
    for _ in range(PEER_COPIES):
        target.copy_(source, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return PEER_COPIES * PEER_BYTES / (time.monotonic() - began) / 1e9


class Baseline:
    """Gather, broadcast of whole tensors from rank 0 in buckets, and the loader.

    NCCL takes one rank a GPU: where ranks share GPUs, trainers load what engine ranks would. All
    ranks make one; joiners have no part in it.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        options, on_gpu = side.options, side.device.type == "cuda"
        ranks = list(range(options.trainers + options.generators))
        shares = on_gpu and launch.num_gpus() < len(ranks)
        if shares:
            ranks = ranks[: options.trainers]
        self.runs = not shares or options.generators <= options.trainers <= launch.num_gpus()
        if not self.runs:
            note = "no baseline: NCCL takes one rank a GPU, and there are too few"
            side.measured.notes.append(note)
            return
        backend = "nccl" if on_gpu else "gloo"
        self._everybody = dist.new_group(ranks, backend=backend)
        self._gathers = dist.new_group(range(options.trainers), backend=backend)
        self._has_part = side.rank in ranks
        self._loader: Loader | None = None
        self._number = side.rank if shares else side.rank - options.trainers
        if self._has_part and 0 <= self._number < options.generators:
            self._loader = Loader(side.layouts[1], self._number, side.device)

    def run(self) -> None:
        if self._has_part:
            _broadcast(self._side, self._loader, self._everybody, self._gathers)

    def check(self, version: int) -> None:
        side, loader = self._side, self._loader
        if loader is None:
            return
        wanted = Loader(side.layouts[1], self._number, side.device)
        reference = wanted.load_all(side.layouts[0].params, version)
        for name, tensor in loader.tensors.items():
            if not torch.equal(_bytes(tensor), _bytes(reference[name])):
                side.measured.wrong.append(f"baseline, generator {self._number}: {name} differs")


def _broadcast(side: Any, loader: Loader | None, everybody: Any, gathers: Any) -> None:
    for bucket in buckets(side.layouts[0].params, side.options.bucket_mib * MIB):
        size = sum(math.prod(param.shape) for param in bucket)
        flat = torch.empty(size, dtype=torch.bfloat16, device=side.device)
        at, wholes = 0, []
        for param in bucket:
            whole = flat[at : at + math.prod(param.shape)].view(param.shape)
            at += whole.numel()
            wholes.append((param.name, whole))
            if side.rank < side.options.trainers:
                _gather(whole, side.tensors[param.tensor], gathers)
        dist.broadcast(flat, 0, group=everybody)
        if loader is not None:
            for name, whole in wholes:
                loader.load(name, whole)


def _gather(whole: Tensor, part: Tensor, group: Any) -> None:
    if group.size() > 1:
        # Its newer name is not in torch 2.10.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(whole, part, group=group)
    else:
        whole.copy_(part)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
