"""Where an update lands on an engine rank: its shadow, or its own tensors; and what has come of it.
Used by engine_rank.py.

What the plan does not write, tensors in checkpoint layout apart, is *derived*: `finalize` makes it.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Grant, Memory
from moe_p2p.errors import ProtocolError, ResourceExhaustedError, make, require
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.weights import attempt, boxes
from moe_p2p.weights.attempt import Keys
from moe_p2p.weights.boxes import length
from moe_p2p.weights.layout import Param
from moe_p2p.weights.plan import WeightPlan, Write

# Makes derived tensors: of parameters in checkpoint layout, by name, and all tensors, by name.
Finalize = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]

_ALIGN = 256
_UNTOUCHED = 0xFF  # NaN in every floating-point type of torch that has one


class Span(NamedTuple):
    """Rows of a tensor: `begin`, row_bytes and stride are bytes."""

    tensor: str
    begin: int
    num_rows: int
    row_bytes: int
    stride: int

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns a view of its bytes, [num_rows, row_bytes]."""
        data = attempt.as_bytes(tensors[self.tensor])
        at = int(data.storage_offset()) + self.begin
        return data.as_strided((self.num_rows, self.row_bytes), (self.stride, 1), at)


def covered(writes: Iterable[Write]) -> list[Span]:
    """Returns the bytes that the writes change, and no other byte, in as few spans as can be: a
    model with many experts has thousands of writes, and a kernel for each takes longer than the
    update.
    """
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    found: list[Span] = []
    for write in writes:
        rows, tensor = write.rows, write.target_tensor
        stride, nbytes = rows.target_stride or rows.row_bytes, rows.row_bytes * rows.num_rows
        for _, begin in rows.offsets:
            if rows.num_rows == 1 or stride == rows.row_bytes:
                spans[tensor].append((begin, begin + nbytes))
            else:
                found.append(Span(tensor, begin, rows.num_rows, rows.row_bytes, stride))
    for tensor, each in spans.items():
        found += [Span(tensor, a, 1, b - a, b - a) for a, b in _joined(each)]
    return found


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first byte, end) where spans touch as one."""
    first = end = -1
    for begin, after in sorted(spans):
        if begin > end:
            if end >= 0:
                yield first, end
            first = begin
        end = max(end, after)
    if end >= 0:
        yield first, end


class EngineBuffers:
    """live: the engine's tensors, contiguous. target: what is written and finalized, by name;
    received: what arrives in checkpoint layout, by parameter, or by place where it has several."""

    def __init__(
        self,
        engine: Engine,
        plan: WeightPlan,
        rank: int,
        live: Mapping[str, Tensor],
        *,
        shadow: bool,
        finalize: Finalize | None,
        watermark: int | None = None,
    ) -> None:
        self._engine, self._live, self._shadow = engine, dict(live), shadow
        self._finalize = finalize
        self._rank, self.writes = rank, list(plan.writes_to(rank))
        of_received = plan.received(rank)
        received = self._received_bytes = _received(self.writes, of_received)
        written = {write.target_tensor for write in self.writes} - received.keys()
        self.derived = [name for name in live if name not in written and live[name].numel()]
        # What `finalize` makes lies in no tensor of this rank, so a peer's are no whole version.
        self.is_a_part = bool(received) and not self.derived
        require(
            finalize is not None or not (self.derived or received),
            f"generator {rank}: tensors {', '.join([*self.derived, *received][:3])} are not "
            "written in their final form; pass finalize, which makes them",
        )
        device = next(iter(live.values())).device if live else "cpu"
        own = dict(live) if shadow else {}
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in own.items()}
        self._places, total = _places({**sizes, **received})
        if watermark is not None and total > watermark:
            mode = "shadow" if shadow else "in_place"
            text = f"mode {mode!r} takes a buffer of {total} bytes, the watermark is {watermark}"
            hint = "use mode='in_place', or raise watermark" if shadow else "raise watermark"
            raise make(ResourceExhaustedError, f"generator {rank}: {text}; {hint}")
        self.buffer = torch.zeros(total, dtype=torch.uint8, device=device)  # one registration
        made = {name: self.buffer[at : at + size] for name, (at, size) in self._places.items()}
        for name, tensor in own.items():
            made[name] = made[name].view(tensor.dtype).view(tensor.shape)
            made[name].copy_(tensor)
        self._tensors = {**live, **made}
        self.target = {name: self._tensors[name] for name in live}
        self._raw = {name: made[name] for name in received}
        self.received = _typed(plan, of_received, self._raw)
        self._received_of = {of_received[name][0].name for name in received}
        self._numbers = {name: (0, at) for name, (at, _) in self._places.items()}
        self._memory, self._grants = list[Memory](), list[Grant]()
        self._torn = False  # the shadow holds bytes of an update that failed, or poison
        self._received_at: int | None = None  # stamp of what arrived in checkpoint layout
        try:
            self._register({} if shadow else live)
        except BaseException:
            self.close()
            raise

    def _register(self, others: Mapping[str, Tensor]) -> None:
        """The buffer, and tensors that are written where they are."""
        if self.buffer.numel():
            self._memory.append(self._engine.register(self.buffer))
        for name, tensor in others.items():
            if tensor.numel():
                self._numbers[name] = len(self._memory), 0
                self._memory.append(self._engine.register(tensor))

    def replan(self, plan: WeightPlan) -> None:
        """Trainers have another layout now; what this rank receives must fit the same buffer."""
        writes, of_received = list(plan.writes_to(self._rank)), plan.received(self._rank)
        if _received(writes, of_received) != self._received_bytes:
            text = "the trainers' new layout needs other buffers: start this generator anew"
            raise make(ProtocolError, f"generator {self._rank}: {text}")
        self.writes, self.received = writes, _typed(plan, of_received, self._raw)
        self.__dict__.pop("_covered", None)

    def place(self, name: str) -> tuple[Memory, int]:
        """Registered memory of a target tensor, and its first byte there."""
        number, at = self._numbers[name]
        return self._memory[number], at

    def lend(self, trainers: Sequence[int]) -> dict[str, Any]:
        """For `trainers`, each a key of its own, until `fence`."""
        lent: dict[str, list[str]] = {}
        for trainer in trainers:
            first = len(self._grants)
            for each in self._memory:  # one by one: `fence` revokes what a later one failed after
                self._grants.append(self._engine.grant(each, f"trainer {trainer}"))
            lent[str(trainer)] = [each.descriptor.hex() for each in self._grants[first:]]
        return {"address": self._engine.address.hex(), "tensors": self._numbers, "to": lent}

    def fence(self) -> None:
        """No write of an earlier update reaches it any more, whoever is stopped."""
        self._torn = True
        for grant in self._grants:
            grant.revoke()
        self._grants.clear()

    def close(self) -> None:
        """Nobody reaches it any more, and nothing of it is registered. Goes on where it was, where
        it raised."""
        self.fence()
        while self._memory:
            self._memory[-1].unregister()
            self._memory.pop()

    def poison(self) -> None:
        """NaN wherever the update will write, or `finalize`."""
        self._torn = True
        for part in self._covered:
            part.of(self._tensors).fill_(_UNTOUCHED)
        self._poison_derived()

    @functools.cached_property
    def _covered(self) -> list[Span]:
        return covered(self.writes)

    def soil(self) -> None:
        """Before a peer's version is read into it."""
        self._torn = True

    def keep_others(self, names: set[str], base: int) -> str:
        """Before an update of `names` alone: all else is as in the live tensors, which have stamp
        `base`. Returns why that cannot be; "" when it is."""
        others = sorted(self._received_of - names)
        if others and self._received_at != base:
            return f"it has no {others[0]} in checkpoint layout: it took its version from a peer"
        if not self._torn:
            return ""
        if not self._shadow:
            return "its tensors were poisoned"
        if others:
            text = "what arrives in checkpoint layout was lost by an update that failed, or poison"
            return f"{text}: {others[0]}"
        self._copy({write.name for write in self.writes} - names, self._live, self.target)
        return ""

    def _copy(
        self, names: set[str], source: Mapping[str, Tensor], target: Mapping[str, Tensor]
    ) -> None:
        """What parameters have of the live tensors, or of their targets."""
        chosen = (w for w in self.writes if w.name in names and w.target_tensor in self._live)
        for part in covered(chosen):
            part.of(target).copy_(part.of(source))

    def _poison_derived(self) -> None:
        for name in self.derived:
            attempt.as_bytes(self.target[name]).fill_(_UNTOUCHED)

    def finish(self) -> None:
        """Runs `finalize`, and raises ProtocolError where it left a derived tensor as it was."""
        if self._finalize is None:
            return
        self._poison_derived()
        with torch.inference_mode(mode=False), torch.no_grad():  # in place the caller has modes
            self._finalize(self.received, self.target)
        for name in self.derived:
            data = attempt.as_bytes(self.target[name])
            if len(data) and bool((data == _UNTOUCHED).all()):
                raise make(ProtocolError, f"finalize did not make tensor {name!r}")

    def sums(self, writes: Iterable[Write]) -> dict[str, int]:
        """Of what was written, by tensor."""
        return attempt.sums(writes, self._tensors, 1)

    def commit(self, names: set[str] | None = None, received_at: int | None = None) -> None:
        """The pause of shadow mode: copies into the addresses that captured graphs hold. names: of
        the parameters that changed; None: all. received_at: the stamp, where it was received and
        not read from a peer."""
        if self._shadow:
            if names is not None:
                self._copy(names, self.target, self._live)
            for name in self._live if names is None else self.derived:
                self._live[name].copy_(self.target[name])
        self._torn, self._received_at = False, received_at


def _received(writes: list[Write], names: Collection[str]) -> dict[str, int]:
    """Bytes of tensors in checkpoint layout."""
    found: dict[str, int] = {}
    for write in writes:
        if write.target_tensor in names:
            rows = write.rows
            end = max(b for _, b in rows.offsets) + (rows.num_rows - 1) * rows.target_stride
            size = max(found.get(write.target_tensor, 0), end + rows.row_bytes)
            found[write.target_tensor] = size
    return found


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], int]:
    """(first byte, size) of each in one buffer, and its size."""
    places, at = {}, 0
    for name, size in sizes.items():
        places[name] = at, size
        at += -(-size // _ALIGN) * _ALIGN
    return places, at


def _typed(
    plan: WeightPlan, of_received: Mapping[str, tuple[Param, int]], received: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """In the source's type, each with the shape of what the rank has of the parameter. By
    parameter, where it has one place on the rank; else by `Param.received`."""
    found = {}
    places = Counter(of_received[tensor][0].name for tensor in received)
    for tensor, data in received.items():
        param, position = of_received[tensor]
        shape = [length(axis) for axis in boxes.parameter_axes(param, position)]
        values = data.view(getattr(torch, plan.source.by_name[param.name][0].dtype)).view(shape)
        found[param.name if places[param.name] == 1 else tensor] = values
    return found


class Arrivals:
    """What has come of one attempt: immediates counted, sums compared. who: id of the engine rank.
    nics: of each trainer."""

    def __init__(
        self,
        engine: Engine,
        words: StoreKeys,
        buffers: EngineBuffers,
        who: str,
        nics: Sequence[int],
    ) -> None:
        self._engine, self._words, self._buffers = engine, words, buffers
        self._who, self._nics = who, nics
        self._expected: Sequence[Write] = ()
        self._sources: list[int] = []  # trainers that write them
        self._counts: dict[int, int] = {}  # immediates by trainer

    def begin(self, expected: Sequence[Write]) -> None:
        self._expected, self._counts = expected, {}
        self._sources = sorted({write.source_rank for write in expected})

    def _count(self, keys: Keys) -> int | None:
        """Returns how many immediates the attempt has; None until all trainers have said so."""
        if not self._counts:
            found = {}  # of all of them: the store may fail in between
            for trainer in self._sources:
                theirs: dict[str, Any] | None = self._words.get(keys.requests(trainer))
                if theirs is None:
                    return None
                found[trainer] = int(theirs.get(self._who, 0)) * self._nics[trainer]
            self._counts = found
        return sum(self._counts.values())

    def counted(self, keys: Keys) -> bool:
        """Returns whether all immediates have arrived, and so all bytes."""
        expected = self._count(keys)
        if expected is None:
            return False
        counted = self._engine.imm_value(attempt.immediate(keys))
        if counted > expected:
            text = f"counted {counted} immediates, the trainers sent {expected}"
            raise make(ProtocolError, text)
        if counted == expected and expected:  # for kernels that follow
            self._engine.wait_imm(attempt.immediate(keys), expected)
        return counted == expected

    def checked(self, keys: Keys) -> bool:
        """Compares sums; False until the trainers have given theirs."""
        for trainer in self._sources:
            theirs = self._words.get(keys.sent(trainer))
            if theirs is None:
                return False
            ours = self._buffers.sums(w for w in self._expected if w.source_rank == trainer)
            wrong = [name for name, each in ours.items()
                     if theirs.get(self._who, {}).get(name) != each]  # fmt: skip
            if wrong:
                text = f"what trainer {trainer} wrote to {', '.join(wrong)} is not what it sent"
                raise make(ProtocolError, text)
        return True

    def missing(self, keys: Keys) -> str:
        late = [f"trainer {i}" for i in self._sources if self._words.get(keys.sent(i)) is None]
        counted = self._engine.imm_value(attempt.immediate(keys))
        return f"{counted} immediates counted; not done: {', '.join(late) or 'none'}"
