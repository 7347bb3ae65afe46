"""Balanced experts: copies of experts in a region of each rank of a node, and their gradients back.

EPBuffer has one Balancer where it was made with such a region. All ranks of a node make the same
calls. The host moves the bytes, by engines, beside the steps: a thread of the buffer waits until
the work before the call is done on the device, and for the votes of all ranks of the node that it
is (moe/votes.py); then it moves, and votes again once it has. So when a call's event was waited
for, all that others wrote here has arrived, and nobody reads here any more.

Symbols: n ranks of the node, R redundant slots of a rank, L experts of a rank.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.event import EventHandle
from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.lifetime import Owner
from moe_p2p.engine.transfers import Memory, Peer, Region, Request
from moe_p2p.moe.pool import AllToAllPool
from moe_p2p.moe.votes import FIRST_IMM, Voter, Votes, end

_PRIORITY = 2  # of weights
_STAGED_BYTES = 32 << 20  # of gradients that are read while as many are added
_FAILED, _READY = range(2)  # what a rank votes beside the digest of its call


class _Task(NamedTuple):
    """Slot `slot` of rank `rank` holds a copy of this rank's expert `expert`."""

    rank: int
    slot: int
    expert: int


class Slots(NamedTuple):
    """A tensor of the region, [R, ..], and that of the experts, [L, ..]."""

    offset: int  # of the first slot in the region
    slot_bytes: int
    experts: Tensor


class Moving(EventHandle):
    """The end of a call. Waiting for it blocks the host, and raises what the call failed with."""

    def __init__(self, done: Future[None]) -> None:
        self.tensors_to_record = ()
        self._done = done

    def current_stream_wait(self) -> None:
        self._done.result()

    def synchronize(self) -> None:
        self._done.result()


class Balancer(Owner):
    """One rank's region. Making it is collective, also where num_bytes is 0 and there is none.

    storage: [num_bytes] uint8, on this rank's GPU; on a machine without one on the CPU.

    Raises InvalidArgumentError on all ranks of a node whose num_bytes differ.
    """

    def __init__(self, pool: AllToAllPool, num_bytes: int) -> None:
        self.num_ranks = pool.ranks_per_node
        self.rank = pool.rank % self.num_ranks
        self._name = f"rank {pool.rank}"
        self._timeout_s = pool.timeout_s
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.storage = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._broken = ""
        self._peers: list[Peer] = []
        self._regions: list[Region] = []
        self._staging: Memory | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread = ThreadPoolExecutor(1, f"moe_p2p balance {pool.rank}")
        self._engine: Engine | None = None
        self._made_votes: Votes | None = None
        try:
            self._meet(pool, num_bytes)
        except BaseException:
            self.close()
            raise

    def _meet(self, pool: AllToAllPool, num_bytes: int) -> None:
        mine: dict[str, object] = {"num_bytes": num_bytes}
        if num_bytes:
            gpu = self.storage.device.index
            config = EngineConfig(transport="loopback", timeout_s=self._timeout_s)
            self._engine = engine = Engine(config, label=self._name, gpu=gpu)
            self._made_votes = Votes(engine, self.rank, self.num_ranks, 2, FIRST_IMM)
            region = engine.register(self.storage).descriptor.hex()
            mine |= {"voter": self._made_votes.voter, "region": region}
            if gpu is not None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        first = pool.rank - self.rank
        said = pool.meet("memory for balanced experts", json.dumps(mine))
        node = [json.loads(each) for each in said[first : first + self.num_ranks]]
        for rank, each in enumerate(node):
            errors.require(
                each["num_bytes"] == node[0]["num_bytes"],
                f"lb_allocation_plan_or_num_bytes differs: rank {first} gives "
                f"{node[0]['num_bytes']} bytes, rank {first + rank} {each['num_bytes']}; ranks of "
                "a node need the same",
            )
        if self._engine is None:
            return
        voters = [Voter(*each["voter"]) for each in node]
        for voter, each in zip(voters, node, strict=True):
            peer = self._engine.connect(bytes.fromhex(voter.address), priority=_PRIORITY)
            self._peers.append(peer)
            described = bytes.fromhex(each["region"])
            self._regions.append(self._engine.resolve(described, peer, priority=_PRIORITY))
        self._votes.connect(voters)
        pool.meet("all ranks to be connected for balanced experts")

    @property
    def _votes(self) -> Votes:
        assert self._made_votes is not None
        return self._made_votes

    # --- the two calls ---

    def prefetch(self, slots: Sequence[Slots], mapping: Tensor, after: EventHandle) -> Moving:
        """Writes this rank's experts to the slots of all ranks that the mapping names."""

        def move(tasks: list[_Task]) -> None:
            assert self._engine is not None
            with ExitStack() as stack:
                requests: list[Request] = []
                for each in slots if tasks else ():
                    flat = each.experts.detach().view(-1).view(torch.uint8)
                    memory = self._engine.register(flat)
                    stack.callback(memory.unregister)
                    for task in tasks:
                        request = self._engine.write(
                            memory,
                            self._regions[task.rank],
                            nbytes=each.slot_bytes,
                            offset=task.expert * each.slot_bytes,
                            region_offset=each.offset + task.slot * each.slot_bytes,
                            priority=_PRIORITY,
                        )
                        requests.append(request)
                self._await(requests)

        return self._begin("lb_prefetch_weights", slots, mapping, after, move)

    def reduce(self, slots: Slots, mapping: Tensor, after: EventHandle) -> Moving:
        """Adds the slots of all ranks that hold copies of this rank's experts to these, in the
        order of the mapping."""

        def move(tasks: list[_Task]) -> None:
            rows = slots.experts.detach()
            pieces = [
                (task, first, min(_STAGED_BYTES, slots.slot_bytes - first))
                for task in tasks
                for first in range(0, slots.slot_bytes, _STAGED_BYTES)
            ]
            reading: list[Request] = []
            try:
                for number in range(len(pieces) + 1):
                    if number < len(pieces):
                        task, first, nbytes = pieces[number]
                        begin = slots.offset + task.slot * slots.slot_bytes + first
                        reading.append(self._read(task.rank, begin, nbytes, number % 2))
                    if number:
                        task, first, nbytes = pieces[number - 1]
                        self._await([reading.pop(0)])
                        staged = self._staged((number - 1) % 2, nbytes).view(torch.float32)
                        rows[task.expert, first // 4 : (first + nbytes) // 4].add_(staged)
                        if self._stream is not None:
                            self._stream.synchronize()
            finally:
                self._await(reading)  # of a call that failed: the next one reads to the same place

        return self._begin("lb_reduce_grads", [slots], mapping, after, move)

    def _read(self, rank: int, begin: int, nbytes: int, half: int) -> Request:
        assert self._engine is not None
        if self._staging is None:
            size = (2 * _STAGED_BYTES,)
            room = torch.empty(size, dtype=torch.uint8, device=self.storage.device)
            self._staging = self._engine.register(room)
        return self._engine.read(
            self._staging,
            self._regions[rank],
            nbytes=nbytes,
            offset=half * _STAGED_BYTES,
            region_offset=begin,
            priority=_PRIORITY,
        )

    def _staged(self, half: int, nbytes: int) -> Tensor:
        assert self._staging is not None
        return self._staging.tensor[half * _STAGED_BYTES :][:nbytes]

    def _await(self, requests: Sequence[Request]) -> None:
        """Waits for all of them, then raises the first error."""
        ends, failed = time.monotonic() + self._timeout_s, None
        for request in requests:
            try:
                request.wait(max(0.0, ends - time.monotonic()))
            except errors.MoeP2pError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    # --- how a call goes ---

    def _begin(
        self,
        name: str,
        slots: Sequence[Slots],
        mapping: Tensor,
        after: EventHandle,
        move: Callable[[list[_Task]], None],
    ) -> Moving:
        def run() -> None:
            with torch.inference_mode(), self._on_stream():
                after.synchronize()
                self._run(name, slots, mapping.tolist(), move)

        if self._engine is None or self._engine.closed:
            raise errors.make(errors.ClosedError, f"{name}: the buffer was destroyed")
        return Moving(self._thread.submit(run))

    def _on_stream(self) -> AbstractContextManager[object]:
        """Of this rank's GPU, and beside all others."""
        if self._stream is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self.storage.device))
        stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _run(
        self,
        name: str,
        slots: Sequence[Slots],
        mapping: list[list[int]],
        move: Callable[[list[_Task]], None],
    ) -> None:
        if self._broken:
            raise errors.make(errors.AbortedError, self._broken)
        num_local = len(slots[0].experts)
        shapes = [(each.offset, each.slot_bytes) for each in slots]
        text = json.dumps([name, num_local, shapes, mapping]).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
        failed: list[errors.MoeP2pError] = []

        def attempt(what: Callable[[], None]) -> None:
            try:
                what()
            except errors.MoeP2pError as error:
                failed.append(error)

        attempt(lambda: _check_ids(mapping, self.num_ranks * num_local))
        self._agree(name, digest, failed)
        attempt(lambda: move(self._tasks(mapping, num_local)))
        self._agree(name, digest, failed)

    def _tasks(self, mapping: list[list[int]], num_local: int) -> list[_Task]:
        first = self.rank * num_local
        return [
            _Task(rank, slot, expert - first)
            for rank, row in enumerate(mapping)
            for slot, expert in enumerate(row)
            if first <= expert < first + num_local
        ]

    def _agree(self, name: str, digest: int, failed: list[errors.MoeP2pError]) -> None:
        """Waits for the votes of all; raises on all ranks where one has failed or differs."""
        try:
            self._votes.send([digest, _FAILED if failed else _READY], self._timeout_s)
            votes = self._votes.wait(self._timeout_s)
        except errors.MoeP2pError as error:
            self._broken = f"{name}: {self._name}, the node's rank {self.rank}: {error}"
            raise errors.make(type(error), self._broken) from error
        for rank, (_, other, state) in enumerate(votes):
            if other != votes[0][1]:
                text = f"{name}: the node's ranks 0 and {rank} make another call, or with another "
                text += "redundancy_mapping, other shapes, or tensors elsewhere in the region"
                raise errors.make(errors.ProtocolError, text)
            if state == _FAILED:
                text = f"{name} failed at the node's rank {rank}; its error there says why"
                raise failed[0] if failed else errors.make(errors.AbortedError, text)

    # --- its end ---

    def finish(self) -> None:
        """Waits for the calls that were made; none can follow."""
        self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Idempotent. After all ranks have finished."""
        self.finish()
        if self._engine is None or self._engine.closed:
            return
        if self._made_votes is not None:
            self._made_votes.close(self._timeout_s)
        end(peer.disconnect for peer in self._peers)
        self._engine.close()


def _check_ids(mapping: list[list[int]], num_experts: int) -> None:
    for rank, row in enumerate(mapping):
        for slot, expert in enumerate(row):
            errors.require(
                -1 <= expert < num_experts,
                f"redundancy_mapping[{rank}, {slot}] is {expert}, must be -1, for none, to "
                f"{num_experts - 1}: experts are numbered within the node",
            )
