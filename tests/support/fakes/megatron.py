"""Megatron as far as its flexible token dispatcher meets a dispatch manager."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.support.fakes import module

MOE = "megatron.core.transformer.moe"


class _DispatchManager(ABC):
    @abstractmethod
    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None: ...

    @abstractmethod
    def dispatch(self, hidden_states: Tensor) -> Tensor: ...

    @abstractmethod
    def combine(self, hidden_states: Tensor) -> Tensor: ...

    @abstractmethod
    def get_dispached_metadata(self) -> Any: ...

    @abstractmethod
    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> Any: ...

    @abstractmethod
    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor: ...


def config(*, padding: bool) -> Any:
    """What a manager reads of TransformerConfig."""
    return types.SimpleNamespace(
        moe_router_dtype="fp32",
        moe_expert_capacity_factor=None,
        moe_permute_fusion=False,
        moe_router_padding_for_quantization=padding,
    )


def run_layer(
    manager: Any,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    routing_map: Tensor,
    probs: Tensor,
) -> Tensor:
    """The calls of the flexible token dispatcher for one layer, in its order."""
    manager.setup_metadata(routing_map, probs)
    rows = manager.dispatch(hidden_states, async_finish=True, allocate_on_comm_stream=True)
    rows, row_probs = manager.get_permuted_hidden_states_by_experts(rows)
    y = experts(rows, manager.get_number_of_tokens_per_expert(), row_probs)
    y = manager.get_restored_hidden_states_by_experts(y)
    out: Tensor = manager.combine(y, async_finish=True, allocate_on_comm_stream=True)
    return out


def put(*, alignment: int = 1) -> None:
    """Into sys.modules."""
    module(f"{MOE}.token_dispatcher", _DispatchManager=_DispatchManager)
    module(f"{MOE}.moe_utils", get_align_size_for_quantization=lambda _: alignment)
