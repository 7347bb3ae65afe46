"""Calls that a default device does not slow down.

torch.set_default_device, and `with torch.device(...)`, pass every use of a tensor in Python to a
function of torch's, reading its type included: a call of ours took three times as long. Our calls
name the device of each tensor they make, so they switch that off for as long as they last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._device import DeviceContext

_Function = TypeVar("_Function", bound=Callable[..., Any])
_num_modes = torch._C._len_torch_function_stack
_mode = torch._C._get_function_stack_at
_compiling = torch.compiler.is_compiling


def unaffected(function: _Function) -> _Function:
    """Runs the function without a default device. Other modes of torch still see what it does."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _num_modes() or _compiling() or not _only_devices():
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _only_devices() -> bool:
    if _num_modes() == 1:
        return type(_mode(0)) is DeviceContext
    return all(isinstance(_mode(i), DeviceContext) for i in range(_num_modes()))
