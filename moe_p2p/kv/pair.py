"""Two workers that know each other, from their meeting to the fence; then they may meet anew.

Each side registers its KV memory once for each pair, so each pair has a key of its own, and
withdrawing it reaches nobody else; its connections have a tag of their own, by which they can be
severed alone. `Pair.fence` is the one place where either is done: when it returns, nothing of the
other worker changes memory here any more, and no NIC here reads for it.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from moe_p2p import log
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import LayerPlace, Memory, PageRows, Peer, Region
from moe_p2p.errors import ClosedError, MoeP2pError, ProtocolError, make, require
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.letter import check_letter, letter
from moe_p2p.kv.channel import Message
from moe_p2p.kv.layout import KVLayout
from moe_p2p.kv.link import KVLink
from moe_p2p.kv.memory import (
    KVCache,
    KVMemory,
    KVRequest,
    layout_from_bytes,
    layout_to_bytes,
    resolve,
)
from moe_p2p.kv.plan import KVMove, KVPlan, kv_plan
from moe_p2p.kv.ring import Parts, Ring

# The two fences. QUEUE_PAIR: of verbs alone, faster where deregistration takes long.
KEY, QUEUE_PAIR = "key", "queue_pair"
SEVER_S = 1.0  # after which a fence by queue pair gives up, and the key is withdrawn


Placed = tuple[KVMove, PageRows, Tensor]  # of layers: a move, its rows, their places


class Sends(Protocol):
    """A `Channel`, as far as a pair needs it."""

    def send(self, message: Message) -> None: ...

    def end(self) -> None: ...

    def wait_sent(self, deadline: Deadline) -> None: ...

    def close(self) -> None: ...


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
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Worker:
        try:
            return Worker.of(json.loads(data))
        except ValueError as error:
            raise make(ProtocolError, f"bytes that are not a worker's: {error!r}") from error

    @staticmethod
    def of(record: Mapping[str, Any], **changes: str) -> Worker:
        """record: of a lease, which has more."""
        try:
            found = {each.name: record[each.name] for each in dataclasses.fields(Worker)}
            return Worker(**found | changes)
        except (KeyError, TypeError) as error:
            raise make(ProtocolError, f"a lease that is not a worker's: {error!r}") from error


def _name_in(message: Message) -> str:
    """Who says hello; messages of other versions may have anything there."""
    try:
        return Worker.from_bytes(bytes(message.arrays[0])).name
    except (MoeP2pError, IndexError, TypeError):
        return "a worker"


@dataclass(frozen=True)
class Hello:
    """What one worker says to another when they meet."""

    worker: Worker
    layout: KVLayout
    memory: KVMemory
    address: bytes
    control: bytes  # descriptor of footers and nonces
    num_nics: int
    footer_bytes: int
    link: KVLink
    parts: Parts  # of its ring
    ring: bytes  # the ring's descriptor; empty: it has none
    tag: int  # the receiver's: the tag of all connections of the pair

    def to_message(self) -> Message:
        fields = {
            "letter": letter(),
            "num_nics": self.num_nics,
            "tail_bytes": self.footer_bytes,
            "parts": self.parts,
            "tag": self.tag,
        }
        arrays = (
            self.worker.to_bytes(),
            layout_to_bytes(self.layout),
            self.memory.to_bytes(),
            self.address,
            self.control,
            self.link.to_bytes(),
            self.ring,
        )
        return Message("hello", fields, arrays)

    @staticmethod
    def from_message(message: Message) -> Hello:
        if message.kind != "hello":
            raise make(ProtocolError, f"a worker says {message.kind!r} where 'hello' comes first")
        check_letter(_name_in(message), message.fields.get("letter"))
        worker, layout, memory, address, control, link, ring = message.arrays
        return Hello(
            Worker.from_bytes(worker),
            layout_from_bytes(layout),
            KVMemory.from_bytes(memory),
            address,
            control,
            int(message.fields["num_nics"]),
            int(message.fields["tail_bytes"]),
            KVLink.from_bytes(link),
            Parts(*map(int, message.fields["parts"])),
            ring,
            int(message.fields["tag"]),
        )


class PairMemory:
    """This side's memory, registered for one pair. by: its fence, KEY or QUEUE_PAIR."""

    def __init__(
        self, engine: Engine, cache: KVCache, control: Tensor, ring: Ring, by: str
    ) -> None:
        self.engine, self.by = engine, by
        self.tag = secrets.randbits(62) + 1
        self._registered: list[Memory] = []
        self.ring: Memory | None = None
        staging = (ring.tensor,) if ring.num_parts else ()
        try:
            for tensor in (*cache.tensors, control, *staging):
                self._registered.append(engine.register(tensor, in_order=by == QUEUE_PAIR))
        except BaseException:
            self.withdraw()
            raise
        self.kv = self._registered[: len(cache.tensors)]
        self.control = self._registered[len(self.kv)]
        if staging:
            self.ring = self._registered[-1]
        self.num_regions = len(self._registered)

    def descriptors(self) -> tuple[bytes, ...]:
        return tuple(memory.descriptor for memory in self.kv)

    @property
    def is_registered(self) -> bool:
        return bool(self._registered)

    def withdraw(self) -> None:
        """When it returns, nothing of the peer reaches the memory. Raises TimeoutError where the
        NIC cannot promise that yet; to be called again."""
        while self._registered:
            self._registered[-1].unregister()
            self._registered.pop()

    def sever(self, tag: int) -> None:
        """As `withdraw`, by ending the pair's connections; the keys stay."""
        self.engine.sever(tag, self._registered, timeout_s=SEVER_S)


@dataclass(eq=False)
class Pair:
    """requests: the plan's, by layer, with the places of both sides."""

    theirs: Hello
    channel: Sends
    memory: PairMemory
    plan: KVPlan
    requests: dict[int, list[KVRequest]]
    peer: Peer | None
    regions: list[Region]
    control: Region  # footers at a receiver, nonces at a sender
    tag: int  # of its connections, both ways
    ring: Region | None = None  # of the other one
    lost: str = ""
    fenced: bool = False
    fence_retries: int = 0
    fenced_by: str = KEY
    _fencing: bool = False  # by a thread, which owns the fence until it has ended
    _fence_at: float = 0.0  # not before: one failed, or writes may still end
    _placed: dict[tuple[int, ...], list[Placed]] = field(default_factory=dict)

    @property
    def worker(self) -> Worker:
        return self.theirs.worker

    @property
    def name(self) -> str:
        return self.worker.name

    @cached_property
    def layers(self) -> list[int]:
        """The model's layers that travel between the two."""
        return sorted(self.requests)

    @cached_property
    def packs(self) -> bool:
        return any(move.why_packed for move in self.plan.moves)

    def placed(self, engine: Engine, layers: tuple[int, ...]) -> list[Placed]:
        """Where these layers lie, for each move but packed ones, as `write_layers` takes it."""
        if layers not in self._placed:
            by_move: defaultdict[int, list[LayerPlace]] = defaultdict(list)
            moves = {}
            for request in (each for layer in layers for each in self.requests[layer]):
                if request.move.why_packed:
                    continue  # moe_p2p/kv/packing.py
                ours, theirs = request.source, request.target
                place = LayerPlace(
                    self.memory.kv[ours.region],
                    ours.offset,
                    self.regions[theirs.region],
                    theirs.offset,
                    request.layer,
                )
                moves[id(request.move)] = request.move
                by_move[id(request.move)].append(place)
            self._placed[layers] = [
                (moves[key], page_rows(moves[key], here="source"), engine.layer_places(places))
                for key, places in by_move.items()
            ]
        return self._placed[layers]

    def send(self, kind: str, *arrays: bytes, **fields: object) -> None:
        self.channel.send(Message(kind, fields, arrays))

    def lose(self, why: str) -> None:
        """Nothing is sent any more; the fence follows."""
        self.lost = why
        self.channel.close()

    def delay_fence(self, until: float) -> None:
        """Its fence ends writes, and those under way may end by themselves."""
        self._fence_at = until

    def take_fence(self, now: float) -> bool:
        """Whether the caller is to try it now: it then owns the fence until `give_fence`."""
        if self.fenced or self._fencing or now < self._fence_at:
            return False
        self._fencing = True
        return True

    def give_fence(self, *, fenced: bool) -> None:
        self._fencing, self.fenced = False, fenced

    def retry_fence(self, at: float) -> None:
        """It failed."""
        self._fence_at = at
        self.fence_retries += 1

    def fence(self) -> None:
        """May take milliseconds. Raises TimeoutError where it must be called again."""
        peer, self.peer = self.peer, None  # once: what follows ends all of its requests, too
        if peer is not None:
            peer.disconnect()
        if self.memory.by == QUEUE_PAIR:
            try:
                self.memory.sever(self.tag)
                self.fenced_by = QUEUE_PAIR
                return
            except ClosedError:
                raise
            except MoeP2pError as error:
                log.warning(f"{self.name} is fenced by its key instead: {error}")
        self.memory.withdraw()

    def close(self) -> None:
        """After the fence: gives back what it left."""
        self.memory.withdraw()


def agreed_link(sender: Hello, receiver: Hello) -> KVLink:
    """The sender's NICs decide; rows are packed where both workers have a ring for them."""
    link = sender.link
    if sender.ring and receiver.ring:
        require(
            link.packed_write_bytes <= receiver.parts.part_bytes,
            f"{sender.worker.name} packs {link.packed_write_bytes} bytes in a write, the ring of "
            f"{receiver.worker.name} takes {receiver.parts.part_bytes}: give both the same "
            "KVLink.packed_write_bytes",
        )
        return link
    require(
        link.pack is not True,
        f"{sender.worker.name} packs all rows, {receiver.worker.name} has no ring for them: its "
        "KVLink has pack=False",
    )
    return dataclasses.replace(link, pack=False)


def make_pair(
    engine: Engine,
    cache: KVCache,
    memory: PairMemory,
    theirs: Hello,
    channel: Sends,
    *,
    sends: bool,
    link: KVLink,
) -> Pair:
    """Resolves all that requests will need. Connects the engines; the other one does nothing.
    link: the sender's, as both agree about it (`agreed_link`)."""
    ours = cache.memory(memory.descriptors())
    sides = (cache.layout, theirs.layout) if sends else (theirs.layout, cache.layout)
    ranks = (cache.rank, theirs.memory.rank) if sends else (theirs.memory.rank, cache.rank)
    plan = kv_plan(*sides, link=link)
    found = resolve(plan, *((ours, theirs.memory) if sends else (theirs.memory, ours)))
    by_layer: defaultdict[int, list[KVRequest]] = defaultdict(list)
    for request in found:
        by_layer[request.layer].append(request)
    assert all((r.move.source_rank, r.move.target_rank) == ranks for r in found)
    tag = theirs.tag if sends else memory.tag
    peer = engine.connect(theirs.address, tag=tag)
    try:
        regions = [engine.resolve(each, peer) for each in theirs.memory.regions]
        control = engine.resolve(theirs.control, peer)
        ring = engine.resolve(theirs.ring, peer) if theirs.ring else None
    except BaseException:
        peer.disconnect()
        raise
    return Pair(theirs, channel, memory, plan, dict(by_layer), peer, regions, control, tag, ring)


def page_rows(move: KVMove, *, here: str) -> PageRows:
    """In the engine's words: `here` is the side that calls it."""
    shape = move.shape
    units = (shape.source_unit, shape.target_unit)
    rows = (shape.source_row_stride, shape.target_row_stride)
    if here == "target":
        units, rows = units[::-1], rows[::-1]
    return PageRows(
        page_bytes=move.unit_bytes,
        stride=units[0],
        region_stride=units[1],
        row_bytes=shape.row_bytes,
        row_stride=rows[0],
        region_row_stride=rows[1],
    )
