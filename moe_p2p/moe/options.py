"""Options of a dispatch beside its tensors and sizes, and the one int that ops take for them.

The int holds every option (csrc/moe/dispatch_options.h has the same bits), so nothing has to be
registered: fake kernels, autograd and C++ read it without looking anything up, and a graph that was
compiled in one process means the same in another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from moe_p2p import errors

RowLayout = Literal["padded", "grouped", "by_rank"]
SumOrder = Literal["ranks", "topk", "rows"]
CombineDtype = Literal["int10", "int10_nodes"]
ScaleFormat = Literal["float32", "power_of_two", "ue8m0"]
LAYOUTS: tuple[str, ...] = get_args(RowLayout)  # kernels/abi/shape.h has the same order
SUM_ORDERS: tuple[str, ...] = get_args(SumOrder)
COMBINE_DTYPES: tuple[str, ...] = get_args(CombineDtype)
SCALE_FORMATS: tuple[str, ...] = get_args(ScaleFormat)
PADDED, GROUPED, BY_RANK = range(3)
INT10_NODES = 1 + COMBINE_DTYPES.index("int10_nodes")
INT10_BLOCK = 32  # values that share a scale
UE8M0 = SCALE_FORMATS.index("ue8m0")
_MAX_ALIGNMENT = (1 << 31) - 1

# The bits. The layout is in the lowest two, the scale format in the next two, above all flags the
# alignment, and above it the order of a combine's sums and the type of what it sends.
LAYOUT_MASK = 3
_SCALE_FORMAT_SHIFT = 2
QUANTIZE, COLUMN_SCALES, ZERO_PADDING, SOLO = 1 << 4, 1 << 5, 1 << 6, 1 << 7
WITH_SOURCE, WITH_RANGES, WITH_WAIT_TICKS, COPY_TOPK = 1 << 8, 1 << 9, 1 << 10, 1 << 11
_ALIGNMENT_SHIFT, DROP, _SUM_ORDER_SHIFT, _PARTIALS_SHIFT = 12, 1 << 43, 44, 46
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
}


def layout_of(number: int) -> int:
    """PADDED, GROUPED or BY_RANK."""
    return number & LAYOUT_MASK


def scale_format_of(number: int) -> int:
    """A position in SCALE_FORMATS."""
    return number >> _SCALE_FORMAT_SHIFT & 3


def gradient_of(number: int) -> int:
    """For the dispatch that is the gradient of a combine: the same rows, and nothing else."""
    alignment = number & _ALIGNMENT_MASK
    return number & (LAYOUT_MASK | DROP) | alignment | ZERO_PADDING | SOLO


def sum_order_bits(order: str) -> int:
    """What is added to the number of a dispatch for a combine in this order."""
    return _position(order, "order", SUM_ORDERS) << _SUM_ORDER_SHIFT


def partials_of(combine_dtype: str | None) -> int:
    """What travels (kernels/abi/shape.h, Partials): 0, the type of the result, or int10."""
    if combine_dtype is None:
        return 0
    return 1 + _position(combine_dtype, "combine_dtype", COMBINE_DTYPES)


def partials_bits(combine_dtype: str | None) -> int:
    """What is added to the number of a dispatch for a combine that sends this type."""
    return partials_of(combine_dtype) << _PARTIALS_SHIFT


def sum_order_of(number: int) -> int:
    """A position in SUM_ORDERS."""
    return number >> _SUM_ORDER_SHIFT & 3


def partials_from(number: int) -> int:
    """partials_of() what partials_bits() was given."""
    return number >> _PARTIALS_SHIFT


@functools.cache  # each call asks
def variant_of(number: int) -> int:
    """The bits that choose the kernel: whether rows lie by rank, and what quantize does."""
    layout = BY_RANK if number & LAYOUT_MASK == BY_RANK else PADDED
    scale_format = number & 3 << _SCALE_FORMAT_SHIFT
    return layout | scale_format | number & QUANTIZE | 1 << _ALIGNMENT_SHIFT


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
    solo: bool = False
    zero_padding: bool | None = None
    number: int = field(init=False, repr=False, compare=False)  # what ops take

    def __post_init__(self) -> None:
        layout = _position(self.layout, "layout", LAYOUTS)
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
            not self.with_ranges or layout == PADDED,
            "with_ranges returns rows within an expert's own, it needs layout='padded'",
        )
        errors.require(
            not self.drop or layout == GROUPED, "drop leaves out rows of layout='grouped' only"
        )
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
_NAMES = tuple(option.name for option in dataclasses.fields(DispatchOptions) if option.init)


def shorthand(
    options: DispatchOptions | None, layout: str | None, quantize: bool | None
) -> DispatchOptions:
    """Returns the options that dispatch(layout=, quantize=) stands for."""
    errors.require(
        options is None,
        "options are given, and layout or quantize beside them; give those in the options: "
        "DispatchOptions(layout=..., quantize=...)",
    )
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
