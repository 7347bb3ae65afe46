"""Prefill and decode workers over real engines, in this process, for tests of KV transfer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import HashStore

from moe_p2p import Engine, EngineConfig, kv
from tests.support.kv_fakes import cache_of

# Packs all rows, into parts that are fewer and smaller than requests want.
PACKED = kv.KVLink("test", 1e9, 1e6, pack=True, packed_write_bytes=500, ring_bytes=3 * 512)
# The same with writes of two parts.
IN_PAIRS = dataclasses.replace(PACKED, ring_bytes=17 * 512)
QUICK = kv.KVTimeouts(connect_s=20, open_s=20, layers_s=20, tail_s=20, drain_s=0.2, lease_s=4)


class Workers(NamedTuple):
    senders: list[kv.KVSender]
    receivers: list[kv.KVReceiver]
    keepers: dict[str, kv.LeaseKeeper]
    engines: dict[str, Engine]


@contextmanager
def workers(
    prefill: kv.KVLayout,
    decode: kv.KVLayout,
    *,
    num_pages: tuple[int, int] = (32, 32),
    transport: str = "loopback",
    settings: str = "seed=7",
    timeouts: kv.KVTimeouts = QUICK,
    verify: str = "always",
    kinds: Sequence[type[Any]] = (kv.KVSender, kv.KVReceiver),
    link: kv.KVLink | None = None,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> Iterator[Workers]:
    """All ranks of one instance "prefill" and of one "decode", connected."""
    store = HashStore()
    found = Workers([], [], {}, {})
    with ExitStack() as stack:
        for layout, name, pages, device in zip(
            (prefill, decode), ("prefill", "decode"), num_pages, devices, strict=True
        ):
            gpu = torch.device(device).index
            for rank in range(layout.world_size):
                config = EngineConfig(transport=transport, transport_settings=settings)
                engine = stack.enter_context(Engine(config, label=f"{name}/{rank}", gpu=gpu))
                cache = cache_of(layout, rank, pages, device)
                common: dict[str, Any] = {"instance": name, "timeouts": timeouts, "link": link}
                if name == "prefill":
                    worker = kinds[0](engine, cache, **common)
                    found.senders.append(worker)
                else:
                    worker = kinds[1](engine, cache, verify=verify, **common)
                    found.receivers.append(worker)
                leases = kv.TorchLeases(store, timeouts.lease_s)
                found.keepers[worker.name] = stack.enter_context(kv.LeaseKeeper(worker, leases))
                found.engines[worker.name] = engine
        for sender in found.senders:
            sender.wait_for("decode")
        for receiver in found.receivers:
            receiver.wait_for("prefill")
        yield found


def random_bytes(shape: torch.Size, seed: int | torch.Generator) -> Tensor:
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def random_cache(cache: kv.KVCache, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.copy_(random_bytes(tensor.shape, generator))


def some_pages(count: int, of: int, seed: int) -> Tensor:
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count].int()
