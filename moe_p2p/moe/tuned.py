"""What rank 0 of a communicator has measured (machine/tuned.py), as all its ranks use it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from moe_p2p.machine.launches import BulkSteps
from moe_p2p.machine.tuned import Tuned
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.gpu.launch_shape import Chosen, can_go_in_bulk


class Shared(NamedTuple):
    """Tuned.shared of rank 0, as all ranks use it. part_bytes: None: it has measured none."""

    bulk: BulkSteps | None = None
    part_bytes: int | None = None

    @staticmethod
    def of(numbers: tuple[int, ...]) -> Shared:
        if len(numbers) != 4:
            return Shared()
        *bulk, part_bytes = numbers
        return Shared(BulkSteps(*bulk), None if part_bytes < 0 else part_bytes)

    def with_parts(self, config: AllToAllConfig, provider: str) -> AllToAllConfig:
        """config, with parts as measured, else the provider's, where it leaves them open."""
        return config.with_parts(provider, self.part_bytes)

    def on_gpu(
        self, config: AllToAllConfig, world_size: int, local: int, provider: str
    ) -> AllToAllConfig:
        """Likewise, and with the multiprocessors that are best for its steps."""
        config = self.with_parts(config, provider)
        if config.num_sms is not None or self.bulk is None or config.mask_lost_ranks:
            return config
        num_sms = self.bulk.num_sms(config.step_tokens)
        if num_sms is None or not can_go_in_bulk(world_size, local, num_sms):
            return config
        return dataclasses.replace(config, num_sms=num_sms)

    def chosen(self, mine: Tuned) -> Chosen:
        return Chosen(mine.launches, self.bulk)
