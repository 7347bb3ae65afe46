"""SGLang as far as its MoE layers meet a token dispatcher."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from tests.support.fakes import module

DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"


class BaseDispatcher(ABC):
    def __init__(self) -> None:
        self.quant_config: dict[str, Any] | None = None
        self.overlap_args: Any = None

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> Any: ...

    @abstractmethod
    def combine(self, combine_input: Any) -> Tensor: ...


class TopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor


class DeepEPLLDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    masked_m: Tensor
    expected_m: int


class DeepEPNormalDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: list[int]


class OlderDeepEPLLOutput(NamedTuple):
    hidden_states_fp8: tuple[Tensor, Tensor | None]
    topk_idx: Tensor
    topk_weights: Tensor
    masked_m: Tensor
    expected_m: int


class CombineInput(NamedTuple):
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


class DeepEPMode(Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    AUTO = "auto"

    def resolve(self, is_extend_in_batch: bool) -> DeepEPMode:
        if self is not DeepEPMode.AUTO:
            return self
        return DeepEPMode.NORMAL if is_extend_in_batch else DeepEPMode.LOW_LATENCY

    def is_low_latency(self) -> bool:
        return self is DeepEPMode.LOW_LATENCY


class OutputDtype(Enum):
    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class State:
    """What SGLang knows about the batch and the model."""

    extend = False
    dtype = OutputDtype.BF16


def put(*, max_tokens: int, older: bool = False) -> None:
    """Into sys.modules."""
    outputs = (
        {"DeepEPLLOutput": OlderDeepEPLLOutput}
        if older
        else {"DeepEPLLDispatchOutput": DeepEPLLDispatchOutput}
    )
    module(
        DISPATCHERS,
        BaseDispatcher=BaseDispatcher,
        DeepEPNormalDispatchOutput=DeepEPNormalDispatchOutput,
        **outputs,
    )
    module(f"{DISPATCHERS}.deepep")
    module("sglang.srt.batch_overlap.two_batch_overlap")
    module("sglang.srt.layers.dp_attention", get_is_extend_in_batch=lambda: State.extend)
    module("sglang.srt.layers.moe.utils", get_deepep_output_dtype=lambda _: State.dtype)
    module("sglang.srt.layers.deep_gemm_wrapper", ENABLE_JIT_DEEPGEMM=True)
    setting = types.SimpleNamespace(get=lambda: max_tokens)
    envs = types.SimpleNamespace(SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=setting)
    module("sglang.srt.environ", envs=envs)
