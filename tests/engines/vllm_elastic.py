"""A worker of vLLM for its elastic executor, on a CPU: vLLM's own groups, EPLB state, executor and
manager; a model of two MoE layers, whose experts are told apart by their weights.

What is replaced is what needs CUDA, in `on_cpus`, and the model runner around the model.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.engines import vllm_ranks
from tests.support.ranks import Rank

MOST, EACH, LAYERS, LOGICAL = 4, 3, 2, 5  # ranks, slots of a rank, layers, logical experts
TOKENS, HIDDEN, TOPK = 6, 2048, 3
HASH = "model"
# Backends that vLLM asks for before nixl_ep.
OTHERS = (
    *("use_deepep_ht_kernels", "use_deepep_ll_kernels", "use_deepep_v2_kernels"),
    *("use_mori_kernels", "use_moonep_kernels", "use_ag_rs_all2all_kernels"),
    *("use_fi_nvl_two_sided_kernels", "use_fi_nvl_one_sided_kernels"),
)


class Stream:
    """A stream of a CPU: what was launched is done. Also an event of it."""

    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def on_cpus() -> None:
    """Replaces what needs CUDA; the lists below are all of it."""
    from vllm.distributed import stateless_coordinator
    from vllm.distributed.device_communicators import cuda_communicator
    from vllm.distributed.elastic_ep import elastic_execute
    from vllm.distributed.eplb import eplb_state
    from vllm.platforms import cuda

    # torch's devices, streams and events
    for name in ("synchronize", "empty_cache", "set_device_index", "set_stream"):
        setattr(torch.accelerator, name, lambda *_: None)
    torch.accelerator.current_stream = torch.accelerator.current_accelerator = lambda *_: None
    torch.Stream = torch.Event = Stream  # type: ignore[assignment, misc]
    # vLLM's questions about the device
    cuda.CudaPlatform.set_device = classmethod(lambda *_: None)
    cuda.CudaPlatform.is_cuda_alike = lambda _: False
    eplb_state.PIN_MEMORY = False
    # NCCL
    stateless_coordinator.CudaCommunicator = communicator_class()
    cuda_communicator.CudaCommunicator = stateless_coordinator.CudaCommunicator
    # kernels' warm-up and their tuning
    elastic_execute.kernel_warmup = lambda *_, **__: None
    elastic_execute.sync_flashinfer_autotune_cache = lambda *_: None


def communicator_class() -> Any:
    """vLLM's base with what the executor calls, over gloo."""
    from vllm.distributed.device_communicators import all2all, base_device_communicator

    class OnCpus(base_device_communicator.DeviceCommunicatorBase):
        def __init__(self, *given: Any, tcp_store_group: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            if self.use_all2all:
                assert self.all2all_backend == "nixl_ep"
                self.all2all_manager = all2all.NixlEPAll2AllManager(self.cpu_group, tcp_store_group)

        def batch_isend_irecv(self, ops: list[Any]) -> None:
            calls = {dist.isend: self.device_group.send, dist.irecv: self.device_group.recv}
            for work in [calls[each.op]([each.tensor], each.group_peer, 0) for each in ops]:
                work.wait()

        def destroy(self) -> None:
            if self.all2all_manager is not None:
                self.all2all_manager.destroy()

    return OnCpus


@dataclass
class MoEConfig:
    """The part of FusedMoEConfig that elastic EP changes."""

    num_experts: int
    num_local_experts: int
    moe_parallel_config: Any


class MoERunnerInterface(torch.nn.Module):
    """vLLM knows MoE layers by the name of a base."""


class Layer(MoERunnerInterface):
    """Weights of expert e of layer n: w13 is 10 * n + e + 1, w2 is 1 or 2."""

    def __init__(self, number: int, held: list[int]) -> None:
        super().__init__()
        from vllm.distributed.eplb.eplb_state import EplbLayerState

        self.number, self.eplb_state = number, EplbLayerState()
        self.w13 = torch.nn.Parameter(torch.zeros(EACH, 16), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.zeros(EACH, 3, 4, dtype=torch.bfloat16), False)
        for slot, expert in enumerate(held):
            self.w13[slot], self.w2[slot] = 10 * number + expert + 1, expert % 2 + 1
        self._quant_method = types.SimpleNamespace(wraps_legacy_quant_method=False)

    def get_expert_weights(self) -> list[Tensor]:
        return [each.view(EACH, -1) for each in (self.w13, self.w2)]

    def set_eplb_state(self, **state: Any) -> None:
        self.eplb_state.set_layer_state(**state)

    def _set_moe_config(self, config: MoEConfig) -> None:
        self.moe_config = config

    def factor(self, expert: Tensor) -> Tensor:
        return (10 * self.number + expert + 1) * (expert % 2 + 1)

    def held(self, slot: int) -> float:
        """The factor of the expert in a slot, all of whose weights are of one expert."""
        found = [set(each[slot].flatten().tolist()) for each in (self.w13, self.w2)]
        assert all(len(each) == 1 for each in found), found
        return float(found[0].pop() * found[1].pop())


def model_class() -> Any:
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    class Model(torch.nn.Module, MixtureOfExperts):
        num_moe_layers, num_expert_groups, num_shared_experts = LAYERS, 1, 0
        num_logical_experts = num_routed_experts = LOGICAL
        num_local_physical_experts = EACH

        def __init__(self, size: int, held: list[int], gate: float) -> None:
            super().__init__()
            self.gate = torch.nn.Parameter(torch.full((5, 7), gate).t(), requires_grad=False)
            self.moe_layers = torch.nn.ModuleList(Layer(n, held) for n in range(LAYERS))
            self.update_physical_experts_metadata(size * EACH, EACH)

        def update_physical_experts_metadata(
            self, num_physical_experts: int, num_local_physical_experts: int
        ) -> None:
            self.num_physical_experts = num_physical_experts
            self.num_redundant_experts = num_physical_experts - LOGICAL

    return Model


class ModelConfig:
    model = HASH
    enforce_eager = True

    def compute_hash(self) -> str:
        return HASH


class Runner:
    """The part of GPUModelRunner that the executor calls; its step is the layers' calls."""

    max_num_tokens, eep_eplb_suppressed = TOKENS, False

    def __init__(self, worker: Worker) -> None:
        self.worker, self.model_config = worker, ModelConfig()
        self.alone: list[int] = []  # tokens of steps beside the others
        self.eplb_state: Any = None

    def get_model(self) -> Any:
        return self.model

    def load(self, size: int, *, dummy: bool) -> None:
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.distributed.parallel_state import get_ep_group
        from vllm.model_executor.layers.fused_moe import all2all_utils
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

        rank = self.worker.rank
        held = [] if dummy else [s % LOGICAL for s in range(rank * EACH, (rank + 1) * EACH)]
        self.model = model_class()(size, held, gate=0.0 if dummy else 3.0)
        parallel = types.SimpleNamespace(
            use_passthrough_all2all=False, use_all2all_kernels=True, sp_size=1
        )
        moe = types.SimpleNamespace(
            moe_parallel_config=parallel,
            **dict.fromkeys(OTHERS, False),
            use_nixl_ep_kernels=True,
            max_num_tokens=TOKENS,
            hidden_dim=HIDDEN,
            num_local_experts=EACH,
        )
        for layer in self.model.moe_layers:
            layer._set_moe_config(MoEConfig(size * EACH, EACH, None))
        self.quant = FusedMoEQuantConfig.make()
        self.manager = get_ep_group().device_communicator.all2all_manager
        self.call = all2all_utils.maybe_make_prepare_finalize(
            moe, self.quant, all2all_manager=self.manager
        )
        self.eplb_state = EplbState(self.worker.vllm_config.parallel_config, torch.device("cpu"))
        self.eplb_state.device_index = 0
        self.eplb_state.add_model(self.model, self.model_config)
        if not dummy:
            self.eplb_state.start_async_loop()

    def setup_eplb_from_mapping(self, mapping: Tensor) -> None:
        self.eplb_state.update_mapping(self.model_config, mapping)

    @contextlib.contextmanager
    def preserve_serving_state(self) -> Iterator[None]:
        yield

    def _dummy_run(self, num_tokens: int, **_: Any) -> None:
        """Of a rank that warms up alone: its mask says so, and tokens stay with its experts."""
        mask = self.manager.query_active_mask()
        assert mask.sum() == self.manager.world_size - 1, mask
        assert mask[self.worker.rank] == 0
        for layer in self.model.moe_layers:
            first = self.worker.rank * EACH
            self.alone.append(len(self.rows(layer, 0, torch.full((num_tokens, 1), first))[0]))

    def rows(self, layer: Layer, step: int, physical: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's call. Returns x, the result, and the routing weights."""
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

        generator = torch.Generator().manual_seed(100 * step + self.worker.rank)
        x = torch.randn(len(physical), HIDDEN, generator=generator).to(torch.bfloat16)
        weights = torch.rand(physical.shape, generator=generator) + 0.1
        rows, _, metadata, _, _ = self.call.prepare(
            x, weights, physical, MOST * EACH, None, False, self.quant
        )
        y = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
        for slot, count in enumerate(metadata.expert_num_tokens.tolist()):
            if count:
                y[slot, :count] = (rows[slot, :count].float() * layer.held(slot)).to(y.dtype)
        out = torch.empty_like(x)
        self.call.finalize(out, y, weights, physical, False, reduce.TopKWeightAndReduceDelegate())
        return x, out, weights

    def step(self, step: int, lost: frozenset[int] = frozenset()) -> None:
        """A forward pass and EPLB's step. Sums are compared with those of the logical experts,
        without slots of lost ranks."""
        for layer in self.model.moe_layers:
            state = layer.eplb_state
            token = torch.arange(TOKENS)[:, None]
            logical = torch.stack([torch.randperm(LOGICAL)[:TOPK] for _ in range(TOKENS)])
            replica = (token + self.worker.rank) % state.logical_replica_count[logical]
            physical = state.logical_to_physical_map[logical, replica]
            x, out, weights = self.rows(layer, step, physical)
            state.expert_load_view.scatter_add_(
                0, physical.flatten(), torch.ones(physical.numel(), dtype=torch.int32)
            )
            gone = torch.isin(physical // EACH, torch.tensor(sorted(lost), dtype=torch.int64))
            factor = (weights.masked_fill(gone, 0) * layer.factor(logical)).sum(1, keepdim=True)
            # Four roundings of 2^-9: row, partial sum, sum.
            torch.testing.assert_close(out.float(), x.float() * factor, rtol=2**-6, atol=5e-2)
        if not lost:
            self.eplb_state.step()

    def placement(self) -> list[list[int]]:
        """The experts of all slots, of each layer; this rank's slots hold them."""
        found = self.eplb_state.model_states[HASH].physical_to_logical_map.tolist()
        for layer, experts in zip(self.model.moe_layers, found, strict=True):
            for slot in range(EACH):
                expert = experts[self.worker.rank * EACH + slot]
                assert layer.held(slot) == layer.factor(torch.tensor(expert)), (experts, slot)
        return found


class Worker:
    """One rank, alone in its engine: data parallel."""

    use_v2_model_runner = randomize_dummy_inputs = False
    device, local_rank = torch.device("cpu"), 0

    def __init__(self, rank: Rank, seat: int, size: int) -> None:
        from vllm.distributed.elastic_ep.elastic_execute import ElasticEPScalingExecutor

        self._meeting, self.rank = rank.store, seat
        self.vllm_config = vllm_ranks.config()
        self.vllm_config.kernel_config = types.SimpleNamespace(enable_flashinfer_autotune=True)
        self.vllm_config.enable_trace_function_call_for_thread = lambda: None
        self.vllm_config.parallel_config = parallel_config(seat, size)
        vllm_ranks.use(self.vllm_config)
        self.model_runner = Runner(self)
        self.executor = ElasticEPScalingExecutor(self)

    def compile_or_warm_up_model(self) -> None: ...

    # --- groups ---

    def coordinator(self, name: str) -> TCPStore:
        """A store for each change of size, as vLLM has it; rank 0 serves it."""
        if self.rank == 0:
            self._served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._meeting.set(name, str(self._served.port))
            return self._served
        return TCPStore("127.0.0.1", int(self._meeting.get(name)), wait_for_workers=False)

    def join(self, name: str, size: int) -> None:
        """The groups of a rank that begins, in the order of create_standby_groups."""
        from vllm.distributed import parallel_state as state
        from vllm.distributed.stateless_coordinator import StatelessGroupCoordinator

        store, ranks = self.coordinator(name), [list(range(size))]
        alone = types.SimpleNamespace(world_size=1, rank_in_group=0)
        state._TP = state._PP = state._PCP = alone
        state._WORLD = StatelessGroupCoordinator(
            ranks,
            local_rank=0,
            torch_distributed_backend="gloo",
            use_device_communicator=False,
            coord_store=store,
            group_name="world",
            global_rank=self.rank,
            global_world_size=size,
        )
        state._NODE_COUNT = state._node_count(state._WORLD.tcp_store_group)
        at: Any = ("127.0.0.1", "gloo", store)
        state._DP = state._init_stateless_group(ranks, "dp", *at)
        state._EP = state._init_stateless_group(ranks, "ep", *at, use_all2all=True)
        state._EPLB = state._init_stateless_group(ranks, "eplb", *at)

    def request(self, name: str, size: int) -> Any:
        from vllm.v1.engine import ReconfigureDistributedRequest

        return ReconfigureDistributedRequest(
            new_data_parallel_size=size,
            new_data_parallel_rank=-1,
            new_data_parallel_rank_local=-1,
            new_data_parallel_master_ip="127.0.0.1",
            new_data_parallel_master_port=0,
            new_data_parallel_master_port_list=[],
            coord_store_port=self.coordinator(name).port,
        )


def parallel_config(seat: int, size: int) -> Any:
    return types.SimpleNamespace(
        all2all_backend="nixl_ep",
        cpu_distributed_timeout=None,
        data_parallel_rank=seat,
        data_parallel_size=size,
        elastic_ep_max_dp_size=MOST,
        enable_elastic_ep=True,
        enable_eplb=True,
        enable_expert_parallel=True,
        enable_fault_tolerance=False,
        eplb_config=types.SimpleNamespace(
            communicator="nixl",
            migration_batching_enabled=False,
            log_balancedness=False,
            policy="default",
            step_interval=1000,  # the executor's reshuffles are those that are looked at
            use_async=True,
            window_size=4,
        ),
        num_ubatches=0,
        tensor_parallel_size=1,
        use_sequence_parallel_moe=False,
        world_size=1,
    )


def begin() -> None:
    """In each process: vLLM's files on a CPU, over this package."""
    from moe_p2p import nixl_ep
    from moe_p2p.integrations.moe import vllm_eplb

    alone = Rank(0, 1, dist.HashStore())  # vLLM's default group is of one engine
    vllm_ranks.begin(alone, as_deep_ep=False, groups=False)
    nixl_ep.install()
    vllm_eplb.install()
    from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager

    on_cpus()
    NixlEPAll2AllManager._mask = torch.zeros(MOST, dtype=torch.int32)  # it makes one on a GPU
    from vllm.v1.worker import workspace

    workspace.init_workspace_manager(torch.device("cpu"))
