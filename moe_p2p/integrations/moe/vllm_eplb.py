"""vLLM's communicator of expert load balancing (EPLB) over an Engine; vllm.py installs it.

vLLM decides which experts move, and when each rank uses them; its async EPLB does so in a thread,
a layer at a time, beside forward passes. For a layer it calls set_transfer_context, then add_send
and add_recv for each expert that this rank gives or gets, and execute. Here the rank that gets one
reads it, with the priority of weights, and tells the rank that gave it. So execute returns when all
that this rank gets is here, and others have what they get of it: its slots may change. Ranks may be
at different layers; a placement ends on all ranks before the next one begins, as vLLM then sums
their loads.

Symbols: W ranks, S experts of a rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory, Peer, Region, Request
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.integrations import derived, optional, put

_EPLB = "vllm.distributed.eplb"
_PRIORITY = 2
# Deadlines: of a wait, as NIXL's in vLLM; of meeting ranks that load a model first.
_TIMEOUT_S, _MEET_S = 300.0, 1800.0


class Communicator:
    """One of a group of W ranks; making it is collective.

    group: their CPU process group. layers: of each MoE layer its tensors, [S, ...] each, whose
    slots follow each other. buffer: where experts arrive, one tensor like each of a layer's.
    """

    needs_profile_buffer_reservation = False
    _stream: Any = None  # that of vLLM's thread (set_stream); None: the current one

    def __init__(
        self, group: Any, layers: Sequence[Sequence[Tensor]], buffer: Sequence[Tensor]
    ) -> None:
        device = buffer[0].device
        self._rank, self._on_gpu, self._slots = group.rank(), device.type == "cuda", len(buffer[0])
        self._layer, self._held = 0, list[int]()
        self._reads: list[tuple[Request, str]] = []
        self._got: list[int] = []  # the rank of each expert that is read
        self._gave = Counter[
            int
        ]()  # by rank, since the beginning: experts that it gets of this one
        self._engine = Engine(
            EngineConfig(timeout_s=_TIMEOUT_S),
            label=f"EPLB of rank {self._rank}",
            gpu=device.index if self._on_gpu else None,
        )
        try:
            with Bootstrap(group, rank=None, world_size=None, timeout_s=_MEET_S) as meeting:
                self._connect(meeting, layers, buffer)
        except BaseException:
            self._engine.close()
            raise

    def _connect(
        self, meeting: Bootstrap, layers: Sequence[Sequence[Tensor]], buffer: Sequence[Tensor]
    ) -> None:
        weights = [
            [self._register(f"tensor {i} of layer {n}", each) for i, each in enumerate(layer)]
            for n, layer in enumerate(layers)
        ]
        self._buffer = [self._register(f"buffer {i}", each) for i, each in enumerate(buffer)]
        self._slot_bytes = [[each.nbytes // self._slots for each in layer] for layer in weights]
        mine = {
            "address": self._engine.address.hex(),
            "slots": [
                [(str(w.dtype), [*w[0].shape], w[0].stride()) for w in layer] for layer in layers
            ],
            "weights": [[each.descriptor.hex() for each in layer] for layer in weights],
        }
        what = "the experts of EPLB"
        found = [json.loads(each) for each in meeting.exchange(json.dumps(mine).encode(), what)]
        self._peers: list[Peer] = []
        self._regions: list[list[list[Region]]] = []  # by rank, layer, tensor
        for rank, each in enumerate(found):  # before any connects: who refuses closes its engine
            errors.require(
                each["slots"] == found[0]["slots"],
                f"types, shapes or strides of experts' weights differ between rank 0 and {rank}",
            )
        for each in found:
            peer = self._engine.connect(bytes.fromhex(each["address"]), priority=_PRIORITY)
            self._peers.append(peer)
            self._regions.append(
                [
                    [self._engine.resolve(bytes.fromhex(text), peer, priority=_PRIORITY)
                     for text in layer]
                    for layer in each["weights"]
                ]
            )  # fmt: skip
        meeting.exchange(b"", "all ranks to be connected")

    def _register(self, name: str, tensor: Tensor) -> Memory:
        slot = tensor[0]
        span = 1 + sum(
            (n - 1) * stride for n, stride in zip(slot.shape, slot.stride(), strict=True)
        )
        errors.require(
            len(tensor) == self._slots and span == slot.numel() and tensor.stride(0) == span,
            f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}, must have the "
            f"{self._slots} experts of a rank in dim 0, one behind the other without gaps",
        )
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return self._engine.register(flat.view(torch.uint8))

    # --- vLLM's interface ---

    def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None:
        """old_indices: [W * S], the expert of each slot, or -1."""
        self._layer, self._held = layer_idx, old_indices.tolist()
        if self._on_gpu:  # the buffer is written at once; copies from it may not have run
            (self._stream or torch.cuda.current_stream()).synchronize()

    def add_send(self, tensors: list[Tensor], dst_rank: int, expert_id: int) -> None:
        self._gave[dst_rank] += 1

    def add_recv(self, tensors: list[Tensor], src_rank: int, expert_id: int) -> None:
        """tensors: the rows of the buffer that get the expert."""
        slot = self._held.index(expert_id, src_rank * self._slots, (src_rank + 1) * self._slots)
        what = f"expert {expert_id} of layer {self._layer} from rank {src_rank}"
        for number, (row, memory) in enumerate(zip(tensors, self._buffer, strict=True)):
            nbytes = self._slot_bytes[self._layer][number]
            request = self._engine.read(
                memory,
                self._regions[src_rank][self._layer][number],
                nbytes=nbytes,
                offset=row.data_ptr() - memory.tensor.data_ptr(),
                region_offset=slot % self._slots * nbytes,
                priority=_PRIORITY,
            )
            self._reads.append((request, what))
        self._got.append(src_rank)

    def execute(self) -> None:
        """Raises what a read failed with, by expert and rank, and TimeoutError for a rank that did
        not read what this one gave."""
        doing = ""
        try:
            for request, what in self._reads:
                doing = what
                request.wait()
            for rank in self._got:
                self._engine.send_imm(self._peers[rank], self._rank, priority=_PRIORITY)
            for rank, count in self._gave.items():
                doing = f"layer {self._layer}, for rank {rank} to read {count} experts so far"
                self._engine.wait_imm(rank, count)
        except errors.MoeP2pError as error:
            text = f"moving experts, rank {self._rank}: {doing}: {error}"
            raise errors.make(type(error), text) from error
        finally:
            self._end_reads()

    def _end_reads(self) -> None:
        """None is under way afterwards, unless it cannot be cancelled."""
        reads, self._reads, self._got = self._reads, [], []
        for request, _ in reads:
            with suppress(RuntimeError):
                if not request.done():
                    request.cancel()


def install() -> None:
    """Gives vLLM's EPLB this communicator in place of NIXL's, which it takes by default where NIXL
    is installed, and which elastic and async EPLB need; a vLLM without it stays as it is."""
    modules = {
        name: optional(name) for name in (f"{_EPLB}.eplb_communicator", f"{_EPLB}.eplb_state")
    }
    theirs = modules[f"{_EPLB}.eplb_communicator"]
    if theirs is None or not hasattr(theirs, "NixlEplbCommunicator"):
        return
    ours, create = derived(Communicator, theirs.EplbCommunicator), theirs.create_eplb_communicator

    def create_eplb_communicator(
        group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any
    ) -> Any:
        if backend == "nixl":
            return ours(group_coordinator.cpu_group, expert_weights, expert_buffer)
        return create(group_coordinator, backend, expert_weights, expert_buffer)

    found = {name: module for name, module in modules.items() if module is not None}
    put(found, {"create_eplb_communicator": create_eplb_communicator})
    if (asked := optional("vllm.distributed.nixl_utils")) is not None:  # for EPLB alone
        put({"asked": asked}, {"is_nixl_available": lambda: True})
