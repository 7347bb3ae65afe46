"""What callers give: arguments, and their tensors against what a layout says of them. Wrong ones
are refused where they are given; later an engine rank would find them, after the fleet has decided.

Tensors are looked at once, when a rank is made. Later nobody looks: bytes of another type, of a
neighbour in the same storage, or of a parameter that lies where another one does, travel as well,
and sums of bytes are equal on both sides.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import log
from moe_p2p.engine.engine import Engine
from moe_p2p.errors import InvalidArgumentError, make, require, require_type
from moe_p2p.library import refuse_freed, refuse_lazy
from moe_p2p.weights import boxes
from moe_p2p.weights.boxes import PlacedBox
from moe_p2p.weights.layout import Param, WeightLayout, dtype_name, item_bytes

_MOST_VERSION = (1 << 63) - 1  # a word beside the tensors has it
_MOST_S = 1e6


def check_store(who: str, store: object) -> None:
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
        refuse_lazy(**{f"{name}[{key!r}]": each})
        refuse_freed(**{f"{name}[{key!r}]": plain(each)})


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


# --- tensors ---

_SHOWN = 3


def plain(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that can be written in any mode: a DTensor's part of this rank,
    without gradients, and not of inference mode."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    if not local.is_inference():
        return local
    made = torch.empty(0, dtype=local.dtype, device=local.device)
    place = (local.storage_offset(), local.shape, local.stride())
    return made.set_(local.untyped_storage(), *place)


def take(news: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Copies new values into a rank's tensors: all of them, or none where one does not fit."""
    found = {name: plain(each) for name, each in news.items()}
    for name, tensor in found.items():
        ours = mine.get(name)
        require(
            ours is not None and ours.shape == tensor.shape and ours.dtype == tensor.dtype,
            f"update: tensor {name!r} is none of this trainer's, or of another shape or type",
        )
    for name, tensor in found.items():
        mine[name].copy_(tensor)


def of_trainer(rank: int, layout: WeightLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`plain` ones, in one dimension where they are not contiguous but as the layout says.

    Raises InvalidArgumentError, with the tensor's name, where one is not what the layout says.
    """
    found = {name: plain(each) for name, each in tensors.items()}
    for name, claims in _claims(layout, rank).items():
        if name in found:
            found[name] = _Given(f"trainer {rank}", name, found[name], claims).checked()
    return found


def of_engine_rank(
    rank: int,
    layout: WeightLayout,
    tensors: Mapping[str, Tensor],
    padding: Collection[str],
) -> dict[str, Tensor]:
    """`plain` ones. padding: tensors of which a part belongs to no parameter.

    Raises InvalidArgumentError where one is not what the layout says, or parameters overlap, and
    warns of bytes that nobody writes.
    """
    who = f"generator {rank}"
    require_type(f"{who}: padding", padding, (tuple, list, set, frozenset), "names of tensors")
    unknown = sorted(set(padding) - set(tensors))
    require(not unknown, f"{who}: padding names {unknown[:_SHOWN]}, which are none of its tensors")
    found = {name: plain(each) for name, each in tensors.items()}
    _check_apart(who, found)
    gaps: dict[str, tuple[int, int]] = {}
    meant = {*padding, *_finalized(layout, rank)}
    for name, claims in _claims(layout, rank).items():
        end, covered, hole = _written(who, name, claims)
        if name not in found:
            lacks = covered and not claims[0].is_received
            require(not lacks, f"{who} has no tensor {name!r}, which its layout names")
            continue
        given = _Given(who, name, found[name], claims, may_be_longer=name in padding)
        given.checked(views=False)
        rest = found[name].numel() * found[name].element_size() - covered
        if rest and covered and name not in meant:
            gaps[name] = rest, hole if hole >= 0 else end
    if gaps:
        shown = [f"{n:,} B of {name!r}, from byte {at} on"
                 for name, (n, at) in list(gaps.items())[:_SHOWN]]  # fmt: skip
        more = f" and {len(gaps) - _SHOWN} more tensors" if len(gaps) > _SHOWN else ""
        log.warning(f"{who}: no parameter is written to {', '.join(shown)}{more}: they stay as "
                    "they are; name these tensors in padding= if they should")  # fmt: skip
    return found


def _finalized(layout: WeightLayout, rank: int) -> set[str]:
    """Tensors of which `finalize` makes a part."""
    return {each.tensor for each in layout.params if each.finalize and rank in each.ranks}


# --- what a layout says ---


class _Claim(NamedTuple):
    """A parameter in a tensor. first: the element from which pieces count. shape: of the rank's
    tensor, where the parameter's place is not a part of a larger one; None: it may be."""

    param: Param
    dtype: str
    first: int
    boxes: list[PlacedBox]
    shape: tuple[int, ...] | None = None
    is_received: bool = False


class _Held(NamedTuple):
    shape: tuple[int, ...]
    boxes: list[PlacedBox]
    scales: list[PlacedBox]
    is_received: bool


def _claims(layout: WeightLayout, rank: int) -> dict[str, list[_Claim]]:
    """By tensor."""
    found: dict[str, list[_Claim]] = {}
    known: dict[object, _Held] = {}
    for param in layout.params:
        for position in param.positions(rank):
            key = (param.how, position)
            if key not in known:
                known[key] = _held(param, position)
            held = known[key]
            if held.is_received:
                claim = _Claim(param, param.dtype, 0, held.boxes, is_received=True)
                found.setdefault(param.received, []).append(claim)
                continue
            shape = None if param.offset or param.part else held.shape
            claim = _Claim(param, param.dtype, param.offset, held.boxes, shape)
            found.setdefault(param.tensor, []).append(claim)
            if param.blocks is not None:
                claim = _Claim(param, "float32", param.blocks.offset, held.scales)
                found.setdefault(param.blocks.tensor, []).append(claim)
    return found


def _held(param: Param, position: int) -> _Held:
    shape, axes = boxes.local_shape(param, position), boxes.parameter_axes(param, position)
    blocks = param.blocks
    if param.finalize or (blocks and boxes.why_unaligned(axes, blocks.shape)):
        return _Held(shape, _some(boxes.dense(axes)), [], is_received=True)
    scales = _some(boxes.target_blocks(axes, blocks)) if blocks else []
    return _Held(shape, _some(boxes.held(param, position)), scales, is_received=False)


def _some(found: list[PlacedBox]) -> list[PlacedBox]:
    """Those that have elements."""
    return [each for each in found if all(size for _, size in each.box)]


def _end(claim: _Claim) -> int:
    """Elements of the tensor up to the claim's last one."""
    ends = (
        each.offset
        + sum((n - 1) * step for (_, n), step in zip(each.box, each.strides, strict=True))
        for each in claim.boxes
    )
    return max((claim.first + end + 1 for end in ends), default=0)


# --- what a tensor is ---


class _Given(NamedTuple):
    who: str
    name: str
    tensor: Tensor
    claims: list[_Claim]
    may_be_longer: bool = False

    def checked(self, *, views: bool = True) -> Tensor:
        """Returns it as contiguous elements in the layout's order. views: of a larger tensor, too,
        with the layout's strides."""
        self._check_type()
        self._check_size()
        if self.tensor.is_contiguous():
            return self.tensor
        described = all(self._is_so_strided(claim) for claim in self.claims)
        if not (views and described):
            strides = self.tensor.stride()
            raise self._wrong(
                f"has strides {strides}, its layout says otherwise; describe it with "
                f"strides={strides}, as of_tensor does"
                if views
                else f"has strides {strides}, must be contiguous; pass the tensor that it is a "
                "view of, and describe it with order or strides"
            )
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return self.tensor.as_strided((1 + sum((n - 1) * step for n, step in steps),), (1,))

    def _check_type(self) -> None:
        have = dtype_name(self.tensor.dtype)
        for claim in self.claims:
            if have not in (claim.dtype, "uint8"):
                raise self._wrong(
                    f"is {have}, but its layout says {claim.dtype} for {claim.param.name!r}; "
                    "describe it as it is, or pass another tensor"
                )

    def _check_size(self) -> None:
        nbytes = self.tensor.numel() * self.tensor.element_size()
        for claim in self.claims:
            least = _end(claim) * item_bytes(claim.dtype)
            extent = nbytes if self.tensor.is_contiguous() else self._extent_bytes()
            if least > extent:
                raise self._wrong(
                    f"has {extent} bytes, but its layout puts {claim.param.name!r} up to byte "
                    f"{least}"
                )
        first = self.claims[0]
        if first.shape is None or any(
            claim.shape != first.shape or claim.dtype != first.dtype or claim.param.strides
            for claim in self.claims
        ):
            return
        whole, shape = math.prod(first.shape) * item_bytes(first.dtype), tuple(self.tensor.shape)
        if nbytes != whole and not self.may_be_longer:
            raise self._wrong(
                f"is {list(shape)}, {nbytes} bytes, but its layout says {list(first.shape)}, "
                f"{whole} bytes, for {first.param.name!r}; describe rows that are padded by strides"
                + ("" if self.who.startswith("trainer") else ", or name it in padding=")
            )
        ours, theirs = ([n for n in each if n != 1] for each in (shape, first.shape))
        if ours != theirs and sorted(ours) == sorted(theirs) and not first.param.order:
            raise self._wrong(
                f"is {list(shape)}, but its layout says {list(first.shape)} for "
                f"{first.param.name!r}; a transposed tensor is described by order or strides"
            )

    def _extent_bytes(self) -> int:
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return (1 + sum((n - 1) * step for n, step in steps)) * self.tensor.element_size()

    def _is_so_strided(self, claim: _Claim) -> bool:
        if claim.shape != tuple(self.tensor.shape):
            return False
        strides = claim.param.strides or boxes.dense_strides(claim.shape, claim.param.order)
        steps = zip(claim.shape, strides, self.tensor.stride(), strict=True)
        return all(n == 1 or said == have for n, said, have in steps)

    def _wrong(self, text: str) -> Exception:
        return make(InvalidArgumentError, f"{self.who}: tensor {self.name!r} {text}")


def _check_apart(who: str, tensors: Mapping[str, Tensor]) -> None:
    """The same tensor under two names is tied; parts of each other would be written twice."""
    spans = sorted(
        (str(each.device), each.data_ptr(), each.numel() * each.element_size(), name)
        for name, each in tensors.items()
        if each.numel() and each.is_contiguous()
    )
    for one, following in itertools.pairwise(spans):
        (device, at, nbytes, name), (other_device, to, size, other) = one, following
        overlap = device == other_device and to < at + nbytes
        require(
            not overlap or (at, nbytes) == (to, size),
            f"{who}: tensors {name!r} and {other!r} share memory; pass one of them",
        )


# --- what is written ---


def _written(who: str, name: str, claims: list[_Claim]) -> tuple[int, int, int]:
    """Returns the end of what parameters have in a tensor, how much that is, and where the first
    hole is, in bytes; -1: none. Raises where two have the same byte."""
    begins, lengths, owners = (torch.cat(each) for each in zip(*_runs(claims), strict=True))
    if not len(begins):
        return 0, 0, -1
    order = torch.argsort(begins, stable=True)
    begins, lengths, owners = begins[order], lengths[order], owners[order]
    ends, last = torch.cummax(begins + lengths, 0)
    twice = (ends[:-1] > begins[1:]).nonzero().flatten()
    if len(twice):
        i = int(twice[0])
        both = [claims[int(owners[k])].param.name for k in (int(last[i]), i + 1)]
        raise make(
            InvalidArgumentError,
            f"{who}: parameters {both[0]!r} and {both[1]!r} overlap in tensor {name!r} at byte "
            f"{int(begins[i + 1])}; look at their offset and strides",
        )
    holes = (begins > torch.cat([begins.new_zeros(1), ends[:-1]])).nonzero().flatten()
    first = -1
    if len(holes):
        i = int(holes[0])
        first = int(ends[i - 1]) if i else 0
    return int(ends[-1]), int(lengths.sum()), first


def _runs(claims: list[_Claim]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """First bytes, lengths and claims of runs without a gap."""
    dense: list[tuple[int, int, int]] = []
    for number, claim in enumerate(claims):
        item = item_bytes(claim.dtype)
        for placed in claim.boxes:
            steps = zip(placed.box, placed.strides, strict=True)
            levels = [(size, step) for (_, size), step in steps if size > 1]
            levels.sort(key=lambda level: -level[1])
            run = 1
            while levels and levels[-1][1] == run:
                run *= levels.pop()[0]
            begin = (claim.first + placed.offset) * item
            if not levels:
                dense.append((begin, run * item, number))
                continue
            begins = torch.tensor([begin], device="cpu")
            for size, step in levels:
                along = torch.arange(size, device="cpu") * (step * item)
                begins = (begins.unsqueeze(1) + along).flatten()
            yield begins, torch.full_like(begins, run * item), torch.full_like(begins, number)
    yield torch.tensor(dense, dtype=torch.int64, device="cpu").view(-1, 3).unbind(1)  # type: ignore[misc]
