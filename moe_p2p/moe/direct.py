"""Most calls without torch's dispatcher, where they are eager and nobody watches.

On the way to an op torch turns each argument into a value that knows its type, looks for all who
may see the call, and turns results back: 50,000 instructions of a pair, as many as the package's
own. csrc/ops/direct/ takes tensors out of their Python objects, calls the package's C++ and makes
the objects that the caller returns. Wherever a caller may want more than that, it returns None, and
the caller calls the op. MOE_P2P_DIRECT=0 when the package is imported: it always does.

It uses the places of four things in torch's objects, and functions that torch exports outside of
its stable ABI (Facts). All are looked for and tried here, when the package is imported. If one is
not as expected, calls go through the ops, and the logger "moe_p2p" says why (debug).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import env
from moe_p2p.library import call

_ops = torch.ops.moe_p2p
_HEAD = object.__basicsize__  # of a Python object; what torch adds to it begins with an at::Tensor
_WORD = 8
_DEADLINE_S = 30.0  # of what takes less than a millisecond
_Made = TypeVar("_Made")
_AUTOCAST_GPU = torch._C.DispatchKey.AutocastCUDA  # on tensors of a GPU; off unless in autocast
_DATA = "aoti_torch_get_data_ptr"
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
_OBSERVED = "_ZN2at12hasCallbacksEv"
_IN_FUNCTION_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_THREAD_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE"


class Facts(NamedTuple):
    """What csrc/ops/direct/torch_facts.h has to know of this torch; fields and order are Torch's.

    tensor, parameter: the types whose objects are taken apart, by address.
    head: bytes of an object before its at::Tensor; the word before that is its type.
    keys: offset of the dispatch keys in a TensorImpl.
    plain_keys: the keys of tensors that are nothing but memory of a CPU or a GPU.
    inference_included, inference_excluded: a thread's keys in inference_mode; 0 in no mode.
    wrap, observed, in_function_mode, requires_grad: addresses of torch's functions.
    libc10: dlopen's handle of the library that has the thread's keys.
    """

    tensor: int
    parameter: int
    head: int
    keys: int
    plain_keys: int
    inference_included: int
    inference_excluded: int
    wrap: int
    observed: int
    in_function_mode: int
    requires_grad: int
    libc10: int


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


def _key_set(*names: str) -> int:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


def _references(tensor: Tensor) -> tuple[int, int]:
    """Numbers of references to the object and to its tensor."""
    return sys.getrefcount(tensor), tensor._use_count()  # type: ignore[attr-defined]


def _check_objects(probes: list[Tensor]) -> None:
    for tensor in probes:
        at = id(tensor) + _HEAD
        inside = type(tensor).__basicsize__ >= _HEAD + _WORD
        _require(inside and _word(at) == tensor._cdata, "a tensor's object does not begin with it")
        _require(_word(at - _WORD) == id(type(tensor)), "an object's type is not where it was")
    data, data_of = ctypes.c_void_p(), ctypes.CDLL("libtorch_cpu.so")[_DATA]
    data_of(ctypes.c_void_p(id(probes[0]) + _HEAD), ctypes.byref(data))
    _require(data.value == probes[0].data_ptr(), "a handle of torch's C functions is no at::Tensor")


def _check_keys(probes: list[Tensor]) -> int:
    """Returns the keys of plain tensors."""
    plain, _, parameter, *others = probes
    of_cpu = _key_set("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU")
    _require(_keys(plain) == of_cpu, "a plain tensor has a key that is not known here")
    keys = of_cpu | _key_set("CUDA", "ADInplaceOrView", "AutogradCUDA", "AutocastCUDA")
    _require(not _keys(parameter) & ~keys, "a parameter is not a plain tensor")
    _require(all(_keys(odd) & ~keys for odd in others[:2]), "any tensor is plain")
    return keys


def _check_threads() -> tuple[int, int]:
    """Returns a thread's keys in inference_mode."""
    _require(not any(_thread_keys()), "a new thread is in a mode of torch")
    with torch.inference_mode():
        inference = _thread_keys()
    _require(any(inference), "inference_mode leaves no trace")
    dispatch_mode = TorchDispatchMode()  # type: ignore[no-untyped-call]
    for mode in (dispatch_mode, torch.autocast("cpu")):
        with mode:
            seen = _thread_keys() not in ((0, 0), inference)
        _require(seen, f"{type(mode).__name__} leaves no trace")
    return inference


def _check_functions(probes: list[Tensor]) -> tuple[int, ...]:
    """Returns the addresses of torch's functions."""
    torch_python = ctypes.PyDLL(torch._C.__file__)
    wrap, requires_grad = torch_python[_WRAP], torch_python[_REQUIRES_GRAD]
    observed, in_mode = torch_python[_OBSERVED], torch_python[_IN_FUNCTION_MODE]
    wrap.argtypes, wrap.restype = [ctypes.c_void_p], ctypes.py_object
    requires_grad.argtypes, requires_grad.restype = [ctypes.c_void_p], ctypes.c_bool
    in_mode.restype = ctypes.c_bool
    for tensor in probes:
        before = _references(tensor)
        _require(wrap(id(tensor) + _HEAD) is tensor, "a tensor's object is not found again")
        # ctypes has taken the reference over.
        _require(_references(tensor) == before, "a found object is not a new reference")
        grad = requires_grad(tensor._cdata)
        _require(grad == tensor.requires_grad, "which tensors require grad is not found")
    for mode in (contextlib.nullcontext(), torch.device("cpu")):
        with mode:
            seen = in_mode() == isinstance(mode, torch.device)
        _require(seen, "a mode of torch's functions is not seen")
    functions = wrap, observed, in_mode, requires_grad
    return tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions)


def _facts() -> Facts:
    """In a thread without modes. Raises where this torch is not as direct calls assume."""
    probes = list(_probes())
    _check_objects(probes)
    types, keys, plain = (
        (id(Tensor), id(torch.nn.Parameter)),
        _find_keys(probes),
        _check_keys(probes),
    )
    inference, functions = _check_threads(), _check_functions(probes)
    libc10 = ctypes.CDLL("libc10.so")._handle
    return Facts._make([*types, _HEAD, keys, plain, *inference, *functions, libc10])


def _without_modes(make: Callable[[], _Made]) -> _Made:
    """make(), in a new thread, which is in no mode of torch.

    Who imports this package may be: engines make models under FakeTensorMode, a default device or
    inference_mode.
    """
    made: list[_Made] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    if failed:
        raise failed[0]
    _require(bool(made), f"looking at torch took more than {_DEADLINE_S} s")
    return made[0]


def find_facts() -> Facts | None:
    """Returns what direct calls have to know; None, and says why, where there are none."""
    wanted = env.direct()
    try:
        _require(wanted, "MOE_P2P_DIRECT is 0")
        return _without_modes(_facts)
    except Exception as error:  # whatever another torch does differently
        logging.getLogger("moe_p2p").debug("calls go through torch's dispatcher: %s", error)
        return None


FACTS = find_facts()


def none(*_: object) -> None:
    """In place of a direct call where there is none."""


def call_of(name: str, *objects: object) -> Callable[..., Any]:
    """Returns what is called before the op, where no compiler traces. None: call the op.

    name: one of csrc/ops/direct/direct_calls.cpp. objects: what it makes results of.
    """
    if FACTS is None:
        return none
    make = functools.partial(call, _ops.direct_call.default, name, id(objects), list(FACTS))
    address = _without_modes(make)
    if not address:
        return none
    held = ctypes.cast(address, ctypes.py_object)
    made: Callable[..., Any] = held.value
    ctypes.pythonapi.Py_DecRef(held)  # direct_call() gave us a reference
    return made
