"""Weight updates of vLLM: its `WeightTransferEngine`, and the trainers' side of it.

    vllm serve MODEL --weight-transfer-config '{"backend": "moe_p2p"}'    the plugin registers it

    init = vllm_weights.MoeP2pTrainerInit(rank=RANK, world_size=WORLD, host=HOST, port=PORT)
    trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)
    trainer.send_weights()                                                on all trainers

In shadow mode vLLM generates while bytes move; `finish_weight_update`, which vLLM runs on all
workers between the same two passes, copies. Where several data-parallel engines share experts,
pause them around it (`/pause?mode=keep`). In place, pause before `send_weights`; vLLM refuses to
resume while a worker's tensors are a mix. `prefix_cache="reset"` makes vLLM forget KV of older
weights at each update. Classes get their bases from vLLM at first use.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import (
    AbortedError,
    ProtocolError,
    TimeoutError,
    make,
    require,
)
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations import derived, optional, required
from moe_p2p.integrations.weights.engine import EngineWeights, Fleet, beside, heard
from moe_p2p.weights import Param, Placement, Replicate, Shard, WeightLayout, WeightTrainer
from moe_p2p.weights import dtype_name as name_of
from moe_p2p.weights.job import prefix_of

NAME = "moe_p2p"
_LOOK_S = 0.002
PrefixCache = Literal["keep", "reset"]
_BASE = "vllm.distributed.weight_transfer.base"
_FACTORY = "vllm.distributed.weight_transfer.factory"
_CORE = "vllm.v1.engine.core"
_RELOAD = "vllm.model_executor.model_loader.reload"


@dataclass
class Init:
    """What each worker receives once: fields of `Fleet`, and `direct`.

    direct: True: trainers write into vLLM's tensors. False: parameters are received in checkpoint
    layout, and vLLM reloads them. "auto": True where no layer is quantized. engines: how many get
    the same call, as by vLLM's RayVLLMWeightSyncClient.
    prefix_cache: "reset": with each update vLLM forgets the KV that older weights computed, also of
    running requests, which it computes anew. "keep": prompts go on with it.
    set_up: drawn for each call, so that workers take no word of an earlier one.
    """

    host: str
    port: int
    name: str = "weights"
    mode: Literal["shadow", "in_place"] = "shadow"
    replica: str = ""
    timeout_s: float = 120.0
    direct: bool | Literal["auto"] = "auto"
    engines: int = 1
    prefix_cache: PrefixCache = "keep"
    set_up: str = ""


@dataclass
class Update:
    """What a session's calls carry: the version, and nothing else."""

    version: int


@dataclass(kw_only=True)
class TrainerInit:
    """world_size: of the trainers. host, port: where trainer 0 serves the store. prefix_cache: as
    `Init`'s."""

    backend: ClassVar[str] = NAME
    rank: int
    world_size: int
    host: str
    port: int
    name: str = "weights"
    mode: Literal["shadow", "in_place"] = "shadow"
    timeout_s: float = 120.0
    watermark: int | None = None
    prefix_cache: PrefixCache = "keep"

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class Receiver:
    """In each worker of vLLM. Calls come between forward passes."""

    supports_draft_weight_update = False

    init_info_cls: Any
    update_info_cls: Any
    model: Any
    model_config: Any
    vllm_config: Any
    parallel_config: Any
    device: Any
    parse_update_info: Callable[[dict[str, Any]], Any]
    weights: EngineWeights | None = None
    resets_prefix_cache = False

    def init_transfer_engine(self, init_info: Init) -> None:
        given, parallel = asdict(init_info), self.parallel_config
        direct, prefix_cache = given.pop("direct"), given.pop("prefix_cache")
        ways = get_args(PrefixCache)
        require(prefix_cache in ways, f"prefix_cache is {prefix_cache!r}, must be one of {ways}")
        self.resets_prefix_cache = prefix_cache == "reset"
        if direct == "auto":
            direct = getattr(self.vllm_config, "quant_config", None) is None
        engines, set_up = given.pop("engines"), given.pop("set_up")
        self.shutdown()
        fleet = Fleet(**given)
        replicas = 1 if init_info.replica else getattr(parallel, "data_parallel_size", 1)
        index = 0 if init_info.replica else parallel.data_parallel_index
        ranks = range(0)
        if replicas == engines == 1:  # another one each time that vLLM starts
            set_up += getattr(self.vllm_config, "instance_id", "")
        if engines > 1 and not init_info.replica and replicas == 1:
            index, replicas = self._place(fleet, engines), engines
            ranks = range(index * parallel.world_size, (index + 1) * parallel.world_size)
        self.weights = EngineWeights(
            self.model,
            self.model.load_weights if direct else self._reload,
            fleet,
            index * parallel.world_size + parallel.rank,
            replicas * parallel.world_size,
            direct=direct,
            device=self.device,
            engine_ranks=ranks,
            set_up=set_up,
        )

    def _place(self, fleet: Fleet, engines: int) -> int:
        """Number of this worker's engine: engines that get the same call are told apart by the id
        that vLLM gives each."""
        words = StoreKeys(fleet.store(), prefix_of(fleet.name), alone=True)
        mine = self.vllm_config.instance_id
        for place in range(engines):
            if words.decide(f"vllm engine {place}", mine) == mine:
                return place
        text = f"the trainers' client has {engines} engines, and all of them are there already"
        raise make(ProtocolError, f"{text}: pass another one a replica's name")

    def _reload(self, named: list[tuple[str, Tensor]]) -> None:
        """Loads as vLLM does where it quantizes or repacks layers."""
        reload = required(_RELOAD, "vllm")
        reload.initialize_layerwise_reload(self.model)
        self.model.load_weights(named)
        reload.finalize_layerwise_reload(self.model, self.model_config)

    @property
    def _opened(self) -> EngineWeights:
        require(self.weights is not None, "init_weight_transfer_engine must be called before")
        assert self.weights is not None
        return self.weights

    def start_weight_update(self) -> None:
        self._opened.begin()

    def receive_weights(self, update_info: Update) -> None:
        """Waits for the decision of the fleet. Raises if the update failed."""
        self._opened.settle()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        self._opened.commit()

    def require_clean(self) -> None:
        if self.weights is not None:
            self.weights.require_clean()

    def shutdown(self) -> None:
        if self.weights is not None:
            self.weights.close()
            self.weights = None


class Sender:
    """On each trainer; `send_weights` brings vLLM to the next version, or raises why not."""

    init_info_cls: Any
    client: Any
    source: Any
    rank: int
    is_sender: bool

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> Any:
        require(source is not None, "trainer_init: source is None; pass a WeightSource")
        made = cls(client=client, source=source, is_sender=init_info.is_sender,  # type: ignore[call-arg]
                   rank=init_info.rank)  # fmt: skip
        made._open(init_info)
        return made

    def _open(self, init: TrainerInit) -> None:
        given = {
            name: getattr(init, name) for name in ("host", "port", "name", "mode", "timeout_s")
        }
        self._fleet, self.version, self._session = Fleet(**given), 0, 0
        self._store = self._fleet.store(serves=self.is_sender)
        self._words = StoreKeys(self._store, f"moe_p2p vllm/{init.name}")
        with heard(self._words.client, init.name, f"trainer {self.rank}"):
            self._tensors = {name: tensor.detach().contiguous() for name, tensor in self._parts()}
            layout = layout_of(self.source, init.world_size)
            first = next(iter(self._tensors.values()))
            self.engine = Engine(
                label=f"trainer {self.rank}", gpu=first.device.index if first.is_cuda else None
            )
        with self._workers_set_up(given | {"prefix_cache": init.prefix_cache}):
            self.trainer = WeightTrainer(
                self.engine,
                self._store,
                layout,
                self.rank,
                self._tensors,
                name=init.name,
                timeout_s=init.timeout_s,
                watermark=init.watermark,
            )

    def _workers_set_up(self, given: dict[str, Any]) -> AbstractContextManager[None]:
        """Workers set up at the same time as trainers: the sender starts them by vLLM's call."""
        if not self.is_sender:
            return contextlib.nullcontext()

        def init() -> None:
            more = {
                "engines": len(getattr(self.client, "handles", "1")),
                "set_up": secrets.token_hex(4),
            }
            self.client.init_weight_transfer_engine(given | more)

        words = StoreKeys(self._words.client, prefix_of(self._fleet.name))
        return beside("vLLM's client", lambda: words, init, self._fleet.timeout_s)

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        local = self.source.implements_iter_local()
        yield from self.source.iter_local() if local else self.source.iter_full()

    def send_weights(self) -> None:
        """Called on every trainer, with new weights in the source."""
        changed, failed = dict[str, Tensor](), None
        try:
            for name, tensor in self._parts():
                mine, new = self._tensors[name], tensor.detach()
                if new.data_ptr() != mine.data_ptr() or not new.is_contiguous():
                    changed[name] = new
        except Exception as error:
            failed = error
        version = self._open_session(failed)
        try:
            self.trainer.update(version, changed)
        except Exception:
            if self.is_sender:  # ends the session of the workers, which raise the same reason
                with contextlib.suppress(Exception):
                    self.client.update_weights({"version": version})
            raise
        try:
            if self.is_sender:
                self.client.update_weights({"version": version})
                self.client.finish_weight_update(weight_version=str(version))
        finally:
            self.version = version  # of the fleet, also where an engine cannot switch to it

    def _open_session(self, failed: Exception | None) -> int:
        """Trainers begin when all workers have begun: an earlier failure would reach no worker.
        Returns the version, which the sender counts: a trainer that missed one goes on with it.
        failed: with this trainer's source; it raises that, and all hear it."""
        if self.is_sender:
            self._session += 1
            word = {"number": self._session, "version": self.version + 1, "failed": ""}
            try:
                if failed is not None:
                    raise failed
                self.client.start_weight_update()
            except Exception as error:
                what = "start_weight_update" if failed is None else "its source"
                word["failed"] = f"{what} failed: {error!r}"
                raise
            finally:
                self._words.put("session", word)
            return self.version + 1
        deadline = Deadline(self._fleet.timeout_s)
        with self._words.within(deadline):
            while True:
                found = self._words.get("session")
                if found is not None and found["number"] > self._session:
                    break
                if not deadline.left:
                    text = f"within {deadline.timeout_s:g} s trainer 0 has begun no update"
                    raise make(TimeoutError, text)
                time.sleep(_LOOK_S)
        self._session = found["number"]
        if failed is not None:
            if not found["failed"]:
                self.trainer.abort(f"its source failed: {failed!r}")
            raise failed
        if found["failed"]:
            raise make(AbortedError, f"trainer 0: {found['failed']}")
        return int(found["version"])

    def shutdown(self) -> None:
        self.trainer.close()
        self.engine.close()


def layout_of(source: Any, world_size: int) -> WeightLayout:
    """Of vLLM's `WeightSource`: sharded where it has `iter_local`, else whole on each owner."""
    params = []
    for meta in source.metadata:
        ranks = tuple(range(world_size)) if meta.owners is None else meta.owners
        mesh: tuple[int, ...] = ()
        placements: tuple[Placement, ...] = ()
        if source.implements_iter_local() and meta.placements is not None:
            mesh = meta.mesh_shape
            placements = tuple(
                Shard(each.dim) if hasattr(each, "dim") else Replicate() for each in meta.placements
            )
        params.append(
            Param(meta.name, tuple(meta.shape), name_of(meta.dtype), ranks, mesh, placements)
        )
    return WeightLayout(tuple(params), world_size)


# --- registration ---


def register() -> None:
    """Makes backend "moe_p2p" known to both of vLLM's factories."""
    factory = required(_FACTORY, "vllm")
    for each, name in (
        (factory.WeightTransferEngineFactory, "MoeP2pEngine"),
        (factory.WeightTransferTrainerFactory, "MoeP2pTrainer"),
    ):
        if NAME not in each._registry:
            each.register_engine(NAME, __name__, name)


def plugin() -> None:
    """Part of the entry point `vllm.general_plugins`, in each process of vLLM."""
    if optional(_FACTORY) is not None:
        register()
    core = sys.modules.get(_CORE)  # in the process that has it, it is imported before plugins
    if core is not None:
        guard(core.EngineCore)


def guard(core: Any) -> None:
    """core: vLLM's EngineCore. Its resume raises while a worker is dirty; where `prefix_cache` says
    so, it forgets older KV in the call in which its workers take a version."""
    resume, call = core.resume_scheduler, core.collective_rpc
    if hasattr(resume, "guarded"):
        return

    @functools.wraps(resume)
    def resume_scheduler(self: Any) -> None:
        self.model_executor.collective_rpc(require_clean)
        resume(self)

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        found = call(self, method, *args, **kwargs)
        if method == "finish_weight_update" and any(call(self, resets_prefix_cache)):
            self.reset_prefix_cache(reset_running_requests=True)
        return found

    resume_scheduler.guarded = True  # type: ignore[attr-defined]
    core.resume_scheduler, core.collective_rpc = resume_scheduler, collective_rpc


def require_clean(worker: Any) -> None:
    check = getattr(getattr(worker, "weight_transfer_engine", None), "require_clean", None)
    if check is not None:
        check()


def resets_prefix_cache(worker: Any) -> bool:
    engine = getattr(worker, "weight_transfer_engine", None)
    return getattr(engine, "resets_prefix_cache", False)


_OURS: dict[str, tuple[type, str, dict[str, str]]] = {
    "MoeP2pInit": (Init, "WeightTransferInitInfo", {}),
    "MoeP2pUpdate": (Update, "WeightTransferUpdateInfo", {}),
    "MoeP2pTrainerInit": (TrainerInit, "TrainerInitInfo", {}),
    "MoeP2pEngine": (
        Receiver,
        "WeightTransferEngine",
        {"init_info_cls": "MoeP2pInit", "update_info_cls": "MoeP2pUpdate"},
    ),
    "MoeP2pTrainer": (
        Sender,
        "TrainerWeightTransferEngine",
        {"init_info_cls": "MoeP2pTrainerInit"},
    ),
}


@functools.cache
def _class(name: str) -> Any:
    ours, base, infos = _OURS[name]
    made = derived(ours, getattr(required(_BASE, "vllm"), base))
    made.__name__ = made.__qualname__ = name
    for field, info in infos.items():
        setattr(made, field, _class(info))
    missing = sorted(getattr(made, "__abstractmethods__", ()))
    require(not missing, f"this vLLM asks {base} for {', '.join(missing)}, which {name} lacks")
    return made


def __getattr__(name: str) -> Any:
    if name in _OURS:
        return _class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
