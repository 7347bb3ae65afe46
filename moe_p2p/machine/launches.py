"""What `python -m moe_p2p tune` measures of a GPU: launch shapes, and which steps go in bulk."""

from __future__ import annotations

from typing import NamedTuple

_FEW_SMS = 48  # up to here blocks are large, each alone on its multiprocessor
BULK_STEP = 256  # tokens of a step up to which rows go through registers
FEW_BULK_STEP = 128  # the same on few multiprocessors


def few(num_sms: int | None) -> bool:
    """Whether blocks are large, each alone on its multiprocessor."""
    return num_sms is not None and num_sms <= _FEW_SMS


class LaunchShape(NamedTuple):
    """Workers of a block in the half that works on own tokens and in the one that works on slots.

    token_blocks, slot_blocks: the most that each half gets, and their proportion when blocks are
        few.
    """

    block_threads: int
    token_workers: int
    slot_workers: int
    blocks_per_sm: int
    token_blocks: int
    slot_blocks: int


class TunedLaunch(NamedTuple):
    """A shape that `python -m moe_p2p tune` found faster, and the kernels that it is for.

    adds: combines, else dispatches. few: with few multiprocessors, else with all. ranks: of the
    node, the only one. least_tokens, most_tokens: of a step.
    """

    adds: bool
    few: bool
    ranks: int
    row_bytes: int
    least_tokens: int
    most_tokens: int
    shape: LaunchShape

    def is_for(
        self, row_bytes: int, step_tokens: int, num_sms: int | None, *, adds: bool, ranks: int
    ) -> bool:
        return (self.adds, self.few, self.ranks, self.row_bytes) == (
            adds,
            few(num_sms),
            ranks,
            row_bytes,
        ) and self.least_tokens <= step_tokens <= self.most_tokens


class BulkSteps(NamedTuple):
    """Which steps of one node go in bulk, alike on all ranks.

    few: with few multiprocessors, steps of more tokens. above: without num_sms, steps of more, by
    `blocks` multiprocessors; 0: none.
    """

    few: int
    above: int = 0
    blocks: int = 0

    def num_sms(self, step_tokens: int) -> int | None:
        """What num_sms=None stands for."""
        return self.blocks if 0 < self.above < step_tokens else None
