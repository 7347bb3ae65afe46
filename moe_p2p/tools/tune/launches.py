"""Launch shapes: each of both kernels of a pair is replaced by alternatives, in turns.

One communicator for each number of tokens: its op takes other kernels of the same calls, and a CUDA
graph keeps the kernels it was captured with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moe_p2p import AllToAll, errors
from moe_p2p.machine import jit
from moe_p2p.machine.launches import FEW_BULK_STEP, LaunchShape, TunedLaunch, few
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.gpu.kernels import DeviceSide
from moe_p2p.moe.gpu.launch_shape import job_of
from moe_p2p.moe.gpu.prepared import variants_of
from moe_p2p.moe.options import DispatchOptions
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.tune import shapes
from moe_p2p.tools.tune.world import Timed, World, best

_BF16 = torch.bfloat16
_USUAL_SMS = 132  # where there is no driver to ask


def measure(world: World) -> list[TunedLaunch]:
    """Returns the shapes that are faster than the shipped ones."""
    found = list[TunedLaunch]()
    for num_sms in (None, world.options.num_sms):
        for tokens in world.options.tokens:
            if few(num_sms) and tokens > FEW_BULK_STEP:
                continue  # they go in bulk, whose shapes follow from shared memory
            where = f"{num_sms} multiprocessors" if few(num_sms) else "all multiprocessors"
            world.say(f"launch shapes: {tokens} tokens, {where}")
            with world.communicator(tokens, num_sms=num_sms) as comm:
                found += _of_step(world, comm, tokens, num_sms)
    return found


def _of_step(world: World, comm: AllToAll, tokens: int, num_sms: int | None) -> list[TunedLaunch]:
    trial = Trial(world, comm, tokens, num_sms)
    taken = list[TunedLaunch]()
    for adds in (False, True):
        taken = trial.fastest(adds, taken)
    return taken


class Trial:
    def __init__(self, world: World, comm: AllToAll, tokens: int, num_sms: int | None) -> None:
        assert comm._device is not None
        self._world, self._tokens, self._num_sms = world, tokens, num_sms
        self._side: DeviceSide = comm._device
        quantize = world.options.hidden % 16 == 0
        self._options = DispatchOptions(layout=world.layout(tokens), quantize=quantize).number
        self._item = 1 if quantize else 2
        self._pair = world.pair(comm, tokens)
        self._right = self._result()

    def fastest(self, adds: bool, taken: list[TunedLaunch]) -> list[TunedLaunch]:
        """Returns `taken` and the fastest alternative of the kernel, if one is faster."""
        tries: dict[LaunchShape | None, list[TunedLaunch]] = {None: taken}
        for each in self._alternatives(adds):
            tries[each.shape] = [*taken, each]
        usable = {shape: tried for shape, tried in tries.items() if self._compiles(tried)}
        runs = {
            shape: Timed(self._pair, self._user(tried))
            for shape, tried in usable.items()
            if shape is None or self._is_right(tried)
        }
        medians = self._world.medians_us(runs)
        chosen = best(medians, None)
        name = "combine" if adds else "dispatch"
        gain = f", {medians[None] / medians[chosen]:.3f} times as fast: {chosen}" if chosen else ""
        self._world.say(
            f"  {name:8} {len(runs)} of {len(tries)} shapes, shipped {medians[None]:.1f} us, "
            f"best {min(medians.values()):.1f}{gain or '; the shipped one stays'}"
        )
        self._user(tries[chosen])()
        return tries[chosen]

    def _alternatives(self, adds: bool) -> list[TunedLaunch]:
        options = self._world.options
        row_bytes = options.hidden * (2 if adds else self._item)
        job = job_of(self._side._shape, adds=adds)
        least, most = shapes.class_of(self._tokens)
        made = [
            TunedLaunch(adds, few(self._num_sms), job.ranks, row_bytes, least, most, shape)
            for shape in shapes.alternatives(
                row_bytes, self._tokens, self._num_sms, job, _multiprocessors(options.device)
            )
        ]
        self._compile_ahead(made)
        return made

    def _kernels(self, tuned: list[TunedLaunch]) -> list[Kernel]:
        self._side.use_launches(tuned)
        dispatch = self._side._dispatch_kernel(_BF16, self._options)
        return [*variants_of(dispatch), *variants_of(self._side._combine_kernel(_BF16, _BF16))]

    def _compile_ahead(self, made: list[TunedLaunch]) -> None:
        """NVRTC takes seconds for each, and a core: all at once, each rank from another one on."""
        if self._world.options.device != "cuda":
            return
        arch = jit.arch_of(torch.cuda.current_device())
        kernels = [kernel for each in made for kernel in self._kernels([each])]
        first = self._world.rank * len(kernels) // self._world.options.processes
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for kernel in [*kernels[first:], *kernels[:first]]:
                threads.submit(jit.compile_only, kernel.source, kernel.macros, arch)

    def _user(self, tuned: list[TunedLaunch]) -> Callable[[], None]:
        def use() -> None:
            self._side.use_launches(tuned)
            self._side.prepare_dispatch(_BF16, self._options)
            self._side.prepare_combine(_BF16, _BF16)

        return use

    def _compiles(self, tuned: list[TunedLaunch]) -> bool:
        """Whether all ranks can compile and load it."""
        try:
            self._user(tuned)()
            problem = ""
        except errors.UnavailableError as error:
            problem = str(error)
        return not any(everyones(problem))

    def _is_right(self, tuned: list[TunedLaunch]) -> bool:
        """Sums have one fixed order, so every shape has the same results, bit for bit."""
        self._user(tuned)()
        right = bool(torch.equal(self._result(), self._right))
        if not (all_right := all(everyones(right))):
            self._world.say(f"  WRONG sums with {tuned[-1].shape}: not taken")
        return all_right

    def _result(self) -> Tensor:
        out = self._pair()
        if out.is_cuda:
            torch.cuda.synchronize()
        return out.clone()


def _multiprocessors(device: str) -> int:
    if device != "cuda":
        return _USUAL_SMS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
