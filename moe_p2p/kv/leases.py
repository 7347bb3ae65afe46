"""A worker of KV transfer as its lease has it. The leases are moe_p2p.fleet's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from moe_p2p.errors import ProtocolError, make
from moe_p2p.fleet.leases import Leases, TorchLeases

__all__ = ["Leases", "TorchLeases", "Worker"]


@dataclass(frozen=True)
class Worker:
    """One process of an instance. incarnation: another one after each start, so that a worker that
    comes back under the same name is not taken for the one that left."""

    instance: str
    rank: int
    role: str
    incarnation: str
    host: str = ""
    port: int = 0
    secret: str = ""  # of its port, unless MOE_P2P_SECRET is set

    @property
    def name(self) -> str:
        return f"{self.instance}/{self.rank}"

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Worker:
        try:
            return Worker(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise make(ProtocolError, f"a lease that is not a worker's: {error!r}") from error
