"""moe_p2p/moe/direct.py: calls past torch's dispatcher do what the ops do, or return None."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import AllToAll, CombineOptions, DispatchOptions, errors
from moe_p2p.moe import arguments, bare, direct, dispatched
from moe_p2p.moe.dispatched import (
    APART,
    OBJECTS,
    ROWS_ALONE,
    WHOLE,
    Dispatched,
    dispatched_of,
    tensors_of,
    without_rows,
)
from moe_p2p.moe.options import MERGE_DUPLICATES, QUANTIZE
from moe_p2p.moe.pool import ReleasingAllToAll
from moe_p2p.moe.row_counts import HostCounts
from tests.support.cases import bits, make, make_tokens
from tests.support.ranks import Rank, run_threads

ops = torch.ops.moe_p2p
T, ROWS = 5, 12
BY_RANK = DispatchOptions(
    layout="by_rank", with_source=True, copy_topk=True, zero_padding=True, solo=True
)
PADDED = DispatchOptions(zero_padding=True, with_ranges=True, with_wait_ticks=False, solo=True)
QUANTIZED = DispatchOptions(zero_padding=True, quantize=True, column_scales=True, solo=True)
GROUPED = DispatchOptions(layout="grouped", zero_padding=True, solo=True)
ALL = DispatchOptions(
    zero_padding=True,
    with_source=True,
    with_ranges=True,
    with_wait_ticks=True,
    copy_topk=True,
    solo=True,
)
Call = Callable[..., Any]

pytestmark = pytest.mark.skipif(direct.FACTS is None, reason="this torch has no direct calls")


@pytest.fixture(scope="module")
def alone() -> Iterator[AllToAll]:
    with make(Rank(0, 1, dist.HashStore())) as comm:
        yield comm


@pytest.fixture(name="no_grad", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


dispatch = direct.call_of("dispatch", *OBJECTS)
combine = direct.call_of("combine", *OBJECTS)
counted = direct.call_of("dispatch_counted")


def of_dispatch(
    comm: AllToAll, options: DispatchOptions = BY_RANK, *, weighted: bool = True
) -> list[Any]:
    """Arguments of the op."""
    tokens = make_tokens(0, 0, T)
    given = [comm._comm, options.number, T, T if options.layout == "padded" else 4 * ROWS]
    return [*given, tokens.x, tokens.topk_idx, tokens.topk_weights if weighted else None]


def directly(given: list[Any], *more: Any, parts: int = WHOLE) -> list[Any]:
    """Arguments of the direct call. more: scales, others."""
    return [*given, *more, *[None] * (2 - len(more)), parts]


def by_op(given: list[Any], scales: Tensor | None = None) -> Dispatched:
    made, options = ops.dispatch_inference(*given, scales), given[1]
    has_scales = bool(options & QUANTIZE) or scales is not None
    return dispatched_of(made, options, given[5], has_scales, given[2], given[3])


def of_combine(comm: AllToAll, options: DispatchOptions = PADDED) -> list[Any]:
    """Arguments of the direct call, without weights."""
    received = by_op(of_dispatch(comm, options))
    return [comm._comm, received.x, received, 0, False, None, None]


def as_op(given: list[Any]) -> list[Any]:
    """Those of the op."""
    comm, y, received, number, weighted, late, _ = given
    handle, options, max_tokens, _ = received.call
    weights = received.row_weights if weighted is not False and late is None else None
    return [comm, options | number, max_tokens, handle, y, received.topk_idx, weights, late]


def given_to(call: Call, comm: AllToAll) -> list[Any]:
    return directly(of_dispatch(comm)) if call is dispatch else of_combine(comm)


def assert_alike(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert type(got) is Tensor
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(bits(got), bits(want))
        assert not got.requires_grad
        return
    assert type(got) is type(want)
    if want is None or isinstance(want, int):
        assert got == want
        return
    if isinstance(want, dispatched.Call):
        got, want = got[1:], want[1:]  # handles are made of other memory each time
    for each, other in zip(got, want, strict=True):
        assert_alike(each, other)


@pytest.mark.parametrize("options", [BY_RANK, PADDED, GROUPED, QUANTIZED, ALL])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_dispatch_returns_what_the_op_does(
    alone: AllToAll, options: DispatchOptions, weighted: bool, inference: bool
) -> None:
    given = of_dispatch(alone, options, weighted=weighted)
    with torch.inference_mode(inference):
        made, want = dispatch(*directly(given)), by_op(given)
        rows, scales, apart = dispatch(*directly(given, parts=APART))
        alone_rows = dispatch(*directly(given, parts=ROWS_ALONE))
    assert type(made) is Dispatched
    assert type(made.call) is dispatched.Call
    made, want, apart = (each._replace(wait_ticks=None) for each in (made, want, apart))
    assert_alike(made, want)
    assert options.copy_topk or made.topk_idx is given[5]
    assert_alike((rows, scales), (want.x, want.scales))
    assert_alike(alone_rows, (want.x, want.scales))
    assert_alike(apart, without_rows(want))
    assert apart.x is without_rows(want).x


def test_what_is_not_given_is_as_the_call_has_it(alone: AllToAll) -> None:
    """max_tokens of the configuration, room for any routing."""
    tokens = make_tokens(0, 0, T)
    for options in (BY_RANK, PADDED, dataclasses.replace(GROUPED, alignment=3)):
        for most in (None, T):
            given = [alone._comm, options.number, most, None, tokens.x, tokens.topk_idx, None]
            call = dispatch(*directly(given)).call
            max_tokens = alone.config.max_tokens if most is None else most
            assert call.max_tokens == max_tokens
            assert call.capacity == arguments.most_rows(alone._shape, max_tokens, options)


def test_dispatch_takes_scales_and_others(alone: AllToAll) -> None:
    given, scales = of_dispatch(alone, PADDED), torch.rand(T, 1)
    given[4] = given[4].to(torch.float8_e4m3fn)
    with make(Rank(0, 1, dist.HashStore()), dtype=torch.float8_e4m3fn) as comm:
        given[0] = comm._comm
        made, want = dispatch(*directly(given, scales, [alone._comm])), by_op(given, scales)
    assert_alike(made, want)
    assert len(made.scales) > 0


@pytest.mark.parametrize("options", [PADDED, GROUPED, BY_RANK])
def test_combine_returns_what_the_op_does(alone: AllToAll, options: DispatchOptions) -> None:
    given = of_combine(alone, options)
    late = torch.rand(T, 3)
    for weighted in (None, True, False):
        for weights in (None, late):
            given[4:6] = weighted, weights
            if options is BY_RANK and (weighted or weights is not None):
                assert combine(*given) is None
            elif options is BY_RANK:
                assert_alike(
                    combine(*given),
                    ops.combine_inference(*as_op([*given[:4], False, *given[5:]]))[0],
                )
            else:
                assert_alike(combine(*given), ops.combine_inference(*as_op(given))[0])
    given[1], given[4:6] = torch.nn.Parameter(given[1]), (False, None)
    assert_alike(combine(*given), ops.combine_inference(*as_op(given))[0])


def test_combine_writes_to_out_what_it_returns_without(alone: AllToAll) -> None:
    given = of_combine(alone)
    for weights in (None, torch.rand(T, 3)):
        given[5] = weights
        want, out = combine(*given), torch.zeros(T, alone.config.hidden_dim)
        assert combine(*given[:6], out) is out
        assert out.any()
        assert_alike(out, want)
    for wrong in (out[:3], out[0], out[None], out.requires_grad_()):
        with torch.enable_grad():
            assert combine(*given[:6], wrong) is None
    in_order = CombineOptions(order="topk").number
    assert combine(*given[:3], in_order, *given[4:6], out.detach()) is None
    narrow = [*given[:6], out.detach()[:, :7].contiguous()]
    assert outcome(combine, narrow)[1].startswith("moe_p2p [invalid argument] out is torch.float32")


def test_inputs_with_gaps_are_left_to_who_copies_them(alone: AllToAll) -> None:
    given = directly(of_dispatch(alone))
    for at in (4, 5):
        wide = torch.cat((given[at], given[at]), 1)
        assert dispatch(*given[:at], wide[:, : wide.shape[1] // 2], *given[at + 1 :]) is None
    summed = of_combine(alone)
    assert combine(summed[0], summed[1].transpose(0, 1), *summed[2:]) is None


def test_who_merged_duplicates_gives_no_late_weights(alone: AllToAll) -> None:
    given = of_combine(alone)
    merged = given[2].call._replace(options=given[2].call.options | MERGE_DUPLICATES)
    want = combine(*given)
    given[2] = given[2]._replace(call=merged)
    assert_alike(combine(*given), want)
    given[5] = torch.rand(T, 3)
    assert combine(*given) is None


def test_combine_wants_the_dispatched_itself(alone: AllToAll) -> None:
    given = of_combine(alone)
    short = tuple.__new__(dispatched.Dispatched, given[2][:2])
    odd_call = tuple.__new__(dispatched.Call, given[2].call[:1])
    odds = (given[2]._replace(call=call) for call in ((*given[2].call,), odd_call))
    for odd in ((*given[2],), *odds, short, None, given[2].x):
        assert combine(*given[:2], odd, *given[3:]) is None


def of_counted(comm: AllToAll) -> list[Any]:
    tokens, counts = make_tokens(0, 0, T), HostCounts()
    host, number, topk_idx, kernel = counts.of(tokens.topk_idx, comm.config.num_experts, 1)
    given = [comm._comm, BY_RANK.number, tokens.x, None, topk_idx, tokens.topk_weights, -1, 1]
    return [*given, kernel, host, number]


def test_a_counted_dispatch_returns_what_the_op_does(alone: AllToAll) -> None:
    made, want = counted(*of_counted(alone)), ops.dispatch_counted(*of_counted(alone))
    handle = 5  # made of other memory each time
    assert_alike(made[:handle], want[:handle])
    assert_alike(made[handle + 1 :], want[handle + 1 :])
    assert made[9:] == (T, T, want[11])
    with Modes.Dispatch():
        assert counted(*of_counted(alone)) is None
    for at, value in ((4, torch.zeros(T, 2, dtype=torch.int64)), (7, 0)):  # 7: alignment
        wrong = of_counted(alone)
        wrong[at] = value
        assert outcome(counted, wrong) == outcome(ops.dispatch_counted.default, wrong)


@pytest.mark.filterwarnings("ignore:.*Dynamo")
def test_a_compiler_leaves_a_counted_dispatch_to_its_eager_call(alone: AllToAll) -> None:
    """Its op cannot be traced, and ended the compiled function with an error."""
    _, _, x, scales, topk_idx, weights, *_ = of_counted(alone)
    counts = HostCounts()
    releasing = ReleasingAllToAll(dist.HashStore(), alone.config, rank=0, world_size=1)

    def rows(x: Tensor) -> Tensor:
        given = counts.of(topk_idx, alone.config.num_experts, 1)
        made = releasing.dispatch_counted(BY_RANK, x, topk_idx, weights, scales, given, alignment=1)
        return made[0][0]

    want = rows(x)
    torch._dynamo.reset()
    assert torch.equal(bits(torch.compile(rows, backend="eager")(x)), bits(want))
    releasing.close()


def outcome(call: Call, given: list[Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011 of any type, which is compared
        call(*given)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("call", "at", "value"),
    [
        (dispatch, 0, 1 << 40),
        (dispatch, 1, 1 << 61),
        (dispatch, 3, -1),
        (dispatch, 4, torch.zeros(T, 7)),
        (dispatch, 5, torch.zeros(T, 3)),
        (dispatch, 6, torch.zeros(T, 3, dtype=torch.float64)),
        (combine, 0, 1 << 40),
        (combine, 1, torch.zeros(T, 48, dtype=torch.int64)),
        (combine, 1, torch.zeros(3, 48)),
        (combine, 3, CombineOptions(order="topk", partials="block16").number),
        (combine, 3, 1 << 60),
        (combine, 5, torch.zeros(T, 2)),
    ],
)
def test_errors_are_those_of_the_op(alone: AllToAll, call: Call, at: int, value: Any) -> None:
    given = given_to(call, alone)
    given[at] = value
    raised, text = outcome(call, given)
    if call is dispatch:
        assert (raised, text) == outcome(ops.dispatch_inference.default, given[:7])
    else:
        assert (raised, text) == outcome(ops.combine_inference.default, as_op(given))
    assert issubclass(raised, RuntimeError)


def test_an_overwritten_handle_is_an_error(alone: AllToAll) -> None:
    given = of_combine(alone)
    call = given[2].call._replace(handle=torch.zeros(3, dtype=torch.int32))
    given[2] = given[2]._replace(call=call)
    assert outcome(combine, given) == outcome(ops.combine_inference.default, as_op(given))


class Subclass(Tensor):
    pass


class Modes:
    class Function(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def vmapped() -> Iterator[None]:
    level = torch._C._functorch._vmap_increment_nesting(1, "same")
    try:
        yield
    finally:
        assert torch._C._functorch._vmap_decrement_nesting() == level


@pytest.mark.parametrize("call", [dispatch, combine])
@pytest.mark.parametrize(
    "watching",
    [
        Modes.Function,
        Modes.Dispatch,
        FakeTensorMode,
        vmapped,
        torch.autograd.profiler.profile,
        torch.profiler.profile,
        lambda: torch.autocast("cpu"),
    ],
)
def test_who_watches_sees_the_op(alone: AllToAll, call: Call, watching: Callable[[], Any]) -> None:
    given = given_to(call, alone)
    with watching():
        assert call(*given) is None
    assert call(*given) is not None


def odd(tensor: Tensor) -> Iterator[Any]:
    """What looks like the tensor, and is more than its memory."""
    yield tensor.as_subclass(Subclass)
    yield torch._neg_view(tensor)
    yield tensor.to("meta")
    yield torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)
    yield torch._to_functional_tensor(tensor)
    yield tensor.to_sparse()
    with FakeTensorMode() as mode:
        yield mode.from_tensor(tensor)
    yield tensor.tolist()
    yield tensor.numpy()


@pytest.mark.parametrize("call", [dispatch, combine])
def test_the_op_gets_odd_tensors(alone: AllToAll, call: Call) -> None:
    given, at = given_to(call, alone), 4 if call is dispatch else 1
    x = given[at]
    for given[at] in odd(x):
        assert call(*given) is None
    with torch.enable_grad():
        for given[at] in (x.clone().requires_grad_(), torch.nn.Parameter(x), x.clone()):
            assert (call(*given) is None) == given[at].requires_grad


def test_tensors_of_a_gpu_are_plain() -> None:
    """With the keys that c10/core/TensorImpl.cpp gives them."""
    assert direct.FACTS is not None
    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.CUDA)
    for each in (key.ADInplaceOrView, key.AutogradCUDA, key.AutocastCUDA):
        keys = keys.add(each)
    assert not keys.raw_repr() & ~direct.FACTS.plain_keys


def test_functorch_sees_the_op(alone: AllToAll) -> None:
    given = of_combine(alone)

    def summed(y: Tensor) -> Tensor:
        seen.append(combine(given[0], y, *given[2:]))
        return y.sum()

    seen: list[Any] = []
    torch.func.vmap(summed)(given[1][None])
    torch.func.grad(summed)(given[1])
    torch.func.functionalize(summed)(given[1])
    assert seen == [None] * 3


@pytest.mark.parametrize("call", [dispatch, combine])
def test_wrong_arguments_are_left_to_the_op(alone: AllToAll, call: Call) -> None:
    given = given_to(call, alone)
    cases: list[list[Any]] = [[], given[:4], [*given, None]]
    may_be_none = {2, 3, 6, 7, 8} if call is dispatch else {4, 5, 6}
    for at in range(len(given)):
        for wrong in (None, "x", 2.5, 1 << 70, (1, 2)):
            if wrong is None and at in may_be_none:
                continue
            if call is combine and at == 4:  # weighted, of which only False is looked for
                continue
            cases.append([*given[:at], wrong, *given[at + 1 :]])
    if call is dispatch:
        cases += [directly(given[:7], None, ["x"]), directly(given[:7], None, [1 << 70])]
        cases.append([*given[:2], -1, *given[3:]])
    for each in cases:
        assert call(*each) is None


def pairs(rank: Rank) -> list[Tensor]:
    with make(rank) as comm, torch.no_grad():
        tokens = make_tokens(0, rank.rank, T)
        sums = []
        for _ in range(20):
            received = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
            sums.append(comm.combine(received.x, received))
    return sums


def test_ranks_that_are_threads_wait_without_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    got = run_threads(2, pairs)
    for call in ("_DISPATCH", "_COMBINE"):
        monkeypatch.setattr(bare, call, direct.none)
    assert_alike(got, run_threads(2, pairs))


def test_an_error_has_its_type(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, T)
    with pytest.raises(errors.InvalidArgumentError, match=r"topk_idx is torch\.int64"):
        alone.dispatch(tokens.x, tokens.topk_idx[:, :2])


def test_nothing_is_kept(alone: AllToAll) -> None:
    given, summed = directly(of_dispatch(alone, PADDED)), of_combine(alone)
    out = torch.zeros(T, alone.config.hidden_dim)
    held = [*given, *summed[:2], *summed[2], *summed[3:], None, Dispatched, dispatched.Call, out]
    held.append(OBJECTS[2])
    before = [sys.getrefcount(each) for each in held]
    uses = [each._use_count() for each in held if isinstance(each, Tensor)]
    for _ in range(300):
        made = dispatch(*given)
        rows, _, apart = dispatch(*given[:9], APART)
        alone_rows, _ = dispatch(*given[:9], ROWS_ALONE)
        sums = combine(*summed)
        assert combine(*summed[:6], out) is out
        with pytest.raises(RuntimeError):
            combine(1 << 40, *summed[1:])
        assert combine() is None
    results = [*tensors_of(made), *tensors_of(apart), rows, alone_rows, sums]
    mine = [each for each in results if each is not given[5] and each is not OBJECTS[2]]
    gone = [weakref.ref(each) for each in mine]
    assert all(each()._use_count() == 1 for each in gone)  # type: ignore[union-attr]
    del made, rows, apart, alone_rows, sums, results, mine
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    after = [sys.getrefcount(each) for each in held]
    changed = [now - then for now, then in zip(after, before, strict=True)]
    assert max(changed, key=abs) < 100  # None and small numbers are used elsewhere
    assert uses == [each._use_count() for each in held if isinstance(each, Tensor)]


def in_child() -> None:
    with make(Rank(0, 1, dist.HashStore())) as comm, torch.no_grad():
        assert dispatch(*directly(of_dispatch(comm))) is not None
        assert isinstance(combine(*of_combine(comm)), Tensor)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_have_them_too(method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=in_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_the_package_uses_them(alone: AllToAll, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an op was called")

    for each in ("dispatch_inference", "combine_inference"):
        monkeypatch.setattr(getattr(ops, each).default, "_op", refuse)
    tokens = make_tokens(0, 0, T)
    received = alone.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
    assert isinstance(received, Dispatched)
    assert isinstance(alone.combine(received.x, received), Tensor)
