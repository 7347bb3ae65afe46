"""TorchTitan's pushes beside an update that still sends; no TorchTitan is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moe_p2p import TimeoutError
from moe_p2p.integrations.weights import torchtitan


class SlowTrainer:
    def __init__(self) -> None:
        self.go_on, self.sent = threading.Event(), list[tuple[int, float]]()

    def update(self, version: int) -> None:
        assert self.go_on.wait(60)
        self.sent.append((version, float(self.host["w"][0])))


def test_nothing_is_copied_over_what_is_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would be another version's, and published as this one."""
    monkeypatch.setattr(torchtitan, "_TIMEOUT_S", 0.05)
    pushes, trainer = torchtitan.Pushes(), SlowTrainer()
    pushes._host = trainer.host = {"w": torch.zeros(2)}  # type: ignore[attr-defined]
    pushes.__dict__["_trainer"] = trainer

    def push(value: float) -> None:
        pushes.put({"w": torch.full((2,), value)})

    push(1.0)
    for _ in range(2):  # a caller that tries again
        with pytest.raises(TimeoutError, match="the update to version 1 is under way"):
            push(2.0)
    trainer.go_on.set()
    monkeypatch.setattr(torchtitan, "_TIMEOUT_S", 60)
    push(2.0)
    sending: Any = pushes._sending
    sending.result(60)
    assert trainer.sent == [(1, 1.0), (2, 2.0)]
