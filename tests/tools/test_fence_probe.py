"""`python -m moe_p2p doctor --fence`: yes of devices that keep to the fence, else no."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_p2p import errors
from moe_p2p.tools import fence_probe
from moe_p2p.tools.doctor import command


class Request:
    def __init__(self, stopped: bool) -> None:
        self.stopped = stopped

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        if self.stopped:
            raise errors.make(errors.PeerDeadError, "severed")


class Engine:
    """Its writes are stopped by `sever`, but for `late`, which lands afterwards."""

    late = stops = True
    inbox: torch.Tensor
    problem = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.address = b""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def register(self, tensor: torch.Tensor, *, in_order: bool = False) -> Any:
        if in_order:
            type(self).inbox = tensor
        return SimpleNamespace(descriptor=b"", unregister=lambda: None)

    def grant(self, memory: Any, peer: str) -> Any:
        return SimpleNamespace(revoke=lambda: None)

    def connect(self, address: bytes, *, tag: int) -> Any:
        assert tag > 0

        def disconnect() -> None:
            if self.late:
                self.inbox[17] = 1

        return SimpleNamespace(disconnect=disconnect)

    def resolve(self, descriptor: bytes, peer: Any) -> None:
        return

    def write(self, source: Any, region: Any) -> Request:
        return Request(self.stops)

    def sever(self, tag: int, memories: list[Any], *, timeout_s: float) -> None:
        if self.problem:
            raise errors.make(errors.TimeoutError, self.problem)


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = [
        SimpleNamespace(name="mlx5_0", kind="verbs", problem=""),
        SimpleNamespace(name="mlx5_1", kind="verbs", problem="the link is down"),
        SimpleNamespace(name="efa0", kind="efa", problem=""),
    ]
    monkeypatch.setattr(fence_probe.topology, "read_host", lambda: SimpleNamespace(nics=nics))
    monkeypatch.setattr(fence_probe, "ROUNDS", 2)
    monkeypatch.setattr(fence_probe.torch.cuda, "device_count", lambda: 0)
    probe = fence_probe.probe
    monkeypatch.setattr(fence_probe, "probe", lambda *a: probe(*a, rounds=2))


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ({"late": False}, 0, "yes: MOE_P2P_KV_FENCE=queue_pair holds here\n"),
        ({"late": True}, 1, "bytes changed after 2 of them"),
        ({"late": False, "stops": False}, 1, "2 fences, 0 with writes under way"),
        ({"late": False, "problem": "have not ended"}, 1, "have not ended"),
    ],
)
def test_yes_or_no(
    how: dict[str, Any], status: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fence_probe, "Engine", type("Engine", (Engine,), how))
    assert command.main(["--fence"]) == status
    printed = capsys.readouterr().out
    assert says in printed
    assert "mlx5_1" not in printed
    assert ("no: MOE_P2P_KV_FENCE=key stays" in printed) == bool(status)


def test_without_a_device_it_is_no(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(fence_probe.topology, "read_host", lambda: SimpleNamespace(nics=[]))
    assert command.main(["--fence"]) == 1
    assert "there is no active RDMA device" in capsys.readouterr().out
