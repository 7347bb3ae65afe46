"""A checkpoint engine of verl: whole parameters from actors to every rollout worker, in buckets.

    actor_rollout_ref.rollout.checkpoint_engine.backend=moe_p2p
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=moe_p2p.integrations.weights.verl

verl gives each actor the whole parameters and wants them whole at each worker, whose server loads
them. Actors have the same bucket then, so each sends an equal share of it to every worker. Each
bucket is an update of its own: a worker reads it while the next one arrives in the shadow, and
`receive_weights` ends well only after the last one. Importing this registers the backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import require
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.listener import warn_of_strangers
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations import derived, required
from moe_p2p.integrations.weights.engine import heard, own_address
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, WeightTrainer
from moe_p2p.weights import dtype_name as name_of
from moe_p2p.weights.job import prefix_of, refuse_update

NAME = "moe_p2p"
_BASE = "verl.checkpoint_engine.base"
_ALIGN = 16

Meta = dict[str, Any]  # of a part of a parameter: name, shape, dtype, its bytes, where they lie


class Checkpoint:
    """bucket_size: bytes; verl's update_weights_bucket_megabytes. Workers take two of it."""

    wire_format = "named_tensors"

    def __init__(
        self, bucket_size: int, device: str = "", timeout_s: float = 120.0, **_: Any
    ) -> None:
        self.timeout_s = timeout_s
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(where)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.size = -(-bucket_size // _ALIGN) * _ALIGN
        self._served: Any = None
        self._topology: dict[str, Any] = {}
        self.engine: Engine | None = None
        self._side: Any = None
        self._words: Any = None
        self._count = 0

    def prepare(self) -> dict[str, Any]:
        """Returns where all ranks meet: at the first worker, as long as the group lives. verl makes
        a group for each update; its words end with its store."""
        self.finalize()
        if self._served is None:
            warn_of_strangers(
                "the store of verl's groups", "", "whoever reaches it may write to weights"
            )
        host = own_address()
        self._served = addresses.serve(host, timeout_s=self.timeout_s)
        return {"host": host, "port": self._served.port, "token": secrets.token_hex(4)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        def of(side: str, mine: int) -> dict[str, list[Any]]:
            return {
                "side": [side] * mine,
                "rank": list(range(mine)),
                "actors": [actor_wg_world_size] * mine,
                "workers": [rollout_world_size] * mine,
                "meeting": [metadata[0]] * mine,
            }

        return of("actor", actor_wg_world_size), of("worker", rollout_world_size)

    def init_process_group(
        self, side: str, rank: int, actors: int, workers: int, meeting: dict[str, Any]
    ) -> None:
        """Called by all ranks at the same time."""
        self.finalize()
        self._rank, self._count = rank, 0
        limit = timedelta(seconds=self.timeout_s)
        store = TCPStore(meeting["host"], meeting["port"], is_master=False, timeout=limit)
        self._name = name = f"verl {meeting['token']}"
        self._words = StoreKeys(store, name)
        with heard(self._words.client, name, f"{side} {rank}"):
            bucket = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
            gpu = self.device.index if self.device.type == "cuda" else None
            self.engine = Engine(label=f"{side} {rank}", gpu=gpu)
            count = actors if side == "actor" else workers
            layout = WeightLayout((Param("bucket", (self.size,), "uint8", range(count)),), count)
        make: Any = WeightTrainer if side == "actor" else WeightEngineRank
        self._bucket = bucket
        self._side = make(self.engine, store, layout, rank, {"bucket": bucket}, name=name,
                          timeout_s=self.timeout_s)  # fmt: skip

    def finalize(self) -> None:
        """Ends the group: verl makes one for each update, of the replicas that exist then."""
        if self._side is not None:
            self._side.close()
            self._side = None
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self._words is not None:
            self._words.client.close()
            self._words = None

    # --- actors ---

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """On all actors, which iterate alike. Workers fail where an iteration fails."""
        async for metas, last in self._or_abort(self._filled(weights)):
            self._count += 1
            await asyncio.to_thread(self._update, {"metas": metas, "last": last})

    async def _filled(self, weights: Any) -> AsyncIterator[tuple[list[Meta], bool]]:
        """The bucket, each time that it is full, and at the end."""
        metas, at = list[Meta](), 0
        async for name, tensor in _each(weights):
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            first = 0
            while first < data.numel():
                if at >= self.size:
                    yield metas, False
                    metas, at = [], 0
                part = data[first : first + self.size - at]
                self._bucket[at : at + part.numel()].copy_(part)
                metas.append({"name": name, "shape": list(tensor.shape), "at": at, "first": first,
                              "nbytes": part.numel(), "dtype": name_of(tensor.dtype)})  # fmt: skip
                at += -(-part.numel() // _ALIGN) * _ALIGN
                first += part.numel()
        yield metas, True

    async def _or_abort(
        self, buckets: AsyncIterator[tuple[list[Meta], bool]]
    ) -> AsyncIterator[tuple[list[Meta], bool]]:
        try:
            async for bucket in buckets:
                yield bucket
        except Exception as error:
            await asyncio.to_thread(self._side.abort, f"weights of the actor: {error}")
            raise

    def _update(self, bucket: dict[str, Any]) -> None:
        """In a thread: the event loop of verl goes on where the store does not answer."""
        if self._rank == 0:
            with self._words.within(Deadline(self.timeout_s)):
                self._words.put(f"bucket {self._count}", bucket)
                # Workers have read it: else the bucket after the next would not have arrived.
                self._words.drop(f"bucket {self._count - 3}")
        self._side.update(self._count)

    # --- rollout workers ---

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Tensors may lie in the bucket: they are valid until the next one is asked for."""
        found: dict[str, Tensor] = {}
        last = False
        while not last:
            self._count += 1
            told = await asyncio.to_thread(self._next)
            try:
                for meta in told["metas"]:
                    for name, tensor in self._whole(meta, found):
                        yield name, tensor
            except BaseException as error:  # who takes them has failed, and so closes this
                if not told["last"]:
                    closed = isinstance(error, GeneratorExit)
                    why = "its server takes no more of the weights" if closed else error
                    refuse_update(self._of_fleet(), f"worker {self._rank}", why)
                raise
            last = told["last"]
        require(not found, f"{', '.join(found)}: parts of them have not arrived")

    def _of_fleet(self) -> StoreKeys:
        return StoreKeys(self._words.client, prefix_of(self._name))

    def _next(self) -> dict[str, Any]:
        self._side.wait(self.timeout_s)
        with self._words.within(Deadline(self.timeout_s)):
            found: dict[str, Any] = self._words.get(f"bucket {self._count}")
        return found

    def _whole(self, meta: Meta, found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        dtype, shape = getattr(torch, meta["dtype"]), meta["shape"]
        part = self._bucket[meta["at"] : meta["at"] + meta["nbytes"]]
        total = torch.Size(shape).numel() * dtype.itemsize
        if meta["nbytes"] == total:
            yield meta["name"], part.view(dtype).view(shape)
            return
        if meta["first"] == 0:
            found[meta["name"]] = torch.empty(total, dtype=torch.uint8, device=self.device)
        whole = found[meta["name"]]
        whole[meta["first"] : meta["first"] + meta["nbytes"]].copy_(part)
        if meta["first"] + meta["nbytes"] == total:
            yield meta["name"], found.pop(meta["name"]).view(dtype).view(shape)


async def _each(weights: Any) -> AsyncIterator[tuple[str, Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


def register() -> Any:
    base = required(_BASE, "verl")
    made = derived(Checkpoint, base.CheckpointEngine)
    missing = sorted(getattr(made, "__abstractmethods__", ()))
    require(not missing, f"this verl asks checkpoint engines for {', '.join(missing)}")
    return base.CheckpointEngineRegistry.register(NAME)(made)


def __getattr__(name: str) -> Any:
    if name == "MoeP2pCheckpointEngine":
        return required(_BASE, "verl").CheckpointEngineRegistry.get(NAME)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


with contextlib.suppress(ImportError):  # without verl there is nothing to register with
    register()
