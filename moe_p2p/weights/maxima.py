"""Maxima of fp8 blocks that several trainers hold a part of, merged by one-sided writes.

Each exchange has an owner among its ranks. The others write their maxima into the owner's inbox;
the owner merges and writes the merged ones back. So a maximum travels twice, however many ranks
share the block. Used by trainer.py; the plan says who shares what (`WeightPlan.maxima`).

Both ends of a pair list the same cells in the order of the plan, so they exchange nothing but an
address. An inbox is written once in an attempt; the immediates carry the attempt's number.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory, Region, Request
from moe_p2p.errors import MoeP2pError, ProtocolError, make
from moe_p2p.weights.attempt import FIRST_IMM, PRIORITY
from moe_p2p.weights.boxes import Box
from moe_p2p.weights.plan import Maxima
from moe_p2p.weights.sending import UnwrittenError

_EPOCHS = 1 << 20  # of immediates: moe_p2p/engine/README.md has their table
UP, DOWN = 1, 2  # to the owner, and back


def immediate(attempt: int, phase: int) -> int:
    return FIRST_IMM + phase * _EPOCHS + attempt % _EPOCHS


class Grids:
    """The maxima of all blocks that this rank has a part of, one number each, in one tensor.

    windows: the blocks of each tensor, as (first, size) in each dimension.
    """

    def __init__(self, windows: Mapping[str, Box], device: torch.device) -> None:
        shapes = {name: tuple(size for _, size in each) for name, each in windows.items()}
        self.origins = {name: tuple(at for at, _ in each) for name, each in windows.items()}
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        at = list(itertools.accumulate(sizes, initial=0))
        self.flat = torch.zeros(at[-1], dtype=torch.float32, device=device)
        self.first = dict(zip(shapes, at, strict=False))
        self.of = {
            name: self.flat[at[i] : at[i + 1]].view(shape)
            for i, (name, shape) in enumerate(shapes.items())
        }

    def cells(self, tensor: str, blocks: Box) -> Tensor:
        """Indices into `flat` of blocks, given as (first, size) in each dimension."""
        shape, found = self.of[tensor].shape, torch.tensor([self.first[tensor]], device="cpu")
        for dim, (begin, size) in enumerate(blocks):
            first = begin - self.origins[tensor][dim]
            step = torch.Size(shape[dim + 1 :]).numel()
            along = torch.arange(first, first + size, device="cpu") * step
            found = (found.unsqueeze(1) + along).flatten()
        return found


# wait(condition, trainers, may_wait) waits until the condition holds, and raises at a deadline or
# when one of the trainers is lost. may_wait: they may wait for others; their errors then name who
# is late.
Wait = Callable[[Callable[[], bool], tuple[int, ...], bool], None]


class _Side(NamedTuple):
    """Cells exchanged with peers, all cells of one peer in a row."""

    peers: tuple[int, ...]
    cells: Tensor  # int64 [n], into Grids.flat
    spans: dict[int, tuple[int, int]]  # of a peer: first, count


def _side(found: Mapping[int, list[Tensor]], device: torch.device) -> _Side:
    cells = {peer: torch.cat(each) for peer, each in sorted(found.items())}
    begins = itertools.accumulate((len(each) for each in cells.values()), initial=0)
    spans = {peer: (at, len(each)) for (peer, each), at in zip(cells.items(), begins, strict=False)}
    flat = torch.cat([*cells.values(), torch.empty(0, dtype=torch.int64, device="cpu")])
    return _Side(tuple(cells), flat.to(device), spans)


def owner_of(each: Maxima) -> int:
    """Returns the same rank everywhere; blocks are dealt evenly to the ranks that share them."""
    number = zlib.crc32(each.tensor.encode()) + sum(first for first, _ in each.blocks)
    return each.ranks[number % len(each.ranks)]


class MaximaExchange:
    """Used by one trainer, as long as the same trainers take part. Registers its memory once."""

    def __init__(
        self, engine: Engine, rank: int, exchanges: Iterable[Maxima], grids: Grids
    ) -> None:
        self._engine, self._rank, self._grids = engine, rank, grids
        up: dict[int, list[Tensor]] = {}
        down: dict[int, list[Tensor]] = {}
        for each in dict.fromkeys(exchanges):
            owner, cells = owner_of(each), grids.cells(each.tensor, each.blocks)
            if owner != rank:
                up.setdefault(owner, []).append(cells)
            for peer in dict.fromkeys(each.ranks) if owner == rank else ():
                if peer != rank:
                    down.setdefault(peer, []).append(cells)
        device = grids.flat.device
        self._up, self._down = _side(up, device), _side(down, device)
        n_up, n_down = len(self._up.cells), len(self._down.cells)
        self.peers = tuple(sorted({*self._up.peers, *self._down.peers}))
        # Out and in, to and from owners: [up out | down out], [down in | up in].
        self._out = torch.zeros(n_up + n_down, dtype=torch.float32, device=device)
        self._in = torch.zeros(n_up + n_down, dtype=torch.float32, device=device)
        settle([self._in])
        self._memory = list[Memory]()
        try:
            for tensor in (self._out, self._in) if len(self._in) else ():
                self._memory.append(engine.register(tensor))
        except BaseException:
            self.close()
            raise
        self._regions: dict[int, tuple[Region, dict[str, int]]] = {}
        self._nics: dict[int, int] = {}
        self._requests: list[Request] = []

    @property
    def nbytes(self) -> int:
        return 4 * (len(self._out) + len(self._in))

    def address(self) -> dict[str, Any]:
        """Returns what peers need to write here. to: first byte of each peer's maxima, by phase."""
        n_down = len(self._down.cells)
        to = {
            str(peer): [
                4 * self._down.spans.get(peer, (0, 0))[0],
                4 * (n_down + self._up.spans.get(peer, (0, 0))[0]),
            ]
            for peer in self.peers
        }
        inbox = self._memory[1].descriptor.hex() if self._memory else ""
        return {"inbox": inbox, "to": to, "nics": self._engine.num_nics}

    def connect(self, peer: int, address: Mapping[str, Any]) -> None:
        up, down = address["to"][str(self._rank)]
        region = self._engine.resolve(bytes.fromhex(address["inbox"]), priority=PRIORITY)
        self._regions[peer] = region, {"up": up, "down": down}
        self._nics[peer] = int(address["nics"])

    def run(self, attempt: int, wait: Wait) -> None:
        """Merges the maxima that the grids hold."""
        if not self.peers:
            return
        flat, n_up, n_down = self._grids.flat, len(self._up.cells), len(self._down.cells)
        torch.index_select(flat, 0, self._up.cells, out=self._out[:n_up])
        self._phase(attempt, UP, wait)
        flat.scatter_reduce_(0, self._down.cells, self._in[:n_down], "amax")
        torch.index_select(flat, 0, self._down.cells, out=self._out[n_up:])
        self._phase(attempt, DOWN, wait)
        flat.index_copy_(0, self._up.cells, self._in[n_down:])

    def _phase(self, attempt: int, phase: int, wait: Wait) -> None:
        ours, theirs = (self._up, self._down) if phase == UP else (self._down, self._up)
        base = 0 if phase == UP else len(self._up.cells)
        imm, key = immediate(attempt, phase), "up" if phase == UP else "down"
        synchronize(self._out)
        for peer in ours.peers:
            first, count = ours.spans[peer]
            region, at = self._regions[peer]
            self._requests.append(
                self._engine.write(
                    self._memory[0],
                    region,
                    nbytes=4 * count,
                    offset=4 * (base + first),
                    region_offset=at[key],
                    imm=imm,
                    priority=PRIORITY,
                )
            )
        expected = sum(self._nics[peer] for peer in theirs.peers)
        if expected:
            wait(lambda: self._counted(imm, expected), theirs.peers, phase == DOWN)
            self._engine.wait_imm(imm, expected)  # for kernels that follow
            self._engine.free_imm(imm)
        for peer, request in zip(ours.peers, self._requests, strict=True):
            wait(request.done, (peer,), True)
            try:
                request.wait()
            except MoeP2pError as error:
                raise UnwrittenError(f"trainer {peer}", "maxima", error) from error
        self._requests.clear()

    def _counted(self, imm: int, expected: int) -> bool:
        counted = self._engine.imm_value(imm)
        if counted > expected:
            raise make(ProtocolError, f"{counted} maxima arrived, the plan has {expected}")
        return counted == expected

    def take_requests(self) -> list[Request]:
        """Returns the requests under way, for a caller whose update failed."""
        found, self._requests = self._requests, []
        return found

    def close(self) -> None:
        """Later writes of peers are refused."""
        while self._memory:
            self._memory[-1].unregister()
            self._memory.pop()


def synchronize(tensor: Tensor) -> None:
    """Waits for kernels of the current stream: a NIC may then read what they wrote."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def settle(tensors: Iterable[Tensor]) -> None:
    """Before NICs may write to them: kernels that fill or copy must not come after what arrives."""
    for tensor in {tensor.device: tensor for tensor in tensors}.values():
        synchronize(tensor)
