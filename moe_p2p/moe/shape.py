"""Sizes: numbers of kernels/abi, and what shapes of results follow from a communicator's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.library import call, numbers_of
from moe_p2p.moe import options as bits

_ops = torch.ops.moe_p2p


class Layout(NamedTuple):
    """Numbers of kernels/abi, from where they are computed.

    slot_head_bytes: of a slot before its payload. handle_meta_words: int32 words of a handle before
    its arrays. handle_num_tokens: index of the word num_tokens. fault_bytes: of a Fault.
    table_bytes: of an EpochTable.
    masks_word, launches_word, next_step_word: indices of 64-bit words of a DeviceState: the address
    of masks, kernels times launch_blocks, the first of two of which the larger is the next step.
    stamps_word: of the address of time stamps, which stamped_steps steps have, num_stamps for each
    phase.
    scale_block: values that share one fp8 scale.
    arrival_rows, arrival_want: of a counter of rows that arrive, and what a dispatch raises it by.
    """

    slot_head_bytes: int
    scale_block: int
    handle_meta_words: int
    handle_num_tokens: int
    fault_bytes: int
    table_bytes: int
    masks_word: int
    launches_word: int
    launch_blocks: int
    next_step_word: int
    stamps_word: int
    stamped_steps: int
    num_stamps: int
    arrival_rows: int
    arrival_want: int


@functools.cache
def layout(topk: int = 1) -> Layout:
    """Returns it for slots of topk experts. InvalidArgumentError if topk is out of range."""
    return Layout(**numbers_of(call(_ops.layout.default, topk)))


SCALE_BLOCK = layout().scale_block
HANDLE_NUM_TOKENS = layout().handle_num_tokens
_HANDLE_META_WORDS = layout().handle_meta_words


def num_scales(hidden_dim: int) -> int:
    """Returns how many fp8 scales a row of that many values has."""
    return -(-hidden_dim // SCALE_BLOCK)


@dataclass(frozen=True, kw_only=True)
class CommunicatorShape:
    """What fake kernels must know of a communicator."""

    world_size: int
    ranks_per_node: int
    num_local_experts: int
    hidden_dim: int
    topk: int
    chunk_tokens: int
    masks: bool = False  # it may lose ranks, or change them
    poisons: bool = False  # check() raises where a sum lacks what a lost rank had

    def handle_words(self, num_rows: int, max_tokens: int) -> int:
        """Returns a handle's size in int32 words; num_rows may be symbolic."""
        num_nodes = self.world_size // self.ranks_per_node
        num_sources = self._num_sources(max_tokens)
        num_slots = num_sources * self.num_slots(max_tokens)
        before_ranks = _HANDLE_META_WORDS + num_sources + num_slots * self.topk
        send_slots = num_rows * (self.ranks_per_node + num_nodes)
        return (before_ranks + 1) // 2 * 2 + 2 * num_slots + send_slots

    def slot_counts(self, handle: Tensor, max_tokens: int) -> Tensor:
        """Returns how many slots each source had in each chunk, a view of int32 [C * W]."""
        return handle.narrow(0, _HANDLE_META_WORDS, self._num_sources(max_tokens))

    def _num_sources(self, max_tokens: int) -> int:
        return max(1, -(-max_tokens // self.chunk_tokens)) * self.world_size

    def num_slots(self, max_tokens: int) -> int:
        """The most slots of a source in a chunk of such a call (Plan::num_slots)."""
        return int(min(max(max_tokens, 1), self.chunk_tokens))  # ops refuse anything but an integer

    def scales_of(self, given: Tensor | None, options: int) -> tuple[int, torch.dtype]:
        """Returns number and type of a row's scales as delivered: as given, or from quantize."""
        if given is not None:
            return given.shape[1], given.dtype
        width = num_scales(self.hidden_dim)
        if bits.scale_format_of(options) == bits.UE8M0:
            return -(-width // 4), torch.int32
        return width, torch.float32


_shapes: dict[int, CommunicatorShape] = {}


def remember_shape(comm: int, shape: CommunicatorShape) -> None:
    """Lets fake kernels of ops on `comm` know their results' shapes."""
    _shapes[comm] = shape


def forget_shape(comm: int) -> None:
    _shapes.pop(comm, None)


def shape_of(comm: int) -> CommunicatorShape:
    shape = _shapes.get(comm)
    if shape is None:
        raise errors.make(errors.ClosedError, f"communicator {comm} is closed")
    return shape
