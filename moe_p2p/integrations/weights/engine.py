"""A worker of an inference engine in weight updates: what the adapters of vLLM and SGLang share.

    worker = EngineWeights(model, load, fleet, rank, world_size)   once, with all trainers
    worker.begin()     a session opens: bytes arrive beside forward passes; in place, the engine
                       is paused
    worker.settle()    the fleet has decided; raises, by name, where the update failed
    worker.commit()    the weights change here: called on all workers of the engine between the
                       same two forward passes, by the engine's own calls to its workers

The model's own loader is recorded once, a layer at a time, so that trainers write what its tensors
hold. What it makes otherwise (quantized, repacked), or all where `direct` is False, is received in
checkpoint layout and given to the loader at commit.
"""

from __future__ import annotations

import importlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from moe_p2p import log
from moe_p2p.engine.engine import Engine
from moe_p2p.errors import (
    AbortedError,
    MoeP2pError,
    ProtocolError,
    TimeoutError,
    make,
    require,
)
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.listener import warn_of_strangers
from moe_p2p.fleet.member import LEAVE_S
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.machine.driver import relaxed_captures
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, dtype_name, record
from moe_p2p.weights.job import SetUp, prefix_of, source_of

Load = Callable[[list[tuple[str, Tensor]]], Any]
_NOT_LOADED = "the engine's loader has not ended"
_SAY_S = 0.25  # until a refusal is said again


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Where trainers are. host, port: of the store that trainer 0 serves. replica: "" of engines
    that the set-up waits for; another name: of one that joins a fleet that runs."""

    host: str
    port: int
    name: str = "weights"
    mode: Literal["shadow", "in_place"] = "shadow"
    replica: str = ""
    timeout_s: float = 120.0

    def store(self, *, serves: bool = False) -> Any:
        if serves:
            warn_of_strangers(
                f"the store of {self.name}", self.host, "whoever reaches it may write to weights"
            )
            return addresses.serve(self.host, self.port, timeout_s=self.timeout_s)
        if not self._is_there():
            where = f"{self.name} at {self.host}:{self.port}, which trainer 0 serves"
            raise make(TimeoutError, f"within {self.timeout_s:g} s no store of {where}")
        limit = timedelta(seconds=self.timeout_s)
        return TCPStore(self.host, self.port, is_master=False, timeout=limit)

    def _is_there(self) -> bool:
        """Waits for it: a TCPStore that finds no server tries again only after seconds."""
        deadline = Deadline(self.timeout_s)
        while deadline.left:
            with suppress(OSError), socket.create_connection((self.host, self.port), 1.0):
                return True
            time.sleep(0.02)
        return False


@contextmanager
def beside(
    who: str, words: Callable[[], StoreKeys], set_up: Callable[[], object], timeout_s: float
) -> Iterator[None]:
    """Around the set-up of this process's trainer: engines set up meanwhile, by `set_up`, which a
    thread calls. What that raises is raised at the end, and all trainers that wait hear it, also
    those that begin later: it is said again until this process's set-up is over. timeout_s: from
    then on, for `set_up` to end."""
    failed: list[Exception] = []
    error: Exception | None = None
    over = threading.Event()

    def run() -> None:
        try:
            set_up()
        except Exception as error:
            failed.append(error)
            while not over.is_set():
                with suppress(MoeP2pError):
                    SetUp(words(), who).say(str(error) or repr(error))
                over.wait(_SAY_S)

    thread = threading.Thread(target=run, name=f"set-up of {who}", daemon=True)
    thread.start()
    try:
        yield
    except Exception as raised:
        error = raised
    finally:
        over.set()
    thread.join(timeout_s)
    if failed or error is not None:
        raise failed[0] if failed else error from None  # type: ignore[misc]
    if thread.is_alive():
        raise make(TimeoutError, f"{who} was not set up {timeout_s:g} s after the trainers were")


@contextmanager
def heard(store: Any, name: str, who: str) -> Iterator[None]:
    """Around what an adapter does before it makes its trainer or engine rank, which others wait
    for: they hear why it failed, and it hears who failed meanwhile. store: or a client of it. name:
    of the fleet."""
    words = StoreKeys(store, prefix_of(name))
    try:
        set_up = SetUp(words, who)
        with set_up.heard(lambda: None):
            yield
            set_up.listen()
    finally:
        if words.client is not store:
            words.client.close()


def own_address() -> str:
    """Returns this host's address, by Ray if it is installed."""
    try:
        return str(importlib.import_module("ray").util.get_node_ip_address())
    except Exception:
        return addresses.own()


class EngineWeights:
    """rank, world_size: of this worker among all workers of the fleet's engines, or of its replica.

    load: the model's loader, which takes pairs of name and tensor. direct: record it, so that
    trainers write into the tensors; False: it gets all parameters at commit. store: of the fleet,
    a client that no other thread uses meanwhile; None: a new one. engine_ranks: of the workers of
    this worker's engine; (): all. set_up: the same on all workers that set up together, and another
    one each time, so that none takes a word of workers that were there before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Load,
        fleet: Fleet,
        rank: int,
        world_size: int,
        *,
        direct: bool = True,
        device: torch.device | str = "cpu",
        store: Any = None,
        engine_ranks: Sequence[int] = (),
        set_up: str = "",
    ) -> None:
        self._load, self.fleet, self.device = load, fleet, torch.device(device)
        store = fleet.store() if store is None else store
        words = StoreKeys(store, prefix_of(fleet.name), alone=True)
        deadline, at = Deadline(fleet.timeout_s), f"{fleet.replica}/set-up {set_up}"
        others = SetUp(words, f"generator {rank}", heard=not fleet.replica)
        with others.heard(words.client.close):
            if rank == 0:
                _sweep(words, fleet.replica, at)
            source = source_of(words, deadline)
            shapes = {name: (each[0].elements, getattr(torch, each[0].dtype))
                      for name, each in source.by_name.items()}  # fmt: skip
            why = "the engine loads all of its parameters by itself"
            params = [Param(n, s, dtype_name(t), (rank,), finalize=why)
                      for n, (s, t) in shapes.items()]  # fmt: skip
            padding: set[str] = set()
            if direct:
                params, padding = recorded(model, load, shapes, rank)
            layout = together(words, at, rank, world_size, params, deadline, others.listen)
            nowhere = sorted(shapes.keys() - layout.by_name.keys())
            require(
                not nowhere,
                f"no worker's loader puts {', '.join(nowhere[:3])} into a tensor of the model; "
                "leave it out of the trainers' parameters",
            )
            written = {param.tensor for param in params if not param.finalize}
            self._live = {n: t for n, t in tensors_of(model).items() if n in written}
            gpu = self.device.index if self.device.type == "cuda" else None
            self.engine = Engine(label=f"generator {rank}", gpu=gpu)
        self._addresses = {name: each.data_ptr() for name, each in self._live.items()}
        self._model = model
        fallen = sum(_nbytes(param) for param in params if param.finalize)
        if fallen:
            log.warning(f"generator {rank}: {fallen:,} B of weights are received in checkpoint "
                        "layout, and loaded at commit")  # fmt: skip
        self._received: Mapping[str, Tensor] = {}
        self._seen, self._may_commit, self._ready = 0, False, False
        self._session: threading.Thread | None = None
        self._error: Exception | None = None
        self._broken = ""
        self._set_up = words  # what workers said in it; only they read that
        agree = _Agreement(words, at, rank, world_size, deadline)
        self.engine_rank = WeightEngineRank(
            self.engine,
            store,
            layout,
            rank,
            self._live,
            replica=fleet.replica,
            mode=fleet.mode,
            engine_ranks=engine_ranks or range(world_size),
            agree=lambda number: self._agree(number) if self._ready else agree(number),
            finalize=self._keep,
            padding=padding,
            name=fleet.name,
            timeout_s=fleet.timeout_s,
        )
        self._ready = True

    @property
    def version(self) -> int | None:
        return self.engine_rank.version

    def _keep(self, received: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        self._received = received
        if received and self.fleet.mode == "in_place":  # a mix, from here on until `commit`
            self._broken = _NOT_LOADED
            self.engine_rank.set_usable(False)

    def _agree(self, committed: int) -> int:
        """Workers switch to a version in `commit`, which the engine calls on all at once."""
        self._seen = committed
        return committed if self._may_commit else 0

    # --- a session ---

    def begin(self) -> None:
        require(self._session is None, "begin: an update is under way; commit it, or settle")
        if self.fleet.mode == "in_place":
            self.engine_rank.begin()
        self._error = None
        seen = self._seen, self.engine_rank.totals["failed"]  # before others hear of it
        session = threading.Thread(target=self._run, args=seen, daemon=True, name="weight update")
        session.start()
        self._session = session

    def _run(self, before: int, failed: int) -> None:
        """In a thread of its own, while the engine may capture graphs."""
        try:
            with relaxed_captures():
                if self.fleet.mode == "in_place":
                    self.engine_rank.wait(self.fleet.timeout_s)
                else:
                    self._watch(before, failed)
        except Exception as error:
            self._error = error

    def _watch(self, before: int, failed: int) -> None:
        """Runs until the fleet has decided; the engine generates meanwhile."""
        engine_rank, deadline = self.engine_rank, Deadline(self.fleet.timeout_s)
        while self._seen <= before:
            engine_rank.step()
            if engine_rank.totals["failed"] > failed and not engine_rank.retrying:
                raise make(AbortedError, f"the weight update failed: {engine_rank.failure}")
            if not deadline.left:
                text = f"{engine_rank.name}: no update was over within {deadline.timeout_s:g} s"
                raise make(TimeoutError, text)
            time.sleep(0.001)

    def settle(self) -> None:
        """Raises where the update failed; a session that failed is over."""
        require(self._session is not None, "settle: no session is open; call begin")
        assert self._session is not None
        limit_s = 2 * self.fleet.timeout_s
        self._session.join(limit_s)
        if self._session.is_alive():
            text = f"{self.engine_rank.name}: the session was not over within {limit_s:g} s"
            raise make(TimeoutError, text)
        if self._error is not None:
            self._session = None
            raise self._error

    def commit(self) -> int | None:
        """Returns the version of the next forward pass."""
        self.settle()
        self._session = None
        moved = [name for name, each in tensors_of(self._model).items()
                 if self._addresses.get(name, each.data_ptr()) != each.data_ptr()]  # fmt: skip
        self._synchronize()
        # Until the loader has ended, this worker counts as one without a version.
        self.engine_rank.set_usable(not moved and not self._received)
        if moved:
            self._broken = f"the engine moved {', '.join(moved[:3])}"
        else:
            self._take()
        self._synchronize()
        self.require_clean()
        return self.engine_rank.version

    def _take(self) -> None:
        before = self.engine_rank.totals["updates"]
        if self.fleet.mode == "shadow":
            self._may_commit = True
            try:
                self.engine_rank.step()
            finally:
                self._may_commit = False
            if self.engine_rank.totals["updates"] == before:
                self.engine_rank.set_usable(not self._broken)
                text = "what was decided is given up: its trainers were replaced meanwhile"
                raise make(AbortedError, f"{self.engine_rank.name}: {text}")
        self._broken = _NOT_LOADED if self._received else ""
        if self._received:
            try:
                self._load(list(self._received.items()))
                self._broken = ""
                self.engine_rank.set_usable(True)
            except Exception as error:
                self._broken = f"the engine's loader failed: {error!r}"

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def require_clean(self) -> None:
        """Called before the engine continues, with the weights that it loaded by itself too.
        Raises ProtocolError while its tensors are a mix."""
        self.engine_rank.require_not_dirty()
        if self._broken:
            text = f"{self.engine_rank.name}: its tensors are dirty: {self._broken}"
            raise make(ProtocolError, text)

    def close(self) -> None:
        with suppress(MoeP2pError), self._set_up.within(Deadline(LEAVE_S)):
            self._set_up.withdraw(leaves=True)
        self._set_up.client.close()
        self.engine_rank.close()
        self.engine.close()


def _sweep(words: StoreKeys, replica: str, at: str) -> None:
    """Words of set-ups but for `at`: of workers that were killed."""

    def over(key: str) -> bool:
        what, _, of = key.partition(" ")
        ours = what in ("params", "agree") and of.startswith(f"{replica}/set-up ")
        return ours and not of.startswith((f"{at}/", f"{at} "))

    words.sweep(over)


class _Agreement:
    """Returns the smallest of all workers' numbers, by way of the store. Used during set-up."""

    def __init__(
        self, words: StoreKeys, name: str, rank: int, world_size: int, deadline: Deadline
    ) -> None:
        self._words, self._name, self._rank = words, name, rank
        self._world_size, self._deadline = world_size, deadline
        self._calls = itertools.count()

    def __call__(self, number: int) -> int:
        at = f"agree {self._name} {next(self._calls)}"
        self._words.put(f"{at} {self._rank}", number)
        keys = {f"{at} {i}": f"generator {i}" for i in range(self._world_size)}
        return int(min(self._words.wait(keys, self._deadline).values()))


def together(
    words: StoreKeys,
    name: str,
    rank: int,
    world_size: int,
    params: Iterable[Param],
    deadline: Deadline,
    listen: Callable[[list[str]], None],
) -> WeightLayout:
    """Returns the layout of all workers, each of which passes its own parameters."""
    mine = WeightLayout(tuple(params), world_size)
    words.put(f"params {name}/{rank}", mine.to_bytes().hex())
    keys = {f"params {name}/{i}": f"generator {i}" for i in range(world_size)}
    found = words.wait(keys, deadline, listen)
    parts = [WeightLayout.from_bytes(bytes.fromhex(found[key])).params for key in keys]
    return WeightLayout(tuple(itertools.chain(*parts)), world_size)


# --- what the loader does ---


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns parameters and floating-point buffers. A loader may read integer buffers, so they are
    neither filled nor compared."""
    found = {name: each.data for name, each in model.named_parameters()}
    found |= {name: each for name, each in model.named_buffers() if each.is_floating_point()}
    return {name: each for name, each in found.items() if each.numel() and each.is_contiguous()}


class Recorded(NamedTuple):
    """params: where this worker's loader puts parameters, without those of other workers (experts,
    layers). padding: names of tensors of which the loader leaves a part as it is."""

    params: list[Param]
    padding: set[str]


@torch.no_grad()
def recorded(
    model: torch.nn.Module,
    load: Load,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    rank: int,
) -> Recorded:
    """The loader runs once for each layer, whose tensors are restored afterwards."""
    made = Recorded([], set())
    own = _by_layer(tensors_of(model))
    for layer, names in _by_layer(shapes).items():
        tensors = {name: tensors_of(model)[name] for name in own.get(layer, ())}
        if not tensors:  # of another pipeline stage
            continue
        saved = {name: each.clone() for name, each in tensors.items()}

        def run(
            given: dict[str, Tensor], tensors: dict[str, Tensor] = tensors
        ) -> dict[str, Tensor]:
            for each in tensors.values():
                each.view(-1).view(torch.uint8).zero_()
            load(list(given.items()))
            return {name: each.cpu() for name, each in tensors.items()}

        try:
            found = record(run, {name: shapes[name] for name in names}, rank=rank)
        finally:
            for name, each in tensors.items():
                each.copy_(saved[name])
        made.params.extend(found.params)
        made.padding.update(found.padding)
    return made


def _by_layer(names: Iterable[str]) -> dict[str, set[str]]:
    """Groups names by what comes up to their first number: "model.layers.3"; "" without one."""
    found: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        found.setdefault(".".join(parts[: numbers[0] + 1]) if numbers else "", set()).add(name)
    return found


def _nbytes(param: Param) -> int:
    count = torch.Size(param.elements).numel()
    return count * int(getattr(torch, param.dtype).itemsize)
