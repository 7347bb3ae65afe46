"""Calls that a default device does not slow down.

torch.set_default_device, and `with torch.device(...)`, pass every use of a tensor in Python to a
function of torch's, reading its type included: a call of ours took three times as long. Our calls
name the device of each tensor they make, so they switch that off for as long as they last. Where
there is no default device, that costs a look at the number of modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._device import DeviceContext

_Function = TypeVar("_Function", bound=Callable[..., Any])
num_modes = torch._C._len_torch_function_stack
num_dispatch_modes = torch._C._len_torch_dispatch_stack
switched_off = torch._C.DisableTorchFunction  # a context
_mode = torch._C._get_function_stack_at


def without_default_device(function: _Function) -> _Function:
    """Returns what runs the function without a default device: the function itself without one.

    Other modes of torch still see what it does. For one call, as modes change.
    """
    if not num_modes() or not is_set():
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with switched_off():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def unaffected(function: _Function) -> _Function:
    """Decorates calls that can afford the time of one more function."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return without_default_device(function)(*args, **kwargs)

    return run  # type: ignore[return-value]


def watched() -> bool:
    """Whether a compiler, or a mode of torch, sees which ops run and what they return."""
    return torch.compiler.is_dynamo_compiling() or num_dispatch_modes() > 0  # others use modes


def is_set() -> bool:
    """Whether all modes of torch are default devices, so that nobody else is watching."""
    if torch.compiler.is_compiling():
        return False
    # A loop: a generator would take as long again.
    for i in range(num_modes()):  # noqa: SIM110
        if not isinstance(_mode(i), DeviceContext):
            return False
    return True
