"""How an engine rank gets the current version from others that have the same tensors. Used by
engine_rank.py, by ranks that join a fleet that runs, and by those that an update left out.

A peer lends its live tensors for reading and does nothing else for it. Beside them lies a word of
three numbers, a count, the stamp and the version; the count is odd while the tensors change. A
reader that finds the same even count before and after has read that version. It is in host memory,
where it takes no memory of the GPU and no kernel to change it.
"""

from __future__ import annotations

import functools
import hashlib
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory, Region, Request
from moe_p2p.errors import MoeP2pError, TimeoutError, make
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.member import Member
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.weights import boxes
from moe_p2p.weights.attempt import PRIORITY
from moe_p2p.weights.layout import Param, WeightLayout
from moe_p2p.weights.maxima import settle

_WORD_BYTES = 24
_LEAST_END_S = 1.0


def signature(layout: WeightLayout, rank: int, tensors: Mapping[str, Tensor]) -> str:
    """Equal for ranks whose tensors hold the same elements in the same places."""
    found = hashlib.sha256()
    for each in layout.params:
        for position in each.positions(rank):
            blocks = each.blocks
            row = (each.name, each.tensor, each.offset, each.dtype, blocks, each.finalize)
            found.update(repr((row, _held(_plain(each), position))).encode())
    shapes = sorted((name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items())
    found.update(repr(shapes).encode())
    return found.hexdigest()[:32]


def _plain(param: Param) -> tuple[Any, ...]:
    return (param.shape, param.mesh, param.placements, param.window, param.order, param.strides,
            param.part)  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def _held(how: tuple[Any, ...], position: int) -> str:
    shape, mesh, placements, window, order, strides, part = how
    ranks = range(torch.Size(mesh).numel())
    param = Param("-", shape, "uint8", ranks, mesh, placements, window, "", 0, order, strides,
                  part=part)  # fmt: skip
    return repr(boxes.held(param, position))


class State(NamedTuple):
    """stamp: which bytes these are. version: what they are called."""

    stamp: int
    version: int


class Lent:
    """An engine rank's live tensors, for others to read; shut until the first version."""

    def __init__(self, engine: Engine, tensors: Mapping[str, Tensor]) -> None:
        self._engine = engine
        self._word = torch.tensor([1, -1, -1], dtype=torch.int64, device="cpu")
        self._count = 1
        self._memory = dict[str, Memory]()
        self._of_word: Memory | None = None
        try:
            for name, each in tensors.items():
                if each.numel():
                    self._memory[name] = engine.register(each)
            self._of_word = engine.register(self._word)
        except BaseException:
            self.close()
            raise

    def address(self) -> dict[str, Any]:
        assert self._of_word is not None
        tensors = {name: each.descriptor.hex() for name, each in self._memory.items()}
        return {"address": self._engine.address.hex(), "tensors": tensors,
                "word": self._of_word.descriptor.hex()}  # fmt: skip

    def shut(self) -> None:
        """Before kernels that change the tensors are launched."""
        if not self._count % 2:
            self._count += 1
            self._word[0:1].fill_(self._count)

    def close(self) -> None:
        """Who has read before finds an odd count, or no memory."""
        self.shut()
        while self._memory:
            name = next(iter(self._memory))
            self._memory[name].unregister()
            del self._memory[name]
        if self._of_word is not None and self._of_word.registered:
            self._of_word.unregister()

    def open(self, stamp: int, version: int) -> None:
        """Once the tensors have changed: kernels that change them are over."""
        self._word[1:2].fill_(stamp)
        self._word[2:3].fill_(version)
        self._count += 1
        self._word[0:1].fill_(self._count)


class PeerReader:
    """places: memory, first byte and size of each tensor that is read into."""

    def __init__(self, engine: Engine, places: Mapping[str, tuple[Memory, int, int]]) -> None:
        self._engine, self._places = engine, places
        word = torch.zeros(3, dtype=torch.int64, device="cpu")
        settle(memory.tensor for memory, _, _ in places.values())
        self._into = engine.register(word)

    def read(self, lent: Mapping[str, Any], deadline: Deadline) -> State | None:
        """What was read; None where the peer's changed meanwhile, or it is gone."""
        peer, requests = None, list[Request]()
        try:
            address = bytes.fromhex(lent["address"])
            peer = self._engine.connect(address, priority=PRIORITY)

            def resolve(descriptor: str) -> Region:
                return self._engine.resolve(bytes.fromhex(descriptor), peer, priority=PRIORITY)

            word = resolve(lent["word"])
            before = self._word(word, deadline)
            if before[0] % 2:
                return None
            for name, (memory, offset, nbytes) in self._places.items():
                region = resolve(lent["tensors"][name])
                requests.append(
                    self._engine.read(
                        memory, region, nbytes=nbytes, offset=offset, priority=PRIORITY
                    )
                )
            for request in requests:
                request.wait(deadline.left)
            return State(*before[1:]) if self._word(word, deadline) == before else None
        except (MoeP2pError, KeyError):
            return None
        finally:
            if peer is not None:
                with suppress(RuntimeError):
                    peer.disconnect()
            _end(requests, max(deadline.left, _LEAST_END_S))

    def close(self) -> None:
        with suppress(RuntimeError):
            self._into.unregister()

    def _word(self, region: Region, deadline: Deadline) -> list[int]:
        request = self._engine.read(self._into, region, nbytes=_WORD_BYTES, priority=PRIORITY)
        request.wait(deadline.left)
        return [int(each) for each in self._into.tensor.tolist()]


def _end(requests: Sequence[Request], timeout_s: float) -> None:
    """What a peer may still answer lands where an update would: raises rather than go on then."""
    until = time.monotonic() + timeout_s
    for request in requests:
        with suppress(RuntimeError):  # TimeoutError too
            request.wait(max(until - time.monotonic(), 0.0))
    late = sum(not request.done() for request in requests)
    if late:
        text = f"a peer may still answer {late} reads of its version: start this generator anew"
        raise make(TimeoutError, text)


def newest(words: StoreKeys, member: Member, alike: str) -> list[str]:
    """Ids of the engine ranks with the newest stamp, of those with the signature `alike`; each
    reader has another first one, so that they do not all read from the same peer."""
    peers = [
        other
        for other, each in sorted(member.members().items())
        if each.get("signature") == alike and not each["joining"] and other != member.id
    ]
    runs = {other: words.get(f"runs/{other}") for other in peers}
    stamp = max((each[0] for each in runs.values() if each is not None), default=None)
    found = [other for other in peers if runs[other] is not None and runs[other][0] == stamp]
    first = zlib.crc32(member.name.encode()) % max(len(found), 1)
    return [*found[first:], *found[:first]]


def read_one(
    engine: Engine,
    words: StoreKeys,
    peers: Sequence[str],
    places: Mapping[str, tuple[Memory, int, int]],
    deadline: Deadline,
) -> State | None:
    """Reads from the first of `peers` that has a version; None: none has."""
    if not peers:
        return None
    reader = PeerReader(engine, places)
    try:
        for who in peers:
            lent = words.get(f"live/{who}")
            found = None if lent is None else reader.read(lent, deadline)
            if found is not None:
                return found
        return None
    finally:
        reader.close()
