"""SGLang's token dispatcher over AllToAll.

    from moe_p2p.integrations.moe import sglang
    sglang.install()     # before the model is made; then --moe-a2a-backend deepep

The two modes return the formats that SGLang's MoE runners expect. low_latency: padded rows of each
expert, [E_local, W * max_tokens, H], in CUDA graphs; weights travel with dispatch and combine
applies them. normal: one row per (token, expert), grouped by expert, without spare rows; the runner
applies the weights. Both modes and all layers share one AllToAll per shape.

Symbols: T tokens, K top-k, E experts, E_local of this rank, H hidden size, R rows received.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moe_p2p import env, errors, log
from moe_p2p.deep_ep.overlap import ready_rows
from moe_p2p.integrations import derived, optional, provide_deep_ep, put, required
from moe_p2p.integrations.kv import sglang as sglang_kv
from moe_p2p.integrations.moe import pool_of, sglang_eplb, sglang_hooks
from moe_p2p.integrations.weights import sglang as sglang_weights
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.dispatched import Dispatched, PendingDispatch
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import DispatchOptions
from moe_p2p.moe.pool import TIMEOUT_S, AllToAllPool, config_of
from moe_p2p.moe.ready import ReadyRows
from moe_p2p.moe.routing_counts import count_routing
from moe_p2p.moe.row_counts import SizeExchange

_DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
# Where DeepEPDispatcher is looked up, in newer and older versions.
_USERS = (
    f"{_DISPATCHERS}.deepep",
    _DISPATCHERS,
    "sglang.srt.batch_overlap.two_batch_overlap",
    "sglang.srt.two_batch_overlap",
)
_MAX_TOKENS = 1 << 20  # per normal call; calls are cut into steps, so a large bound costs nothing
_GEMM_ROWS = 128  # DeepGEMM requires each expert's rows to begin at a multiple of it
_LOW_LATENCY_TOKENS = 128  # default, where SGLang has no setting


class Dispatcher:
    """Takes DeepEPDispatcher's arguments; those that only DeepEP's transport uses are ignored."""

    _shared: dict[Any, AllToAllPool] = {}  # noqa: RUF012  # by group: layers share the memory
    overlap_args: Any = None  # of single-batch overlap, for the next combine
    meta_overlap_args: Any = None
    expert_mask_gpu = None  # read by AMD's runner: ids of rows name experts of this rank only

    def __init__(
        self,
        group: Any,
        router_topk: int,
        permute_fusion: bool = False,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        deepep_mode: Any = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        runner_backend: Any = None,
    ) -> None:
        super().__init__()
        self.quant_config: dict[str, Any] = {}
        self.runner_backend = runner_backend
        self.deepep_mode = deepep_mode
        errors.require(num_experts is not None, "num_experts is None, must be their number")
        self._num_experts = num_experts or 0
        self._max_tokens = _low_latency_tokens()
        self._group, self._sizes = group, SizeExchange()
        self._options: dict[str, DispatchOptions] = {}  # by layout; chosen at its first call
        self._hooks: list[Callable[[Any], None]] = []
        self._dispatching: Callable[[], Any] | None = None
        self._combining: Callable[[], Tensor] | None = None
        self._received: tuple[AllToAll, Dispatched] | None = None

    # --- SGLang's interface ---

    def dispatch(self, hidden_states: Tensor, topk_output: Any, **_: Any) -> Any:
        self.dispatch_a(hidden_states, topk_output)
        for hook in list(self._hooks):
            hook(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any, **_: Any) -> None:
        """Sends, in low_latency mode; normal calls begin in dispatch_b."""
        begin = self._low_latency if self._is_low_latency() else self._normal
        self._dispatching = begin(
            hidden_states.contiguous(),
            topk_output.topk_ids.to(torch.int64),
            topk_output.topk_weights.float(),
        )

    def dispatch_b(self, **_: Any) -> Any:
        assert self._dispatching is not None, "dispatch_b follows dispatch_a"
        finish, self._dispatching = self._dispatching, None
        return finish()

    def combine(self, combine_input: Any, **_: Any) -> Tensor:
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any, **_: Any) -> None:
        """Sends, in low_latency mode; normal calls begin in combine_b."""
        assert self._received is not None, "combine_a follows dispatch_b"
        (all_to_all, got), self._received = self._received, None
        y: Tensor = combine_input.hidden_states
        if got.x.dim() == 3:
            with _beside_the_product(self.overlap_args):
                ready = _ready_rows(y, self.overlap_args, self.meta_overlap_args)
                pending = all_to_all.combine_send(y, got, ready=ready)
            self._combining = lambda: all_to_all.combine_recv(pending)
        else:
            self._combining = lambda: all_to_all.combine(y, got, weighted=False)

    def combine_b(self, **_: Any) -> Tensor:
        assert self._combining is not None, "combine_b follows combine_a"
        finish, self._combining = self._combining, None
        sums = finish()
        if self.overlap_args is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self.overlap_args.stream)
        return sums

    def check(self) -> None:
        """Raises the error that broke a communicator of the group, with its whole text.

        dispatch checks by itself. Replays of CUDA graphs do not: call this once per step of them.
        """
        if self._group in self._shared:
            self._shared[self._group].check()

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config, self._options = quant_config, {}

    def register_deepep_dispatch_hook(self, hook: Callable[[Any], None]) -> Any:
        """Registers hook(dispatcher), run between dispatch's halves; the result has remove()."""
        self._hooks.append(hook)
        return _Registered(self._hooks, hook)

    # --- the two modes ---

    def _low_latency(self, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Any]:
        all_to_all = self._all_to_all(x, ids, low_latency=True)
        pending = all_to_all.dispatch_send(
            x, ids, weights, options=self._dispatch_options("padded")
        )
        # Mean rows per expert if all ranks have as many tokens as this one, rounded up.
        expected = -(-x.shape[0] * all_to_all.world_size * ids.shape[1] // self._num_experts)
        return functools.partial(self._low_latency_rows, all_to_all, pending, weights, expected)

    def _low_latency_rows(
        self, all_to_all: AllToAll, pending: PendingDispatch, weights: Tensor, expected: int
    ) -> Any:
        got = all_to_all.dispatch_recv(pending)
        self._received = all_to_all, got
        if (recorder := _recorder()) is not None:
            recorder.on_deepep_dispatch_low_latency(got.counts)
        return _made(
            ("DeepEPLLDispatchOutput", "DeepEPLLOutput"),
            hidden_states=got.x,
            hidden_states_scale=got.scales,
            hidden_states_fp8=(got.x, got.scales),
            topk_ids=got.topk_idx,
            topk_idx=got.topk_idx,
            topk_weights=weights,
            masked_m=got.counts,
            expected_m=max(expected, 1),
        )

    def _normal(self, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Any]:
        return functools.partial(self._normal_rows, x, ids, weights)

    def _normal_rows(self, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        all_to_all = self._all_to_all(x, ids, low_latency=False)
        sizes = self._sizes.ask(all_to_all, ids)
        got = all_to_all.dispatch(
            x,
            ids,
            weights,
            options=self._dispatch_options("grouped"),
            max_tokens=sizes.max_tokens,
            capacity=sizes.capacity,
        )
        self._received = all_to_all, got
        # Not by repeat_interleave: counts are -1 after a failure.
        rows = torch.arange(sizes.capacity, device=x.device, dtype=torch.int32)
        row_experts = torch.searchsorted(got.offsets[1:].contiguous(), rows, right=True)
        row_experts.clamp_(max=len(got.counts) - 1)
        counts = sizes.counts.to(torch.int64)
        rounded = (counts + _GEMM_ROWS - 1) // _GEMM_ROWS * _GEMM_ROWS
        if (recorder := _recorder()) is not None and recorder.recording:
            sent = count_routing(ids, self._num_experts, all_to_all.world_size)
            recorder.on_deepep_dispatch_normal(
                counts.tolist(),
                num_tokens_per_rank=sent.num_tokens_per_rank,
                num_tokens_per_rdma_rank=None,
                num_tokens_per_expert=sent.num_tokens_per_expert,
            )
        return _made(
            ("DeepEPNormalDispatchOutput", "DeepEPNormalOutput"),
            hidden_states=got.x,
            hidden_states_scale=got.scales,
            topk_ids=row_experts[:, None],
            topk_idx=row_experts[:, None],
            topk_weights=got.row_weights[:, None],
            num_recv_tokens_per_expert=(rounded if _uses_deep_gemm() else counts).tolist(),
        )

    def _all_to_all(self, x: Tensor, ids: Tensor, *, low_latency: bool) -> AllToAll:
        config = config_of(
            num_experts=self._num_experts,
            hidden_dim=x.shape[1],
            topk=ids.shape[1],
            max_tokens=self._max_tokens if low_latency else _MAX_TOKENS,
            dtype=x.dtype,
            device=x.device.type,
            chunk_tokens=self._max_tokens if low_latency else None,
            timeout_s=TIMEOUT_S,
        )
        return pool_of(self._shared, self._group).get(config)

    def _is_low_latency(self) -> bool:
        attention = required("sglang.srt.layers.dp_attention", "sglang")
        mode = self.deepep_mode.resolve(attention.get_is_extend_in_batch())
        return bool(mode.is_low_latency())

    def _dispatch_options(self, layout: RowLayout) -> DispatchOptions:
        options = self._options.get(layout)
        if options is None:
            options = self._options[layout] = _options_for(self, layout)
        return options


def _beside_the_product(overlap: Any) -> AbstractContextManager[Any]:
    """Of single-batch overlap: a stream that waits for the product's begin, not for its end."""
    if overlap is None:
        return nullcontext()
    overlap.stream.wait_event(overlap.wait_event)
    return torch.cuda.stream(overlap.stream)


def _ready_rows(y: Tensor, overlap: Any, meta: Any) -> ReadyRows | None:
    """None: the product has written all of y."""
    if overlap is None or not overlap.overlap:
        return None
    if overlap.signal.dtype == torch.uint32:  # of each expert, as products on Blackwell raise them
        given: dict[str, Any] = {
            "src_signals": overlap.signal,
            "src_signal_expect_value": overlap.threshold,
        }
    else:
        given = {
            "comp_signal": overlap.signal,
            "block_m": meta["block_m"],
            "threshold": meta["threshold"],
        }
    return ready_rows(y, **given, num_sms=overlap.num_sms or 0)


class _Registered:
    """A hook that can be removed."""

    def __init__(self, hooks: list[Callable[[Any], None]], hook: Callable[[Any], None]) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


@functools.cache
def dispatcher_class() -> Any:
    """Returns Dispatcher as a class of SGLang. Raises ImportError without SGLang."""
    return derived(Dispatcher, required(_DISPATCHERS, "sglang").BaseDispatcher)


def install() -> None:
    """Replaces DeepEPDispatcher, and how EPLB moves experts. Also makes `deep_ep` importable.

    Changes of mode clean DeepEP's buffer in SGLang; here is none, and calls need no cleaning.
    """
    required("sglang", "sglang")
    sglang_eplb.install()
    provide_deep_ep()  # before the modules below, which import it
    ours = dispatcher_class()
    users = {name: module for name in _USERS if (module := optional(name)) is not None}
    put(users, {"DeepEPDispatcher": ours})
    buffer = getattr(users.get(f"{_DISPATCHERS}.deepep"), "DeepEPBuffer", None)
    if buffer is not None:
        buffer.clean_buffer = classmethod(lambda cls: None)
    log.info("SGLang: what DeepEP does is moe_p2p's")


def plugin() -> None:
    """Entry point `sglang.srt.plugins`, which SGLang calls in each of its processes.

    It makes `--moe-a2a-backend customized` available (sglang_hooks.py). With MOE_P2P_ENGINES=1 it
    is also install(), whether or not SGLang has imported a deep_ep by then; with MOE_P2P_KV_STORE
    too, disaggregated serving moves KV through moe_p2p. With MOE_P2P_AS_NIXL_EP=1 EPLB moves
    experts through it.
    """
    sglang_weights.plugin()
    sglang_hooks.register(dispatcher_class)
    if env.engines():
        install()
        if env.kv_store():
            sglang_kv.install()
    elif env.as_nixl_ep():
        sglang_eplb.install()


def _made(names: tuple[str, ...], **values: Any) -> Any:
    """Builds the named tuple that this SGLang has under one of `names`, from fields it knows."""
    module = required(_DISPATCHERS, "sglang")
    kind = next(found for name in names if (found := getattr(module, name, None)) is not None)
    return kind(**{field: values[field] for field in kind._fields})


def _options_for(dispatcher: Dispatcher, layout: RowLayout) -> DispatchOptions:
    """Returns options of dispatch for the row format that the runner's kernels take."""
    utils = required("sglang.srt.layers.moe.utils", "sglang")
    choose = getattr(utils, "get_deepep_output_dtype", None)
    dtype = "fp8" if choose is None else choose(_Asking(dispatcher, layout, utils)).value
    errors.require(
        dtype in ("bf16", "fp8"),
        f"the runner wants rows of {dtype}; bf16 and fp8 are dispatched: start SGLang with "
        "--deepep-dispatcher-output-dtype bf16",
    )
    if dtype == "bf16":
        return DispatchOptions(layout=layout)
    packed = _uses_deep_gemm() and getattr(_deep_gemm(), "DEEPGEMM_SCALE_UE8M0", False)
    return DispatchOptions(
        layout=layout,
        quantize=True,
        scale_format="ue8m0" if packed else "float32",
        column_scales=layout == "padded",
    )


class _Asking:
    """What SGLang reads of a dispatcher to choose the type of rows, for one mode."""

    def __init__(self, dispatcher: Dispatcher, layout: RowLayout, utils: Any) -> None:
        self.quant_config, self.runner_backend = dispatcher.quant_config, dispatcher.runner_backend
        mode = utils.DeepEPMode
        self.dispatch_mode = mode.LOW_LATENCY if layout == "padded" else mode.NORMAL


def _recorder() -> Any:
    """Returns what counts the rows of each expert for SGLang's expert placement; None: nothing."""
    module = optional("sglang.srt.eplb.expert_distribution")
    return None if module is None else module.get_global_expert_distribution_recorder()


def _deep_gemm() -> Any:
    return optional("sglang.srt.layers.deep_gemm_wrapper")


def _uses_deep_gemm() -> bool:
    return bool(getattr(_deep_gemm(), "ENABLE_JIT_DEEPGEMM", False))


def _low_latency_tokens() -> int:
    """Returns the most tokens of a rank in a low_latency call, from SGLang's environment."""
    envs = getattr(optional("sglang.srt.environ"), "envs", None)
    setting = getattr(envs, "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", None)
    return _LOW_LATENCY_TOKENS if setting is None else int(setting.get())
