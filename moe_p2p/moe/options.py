"""Options of a dispatch and of a combine beside their tensors, and the one int that ops take.

The int holds every option (csrc/moe/dispatch_options.h has the same bits), so nothing has to be
registered: fake kernels, autograd and C++ read it without looking anything up, and a graph that was
compiled in one process means the same in another.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch

from moe_p2p import errors
from moe_p2p.moe.layouts import LAYOUTS, NAMES, LayoutFacts, RowLayout

SumOrder = Literal["ranks", "topk", "rows"]
Partials = Literal["int10", "int10_nodes", "block16"]
ScaleFormat = Literal["float32", "power_of_two", "ue8m0"]
SUM_ORDERS: tuple[str, ...] = get_args(SumOrder)
PARTIALS: tuple[str, ...] = get_args(Partials)  # kernels/abi/shape.h has 0, and these from 1
SCALE_FORMATS: tuple[str, ...] = get_args(ScaleFormat)
INT10_NODES = 1 + PARTIALS.index("int10_nodes")
INT10_BLOCK, BLOCK16 = 32, 8  # values that share a scale
UE8M0 = SCALE_FORMATS.index("ue8m0")
_MAX_ALIGNMENT = (1 << 31) - 1

# The bits. The layout is in the lowest two (a fourth layout fits, a fifth does not), the scale
# format in the next two, above all flags the alignment, and above it the order of a
# combine's sums and the type of what it sends.
LAYOUT_MASK = 3
_SCALE_FORMAT_SHIFT = 2
QUANTIZE, COLUMN_SCALES, ZERO_PADDING, SOLO = 1 << 4, 1 << 5, 1 << 6, 1 << 7
WITH_SOURCE, WITH_RANGES, WITH_WAIT_TICKS, COPY_TOPK = 1 << 8, 1 << 9, 1 << 10, 1 << 11
_ALIGNMENT_SHIFT, DROP, _SUM_ORDER_SHIFT, _PARTIALS_SHIFT = 12, 1 << 43, 44, 46
MERGE_DUPLICATES = 1 << 62  # of Python alone: ops never see it
_ALIGNMENT_MASK = _MAX_ALIGNMENT << _ALIGNMENT_SHIFT
_FLAGS = {
    "quantize": QUANTIZE,
    "column_scales": COLUMN_SCALES,
    "solo": SOLO,
    "with_source": WITH_SOURCE,
    "with_ranges": WITH_RANGES,
    "with_wait_ticks": WITH_WAIT_TICKS,
    "copy_topk": COPY_TOPK,
    "drop": DROP,
    "merge_duplicates": MERGE_DUPLICATES,
}


def rows_of(number: int) -> LayoutFacts:
    """The layout."""
    return LAYOUTS[number & LAYOUT_MASK]


def scale_format_of(number: int) -> int:
    """A position in SCALE_FORMATS."""
    return number >> _SCALE_FORMAT_SHIFT & 3


def gradient_of(number: int) -> int:
    """For the dispatch that is the gradient of a combine: the same rows, and nothing else."""
    alignment = number & _ALIGNMENT_MASK
    return number & (LAYOUT_MASK | DROP) | alignment | ZERO_PADDING | SOLO


def partials_of(partials: str | None) -> int:
    """What travels (kernels/abi/shape.h, Partials): 0, the type of the result, or another."""
    return 0 if partials is None else 1 + _position(partials, "partials", PARTIALS)


def block_of(partials: str) -> int:
    """Values that share a scale, of which H must be a multiple."""
    return BLOCK16 if partials == "block16" else INT10_BLOCK


def sum_order_of(number: int) -> int:
    """A position in SUM_ORDERS."""
    return number >> _SUM_ORDER_SHIFT & 3


def partials_from(number: int) -> int:
    """partials_of() what the combine was given."""
    return number >> _PARTIALS_SHIFT


@functools.cache  # each call asks
def variant_of(number: int) -> int:
    """The bits that choose the kernel: of the layout, and of what quantize does."""
    scale_format = number & 3 << _SCALE_FORMAT_SHIFT
    return rows_of(number).kernel | scale_format | number & QUANTIZE | 1 << _ALIGNMENT_SHIFT


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Options of a dispatch. Make one, and use it for all calls that are alike.

    Shapes: as in all_to_all.py. Equal on all ranks but for with_source, with_ranges,
    with_wait_ticks, copy_topk, column_scales and zero_padding.

    layout: "padded" gives [E_local, capacity, H], "grouped" [capacity, H] with expert e from row
        offsets[e] on, a multiple of alignment. "by_rank" gives [capacity, H] with one row for each
        token that has experts here: the rows of source s from row offsets[s] on, and their local
        expert ids in row_topk.
    quantize: send x as float8_e4m3fn with one scale per 128 values.
    scale_format: with quantize. "power_of_two" rounds scales up to powers of two; "ue8m0" gives
        their exponent bytes, four in an int32: [rows, ceil(H / 512)].
    alignment: of the first row of each expert, when grouped.
    column_scales: scales lie column by column, in columns of a multiple of 4 rows; their shape
        stays.
    with_source: also return the source of each row.
    with_ranges: also return, when padded, where the rows of each source lie: [E_local, W] of (first
        row among the expert's) << 32 | number of rows.
    with_wait_ticks: also return the wait for each source, [W]: GPU clock cycles, or nanoseconds.
    copy_topk: the result holds a copy of topk_idx, which may then be overwritten before the result
        was combined.
    drop: when grouped, leave rows past the capacity out, without an error; offsets[-1] is then the
        capacity that would have been enough, and their share is absent from sums.
    merge_duplicates: topk_idx may name an expert more than once in a row (hash routing): it gets
        the token once, with the sum of the weights. Else such a row is an error. May differ
        between ranks. Not with topk_weights of combine, nor in the torch op.
    solo: no combine follows while other calls are under way (training does this by itself).
    zero_padding: rows without a token become zero. None: when autograd records the call. Experts
        that train need it: the gradient of their weights multiplies all rows.

    Raises InvalidArgumentError naming the option, its value and the valid ones.
    """

    layout: RowLayout = "padded"
    quantize: bool = False
    scale_format: ScaleFormat = "float32"
    alignment: int = 1
    column_scales: bool = False
    with_source: bool = False
    with_ranges: bool = False
    with_wait_ticks: bool = False
    copy_topk: bool = False
    drop: bool = False
    merge_duplicates: bool = False
    solo: bool = False
    zero_padding: bool | None = None
    number: int = field(init=False, repr=False, compare=False)  # what ops take

    def __post_init__(self) -> None:
        layout = _position(self.layout, "layout", NAMES)
        scale_format = _position(self.scale_format, "scale_format", SCALE_FORMATS)
        alignment = self.alignment
        errors.require(
            isinstance(alignment, int) and 1 <= alignment <= _MAX_ALIGNMENT,
            f"alignment is {alignment!r}, must be an integer from 1 to {_MAX_ALIGNMENT}",
        )
        number = layout | scale_format << _SCALE_FORMAT_SHIFT | alignment << _ALIGNMENT_SHIFT
        for name, bit in _FLAGS.items():
            value = getattr(self, name)
            errors.require(value in (False, True), f"{name} is {value!r}, must be False or True")
            number |= bit if value else 0
        errors.require(
            self.zero_padding in (None, False, True),
            f"zero_padding is {self.zero_padding!r}, must be None, False or True",
        )
        number |= ZERO_PADDING if self.zero_padding else 0
        errors.require(
            self.quantize or scale_format == 0,
            "scale_format says how scales of quantize are rounded; pass quantize=True",
        )
        errors.require(
            not self.with_ranges or LAYOUTS[layout].apart,
            "with_ranges returns rows within an expert's own, it needs layout='padded'",
        )
        errors.require(
            not self.drop or LAYOUTS[layout].packs_experts,
            "drop leaves out rows of layout='grouped' only",
        )
        object.__setattr__(self, "number", number)


@dataclass(frozen=True, kw_only=True)
class CombineOptions:
    """Options of a combine. Make one, and use it for all calls that are alike.

    Shapes: as in all_to_all.py. Equal on all ranks but for weighted and with_wait_ticks.

    weighted: multiply by row_weights. None: yes, but rows by rank are added as they are.
    out_dtype: type of the result and of the partial sums that travel. None: y's type.
    order: of the addends behind the bias. "ranks": what each rank, or other node, has added up. On
        one node also "topk": the sum of a rank at the last k of its experts, and "rows": rows
        travel one by one, unweighted, each is added at its k; that takes combine_rows of the
        configuration. By rank, "rows" is "topk". Not with `out`, nor in halves.
    partials: how the partial sums travel. None: in out_dtype. "int10": as 10-bit integers with a
        scale for each 32 values, two thirds of bfloat16's bytes and about its error; not for H of
        32, 64, 96 or 288 with a 16-bit combine_dtype (docs/calls.md). "int10_nodes": what goes from
        node to node only. All: H of whole blocks, order "ranks", no gradients.
        "block16": in bfloat16's bytes, as 15-bit integers with a common scale for each 8 values:
        the error is at most 2^-14.4 of the largest of the 8, or 2^-96, which is less than
        bfloat16's of a value down to about 1/40 of it. A block with an inf or a NaN arrives as NaN.
    with_wait_ticks: also return, last, the wait for each source, as dispatch does.

    Raises InvalidArgumentError naming the option, its value and the valid ones.
    """

    weighted: bool | None = None
    out_dtype: torch.dtype | None = None
    order: SumOrder = "ranks"
    partials: Partials | None = None
    with_wait_ticks: bool = False
    number: int = field(init=False, repr=False, compare=False)  # what ops take beside a dispatch's

    def __post_init__(self) -> None:
        order = _position(self.order, "order", SUM_ORDERS) << _SUM_ORDER_SHIFT
        number = order | partials_of(self.partials) << _PARTIALS_SHIFT
        object.__setattr__(self, "number", number)


def _position(value: str, name: str, among: tuple[str, ...]) -> int:
    errors.require(
        isinstance(value, str) and value in among, f"{name} is {value!r}, must be one of {among}"
    )
    return among.index(value)


class DispatchForm(NamedTuple):
    """Arguments of a dispatch but for its tensors and their number of rows, for many calls."""

    options: DispatchOptions
    max_tokens: int  # bound on T of all ranks
    capacity: int  # rows of each expert when padded, else of all


DEFAULT = DispatchOptions()
_SHORTHANDS = {
    (layout, quantize): DispatchOptions(layout=layout or "padded", quantize=bool(quantize))
    for layout in (None, *get_args(RowLayout))
    for quantize in (None, False, True)
}
DEFAULT_COMBINE = CombineOptions()
_COMBINES = {
    (weighted, out_dtype): CombineOptions(weighted=weighted, out_dtype=out_dtype)
    for weighted in (None, False, True)
    for out_dtype in (None, torch.bfloat16, torch.float16, torch.float32)
}
_MOVED = {"order": "order", "combine_dtype": "partials", "with_wait_ticks": "with_wait_ticks"}
_NAMES = tuple(option.name for option in dataclasses.fields(DispatchOptions) if option.init)


def shorthand(
    options: DispatchOptions | None, layout: str | None, quantize: bool | None
) -> DispatchOptions:
    """Returns the options that dispatch(layout=, quantize=) stands for."""
    if options is not None:
        text = "options are given, and layout or quantize beside them; give those in the options: "
        text += "DispatchOptions(layout=..., quantize=...)"
        raise errors.make(errors.InvalidArgumentError, text)
    short = _SHORTHANDS.get((layout, quantize))
    if short is None:
        short = DispatchOptions(layout=layout, quantize=quantize)  # type: ignore[arg-type]
    return short


def refuse_moved(given: Mapping[str, object]) -> None:
    """Raises for keyword arguments that dispatch does not have, or no longer has."""
    options = [name for name in given if name in _NAMES]
    if not options:
        raise TypeError(f"dispatch has no argument {', '.join(given)}")
    values = ", ".join(f"{name}={given[name]!r}" for name in options)
    raise errors.make(
        errors.InvalidArgumentError,
        f"{', '.join(options)} is not an argument of dispatch but an option: write "
        f"options=DispatchOptions({values}), with layout and quantize in it where they were given",
    )


def combine_options(
    options: CombineOptions | None,
    weighted: bool | None,
    out_dtype: torch.dtype | None,
    moved: dict[str, Any],
) -> CombineOptions:
    """Returns the options of a combine from its named arguments.

    moved: arguments that became options; they are taken for one release.
    """
    if moved:
        options = _with_moved(options, "combine", "options", moved)
    if weighted is None and out_dtype is None:
        if options is None:
            return DEFAULT_COMBINE
        if not isinstance(options, CombineOptions):
            raise errors.wrong_type("options", options, "a CombineOptions")
        return options
    if moved and options is not None:
        return dataclasses.replace(options, weighted=weighted, out_dtype=out_dtype)
    errors.require(
        options is None,
        "options are given, and weighted or out_dtype beside them; give those in the options: "
        "CombineOptions(weighted=..., out_dtype=...)",
    )
    short = _COMBINES.get((weighted, out_dtype))
    return CombineOptions(weighted=weighted, out_dtype=out_dtype) if short is None else short


def prepared_options(options: CombineOptions | None, moved: dict[str, Any]) -> CombineOptions:
    """Returns the combine that `prepare` is asked for. moved: as in combine_options()."""
    if moved:
        options = _with_moved(options, "prepare", "combine", moved)
    return combine_options(options, None, None, {})


def _with_moved(
    options: CombineOptions | None, call: str, keyword: str, moved: dict[str, Any]
) -> CombineOptions:
    names = _MOVED | ({"out_dtype": "out_dtype"} if call == "prepare" else {})
    unknown = [name for name in moved if name not in names]
    if unknown:
        raise TypeError(f"{call} has no argument {', '.join(unknown)}")
    errors.require(options is None, f"{keyword} is given, and {', '.join(moved)} beside it")
    given = {names[name]: value for name, value in moved.items()}
    values = ", ".join(f"{name}={value!r}" for name, value in given.items())
    text = f"{', '.join(moved)} of {call} became options: {keyword}=CombineOptions({values})"
    warnings.warn(text, DeprecationWarning, stacklevel=4)
    return CombineOptions(**given)
