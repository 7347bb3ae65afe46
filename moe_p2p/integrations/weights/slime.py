"""Weight updates of slime, in the place of its UpdateWeightFromDistributed.

    --custom-megatron-init-path moe_p2p.integrations.weights.slime.install
    --sglang-custom-weight-loader moe_p2p.integrations.weights.sglang.load

slime gathers parameters over tensor and expert parallelism, and names them as the checkpoint does,
on one rank of each pipeline stage: these ranks are the trainers. What they gathered stays in host
memory, and is written from there into the tensors of all SGLang engines, while those generate;
slime's own updater pauses them before it gathers. slime's gather cannot be avoided this way.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import AbortedError, UnavailableError, make, require
from moe_p2p.integrations import derived, put, required
from moe_p2p.integrations.weights.engine import Fleet, heard, own_address
from moe_p2p.integrations.weights.sglang import SglangUpdates
from moe_p2p.weights import Param, WeightLayout, WeightTrainer, dtype_name
from moe_p2p.weights.layout import everyones

_FOLDER = "slime.backends.megatron_utils"
_T = TypeVar("_T")
_TIMEOUT_S = 300.0  # of a set-up or an update; engines may still finish requests


class Updater:
    """On each rank of slime's trainers, which all call it alike."""

    rollout_engines: Sequence[Any] = ()
    weight_version: int
    quantization_config: Mapping[str, Any] | None
    _send_weights: Callable[[None], None]  # slime's: hands over each chunk that it has gathered

    def __init__(self, *given: Any, **by: Any) -> None:
        super().__init__(*given, **by)
        quantized = (self.quantization_config or {}).get("quant_method")
        if quantized == "compressed-tensors":
            text = "moe_p2p does not carry slime's int4 weights of compressed-tensors"
            raise make(UnavailableError, f"{text}; leave moe_p2p's install out")
        self._host = dict[str, Tensor]()  # what this rank has gathered, by the checkpoint's names
        self._updates = list[SglangUpdates]()  # of rank 0: one for each engine
        self._trainer: WeightTrainer | None = None
        self._engine: Engine | None = None
        # Rank 0 serves it as long as this lives: engines leave the fleet before there.
        self._store: Any = None
        self._fleets = 0
        self._is_set_up = False

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Called again if engines were restarted. The next update sets up all of them."""
        self.disconnect_rollout_engines()
        this: Any = self
        for config in engine_parallel_configs or ():
            if config.get("pp_size", 1) > 1:
                text = f"moe_p2p does not carry weights of SGLang with pp_size={config['pp_size']}"
                raise make(UnavailableError, f"{text}; start engines with --sglang-pp-size 1")
        mpu = required("megatron.core.parallel_state", "slime")
        self.rollout_engines = rollout_engines
        default = [this.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        self._ranks_of = list(engine_gpu_counts or default)
        this._is_pp_src_rank = (
            mpu.get_data_parallel_rank(with_context_parallel=True) == 0
            and mpu.get_tensor_model_parallel_rank() == 0
        )
        this._group_name = "moe_p2p"

    def disconnect_rollout_engines(self) -> None:
        for each in (self._trainer, self._engine):
            if each is not None:
                each.close()
        self._trainer = self._engine = None
        self._updates, self._is_set_up = [], False

    @torch.no_grad()
    def update_weights(self) -> None:
        self.weight_version += 1
        group = required("slime.utils.distributed_utils", "slime").get_gloo_group()
        _on_all(group, lambda: self._send_weights(None))
        if self.rollout_engines and not self._is_set_up:
            fleet = _on_all(group, self._serve)
            _on_all(group, lambda: self._set_up(group, fleet))
            self._is_set_up = True
        _on_all(group, self._update)

    def _update(self) -> None:
        if self._trainer is not None:
            update: Callable[[], None] = functools.partial(
                self._trainer.update, self.weight_version
            )
            for each in self._updates:  # each around the others: bytes move once
                update = functools.partial(each.send, self.weight_version, update, requests="abort")
            update()

    def _update_bucket_weights_from_distributed(
        self,
        converted_named_tensors: list[tuple[str, Tensor]],
        pbar: Any = None,
        load_format: str | None = None,
    ) -> None:
        """Of `_send_weights`, for each chunk on ranks that gather."""
        for name, tensor in converted_named_tensors:
            if name not in self._host:
                self._host[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
            self._host[name].copy_(tensor)
        converted_named_tensors.clear()

    def _serve(self) -> Fleet | None:
        if dist.get_rank() != 0:
            return None
        self._fleets += 1
        name = f"slime {self._fleets}"
        fleet = Fleet(host=own_address(), port=0, name=name, timeout_s=_TIMEOUT_S)
        self._store = self._store or fleet.store(serves=True)
        return replace(fleet, port=self._store.port)

    def _set_up(self, group: Any, fleet: Fleet | None) -> None:
        rank = dist.get_rank()
        mine = [(n, tuple(each.shape), dtype_name(each.dtype)) for n, each in self._host.items()]
        said = json.dumps([asdict(fleet) if fleet else None, mine]).encode()
        found = [json.loads(each) for each in everyones(said, group)]
        fleet = Fleet(**found[0][0])
        trainers = [at for at, (_, params) in enumerate(found) if params]
        if rank not in trainers:
            return
        require(trainers[0] == 0, f"slime_weights: rank 0 gathers nothing, but {trainers} do")
        params = [
            Param(name, tuple(shape), dtype, (number,))
            for number, at in enumerate(trainers)
            for name, shape, dtype in found[at][1]
        ]
        cuda, number = torch.cuda.is_available(), trainers.index(rank)
        store = self._store or fleet.store()
        with heard(store, fleet.name, f"trainer {number}"):
            layout = WeightLayout(tuple(params), len(trainers))
            self._engine = Engine(
                label=f"trainer {rank}", gpu=torch.cuda.current_device() if cuda else None
            )
            if rank == 0:
                self._updates = self._updates_of(fleet)
        with ExitStack() as stack:
            for each in self._updates:
                stack.enter_context(each.opening())
            self._trainer = WeightTrainer(
                self._engine,
                store,
                layout,
                number,
                self._host,
                name=fleet.name,
                timeout_s=fleet.timeout_s,
                device="cuda" if cuda else None,
            )

    def _updates_of(self, fleet: Fleet) -> list[SglangUpdates]:
        ray = required("ray", "slime")
        urls = ray.get([engine.get_url.remote() for engine in self.rollout_engines])
        firsts = itertools.accumulate(self._ranks_of, initial=0)
        return [
            SglangUpdates(
                url,
                fleet,
                tp=ranks,
                first=first,
                world_size=sum(self._ranks_of),
                direct=not self.quantization_config,
            )
            for url, ranks, first in zip(urls, self._ranks_of, firsts, strict=False)
        ]


def _on_all(group: Any, call: Callable[[], _T]) -> _T:
    """By all ranks, also those that gather nothing: what one raises, all raise."""
    failed: Exception | None = None
    try:
        found = call()
    except Exception as error:
        failed = error
    said = b"" if failed is None else (str(failed) or repr(failed)).encode()
    heard = everyones(said, group)
    if failed is not None:
        raise failed
    for rank, text in enumerate(heard):
        if text:
            raise make(
                AbortedError, f"rank {rank} of slime failed: {text.decode(errors='replace')}"
            )
    return found


def install(args: Any = None) -> None:
    """slime calls it with its arguments in each process of its trainers, before it makes one."""
    base = required(f"{_FOLDER}.update_weight.update_weight_from_distributed", "slime")
    made = derived(Updater, base.UpdateWeightFromDistributed)
    made.__name__ = "MoeP2pUpdateWeight"
    put({"actor": required(f"{_FOLDER}.actor", "slime")}, {"UpdateWeightFromDistributed": made})
