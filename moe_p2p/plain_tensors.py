"""Refuses, by name, tensors whose elements do not lie in memory at strides: meta, nested, sparse.

The ops have no kernels for them, or could not read them. To look at each argument would slow down
every call, so a call is looked at once it has failed. Tensors of the meta device would not fail:
torch passes them to fake kernels, and nothing would be sent. So those look too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_p2p import errors

_ops = torch.ops.moe_p2p


def refusal(given: Mapping[str, object]) -> errors.MoeP2pError | None:
    """Returns the error for the first such tensor, also in a list; None: all are plain."""
    for name, value in given.items():
        if isinstance(value, (list, tuple)):
            found = refusal({f"{name}[{i}]": each for i, each in enumerate(value)})
        else:
            found = _refusal_of(name, value) if isinstance(value, Tensor) else None
        if found is not None:
            return found
    return None


def _refusal_of(name: str, tensor: Tensor) -> errors.MoeP2pError | None:
    if tensor.device.type == "meta":
        text = f"{name} is on the meta device: it has no bytes; pass a tensor on the CPU or a GPU"
    elif tensor.is_nested:
        text = f"{name} is a nested tensor, must be a plain one; pass torch.cat({name}.unbind())"
    elif tensor.layout is not torch.strided:
        text = f"{name} is {tensor.layout}, must be torch.strided; pass {name}.to_dense()"
    else:
        return None
    return errors.make(errors.InvalidArgumentError, text)


def arguments_of(op: Any, args: tuple[Any, ...]) -> dict[str, object]:
    """Returns arguments of an op by name."""
    return {each.name: arg for each, arg in zip(op._schema.arguments, args, strict=False)}


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Registers what gives shapes to compilers, as of an op of moe_p2p."""

    @functools.wraps(fake)
    def checked(*args: Any) -> Any:
        refused = refusal(arguments_of(getattr(_ops, name).default, args))
        if refused is not None:
            raise refused
        return fake(*args)

    torch.library.register_fake(f"moe_p2p::{name}", checked)
