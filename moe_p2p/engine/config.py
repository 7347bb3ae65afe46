"""The configuration of an engine. Checked here field by field, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

from moe_p2p import errors
from moe_p2p.machine.transport import (
    CPU_KEY,
    FLAGS_KEY,
    MAX_NICS,
    OF_ENGINE,
    in_environment,
    setting,
    without,
)

MAX_CPUS = 1 << 16
Wait = Literal["spin", "yield", "sleep"]
ArrivalFlags = Literal["auto", "write", "gdrcopy", "relay"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of an `Engine`: of the one that an `AllToAll` makes, or of one alone.

    transport: "auto", "libfabric", "verbs", "loopback" or another provider. "auto": environment,
        else libfabric where EFA devices are, verbs where other RDMA devices are, else loopback;
        an AllToAll whose ranks are all of one node takes loopback.
    nics_per_rank: NICs of the engine, 1 to 8. None: the nearest to its GPU; loopback: 2.
    nics: RDMA devices to use instead, "mlx5_0,mlx5_1": the NICs of the rank in this order.
    transport_settings: "key=value,..." for the provider, for example "seed=7,gbps=400"; also
        proxy_cpu, the core that the engine's thread stays on, and arrival_flags. Empty: from the
        environment, if they are for this transport.
    timeout_s: deadline of every wait, in seconds.
    wait: how waiting threads wait: "spin", "yield" or "sleep".

    Raises InvalidArgumentError naming the field, its value and the limit.
    """

    transport: str = "auto"
    nics_per_rank: int | None = None
    nics: str = ""
    transport_settings: str = ""
    timeout_s: float = 30.0
    wait: Wait = "sleep"

    def __post_init__(self) -> None:
        self._check_range("nics_per_rank", 1, MAX_NICS)
        self._check_choice("wait", get_args(Wait))
        errors.require(
            isinstance(self.timeout_s, (int, float)) and 0 < self.timeout_s < math.inf,
            f"timeout_s is {self.timeout_s!r}, must be a positive number of seconds",
        )
        for name in ("transport", "transport_settings", "nics"):
            value = getattr(self, name)
            errors.require(isinstance(value, str), f"{name} is {value!r}, must be a string")
        cpu = setting(self.all_settings, CPU_KEY) or "0"
        errors.require(
            cpu.isdecimal() and int(cpu) < MAX_CPUS,
            f"transport_settings: {CPU_KEY}={cpu} is refused; it must be an integer from 0 to "
            f"{MAX_CPUS - 1}",
        )
        errors.require(
            self.arrivals in get_args(ArrivalFlags),
            f"transport_settings: {FLAGS_KEY}={self.arrivals} is refused; it must be one of "
            f"{get_args(ArrivalFlags)}",
        )

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        optional = self.__dataclass_fields__[name].default is None
        if value is None and optional:
            return
        errors.require(
            isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
            f"{name} is {value!r}, must be an integer from {low} to {high}",
        )

    def _check_choice(self, name: str, choices: tuple[object, ...]) -> None:
        value = getattr(self, name)
        shown = ", ".join(map(str, choices))
        errors.require(value in choices, f"{name} is {value!r}, must be one of {shown}")

    @property
    def all_settings(self) -> str:
        """transport_settings, or those in the environment that are for this transport."""
        return self.transport_settings or in_environment(self.transport)

    @property
    def provider_settings(self) -> str:
        """all_settings, as the provider reads them."""
        return without(self.all_settings, *OF_ENGINE)

    @property
    def proxy_cpu(self) -> int:
        """The core that the engine's thread stays on; -1: any."""
        return int(setting(self.all_settings, CPU_KEY) or -1)

    @property
    def arrivals(self) -> str:
        """How GPUs of communicators on the engine see what has arrived from other nodes: a NIC
        stores a flag behind the data ("write"), the engine's thread does ("gdrcopy"), or it raises
        a word on the host ("relay"); "auto": the first that can be."""
        return setting(self.all_settings, FLAGS_KEY) or "auto"

    def check_beside_engine(self) -> None:
        """Raises when a field is set that a given engine already has."""
        for field in dataclasses.fields(EngineConfig):
            value = getattr(self, field.name)
            errors.require(
                value == field.default or field.name in ("timeout_s", "wait"),  # of calls, too
                f"{field.name} is {value!r} and an engine is given, which has its own; "
                f"make the engine with it",
            )
