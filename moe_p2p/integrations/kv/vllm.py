"""vLLM's KV connector over moe_p2p.kv: prefill pushes pages layer by layer, in one line.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MoeP2pConnector",
        "kv_connector_module_path": "moe_p2p.integrations.kv.vllm", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"store": "HOST:PORT"}}'

decode: "kv_consumer"; "kv_both": the kv_transfer_params of a request name its role.

Other fields of kv_connector_extra_config: "host", the address under which others reach this engine;
"verify" of KVReceiver, "fence", fields of KVTimeouts. docs/kv.md lists what is carried.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from moe_p2p import log
from moe_p2p.errors import UnavailableError, make
from moe_p2p.integrations import required
from moe_p2p.integrations.kv.vllm_layout import check_parallelism
from moe_p2p.integrations.kv.vllm_scheduler import KVScheduler, StepMeta
from moe_p2p.integrations.kv.vllm_stats import prom_class, stats_class
from moe_p2p.integrations.kv.vllm_worker import KVWorkerHalf
from moe_p2p.integrations.kv.worker import serve_store
from moe_p2p.kv.worker import KVTimeouts

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_SETTINGS = {"store", "host", "verify", "fence", *KVTimeouts.__dataclass_fields__}


class Connector:
    """MoeP2pConnector. Of one role: the scheduler's, or a worker's. vLLM makes one of each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        config = vllm_config.kv_transfer_config
        check_parallelism(vllm_config)
        store = config.get_from_extra_config("store", f"127.0.0.1:{config.kv_port}")
        given = (vllm_config, kv_cache_config, config.engine_id, store)
        self._scheduler: Any = None
        self._worker: Any = None
        if role.name == "SCHEDULER":
            serve_store(store)
            unknown = config.kv_connector_extra_config.keys() - _SETTINGS
            if unknown:
                log.warning(
                    f"MoeP2pConnector does not know {', '.join(sorted(unknown))} of "
                    f"kv_connector_extra_config, only {', '.join(sorted(_SETTINGS))}"
                )
            self._scheduler = KVScheduler(*given)
        else:
            self._worker = KVWorkerHalf(*given)
        self._by_block = len(kv_cache_config.kv_cache_groups) == 1

    # --- what vLLM asks of the class ---

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outside of tokens, so that a rank's share of a page is one run of bytes."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False  # replays signal their layers

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    # --- scheduler ---

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids  # type: ignore[attr-defined]
        return groups

    def on_new_request(self, request: Any) -> None:
        self._scheduler.added(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found: tuple[int, bool] = self._scheduler.num_matched(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return _meta_class()(self._scheduler.step_meta(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        found: tuple[bool, dict[str, Any] | None] = self._scheduler.finished(request, block_ids)
        return found

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and bool(self._scheduler.has_news())

    def has_pending_block_frees(self) -> bool:
        return bool(self._scheduler.about_to_free())

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        moving = None if meta is None else meta.moving
        self._scheduler.heard(moving, connector_output.finished_sending or ())

    # --- worker ---

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        self._worker.begin_step(connector_metadata.step)

    def has_connector_metadata(self) -> bool:
        """Yes during a capture: vLLM then calls `save_kv_layer`, and replays signal too."""
        capturing = self._worker is not None and self._worker.capturing()
        return capturing or bool(super().has_connector_metadata())  # type: ignore[misc]

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.preempt(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        found = self._worker.results(finished_req_ids, by_block=True)
        return found.sent or None, found.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = self._worker.results(finished_req_ids, by_block=self._by_block)
        results = required(_V1, "vllm").KVConnectorTransferResults
        return results(found.sent, found.received, found.failed)

    def build_connector_worker_meta(self) -> Any:
        moving = self._worker.take_moving()
        return None if moving is None else _worker_meta_class()(moving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        found: set[int] = self._worker.take_bad_blocks()
        return found

    def get_kv_connector_stats(self) -> Any:
        if self._worker is None:
            return None
        totals = self._worker.new_totals()
        return stats_class()(totals.to_dict()) if totals.requests else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return stats_class()(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return prom_class()(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _step(self) -> StepMeta:
        meta: Any = self._get_connector_metadata()  # type: ignore[attr-defined]
        step: StepMeta = meta.step
        return step


@functools.cache
def _connector_class() -> Any:
    base = required(_V1, "vllm")
    source = getattr(required("vllm.v1.metrics.cache_hit_source", "vllm"), "CacheHitSource", None)
    body = {"__doc__": Connector.__doc__, "__module__": __name__}
    if source is not None:
        body["_cache_hit_source"] = source.P2P
    bases = (Connector, base.KVConnectorBase_V1, base.SupportsHMA)
    made = type(base.KVConnectorBase_V1)("MoeP2pConnector", bases, body)
    missing = sorted(getattr(made, "__abstractmethods__", ()))
    if missing:
        raise make(
            UnavailableError,
            f"this vLLM asks connectors for {', '.join(missing)}, which MoeP2pConnector does not "
            "have: use a version of vLLM that docs/engines.md names",
        )
    with suppress(ValueError):  # MultiConnector looks for its children's stats by name alone
        factory = required(_FACTORY, "vllm").KVConnectorFactory
        factory.register_connector("MoeP2pConnector", __name__, "MoeP2pConnector")
    return made


@functools.cache
def _meta_class() -> Any:
    """What vLLM carries from its scheduler to its workers; it is pickled by this module's name."""
    base = required(_V1, "vllm").KVConnectorMetadata

    def init(self: Any, step: StepMeta) -> None:
        self.step = step

    return type(base)("MoeP2pStepMeta", (base,), {"__init__": init, "__module__": __name__})


@functools.cache
def _worker_meta_class() -> Any:
    """What workers say to the scheduler, pickled likewise. moving: requests that are being sent."""
    base = required(_V1, "vllm").KVConnectorWorkerMetadata

    def init(self: Any, moving: set[str]) -> None:
        self.moving = moving

    def aggregate(self: Any, other: Any) -> Any:  # of another rank
        return type(self)(self.moving | other.moving)

    body = {"__init__": init, "aggregate": aggregate, "__module__": __name__}
    return type(base)("MoeP2pWorkerMeta", (base,), body)


def __getattr__(name: str) -> Any:
    if name == "MoeP2pConnector":
        return _connector_class()
    if name == "MoeP2pStepMeta":
        return _meta_class()
    if name == "MoeP2pWorkerMeta":
        return _worker_meta_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
