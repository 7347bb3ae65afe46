"""What `bench --api weights` puts beside an update: a peer copy, and what trainers do today.

That is: gather each parameter, broadcast whole tensors from rank 0 in buckets, and load them.
Trainers and generators as in weights_ranks.py.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.tools import launch
from moe_p2p.tools.bench.weights_loader import Loader, buckets

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
    best = 0.0
    for _ in range(3):
        target.copy_(source)
        for each in {device, other}:
            if each.type == "cuda":
                torch.cuda.synchronize(each)
        began = time.monotonic()
        for _ in range(PEER_COPIES):
            target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, PEER_COPIES * PEER_BYTES / (time.monotonic() - began) / 1e9)
    return best


def run(side: Any) -> None:
    """Gather, broadcast of whole tensors from rank 0 in buckets, and the loader.

    NCCL takes one rank a GPU: where ranks share GPUs, trainers load what generators would.
    """
    options, on_gpu = side.options, side.device.type == "cuda"
    ranks = list(range(options.trainers + options.generators))
    shares = on_gpu and launch.num_gpus() < len(ranks)
    if shares:
        ranks = ranks[: options.trainers]
    enough = not shares or options.generators <= options.trainers <= launch.num_gpus()
    if not enough:
        side.measured.notes.append("no baseline: NCCL takes one rank a GPU, and there are too few")
        return
    backend = "nccl" if on_gpu else "gloo"
    everybody = dist.new_group(ranks, backend=backend)
    gathers = dist.new_group(range(options.trainers), backend=backend)
    loader = None
    number = side.rank if shares else side.rank - options.trainers
    if side.rank in ranks and 0 <= number < options.generators:
        loader = Loader(side.layouts[1], number, side.device)
    version = options.repeats + 1
    for repeat in range(options.repeats + 1):
        side.synchronize()
        dist.barrier()
        began = time.monotonic()
        if side.rank in ranks:
            _broadcast(side, loader, everybody, gathers)
            side.synchronize()
        if repeat:
            side.measured.baseline_s.append(time.monotonic() - began)
        dist.barrier()
    if loader is not None:
        wanted = Loader(side.layouts[1], number, side.device)
        reference = wanted.load_all(side.layouts[0].params, version)
        for name, tensor in loader.tensors.items():
            if not torch.equal(_bytes(tensor), _bytes(reference[name])):
                side.measured.wrong.append(f"baseline, generator {number}: {name} differs")


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
