"""What engines' KV adapters share: a worker of moe_p2p.kv that finds others in the engines' store.

All engines of a deployment name one store, HOST:PORT: workers find each other there. The first one
on HOST serves it; when that one ends, another one on HOST does. `python -m moe_p2p store HOST:PORT`
serves it apart from any engine.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_p2p import env
from moe_p2p.engine.engine import Engine
from moe_p2p.errors import UnavailableError, make, require
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Client
from moe_p2p.fleet.leases import TorchLeases
from moe_p2p.fleet.listener import warn_of_strangers
from moe_p2p.kv.lease_keeper import LeaseKeeper
from moe_p2p.kv.memory import KVCache, Place
from moe_p2p.kv.receiver import KVReceiver
from moe_p2p.kv.sender import KVSender
from moe_p2p.kv.worker import KVTimeouts, KVWorker

_SERVED: dict[str, TCPStore] = {}  # by address: kept as long as this process lives
_CONNECT_S = 60.0  # engines start at different times


def split_address(address: str) -> tuple[str, int]:
    return addresses.split(address, "the store of KV workers")


def serve_store(address: str) -> TCPStore | None:
    """Serves it unless somebody does; None where HOST is not this machine, or it is served.

    Raises InvalidArgumentError where HOST is not known.
    """
    host, port = split_address(address)
    with suppress(OSError):
        addresses.listen(host, port, backlog=1).close()
        with suppress(RuntimeError):
            store = addresses.serve(host, port)
            _SERVED[address] = store
            warn_of_strangers(
                f"the store {address}", host, "whoever reaches it may write to all KV memory"
            )
            return store
    return None


def join_store(address: str) -> TCPStore:
    host, port = split_address(address)
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    except RuntimeError as error:
        raise make(
            UnavailableError,
            f"no store of KV workers at {address} within {_CONNECT_S:.0f} s: start an engine on "
            f"{host}, or `python -m moe_p2p store {address}` there ({error})",
        ) from error


def leases_store(address: str) -> Client:
    """Where the store is lost, a worker of its host serves it anew."""

    def again() -> TCPStore:
        serve_store(address)
        host, port = split_address(address)
        socket.create_connection((host, port), 1.0).close()  # at once, where nobody serves it
        return join_store(address)

    return Client(join_store(address), alone=True, connect=again)


def own_host(store: str) -> str:
    """The address of this machine that the store's machine would see."""
    return addresses.towards(*split_address(store))


def regions_of(tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Place]]:
    """The memory that engines allocated, each piece once, as bytes; where each tensor begins."""
    found: dict[int, tuple[int, Tensor]] = {}
    places = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
            found[storage.data_ptr()] = (len(found), flat)
        number = found[storage.data_ptr()][0]
        places.append(Place(number, tensor.data_ptr() - storage.data_ptr()))
    return tuple(flat for _, flat in found.values()), places


def timeouts_of(settings: Mapping[str, Any], limit_s: float | None) -> KVTimeouts:
    """The engine's limit, before it what MOE_P2P_KV_TIMEOUTS says, before that `settings`."""
    found: dict[str, Any] = {} if limit_s is None else {"open_s": limit_s, "tail_s": limit_s}
    for each in filter(None, env.kv_timeouts().split(",")):
        name, _, value = each.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            found[name.strip()] = value  # KVTimeouts refuses it by name
    known = KVTimeouts.__dataclass_fields__
    require(
        found.keys() <= known.keys(),
        f"MOE_P2P_KV_TIMEOUTS is {env.kv_timeouts()!r}, must be like open_s=300,tail_s=60, of "
        f"{', '.join(known)}",
    )
    return KVTimeouts(**found | {name: settings[name] for name in known if name in settings})


_Worker = TypeVar("_Worker", bound=KVWorker)


class EngineWorker(Generic[_Worker]):
    """A KVSender or KVReceiver of one rank of an engine, with its lease.

    settings: "verify" (decode), "host", "fence", and fields of KVTimeouts; before the environment's
    MOE_P2P_KV_VERIFY, MOE_P2P_KV_HOST, MOE_P2P_KV_FENCE and MOE_P2P_KV_TIMEOUTS. limit_s: after
    which the engine itself gives up a request that does not move.
    """

    def __init__(
        self,
        kind: type[_Worker],
        cache: KVCache,
        instance: str,
        store: str,
        settings: Mapping[str, Any],
        limit_s: float | None = None,
    ) -> None:
        timeouts = timeouts_of(settings, limit_s)
        given = {"verify": env.kv_verify(), "host": env.kv_host()}
        settings = {name: value for name, value in given.items() if value} | dict(settings)
        wanted = ("fence", "verify") if kind is KVReceiver else ("fence",)
        more = {name: settings[name] for name in wanted if name in settings}
        device = cache.tensors[0].device
        self.engine = Engine(label=instance, gpu=device.index if device.type == "cuda" else None)
        self.worker = kind(
            self.engine, cache, instance=instance, timeouts=timeouts, max_requests=1024, **more
        )
        self._leases = TorchLeases(leases_store(store), timeouts.lease_s)
        self._host = settings.get("host") or own_host(store)
        self.keeper = LeaseKeeper(self.worker, self._leases, host=self._host)
        self._away = False

    def leave(self) -> None:
        """When it returns, no memory of the cache is registered, and nothing lands in it. Raises
        TimeoutError where that cannot be said; to be called again."""
        self._away = True
        self.keeper.close()
        self.worker.check_withdrawn()

    def join(self) -> None:
        """After `leave`: it meets the others again."""
        if self._away:
            self.keeper = LeaseKeeper(self.worker, self._leases, host=self._host)
            self._away = False

    def close(self) -> None:
        self.keeper.close()
        self.engine.close()


__all__ = ["EngineWorker", "KVReceiver", "KVSender", "join_store", "regions_of", "serve_store"]
