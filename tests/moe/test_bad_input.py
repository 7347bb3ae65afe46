"""Bad input and lost ranks: a clear error within the deadline, never a hang.

What is refused before anything is sent leaves the object usable; `broken` tells what breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_p2p
from moe_p2p import AllToAll, AllToAllConfig, Dispatched, DispatchOptions
from tests.support.cases import HIDDEN_DIM, SMALL, check_step, in_options, make, make_tokens
from tests.support.ranks import Rank, on_ranks, run_processes


@pytest.fixture(scope="module")
def alone() -> AllToAll:
    """One communicator of one rank; every test leaves it usable."""
    return make(Rank(0, 1, dist.HashStore()), extra_bytes=16, dtype=torch.bfloat16)


def good() -> dict[str, Any]:
    tokens = make_tokens(0, 0, 4, dtype=torch.bfloat16)
    return {"x": tokens.x, "topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights}


def with_entry(row: int, column: int, value: int) -> torch.Tensor:
    idx = torch.tensor([[0, 1, 2]] * 4)
    idx[row, column] = value
    return idx


BAD_DISPATCH: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "width of x": (
        lambda: {"x": torch.zeros(4, 32).bfloat16()},
        r"x is torch.bfloat16 \[4, 32\], must have shape \[\*, 48\]",
    ),
    "dimensions of x": (
        lambda: {"x": torch.zeros(48).bfloat16()},
        r"x is torch.bfloat16 \[48\], must have shape \[\*, 48\]",
    ),
    "type of x": (
        lambda: {"x": torch.zeros(4, 48, dtype=torch.float64)},
        r"x is torch.float64 \[4, 48\], must be torch.bfloat16 or torch.float16 or torch.float32 "
        "or torch.float8_e4m3fn",
    ),
    "x wider than configured": (
        lambda: {"x": torch.zeros(4, 48)},
        r"a token of this dispatch is 192 bytes.*dtype",
    ),
    "strides of x": (
        lambda: {"x": torch.zeros(48, 4).bfloat16().t()},
        r"x is torch.bfloat16 \[4, 48\] with strides \[1, 4\], must be contiguous",
    ),
    "type of topk_idx": (
        lambda: {"topk_idx": torch.zeros(4, 3, dtype=torch.int16)},
        r"topk_idx is torch.int16 \[4, 3\], must be torch.int32 or torch.int64",
    ),
    "shape of topk_idx": (
        lambda: {"topk_idx": torch.zeros(4, 2, dtype=torch.int64)},
        r"topk_idx is torch.int64 \[4, 2\], must have shape \[4, 3\]",
    ),
    "rows of topk_idx": (
        lambda: {"topk_idx": torch.zeros(5, 3, dtype=torch.int64)},
        r"topk_idx is torch.int64 \[5, 3\], must have shape \[4, 3\]",
    ),
    "expert too large": (
        lambda: {"topk_idx": with_entry(2, 1, 8)},
        r"topk_idx\[2, 1\] is 8, must be -1 \(none\) or from 0 to 7",
    ),
    "expert too small": (lambda: {"topk_idx": with_entry(0, 0, -2)}, r"topk_idx\[0, 0\] is -2"),
    "expert twice": (
        lambda: {"topk_idx": with_entry(3, 0, 2)},
        r"topk_idx\[3\] names expert 2 twice",
    ),
    "type of topk_weights": (
        lambda: {"topk_weights": torch.zeros(4, 3).half()},
        r"topk_weights is torch.float16 \[4, 3\], must be torch.float32",
    ),
    "shape of topk_weights": (
        lambda: {"topk_weights": torch.zeros(4, 4)},
        r"topk_weights is torch.float32 \[4, 4\], must have shape \[4, 3\]",
    ),
    "scales without fp8": (
        lambda: {"scales": torch.zeros(4, 1)},
        "scales are given for x of torch.bf",
    ),
    "no scales": (
        lambda: {"x": torch.zeros(4, 48).to(torch.float8_e4m3fn), "scales": torch.zeros(4, 0)},
        "must have at least one column",
    ),
    "shape of scales": (
        lambda: {"x": torch.zeros(4, 48).to(torch.float8_e4m3fn), "scales": torch.zeros(3, 2)},
        r"scales is torch.float32 \[3, 2\], must have shape \[4",
    ),
    "quantize of fp8": (
        lambda: {"x": torch.zeros(4, 48).to(torch.float8_e4m3fn), "quantize": True},
        "quantize takes torch.bfloat16, ",
    ),
    "rows of an extra": (
        lambda: {"extras": (torch.zeros(3, 2),)},
        r"an extra is torch.float32 \[3, 2\], must have shape \[4, \*\]",
    ),
    "one extra by itself": (lambda: {"extras": torch.zeros(4, 2)}, "extras is a tensor, must be a"),
    "too many extra bytes": (
        lambda: {"extras": (torch.zeros(4, 8),)},
        r"a token of this dispatch is .*extra_bytes",
    ),
    "too many extras": (lambda: {"extras": (torch.zeros(4, 0),) * 9}, "9 extras are given"),
    "count above T": (lambda: {"num_tokens": 5}, "num_tokens is 5, x has 4 rows"),
    "count below 0": (lambda: {"num_tokens": -1}, "num_tokens is -1, must be at least 0"),
    "count of a float": (
        lambda: {"num_tokens": torch.tensor(3.0)},
        r"num_tokens is torch.float32 \[\], must be one torch.int32 or torch.int64",
    ),
    "two counts": (
        lambda: {"num_tokens": torch.tensor([1, 2])},
        r"num_tokens is torch.int64 \[2\]",
    ),
    "half a count": (lambda: {"num_tokens": 2.5}, "num_tokens is 2.5, must be an int, or a"),
    "half a bound": (lambda: {"max_tokens": 2.5}, "max_tokens is 2.5, must be an int"),
    "x as a list": (
        lambda: {"x": [[0.0] * 48] * 4},
        r"x is of type list, must be a torch.Tensor; pass torch.as_tensor\(x\)",
    ),
    "x of numpy": (
        lambda: {"x": torch.zeros(4, 48).numpy()},
        r"x is of type ndarray, must be a torch.Tensor; pass torch.as_tensor\(x\)",
    ),
    "no topk_idx": (lambda: {"topk_idx": None}, "topk_idx is None, must be a torch.Tensor"),
    "topk_idx as a list": (
        lambda: {"topk_idx": [[0, 1, 2]] * 4},
        r"topk_idx is of type list, must be a torch.Tensor; pass torch.as_tensor\(topk_idx\)",
    ),
    "topk_weights as a list": (
        lambda: {"topk_weights": [[1.0] * 3] * 4},
        "topk_weights is of type list, must be a torch.Tensor or None; pass torch.as_tensor",
    ),
    "extras of numbers": (lambda: {"extras": (1, 2)}, "extras is of type list, must be torch.Te"),
    "more tokens than max_tokens": (
        lambda: {"max_tokens": 3},
        "this rank sends 4 tokens, max_tokens of this call is 3",
    ),
    "max_tokens above the configuration's": (
        lambda: {"max_tokens": 13},
        "max_tokens of this call is 13, the communicator was made for at most 12",
    ),
    "layout": (lambda: {"layout": "sorted"}, "layout is 'sorted', must be one of"),
    "capacity": (lambda: {"capacity": -1}, "capacity is -1, must be from 0"),
    "alignment": (lambda: {"alignment": 0}, "alignment is 0, must be an integer from 1"),
}


# The capacity is looked at by the receiving half.
HALVES = [(name, half) for half in ("", "_send") for name in BAD_DISPATCH]
HALVES = [pair for pair in HALVES if pair != ("capacity", "_send")]


@pytest.mark.parametrize(("name", "half"), HALVES)
def test_dispatch_refuses(alone: AllToAll, name: str, half: str) -> None:
    change, match = BAD_DISPATCH[name]
    call = getattr(alone, f"dispatch{half}")
    with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
        call(**in_options(**(good() | change())))
    assert alone.broken == ""
    tokens = make_tokens(0, 0, 4, dtype=torch.bfloat16)
    check_step(alone, [tokens])


BAD_COMBINE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "width of y": (
        lambda: {"y": torch.zeros(8, 12, 32).bfloat16()},
        r"y is torch.bfloat16 \[8, 12, 32\]",
    ),
    "type of y": (
        lambda: {"y": torch.zeros(8, 12, 48).double()},
        "y is torch.float64, must be torch.bfloat16 or torch.float16 or torch.float32$",
    ),
    "fp8 y": (
        lambda: {"y": torch.zeros(8, 12, 48).to(torch.float8_e4m3fn)},
        "y is torch.float8_e4m3fn, must be torch.bfloat16 or torch.float16 or torch.float32$",
    ),
    "no y": (lambda: {"y": None}, "y is None, must be a torch.Tensor"),
    "no dispatch": (lambda: {"dispatched": None}, "dispatched is None, must be the result of a"),
    "bias of a number": (lambda: {"bias": 3}, "bias is 3, must be a torch.Tensor, two of them"),
    "out as a list": (lambda: {"out": [1]}, "out is of type list, must be a torch.Tensor$"),
    "strides of y": (
        lambda: {"y": torch.zeros(48, 96).bfloat16().t()},
        r"y is .*strides \[1, 96\]",
    ),
    "rows of y": (
        lambda: {"y": torch.zeros(95, 48).bfloat16()},
        r"y is torch.bfloat16 \[95, 48\], must hold the 96 rows that dispatch returned",
    ),
    "type of the result": (
        lambda: {"out_dtype": torch.int32},
        "out_dtype is torch.int32, must be torch.bfloat16 or torch.float16 or torch.float32$",
    ),
    "name of the result's type": (
        lambda: {"out_dtype": "float32"},
        "out_dtype is 'float32', must be a torch.dtype",
    ),
    "wider result than configured": (
        lambda: {"out_dtype": torch.float32},
        "a combined row is .*combine_dtype",
    ),
    "rows of scalars": (
        lambda: {"row_scalars": torch.zeros(3)},
        r"row_scalars is torch.float32 \[3\]",
    ),
}


@pytest.mark.parametrize("name", BAD_COMBINE)
def test_combine_refuses(alone: AllToAll, name: str) -> None:
    change, match = BAD_COMBINE[name]
    received = alone.dispatch(**good())
    arguments = {"y": received.x, "dispatched": received} | change()
    with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
        alone.combine(**arguments)
    assert alone.broken == ""
    assert alone.combine(received.x, received).shape == (4, HIDDEN_DIM)


def test_combine_refuses_too_few_rows_of_y(alone: AllToAll) -> None:
    received = alone.dispatch(**good())
    with pytest.raises(moe_p2p.InvalidArgumentError, match="y has 1 rows, this dispatch has put"):
        alone.combine(received.x[0, :1], received, weighted=False)
    alone.combine(received.x, received)


def with_handle(received: Dispatched, handle: torch.Tensor) -> Dispatched:
    return received._replace(call=received.call._replace(handle=handle))


def test_handle_of_somebody_else(alone: AllToAll) -> None:
    received = alone.dispatch(**good())
    for handle, match in [
        (torch.zeros(4, dtype=torch.int32), "handle was not made by a dispatch"),
        (torch.zeros(900, dtype=torch.int32), "handle was not made by a dispatch"),
        (received.call.handle.long(), r"handle is torch.int64 .*must be torch.int32"),
        (received.call.handle[:20].clone(), "handle has 20 words"),
    ]:
        with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
            alone.combine(received.x, with_handle(received, handle))
    alone.combine(received.x, received)


def combine_with_overwritten_handles(rank: Rank) -> list[str]:
    """The errors of a few hundred handles; words from the number of chunks on are overwritten."""
    generator = torch.Generator().manual_seed(5)
    limits = torch.tensor([0x7FFFFFFF, -(1 << 31), -2, 97, 13], dtype=torch.int32)
    reported = []
    with make(rank, dtype=torch.bfloat16) as comm:
        received = comm.dispatch(**good(), layout="grouped")
        for case in range(300):
            handle = received.call.handle.clone()
            begin, end = sorted(torch.randint(4, len(handle) + 1, (2,), generator=generator))
            words = torch.randint(-(1 << 31), 1 << 31, (end - begin,), generator=generator)
            handle[begin:end] = words.int() if case % 2 else limits[case // 2 % len(limits)]
            try:
                comm.combine(received.x, with_handle(received, handle))
            except moe_p2p.InvalidArgumentError as error:
                reported.append(str(error))
        pending = comm.combine_send(received.x, received)
        kept = received.call.handle.clone()
        received.call.handle[len(kept) // 2 :] = 0x7FFFFFFF
        with pytest.raises(moe_p2p.InvalidArgumentError, match="overwritten after its dispatch"):
            comm.combine_recv(pending)
        received.call.handle.copy_(kept)
        assert torch.isfinite(comm.combine_recv(pending)).all()
        assert comm.broken == ""
    return reported


def test_handles_that_were_overwritten_are_refused() -> None:
    """In a process: combine once read, and wrote, wherever such a handle pointed."""
    (reported,) = run_processes(1, combine_with_overwritten_handles)
    assert len(reported) > 150  # of 300: words of slots that nobody uses may hold anything
    assert all("overwritten" in text or "handle has" in text for text in reported), reported


def test_objects_that_are_no_halves(alone: AllToAll) -> None:
    for call in (alone.dispatch_recv, alone.combine_recv, alone.release):
        with pytest.raises(moe_p2p.InvalidArgumentError, match="is None, must be the result of"):
            call(None)


def test_halves_in_the_wrong_order(alone: AllToAll) -> None:
    pending = alone.dispatch_send(**good())
    received = alone.dispatch_recv(pending)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="each send half is received once"):
        alone.dispatch_recv(pending)
    alone.combine_recv(alone.combine_send(received.x, received))


def test_outputs_that_do_not_fit(alone: AllToAll) -> None:
    pending = alone.dispatch_send(**good())
    other = alone.dispatch(**good(), options=DispatchOptions(layout="grouped", solo=True))
    with pytest.raises(moe_p2p.InvalidArgumentError, match="must hold 96 rows of 48 values"):
        alone.dispatch_recv(pending, out=other)
    alone.release(alone.dispatch_recv(pending))


def test_sums_that_do_not_fit(alone: AllToAll) -> None:
    received = alone.dispatch(**good())
    num_rows, y = len(received.topk_idx), received.x
    for rows in (num_rows - 1, num_rows + 1):
        out = y.new_empty(rows, y.shape[-1])
        match = f"out has {rows} rows, must have {num_rows}"
        with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
            alone.combine(y, received, out=out)
        given = (alone._comm, y, None, None, None, [], received.call.handle, 12, out, None, None)
        with pytest.raises(RuntimeError, match=match):
            torch.ops.moe_p2p.combine_out(*given)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="out is of 0 dimensions, must be of 2"):
        alone.combine(y, received, out=y.new_empty(()))
    out = y.new_empty(num_rows, y.shape[-1])
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"out_dtype is torch\.float16"):
        alone.combine(y, received, out=out, out_dtype=torch.float16)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="with `out` it is not differentiable"):
        alone.combine(y.clone().requires_grad_(), received, out=out)
    pending = alone.combine_send(y, received)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="out has 1 rows"):
        alone.combine_recv(pending, out=out[:1])
    alone.combine_recv(pending, out=out)
    assert torch.equal(out, alone.combine(y, received))


def negative(tensor: torch.Tensor) -> torch.Tensor:
    """Shows the same values, and has their negatives in memory."""
    return torch._neg_view(-tensor)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def test_a_negative_view_is_read_as_the_values_that_it_shows(alone: AllToAll) -> None:
    arguments = good()
    received = alone.dispatch(**arguments)
    wanted = alone.combine(received.x, received)
    for name, tensor in arguments.items():
        received = alone.dispatch(**arguments | {name: negative(tensor)})
        assert torch.equal(alone.combine(negative(received.x), received), wanted), name
        pending = alone.dispatch_send(**arguments | {name: negative(tensor)})
        received = alone.dispatch_recv(pending)
        bias = negative(torch.zeros_like(wanted))
        sums = alone.combine_recv(alone.combine_send(negative(received.x), received), bias=bias)
        assert torch.equal(sums, wanted), name


VIEW = "is a negative view, whose memory holds other values than it shows; pass the tensor that"
FREED = ", and its storage was freed"


@pytest.mark.parametrize(("odd", "text"), [(torch._neg_view, VIEW), (freed, FREED)])
def test_odd_tensors_to_write_to_are_refused_before_anything_is_written(
    alone: AllToAll, odd: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    """Torch hands an op a copy of a negative view; of freed memory, 64 other bytes were taken."""
    arguments = good()
    received = alone.dispatch(**arguments)
    wanted = alone.combine(received.x, received)
    received = alone.dispatch(**arguments)
    for more in ({}, {"out_dtype": wanted.dtype}, {"bias": torch.zeros_like(wanted)}):
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"out .*{text}"):
            alone.combine(received.x, received, out=odd(wanted), **more)
    pending = alone.combine_send(received.x, received)
    with pytest.raises(moe_p2p.InvalidArgumentError, match=f"out .*{text}"):
        alone.combine_recv(pending, odd(wanted))
    assert torch.equal(alone.combine_recv(pending), wanted)
    options = DispatchOptions(quantize=True, with_source=True, with_ranges=True)
    begun = alone.dispatch_send(**arguments, options=options)
    outputs = alone.make_outputs(begun)
    extras, scales = outputs.extras, outputs.scales
    assert extras == ()
    assert scales is not None
    for name, tensor in outputs._asdict().items():
        if isinstance(tensor, torch.Tensor) and name != "topk_idx":
            with pytest.raises(moe_p2p.InvalidArgumentError, match=f"{name} .*{text}"):
                alone.dispatch_recv(begun, outputs._replace(**{name: odd(tensor)}))
    with pytest.raises(moe_p2p.InvalidArgumentError, match="out is of type list, must be an"):
        alone.dispatch_recv(begun, list(outputs))
    alone.release(alone.dispatch_recv(begun, outputs))
    masked, one = odd(torch.zeros(1, dtype=torch.int32)), Rank(0, 1, dist.HashStore())
    with pytest.raises(moe_p2p.InvalidArgumentError, match=f"mask.* .*{text}"):
        make(one, mask_lost_ranks=True, masked=masked)


def test_freed_inputs_are_refused(alone: AllToAll) -> None:
    arguments = good()
    for name, tensor in arguments.items():
        for call in (alone.dispatch, alone.dispatch_send):
            with pytest.raises(moe_p2p.InvalidArgumentError, match=f"{name} .*{FREED}"):
                call(**arguments | {name: freed(tensor)})
    received = alone.dispatch(**arguments)
    wanted = alone.combine(received.x, received)
    received = alone.dispatch(**arguments)
    for call in (alone.combine, alone.combine_send):
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"y .*{FREED}"):
            call(freed(received.x), received)
        weights = freed(arguments["topk_weights"])
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"topk_weights .*{FREED}"):
            call(received.x, received, topk_weights=weights)
    with pytest.raises(moe_p2p.InvalidArgumentError, match=f"bias.* .*{FREED}"):
        alone.combine(received.x, received, bias=freed(wanted))
    assert torch.equal(alone.combine(received.x, received), wanted)


def test_too_many_open_steps(alone: AllToAll) -> None:
    opened = [alone.dispatch(**good()) for _ in range(2)]
    with pytest.raises(moe_p2p.InvalidArgumentError, match="steps_in_flight 2"):
        alone.dispatch(**good())
    for received in opened:
        alone.combine(received.x, received)
    alone.release(alone.dispatch(**good()))


@pytest.mark.parametrize("steps", [2, 4])
def test_a_dispatch_that_stays_open_is_named_by_the_step_that_is_one_too_many(steps: int) -> None:
    with make(Rank(0, 1, dist.HashStore()), steps_in_flight=steps, dtype=torch.bfloat16) as comm:
        open_one = comm.dispatch(**good())
        for _ in range(steps - 1):  # each is combined at once
            received = comm.dispatch(**good())
            comm.combine(received.x, received)
        said = (
            f"the dispatch of step 0 is still open; {steps - 1} have begun after it, and "
            f"this call begins 1: with steps_in_flight {steps} at most {steps - 1} further steps"
        )
        with pytest.raises(moe_p2p.InvalidArgumentError, match=said):
            comm.dispatch(**good())
        comm.combine(open_one.x, open_one)
        received = comm.dispatch(**good())
        comm.combine(received.x, received)


def test_gradients_that_do_not_exist(alone: AllToAll) -> None:
    arguments = good()
    arguments["x"].requires_grad_()
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"x requires grad.*float8_e4m3fn"):
        alone.dispatch(**arguments, quantize=True)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="x requires grad, but halves"):
        alone.dispatch_send(**arguments)
    with torch.no_grad():
        alone.release(alone.dispatch_send(**arguments))


def test_closed_object() -> None:
    comm = make(Rank(0, 1, dist.HashStore()), dtype=torch.bfloat16)
    received = comm.dispatch(**good())
    comm.close()
    for call in (
        lambda: comm.__enter__(),
        lambda: comm.dispatch(**good()),
        lambda: comm.combine(received.x, received),
        lambda: comm.dispatch_send(**good()),
        lambda: comm.release(received),
        lambda: comm.counters(),
        lambda: comm.check(),
    ):
        with pytest.raises(moe_p2p.ClosedError, match="is closed"):
            call()


@on_ranks(2)
def test_capacity_too_small_breaks_the_object(rank: Rank) -> None:
    with make(rank, timeout_s=3.0) as comm:
        t = make_tokens(0, rank.rank, 8)
        with pytest.raises(moe_p2p.MoeP2pError, match=r"capacity is 1 rows per expert|gave up"):
            comm.dispatch(t.x, t.topk_idx, t.topk_weights, capacity=1)
        assert comm.broken
        assert comm.broken in repr(comm)
        with pytest.raises(moe_p2p.MoeP2pError) as again:
            comm.dispatch(t.x, t.topk_idx, t.topk_weights)
        assert str(again.value) == comm.broken


# --- configuration ---


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_experts": 0}, "num_experts is 0, must be an integer from 1 to 32768"),
        ({"num_experts": 8.0}, r"num_experts is 8\.0, must be an integer"),
        ({"topk": 33}, "topk is 33, must be an integer from 1 to 32"),
        ({"topk": 9}, "topk is 9, must be at most num_experts 8"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"steps_in_flight": 1}, "steps_in_flight is 1, must be an integer from 2 to 16"),
        ({"dtype": torch.int8}, r"dtype is torch\.int8, must be one of"),
        ({"combine_dtype": torch.float8_e4m3fn}, "combine_dtype is"),
        ({"wait": "doze"}, "wait is 'doze', must be one of"),
        ({"timeout_s": 0}, "timeout_s is 0, must be a positive number"),
        ({"nics_per_rank": 9}, "nics_per_rank is 9"),
        ({"expert_rank": (0, 1)}, "expert_rank has 2 entries"),
        ({"transport": None}, "transport is None, must be a string"),
        ({"device": torch.device("cuda", 1)}, "device is 'cuda:1', must be one of"),
    ],
)
def test_configuration_names_the_field(change: dict[str, Any], match: str) -> None:
    with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
        AllToAllConfig(**(SMALL | change))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_dim": 3}, "hidden_dim 3 of 4-byte values is 12 bytes.*multiple of 16"),
        ({"expert_rank": (0, 0, 0, 0, 0, 0, 0, 5)}, r"expert_rank\[7\] is 5, must be from 0 to 0"),
        ({"ranks_per_node": 2}, "ranks_per_node is 2, must divide world_size 1"),
        ({"transport": "carrier-pigeon"}, "carrier-pigeon"),
        ({"transport_settings": "wings=2"}, "wings"),
        (
            {"max_tokens": 1 << 24, "chunk_tokens": 1 << 20, "hidden_dim": 1 << 18},
            "/dev/shm|shared",
        ),
    ],
)
def test_construction_names_what_does_not_fit(change: dict[str, Any], match: str) -> None:
    with pytest.raises(moe_p2p.MoeP2pError, match=match):
        make(Rank(0, 1, dist.HashStore()), **change)


@pytest.mark.gpu
def test_tensors_on_an_accelerator(alone: AllToAll) -> None:
    arguments = good()
    with pytest.raises(moe_p2p.InvalidArgumentError, match="x lies on an accelerator"):
        alone.dispatch(**(arguments | {"x": arguments["x"].cuda()}))


def test_group_or_store() -> None:
    config = AllToAllConfig(**SMALL)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="without rank and world_size"):
        AllToAll(dist.HashStore(), config)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="rank is 2 of 2, must be an integer"):
        AllToAll(dist.HashStore(), config, rank=2, world_size=2)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="init_process_group"):
        AllToAll(None, config)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="not str"):
        AllToAll("tcp://", config)  # type: ignore[arg-type]
