"""Options of calls: checked where they are made, one int for ops, errors that say what to write."""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from moe_p2p import AllToAll, AllToAllConfig, CombineOptions, DispatchOptions, InvalidArgumentError
from moe_p2p.moe import options
from moe_p2p.moe.options import RowLayout, ScaleFormat, combine_options
from tests.support.cases import in_options, make, make_tokens
from tests.support.ranks import Rank, run_threads

ops = torch.ops.moe_p2p


@pytest.fixture(scope="module")
def alone() -> Iterator[AllToAll]:
    with make(Rank(0, 1, dist.HashStore()), steps_in_flight=8) as comm:
        yield comm


def every_one() -> Iterator[DispatchOptions]:
    flags = [option.name for option in fields(DispatchOptions) if option.type == "bool"]
    for layout, scale_format in itertools.product(get_args(RowLayout), get_args(ScaleFormat)):
        for values in itertools.product((False, True), repeat=len(flags)):
            given: dict[str, Any] = dict(zip(flags, values, strict=True))
            if given["with_ranges"] and layout != "padded":
                continue
            if scale_format != "float32" and not given["quantize"]:
                continue
            if given["drop"] and layout != "grouped":
                continue
            yield DispatchOptions(layout=layout, scale_format=scale_format, **given)


def test_no_two_options_have_the_same_number() -> None:
    made = list(every_one())
    made += [replace(DispatchOptions(), alignment=n) for n in (2, 3, 128, (1 << 31) - 1)]
    made += [DispatchOptions(zero_padding=True)]
    assert len(made) > 500
    assert len({one.number for one in made}) == len(made)
    assert DispatchOptions(zero_padding=False).number == DispatchOptions().number


def test_the_number_of_a_gradient_has_the_rows_and_nothing_else() -> None:
    for one in every_one():
        for alignment in (1, 5):
            wanted = DispatchOptions(
                layout=one.layout,
                alignment=alignment,
                zero_padding=True,
                solo=True,
                drop=one.drop,
            )
            assert options.gradient_of(replace(one, alignment=alignment).number) == wanted.number


def test_they_can_be_keys_and_travel() -> None:
    one = DispatchOptions(layout="grouped", alignment=4)
    assert {one: 1}[DispatchOptions(layout="grouped", alignment=4)] == 1
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert again.number == one.number
    with pytest.raises(AttributeError):
        one.alignment = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"layout": "sorted"}, "layout is 'sorted', must be one of"),
        ({"layout": ["padded"]}, r"layout is \['padded'\], must be one of"),
        ({"scale_format": "fp32", "quantize": True}, "scale_format is 'fp32', must be one of"),
        ({"scale_format": "ue8m0"}, "pass quantize=True"),
        ({"alignment": 0}, "alignment is 0, must be an integer from 1"),
        ({"alignment": 1 << 31}, "alignment is 2147483648, must be an integer from 1"),
        ({"alignment": 2.0}, r"alignment is 2\.0, must be an integer"),
        ({"solo": None}, "solo is None, must be False or True"),
        ({"zero_padding": 2}, "zero_padding is 2, must be None, False or True"),
        ({"layout": "grouped", "with_ranges": True}, "it needs layout='padded'"),
        ({"layout": "padded", "drop": True}, "drop leaves out rows of layout='grouped' only"),
    ],
    ids=str,
)
def test_options_are_refused_where_they_are_made(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        DispatchOptions(**given)


@pytest.mark.parametrize("half", ["", "_send"])
def test_an_option_as_an_argument_is_refused_with_what_to_write(alone: AllToAll, half: str) -> None:
    tokens, call = make_tokens(0, 0, 4), getattr(alone, f"dispatch{half}")
    with pytest.raises(InvalidArgumentError) as error:
        call(tokens.x, tokens.topk_idx, layout="grouped", alignment=4, solo=True)
    assert "options=DispatchOptions(alignment=4, solo=True)" in str(error.value)
    with pytest.raises(TypeError, match="has no argument alinement"):
        call(tokens.x, tokens.topk_idx, alinement=4)
    for short in ({"layout": "padded"}, {"quantize": False}):
        with pytest.raises(InvalidArgumentError, match="give those in the options"):
            call(tokens.x, tokens.topk_idx, options=DispatchOptions(), **short)
    with pytest.raises(InvalidArgumentError, match="options is of type dict, must be a Dispatch"):
        call(tokens.x, tokens.topk_idx, options={"solo": True})
    with pytest.raises(InvalidArgumentError, match="layout is 'sorted', must be one of"):
        call(tokens.x, tokens.topk_idx, layout="sorted")


def test_shorthands_are_the_options_of_those_names(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, 4)
    for layout, quantize in itertools.product((None, *get_args(RowLayout)), (None, False, True)):
        short = alone.dispatch(tokens.x, tokens.topk_idx, layout=layout, quantize=quantize)
        given = {"layout": layout or "padded", "quantize": bool(quantize)}
        full = alone.dispatch(tokens.x, tokens.topk_idx, **in_options(**given))
        for received in (short, full):
            alone.release(received)
        assert short.call[1:] == full.call[1:]
        assert short.x.shape == full.x.shape
        assert short.x.dtype == full.x.dtype


@pytest.mark.parametrize(
    "number",
    [
        0,  # no alignment
        -1,
        1 << 12 | 3,  # no such layout
        1 << 12 | 1 << 4 | 3 << 2,  # nor scale format
        1 << 12 | 1 << 2,  # a scale format without quantize
        1 << 12 | 1 << 9 | 1,  # ranges of grouped rows
        1 << 43 | 1 << 12,  # rows that are dropped, and padded
        1 << 44 | 1 << 12,  # of a combine
    ],
)
def test_ops_refuse_numbers_of_no_options(alone: AllToAll, number: int) -> None:
    tokens = make_tokens(0, 0, 4)
    given = (alone._comm, number, 12, 12, tokens.x, tokens.topk_idx)
    with pytest.raises(RuntimeError, match=f"options is {number}, must be the number of a"):
        ops.dispatch_inference(*given)
    handle = torch.zeros(alone._shape.handle_words(4, 12), dtype=torch.int32)
    send = (alone._comm, number, tokens.x, None, [], tokens.topk_idx, None, None, -1, 12, handle)
    with pytest.raises(RuntimeError, match=f"options is {number}, must be the number of a"):
        ops.dispatch_send(*send)
    assert alone.broken == ""


def test_alignment_and_outputs_reach_the_op(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, 5)
    asked = DispatchOptions(
        layout="grouped", alignment=4, with_source=True, with_wait_ticks=True, zero_padding=True
    )
    received = alone.dispatch(tokens.x, tokens.topk_idx, options=asked)
    assert (received.offsets % 4 == 0).all()
    assert received.source is not None
    assert received.wait_ticks is not None
    assert received.ranges is None
    assert received.topk_idx is tokens.topk_idx
    used = torch.zeros(len(received.x), dtype=torch.bool)
    for first, count in zip(received.offsets.tolist(), received.counts.tolist(), strict=False):
        used[first : first + count] = True
    assert int(used.sum()) == int((tokens.topk_idx >= 0).sum())
    assert not received.x[~used].any()
    alone.release(received)


def test_calls_take_few_arguments() -> None:
    for call in (AllToAll.dispatch, AllToAll.dispatch_send):
        names = set(inspect.signature(call).parameters) - {"self", "layout", "quantize", "moved"}
        assert len(names) == 9
    for name, most in (("dispatch", 12), ("dispatch_inference", 12), ("dispatch_send", 11)):
        assert len(getattr(ops, name).default._schema.arguments) == most


OLD = [
    ({"order": "topk"}, CombineOptions(order="topk")),
    ({"combine_dtype": "int10"}, CombineOptions(partials="int10")),
    ({"with_wait_ticks": True}, CombineOptions(with_wait_ticks=True)),
]


@pytest.mark.parametrize(("old", "new"), OLD)
def test_arguments_of_combine_that_became_options(old: dict[str, Any], new: CombineOptions) -> None:
    """They are taken for one release."""
    with pytest.warns(DeprecationWarning, match=rf"{next(iter(old))} of combine became options"):
        assert combine_options(None, None, None, old) == new
    with pytest.warns(DeprecationWarning, match="options=CombineOptions"):
        got = combine_options(None, False, torch.float32, old)
    assert got == replace(new, weighted=False, out_dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="options is given, and"):
        combine_options(CombineOptions(), None, None, old)


def test_calls_take_their_old_arguments() -> None:
    with make(Rank(0, 1, dist.HashStore()), hidden_dim=64) as comm, torch.no_grad():
        tokens = make_tokens(0, 0, 4, hidden_dim=64)
        got = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
        with pytest.warns(DeprecationWarning, match="partials='int10'") as warned:
            old = comm.combine(got.x, got, combine_dtype="int10")
        assert warned[0].filename == __file__
        got = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
        new = comm.combine(got.x, got, options=CombineOptions(partials="int10"))
        assert torch.equal(old, new)
        with pytest.warns(DeprecationWarning, match="combine=CombineOptions") as warned:
            comm.prepare(combine_dtype="int10", out_dtype=torch.float32)
        assert warned[0].filename == __file__
        got = comm.dispatch(tokens.x, tokens.topk_idx)
        with pytest.warns(DeprecationWarning, match="of combine became options"):
            sent = comm.combine_send(got.x, got, combine_dtype="int10")
        comm.combine_recv(sent)
        with pytest.raises(TypeError, match="combine has no argument scale"):
            comm.combine(got.x, got, scale=1)
        with pytest.raises(InvalidArgumentError, match="give those in the options"):
            comm.combine(got.x, got, options=CombineOptions(), weighted=False)
        with pytest.raises(InvalidArgumentError, match="must be a CombineOptions"):
            comm.combine(got.x, got, options=DispatchOptions())
        with pytest.raises(InvalidArgumentError, match="give it to combine_recv"):
            comm.combine_send(got.x, got, options=CombineOptions(with_wait_ticks=True))


def test_arrival_flags_is_a_setting_and_a_field_for_one_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape: dict[str, Any] = {"num_experts": 8, "hidden_dim": 48, "topk": 3, "max_tokens": 12}
    assert AllToAllConfig(**shape).arrivals == "auto"
    config = AllToAllConfig(**shape, transport_settings="arrival_flags=relay,seed=3")
    assert (config.arrivals, config.provider_settings) == ("relay", "seed=3")
    with pytest.warns(DeprecationWarning, match="transport_settings='arrival_flags=write'"):
        old = AllToAllConfig(**shape, arrival_flags="write", transport_settings="seed=3")
    assert (old.arrivals, old.provider_settings) == ("write", "seed=3")
    assert replace(old, max_tokens=13).arrivals == "write"
    monkeypatch.setenv("MOE_P2P_TRANSPORT_SETTINGS", "seed=4")
    with pytest.warns(DeprecationWarning, match="became a setting"):
        assert AllToAllConfig(**shape, arrival_flags="relay").provider_settings == "seed=4"
    with pytest.raises(InvalidArgumentError, match=r"arrival_flags=best is refused; it must be"):
        AllToAllConfig(**shape, transport_settings="arrival_flags=best")


def settings_that_differ(rank: Rank) -> None:
    with pytest.raises(InvalidArgumentError, match="arrival_flags"):
        make(rank, transport_settings="arrival_flags=relay" if rank.rank else "")


def test_ranks_have_the_same_arrival_flags() -> None:
    run_threads(2, settings_that_differ)
