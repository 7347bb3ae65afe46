"""Weight updates of TorchTitan's RL actors, in the place of their TorchStore.

    MOE_P2P_WEIGHTS_STORE=HOST:PORT                 in all processes; HOST is the first trainer's
    --trainer.override.imports moe_p2p.integrations.weights.torchtitan.store
    --generator.override.imports moe_p2p.integrations.weights.torchtitan.store

TorchTitan imports the module of an override in each actor's process, and this one then takes the
place of `torchstore` in the actors' modules. A push copies what the trainer has to host memory, as
TorchTitan's own; a pull brings all ranks of the generator what the last push copied, straight from
each trainer's shards, in the place of a storage volume. It serves one generator.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import env
from moe_p2p.engine.engine import Engine
from moe_p2p.errors import MoeP2pError, TimeoutError, UnavailableError, make, require
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations import optional, required
from moe_p2p.integrations.kv.worker import split_address
from moe_p2p.integrations.weights.engine import Fleet, heard
from moe_p2p.weights import WeightEngineRank, WeightTrainer, layout_of
from moe_p2p.weights.checks import plain
from moe_p2p.weights.job import prefix_of, refuse_update, source_of
from moe_p2p.weights.layout import everyones

_ACTORS = "torchtitan.experiments.rl.actors"
_TIMEOUT_S = 300.0


def _fleet() -> Fleet:
    host, port = split_address(env.weights_store())
    return Fleet(host=host, port=port, name="torchtitan", timeout_s=_TIMEOUT_S)


def _in_thread(call: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight update").start()
    return future


def _gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _tensors_in(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """A plain tensor is the whole parameter, whatever its strides are."""
    return {
        name: each if hasattr(each, "device_mesh") else each.detach().contiguous()
        for name, each in state_dict.items()
        if isinstance(each, Tensor)
    }


def _beside(each: Tensor) -> Tensor:
    return torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=each.is_cuda)


class Pushes:
    """Of a trainer. A push ends when its bytes are copied; the update runs beside the next step."""

    def __init__(self) -> None:
        self._host = dict[str, Tensor]()
        self._version = 0
        self._sending: Future[None] | None = None
        self._store: Any = None

    def put(self, state_dict: dict[str, Any]) -> None:
        """Raises why the update before failed."""
        if self._sending is not None:  # what it sends must be left alone until it has ended
            if not wait([self._sending], 2 * _TIMEOUT_S).done:
                text = f"the update to version {self._version} is under way after "
                raise make(TimeoutError, f"{text}{2 * _TIMEOUT_S:g} s; push again")
            before, self._sending = self._sending, None
            before.result()
        self._version += 1
        try:
            given = _tensors_in(state_dict)
            if not self._host:
                self._layout = layout_of(given)
                self._host = {name: _beside(plain(each)) for name, each in given.items()}
            for name, each in given.items():
                self._host[name].copy_(plain(each))
        except Exception as error:
            if "_trainer" in self.__dict__:  # else others wait for the set-up
                with suppress(MoeP2pError):
                    self._trainer.abort(f"its push failed: {error!r}")
            raise
        self._sending = _in_thread(lambda: self._trainer.update(self._version))

    @cached_property
    def _trainer(self) -> WeightTrainer:
        """Made beside the generator's first pull."""
        rank, fleet, gpu = dist.get_rank(), _fleet(), _gpu()
        self._store = self._store or fleet.store(serves=rank == 0)
        with heard(self._store, fleet.name, f"trainer {rank}"):
            engine = Engine(label=f"trainer {rank}", gpu=gpu)
        return WeightTrainer(
            engine,
            self._store,
            self._layout,
            rank,
            self._host,
            name=fleet.name,
            timeout_s=fleet.timeout_s,
            device=None if gpu is None else "cuda",
        )


class Pulls:
    """Pulls of one rank of the generator. TorchTitan's state dict has new copies of fused
    parameters each time, so bytes land in tensors of this object and are copied then. A failed
    update leaves the model as it was."""

    def __init__(self) -> None:
        self._landed = dict[str, Tensor]()
        self._generator: WeightEngineRank | None = None
        self._id = secrets.token_bytes(8)  # the same in each try

    def get(self, state_dict: dict[str, Any], strict: bool) -> None:
        given = _tensors_in(state_dict)
        generator = self._generator or self._set_up(given)
        try:
            missing = sorted(set(given).difference(self._landed))
            require(not (strict and missing), f"no trainer has {', '.join(missing[:3])}")
            generator.begin()
        except Exception as error:  # others of the generator have begun
            refuse_update(self._words, generator.name, error)
            raise
        generator.wait()
        for name, each in self._landed.items():
            plain(state_dict[name]).copy_(each)

    def _set_up(self, given: dict[str, Tensor]) -> WeightEngineRank:
        fleet = _fleet()
        store = fleet.store()
        self._words = words = StoreKeys(store, prefix_of(fleet.name), alone=True)
        deadline = Deadline(fleet.timeout_s)
        mine = everyones(self._id)[0].hex()
        if words.decide("generator", mine) != mine:
            text = "another generator has the trainers' weights: moe_p2p serves one"
            raise make(UnavailableError, f"{text}; start TorchTitan with one generator")
        rank = dist.get_rank()
        with heard(words.client, fleet.name, f"generator {rank}"):
            theirs = source_of(words, deadline).by_name
            given = {name: each for name, each in given.items() if name in theirs}
            self._landed = {name: torch.empty_like(plain(each)) for name, each in given.items()}
            layout = layout_of(given)
            engine = Engine(label=f"generator {rank}", gpu=_gpu())
        self._generator = WeightEngineRank(
            engine,
            store,
            layout,
            rank,
            self._landed,
            mode="in_place",
            name=fleet.name,
            timeout_s=fleet.timeout_s,
        )
        return self._generator


class Store:
    """The calls of `torchstore` that actors make. Their only key names the model's state dict."""

    def __init__(self) -> None:
        self._pushes, self._pulls = Pushes(), Pulls()

    @torch.no_grad()
    async def put_state_dict(
        self, state_dict: dict[str, Any], key: str, *, direct_rdma: bool = False
    ) -> None:
        self._pushes.put(state_dict)

    @torch.no_grad()
    async def get_state_dict(
        self,
        key: str,
        user_state_dict: dict[str, Any],
        *,
        strict: bool = True,
        direct_rdma: bool = False,
    ) -> dict[str, Any]:
        self._pulls.get(user_state_dict, strict)
        return user_state_dict


def store(config: Any) -> Any:
    """What `override.imports` names. It is called for no part of the model."""
    return config


def install() -> None:
    """In an actor's process, once its module is imported."""
    made = Store()
    for name in ("trainer", "generator"):
        module = sys.modules.get(f"{_ACTORS}.{name}")
        if module is not None:
            module.ts = made  # type: ignore[attr-defined]


def _register() -> None:
    config = required("torchtitan.config", "torchtitan")
    nothing = type("Nothing", (config.Configurable.Config,), {})
    required("torchtitan.config.override", "torchtitan").override(target=nothing)(store)
    install()


if optional("torchtitan.config") is not None:
    _register()
