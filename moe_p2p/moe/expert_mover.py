"""Moves experts between slots of ranks while steps go on, and changes the map for all at once.

    mover = ExpertMover(store, all_to_all.engine, [(expert_map, [w13, w2])], rank=r, world_size=W)
    mover.move(placement)              # all ranks, the same; returns at once
    for number in count():
        received = all_to_all.dispatch(x, expert_map.to_slots(topk_idx), ...)
        ...
        mover.step(number)             # True: this step was the last one with the old placement

Each rank reads what its slots will hold, by `Engine.read` with the priority of weights: into its
own slots where these are empty, else into a staging area, from which it copies when all ranks have
everything. So until then no slot that is in use has changed, and the old placement holds.

Who decides: all ranks, each by itself, from the same votes. In each `step` of a move a rank waits
for the votes of all others' previous `step`, which have mostly arrived since, and then sends its
own. A vote has the digest of the placement, the number of the step and how far the rank is. All
ranks see the same votes of a round, so they begin to read, swap, or give up in the same `step`.

Symbols: W ranks, S slots of a rank, N = W * S.
"""

from __future__ import annotations

import enum
import hashlib
import json
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_p2p import errors
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.lifetime import Owner
from moe_p2p.engine.transfers import Memory, Peer, Region, Request
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.library import refusal, refuse_freed, refuse_lazy
from moe_p2p.moe.expert_map import EMPTY, ExpertMap, Move, check_placement, moves_between
from moe_p2p.moe.votes import FIRST_IMM, Voter, Votes, end

_PRIORITY = 2
_ALIGNMENT = 256
_STEPS = 1 << 62  # a vote holds a step in 64 bits
_END_S = 5.0  # until reads that were given up have ended

_numbers: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()


class State(enum.IntEnum):
    """How far a rank is with a move. The least of all votes counts."""

    FAILED = 0
    WRITING = 1  # slots may still be written, by the swap before, on this rank's stream
    READING = 2  # nothing of this rank's slots changes any more
    READY = 3  # all that its slots will hold is here


class _Weights(NamedTuple):
    """One tensor of a layer. memory: from its first slot's first byte to its last one's last."""

    memory: Memory
    bytes: Tensor  # the same, uint8
    slot_bytes: int
    stride: int  # bytes between slots


class _Place(NamedTuple):
    """Where one tensor of a slot lands. slot: of this rank; staged: it has to be copied there."""

    weights: _Weights
    slot: int
    memory: Memory
    offset: int
    staged: bool


class _Read(NamedTuple):
    place: _Place
    region: Region
    region_offset: int
    done: int  # bytes of it that were submitted
    what: str


@dataclass
class _UnderWay:
    """A move. to_read: what is not submitted. requests: what is."""

    layer: int
    placement: list[int]
    digest: int
    moves: list[Move]  # of this rank's slots
    to_read: deque[_Read] = field(default_factory=deque)
    requests: deque[tuple[Request, str]] = field(default_factory=deque)
    places: list[_Place] = field(default_factory=list)
    state: State = State.WRITING
    began: bool = False  # to read: all ranks have voted READING
    error: errors.MoeP2pError | None = None  # of this rank's reads
    step: int = 0  # of the vote under way


class ExpertMover(Owner):
    """One rank's end of moves between the slots of a group. Making one is collective.

    group_or_store, rank, world_size: as of AllToAll; used during construction only.
    engine: that of the AllToAll, or another one of this rank; the caller closes it later.
    layers: of each layer its ExpertMap and the tensors with its slots' weights (and scales): dim 0
        has this rank's S slots, each of them contiguous, at any distance. They are written in
        place, between two steps. Layers have the same shapes on all ranks.
    staging_slots: slots of one move whose old expert is in use, at most, on each rank. They take
        so many times the bytes of the largest layer's slot; 0: moves go to empty slots only.
    bytes_per_step: read in one `step`, at most, so that a step finds its links free. None: any.
    timeout_s: deadline of each wait. None: the engine's.

    Calls come from one thread at a time, the one that launches the steps, on its stream. Raises
    InvalidArgumentError on all ranks alike where layers differ, naming two ranks.
    """

    def __init__(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        engine: Engine,
        layers: Sequence[tuple[ExpertMap, Sequence[Tensor]]],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        staging_slots: int = 1,
        bytes_per_step: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        errors.require_type("engine", engine, Engine, "an Engine")
        errors.require(staging_slots >= 0, f"staging_slots is {staging_slots}, must be at least 0")
        if bytes_per_step is not None:
            errors.require_type("bytes_per_step", bytes_per_step, int, "an int or None")
        errors.require(
            bytes_per_step is None or bytes_per_step > 0,
            f"bytes_per_step is {bytes_per_step}, must be at least 1, or None",
        )
        errors.require(len(layers) > 0, "layers is empty, must have an ExpertMap and its tensors")
        self._engine = engine
        self._timeout_s = engine.timeout_s if timeout_s is None else timeout_s
        self._bytes_per_step = bytes_per_step
        self._staging_slots = staging_slots
        for table, _ in layers:
            errors.require_type("layers", table, ExpertMap, "pairs of an ExpertMap and tensors")
        self._maps = [table for table, _ in layers]
        self._move: _UnderWay | None = None
        self._broken = ""
        self._made_votes: Votes | None = None
        self._settled: torch.cuda.Event | None = None  # what was launched before `move` is done
        self._peers: list[Peer] = []
        self._registered: list[Memory] = []
        self.closed = False
        meeting = Bootstrap(
            group_or_store, rank=rank, world_size=world_size, timeout_s=self._timeout_s
        )
        self.rank, self.world_size = meeting.rank, meeting.world_size
        try:
            with meeting:
                self._set_up(meeting, [tensors for _, tensors in layers])
        except BaseException:
            self.close()
            raise

    # --- set-up ---

    def _set_up(self, meeting: Bootstrap, layers: Sequence[Sequence[Tensor]]) -> None:
        number = _numbers.get(self._engine, 0)
        refused, shapes = "", []
        try:
            self._slots_per_rank = self._check_slots()
            for n, tensors in enumerate(layers):
                errors.require(len(tensors) > 0, f"layers[{n}] has no tensors")
            shapes = [
                [_described(f"layers[{n}][{i}]", each, self._slots_per_rank, self._maps[n])
                 for i, each in enumerate(tensors)]
                for n, tensors in enumerate(layers)
            ]  # fmt: skip
        except errors.InvalidArgumentError as error:
            refused = str(error)
        agreed = {"layers": shapes, "staging_slots": self._staging_slots,
                  "placements": [each.placement for each in self._maps]}  # fmt: skip
        mine = {"refused": refused, "number": number, "agreed": agreed}
        found = [json.loads(each) for each in meeting.exchange(_text(mine), "layers of experts")]
        _require_equal(found)
        number = max(each["number"] for each in found)
        _numbers[self._engine] = number + 1
        self._layers = [[self._weights(each) for each in tensors] for tensors in layers]
        with torch.inference_mode(False):  # they are written in any mode
            self._make_staging()
        # A vote: digest, step, state.
        votes = Votes(self._engine, self.rank, self.world_size, 3, FIRST_IMM + 2 * number)
        self._made_votes = votes
        address = {
            "voter": votes.voter,
            "layers": [[(w.memory.descriptor.hex(), w.stride) for w in layer]
                       for layer in self._layers],
        }  # fmt: skip
        of_all = [json.loads(each) for each in meeting.exchange(_text(address), "their addresses")]
        self._connect(of_all)
        votes.connect([Voter(*each["voter"]) for each in of_all])
        meeting.exchange(b"", "all ranks to be connected")

    def _check_slots(self) -> int:
        for each in self._maps:
            errors.require(
                each.num_slots == self._maps[0].num_slots
                and each.num_slots % self.world_size == 0
                and each.rank == self.rank
                and each.slots.device == self._maps[0].slots.device,
                f"{each!r} of rank {each.rank} is given at rank {self.rank} of {self.world_size}: "
                "each layer has the same number of slots, a multiple of the ranks, its map the "
                "number of this rank, and all are on one device",
            )
        return self._maps[0].num_slots // self.world_size

    def _register(self, tensor: Tensor) -> Memory:
        self._registered.append(self._engine.register(tensor))
        return self._registered[-1]

    def _weights(self, tensor: Tensor) -> _Weights:
        size = tensor.element_size()
        slot, stride = tensor[0].numel(), tensor.stride(0) if len(tensor) > 1 else tensor[0].numel()
        span = (len(tensor) - 1) * stride + slot
        flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)
        return _Weights(self._register(flat), flat, slot * size, stride * size)

    def _make_staging(self) -> None:
        """One area, whose slots have room for each layer's tensors, at aligned places."""
        self._staged_bytes = max(sum(map(_aligned, layer)) for layer in self._layers)
        self._staging: Memory | None = None
        if self._staging_slots:
            device = self._layers[0][0].bytes.device
            room = self._staging_slots * self._staged_bytes
            self._staging = self._register(torch.empty(room, dtype=torch.uint8, device=device))

    def _connect(self, of_all: list[dict[str, Any]]) -> None:
        """regions: [rank][layer][tensor], and what the rank's slots are apart there."""
        self._regions: list[list[list[tuple[Region, int]]]] = []
        for each in of_all:
            address = bytes.fromhex(each["voter"][0])
            peer = self._engine.connect(address, priority=_PRIORITY)
            self._peers.append(peer)

            def resolve(text: str, peer: Peer) -> Region:
                return self._engine.resolve(bytes.fromhex(text), peer, priority=_PRIORITY)

            self._regions.append(
                [[(resolve(text, peer), stride) for text, stride in layer]
                 for layer in each["layers"]]
            )  # fmt: skip

    # --- moves ---

    def move(self, placement: Sequence[int], layer: int = 0) -> None:
        """Begins to move what `placement` [N] needs; returns at once, nothing is sent yet.

        All ranks call it between the same two steps, with the same arguments; then each calls
        `step` after each step until that returns True. A placement says all: replicas, emptied
        slots, and swaps in circles. One move at a time. Raises InvalidArgumentError, and nothing is
        begun: for a placement that is none, and where a rank would need more staging slots.
        """
        self._require_usable()
        errors.require(
            self._move is None, "a move is under way: call step until it is over, then move again"
        )
        errors.require(
            0 <= layer < len(self._maps), f"layer is {layer}, must be 0 to {len(self._maps) - 1}"
        )
        table = self._maps[layer]
        found = check_placement(placement, table.num_slots, table.num_experts)
        moves = moves_between(table.placement, found, self._slots_per_rank, table.num_experts)
        staged = [0] * self.world_size
        for each in moves:
            staged[each.target // self._slots_per_rank] += table.placement[each.target] != EMPTY
        most = max(staged)
        errors.require(
            most <= self._staging_slots,
            f"rank {staged.index(most)} gets {most} experts in slots that are in use, and "
            f"staging_slots is {self._staging_slots}: move in several turns, empty slots before, "
            "or make the mover with more",
        )
        text = array("q", [layer, *table.placement, *found]).tobytes()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
        own = [each for each in moves if each.target // self._slots_per_rank == self.rank]
        self._move = _UnderWay(layer, found, digest, own)
        if self._layers[layer][0].bytes.is_cuda:
            self._settled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._settled.record()

    @property
    def moving(self) -> bool:
        """Whether a move is under way: the same on all ranks between the same two steps."""
        return self._move is not None

    def step(self, step: int, *, wait: bool = False) -> bool:
        """Goes on with the move that is under way. Called by all ranks after the same step.

        step: the step's number, any that is the same on all ranks then, and another one next time.
        wait: goes on until the move is over, without bytes_per_step. All ranks or none.

        Returns True, on all ranks after the same step, once the map has the new placement and the
        slots the new weights, on a GPU in the order of the current stream; False before, and
        without a move. It waits for the others' previous `step`, at most timeout_s.

        Raises, on all ranks alike, and the move is given up, the old placement holds: ProtocolError
        where placements or numbers of steps differ; AbortedError where another rank's reads failed,
        and at that rank what they failed with. PeerDeadError, TimeoutError: a rank did not vote,
        by name; the mover then is broken. The old placement holds as well, unless all votes that
        arrived were for the swap: others may have swapped, so the map is made void (`ExpertMap`).
        """
        self._require_usable()
        errors.require_type("step", step, int, "an int")
        errors.require(abs(step) < _STEPS, f"step is {step}, must be less than 2^62")
        while True:
            found = self._step(step, wait)
            if found or not wait or self._move is None:
                return found
            step += 1

    def _step(self, step: int, wait: bool) -> bool:
        move = self._move
        if move is None:
            return False
        if self._voting.round_is_open and self._decide(move, self._await_votes(move)):
            return True
        self._go_on(move, wait)
        self._send_vote(move, step)
        return False

    def _decide(self, move: _UnderWay, votes: list[list[int]]) -> bool:
        """What all ranks conclude from the same votes. True: the swap was made."""
        for rank, (_, digest, step, state) in enumerate(votes):
            differs = ""
            if digest != votes[0][1]:
                differs = "another placement, layer or placement before it"
            elif step != votes[0][2]:
                differs = f"step {step} where rank 0 has step {votes[0][2]}"
            if differs:
                text = f"rank {rank} moves experts by {differs}: nothing has changed"
                raise self._give_up(move, errors.make(errors.ProtocolError, text))
            if state == State.FAILED:
                text = f"rank {rank} failed to read experts: nothing has changed"
                raise self._give_up(move, move.error or errors.make(errors.AbortedError, text))
        least = min(vote[3] for vote in votes)
        if least >= State.READING and not move.began:
            move.began = True
            self._plan_reads(move)
        if least < State.READY:
            return False
        self._swap(move)
        return True

    @torch.inference_mode()
    def _swap(self, move: _UnderWay) -> None:
        """In a mode in which tensors of any mode may be written."""
        self._move = None
        table = self._maps[move.layer]
        try:
            for place in move.places:
                if place.staged:
                    weights = place.weights
                    begin, size = place.slot * weights.stride, weights.slot_bytes
                    staged = place.memory.tensor[place.offset : place.offset + size]
                    weights.bytes[begin : begin + size].copy_(staged)
            table.set(move.placement)
        except BaseException as error:  # Ctrl-C too: the others swap
            self._broken = (
                f"rank {self.rank} of {self.world_size}: the swap of layer {move.layer} was cut "
                f"off by {type(error).__name__}, and the others have swapped: this rank's map is "
                "void, and its slots are of both placements"
            )
            table.make_void(self._broken)
            raise

    # --- reads ---

    def _plan_reads(self, move: _UnderWay) -> None:
        """What this rank's slots will hold, and where it lands."""
        before, staged = self._maps[move.layer].placement, 0
        for source, target in move.moves:
            rank, there = divmod(source, self._slots_per_rank)
            slot, in_use = target % self._slots_per_rank, before[target] != EMPTY
            offset = staged * self._staged_bytes
            staged += in_use
            for number, weights in enumerate(self._layers[move.layer]):
                region, stride = self._regions[rank][move.layer][number]
                place = _Place(weights, slot, weights.memory, slot * weights.stride, in_use)
                if in_use:
                    assert self._staging is not None
                    place = place._replace(memory=self._staging, offset=offset)
                    offset += _aligned(weights)
                move.places.append(place)
                what = f"reading slot {source} of rank {rank}"
                move.to_read.append(_Read(place, region, there * stride, 0, what))

    def _go_on(self, move: _UnderWay, wait: bool) -> None:
        """Submits reads, looks at those that are under way, and finds the state to vote for."""
        try:
            if self._settled is not None:
                if wait:
                    self._settled.synchronize()
                if self._settled.query():  # type: ignore[no-untyped-call]
                    self._settled = None
            if self._settled is None and move.state == State.WRITING:
                move.state = State.READING
            if move.began and move.state == State.READING:
                self._submit(move, None if wait else self._bytes_per_step)
                ends = time.monotonic() + self._timeout_s
                while move.requests and (wait or move.requests[0][0].done()):
                    request, what = move.requests[0]
                    with _named(what):
                        request.wait(max(0.0, ends - time.monotonic()) if wait else 0)
                    move.requests.popleft()
                if not move.to_read and not move.requests:
                    move.state = State.READY
        except errors.MoeP2pError as error:
            move.error, move.state = error, State.FAILED

    def _submit(self, move: _UnderWay, most: int | None) -> None:
        while move.to_read and (most is None or most > 0):
            read = move.to_read[0]
            left = read.place.weights.slot_bytes - read.done
            nbytes = left if most is None else min(left, most)
            with _named(read.what):
                request = self._engine.read(
                    read.place.memory,
                    read.region,
                    nbytes=nbytes,
                    offset=read.place.offset + read.done,
                    region_offset=read.region_offset + read.done,
                    priority=_PRIORITY,
                )
            move.requests.append((request, read.what))
            move.to_read[0] = read._replace(done=read.done + nbytes)
            if nbytes == left:
                move.to_read.popleft()
            if most is not None:
                most -= nbytes

    def _give_up(self, move: _UnderWay, error: errors.MoeP2pError) -> errors.MoeP2pError:
        """Ends the reads, as the next move's land in the same places. Returns what to raise."""
        self._move = None
        for request, _ in move.requests:
            with suppress(RuntimeError):
                request.cancel()
        ends = time.monotonic() + _END_S
        for request, what in move.requests:
            with suppress(RuntimeError):
                request.wait(max(0.0, ends - time.monotonic()))
            if not request.done():
                self._broken = f"{what} was given up, and has not ended: make a new mover"
        return error

    # --- votes ---

    @property
    def _voting(self) -> Votes:
        assert self._made_votes is not None
        return self._made_votes

    def _send_vote(self, move: _UnderWay, step: int) -> None:
        move.step = step
        try:
            self._voting.send([move.digest, step, int(move.state)], self._timeout_s)
        except errors.MoeP2pError as error:
            raise self._break(move, type(error), f"a vote was not sent: {error}") from error

    def _await_votes(self, move: _UnderWay) -> list[list[int]]:
        """The votes of the round, by rank."""
        try:
            return self._voting.wait(self._timeout_s)
        except errors.MoeP2pError as error:
            raise self._break(move, type(error), str(error)) from error

    def _break(
        self, move: _UnderWay, kind: type[errors.MoeP2pError], why: str
    ) -> errors.MoeP2pError:
        """What to raise where votes of this round are missing: nobody can go on moving.

        The others have swapped only if all votes were READY.
        """
        arrived = self._voting.arrived()
        swapped = self._voting.round_is_open and all(vote[3] == State.READY for vote in arrived)
        outcome = "the old placement holds, no slot that is in use has changed"
        if swapped:
            outcome = (
                "all others had what they need, so they may have swapped: this rank's map is void"
            )
        text = (
            f"rank {self.rank} of {self.world_size}: moving experts of layer {move.layer}, step "
            f"{move.step}: {why}; {outcome}"
        )
        self._give_up(move, errors.make(kind, text))
        self._broken = text
        if swapped:
            self._maps[move.layer].make_void(text)
        return errors.make(kind, text)

    # --- its end ---

    def _require_usable(self) -> None:
        if self.closed:
            raise errors.make(errors.ClosedError, f"rank {self.rank}: the mover is closed")
        if self._broken:
            raise errors.make(errors.AbortedError, self._broken)

    def close(self) -> None:
        """Idempotent. Between moves; a move that is under way is given up, and the others find out
        at their deadline, unless they may swap: then this rank's map is void. Before the engine is
        closed, and behind the last step on its stream."""
        if self.closed:
            return
        self.closed = True
        if self._move is not None:
            self._break(self._move, errors.ClosedError, "the mover was closed")
        if self._made_votes is not None:
            self._made_votes.close(self._timeout_s)
        end(peer.disconnect for peer in self._peers)
        end(memory.unregister for memory in self._registered)

    def __enter__(self) -> ExpertMover:
        self._require_usable()
        return self

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._broken or ("moving" if self.moving else "idle")
        return f"ExpertMover(rank {self.rank} of {self.world_size}, {state})"


# --- pure ---


def _described(name: str, tensor: Tensor, num_slots: int, table: ExpertMap) -> list[Any]:
    """What must be equal on all ranks of a tensor. Raises InvalidArgumentError."""
    errors.require_type(name, tensor, Tensor)
    if found := refusal({name: tensor}):
        raise found
    refuse_lazy(**{name: tensor})
    refuse_freed(**{name: tensor})
    shape = [*tensor.shape]
    errors.require(
        bool(shape) and shape[0] == num_slots,
        f"{name} is {shape}, dim 0 must be the {num_slots} slots of a rank",
    )
    errors.require(tensor.numel() > 0, f"{name} is {shape}: its slots have no bytes")
    errors.require(
        tensor[0].is_contiguous() and (num_slots == 1 or tensor.stride(0) >= tensor[0].numel()),
        f"{name} has strides {list(tensor.stride())}: each slot must be contiguous, and none may "
        "lie in another; pass the memory's own view, with dim 0 the slots",
    )
    errors.require(
        tensor.device == table.slots.device,
        f"{name} is on {tensor.device}, and its map on {table.slots.device}",
    )
    return [shape, str(tensor.dtype)]


def _require_equal(found: list[dict[str, Any]]) -> None:
    """Raises the first refusal of a rank, or what differs between rank 0 and another one."""
    for rank, each in enumerate(found):
        errors.require(not each["refused"], f"rank {rank}: {each['refused']}")
    for rank, each in enumerate(found):
        for name, value in each["agreed"].items():
            wanted = found[0]["agreed"][name]
            errors.require(
                value == wanted,
                f"{name} differs: rank 0 has {_short(wanted)}, rank {rank} {_short(value)}",
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 400 else f"{text[:400]}..."


def _text(value: object) -> bytes:
    return json.dumps(value).encode()


def _aligned(weights: _Weights) -> int:
    """Bytes that a slot of a tensor takes in the staging area."""
    return -(-weights.slot_bytes // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except errors.MoeP2pError as error:
        raise errors.make(type(error), f"{what}: {error}") from error
