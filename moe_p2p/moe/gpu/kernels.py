"""The GPU side of a communicator: its memory, and the kernels of kernels/ compiled for its shape.

Symbols: W ranks, L ranks per node, E experts, H hidden size, K top-k, M tokens per step.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.library import call, settings_text
from moe_p2p.machine import driver, jit
from moe_p2p.machine.launches import BulkSteps, TunedLaunch
from moe_p2p.moe.counts import OnDevice
from moe_p2p.moe.gpu.epoch_memory import EpochMemory, Sharers
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.gpu.launch_shape import (
    NO_BULK,
    Bulk,
    Chosen,
    bulk_combine,
    bulk_dispatch,
    choose,
    combine_shared_bytes,
    copy_blocks,
    dispatch_shared_bytes,
    goes_in_bulk,
    job_of,
    most_of_short_calls,
)
from moe_p2p.moe.gpu.lookout import Lookout
from moe_p2p.moe.gpu.memory import PinnedPages, share_memory, share_node_memory
from moe_p2p.moe.gpu.prepared import (
    Combines,
    Dispatches,
    fields_of,
    is_plain,
    missing_combine,
    missing_dispatch,
    partials_among,
    refuse_capture,
    variants_of,
)
from moe_p2p.moe.gpu.shape_macros import (
    of_any_length,
    of_arrivals,
    of_changing,
    shape_macros,
)
from moe_p2p.moe.gpu.watch import Watch
from moe_p2p.moe.layouts import LAYOUTS
from moe_p2p.moe.options import QUANTIZE, rows_of, scale_format_of, variant_of
from moe_p2p.moe.shape import layout as numbers

if TYPE_CHECKING:
    from moe_p2p.fleet.bootstrap import Bootstrap
    from moe_p2p.moe.config import AllToAllConfig

_ops = torch.ops.moe_p2p
_Given = ParamSpec("_Given")

_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
# Macros of measurements, in communicators that are made while they are set.
measuring: dict[str, int] = {}
READY, NO_MACROS = {"MOE_P2P_READY": 1}, dict[str, int]()
_STATE_WORDS = 16  # 64 bits each, of a DeviceState
_PHASES = 3
_NO_REGIONS = ("signals", "device_state")  # lines of the plan that lie elsewhere


def _with_short(
    make: Callable[Concatenate[dict[str, int], _Given], Kernel],
) -> Callable[Concatenate[dict[str, int], _Given], Kernel]:
    """Adds to a kernel that goes in bulk the one that short calls take."""

    @functools.wraps(make)
    def made(shape: dict[str, int], /, *given: _Given.args, **named: _Given.kwargs) -> Kernel:
        kernel = make(shape, *given, **named)
        most = most_of_short_calls(named.get("steps"))  # type: ignore[arg-type]
        if most == 0 or not kernel.macros["MOE_P2P_BULK"]:
            return kernel
        short = make(shape | {"MOE_P2P_CHUNK_TOKENS": most}, *given, **named)
        return kernel._replace(short=short._replace(max_tokens=most))

    return made


@_with_short
def dispatch_kernel(
    shape: dict[str, int],
    x_dtype: torch.dtype,
    *,
    quantize: bool,
    scale_format: int = 0,
    layout: int = 0,
    x_bytes: int = 0,
    num_sms: int | None = None,
    tuned: Sequence[TunedLaunch] = (),
    steps: BulkSteps | None = None,
) -> Kernel:
    """Returns the dispatch kernel, which sends tokens and receives slots.

    x_dtype: type of the caller's x. x_bytes: of a row of x that is bytes; 0: H values.
    scale_format: of the scales when `quantize` (kernels/abi/shape.h, ScaleFormat).
    layout: LayoutFacts.kernel.
    tuned: shapes that go before the shipped ones. steps: which go in bulk; None: as shipped.
    """
    if x_bytes:
        shape, x_dtype = shape | {"MOE_P2P_HIDDEN_DIM": x_bytes}, torch.float8_e4m3fn
    hidden = shape["MOE_P2P_HIDDEN_DIM"]
    row_bytes = hidden * (1 if quantize else x_dtype.itemsize)
    per_token = LAYOUTS[layout].per_token
    bulk = None
    if goes_in_bulk(shape, num_sms, steps):
        bulk = bulk_dispatch(
            shape,
            per_token=per_token,
            x_bytes=hidden * x_dtype.itemsize,
            row_bytes=row_bytes,
            quantize=quantize,
        )
    if bulk is None:
        shape = of_any_length(shape)
        shared = functools.partial(dispatch_shared_bytes, shape, per_token)
        job = job_of(shape, adds=False, per_token=per_token)
        launch = choose(row_bytes, shape["MOE_P2P_CHUNK_TOKENS"], num_sms, job, shared, tuned)
        bulk = Bulk(launch, NO_BULK, shared(launch))
    launch = bulk.launch
    macros = {
        "MOE_P2P_X_DTYPE": _CODES[x_dtype],
        "MOE_P2P_QUANTIZE": int(quantize),
        "MOE_P2P_OPAQUE_X": int(x_bytes > 0),
        "MOE_P2P_SCALE_FORMAT": scale_format,
        "MOE_P2P_LAYOUT": layout,
        "MOE_P2P_PLAIN": 0,
        "MOE_P2P_SEND_WORKERS": launch.token_workers,
        "MOE_P2P_RECV_WORKERS": launch.slot_workers,
    } | _block_macros(bulk)
    return Kernel("dispatch.cu", shape | macros, launch.token_blocks, launch.slot_blocks, 1, 1)


@_with_short
def combine_kernel(
    shape: dict[str, int],
    y_dtype: torch.dtype,
    out_dtype: torch.dtype,
    by_topk: bool = False,
    partials: int = 0,
    *,
    num_sms: int | None = None,
    tuned: Sequence[TunedLaunch] = (),
    steps: BulkSteps | None = None,
) -> Kernel:
    """Returns the combine kernel, which sends slots and receives tokens.

    by_topk: it adds in the order of top-k. partials: what travels (kernels/abi/shape.h, Partials).
    tuned, steps: as above.
    """
    row_bytes = shape["MOE_P2P_HIDDEN_DIM"] * max(y_dtype.itemsize, out_dtype.itemsize)
    bulk = None
    ready = "MOE_P2P_READY" in shape
    if goes_in_bulk(shape, num_sms, steps) and not (by_topk or partials or ready):
        bulk = bulk_combine(shape, y_item=y_dtype.itemsize, out_item=out_dtype.itemsize)
    if bulk is None:
        shape = of_any_length(shape)
        shared = functools.partial(combine_shared_bytes, shape, by_topk)
        job = job_of(shape, adds=True)
        launch = choose(row_bytes, shape["MOE_P2P_CHUNK_TOKENS"], num_sms, job, shared, tuned)
        bulk = Bulk(launch, NO_BULK, shared(launch))
    launch = bulk.launch
    macros = {
        "MOE_P2P_Y_DTYPE": _CODES[y_dtype],
        "MOE_P2P_OUT_DTYPE": _CODES[out_dtype],
        "MOE_P2P_TOPK_ORDER": int(by_topk),
        "MOE_P2P_PLAIN": 0,
        "MOE_P2P_PARTIALS": partials,
        "MOE_P2P_SEND_WORKERS": launch.slot_workers,
        "MOE_P2P_RECV_WORKERS": launch.token_workers,
    } | _block_macros(bulk)
    blocks = launch.slot_blocks, launch.token_blocks, *copy_blocks(shape | macros, launch)
    return Kernel("combine.cu", shape | macros, *blocks)


def clean_kernel(shape: dict[str, int]) -> Kernel:
    """Returns the kernel that takes masked ranks back."""
    return _one_block("clean.cu", shape)


def enter_kernel(shape: dict[str, int]) -> Kernel:
    """Returns the kernel that enters an epoch of a world that changes."""
    return _one_block("enter.cu", shape)


def alone_kernels(shape: dict[str, int]) -> list[Kernel]:
    """Returns what a communicator of this shape launches beside calls."""
    entered = shape.get("MOE_P2P_ELASTIC") or shape.get("MOE_P2P_LOST") == 2
    one_node = shape["MOE_P2P_WORLD_SIZE"] == shape["MOE_P2P_RANKS_PER_NODE"]
    cleaned = shape["MOE_P2P_MASKS"] and one_node and not shape.get("MOE_P2P_ELASTIC")
    return [enter_kernel(shape)] * bool(entered) + [clean_kernel(shape)] * bool(cleaned)


def _one_block(source: str, shape: dict[str, int]) -> Kernel:
    macros = NO_BULK | {
        "MOE_P2P_PLAIN": 0,
        "MOE_P2P_BLOCK_THREADS": 512,
        "MOE_P2P_SHARED_BYTES": 128,  # no less can be asked for
        "MOE_P2P_SEND_WORKERS": 1,
        "MOE_P2P_RECV_WORKERS": 1,
    }
    return Kernel(source, of_any_length(shape) | macros, 1, 1, 1, 1)


def _block_macros(bulk: Bulk) -> dict[str, int]:
    return bulk.macros | {
        "MOE_P2P_BLOCK_THREADS": bulk.launch.block_threads,
        "MOE_P2P_BLOCKS_PER_SM": bulk.launch.blocks_per_sm,
        "MOE_P2P_SHARED_BYTES": bulk.shared_bytes,
    }


class DeviceSide:
    """Memory and kernels of one rank on one GPU. Made by Communicator; close() after its last call.

    What a captured graph has the addresses of stays for its life: state, fault, masks, owners of
    experts. Memory that ranks share is an epoch's (`share`, `enter`).
    """

    _tuned: Sequence[TunedLaunch] = ()
    _steps: BulkSteps | None = None
    _watch: Watch | None = None

    def __init__(
        self,
        config: AllToAllConfig,
        sharers: Sharers,
        *,
        device: int,
        world_size: int,
        ranks_per_node: int,
        masks: Tensor | None,
        chosen: Chosen,
        changes: bool = False,
    ) -> None:
        """sharers: of the first epoch. masks: int32 [W] on the device, of the kernels; None:
        without masks. changes: the world changes."""
        self._config, self._device, self._num_sms = config, device, config.num_sms
        self._world_size, self.masks, self._changes = world_size, masks, changes
        partners = sharers.partners
        self._copy_blocks = 0 if partners is None else partners.copy_blocks
        self._in_place = partners is not None and partners.in_place
        self._tuned, self._steps = chosen.launches, chosen.bulk
        self._shape = shape_macros(
            config, world_size=world_size, ranks_per_node=ranks_per_node, bulk=chosen.bulk
        )
        self._shape |= measuring | ({"MOE_P2P_IN_PLACE": 1} if self._in_place else {})
        self._shape |= sharers.sharing.macros | (of_changing(config) if changes else {})
        self._ready: set[tuple[object, ...]] = set()  # keys of kernels that the op has
        self._lookout: Lookout | None = None
        self._memory: EpochMemory | None = None  # of the epoch that is
        self._plan = config.plan(world_size=world_size, ranks_per_node=ranks_per_node)
        self._make_words(self._on_device())

    def _on_device(self) -> torch.device:
        return torch.device("cuda", self._device)

    def _make_words(self, on_device: torch.device) -> None:
        owners = self._config.expert_owners(self._world_size)
        local = [owners[:expert].count(owner) for expert, owner in enumerate(owners)]
        num_words = self._plan["device_state"] // 8
        self._state = torch.zeros(num_words, dtype=torch.int64, device=on_device)
        self._owners = torch.tensor(owners, dtype=torch.int32, device=on_device)
        self._local = torch.tensor(local, dtype=torch.int32, device=on_device)
        num_words = numbers().table_bytes // 8 if self._changes else 0
        self._table = torch.zeros(num_words, dtype=torch.int64, device=on_device)
        if self.masks is not None:
            self._state[numbers().masks_word] = self.masks.data_ptr()
        stamped = (numbers().stamped_steps, 1 + _PHASES * numbers().num_stamps)
        room = stamped if "MOE_P2P_STAMPS" in self._shape else 0
        self.stamps = torch.zeros(room, dtype=torch.int64, device=on_device)
        self._state[numbers().stamps_word] = self.stamps.data_ptr()
        self.pinned = pinned = on_device.type == "cuda"  # memory of the host that kernels access
        self._fault = torch.zeros(
            numbers().fault_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned
        )
        self._beside = torch.cuda.Stream(on_device) if pinned else None  # type: ignore[no-untyped-call]
        words = torch.zeros(_STATE_WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        masks = torch.zeros(self._world_size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._seen, self._glancing = (words, masks), threading.Lock()
        self._wait()

    # --- what is an epoch's ---

    def share(
        self, comm: int, meeting: Bootstrap, sharers: Sharers, masks: Tensor | None
    ) -> EpochMemory:
        """Makes the memory of a communicator that is not connected yet, and passes it to that.

        meeting: of all its ranks. masks: of its NICs. Raises UnavailableError when the driver or
        peer access is missing, TimeoutError when a rank of the node is missing.
        """
        made = EpochMemory(comm, sharers.world, masks)
        try:
            deadline = time.monotonic() + self._config.timeout_s
            addresses, peers = self._share(made.undo, meeting, sharers, deadline)
            self._use(made, addresses, peers)
        except BaseException:
            made.close()
            raise
        self._memory = self._memory or made
        return made

    def _share(
        self, undo: ExitStack, meeting: Bootstrap, sharers: Sharers, deadline: float
    ) -> tuple[list[int], list[int]]:
        """Returns the addresses of regions by rank of the node, and by other node or 0."""
        sharing, _, partners, exchange = sharers
        memory = undo.enter_context(
            share_node_memory(
                sharing.place,
                sharing.num_places,
                key=sharing.key,
                device=self._device,
                size_bytes=self._region_bytes,
                deadline=deadline,
                meeting=meeting,
                exchange=exchange,
            )
        )
        addresses = sharing.as_ranks(memory.addresses)
        if partners is None:
            return addresses, [0] * self._num_nodes
        windows = share_memory(
            memory.own,
            partners.place,
            len(partners.nodes),
            key=partners.key,
            deadline=deadline,
            meeting=meeting,
        )
        return addresses, partners.by_node(undo.enter_context(windows).addresses)

    @property
    def _region_bytes(self) -> int:
        return sum(size for name, size in self._plan.items() if name not in _NO_REGIONS)

    @property
    def _num_nodes(self) -> int:
        return self._world_size // self._shape["MOE_P2P_RANKS_PER_NODE"]

    def _use(self, made: EpochMemory, addresses: list[int], peers: list[int]) -> None:
        index = self._state.device.index
        call(
            _ops.all_to_all_use_device.default,
            made.comm,
            settings_text(
                ordinal=-1 if index is None else index,
                data=addresses,
                peer_data=peers,
                in_place=int(self._in_place),
                state=self._state.data_ptr(),
                expert_rank=self._owners.data_ptr(),
                expert_local=self._local.data_ptr(),
                fault=self._fault.data_ptr(),
                fault_device=self._fault.data_ptr(),  # the same on both sides: pinned by torch
                num_sms=self._num_sms or 0,
                world=made.world,
                **({"table": self._table.data_ptr()} if self._changes else {}),
            ),
        )

    def use_signals(self, memory: EpochMemory) -> None:
        """Maps the node's signal memory for the GPU. Called once the communicator is connected."""
        *hosts, size = call(_ops.all_to_all_signals.default, memory.comm)
        addresses = [self._map_signals(memory.signals, host, size) for host in hosts]
        call(_ops.all_to_all_use_signals.default, memory.comm, addresses)

    def _map_signals(self, undo: ExitStack, host: int, size: int) -> int:
        return undo.enter_context(PinnedPages(self._device, host, size)).device_address

    def begin(self, memory: EpochMemory) -> None:
        """Makes it ready for calls in what may be the first epoch, but for their kernels."""
        self._memory, self._comm = memory, memory.comm  # the face's number from now on
        self._ready.clear()
        self._shape |= of_arrivals(self._comm)
        if self._changes or self._shape.get("MOE_P2P_LOST") == 2:
            op = _ops.all_to_all_set_enter_kernel.default
            call(op, self._comm, self._load(enter_kernel(self._shape)))
            call(_ops.all_to_all_enter.default, self._comm, self._comm)
            self._wait()

    def look_out(self, rank: int) -> None:
        """Begins to name ranks that kernels wait for, and to mask ranks of the node that end, where
        lost ranks are masked."""
        self._watch = Watch(
            rank,
            float(self._config.timeout_s),
            lambda: self._comm,
            self.glance,
            by_kernel=self.masks is None,
        )
        if self._shape["MOE_P2P_MASKS"] == 1 and self._shape["MOE_P2P_RANKS_PER_NODE"] > 1:
            assert self.masks is not None
            self._lookout = Lookout(self._comm, self.masks)

    def enter(self, memory: EpochMemory) -> Callable[[], None]:
        """Calls are of that epoch from here on, in the order of the current stream; between two.

        Returns what waits until kernels have left the epoch before, whose C++ object then has that
        number, and unregisters its signal memory; the caller closes both."""
        before = self._memory
        assert before is not None
        assert before.masks is not None
        with nullcontext() if self._lookout is None else self._lookout.paused():
            # The host then does not wait for writes to ranks that kernels have masked.
            before.masks.copy_(self.masks, non_blocking=True)  # type: ignore[arg-type]
            call(_ops.all_to_all_enter.default, self._comm, memory.comm)
        passed = self._mark()
        self._memory = memory

        def leave() -> None:
            passed()
            before.finish()

        return leave

    def _mark(self) -> Callable[[], None]:
        """Returns what waits for the work of the current stream so far."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def current(self) -> AbstractContextManager[object]:
        """Makes its device the current one of a thread."""
        return torch.cuda.device(self._device)

    def glance(self) -> OnDevice:
        """What the device counts. Beside its kernels: copies, on a stream of their own."""
        with self._glancing, driver.relaxed_captures(), torch.cuda.stream(self._beside):
            self._seen[0].copy_(self._state[:_STATE_WORDS], non_blocking=True)
            if self.masks is not None:
                self._seen[1].copy_(self.masks, non_blocking=True)
            if self._beside is not None:
                self._beside.synchronize()
            words, masked = self._seen[0].clone(), self._seen[1].nonzero().flatten().tolist()
        at = numbers()
        steps = words[at.next_step_word : at.next_step_word + 2]
        return OnDevice(
            kernels=int(words[at.launches_word]) // at.launch_blocks,
            next_step=int(steps.max()),
            masked=masked,
        )

    @property
    def memory(self) -> EpochMemory:
        assert self._memory is not None
        return self._memory

    @property
    def counts_lost(self) -> bool:
        """Whether sums that lack something are counted."""
        return "MOE_P2P_LOST" in self._shape

    # --- kernels ---

    def prepare(self, dispatches: Dispatches, combines: Combines) -> None:
        """Prepares the kernels of all these calls.

        They are compiled side by side: NVRTC takes seconds for each, and a core.
        """
        kernels = [self._dispatch_kernel(*each) for each in dispatches]
        self._open_all([*kernels, *(self._combine_kernel(*each) for each in combines)])
        for dispatch in dispatches:
            self.prepare_dispatch(*dispatch)
        for combine in combines:
            self.prepare_combine(*combine)

    def prepare_clean(self) -> None:
        """Prepares the kernel that takes masked ranks back; nothing where none can be."""
        if self.masks is not None and self._num_nodes == 1 and not self._changes:
            op = _ops.all_to_all_set_clean_kernel.default
            call(op, self._comm, self._load(clean_kernel(self._shape)))

    def _open_all(self, kernels: list[Kernel]) -> list[Kernel]:  # returns all their variants
        made = [variant for kernel in kernels for variant in variants_of(kernel)]
        pool = ThreadPoolExecutor(len(made), thread_name_prefix="moe_p2p.prepare")
        with nullcontext() if self._watch is None else self._watch.prepares(), pool as threads:
            list(threads.map(self._open, made))  # raises what one of them raised
        return made

    def prepare_dispatch(self, x_dtype: torch.dtype, options: int, x_bytes: int = 0) -> None:
        """Compiles this dispatch kernel and passes it to the op; does nothing if the op has it."""
        variant = variant_of(options)
        if (x_dtype, variant, x_bytes) in self._ready:
            return
        refuse_capture(missing_dispatch(x_dtype, variant))
        op = _ops.all_to_all_set_dispatch_kernel.default
        for kernel in self._open_all([self._dispatch_kernel(x_dtype, options, x_bytes)]):
            call(op, self._comm, x_dtype, variant, self._load(kernel), x_bytes, is_plain(kernel))
        self._ready.add((x_dtype, variant, x_bytes))

    def prepare_combine(
        self,
        y_dtype: torch.dtype,
        out_dtype: torch.dtype,
        by_topk: bool = False,
        partials: int = 0,
    ) -> None:
        """The same for a combine."""
        partials = partials_among(self._shape, by_topk, partials)
        if (y_dtype, out_dtype, by_topk, partials) in self._ready:
            return
        refuse_capture(missing_combine(y_dtype, out_dtype, by_topk, partials))
        op = _ops.all_to_all_set_combine_kernel.default
        wanted = self._combine_kernel(y_dtype, out_dtype, by_topk, partials)
        for kernel in self._open_all([wanted]):
            loaded = self._load(kernel)
            call(op, self._comm, y_dtype, out_dtype, loaded, by_topk, partials, is_plain(kernel))
        self._ready.add((y_dtype, out_dtype, by_topk, partials))

    def prepare_ready(
        self, y_dtype: torch.dtype, out_dtype: torch.dtype, partials: int = 0
    ) -> None:
        """The same for combines whose y is still being written (moe/ready.py)."""
        partials = partials_among(self._shape, False, partials)
        key = y_dtype, out_dtype, "ready", partials
        if key in self._ready:
            return
        errors.require(
            partials > 0 or not goes_in_bulk(self._shape, self._num_sms, self._steps),
            "ready: with num_sms in the configuration rows of such steps go in bulk, which waits "
            "for all of y; leave it out, and give num_sms in `ready`",
        )
        refuse_capture(missing_combine(y_dtype, out_dtype, False, partials))
        kernel = self._combine_kernel(y_dtype, out_dtype, False, partials, READY)
        op = _ops.all_to_all_set_combine_kernel.default
        loaded = self._load(kernel)
        call(op, self._comm, y_dtype, out_dtype, loaded, False, partials, False, True)
        self._ready.add(key)

    def prepare_arriving(self, x_dtype: torch.dtype, options: int, x_bytes: int = 0) -> None:
        """The same for the receiving halves of dispatches that raise counters (moe/ready.py)."""
        variant = variant_of(options)
        key = x_dtype, variant, x_bytes, "arriving"
        if key in self._ready:
            return
        errors.require(
            not goes_in_bulk(self._shape, self._num_sms),
            "num_sms: with num_sms in the configuration rows of such steps go in bulk, which does "
            "not count them; leave it out there",
        )
        refuse_capture(missing_dispatch(x_dtype, variant))
        kernel = self._dispatch_kernel(x_dtype, options, x_bytes, READY)
        op = _ops.all_to_all_set_dispatch_kernel.default
        call(op, self._comm, x_dtype, variant, self._load(kernel), x_bytes, False, True)
        self._ready.add(key)

    def _dispatch_kernel(
        self,
        x_dtype: torch.dtype,
        options: int,
        x_bytes: int = 0,
        macros: dict[str, int] = NO_MACROS,
    ) -> Kernel:
        variant = variant_of(options)
        hidden, quantize = self._shape["MOE_P2P_HIDDEN_DIM"], bool(variant & QUANTIZE)
        errors.require(
            not quantize or hidden % 16 == 0,
            f"hidden_dim is {hidden}, must be a multiple of 16 to quantize on a GPU",
        )
        return dispatch_kernel(
            self._shape | macros,
            x_dtype,
            quantize=quantize,
            scale_format=scale_format_of(variant),
            layout=rows_of(variant).kernel,
            x_bytes=x_bytes,
            num_sms=self._num_sms,
            tuned=self._tuned,
            steps=self._steps,
        )

    def _combine_kernel(
        self,
        y_dtype: torch.dtype,
        out_dtype: torch.dtype,
        by_topk: bool = False,
        partials: int = 0,
        macros: dict[str, int] = NO_MACROS,
    ) -> Kernel:
        partials = partials_among(self._shape, by_topk, partials)
        more: dict[str, Any] = {"num_sms": self._num_sms, "tuned": self._tuned}
        more["steps"] = self._steps
        return combine_kernel(self._shape | macros, y_dtype, out_dtype, by_topk, partials, **more)

    def use_launches(self, tuned: Sequence[TunedLaunch]) -> None:
        """Kernels prepared from now on have these shapes, where they fit; for `tune`."""
        self._tuned = tuned
        self._ready.clear()

    def _load(self, kernel: Kernel) -> str:
        """Returns the fields of DeviceKernel (csrc/moe/device/grid.h) as settings."""
        return fields_of(kernel, *self._open(kernel))

    def _open(self, kernel: Kernel) -> tuple[int, int]:
        """Returns a CUfunction, and how many of its blocks fit on the device at once."""
        macros, entry = kernel.macros, kernel.entry
        threads, shared = macros["MOE_P2P_BLOCK_THREADS"], macros["MOE_P2P_SHARED_BYTES"]
        function = jit.load(self._device, kernel.source, entry, macros, dynamic_shared_bytes=shared)
        resident = driver.max_resident_blocks(self._device, function, threads, shared)
        return function, resident - self._copy_blocks

    def _wait(self) -> None:
        """Waits for all work of the device."""
        torch.cuda.synchronize(self._device)

    def finish(self) -> None:
        """Waits for the kernels and unregisters the signal memory before it is unmapped."""
        try:
            self._wait()
        finally:
            if self._watch is not None:
                self._watch.close()
            if self._lookout is not None:
                self._lookout.close()
        if self._memory is None:
            return
        if self.masks is not None:  # the host then does not wait for writes to masked ranks
            assert self._memory.masks is not None
            self._memory.masks.copy_(self.masks)
        self._memory.finish()

    def close(self) -> None:
        """Unmaps and frees. Called once the communicator is closed."""
        if self._memory is not None:
            self._memory.close()
