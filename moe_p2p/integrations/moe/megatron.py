"""Megatron's dispatch manager over AllToAll, for training.

    from moe_p2p.integrations.moe import megatron
    megatron.install()   # before the model is made; then --moe-token-dispatcher-type flex
                         # and --moe-flex-dispatcher-backend deepep

Rows arrive grouped by expert, so there is nothing to permute, and without spare rows. Gradients of
tokens and probabilities travel back the same way; Megatron's experts apply the probabilities. For
Megatron-Core 0.16 and newer.

install() also offers the fused permutation of --moe-permute-fusion, which Megatron takes from
Transformer Engine: to its all-to-all dispatcher and its own manager for DeepEP. Where Transformer
Engine has it, Transformer Engine's stays.

Symbols: T tokens, K top-k, E experts, E_local of this rank, H hidden size, R rows received.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moe_p2p import log
from moe_p2p.integrations import derived, provide_deep_ep, put, required
from moe_p2p.integrations.moe import pool_of
from moe_p2p.integrations.moe.megatron_permute import FUSED
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.dispatched import Dispatched
from moe_p2p.moe.options import DispatchOptions
from moe_p2p.moe.pool import TIMEOUT_S, AllToAllPool, config_of
from moe_p2p.moe.row_counts import SizeExchange

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_UTILS = "megatron.core.transformer.moe.moe_utils"
_MAX_TOKENS = 1 << 20  # per call; calls are cut into steps, so a large bound costs nothing


@functools.cache
def _options(alignment: int) -> DispatchOptions:
    return DispatchOptions(
        layout="grouped",
        alignment=alignment,
        zero_padding=alignment > 1 or None,
        solo=True,  # pipelines dispatch other micro-batches before they combine this one
    )


class Manager:
    """Takes the arguments of Megatron's manager for DeepEP.

    The dispatcher reads token_probs, token_indices and dispatched_probs. 1F1B overlap also assigns
    the two probabilities, detached, so that the graphs of its parts stay separate: each is read
    where it is used, never remembered elsewhere.
    """

    _shared: dict[Any, AllToAllPool] = {}  # noqa: RUF012  # by group: layers share the memory

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any = None,
    ) -> None:
        self.group = group
        self.router_topk, self.num_experts = router_topk, num_experts
        self._config, self._sizes = config, SizeExchange()
        self._router_dtype = getattr(config, "moe_router_dtype", None)
        self._num_sms = getattr(
            config, "moe_flex_dispatcher_num_sms", None
        )  # None: as many as help
        self.token_probs: Tensor | None = None  # [T, K]
        self.token_indices: Tensor | None = None  # [T, K], -1: dropped
        self.dispatched_probs: Tensor | None = None  # [R], between dispatch and combine
        self._received: tuple[AllToAll, Dispatched] | None = None
        self._tokens_per_expert: Tensor | None = None

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """routing_map [T, E] bool, probs [T, E]; E may be split into several dimensions."""
        shape = (routing_map.shape[0], self.num_experts)
        chosen, probs = routing_map.reshape(shape).bool(), probs.reshape(shape)
        # Chosen experts first: a chosen probability may be 0 too, like capacity-dropped ones.
        order = probs.detach().masked_fill(~chosen, -1.0)
        indices = order.topk(self.router_topk, dim=-1).indices
        kept = chosen.gather(1, indices)
        self.token_probs = torch.where(kept, probs.gather(1, indices), 0.0)
        self.token_indices = indices.masked_fill(~kept, -1)

    def dispatch(
        self,
        hidden_states: Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tensor:
        """[T, H] -> [R, H]. Runs on the current stream; both options are ignored."""
        assert self.token_indices is not None, "dispatch follows setup_metadata"
        assert self.token_probs is not None
        all_to_all, alignment = self._all_to_all(hidden_states), self._alignment()
        sizes = self._sizes.ask(all_to_all, self.token_indices, alignment=alignment)
        got = all_to_all.dispatch(
            hidden_states.contiguous(),
            self.token_indices,
            self.token_probs.float(),
            options=_options(alignment),
            max_tokens=sizes.max_tokens,
            capacity=sizes.capacity,
        )
        self._received, self.dispatched_probs = (all_to_all, got), got.row_weights
        self._tokens_per_expert = sizes.counts.to(torch.int64)
        return got.x

    def combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tensor:
        """[R, H] -> [T, H]: the sum of each token's rows."""
        assert self._received is not None, "combine follows dispatch"
        (all_to_all, got), self._received, self.dispatched_probs = self._received, None, None
        sums: Tensor = all_to_all.combine(hidden_states, got, weighted=False)
        return sums

    def check(self) -> None:
        """Raises the error that broke a communicator of the group, with its whole text.

        dispatch checks by itself. Replays of CUDA graphs do not: call this once per step of them.
        """
        if self.group in self._shared:
            self._shared[self.group].check()

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows unchanged, and their probabilities [R]."""
        weights = self.dispatched_probs
        assert weights is not None, "it follows dispatch, and combine ends it"
        return hidden_states, weights.double() if self._router_dtype == "fp64" else weights

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """[E_local] int64 on the CPU, padding included where rows are padded."""
        assert self._tokens_per_expert is not None, "it is known after dispatch"
        return self._tokens_per_expert

    def _alignment(self) -> int:
        """Rows that each expert's rows are padded to, for quantized GEMMs."""
        if not getattr(self._config, "moe_router_padding_for_quantization", False):
            return 1
        utils = required(_UTILS, "megatron")
        return int(utils.get_align_size_for_quantization(self._config))

    def _all_to_all(self, x: Tensor) -> AllToAll:
        config = config_of(
            num_experts=self.num_experts,
            hidden_dim=x.shape[1],
            topk=self.router_topk,
            max_tokens=_MAX_TOKENS,
            dtype=x.dtype,
            device=x.device.type,
            num_sms=self._num_sms,
            timeout_s=TIMEOUT_S,
        )
        return pool_of(self._shared, self.group).get(config)


@functools.cache
def manager_class() -> Any:
    """Returns Manager as a class of Megatron. Raises ImportError without Megatron."""
    dispatcher = required(_DISPATCHER, "megatron")
    return derived(Manager, dispatcher._DispatchManager)


def offer_permutation() -> bool:
    """Makes --moe-permute-fusion work without Transformer Engine. Returns whether it is ours.

    All or none: Transformer Engine's unpermute cannot read the places of our permute. Call it
    before the model's configuration is made, which asks for these functions.
    """
    utils = required(_UTILS, "megatron")
    found = [getattr(utils, name, None) for name in FUSED]
    if found == list(FUSED.values()):
        return True
    if any(each is not None for each in found):
        return False
    # moe_utils asks HAVE_TE before each function of Transformer Engine, and then the function for
    # None: the others are still refused.
    put({_UTILS: utils}, {**FUSED, "HAVE_TE": True})
    return True


def install() -> None:
    """Replaces Megatron's manager for DeepEP, and offers the fused permutation if there is none.

    Also makes `deep_ep` importable.
    """
    required("megatron", "megatron")
    provide_deep_ep()  # before the module below, which imports it
    put({_DISPATCHER: required(_DISPATCHER, "megatron")}, {"_DeepepManager": manager_class()})
    fused = "moe_p2p's" if offer_permutation() else "Transformer Engine's"
    log.info("Megatron: what DeepEP does is moe_p2p's")
    log.info(f"Megatron: the fused permutation is {fused}")
