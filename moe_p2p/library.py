"""The extension: it is loaded here, and its ops are called here.

`call` gives errors of C++ their types. Tensors whose elements do not lie in memory at strides
(meta, nested, sparse) are refused by name: the ops have no kernels for them, or could not read
them. Checking each argument would slow down every call, so arguments are checked after a call has
failed. Calls with tensors of the meta device would not fail: torch passes them to fake kernels, and
nothing would be sent. So fake kernels check too.

With torch.set_default_device, and within `with torch.device(...)`, torch intercepts every use of a
tensor in Python, even reading its type: a call of ours took three times as long. Our calls name the
device of each tensor they make, so they switch that off while they run (`without_default_device`).
Without a default device that costs one read of the number of modes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from moe_p2p import errors


def _load() -> None:
    library = Path(__file__).with_name("_C.abi3.so")
    if not library.exists():
        raise ImportError(
            f"{library} is not built: run `make build` in the source tree, or pip install ."
        )
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


_load()
_ops = torch.ops.moe_p2p


def call(op: Callable[..., Any], *args: Any) -> Any:
    """op(*args), with errors of C++ as the types of moe_p2p.errors.

    The handler of a signal that arrives while the op waits runs within a tenth of a second or two,
    on the main thread; what it raises (KeyboardInterrupt) ends the wait and is raised here.
    """
    try:
        return op(*args)
    except RuntimeError as error:
        raise_typed(error, **arguments_of(op, args))


def raise_typed(error: RuntimeError, /, **given: object) -> NoReturn:
    """The second half of `call`, for calls that cannot afford the first. given: tensors, by name"""
    if torch.compiler.is_compiling():
        raise error
    raise_interrupt()
    if given.get("topk_idx", given) is None:  # torch's error names no argument
        raise errors.wrong_type("topk_idx", None) from None
    raise refusal(given) or errors.typed(error) from None


def raise_interrupt() -> None:
    """Raises what a signal handler raised while an op of this thread waited, ending its wait."""
    address = _ops.take_interrupt.default()
    if address:
        held = ctypes.cast(address, ctypes.py_object)
        error = held.value
        ctypes.pythonapi.Py_DecRef(held)  # take_interrupt() gave us a reference
        raise error from None


# --- settings and numbers as texts ---


def settings_text(**values: Any) -> str:
    """Returns "key=value,...", as ops take it (csrc/provider/settings.h); 1:2:3 for a list."""
    return ",".join(
        f"{key}={':'.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in values.items()
    )


def numbers_of(text: str) -> dict[str, int]:
    """Returns the numbers of lines "name number", as ops return them."""
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}


# --- tensors that ops cannot read ---


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
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        text = (
            f"{name} is a tensor of a transform of torch.func (vmap, grad): there is no rule for "
            "it; make the call outside of the transform, and take gradients by torch.autograd"
        )
    elif tensor.device.type == "meta":
        text = f"{name} is on the meta device: it has no bytes; pass a tensor on the CPU or a GPU"
    elif tensor.is_nested:
        text = f"{name} is a nested tensor, must be a plain one; pass torch.cat({name}.unbind())"
    elif tensor.layout is not torch.strided:
        text = f"{name} is {tensor.layout}, must be torch.strided; pass {name}.to_dense()"
    else:
        return None
    return errors.make(errors.InvalidArgumentError, text)


def refuse_lazy(**written: Tensor | None) -> None:
    """Raises for the first tensor whose memory holds other values than it shows. Called for tensors
    that an op, or a peer, will write to: torch would hand the op a copy of such a view. A
    compiler traces no is_neg(), and refuses such a tensor itself."""
    if is_dynamo_compiling():
        return
    for name, tensor in written.items():
        if tensor is None or not (tensor.is_neg() or tensor.is_conj()):
            continue
        kind = "negative" if tensor.is_neg() else "conjugate"
        text = f"{name} is a {kind} view, whose memory holds other values than it shows"
        raise errors.make(
            errors.InvalidArgumentError, f"{text}; pass the tensor that it is a view of"
        )


def refuse_freed(**written: Tensor) -> None:
    """What the ops check too, for callers that cannot wait until an op runs."""
    for name, tensor in written.items():
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            text = f"{name} is {tensor.dtype} {list(tensor.shape)}, and its storage was freed"
            raise errors.make(errors.InvalidArgumentError, text)


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


# --- default devices ---

_Function = TypeVar("_Function", bound=Callable[..., Any])
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
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
    return is_dynamo_compiling() or num_dispatch_modes() > 0  # others use modes


def is_set() -> bool:
    """Whether all modes of torch are default devices, so that nobody else is watching."""
    if torch.compiler.is_compiling():
        return False
    # A loop: a generator would take as long again.
    for i in range(num_modes()):  # noqa: SIM110
        if not isinstance(_mode(i), DeviceContext):
            return False
    return True
