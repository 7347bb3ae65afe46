"""Arguments of weight updates: wrong ones are refused where they are given. Later an engine rank
would find them, after the fleet has decided."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import require, require_type
from moe_p2p.weights.layout import WeightLayout

_MOST_VERSION = (1 << 63) - 1  # a word beside the tensors has it
_MOST_S = 1e6


def check_store(who: str, store: Any) -> None:
    require(
        hasattr(store, "compare_set"),
        f"{who}: store is {store!r}, must be a torch store, as TCPStore",
    )


def check_rank(
    who: str,
    engine: Engine,
    layout: WeightLayout,
    rank: int,
    tensors: Mapping[str, Tensor],
    seconds: Mapping[str, float],
) -> None:
    """Of a trainer or engine rank. seconds: timeout_s and lease_s."""
    require_type(f"{who}: engine", engine, Engine, "an Engine")
    require_type(f"{who}: layout", layout, WeightLayout, "a WeightLayout")
    require(
        type(rank) is int and 0 <= rank < layout.world_size,
        f"{who}: rank is {rank!r}, must be an int from 0 to {layout.world_size - 1}",
    )
    check_tensors(f"{who}: tensors", tensors)
    for name, value in seconds.items():
        check_seconds(f"{who}: {name}", value)


def check_engine(
    who: str, mode: str, engine_ranks: Sequence[int], agree: object, replica: str
) -> bool:
    """Whether this engine rank shares its inference engine with others."""
    require(mode in ("shadow", "in_place"), f"mode is {mode!r}, must be 'shadow' or 'in_place'")
    require_type(f"{who}: replica", replica, str, "a str")
    require_type(f"{who}: engine_ranks", engine_ranks, Sequence, "a list of ints")
    require(agree is None or callable(agree), f"{who}: agree is {agree!r}, must be a function")
    shared = len(engine_ranks) > 1
    require(
        agree is not None or not shared or (mode == "in_place" and not replica),
        f"{who}: ranks {tuple(engine_ranks)} of an engine go to a version together; pass agree",
    )
    return shared


def check_seconds(name: str, value: float) -> None:
    require(
        type(value) in (int, float) and 0 < value <= _MOST_S,
        f"{name} is {value!r}, must be a positive number of seconds, up to {_MOST_S:g}",
    )


def check_tensors(name: str, tensors: Mapping[str, Tensor]) -> None:
    require_type(name, tensors, Mapping, "a dict of torch.Tensors by name")
    for key, each in tensors.items():
        require_type(f"{name}[{key!r}]", each, Tensor)
        require(
            each.device.type != "meta", f"{name}[{key!r}] is on the meta device: it has no bytes"
        )


def check_update(
    version: int, only: Collection[str] | None, changed: bool, names: Sequence[str]
) -> None:
    """names: parameters of the plan."""
    require(
        type(version) is int and 0 <= version <= _MOST_VERSION,
        f"update: version is {version!r}, must be an int from 0 to 2^63 - 1",
    )
    require(
        only is None or not changed, "update: only names parameters, changed finds them: pass one"
    )
    if only is not None:
        require_type("update: only", only, Collection, "names of parameters")
        unknown = sorted(set(only) - set(names))
        require(not unknown, f"update: no generator gets {', '.join(unknown[:3])}")


@contextmanager
def alone(lock: threading.Lock, what: str) -> Iterator[None]:
    """Calls of two threads would send tensors of one as the version of the other."""
    require(
        lock.acquire(blocking=False), f"{what}: an update is under way; call it when that returned"
    )
    try:
        yield
    finally:
        lock.release()
