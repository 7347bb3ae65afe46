"""An engine of vLLM in a test: its real scheduler, KV cache manager and model-runner side of the KV
connector, around a model that computes nothing but the bytes of its KV pages.

The bytes of a token are a function of layer, head, position and all tokens up to it, so a page from
the prefix cache, from another engine or computed anew has to hold the same ones.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.engines import absent

HEAD_SIZE = 4
MEMORIES: list[Any] = []  # that were ever registered with an Engine
# Of structured outputs, which no request here asks for.
GRAMMARS = types.SimpleNamespace(
    accept_tokens=lambda *_, **__: True, should_advance=lambda *_: False, reset=lambda *_: None
)


def begin() -> None:
    """Makes vLLM's files importable in this process."""
    absent.importing("vllm", absent.VLLM.replace("vllm.distributed.kv_transfer", ""))
    import vllm.platforms
    from vllm.platforms import cuda

    cuda.CudaPlatform.get_device_capability = classmethod(lambda *_, **__: None)
    vllm.platforms._current_platform = cuda.CudaPlatform()
    from moe_p2p.engine.engine import Engine as Transport

    register = Transport.register
    Transport.register = lambda *given, **more: remember(register(*given, **more))
    from vllm import _custom_ops

    for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
        setattr(_custom_ops, f"cutlass_{name}", lambda *_: False)  # asked while modules load


def remember(memory: Any) -> Any:
    MEMORIES.append(memory)
    return memory


@dataclass(frozen=True)
class Model:
    """window: of every second layer, in a group of its own; None: one group."""

    layers: int = 3
    heads: int = 2
    window: int | None = None

    def names(self, group: int) -> list[str]:
        every = range(self.layers)
        mine = [i for i in every if self.window is None or i % 2 == group]
        return [f"model.layers.{i}.self_attn.attn" for i in mine]

    @property
    def num_groups(self) -> int:
        return 1 if self.window is None else 2


def number(layer: str) -> int:
    return int(layer.split(".")[2])


def kv_bytes(layer: int, heads: range, tokens: Sequence[int], begin: int) -> torch.Tensor:
    """[tokens, heads, 2 * HEAD_SIZE] bf16 of tokens from `begin` on."""
    prefix, sums = 0, []
    for at, token in enumerate(tokens):
        prefix = (prefix * 31 + token + 7 * at) % 65521
        sums.append(prefix)
    at = torch.tensor(sums[begin:], dtype=torch.int64)[:, None, None]
    head = torch.tensor(list(heads), dtype=torch.int64)[None, :, None]
    value = torch.arange(2 * HEAD_SIZE)[None, None, :]
    bits = (at * 17 + layer * 101 + head * 57 + value * 3 + 1) % 32003
    return bits.to(torch.int16).view(torch.bfloat16)


def cache_config(
    model: Model, *, tp: int, block: int, blocks: int, layout: str, stage: range | None = None
) -> Any:
    """As vLLM's planner makes it: groups of equal shape that lie over each other in memory. stage:
    the layers of a rank, where there are pipeline stages."""
    from vllm.v1 import kv_cache_interface as kv

    heads = max(model.heads // tp, 1)
    shape = {
        "block_size": block,
        "num_kv_heads": heads,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
        "max_tp_shards": model.heads,
    }
    specs = [kv.FullAttentionSpec(**shape)]
    if model.window is not None:
        specs.append(kv.SlidingWindowSpec(**shape, sliding_window=model.window))
    groups = [
        kv.KVCacheGroupSpec([n for n in model.names(at) if stage is None or number(n) in stage], s)
        for at, s in enumerate(specs)
    ]
    most = max(len(group.layer_names) for group in groups)
    page = specs[0].page_size_bytes
    outer = layout.startswith("B")
    tensors = [
        kv.KVCacheTensor(
            size=page * blocks * most,
            layers=group.layer_names,
            layer_stride=page if outer else page * blocks,
            block_stride=page * most if outer else page,
        )
        for group in groups
    ]
    return kv.KVCacheConfig(blocks, tensors, groups, kv_cache_layout=layout)


def vllm_config(
    role: str,
    engine_id: str,
    *,
    tp: int,
    rank: int,
    block: int,
    blocks: int,
    extra: dict[str, Any],
    pp: int = 1,
    layers: int = 3,
) -> Any:
    from vllm.config import CacheConfig, KVTransferConfig, SchedulerConfig

    budget = extra.pop("max_num_batched_tokens", 64)
    policy = extra.pop("kv_load_failure_policy", "fail")
    stores = {name: extra.pop(name, None) for name in ("disk_first", "disk_last")}
    ours: dict[str, Any] = {
        "kv_connector": "MoeP2pConnector",
        "kv_connector_module_path": "moe_p2p.integrations.kv.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    first, last = (
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": at},
        }
        for at in stores.values()
    )
    multi = any(stores.values())
    if multi:
        connectors = [ours, last] if stores["disk_last"] else [first, ours]
        of_all = {"connectors": connectors}
        ours = {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_connector_extra_config": of_all,
        }
    transfer = KVTransferConfig(engine_id=engine_id, kv_load_failure_policy=policy, **ours)
    scheduler = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_model_len=512,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        watermark=0.0,
        scheduler_reserve_full_isl=False,
        disable_hybrid_kv_cache_manager=multi,  # ExampleConnector has no groups
    )
    cache = CacheConfig(block_size=block, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    parallel = types.SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        data_parallel_size=1,
        data_parallel_index=0,
        rank=rank,
    )
    return Config(
        scheduler_config=scheduler,
        cache_config=cache,
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=types.SimpleNamespace(
            uses_mrope=False,
            is_encoder_decoder=False,
            max_model_len=512,
            runner_type="generate",
            is_diffusion=False,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
            use_mla=False,
            get_total_num_hidden_layers=lambda: layers,
            enable_return_routed_experts=False,
        ),
        observability_config=types.SimpleNamespace(
            kv_cache_metrics=False, enable_mfu_metrics=False, per_request_spec_decode_metrics="none"
        ),
        ec_manager_config=types.SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=types.SimpleNamespace(enabled=False),
        use_v2_model_runner=True,
        max_concurrent_batches=1,
    )


class Config(types.SimpleNamespace):
    """What the scheduler reads of VllmConfig; what is not named here is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0 if name.startswith(("num_", "max_")) else None


class Engine:
    """One instance. step() is one step of EngineCore; ranks of tensor parallelism take turns."""

    def __init__(
        self,
        role: str,
        store: str,
        *,
        model: Model = Model(),
        tp: int = 1,
        stages: tuple[int, ...] = (),
        block: int = 4,
        blocks: int = 64,
        layout: str = "LBHNC",
        graphs: bool = False,
        **extra: Any,
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler

        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(block, sha256)
        self.name = extra.pop("engine_id", f"{role}-{id(self):x}")
        self.model, self.tp, self.block, self.graphs = model, tp, block, graphs
        self.store = extra["store"] = store

        def config(rank: int) -> Any:
            return vllm_config(
                role,
                self.name,
                tp=tp,
                rank=rank,
                block=block,
                blocks=blocks,
                extra=dict(extra),
                pp=max(len(stages), 1),
                layers=model.layers,
            )

        sizes = stages or (model.layers,)
        caches = [
            cache_config(
                model,
                tp=tp,
                block=block,
                blocks=blocks,
                layout=layout,
                stage=range(sum(sizes[:at]), sum(sizes[: at + 1])),
            )
            for at in range(len(sizes))
        ]
        self.caches = caches[0]
        self.scheduler = Scheduler(
            config(0),
            self.caches,
            structured_output_manager=GRAMMARS,
            block_size=block,
            log_stats=False,
        )
        self.idle = self.free_blocks
        self.ranks = [
            Rank(self, config(rank), rank, layout, caches[rank // tp])
            for rank in range(tp * len(sizes))
        ]
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.aggregator = KVOutputAggregator(len(self.ranks))
        self.stats: list[Any] = []  # what ranks reported, step by step
        self.answers: dict[str, dict[str, Any]] = {}  # kv_transfer_params of finished requests
        self.finished: dict[str, str] = {}  # finish reasons
        self.computed: list[tuple[str, int, int]] = []  # request, tokens begin to end, in order
        self.checked: dict[str, int] = {}  # tokens whose bytes were right before the first forward

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name: str, tokens: Sequence[int], params: Any = None, max_tokens: int = 1) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        sampling.update_from_generation_config({}, 0)
        request = Request(name, list(tokens), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        output = self.scheduler.schedule()
        # As processes send them.
        sent = pickle.loads(pickle.dumps(output))
        made = [pickle.loads(pickle.dumps(rank.execute(sent))) for rank in self.ranks]
        for each in made:
            if each.kv_connector_output and each.kv_connector_output.kv_connector_stats:
                self.stats.append(copy.copy(each.kv_connector_output.kv_connector_stats))
        whole = self.aggregator.aggregate(made) if len(made) > 1 else made[0]
        for core in self.scheduler.update_from_output(output, whole).values():
            for each in core.outputs:
                if each.finish_reason is not None:
                    self.finished[each.request_id] = str(each.finish_reason)
                    if each.kv_transfer_params:
                        self.answers[each.request_id] = each.kv_transfer_params

    def sleep(self) -> None:
        """After a pause of mode "keep": transfers may be under way."""
        for rank in self.ranks:
            rank.connector.unregister_kv_caches()
            known = [
                memory for memory in MEMORIES if memory.tensor.data_ptr() == rank.raw.data_ptr()
            ]
            assert known, "it was registered"
            assert not any(memory.registered for memory in known)
            rank.protect(0)

    def wake_up(self) -> None:
        for rank in self.ranks:
            rank.protect(mmap.PROT_READ | mmap.PROT_WRITE)
            rank.raw.fill_(-1)
            rank.connector.restore_kv_caches()

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()


class Rank:
    """A worker: its caches, its connector, and vLLM's own ActiveKVConnector around it."""

    def __init__(self, engine: Engine, config: Any, rank: int, layout: str, caches: Any) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        self.engine, self.rank, self.state = engine, rank, kv_transfer_state
        self.caches = caches
        self.memory = mmap.mmap(-1, caches.kv_cache_tensors[0].size)
        self.raw = raw = torch.frombuffer(self.memory, dtype=torch.int8)
        self.tensors: dict[str, torch.Tensor] = {}
        for tensor, group in zip(caches.kv_cache_tensors, caches.kv_cache_groups, strict=True):
            views = create_kv_cache_views(
                raw, group.kv_cache_spec, caches.num_blocks, KVCacheLayout[layout], tensor
            )
            self.tensors.update(zip(tensor.layers, views, strict=True))
        self.connector: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, caches
        )
        of_all = getattr(self.connector, "sub_connectors", [self.connector])
        self.half = next(each._worker for each in of_all if hasattr(each, "_worker"))
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.active = ActiveKVConnector(config, self.tensors)
        heads = max(engine.model.heads // engine.tp, 1)
        first = rank % engine.tp * engine.model.heads // engine.tp
        self.heads = range(first, first + heads)
        self.blocks: dict[str, tuple[list[int], ...]] = {}

        def attention(writes: Any, layer_name: str) -> None:
            for write in writes:
                write(layer_name)

        self.attention = maybe_transfer_kv_layer(attention)

    def protect(self, how: int) -> None:
        """A late write to what sleep has unmapped ends this process."""
        libc = ctypes.CDLL(None, use_errno=True)
        size = -(-len(self.memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        done = libc.mprotect(ctypes.c_void_p(self.raw.data_ptr()), ctypes.c_size_t(size), how)
        assert done == 0, ctypes.get_errno()

    def execute(self, output: Any) -> Any:
        """As GPUModelRunner does around a forward pass."""
        from vllm.forward_context import override_forward_context
        from vllm.v1.outputs import ModelRunnerOutput

        self.state._KV_CONNECTOR_AGENT = self.connector
        layers = {
            name: types.SimpleNamespace(kv_cache=tensor) for name, tensor in self.tensors.items()
        }
        context = types.SimpleNamespace(
            attn_metadata={name: object() for name in layers},
            no_compile_layers=layers,
            slot_mapping={},
        )
        with override_forward_context(context):
            if not output.total_num_scheduled_tokens:
                return self.active.no_forward(output)
            self.active.pre_forward(output)
            writes, sampled = self._work(output)
            for name in sorted(self.tensors):
                if self.engine.graphs:  # a replay runs no Python between layers
                    for write in writes:
                        write(name)
                else:
                    self.attention(writes, name)
            self.active.finish_forward()
            made = self.active.post_forward(output.finished_req_ids)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: at for at, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=made,
        )

    def _work(self, output: Any) -> tuple[list[Any], dict[str, list[int]]]:
        """What each layer writes, and the tokens sampled, for each scheduled request."""
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = tuple(list(ids) for ids in new.block_ids)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            starts[name] = cached.num_computed_tokens[at]
            new = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                self.blocks[name] = tuple(list(ids) for ids in new)
            elif new is not None:
                for have, more in zip(self.blocks[name], new, strict=True):
                    have.extend(more)
        writes, sampled = [], {}
        for name, begin in starts.items():
            request = self.engine.scheduler.requests[name]
            end = begin + output.num_scheduled_tokens[name]
            tokens = list(request.all_token_ids)
            self.check(name, tokens, begin)
            if self.rank == 0:
                self.engine.computed.append((name, begin, end))
            writes.append(
                lambda layer, n=name, t=tokens, b=begin, e=end: self.write(n, layer, t, b, e)
            )
            sampled[name] = [7] if end >= len(tokens) else []
        return writes, sampled

    def places(self, name: str, layer: str, begin: int, end: int) -> tuple[Any, Any]:
        groups = self.caches.kv_cache_groups
        group = next(at for at, each in enumerate(groups) if layer in each.layer_names)
        at = torch.arange(begin, end)
        ids = torch.tensor(self.blocks[name][group])[at // self.engine.block]
        return ids, at % self.engine.block

    def write(self, name: str, layer: str, tokens: list[int], begin: int, end: int) -> None:
        ids, within = self.places(name, layer, begin, end)
        self.tensors[layer][ids, :, within] = kv_bytes(
            number(layer), self.heads, tokens[:end], begin
        )

    def check(self, name: str, tokens: list[int], end: int) -> None:
        """All that attention reads of tokens before `end` is what a prefiller wrote."""
        for layer in self.tensors:
            begin = 0
            if self.engine.model.window is not None and number(layer) % 2:
                # vLLM keeps one token less for the last one of a prompt, computed again.
                again = end + 1 == self.engine.scheduler.requests[name].num_prompt_tokens
                begin = max(end - self.engine.model.window + 1 + again, 0)
            ids, within = self.places(name, layer, begin, end)
            want = kv_bytes(number(layer), self.heads, tokens[:end], begin)
            got = self.tensors[layer][ids, :, within]
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (
                f"{self.engine.name}/{self.rank}: request {name}, {layer}, tokens {begin} to {end}"
            )
        self.engine.checked.setdefault(name, end)
