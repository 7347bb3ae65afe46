"""One rank of `benchmarks/turns.py host`: a process that imports the package of one tree.

It obeys commands, one JSON object a line on its standard input, and answers each with one line. All
ranks of a tree get the same commands, so they make the same calls. Only names that trees of other
commits have too are imported from the package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.distributed as dist
from bench.exchanges import V2, Exchange, LowLatency, Normal
from cores import Cores, choose
from obeying import module_of, obey, take_output
from torch import Tensor

DEADLINE_S = 60.0
PAIRS = 40  # of one block: their launches fit into a stream's queue, so no launch waits
BLOCKS = 7  # of one measurement, of which the first warms up
FLUSH_BYTES = 256 << 20  # leaves nothing of a call in a GPU's caches
SEED = 5
NUM_SMS = 24
CALLING = tuple(
    f"moe_p2p.{at}{name}" for at in ("moe.", "") for name in ("all_to_all", "bare", "pool")
)  # of any tree
OPS = (
    *("dispatch", "dispatch_inference", "dispatch_eager", "dispatch_counted"),
    *("dispatch_send", "dispatch_recv", "all_to_all_check"),
    *("combine", "combine_inference", "combine_plain", "combine_out"),
    *("combine_send", "combine_recv", "release"),
    *("count_routing", "share_counts", "all_to_all_agree"),
)
Call = Callable[[], object]


class Place:
    """A rank, its inputs, and what its calls need. Communicators are made at their first call."""

    def __init__(self, rank: int, world: int, key: str) -> None:
        from moe_p2p.deep_ep import Buffer  # first: of a tree that is not built, this fails

        self.rank, self.world = rank, world
        self.on_gpu = torch.cuda.is_available()
        self.device = "cuda" if self.on_gpu else "cpu"
        self.shape = (7168, 256, 8) if self.on_gpu else (128, 64, 8)  # H, E, K
        self.file = Path(tempfile.gettempdir()) / key
        store = dist.FileStore(str(self.file), world)
        alone = self.on_gpu and torch.cuda.device_count() >= world
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if alone else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        self.one = torch.zeros(1, device=self.device if alone else "cpu")
        self.flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1 << 20, dtype=torch.uint8)
        self.flush = self.flush.to(self.device)
        self.buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
        Buffer.num_sms = NUM_SMS

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], topk_idx, topk_weights [T, K], the same in every run."""
        hidden, experts, topk = self.shape
        torch.manual_seed(SEED + self.rank)
        x = torch.randn(tokens, hidden).bfloat16()
        chosen = torch.rand(tokens, experts).topk(topk).indices
        return x.to(self.device), chosen.to(self.device), torch.rand(tokens, topk).to(self.device)

    def rows(self, *lead: int) -> Tensor:
        return torch.zeros(*lead, self.shape[0], dtype=torch.bfloat16, device=self.device)

    def in_fp8(self, x: Tensor) -> Any:
        """As DeepEP's callers give it; on CPUs x itself."""
        if not self.on_gpu:
            return x
        scales = torch.ones(len(x), self.shape[0] // 128, device=x.device)
        return x.to(torch.float8_e4m3fn), scales

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


# --- pairs, each a dispatch and its combine ---


def all_to_all(place: Place, tokens: int) -> Call:
    from moe_p2p import AllToAll, AllToAllConfig

    hidden, experts, topk = place.shape
    config = AllToAllConfig(
        num_experts=experts, hidden_dim=hidden, topk=topk, max_tokens=tokens, device=place.device
    )
    made, (x, idx, weights) = AllToAll(None, config), place.inputs(tokens)
    y = place.rows(experts // place.world, place.world * tokens)

    def pair() -> object:
        return made.combine(y, made.dispatch(x, idx, weights, quantize=True))

    return pair


def _pair(exchange: Exchange, y: Tensor) -> Call:
    def pair() -> object:
        exchange.dispatch()
        return exchange.combine(y)

    return pair


def low_latency(place: Place, tokens: int) -> Call:
    experts = place.shape[1]
    y = place.rows(experts // place.world, place.world * tokens)
    return _pair(LowLatency(place.buffer, *place.inputs(tokens), experts), y)


def _by_rank(place: Place, tokens: int, kind: Any, buffer: Any, **how: Any) -> Call:
    x, idx, weights = place.inputs(tokens)
    exchange = kind(buffer, place.in_fp8(x), idx, weights, place.shape[1], **how)
    exchange.dispatch()
    return _pair(exchange, place.rows(len(exchange.rows)))


def normal_counted(place: Place, tokens: int) -> Call:
    """Layout, dispatch that waits for the counts, combine."""
    return _by_rank(place, tokens, Normal, place.buffer)


def normal_cached(place: Place, tokens: int) -> Call:
    return _by_rank(place, tokens, Normal, place.buffer, cached=True)


def v2(place: Place, tokens: int, sync: bool = False) -> Call:
    from moe_p2p.deep_ep import ElasticBuffer

    buffer = ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=tokens,
        hidden=place.shape[0],
        num_topk=place.shape[2],
        explicitly_destroy=True,
    )
    return _by_rank(place, tokens, V2, buffer, num_sms=NUM_SMS, sync=sync)


def v2_counted(place: Place, tokens: int) -> Call:
    return v2(place, tokens, sync=True)


def megatron(place: Place, tokens: int) -> Call:
    """Dispatch of a training step and its combine as integrations/moe/megatron.py makes them."""
    from moe_p2p import DispatchOptions

    pools = module_of("moe.pool", "pool")
    counts = module_of("moe.row_counts", "row_counts")

    hidden, experts, topk = place.shape
    pool, sizes = pools.AllToAllPool(dist.group.WORLD), counts.SizeExchange()
    options = DispatchOptions(layout="grouped", solo=True)
    config = pools.config_of(
        num_experts=experts, hidden_dim=hidden, topk=topk, max_tokens=1 << 20, device=place.device
    )
    made, (x, idx, weights) = pool.get(config), place.inputs(tokens)

    def pair() -> object:
        found = sizes.ask(made, idx)
        got = made.dispatch(
            x, idx, weights, options=options, max_tokens=found.max_tokens, capacity=found.capacity
        )
        return made.combine(got.x, got, weighted=False)

    return pair


CALLS = {
    each.__name__: each
    for each in (
        *(all_to_all, low_latency, normal_counted, normal_cached, v2, v2_counted, megatron),
    )
}


# --- measurements ---


@contextlib.contextmanager
def watched() -> Iterator[tuple[list[str], list[Any]]]:
    """Collects names and results of the package's ops while it is open."""
    names, results = list[str](), list[Any]()
    before: list[tuple[Any, Any]] = []
    for name in OPS:
        overload = getattr(getattr(torch.ops.moe_p2p, name, None), "default", None)
        if overload is None:  # of another commit
            continue
        before.append((overload, overload._op))

        def call(*given: Any, name: str = name, real: Any = overload._op, **more: Any) -> Any:
            names.append(name)
            results.append(real(*given, **more))
            return results[-1]

        overload._op = call
    modules = [vars(sys.modules[name]) for name in CALLING if name in sys.modules]
    direct = [{n: each for n, each in module.items() if is_direct(each)} for module in modules]

    def counted(real: Any) -> Call:
        def call(*given: Any) -> Any:
            before = len(names)
            made = real(*given)
            declined = made is None and not isinstance(real.__self__, torch._ops.OpOverload)
            if len(names) == before and not declined:  # else its op is counted
                names.append(real.__name__)
                results.append(made)
            return made

        return call

    for module, calls in zip(modules, direct, strict=True):
        module.update({name: counted(each) for name, each in calls.items()})
    try:
        yield names, results
    finally:
        for module, calls in zip(modules, direct, strict=True):
            module.update(calls)
        for overload, real in before:
            overload._op = real


def is_direct(call: Any) -> bool:
    """Whether it stands for an op (moe_p2p/moe/direct.py): of older trees, it holds that."""
    held = getattr(call, "__self__", None)
    return isinstance(call, BuiltinFunctionType) and isinstance(
        held, (torch._ops.OpOverload, tuple)
    )


def allocations_of(results: Any) -> dict[int, tuple[int, str]]:
    """Bytes and device of each memory that tensors of the results lie in, by address."""
    found: dict[int, tuple[int, str]] = {}
    if isinstance(results, Tensor):
        storage = results.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes(), results.device.type
    elif isinstance(results, (list, tuple)):
        for each in results:
            found |= allocations_of(each)
    return found


def frames_of(pair: Call) -> int:
    """Python functions that one pair enters."""
    entered = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        pair()
    finally:
        sys.setprofile(None)
    return entered


class Worker:
    def __init__(self, place: Place, cores: Cores) -> None:
        self._place = place
        self._cores = cores
        self._made: dict[tuple[str, int], Call] = {}
        self._floors: dict[tuple[str, int], Call] = {}

    def where(self) -> str:
        """Where host times are measured."""
        return self._cores.text

    def make(self, calls: str, tokens: int) -> dict[str, int]:
        """Returns how many ops, allocations and Python functions a pair has."""
        key = calls, tokens
        with torch.no_grad():
            pair = self._made[key] = CALLS[calls](self._place, tokens)
            pair()
            pair()
            with watched() as (names, results):
                pair()
            made = allocations_of(results)
            results.clear()
            frames = frames_of(pair)
        self._place.wait()
        self._floors[key] = self._floor(len(names), list(made.values()))
        return {"ops": len(names), "allocations": len(made), "frames": frames}

    def _floor(self, num_ops: int, allocations: list[tuple[int, str]]) -> Call:
        """The same number of ops without arguments, of allocations and of launches."""
        package, on_gpu = torch.ops.moe_p2p, self._place.on_gpu
        op = package.take_interrupt.default if hasattr(package, "take_interrupt") else None

        def pair() -> object:
            if op is None:  # of an older tree: its pairs are measured all the same
                raise RuntimeError("no floor: this tree has no op without arguments and work")
            kept = [torch.empty(n, dtype=torch.uint8, device=where) for n, where in allocations]
            for _ in range(num_ops):
                op()
                if on_gpu:
                    torch.cuda._sleep(1)
            return kept

        return pair

    def host(self, calls: str, tokens: int, way: str) -> list[float]:
        """Microseconds of the host for a pair: median of blocks, each into an empty stream.

        way: "plain", "default device" or "floor".
        """
        place, key, spent = self._place, (calls, tokens), list[float]()
        pair = self._floors[key] if way == "floor" else self._made[key]
        dist.all_reduce(torch.zeros(1, device="cpu"))
        self._cores.take()
        if way == "default device":
            torch.set_default_device(place.device)
        try:
            with torch.no_grad():
                for _ in range(BLOCKS):
                    place.wait()
                    began = time.perf_counter()
                    for _ in range(PAIRS):
                        pair()
                    spent.append(time.perf_counter() - began)
        finally:
            torch.set_default_device(None)
            self._cores.leave()
        place.wait()
        return [median(spent[1:]) / PAIRS * 1e6]

    def span(self, calls: str, tokens: int, times: int) -> list[float]:
        """Median microseconds of a pair from its begin to its end on the GPU, behind an all-reduce
        that lines the ranks up, with nothing of it in the GPU's caches. On CPUs of the host."""
        place, pair = self._place, self._made[calls, tokens]
        spans = list[float]()
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if place.on_gpu else []
            for _ in range(times)
        ]
        with torch.no_grad():
            for i in range(times):
                place.flush.zero_()
                if not place.one.is_cuda:
                    place.wait()
                dist.all_reduce(place.one)
                began = time.perf_counter()
                if place.on_gpu:
                    events[i][0].record()
                pair()
                if place.on_gpu:
                    events[i][1].record()
                spans.append((time.perf_counter() - began) * 1e6)
        place.wait()
        if place.on_gpu:
            spans = [begin.elapsed_time(end) * 1e3 for begin, end in events]
        return [float(torch.tensor(spans).median())]

    def leave(self) -> None:
        self._place.file.unlink(missing_ok=True)


def main() -> None:
    """Arguments: rank, number of ranks, key of the run."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank, world, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers_to = take_output()
    cores = choose(rank, world)
    cores.leave()  # before there are threads of torch, the driver or the package
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    obey(answers_to, functools.cache(lambda: Worker(Place(rank, world, key), cores)))


if __name__ == "__main__":
    main()
