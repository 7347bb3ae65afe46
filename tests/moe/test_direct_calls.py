"""moe_p2p/moe/direct.py: calls past torch's dispatcher do what the ops do, or call them.

In place of the ops behind the calls under test stands a function that returns OP.
"""

from __future__ import annotations

import contextlib
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

from moe_p2p import AllToAll, DispatchOptions, errors
from moe_p2p.moe import direct
from moe_p2p.moe.dispatched import Dispatched
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
OP = ("the op",)
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


def op(*_: object) -> tuple[str]:
    return OP


dispatch = direct.call_of("dispatch_inference", op)
combine = direct.call_of("combine_inference", op)
counted = direct.call_of("dispatch_counted", op)
CALLS = [(dispatch, ops.dispatch_inference.default), (combine, ops.combine_inference.default)]


def of_dispatch(
    comm: AllToAll, options: DispatchOptions = BY_RANK, *, weighted: bool = True
) -> list[Any]:
    tokens = make_tokens(0, 0, T)
    given = [comm._comm, options.number, T, T if options.layout == "padded" else 4 * ROWS]
    return [*given, tokens.x, tokens.topk_idx, *([tokens.topk_weights] if weighted else [])]


def of_combine(comm: AllToAll, options: DispatchOptions = PADDED) -> list[Any]:
    """Without weights."""
    given = of_dispatch(comm, options)
    made = ops.dispatch_inference(*given)
    return [comm._comm, options.number, T, made[5], made[0], given[5]]


def given_to(call: Call, comm: AllToAll) -> list[Any]:
    return of_dispatch(comm) if call is dispatch else of_combine(comm)


def assert_alike(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert type(got) is Tensor
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert torch.equal(bits(got), bits(want))
        assert not got.requires_grad
        return
    assert type(got) is type(want)
    if isinstance(want, int):
        assert got == want
        return
    for each, other in zip(got, want, strict=True):
        assert_alike(each, other)


@pytest.mark.parametrize("options", [BY_RANK, PADDED, GROUPED, QUANTIZED])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_dispatch_returns_what_the_op_does(
    alone: AllToAll, options: DispatchOptions, weighted: bool, inference: bool
) -> None:
    given = of_dispatch(alone, options, weighted=weighted)
    with torch.inference_mode(inference):
        made, want = dispatch(*given), ops.dispatch_inference(*given)
        assert_alike(made[:5], want[:5])
        assert_alike(made[6], want[6])


def test_dispatch_takes_scales_and_others(alone: AllToAll) -> None:
    given = of_dispatch(alone, PADDED)
    given[4] = given[4].to(torch.float8_e4m3fn)
    with make(Rank(0, 1, dist.HashStore()), dtype=torch.float8_e4m3fn) as comm:
        given[0] = comm._comm
        more = [torch.rand(T, 1), [alone._comm]]
        made, want = dispatch(*given, *more), ops.dispatch_inference(*given, *more)
    assert_alike(made[:5], want[:5])
    assert len(made[1]) > 0


@pytest.mark.parametrize("options", [PADDED, GROUPED])
def test_combine_returns_what_the_op_does(alone: AllToAll, options: DispatchOptions) -> None:
    given = of_combine(alone, options)
    row_weights = ops.dispatch_inference(*of_dispatch(alone, options))[2]
    for more in ([], [None], [row_weights], [None, torch.rand(T, 3)]):
        assert_alike(combine(*given, *more), ops.combine_inference(*given, *more))
    given[4] = torch.nn.Parameter(given[4])
    assert_alike(combine(*given), ops.combine_inference(*given))


def test_combine_out_writes_what_the_op_does(alone: AllToAll) -> None:
    direct_out, row_weights = direct.call_of("combine_out", op), None
    real = direct.call_of("combine_out", ops.combine_out.default)
    for weights in (None, torch.rand(T, 3)):
        comm, _, max_tokens, handle, y, _ = of_combine(alone)
        outs = torch.zeros(2, T, y.shape[-1], dtype=y.dtype)
        rest = [weights, [], handle, max_tokens]
        for call, out in zip((direct_out, ops.combine_out.default), outs, strict=True):
            assert call(comm, y, row_weights, None, *rest, out, None, None, 0) is None
        assert outs.any()
        assert_alike(outs[0], outs[1])
        biased = [weights, [outs[0].clone()], handle, max_tokens]
        assert direct_out(comm, y, None, None, *biased, outs[0], None, None, 0) is OP
        wrong = [comm, y, None, None, *rest, outs[0, :, :7], None, None, 0]
        assert outcome(real, wrong) == outcome(ops.combine_out.default, wrong)


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
        assert counted(*of_counted(alone)) == OP
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
        (dispatch, 1, 1 << 62),
        (dispatch, 3, -1),
        (dispatch, 4, torch.zeros(T, 7)),
        (dispatch, 4, torch.zeros(48, T).T),
        (dispatch, 5, torch.zeros(T, 3)),
        (dispatch, 6, torch.zeros(T, 3, dtype=torch.float64)),
        (combine, 0, 1 << 40),
        (combine, 3, torch.zeros(3, dtype=torch.int32)),
        (combine, 4, torch.zeros(T, 48, dtype=torch.int64)),
    ],
)
def test_errors_are_those_of_the_op(alone: AllToAll, call: Call, at: int, value: Any) -> None:
    given = given_to(call, alone)
    given[at] = value
    raised, text = outcome(call, given)
    assert (raised, text) == outcome(dict(CALLS)[call], given)
    assert issubclass(raised, RuntimeError)


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
        assert call(*given) is OP
    assert call(*given) is not OP


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
    given = given_to(call, alone)
    x = given[4]
    for given[4] in odd(x):
        assert call(*given) is OP
    with torch.enable_grad():
        for given[4] in (x.clone().requires_grad_(), torch.nn.Parameter(x), x.clone()):
            assert (call(*given) is OP) == given[4].requires_grad


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
        seen.append(combine(*given[:4], y, given[5]))
        return y.sum()

    seen: list[Any] = []
    torch.func.vmap(summed)(given[4][None])
    torch.func.grad(summed)(given[4])
    torch.func.functionalize(summed)(given[4])
    assert seen == [OP] * 3


@pytest.mark.parametrize("call", [dispatch, combine])
def test_wrong_arguments_are_refused_by_the_op(alone: AllToAll, call: Call) -> None:
    """With its text, through the function that the package uses."""
    real = direct.call_of(
        "dispatch_inference" if call is dispatch else "combine_inference", dict(CALLS)[call]
    )
    given = given_to(call, alone)
    cases: list[list[Any]] = [[], given[:4], [*given, *[None] * 9]]
    for at in range(len(given)):
        for wrong in (None, "x", 2.5, 1 << 70, [1, 2]):
            if not (at == 6 and wrong is None):
                cases.append([*given[:at], wrong, *given[at + 1 :]])
    if call is dispatch:
        cases += [[*given, None, ["x"]], [*given, None, [1 << 70]]]
    for each in cases:
        assert call(*each) is OP
        assert outcome(real, each) == outcome(dict(CALLS)[call], each)


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
    monkeypatch.setattr("moe_p2p.moe.all_to_all._DISPATCH_EAGER", ops.dispatch_inference.default)
    monkeypatch.setattr("moe_p2p.moe.all_to_all._COMBINE_EAGER", ops.combine_inference.default)
    assert_alike(got, run_threads(2, pairs))


def test_an_error_has_its_type(alone: AllToAll) -> None:
    tokens = make_tokens(0, 0, T)
    with pytest.raises(errors.InvalidArgumentError, match=r"topk_idx is torch\.int64"):
        alone.dispatch(tokens.x, tokens.topk_idx[:, :2])


def test_nothing_is_kept(alone: AllToAll) -> None:
    given, summed = of_dispatch(alone, PADDED), of_combine(alone)
    held = [*given, *summed, None, op]
    before = [sys.getrefcount(each) for each in held]
    uses = [each._use_count() for each in held if isinstance(each, Tensor)]
    for _ in range(300):
        made = dispatch(*given)
        out = combine(*summed)
        with pytest.raises(RuntimeError):
            combine(1 << 40, *summed[1:])
        assert combine() is OP
    gone = [weakref.ref(each) for each in (*made[:6], *made[6], out[0])]
    assert all(each()._use_count() == 1 for each in gone if each() is not None)  # type: ignore[union-attr]
    del made, out
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    after = [sys.getrefcount(each) for each in held]
    changed = [now - then for now, then in zip(after, before, strict=True)]
    assert max(changed, key=abs) < 100  # None and small numbers are used elsewhere
    assert uses == [each._use_count() for each in held if isinstance(each, Tensor)]


def in_child() -> None:
    with make(Rank(0, 1, dist.HashStore())) as comm, torch.no_grad():
        assert dispatch(*of_dispatch(comm)) is not OP
        assert isinstance(combine(*of_combine(comm))[0], Tensor)


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
