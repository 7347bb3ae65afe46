"""Which requests are checked byte by byte. The receiver decides, and says so when it opens one."""

from __future__ import annotations

import random

from moe_p2p.errors import require, require_type


class Verify:
    """mode: "off", "always", or "sample:P" with P from 0 to 1: the share of requests."""

    def __init__(self, mode: str) -> None:
        require_type("verify", mode, str, "a str")
        self.mode = mode
        share = {"off": "0", "always": "1"}.get(mode, mode.removeprefix("sample:"))
        try:
            self.share = float(share)
        except ValueError:
            self.share = -1.0
        require(
            0 <= self.share <= 1,
            f'verify is {mode!r}, must be "off", "always" or "sample:P" with P from 0 to 1',
        )

    def draw(self) -> bool:
        return random.random() < self.share
