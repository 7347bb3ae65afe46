"""torch.ops.moe_p2p: schemas, fake kernels and autograd registration; what the binary needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.library import opcheck

import moe_p2p
from moe_p2p import AllToAll, DispatchOptions, Engine, EngineConfig, PageRows, errors
from moe_p2p.engine.transfers import tensor_from
from moe_p2p.library import numbers_of
from moe_p2p.machine import fp8
from moe_p2p.moe.options import RowLayout
from moe_p2p.moe.reference import wire
from moe_p2p.moe.shape import layout as numbers
from tests.support.cases import HIDDEN_DIM, TOPK, make, make_tokens
from tests.support.ranks import Rank

ops = torch.ops.moe_p2p
MAX_TOKENS = 12
ROWS = 8 * MAX_TOKENS  # of one rank that owns all 8 experts, padded


@pytest.fixture(scope="module")
def alone() -> Iterator[AllToAll]:
    """One rank with room for many open steps: opcheck runs an op several times."""
    with make(Rank(0, 1, dist.HashStore()), steps_in_flight=16, extra_bytes=64) as comm:
        yield comm


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(EngineConfig(transport="loopback", timeout_s=10)) as one,
        Engine(EngineConfig(transport="loopback", timeout_s=10)) as other,
    ):
        yield one, other


def comm_number(comm: AllToAll) -> int:
    return comm._comm


def dispatch_arguments(
    comm: AllToAll, change: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, ...]:
    tokens = make_tokens(0, 0, 5)
    options = {"zero_padding": True, "solo": True} | options
    arguments = {
        "comm": comm_number(comm),
        "options": DispatchOptions(**options).number,
        "max_tokens": MAX_TOKENS,
        "capacity": MAX_TOKENS,
        "x": tokens.x,
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
        "scales": None,
        "others": [],
        "extras": [],
        "num_tokens": None,
        "num_tokens_host": -1,
    }
    return tuple((arguments | (change or {})).values())


def handle_words(comm: AllToAll, num_rows: int, max_tokens: int) -> int:
    return numbers_of(ops.handle_layout(comm_number(comm), num_rows, max_tokens))["total"]


DISPATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"layout": "grouped", "alignment": 4, "change": {"capacity": 40}},
    "quantized": {"quantize": True},
    "extras": {
        "with_source": True,
        "change": {
            "extras": [torch.ones(5, 3, dtype=torch.int64), torch.ones(5, 1, dtype=torch.uint8)],
            "num_tokens": torch.tensor(4),
        },
    },
    "no weights": {"change": {"topk_weights": None, "num_tokens_host": 2}},
    "by rank": {
        "layout": "by_rank",
        "with_source": True,
        "copy_topk": True,
        "change": {"extras": [torch.ones(5, 3, dtype=torch.int64)]},
    },
    "packed scales": {
        "quantize": True,
        "scale_format": "ue8m0",
        "column_scales": True,
        "with_ranges": True,
    },
    "float8": {
        "change": {
            "x": torch.ones(5, HIDDEN_DIM).to(torch.float8_e4m3fn),
            "scales": torch.ones(5, 1),
        }
    },
}
# opcheck compares the results of two runs, so rows without a token must be alike: zero_padding.
# test_schema cannot compare float8 inputs before and after.
FLOAT8 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL = ("test_schema", *FLOAT8)


@pytest.mark.parametrize("name", DISPATCHES)
@pytest.mark.parametrize("suffix", ["", "_inference"])
def test_dispatch(alone: AllToAll, name: str, suffix: str) -> None:
    arguments = dispatch_arguments(alone, **DISPATCHES[name])
    utils = FLOAT8 if name == "float8" else ALL
    opcheck(getattr(ops, f"dispatch{suffix}").default, arguments, test_utils=utils)


@pytest.mark.parametrize("layout", ["padded", "by_rank"])
def test_dispatch_with_gradients(alone: AllToAll, layout: RowLayout) -> None:
    tokens = make_tokens(0, 0, 5)
    assert tokens.topk_weights is not None
    change = {
        "x": tokens.x.requires_grad_(),
        "topk_weights": tokens.topk_weights.requires_grad_(),
    }
    arguments = dispatch_arguments(alone, change, layout=layout)
    opcheck(ops.dispatch.default, arguments)


def combine_arguments(
    comm: AllToAll,
    *,
    grad: bool = False,
    scalars: bool = False,
    late: bool = False,
    layout: RowLayout = "padded",
) -> tuple[Any, ...]:
    tokens = make_tokens(0, 0, 5)
    options = DispatchOptions(layout=layout, solo=True, zero_padding=True)
    received = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights, options=options)
    weighted = layout == "padded" and not late
    return (
        comm_number(comm),
        received.call.options,
        received.call.max_tokens,
        received.call.handle,
        received.x.clone().requires_grad_(grad),
        tokens.topk_idx,
        received.row_weights.clone().requires_grad_(grad) if weighted else None,
        tokens.topk_weights if late else None,
        torch.rand(received.row_weights.shape) if scalars else None,
        [torch.ones(5, HIDDEN_DIM).requires_grad_(grad)],
        torch.float32,
        received.call.capacity,
        False,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad": True},
        {"scalars": True},
        {"late": True, "scalars": True},
        {"layout": "by_rank", "grad": True},
        {"layout": "by_rank", "scalars": True},
    ],
    ids=str,
)
def test_combine(alone: AllToAll, options: dict[str, Any]) -> None:
    arguments = combine_arguments(alone, **options)
    opcheck(ops.combine.default, arguments)
    if not options.get("grad"):
        opcheck(ops.combine_inference.default, arguments)


@pytest.mark.parametrize("late", [False, True])
def test_combine_of_what_most_calls_give(alone: AllToAll, late: bool) -> None:
    given = combine_arguments(alone, late=late)
    opcheck(ops.combine_inference.default, given[: 8 if late else 7])


def send_arguments(comm: AllToAll) -> tuple[Any, ...]:
    number, options, most, _, x, topk_idx, weights, *_ = dispatch_arguments(comm, solo=False)
    handle = torch.zeros(handle_words(comm, 5, MAX_TOKENS), dtype=torch.int32)
    return (number, options, x, None, [], topk_idx, weights, None, -1, most, handle)


def sent(comm: AllToAll) -> torch.Tensor:
    arguments = send_arguments(comm)
    ops.dispatch_send(*arguments)
    return arguments[-1]


def recv_arguments(comm: AllToAll, handle: torch.Tensor) -> tuple[Any, ...]:
    return (
        comm_number(comm),
        DispatchOptions(zero_padding=True).number,
        handle,
        torch.zeros(8, MAX_TOKENS, HIDDEN_DIM),
        None,
        [],
        torch.zeros(ROWS),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(9, dtype=torch.int32),
        torch.zeros(ROWS, 2, dtype=torch.int32),
        None,
        None,
        None,
        MAX_TOKENS,
    )


# A second half consumes what the first half left, so it runs once per handle and not as often as
# test_aot_dispatch_dynamic asks; test_compile.py does that for both halves together. Likewise each
# run of a set-up op makes another object.
ONCE = ("test_schema", "test_faketensor")


def test_dispatch_send() -> None:
    for util in ALL:
        with make(Rank(0, 1, dist.HashStore()), steps_in_flight=16) as comm:
            opcheck(ops.dispatch_send.default, send_arguments(comm), test_utils=util)


@pytest.mark.parametrize("util", ONCE)
def test_dispatch_recv(alone: AllToAll, util: str) -> None:
    handle = sent(alone)
    opcheck(ops.dispatch_recv.default, recv_arguments(alone, handle), test_utils=util)
    ops.release(comm_number(alone), handle)


@pytest.mark.parametrize("util", ONCE)
def test_combine_send_and_recv(alone: AllToAll, util: str) -> None:
    for op in (ops.combine_send.default, ops.combine_recv.default):
        handle = sent(alone)
        received = recv_arguments(alone, handle)
        ops.dispatch_recv(*received)
        send = (
            comm_number(alone),
            handle,
            received[3],
            received[6],
            torch.zeros(ROWS),
            None,
            torch.float32,
            5,
        )
        out, scalars = torch.zeros(5, HIDDEN_DIM), torch.zeros(5, TOPK)
        recv = (comm_number(alone), handle, out, scalars, [], None)
        if op is ops.combine_send.default:
            ready = torch.ones(1 << 10, dtype=torch.int32)
            opcheck(op, (*send, 0, ready, None, 1 << 20, 1, 1), test_utils=util)
            ops.combine_recv(*recv)
        else:
            ops.combine_send(*send)
            opcheck(op, recv, test_utils=util)


@pytest.mark.parametrize("more", [False, True])
def test_combine_out(alone: AllToAll, more: bool) -> None:
    given = combine_arguments(alone, scalars=more)
    comm, _, max_tokens, handle, y, _, weights, _, scalars, bias, *_ = given
    out = torch.zeros(5, HIDDEN_DIM)
    beside = (torch.zeros(5, TOPK), torch.zeros(1, dtype=torch.int64)) if more else (None, None)
    utils = ONCE if more else ALL  # two runs do not wait as long
    arguments = (comm, y, weights, scalars, None, bias, handle, max_tokens, out, *beside)
    opcheck(ops.combine_out.default, arguments, test_utils=utils)


def test_release(alone: AllToAll) -> None:
    handle = sent(alone)
    ops.dispatch_recv(*recv_arguments(alone, handle))
    opcheck(ops.release.default, (comm_number(alone), handle))


@pytest.mark.parametrize("util", ONCE)
def test_check_again(alone: AllToAll, util: str) -> None:
    handle = sent(alone)
    ops.dispatch_recv(*recv_arguments(alone, handle))
    both = (comm_number(alone), handle, handle.clone())
    opcheck(ops.all_to_all_check_again.default, both, test_utils=util)
    ops.release(comm_number(alone), handle)


def test_gather_counts(alone: AllToAll) -> None:
    values = torch.arange(3, dtype=torch.int32)
    opcheck(ops.all_to_all_gather_counts.default, (comm_number(alone), values))


def test_engine_ops(engines: tuple[Engine, Engine]) -> None:
    one, other = engines
    data = torch.zeros(64, dtype=torch.uint8)
    memory, inbox = one.register(data), other.register(torch.zeros_like(data))
    region = one.resolve(inbox.descriptor)
    pages, rows = torch.tensor([0, 1]), PageRows(page_bytes=8).numbers
    opcheck(ops.engine_register.default, (one.number, torch.zeros(8)), test_utils=ONCE)
    opcheck(
        ops.engine_connect.default,
        (one.number, tensor_from(other.address, "address")),
        test_utils=ONCE,
    )
    descriptor = tensor_from(inbox.descriptor, "descriptor")
    opcheck(ops.engine_resolve.default, (one.number, descriptor), test_utils=ONCE)
    opcheck(
        ops.engine_write_pages.default,
        (one.number, memory.number, 0, region.number, 0, rows, pages, pages, None),
        test_utils=ONCE,
    )
    opcheck(
        ops.engine_read_pages.default,
        (one.number, memory.number, 0, region.number, 0, rows, pages, pages),
        test_utils=ONCE,
    )
    slices = torch.tensor([[0, region.number, 0, 8]])
    scatter = (one.number, memory.number, slices, False, None)
    opcheck(ops.engine_scatter.default, scatter, test_utils=ONCE)


def test_every_op_that_takes_tensors_is_checked_here() -> None:
    tests = Path(__file__).parents[1]
    files = ("test_ops.py", "test_count_ops.py", "test_eager_dispatch.py", "../kv/test_kv_ops.py")
    source = "".join((tests / "moe" / name).read_text() for name in files)
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("moe_p2p::")]
    assert len(schemas) > 30
    for schema in schemas:
        if schema.name in OPDEFS:  # in Python; there once somebody has imported the experts
            continue
        if any("Tensor" in str(argument.type) for argument in schema.arguments):
            name = schema.name.removeprefix("moe_p2p::").removesuffix("_inference")
            assert f"ops.{name}" in source, f"{schema} has no opcheck"


def test_connect_takes_the_addresses_of_all(engines: tuple[Engine, Engine]) -> None:
    # Connecting happens once in the life of a communicator, so each check has one of its own.
    config = moe_p2p.AllToAllConfig(num_experts=2, hidden_dim=8, topk=1, max_tokens=4)
    for number, util in enumerate(ONCE):
        settings = config.settings(1, 1, communicator=number, timeout_s=5.0)
        comm = ops.all_to_all_create(engines[0].number, settings)
        address = ops.all_to_all_address(comm)
        opcheck(ops.all_to_all_connect.default, (comm, [address]), test_utils=util)
        ops.all_to_all_close(comm)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 12])
@pytest.mark.parametrize("max_tokens", [0, 1, 3, 4, 12])
def test_fake_kernels_know_the_size_of_handles(num_rows: int, max_tokens: int) -> None:
    for topk in (1, 2, 3):
        config = {"topk": topk, "chunk_tokens": 3}
        with make(Rank(0, 1, dist.HashStore()), **config) as comm:
            real = handle_words(comm, num_rows, max_tokens)
            assert comm._shape.handle_words(num_rows, max_tokens) == real


def test_a_handle_has_room_for_the_slots_of_its_own_call() -> None:
    config = {"topk": 2, "max_tokens": 512, "chunk_tokens": 128}
    with make(Rank(0, 1, dist.HashStore()), **config) as comm:
        words = [handle_words(comm, 0, t) for t in (1, 2, 8, 128, 129)]
    slot = 2 + 2  # a row for each k, and the ranks of the node
    assert words[1] - words[0] == slot
    assert words[2] - words[1] == 6 * slot
    assert words[3] - words[2] == 120 * slot
    assert words[4] - words[3] == 128 * slot  # chunks are alike


@pytest.mark.parametrize("topk", range(1, 33))
def test_python_has_the_head_of_slots_from_the_letter(topk: int) -> None:
    assert numbers(topk).slot_head_bytes == wire.slot_head_bytes(topk)


def test_python_has_the_other_numbers_of_the_letter() -> None:
    config = {"topk": 2, "max_tokens": 4}
    with make(Rank(0, 1, dist.HashStore()), **config) as comm:
        words = handle_words(comm, 0, 1)
        assert numbers().handle_meta_words == words - 1 - 2 - 1 - 2  # a count, rows, a gap, ranks
    assert numbers().scale_block == fp8.SCALE_BLOCK
    with pytest.raises(errors.InvalidArgumentError, match="topk is 33, must be from 1 to 32"):
        numbers(33)


# --- errors ---


GOOD = (
    "world_size=2,ranks_per_node=2,num_experts=4,hidden_dim=256,topk=2,max_tokens=8,chunk_tokens=8"
)


def test_plan_reads_its_settings() -> None:
    config = moe_p2p.AllToAllConfig(
        num_experts=4, hidden_dim=256, topk=2, max_tokens=8, part_bytes=0
    )
    text = ops.plan(f"{GOOD},part_bytes=0")
    assert text == ops.plan(config.settings(2, 2))
    assert config.settings(2, 2).startswith(GOOD)
    assert text == ops.plan(f"{GOOD},part_bytes=0,expert_rank=0:0:1:1")
    assert text != ops.plan(f"{GOOD},part_bytes=0,steps_in_flight=3")
    assert text != ops.plan(f"{GOOD},part_bytes=0,payload_item_bytes=4")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("wings=2", '"wings=2" is not understood'),
        ("topk=2", "topk is given twice"),
        ("extra_bytes=2.5", "extra_bytes=2.5 is refused; it must be an integer"),
        ("extra_bytes=-1", "extra_bytes=-1 is refused; it must be an integer"),
        ("expert_rank=0:0:1", "expert_rank has 3 entries"),
        ("expert_rank=0:0:1:2", r"expert_rank\[3\] is 2, must be from 0 to 1"),
        ("expert_rank=0:0:1:", "expert_rank=0:0:1: is refused; it must be integers with colons"),
        ("expert_rank=0:0:one:1", "it must be integers with colons"),
    ],
)
def test_plan_refuses_settings(more: str, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        ops.plan(f"{GOOD},{more}")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("rank=2", "rank is 2, must be from 0 to 1"),
        ("num_threads=0", "num_threads=0 is refused; it must be an integer from 1 to 1024"),
        ("wait=doze", "doze"),
        ("timeout_s=-1.0", "timeout_s is -1"),
        ("timeout_s=nan", "timeout_s=nan is refused"),
        ("communicator=4096000", "no communicator number left after 4096000"),
        ("on_device=2", "on_device=2 is refused"),
    ],
)
def test_a_communicator_refuses_settings(
    engines: tuple[Engine, Engine], more: str, match: str
) -> None:
    with pytest.raises(RuntimeError, match=match):
        ops.all_to_all_create(engines[0].number, f"{GOOD},{more}")


def test_errors_keep_their_text_and_get_their_type() -> None:
    with pytest.raises(RuntimeError) as raw:
        ops.engine_address(123456)
    assert str(raw.value) == "moe_p2p [closed] engine 123456 does not exist"
    error = errors.typed(raw.value)
    assert type(error) is moe_p2p.ClosedError
    assert str(error) == str(raw.value)


@pytest.mark.parametrize("kind", errors._BY_WORD.values())
def test_every_word_has_its_type(kind: type[moe_p2p.MoeP2pError]) -> None:
    made = errors.make(kind, "rank 3: text\nof two lines")
    assert type(errors.typed(RuntimeError(str(made)))) is kind
    assert isinstance(made, RuntimeError)


def test_other_errors_stay_what_they_are() -> None:
    other = RuntimeError("CUDA error: an illegal memory access")
    assert errors.typed(other) is other
    assert issubclass(moe_p2p.TimeoutError, __builtins__["TimeoutError"])
    assert issubclass(moe_p2p.InvalidArgumentError, ValueError)
