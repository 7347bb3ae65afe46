"""vLLM's all2all managers and prepare-finalize objects over AllToAll.

    from moe_p2p.integrations import vllm
    vllm.install()     # in every worker, before the model is made

vLLM then uses these when `--all2all-backend` is deepep_low_latency (Batched: padded rows of each
expert, [E_local, W * max_tokens, H], CUDA graphs) or deepep_high_throughput or deepep_v2 (Standard:
one row per (token, expert), without spare rows; in CUDA graphs as many as could arrive). Weights
travel with dispatch and are applied by combine, unless the experts apply them.

A manager returns a Handle, not an AllToAll, because vLLM asks for it before top-k is known.

Symbols: T tokens, K top-k, E experts, E_local of this rank, H hidden size, R rows received.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.all_to_all import AllToAll
from moe_p2p.dispatched import Dispatched
from moe_p2p.integrations import derived, optional, put, required
from moe_p2p.options import DispatchOptions, RowLayout, ScaleFormat
from moe_p2p.pool import TIMEOUT_S, AllToAllPool, config_of
from moe_p2p.row_counts import SizeExchange, capturing

_MANAGERS = "vllm.distributed.device_communicators.base_device_communicator"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_FP8_BLOCK = [128, 128]  # with this block shape dispatch quantizes, one scale per 128 values
# Result of prepare: rows, scales, ExpertTokensMetadata, expert of each row, weight of each row.
Prepared = tuple[Tensor, Tensor | None, Any, Tensor | None, Tensor | None]


class Handle:
    """The AllToAll objects of one group, made when a layer's shape is first seen.

    max_tokens: most tokens of any rank in a call.
    check: raises the error that broke this or another handle of the manager. None: only this one.
    """

    def __init__(
        self,
        group: Any,
        max_tokens: int,
        num_sms: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self._check = check or self.check
        self._num_sms = num_sms
        self.sizes = SizeExchange()
        self._pool = AllToAllPool(group)

    def all_to_all(
        self, x: Tensor, topk_idx: Tensor, num_experts: int, *, one_step: bool
    ) -> AllToAll:
        """Returns the AllToAll for x [T, H] and topk_idx [T, K].

        one_step: calls must not be cut into steps, because halves are used.
        """
        self._check()
        config = config_of(
            num_experts=num_experts,
            hidden_dim=x.shape[1],
            topk=topk_idx.shape[1],
            max_tokens=self.max_tokens,
            dtype=x.dtype,
            device=x.device.type,
            chunk_tokens=self.max_tokens if one_step else None,
            num_sms=self._num_sms,
            timeout_s=TIMEOUT_S,
        )
        return self._pool.get(config)

    def check(self) -> None:
        """Raises the error that broke any of its AllToAlls (AllToAll.check)."""
        self._pool.check()

    def destroy(self) -> None:
        self._pool.close()


class All2AllManager:
    """One per group of expert-parallel ranks; vLLM passes the group's CPU process group."""

    cpu_group: Any  # set by the base class

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        # Only later versions have the second argument, for groups outside torch.distributed.
        given = (cpu_group,) if tcp_store_group is None else (cpu_group, tcp_store_group)
        super().__init__(*given)
        self._handles: dict[int, Handle] = {}
        self._num_sms: int | None = None

    def get_handle(self, kwargs: dict[str, Any]) -> Handle:
        """kwargs: as for the replaced backend; only the number of tokens is used."""
        max_tokens = (
            kwargs.get("max_num_tokens_per_dp_rank")
            or kwargs.get("num_max_tokens_per_rank")
            or _scheduled_tokens()
        )
        if max_tokens not in self._handles:
            self._handles[max_tokens] = Handle(
                self.cpu_group, max_tokens, self._num_sms, self.check
            )
        return self._handles[max_tokens]

    def set_num_sms(self, num_sms: int) -> None:
        """Limits the thread blocks of calls. Applies to layers that have not run yet."""
        self._num_sms = num_sms

    def max_sms_used(self) -> int | None:
        """Returns the limit of set_num_sms; None: no limit."""
        return self._num_sms

    def check(self) -> None:
        """Raises the error that broke any of its handles.

        prepare() calls it. Replays of CUDA graphs do not: call this once per step of them.
        """
        for handle in self._handles.values():
            handle.check()

    def destroy(self) -> None:
        while self._handles:
            self._handles.popitem()[1].destroy()


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
        self._scale_format: Any = "float32"
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
        return _options_of(layout, self._scale_format if quantize else None)


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
        sizes = None if capturing(x) else self._handle.sizes.ask(all_to_all, ids)
        got = all_to_all.dispatch(
            x,
            ids,
            weights,
            options=options,
            max_tokens=sizes and sizes.max_tokens,
            capacity=sizes and sizes.capacity,
        )
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
        all_to_all.combine(rows, got, weighted=weighted, out=output)


@functools.cache
def manager_class() -> Any:
    """Returns All2AllManager as a vLLM class. Raises ImportError without vLLM."""
    return derived(All2AllManager, required(_MANAGERS, "vllm").All2AllManagerBase)


@functools.cache
def prepare_and_finalize_classes() -> tuple[Any, Any]:
    """Returns (Batched, Standard) as vLLM classes."""
    kernel = _kernel()
    # vLLM without self-routing kernels has one class for both kinds.
    base = getattr(kernel, "FusedMoEPrepareAndFinalizeModular", None)
    base = base or kernel.FusedMoEPrepareAndFinalize
    return derived(Batched, base), derived(Standard, base)


def install() -> None:
    """Replaces DeepEP's classes in vLLM. Makes `deep_ep` importable, which vLLM checks for."""
    from moe_p2p import deep_ep

    required("vllm", "vllm")
    deep_ep.install()  # before the modules below, which import it
    manager, (batched, standard) = manager_class(), prepare_and_finalize_classes()
    managers = "vllm.distributed.device_communicators.all2all"
    makers = f"{_FUSED_MOE}.all2all_utils"
    put(
        {managers: required(managers, "vllm")},
        {f"DeepEP{kind}All2AllManager": manager for kind in ("LL", "HT", "V2")},
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


def _kernel() -> Any:
    return required(f"{_FUSED_MOE}.modular_kernel", "vllm")


def _scheduled_tokens() -> int:
    """Returns the most tokens that vLLM schedules in one step."""
    config = required("vllm.config", "vllm").get_current_vllm_config()
    return int(config.scheduler_config.max_num_batched_tokens)


def _micro_batch() -> int:
    """Returns the index of the micro-batch that this thread runs, where vLLM overlaps several."""
    batching = optional("vllm.v1.worker.ubatching")
    return int(batching.dbo_current_ubatch_id()) if batching else 0


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
        quant_config.a1_scale,
        dtype,
        quant_config.per_act_token_quant,
        quant_config.block_shape,
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
