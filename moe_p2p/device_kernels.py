"""The GPU's side of a communicator: its memory, and the kernels of kernels/ compiled for its shape.

Symbols: W ranks, L ranks per node, E experts, H hidden size, K top-k, M tokens per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from moe_p2p import errors, jit
from moe_p2p.memory import NodeDeviceMemory, share_node_memory
from moe_p2p.ops import call

if TYPE_CHECKING:
    from moe_p2p.config import AllToAllConfig

_ops = torch.ops.moe_p2p

_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
# Most blocks of the half that works on this rank's tokens, and of the half that works on received
# slots. Four blocks of 448 threads fit on each of the 132 multiprocessors of an H200.
NUM_TOKEN_BLOCKS = 264
NUM_SLOT_BLOCKS = 264
_MAX_THREADS = 512  # of a block; four blocks share a multiprocessor
_STATE_WORDS = 4  # int64; kernels/abi/params.h, DeviceState
_FAULT_BYTES = 64  # kernels/abi/params.h, Fault
_REGIONS = "signals"  # the line of the plan that is host memory


def _up(value: int, step: int) -> int:
    """value, or the next multiple of step."""
    return -(-value // step) * step


def num_threads(row_bytes: int) -> int:
    """Threads of a block for rows of 16-byte pieces: as few rounds as fit, equally full.

    For example rows of 7168 bytes: 448 pieces, 448 threads, one round.
    """
    pieces = row_bytes // 16
    rounds = -(-pieces // _MAX_THREADS)
    return max(128, _up(-(-pieces // rounds), 32))


def shape_macros(config: AllToAllConfig, *, world_size: int, ranks_per_node: int) -> dict[str, int]:
    """What every kernel of a communicator is compiled with (kernels/device/shape.cuh)."""
    hidden, item = config.hidden_dim, config.dtype.itemsize
    fp8 = _up(hidden, 16) + _up(_up(hidden, 128) // 128 * 4, 16)
    combine_item = config.widest_combine_dtype.itemsize
    return {
        "MOE_P2P_WORLD_SIZE": world_size,
        "MOE_P2P_RANKS_PER_NODE": ranks_per_node,
        "MOE_P2P_NUM_EXPERTS": config.num_experts,
        "MOE_P2P_MAX_LOCAL_EXPERTS": max(
            config.num_local_experts(rank, world_size) for rank in range(world_size)
        ),
        "MOE_P2P_TOPK": config.topk,
        "MOE_P2P_CHUNK_TOKENS": config.step_tokens,
        "MOE_P2P_STEPS_IN_FLIGHT": config.steps_in_flight,
        "MOE_P2P_MAX_TOKEN_BYTES": max(hidden * item, fp8) + config.extra_bytes,
        "MOE_P2P_MAX_PARTIAL_BYTES": _up(hidden * combine_item, 16) + 4 * config.topk,
        "MOE_P2P_HIDDEN_DIM": hidden,
    }


def dispatch_macros(
    shape: dict[str, int], x_dtype: torch.dtype, *, quantize: bool
) -> dict[str, int]:
    wire = 1 if quantize else x_dtype.itemsize
    return shape | {
        "MOE_P2P_X_DTYPE": _CODES[x_dtype],
        "MOE_P2P_QUANTIZE": int(quantize),
        "MOE_P2P_THREADS": num_threads(shape["MOE_P2P_HIDDEN_DIM"] * wire),
    }


def combine_macros(
    shape: dict[str, int], y_dtype: torch.dtype, out_dtype: torch.dtype
) -> dict[str, int]:
    wider = max(y_dtype.itemsize, out_dtype.itemsize)
    return shape | {
        "MOE_P2P_Y_DTYPE": _CODES[y_dtype],
        "MOE_P2P_OUT_DTYPE": _CODES[out_dtype],
        "MOE_P2P_THREADS": num_threads(shape["MOE_P2P_HIDDEN_DIM"] * wider),
    }


def variants() -> Iterator[tuple[str, dict[str, int]]]:
    """(source, macros) of kernels that must compile: every type, and shapes at the edges."""
    from moe_p2p.config import AllToAllConfig  # the configuration imports the ops

    def shape(world_size: int, **fields: int) -> dict[str, int]:
        config = AllToAllConfig(**fields)  # type: ignore[arg-type]
        return shape_macros(config, world_size=world_size, ranks_per_node=world_size)

    usual = shape(8, num_experts=256, hidden_dim=7168, topk=8, max_tokens=128)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, quantize in [
        *itertools.product(floats, (False, True)),
        (torch.float8_e4m3fn, False),
    ]:
        yield "dispatch.cu", dispatch_macros(usual, dtype, quantize=quantize)
    for y_dtype, out_dtype in itertools.product(floats, (torch.bfloat16, torch.float32)):
        yield "combine.cu", combine_macros(usual, y_dtype, out_dtype)
    for other in (
        shape(1, num_experts=1, hidden_dim=16, topk=1, max_tokens=1),
        shape(3, num_experts=1023, hidden_dim=3584, topk=32, max_tokens=300),
        shape(8, num_experts=256, hidden_dim=7168, topk=8, max_tokens=2048, chunk_tokens=2048),
    ):
        yield "dispatch.cu", dispatch_macros(other, torch.bfloat16, quantize=True)
        yield "combine.cu", combine_macros(other, torch.bfloat16, torch.bfloat16)


class DeviceSide:
    """Memory and kernels of one rank on one GPU. Made by Communicator; close() after its last call.

    Raises UnavailableError when the driver, NVRTC or peer access is missing, TimeoutError when a
    rank of the node does not come.
    """

    def __init__(
        self,
        comm: int,
        config: AllToAllConfig,
        *,
        device: int,
        rank: int,
        world_size: int,
        ranks_per_node: int,
        key: str,
        deadline: float,
    ) -> None:
        errors.require(
            config.step_tokens * config.topk <= 20_000,
            f"chunk_tokens {config.step_tokens} times topk {config.topk} must be at most 20000 on "
            "a GPU: a block keeps the routing table of a step in shared memory",
        )
        self._comm, self._device = comm, device
        self._shape = shape_macros(config, world_size=world_size, ranks_per_node=ranks_per_node)
        self._ready: set[tuple[str, torch.dtype, object]] = set()
        plan = config.plan(world_size=world_size, ranks_per_node=ranks_per_node)
        self.memory: NodeDeviceMemory = share_node_memory(
            rank % ranks_per_node,
            ranks_per_node,
            key=key,
            device=device,
            size_bytes=sum(size for name, size in plan.items() if name != _REGIONS),
            deadline=deadline,
        )
        on_device = torch.device("cuda", device)
        owners = config.expert_owners(world_size)
        local = [owners[:expert].count(owner) for expert, owner in enumerate(owners)]
        self._state = torch.zeros(_STATE_WORDS, dtype=torch.int64, device=on_device)
        self._owners = torch.tensor(owners, dtype=torch.int32, device=on_device)
        self._local = torch.tensor(local, dtype=torch.int32, device=on_device)
        self._fault = torch.zeros(_FAULT_BYTES, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize(device)
        call(
            _ops.all_to_all_use_device.default,
            comm,
            device,
            self.memory.addresses,
            self._state.data_ptr(),
            self._owners.data_ptr(),
            self._local.data_ptr(),
            self._fault.data_ptr(),
            self._fault.data_ptr(),  # one address on both sides: pinned by torch
            config.num_sms or 0,
        )

    def prepare_dispatch(self, x_dtype: torch.dtype, *, quantize: bool) -> None:
        """Compiles and hands over the kernel of such a dispatch; at once when that was done."""
        if ("dispatch", x_dtype, quantize) in self._ready:
            return
        hidden = self._shape["MOE_P2P_HIDDEN_DIM"]
        errors.require(
            not quantize or hidden % 16 == 0,
            f"hidden_dim is {hidden}, must be a multiple of 16 to quantize on a GPU",
        )
        macros = dispatch_macros(self._shape, x_dtype, quantize=quantize)
        kernel = jit.load(self._device, "dispatch.cu", "moe_p2p_dispatch", macros)
        call(
            _ops.all_to_all_set_dispatch_kernel.default,
            self._comm,
            x_dtype,
            quantize,
            kernel,
            macros["MOE_P2P_THREADS"],
            NUM_TOKEN_BLOCKS,
            NUM_SLOT_BLOCKS,
        )
        self._ready.add(("dispatch", x_dtype, quantize))

    def prepare_combine(self, y_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        """The same for a combine."""
        if ("combine", y_dtype, out_dtype) in self._ready:
            return
        macros = combine_macros(self._shape, y_dtype, out_dtype)
        kernel = jit.load(self._device, "combine.cu", "moe_p2p_combine", macros)
        call(
            _ops.all_to_all_set_combine_kernel.default,
            self._comm,
            y_dtype,
            out_dtype,
            kernel,
            macros["MOE_P2P_THREADS"],
            NUM_TOKEN_BLOCKS,
            NUM_SLOT_BLOCKS,
        )
        self._ready.add(("combine", y_dtype, out_dtype))

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self.memory.close()
