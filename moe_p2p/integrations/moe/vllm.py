"""vLLM's all2all managers and prepare-finalize objects over AllToAll.

    from moe_p2p.integrations.moe import vllm
    vllm.install()     # in every worker, before the model is made

vLLM then uses these when `--all2all-backend` is deepep_low_latency (Batched: padded rows of each
expert, [E_local, W * max_tokens, H], CUDA graphs) or deepep_high_throughput or deepep_v2 (Standard:
one row per (token, expert), without spare rows; in CUDA graphs as many as could arrive). Weights
travel with dispatch and are applied by combine, unless the experts apply them.

vllm_managers.py has the managers. Both kinds take part in dual batch overlap: the other micro-batch
computes while rows travel.

Symbols: T tokens, K top-k, E experts, E_local of this rank, H hidden size, R rows received.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_p2p import env, errors, log
from moe_p2p.integrations import derived, optional, provide_deep_ep, put, required
from moe_p2p.integrations.moe import vllm_eplb
from moe_p2p.integrations.moe.vllm_managers import Handle, manager_classes
from moe_p2p.integrations.weights import vllm as vllm_weights
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.dispatched import Dispatched
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import DispatchOptions, ScaleFormat
from moe_p2p.moe.row_counts import capturing

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_FP8_BLOCK = [128, 128]  # with this block shape dispatch quantizes, one scale per 128 values
# Result of prepare: rows, scales, ExpertTokensMetadata, expert of each row, weight of each row.
Prepared = tuple[Tensor, Tensor | None, Any, Tensor | None, Tensor | None]


class _PrepareAndFinalize:
    """Base of Batched and Standard. Further constructor arguments, for DeepEP, are ignored."""

    def __init__(
        self,
        buffer: Handle,
        num_dispatchers: int,
        *,
        global_to_physical: Tensor | None = None,
        **_: Any,
    ) -> None:
        self._handle = buffer
        self._num_dispatchers = num_dispatchers
        self._physical = global_to_physical  # [E] physical id of each expert; None: the same
        self._scale_format: ScaleFormat = "float32"
        self._received: dict[int, tuple[AllToAll, Dispatched]] = {}  # by micro-batch

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, *_: Any) -> int:
        """Returns hidden_size: no size needs rounding."""
        return hidden_size

    def post_init_setup(self, fused_experts: Any) -> None:
        asks = getattr(fused_experts, "supports_packed_ue8m0_act_scales", None)
        if asks is not None and asks():
            self._scale_format = "ue8m0"

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None  # int32 and int64

    def num_dispatchers(self) -> int:
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        return True

    def _inputs(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, on_input: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns x, weights and ids as dispatch takes them."""
        weights: Tensor | None = topk_weights.float()
        if on_input:
            errors.require(
                topk_ids.shape[1] == 1,
                f"apply_router_weight_on_input with top-{topk_ids.shape[1]}: it is for top-1",
            )
            a1, weights = a1 * topk_weights.to(a1.dtype), None
        ids = topk_ids if self._physical is None else self._physical[topk_ids]
        return a1.contiguous(), weights, ids

    def _options(
        self, layout: RowLayout, quant_config: Any, defer_input_quant: bool
    ) -> DispatchOptions:
        """Returns options of dispatch: it quantizes if it can produce the experts' format."""
        block = quant_config.block_shape
        quantize = (
            not defer_input_quant
            and quant_config.quant_dtype == torch.float8_e4m3fn
            and list(block or ()) == _FP8_BLOCK
        )
        return _options_of(layout, self._scales() if quantize else None)

    def _scales(self) -> ScaleFormat:
        """Returns the format of scales that the experts take."""
        return self._scale_format


class Batched(_PrepareAndFinalize):
    """Padded rows of each expert; uses halves, so that other work can run while rows travel."""

    @property
    def activation_format(self) -> Any:
        return _kernel().FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self._handle.max_tokens

    def supports_async(self) -> bool:
        return True

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Prepared]]:
        x, weights, ids = self._inputs(a1, topk_weights, topk_ids, apply_router_weight_on_input)
        all_to_all = self._handle.all_to_all(x, ids, num_experts, one_step=True)
        options = self._options("padded", quant_config, defer_input_quant)
        pending = all_to_all.dispatch_send(x, ids, weights, options=options)
        batch = _micro_batch()

        def hook() -> None:
            self._received[batch] = all_to_all, all_to_all.dispatch_recv(pending)

        def receiver() -> Prepared:
            got = self._received[batch][1]
            rows, scales = got.x, got.scales
            if not options.quantize and not defer_input_quant:
                rows, scales = _quantized(rows, quant_config)
            return rows, scales, _tokens_metadata(got.counts, None), None, None

        return hook, receiver

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        hook, receiver = self.prepare_async(*args, **kwargs)
        hook()
        return receiver()

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        _run_hook_of_the_other_micro_batch()
        all_to_all, got = self._received.pop(_micro_batch())
        pending = all_to_all.combine_send(
            fused_expert_output,
            got,
            weighted=_delegates(weight_and_reduce_impl),
            out_dtype=output.dtype,
        )

        def hook() -> None:
            all_to_all.combine_recv(pending, out=output)

        return hook, lambda: None

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        self.finalize_async(*args, **kwargs)[0]()


class Standard(_PrepareAndFinalize):
    """One row per (token, expert), grouped by expert."""

    @property
    def activation_format(self) -> Any:
        return _kernel().FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None  # calls are cut into steps

    def supports_dbo(self) -> bool:
        return True

    def _scales(self) -> ScaleFormat:
        """DeepGEMM may read the exponent of a scale alone: then scales are powers of two."""
        deep_gemm = optional("vllm.utils.deep_gemm")
        exponents = deep_gemm is not None and deep_gemm.is_deep_gemm_e8m0_used()
        return "power_of_two" if exponents else super()._scales()

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Prepared:
        x, weights, ids = self._inputs(a1, topk_weights, topk_ids, apply_router_weight_on_input)
        all_to_all = self._handle.all_to_all(x, ids, num_experts, one_step=False)
        options = self._options("grouped", quant_config, defer_input_quant)
        with _communicating(x, ids, weights) as made:
            sizes = None if capturing(x) else self._handle.sizes.ask(all_to_all, ids)
            got = all_to_all.dispatch(
                x,
                ids,
                weights,
                options=options,
                max_tokens=sizes and sizes.max_tokens,
                capacity=sizes and sizes.capacity,
            )
            made += [got.x, got.scales, got.counts, got.offsets, got.row_weights]
        self._received[_micro_batch()] = all_to_all, got
        rows, scales = got.x, got.scales
        if not options.quantize and not defer_input_quant and rows.numel():
            rows, scales = _quantized(rows, quant_config)
        metadata = _tokens_metadata(got.counts, sizes and sizes.counts)
        experts = _experts_of_rows(got, all_to_all).to(topk_ids.dtype)
        return rows, scales, metadata, experts[:, None], got.row_weights[:, None]

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        all_to_all, got = self._received.pop(_micro_batch())
        y, weighted = fused_expert_output, _delegates(weight_and_reduce_impl)
        if not weighted and y.numel():
            y = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=y,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        rows = y.reshape(-1, output.shape[1])
        with _communicating(rows, output):
            all_to_all.combine(rows, got, weighted=weighted, out=output)


@functools.cache
def prepare_and_finalize_classes() -> tuple[Any, Any]:
    """Returns (Batched, Standard) as vLLM classes."""
    kernel = _kernel()
    # vLLM without self-routing kernels has one class for both kinds.
    base = getattr(kernel, "FusedMoEPrepareAndFinalizeModular", None)
    base = base or kernel.FusedMoEPrepareAndFinalize
    return derived(Batched, base), derived(Standard, base)


def install() -> None:
    """Replaces DeepEP's classes in vLLM, and NIXL's communicator of EPLB. Makes `deep_ep`
    importable, which vLLM checks for."""
    required("vllm", "vllm")
    vllm_eplb.install()
    provide_deep_ep()  # before the modules below, which import it
    low_latency, manager = manager_classes()
    batched, standard = prepare_and_finalize_classes()
    managers = "vllm.distributed.device_communicators.all2all"
    makers = f"{_FUSED_MOE}.all2all_utils"
    put(
        {managers: required(managers, "vllm")},
        {
            "DeepEPLLAll2AllManager": low_latency,
            "DeepEPHTAll2AllManager": manager,
            "DeepEPV2All2AllManager": manager,
        },
    )
    put(
        {makers: required(makers, "vllm")},
        {
            "DeepEPLLPrepareAndFinalize": batched,
            "DeepEPHTPrepareAndFinalize": standard,
            "DeepEPV2PrepareAndFinalize": standard,
            "DEEPEP_QUANT_BLOCK_SHAPE": _FP8_BLOCK,
        },
    )
    log.info("vLLM: what DeepEP does is moe_p2p's")


def plugin() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes.

    It makes the weight-transfer backend "moe_p2p" known. With MOE_P2P_ENGINES=1 it is install().
    With MOE_P2P_AS_NIXL_EP=1 EPLB moves experts through it. With MOE_P2P_AS_DEEP_EP=1 vLLM's own
    classes run over moe_p2p.deep_ep, and its checks of NCCL, which DeepEP's V2 needs and this does
    not, pass.
    """
    vllm_weights.plugin()
    if env.engines():
        install()
        return
    if env.as_nixl_ep():
        vllm_eplb.install()
    if env.as_deep_ep():
        env.disable_gin()
        checks = required("vllm.utils.import_utils", "vllm")
        checks.deep_ep_v2_unavailable_reason = lambda: None


def _kernel() -> Any:
    return required(f"{_FUSED_MOE}.modular_kernel", "vllm")


def _micro_batch() -> int:
    """Returns the index of the micro-batch that this thread runs, where vLLM overlaps several."""
    batching = optional("vllm.v1.worker.ubatching")
    return int(batching.dbo_current_ubatch_id()) if batching else 0


def _run_hook_of_the_other_micro_batch() -> None:
    """Receives rows of the other micro-batch, which goes on once this one has sent."""
    if (batching := optional("vllm.v1.worker.ubatching")) is not None:
        batching.dbo_maybe_run_recv_hook()


@contextlib.contextmanager
def _communicating(*used: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Runs its block on vLLM's communication stream while micro-batches overlap.

    The other micro-batch issues its work first, because the block may wait on the host. `used` are
    read in the block; what is appended to the list made in it is used by experts afterwards.
    Without micro-batches the block just runs.
    """
    made: list[Tensor | None] = []
    batching = optional("vllm.v1.worker.ubatching")
    if batching is None or not batching.dbo_enabled():
        yield made
        return
    batching.dbo_yield_and_switch_from_compute_to_comm()
    _record(used)
    yield made
    batching.dbo_switch_to_compute_sync()
    _record(made)


def _record(tensors: Iterable[Tensor | None]) -> None:
    """Keeps the memory of these tensors until the current stream has used them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


def _delegates(weight_and_reduce_impl: Any) -> bool:
    """Whether the experts leave applying weights to finalize."""
    module = required(f"{_FUSED_MOE}.topk_weight_and_reduce", "vllm")
    return isinstance(weight_and_reduce_impl, module.TopKWeightAndReduceDelegate)


def _tokens_metadata(counts: Tensor, counts_on_cpu: Tensor | None) -> Any:
    return _kernel().ExpertTokensMetadata(
        expert_num_tokens=counts, expert_num_tokens_cpu=counts_on_cpu
    )


@functools.cache
def _options_of(layout: RowLayout, scale_format: ScaleFormat | None) -> DispatchOptions:
    """Returns options that quantize with this scale_format; None: rows travel unchanged."""
    if scale_format is None:
        return DispatchOptions(layout=layout)
    return DispatchOptions(
        layout=layout,
        quantize=True,
        scale_format=scale_format,
        column_scales=layout == "padded",
    )


def _quantized(rows: Tensor, quant_config: Any) -> tuple[Tensor, Tensor | None]:
    """Quantizes rows for the experts, in formats that dispatch cannot produce."""
    dtype = quant_config.quant_dtype
    if dtype is None or (dtype == "nvfp4" and rows.dim() == 3):
        return rows, None  # vLLM's batched fp4 experts quantize by themselves
    utils = required(f"{_FUSED_MOE}.utils", "vllm")
    q, scales = utils.moe_kernel_quantize_input(
        rows.flatten(0, -2),
        quant_config.a1_gscale if dtype == "nvfp4" else quant_config.a1_scale,
        dtype,
        quant_config.per_act_token_quant,
        quant_config.block_shape,
        is_scale_swizzled=quant_config.is_scale_swizzled,
        mx_alignment=quant_config.mx_alignment,
    )
    if rows.dim() == 2:
        return q, scales
    return q.unflatten(0, rows.shape[:2]), utils.normalize_batched_scales_shape(
        scales, rows.shape[0]
    )


def _experts_of_rows(got: Dispatched, all_to_all: AllToAll) -> Tensor:
    """Global expert id of each row, [R]; rows without a token get an expert of another rank."""
    row = torch.arange(got.x.shape[0], device=got.x.device, dtype=torch.int32)
    local = torch.searchsorted(got.offsets[1:].contiguous(), row, right=True)
    first = all_to_all.rank * all_to_all.num_local_experts
    return (first + local) % all_to_all.config.num_experts
