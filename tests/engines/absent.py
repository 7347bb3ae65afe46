"""Empty stand-ins for what an engine imports and MoE layers never call.

vLLM's and SGLang's modules import their servers' clients, tokenizers and compiled parts on the way
to a MoE layer. Each name below is a module whose attributes are classes without behaviour: good
enough to import, annotate and derive from. What a test calls is never among them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

from tests.engines import packages

_SERVING = (
    "aiohttp cbor2 einops fastapi huggingface_hub llguidance openai openai_harmony "
    "partial_json_parser prometheus_client pybase64 requests safetensors transformers urllib3 "
    "uvloop xgrammar zmq"
)
VLLM = (
    f"{_SERVING} vllm._C vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm.vllm_flash_attn "
    "vllm.env_override vllm.entrypoints vllm.parser vllm.renderers vllm.v1.structured_output "
    "vllm.distributed.kv_transfer"
)
SGLANG = (
    f"{_SERVING} IPython compressed_tensors dill gguf sentencepiece starlette torchvision tvm_ffi "
    "sgl_kernel sglang.kernels.jit sglang.srt.sampling.custom_logit_processor "
    "sglang.srt.utils.hf_transformers_patches"
)


class _Nothing(type):
    """A class whose attributes are such classes; also good as a decorator or in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__get_pydantic_core_schema__":
            return lambda *_: {"type": "any"}
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __setitem__(cls, key: Any, value: Any) -> None: ...


def _returns_what_it_decorates(self: Any, *given: Any, **_: Any) -> Any:
    return given[0] if given and callable(given[0]) else self


def _nothing(name: str) -> Any:
    body: dict[str, Any] = {
        "__init__": lambda self, *_, **__: None,
        "__init_subclass__": classmethod(lambda cls, **_: None),
        "__class_getitem__": classmethod(lambda cls, _: cls),
        "__setitem__": lambda self, key, value: None,
        "__call__": _returns_what_it_decorates,
        "__getattr__": lambda self, attribute: getattr(type(self), attribute),
    }
    return _Nothing(name, (), body)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _nothing(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: list[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == each or name.startswith(f"{each}.") for each in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in(names: str) -> None:
    """From now on importing one of `names`, or what is below it, gives an empty module."""
    sys.meta_path.insert(0, _Finder(names.split()))


def importing(project: str, names: str, at: Path | None = None) -> None:
    """From now on this project's files can be imported, and `names` are empty modules.

    at: a folder of the project to use instead of the one that was fetched.
    """
    sys.path[:0] = [str(at or packages.where(project)), str(packages.dependencies())]
    stand_in(names)
