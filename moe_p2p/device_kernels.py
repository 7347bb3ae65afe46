"""The GPU's side of a communicator: its memory, and the kernels of kernels/ compiled for its shape.

Symbols: W ranks, L ranks per node, E experts, H hidden size, K top-k, M tokens per step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_p2p import cuda_driver, errors, jit
from moe_p2p.memory import PinnedPages, share_memory, share_node_memory
from moe_p2p.ops import call

if TYPE_CHECKING:
    from moe_p2p.config import AllToAllConfig

_ops = torch.ops.moe_p2p

_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
# Most blocks of the half that works on this rank's tokens, and of the half that works on received
# slots, two a multiprocessor of an H200; more are not faster.
NUM_TOKEN_BLOCKS = 264
NUM_SLOT_BLOCKS = 264
_MAX_THREADS = 512  # of a block with one worker; four such blocks share a multiprocessor
_FEW_SMS = 48  # up to here blocks are large, each alone on its multiprocessor
_WORKERS, _WORKER_THREADS = 8, 128  # of such a block
# A multiprocessor has 227 KiB for a block; what blocks with several workers may take of it.
_MAX_SHARED_BYTES, _WORKERS_SHARED_BYTES = 227 << 10, 200 << 10
_LAUNCH = 65536  # kernels/abi/params.h, kLaunch
_FAULT_BYTES = 64  # kernels/abi/params.h, Fault
_NO_REGIONS = ("signals", "device_state")  # lines of the plan that lie elsewhere


def _up(value: int, step: int) -> int:
    """value, or the next multiple of step."""
    return -(-value // step) * step


def num_threads(row_bytes: int) -> int:
    """Threads of a worker for rows of 16-byte pieces: as few rounds as fit, equally full.

    For example rows of 7168 bytes: 448 pieces, 448 threads, one round.
    """
    pieces = row_bytes // 16
    rounds = -(-pieces // _MAX_THREADS)
    return max(128, _up(-(-pieces // rounds), 32))


class LaunchShape(NamedTuple):
    """Threads of a worker (one token at a time), workers of a block, blocks of a multiprocessor."""

    threads: int
    workers: int
    blocks_per_sm: int

    def macros(self, shared_bytes: int) -> dict[str, int]:
        return {
            "MOE_P2P_BLOCK_THREADS": self.threads * self.workers,
            "MOE_P2P_SEND_WORKERS": self.workers,
            "MOE_P2P_RECV_WORKERS": self.workers,
            "MOE_P2P_BLOCKS_PER_SM": self.blocks_per_sm,
            "MOE_P2P_SHARED_BYTES": shared_bytes,
        }


def launch_macros(
    row_bytes: int, num_sms: int | None, shared_bytes: Callable[[int, int], int]
) -> dict[str, int]:
    """How a kernel divides its blocks. shared_bytes(threads, workers): what a block then needs.

    One large worker hides the latency of one token. Several small ones keep more tokens under way
    where blocks are few.
    """
    one = LaunchShape(num_threads(row_bytes), 1, 2)
    shapes = [one]
    if num_sms is not None and num_sms <= _FEW_SMS:
        few = (LaunchShape(_WORKER_THREADS, workers, 1) for workers in (_WORKERS, 4, 2))
        shapes = [
            *(f for f in few if shared_bytes(f.threads, f.workers) <= _WORKERS_SHARED_BYTES),
            one,
        ]
    best = shapes[0]
    needed = shared_bytes(best.threads, best.workers)
    errors.require(
        needed <= _MAX_SHARED_BYTES,
        f"a block needs {needed} bytes of shared memory, a GPU has {_MAX_SHARED_BYTES}: choose a "
        "smaller chunk_tokens, or fewer experts",
    )
    return best.macros(needed)


def dispatch_shared_bytes(shape: dict[str, int], threads: int, workers: int) -> int:
    """At least what dispatch.cu asks for; SendShared and RecvShared there are compared with it."""
    world, local = shape["MOE_P2P_WORLD_SIZE"], shape["MOE_P2P_RANKS_PER_NODE"]
    experts, topk = shape["MOE_P2P_NUM_EXPERTS"], shape["MOE_P2P_TOPK"]
    columns = local + world // local
    head = _up(8 + 10 * topk + 2 * (topk % 2), 128)
    scales = 4 * _up(shape["MOE_P2P_HIDDEN_DIM"], 128) // 128
    words = 4 * columns * (_up(shape["MOE_P2P_CHUNK_TOKENS"], 32) // 32)
    send = words + workers * (4 * experts + head + scales + 16 * columns + 256)
    table = 4 * shape["MOE_P2P_MAX_LOCAL_EXPERTS"] * (world + 2) + 8 * world
    return max(send, table + workers * (8 * topk + threads + 256)) + 1024


def combine_shared_bytes(shape: dict[str, int], threads: int, workers: int) -> int:
    """The same for combine.cu: rows, weights, counts and ranks of a batch, or addresses of rows."""
    world, local = shape["MOE_P2P_WORLD_SIZE"], shape["MOE_P2P_RANKS_PER_NODE"]
    return workers * (threads * 20 + 8 * (local + world // local) + 512) + 1024


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
        "MOE_P2P_UNIFORM_EXPERTS": int(config.expert_rank is None),
    }


def dispatch_macros(
    shape: dict[str, int], x_dtype: torch.dtype, *, quantize: bool, num_sms: int | None = None
) -> dict[str, int]:
    row_bytes = shape["MOE_P2P_HIDDEN_DIM"] * (1 if quantize else x_dtype.itemsize)
    kind = {"MOE_P2P_X_DTYPE": _CODES[x_dtype], "MOE_P2P_QUANTIZE": int(quantize)}
    shared = functools.partial(dispatch_shared_bytes, shape)
    return shape | kind | launch_macros(row_bytes, num_sms, shared)


def combine_macros(
    shape: dict[str, int],
    y_dtype: torch.dtype,
    out_dtype: torch.dtype,
    *,
    num_sms: int | None = None,
) -> dict[str, int]:
    row_bytes = shape["MOE_P2P_HIDDEN_DIM"] * max(y_dtype.itemsize, out_dtype.itemsize)
    kind = {"MOE_P2P_Y_DTYPE": _CODES[y_dtype], "MOE_P2P_OUT_DTYPE": _CODES[out_dtype]}
    shared = functools.partial(combine_shared_bytes, shape)
    return shape | kind | launch_macros(row_bytes, num_sms, shared)


def variants() -> Iterator[tuple[str, dict[str, int]]]:
    """(source, macros) of kernels that must compile: every type, and shapes at the edges."""
    from moe_p2p.config import AllToAllConfig  # the configuration imports the ops

    def shape(world_size: int, local: int | None = None, **fields: Any) -> dict[str, int]:
        config = AllToAllConfig(**fields)
        return shape_macros(config, world_size=world_size, ranks_per_node=local or world_size)

    job: dict[str, Any] = {"num_experts": 256, "hidden_dim": 7168, "topk": 8, "max_tokens": 128}
    usual = shape(8, **job)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, quantize in [
        *itertools.product(floats, (False, True)),
        (torch.float8_e4m3fn, False),
    ]:
        yield "dispatch.cu", dispatch_macros(usual, dtype, quantize=quantize)
    for y_dtype, out_dtype in itertools.product(floats, (torch.bfloat16, torch.float32)):
        yield "combine.cu", combine_macros(usual, y_dtype, out_dtype)
    uneven = tuple(min(expert // 50, 7) for expert in range(256))
    others = [
        (shape(1, num_experts=1, hidden_dim=16, topk=1, max_tokens=1), None),
        (shape(3, num_experts=1023, hidden_dim=3584, topk=32, max_tokens=300), None),
        (shape(8, **job | {"max_tokens": 2048, "chunk_tokens": 2048}), None),
        (shape(8, expert_rank=uneven, **job), None),
        (shape(8, 4, **job), None),
        (shape(8, 2, **job), 8),
        (shape(4, 1, **job | {"topk": 1}), None),
        (shape(64, 8, **job), 24),
        (usual, 24),
    ]
    for other, num_sms in others:
        yield "dispatch.cu", dispatch_macros(other, torch.bfloat16, quantize=True, num_sms=num_sms)
        yield (
            "combine.cu",
            combine_macros(other, torch.bfloat16, torch.bfloat16, num_sms=num_sms),
        )


class Partners(NamedTuple):
    """The ranks with this local index on the other nodes, where they are on this host."""

    node: int
    num_nodes: int
    key: str


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
        partners: Partners | None,
        exchange: Callable[[bytes], list[bytes]] | None,
        deadline: float,
    ) -> None:
        """key: of this node's exchange of file descriptors; `partners`, of that with them.

        exchange: carries bytes among the ranks of this node; memory is then shared by fabric
            handle.
        """
        self._comm, self._device, self._num_sms = comm, device, config.num_sms
        self._shape = shape_macros(config, world_size=world_size, ranks_per_node=ranks_per_node)
        self._ready: set[tuple[str, torch.dtype, object]] = set()
        self._undo, self._signals = ExitStack(), ExitStack()
        plan = config.plan(world_size=world_size, ranks_per_node=ranks_per_node)
        try:
            memory = self._undo.enter_context(
                share_node_memory(
                    rank % ranks_per_node,
                    ranks_per_node,
                    key=key,
                    device=device,
                    size_bytes=sum(s for name, s in plan.items() if name not in _NO_REGIONS),
                    deadline=deadline,
                    exchange=exchange,
                )
            )
            peers = [0] * (world_size // ranks_per_node)
            if partners is not None:
                windows = share_memory(
                    memory.own,
                    partners.node,
                    partners.num_nodes,
                    key=partners.key,
                    deadline=deadline,
                )
                peers = self._undo.enter_context(windows).addresses
            self._use(config, world_size, plan["device_state"], memory.addresses, peers)
        except BaseException:
            self._undo.close()
            raise

    def _use(
        self,
        config: AllToAllConfig,
        world_size: int,
        state_bytes: int,
        addresses: list[int],
        peers: list[int],
    ) -> None:
        on_device = torch.device("cuda", self._device)
        owners = config.expert_owners(world_size)
        local = [owners[:expert].count(owner) for expert, owner in enumerate(owners)]
        self._state = torch.zeros(state_bytes // 8, dtype=torch.int64, device=on_device)
        self._owners = torch.tensor(owners, dtype=torch.int32, device=on_device)
        self._local = torch.tensor(local, dtype=torch.int32, device=on_device)
        self._fault = torch.zeros(_FAULT_BYTES, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize(self._device)
        call(
            _ops.all_to_all_use_device.default,
            self._comm,
            self._device,
            addresses,
            peers,
            self._state.data_ptr(),
            self._owners.data_ptr(),
            self._local.data_ptr(),
            self._fault.data_ptr(),
            self._fault.data_ptr(),  # one address on both sides: pinned by torch
            self._num_sms or 0,
        )

    def use_signals(self) -> None:
        """After the communicator is connected: lets the GPU see the signal memory of the node."""
        *hosts, size = call(_ops.all_to_all_signals.default, self._comm)
        pinned = [self._signals.enter_context(PinnedPages(self._device, at, size)) for at in hosts]
        addresses = [pages.device_address for pages in pinned]
        call(_ops.all_to_all_use_signals.default, self._comm, addresses)

    def prepare(self, config: AllToAllConfig) -> None:
        """All kernels of the types that the configuration names, and of their gradients."""
        widest = config.widest_combine_dtype
        for dtype in dict.fromkeys((config.dtype, widest)):
            self.prepare_dispatch(dtype, quantize=False)
            if dtype != torch.float8_e4m3fn:
                self.prepare_combine(dtype, dtype)
        if config.dtype != torch.float8_e4m3fn and config.hidden_dim % 16 == 0:
            self.prepare_dispatch(config.dtype, quantize=True)

    def prepare_dispatch(self, x_dtype: torch.dtype, *, quantize: bool) -> None:
        """Compiles and hands over the kernel of such a dispatch; at once when that was done."""
        if ("dispatch", x_dtype, quantize) in self._ready:
            return
        hidden = self._shape["MOE_P2P_HIDDEN_DIM"]
        errors.require(
            not quantize or hidden % 16 == 0,
            f"hidden_dim is {hidden}, must be a multiple of 16 to quantize on a GPU",
        )
        macros = dispatch_macros(self._shape, x_dtype, quantize=quantize, num_sms=self._num_sms)
        kernel = self._load("dispatch", macros, NUM_TOKEN_BLOCKS, NUM_SLOT_BLOCKS)
        call(_ops.all_to_all_set_dispatch_kernel.default, self._comm, x_dtype, quantize, kernel)
        self._ready.add(("dispatch", x_dtype, quantize))

    def prepare_combine(self, y_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        """The same for a combine."""
        if ("combine", y_dtype, out_dtype) in self._ready:
            return
        macros = combine_macros(self._shape, y_dtype, out_dtype, num_sms=self._num_sms)
        kernel = self._load("combine", macros, NUM_SLOT_BLOCKS, NUM_TOKEN_BLOCKS)
        call(_ops.all_to_all_set_combine_kernel.default, self._comm, y_dtype, out_dtype, kernel)
        self._ready.add(("combine", y_dtype, out_dtype))

    def _load(
        self, name: str, macros: dict[str, int], max_send_blocks: int, max_recv_blocks: int
    ) -> list[int]:
        """The numbers of csrc/moe/device_grid.h, DeviceKernel."""
        threads, shared = macros["MOE_P2P_BLOCK_THREADS"], macros["MOE_P2P_SHARED_BYTES"]
        kernel = jit.load(
            self._device, f"{name}.cu", f"moe_p2p_{name}", macros, dynamic_shared_bytes=shared
        )
        return [
            kernel,
            threads,
            shared,
            macros["MOE_P2P_SEND_WORKERS"],
            macros["MOE_P2P_RECV_WORKERS"],
            max_send_blocks,
            max_recv_blocks,
            cuda_driver.max_resident_blocks(self._device, kernel, threads, shared),
        ]

    def finish(self) -> int:
        """Waits for the kernels and lets go of the signal memory, which the communicator unmaps.

        How many steps the kernels have opened, for the communicator to close with.
        """
        torch.cuda.synchronize(self._device)
        launches, *next_step = self._state[:3].tolist()  # kernels/abi/params.h, DeviceState
        self._signals.close()
        return int(next_step[launches // _LAUNCH % 2])

    def close(self) -> None:
        """Unmaps and frees, once the communicator is closed."""
        self._signals.close()
        self._undo.close()
