"""A MoE layer of Megatron-Core with each of the dispatchers that are compared, on GPUs or CPUs.

    alltoall        Megatron's own, over torch.distributed.all_to_all_single
    alltoall_fused  the same with --moe-permute-fusion
    shim            Megatron's flex dispatcher and its manager for DeepEP, over moe_p2p.deep_ep
    shim_fused      the same with --moe-permute-fusion
    hybridep        Megatron's manager for HybridEP, over HybridEPBuffer of moe_p2p.deep_ep
    integration     the flex dispatcher with the manager of moe_p2p.integrations.moe.megatron

The fused permutation is ours, or Transformer Engine's where it is installed (`permutation`). All
have the same weights and inputs. Megatron is imported from the environment, or else from where
`make test-engines` puts it.

Symbols: S sequence, B batch, H hidden size; T = S * B tokens of a rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import deep_ep, env, errors
from moe_p2p.tools import launch

SYSTEMS = ("alltoall", "alltoall_fused", "shim", "shim_fused", "hybridep", "integration")
_RNG_SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of a layer, and further fields of Megatron's TransformerConfig."""

    hidden: int = 2048
    ffn: int = 768
    experts: int = 64
    topk: int = 8
    tensor_ranks: int = 1  # tensor parallel; the others are expert parallel
    dtype: torch.dtype = torch.bfloat16
    more: dict[str, Any] = field(default_factory=dict)


def find() -> str | None:
    """Makes `import megatron.core` work; returns the reason if it cannot."""
    if importlib.util.find_spec("megatron") is not None:
        return None
    folder = env.cache_folder() / "engines"
    found = sorted(folder.glob("megatron-core-*/megatron"), key=lambda path: _numbers(path.parent))
    if not found:
        how = "pip install megatron-core, or make test-engines in a checkout"
        return f"megatron-core is not installed, and not in {folder} ({how})"
    sys.path.append(str(found[-1].parent))
    return None


def _numbers(folder: Path) -> list[int]:
    version = folder.name.removeprefix("megatron-core-")
    return [int(part) for part in version.split(".") if part.isdecimal()]


def backend(device: str, local_ranks: int) -> str:
    """Returns torch.distributed's backend. NCCL refuses ranks that share a GPU."""
    alone = device == "cuda" and local_ranks <= launch.num_gpus()
    return "cpu:gloo,cuda:nccl" if alone else "gloo"


def start(device: str, tensor_ranks: int = 1) -> None:
    """Sets Megatron's groups up. Once per process, after torch.distributed is.

    device "cpu": Megatron's CUDA streams and devices become empty stand-ins in this process. On
    GPUs with gloo, its collectives pass through the host.
    """
    if device == "cpu":
        _stand_in_for_cuda()
    elif dist.get_backend() == "gloo":
        _pass_through_the_host()
    # Megatron compiles small functions; a compiler may be missing, and its time is not measured.
    torch._dynamo.config.disable = True
    deep_ep.install(force=True)  # before Megatron imports it
    parallel_state, random = _modules()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks,
        expert_model_parallel_size=dist.get_world_size() // tensor_ranks,
        expert_tensor_parallel_size=tensor_ranks,
    )
    if device == "cpu":
        random.initialize_rng_tracker()
        random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
        random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
        random._set_cuda_rng_state = lambda *_, **__: None
    else:
        random.model_parallel_cuda_manual_seed(_RNG_SEED)


def _modules() -> tuple[Any, Any]:
    """Raises UnavailableError if Megatron imports what is not there: its wheel does not ask for
    Triton, which it imports on CPUs too."""
    try:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
    except ModuleNotFoundError as error:
        text = f"megatron-core needs {error.name}, which is not installed"
        raise errors.make(errors.UnavailableError, text) from None
    return parallel_state, random


class _Stream:
    """A CUDA stream or event of the CPU: what was called is done."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: object) -> None: ...
    def record_event(self, *_: object) -> _Stream:
        return self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    # Parameters and counts are put on the current CUDA device.
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda *_: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda stream: stream if stream is not None else _Stream()

    def on_host(factory: Any) -> Any:
        def call(*given: Any, **options: Any) -> Tensor:
            on_gpu = str(options.get("device", "")).startswith("cuda")
            return factory(*given, **(options | {"device": "cpu"} if on_gpu else options))  # type: ignore[no-any-return]

        return call

    torch.zeros, torch.arange = on_host(torch.zeros), on_host(torch.arange)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    exchange = dist.all_to_all_single

    def with_lists(*given: Any, **options: Any) -> Any:
        """Megatron leaves sizes in tensors when they are not on a GPU."""
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(options.get(name), Tensor):
                options[name] = options[name].tolist()
        return exchange(*given, **options)

    dist.all_to_all_single = with_lists


class _Done:
    """The work of a collective that has been waited for."""

    def wait(self) -> bool:
        return True


def _pass_through_the_host() -> None:
    """gloo has no such collectives for CUDA tensors."""

    def wrapped(collective: Any) -> Any:
        def call(out: Tensor, given: Tensor, *rest: Any, **options: Any) -> Any:
            if not given.is_cuda:
                return collective(out, given, *rest, **options)
            on_host = torch.empty_like(out, device="cpu")
            asynchronous = options.pop("async_op", False)
            collective(on_host, given.cpu(), *rest, **options)
            out.copy_(on_host)
            return _Done() if asynchronous else None

        return call

    for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, wrapped(getattr(dist, name)))


def make(system: str, layer: Layer, device: str) -> Any:
    """Returns a MoELayer in training mode."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import token_dispatcher

    from moe_p2p.integrations.moe import megatron

    if not hasattr(token_dispatcher, "_manager_for_deep_ep"):
        token_dispatcher._manager_for_deep_ep = token_dispatcher._DeepepManager
    token_dispatcher._DeepepManager = token_dispatcher._manager_for_deep_ep
    if system == "integration":
        megatron.install()
    if system.endswith("_fused"):
        megatron.offer_permutation()
    spec = get_gpt_layer_local_spec(num_experts=layer.experts, moe_grouped_gemm=False)
    made = spec.submodules.mlp(config=_config(system, layer, device), layer_number=1)
    made = made.to(device)
    made.set_layer_number(1)
    _fill(made)
    return made.train()


def permutation() -> str:
    """Returns whose fused permutation it is."""
    from moe_p2p.integrations.moe import megatron

    return "moe_p2p's" if megatron.offer_permutation() else "Transformer Engine's"


def _config(system: str, layer: Layer, device: str) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    flex = not system.startswith("alltoall")
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": layer.hidden,
        "num_attention_heads": 8,
        "ffn_hidden_size": layer.ffn,
        "moe_ffn_hidden_size": layer.ffn,
        "num_moe_experts": layer.experts,
        "moe_router_topk": layer.topk,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "flex" if flex else "alltoall",
        "moe_permute_fusion": system.endswith("_fused"),
        "moe_grouped_gemm": False,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "expert_model_parallel_size": dist.get_world_size() // layer.tensor_ranks,
        "tensor_model_parallel_size": layer.tensor_ranks,
        "expert_tensor_parallel_size": layer.tensor_ranks,
        "sequence_parallel": layer.tensor_ranks > 1,
        "params_dtype": layer.dtype,
        "bf16": layer.dtype == torch.bfloat16,
        "use_cpu_initialization": device == "cpu",
        "gradient_accumulation_fusion": False,
        **layer.more,
    }
    if flex:
        backend = "hybridep" if system == "hybridep" else "deepep"
        options["moe_flex_dispatcher_backend"] = backend
    return TransformerConfig(**options)


def _fill(layer: Any) -> None:
    """Sets weights by name and rank: the same in every system."""
    rank = dist.get_rank()
    for name, parameter in sorted(layer.named_parameters()):
        replicated = "router" in name or "shared" in name
        seed = sum(map(ord, name)) * 131 + (0 if replicated else 7919 * (rank + 1))
        generator = torch.Generator("cpu").manual_seed(seed)
        values = torch.randn(parameter.shape, generator=generator, device="cpu") * 0.05
        with torch.no_grad():
            parameter.copy_(values.to(parameter))


def inputs(step: int, layer: Layer, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns x and the gradient of the output, [S, B, H] with B 2; they change with the step."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + dist.get_rank())
    shape = (tokens // 2, 2, layer.hidden)
    x, grad = (torch.randn(shape, generator=generator, device="cpu") for _ in range(2))
    return x.to(device, layer.dtype), grad.to(device, layer.dtype)


def train(layer: Any, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Runs forward and backward; returns the output and x's gradient, and leaves parameters'."""
    x = x.detach().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad
