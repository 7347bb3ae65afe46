"""Ops of most calls without torch's dispatcher, where they are eager and nobody watches.

On the way to an op torch turns each argument into a value that knows its type, looks for all who
may see the call, and turns results back: 50,000 instructions of a pair, as many as the package's
own. csrc/ops/direct_calls.cpp takes tensors out of their Python objects and calls the package's
C++. Wherever a caller may want more than that, it calls the op.

It uses the places of four things in torch's objects, and functions that torch exports outside of
its stable ABI. All are looked for and tried here, when the package is imported. If one is not as
expected, calls go through the ops, and the logger "moe_p2p" says why (debug).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_p2p.library import call

_ops = torch.ops.moe_p2p
_HEAD = object.__basicsize__  # of a Python object; what torch adds to it begins with an at::Tensor
_WORD = 8
_AUTOCAST_GPU = torch._C.DispatchKey.AutocastCUDA  # on tensors of a GPU; off unless in autocast
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
_OBSERVED = "_ZN2at12hasCallbacksEv"
_IN_FUNCTION_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_THREAD_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE"


class _UnexpectedError(Exception):
    """This torch is not as direct calls need it: where."""


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise _UnexpectedError(text)


def _probes() -> Iterator[Tensor]:
    """Tensors whose objects and dispatch keys differ."""
    plain = torch.empty(3, 4, dtype=torch.bfloat16, device="cpu")
    yield plain
    yield torch.empty(0, dtype=torch.float32, device="cpu")
    yield torch.nn.Parameter(plain)
    yield torch._neg_view(plain)
    yield torch.empty(2, dtype=torch.int32, device="meta")
    with torch.inference_mode():
        yield torch.empty(2, dtype=torch.float32, device="cpu")


def _keys(tensor: Tensor) -> int:
    return torch._C._dispatch_keys(tensor).raw_repr()


def _find_keys(probes: list[Tensor]) -> int:
    """Returns the offset of the dispatch keys in a TensorImpl, the same in all probes."""
    size_of = ctypes.CDLL(None).malloc_usable_size  # nothing is read past a TensorImpl's memory
    size_of.argtypes, size_of.restype = [ctypes.c_void_p], ctypes.c_size_t
    sizes = [size_of(tensor._cdata) for tensor in probes]
    found = [
        offset
        for offset in range(0, min(sizes) - _WORD + 1, _WORD)
        if all(_word(tensor._cdata + offset) == _keys(tensor) for tensor in probes)
    ]
    _require(len(found) == 1, f"dispatch keys of tensors are found at {found}, not at one place")
    return found[0]


def _thread_keys() -> tuple[int, int]:
    c10 = ctypes.CDLL("libc10.so")
    address = ctypes.addressof(ctypes.c_uint64.in_dll(c10, _THREAD_KEYS))
    return _word(address), _word(address + _WORD)


def _facts() -> list[int]:
    """The fields of Torch in direct_calls.cpp. Raises where this torch is not as they assume."""
    probes = list(_probes())
    for tensor in probes:
        at = id(tensor) + _HEAD
        inside = type(tensor).__basicsize__ >= _HEAD + _WORD
        _require(inside and _word(at) == tensor._cdata, "a tensor's object does not begin with it")
        _require(_word(at - _WORD) == id(type(tensor)), "an object's type is not where it was")
    torch_python, c10 = ctypes.PyDLL(torch._C.__file__), ctypes.CDLL("libc10.so")
    wrap, requires_grad = torch_python[_WRAP], torch_python[_REQUIRES_GRAD]
    observed, in_mode = torch_python[_OBSERVED], torch_python[_IN_FUNCTION_MODE]
    wrap.argtypes, wrap.restype = [ctypes.c_void_p], ctypes.py_object
    requires_grad.argtypes, requires_grad.restype = [ctypes.c_void_p], ctypes.c_bool
    for tensor in probes:
        _require(wrap(id(tensor) + _HEAD) is tensor, "a tensor's object is not found again")
        grad = requires_grad(tensor._cdata)
        _require(grad == tensor.requires_grad, "which tensors require grad is not found")
    of_gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA).add(_AUTOCAST_GPU)
    plain = (torch._C._dispatch_keys(probes[0]) | of_gpu).raw_repr()
    _require(not _keys(probes[2]) & ~plain, "a parameter is not a plain tensor")
    _require(all(_keys(odd) & ~plain for odd in probes[3:5]), "any tensor is plain")
    _require(not any(_thread_keys()), "the importing thread is in a mode of torch")
    with torch.inference_mode():
        inference = _thread_keys()
    _require(any(inference), "inference_mode leaves no trace")
    addresses = [
        ctypes.cast(function, ctypes.c_void_p).value or 0
        for function in (wrap, observed, in_mode, requires_grad)
    ]
    types = [id(Tensor), id(torch.nn.Parameter)]
    return [*types, _HEAD, _find_keys(probes), plain, *inference, *addresses, c10._handle]


def find_facts() -> list[int] | None:
    """Returns the fields of Torch in direct_calls.cpp; None, and says why, for a torch without."""
    try:
        with torch.inference_mode(False):  # whoever imports this may be in it
            return _facts()
    except Exception as error:  # whatever another torch does differently
        logging.getLogger("moe_p2p").debug("calls go through torch's dispatcher: %s", error)
        return None


FACTS = find_facts()


def call_of(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what is called in place of the op of that name, where no compiler traces."""
    address = call(_ops.direct_call.default, name, id(op), FACTS) if FACTS is not None else 0
    if not address:
        return op
    held = ctypes.cast(address, ctypes.py_object)
    made: Callable[..., Any] = held.value
    ctypes.pythonapi.Py_DecRef(held)  # direct_call() gave us a reference
    return made
