"""A worker of KV transfer as its lease, and its hello, have it. The leases are moe_p2p.fleet's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from moe_p2p.errors import ProtocolError, make
from moe_p2p.fleet.leases import TorchLeases

__all__ = ["TorchLeases", "Worker"]


@dataclass(frozen=True)
class Worker:
    """One process of an instance. incarnation: its id among the members of its store
    (moe_p2p/fleet/README.md), so that a worker that comes back under the same name is not taken for
    the one that left."""

    instance: str
    rank: int
    role: str
    incarnation: str = ""
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
            return Worker.of(json.loads(data))
        except ValueError as error:
            raise make(ProtocolError, f"bytes that are not a worker's: {error!r}") from error

    @staticmethod
    def of(record: Mapping[str, Any], **changes: Any) -> Worker:
        """record: of a lease, which has more."""
        try:
            found = {each.name: record[each.name] for each in fields(Worker)}
            return Worker(**found | changes)
        except (KeyError, TypeError) as error:
            raise make(ProtocolError, f"a lease that is not a worker's: {error!r}") from error
