"""How ranks meet: they exchange bytes through a torch.distributed Store until all know all.

Control path only. Every exchange has a deadline and names who is missing; a rank that fails says so
in its next exchange, so that the others need not wait for the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_p2p import errors

T = TypeVar("T")
_OK, _FAILED = b"+", b"-"


def _store_of(group: dist.ProcessGroup | None) -> tuple[Store, int, int]:
    """The store behind a group (None: the default one), this rank in it and its size."""
    if not dist.is_initialized():
        raise errors.make(
            errors.InvalidArgumentError,
            "there is no process group: call torch.distributed.init_process_group first, or pass "
            "a Store with rank and world_size",
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen.get_group_store(), dist.get_rank(chosen), dist.get_world_size(chosen)


class Bootstrap:
    """One meeting of W ranks. All ranks make the same exchanges in the same order.

    group_or_store: a ProcessGroup, None for the default one, or a Store with rank and world_size.
    timeout_s: deadline of the whole meeting, in seconds, from now.

    As a context manager it tells the others when the block fails here.
    """

    def __init__(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        *,
        rank: int | None,
        world_size: int | None,
        timeout_s: float,
    ) -> None:
        if isinstance(group_or_store, Store):
            errors.require(
                rank is not None and world_size is not None,
                "a Store was given without rank and world_size",
            )
            assert rank is not None
            assert world_size is not None
            errors.require(
                0 <= rank < world_size, f"rank is {rank}, must be from 0 to {world_size - 1}"
            )
            self.store, self.rank, self.world_size = group_or_store, rank, world_size
        else:
            errors.require(
                rank is None and world_size is None,
                "rank and world_size go with a Store; a process group knows its own",
            )
            errors.require(
                group_or_store is None or isinstance(group_or_store, dist.ProcessGroup),
                f"a ProcessGroup, a Store or None is needed, not {type(group_or_store).__name__}",
            )
            self.store, self.rank, self.world_size = _store_of(group_or_store)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._stage = 0
        self._last_key = ""
        # Each rank counts its own meetings; all count alike because all make them in one order.
        self._meeting = int(self._guarded(lambda: self.store.add(f"moe_p2p/count/{self.rank}", 1)))

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            try:
                self._set(_FAILED + str(error).encode())
            except errors.TransportError:
                return  # the store is gone too; the error at hand is the story

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Payloads of all ranks, in rank order. `what` stands in errors.

        Raises TimeoutError naming the ranks that did not come, AbortedError when one failed.
        """
        self._set(_OK + payload)
        keys = [self._key(rank) for rank in range(self.world_size)]
        self._wait(keys, what)
        values = [self._get(key) for key in keys]
        for rank, value in enumerate(values):
            if value[:1] == _FAILED:
                text = value[1:].decode(errors="replace")
                raise errors.make(errors.AbortedError, f"rank {rank} failed before {what}: {text}")
        # Whoever wrote the exchange after the previous one has read the previous one.
        previous, self._last_key = self._last_key, self._key(self.rank)
        if previous:
            self._guarded(lambda: self.store.delete_key(previous))
        self._stage += 1
        return [value[1:] for value in values]

    def _key(self, rank: int) -> str:
        return f"moe_p2p/{self._meeting}/{self._stage}/{rank}"

    def _set(self, value: bytes) -> None:
        # The stub of set() knows str only.
        key = self._key(self.rank)
        self._guarded(lambda: self.store.set(key, value))  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes:
        return self._guarded(lambda: self.store.get(key))

    def _has(self, key: str) -> bool:
        return self._guarded(lambda: self.store.check([key]))

    def _guarded(self, access: Callable[[], T]) -> T:
        try:
            return access()
        except RuntimeError as error:
            raise errors.make(
                errors.TransportError, f"rank {self.rank}: the store failed: {error}"
            ) from None

    def _wait(self, keys: list[str], what: str) -> None:
        remaining = max(self._deadline - time.monotonic(), 0.001)
        try:
            self.store.wait(keys, timedelta(seconds=remaining))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            if not missing or time.monotonic() < self._deadline - 0.5:
                raise errors.make(
                    errors.TransportError, f"rank {self.rank}: the store failed: {error}"
                ) from None
            raise errors.make(
                errors.TimeoutError,
                f"rank {self.rank} of {self.world_size}: waiting for {what}, "
                f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} "
                f"did not come within {self._timeout_s} s",
            ) from None
