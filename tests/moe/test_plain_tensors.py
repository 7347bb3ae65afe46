"""Tensors whose elements do not lie in memory at strides: refused by name, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_p2p import AllToAll, DispatchOptions, InvalidArgumentError
from moe_p2p.library import refusal
from tests.support.cases import check_step, make, make_tokens
from tests.support.ranks import Rank

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
TOKENS = make_tokens(0, 0, 4, dtype=torch.bfloat16)
ARGUMENTS: dict[str, Any] = {
    "x": TOKENS.x,
    "topk_idx": TOKENS.topk_idx,
    "topk_weights": TOKENS.topk_weights,
    "extras": (torch.zeros(4, 2),),
    "num_tokens": torch.tensor([4]),
}
ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "meta": (lambda t: t.to("meta"), "is on the meta device: it has no bytes; pass"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "is a nested tensor, must"),
    "jagged": (
        lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
        "is a nested tensor, must",
    ),
    "sparse": (lambda t: t.to_sparse(), "is torch.sparse_coo, must be torch.strided; pass"),
    "compressed": (lambda t: t.to_sparse_csr(), "is torch.sparse_csr, must"),
}
CALLS = [(name, kind) for name in ARGUMENTS for kind in ODD if name != "num_tokens"]


@pytest.fixture(scope="module")
def alone() -> AllToAll:
    """One communicator of one rank; every test leaves it usable."""
    return make(Rank(0, 1, dist.HashStore()), extra_bytes=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("half", ["", "_send"])
@pytest.mark.parametrize(("name", "kind"), [*CALLS, ("num_tokens", "meta")])
def test_dispatch_refuses(alone: AllToAll, name: str, kind: str, half: str) -> None:
    """Ranks once waited for what a dispatch of a meta tensor had not sent, and it returned."""
    change, text = ODD[kind]
    given = ARGUMENTS[name]
    changed = (change(given[0]),) if name == "extras" else change(given)
    shown = r"extras\[0\]" if name == "extras" else name
    with pytest.raises(InvalidArgumentError, match=f"{shown} {text}"):
        getattr(alone, f"dispatch{half}")(**(ARGUMENTS | {name: changed}))
    assert alone.broken == ""
    check_step(alone, [TOKENS])


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("grad", [False, True])
def test_calls_of_few_arguments_refuse(alone: AllToAll, kind: str, grad: bool) -> None:
    """Which eager calls make past torch's dispatcher, and with gradients by other ops."""
    change, text = ODD[kind]
    x = change(TOKENS.x).requires_grad_(grad)
    with pytest.raises(InvalidArgumentError, match=f"x {text}"):
        alone.dispatch(x, TOKENS.topk_idx)
    options = DispatchOptions(layout="grouped", zero_padding=True)
    received = alone.dispatch(TOKENS.x, TOKENS.topk_idx, options=options)
    for half in ("", *(["_send"] if not grad else [])):
        with pytest.raises(InvalidArgumentError, match=f"y {text}"):
            getattr(alone, f"combine{half}")(change(received.x).requires_grad_(grad), received)
    alone.combine(received.x, received)


def test_an_op_itself_refuses_meta_tensors(alone: AllToAll) -> None:
    given = (alone._comm, 0, 12, 96, TOKENS.x, TOKENS.topk_idx.to("meta"))
    with pytest.raises(InvalidArgumentError, match="topk_idx is on the meta device"):
        torch.ops.moe_p2p.dispatch_inference(*given)


def test_compilers_see_shapes() -> None:
    with FakeTensorMode() as mode:
        assert refusal({"x": mode.from_tensor(TOKENS.x)}) is None
    assert refusal(ARGUMENTS) is None
