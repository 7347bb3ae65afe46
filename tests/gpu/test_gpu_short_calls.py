"""Short calls of a communicator of long steps and few multiprocessors.

Its long calls go in bulk, its short ones through registers, in the same memory and in any order.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll
from tests.gpu.test_gpu import call, in_fp8
from tests.gpu.test_gpu_calls import two_in_flight
from tests.gpu.test_gpu_layouts import BY_RANK
from tests.gpu.test_gpu_training import PROCESSES
from tests.support import cases, emulated_gpu, gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

CHUNK, HIDDEN_DIM, LONGEST_SHORT = 1024, 16, 32
CONFIG: dict[str, Any] = {
    "hidden_dim": HIDDEN_DIM,
    "max_tokens": 2 * CHUNK,
    "chunk_tokens": CHUNK,
    "num_sms": 24,
    "extra_bytes": 0,
}
# max_tokens of calls; 0: of short ones without any token.
LENGTHS = [8, 600, LONGEST_SHORT, LONGEST_SHORT + 1, 0, CHUNK + 1]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    payloads = [Payload(torch.bfloat16), Payload(torch.float8_e4m3fn, by_rank=True)]
    gpu_ranks.compile_ahead([(World(2, 2), CONFIG), (World(4, 4), CONFIG)], payloads)


def of_length(world: World, length: int, seed: int, *change: Any, **options: Any) -> Wanted:
    """Ranks have different numbers of tokens, one of them as many as may be."""
    counts = [length, length // 2, 0, max(length - 1, 0)]
    counts = counts[seed % world.ranks : world.ranks] + counts[: seed % world.ranks]
    options = {"dtype": torch.bfloat16, "hidden_dim": HIDDEN_DIM, "counts": counts} | options
    return call(world, seed, *change, max_tokens=length or 8, **options)


def of_lengths(world: World, lengths: list[int]) -> list[Wanted]:
    """Every second one as DeepEP V1's normal calls are: by rank, fp8 given, solo."""
    return [
        of_length(world, length, i, in_fp8(True), solo=True, **BY_RANK)
        if i % 2
        else of_length(world, length, i, layout="grouped")
        for i, length in enumerate(lengths)
    ]


Ways = dict[int, set[int]]  # by thread: MOE_P2P_BULK of kernels that it launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Filled on an emulated GPU only."""
    ways: Ways = {}
    compiled = emulated_gpu._function

    def launch(source: str, macros: tuple[tuple[str, int], ...]) -> Any:
        if source in ("dispatch.cu", "combine.cu"):
            ways.setdefault(threading.get_ident(), set()).add(dict(macros)["MOE_P2P_BULK"])
        return compiled(source, macros)

    monkeypatch.setattr(emulated_gpu, "_function", launch)
    return ways


def assert_way(ways: Ways, step: Wanted) -> None:
    """Of what this thread has launched since it asked last."""
    if gpu_ranks.DEVICE == "cpu":
        longest = step.options["max_tokens"]
        assert ways.pop(threading.get_ident()) == {int(longest > LONGEST_SHORT)}, longest


def steps(rank: Rank, world: World, wanted: list[Wanted], config: Any, ways: Ways) -> None:
    with gpu_ranks.make(rank, world, **config) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        for step in wanted:
            cases.run_step(comm, step)
            assert_way(ways, step)


@pytest.mark.parametrize("num_sms", [4, 6, 24])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_calls_of_all_lengths_are_the_reference_bit_for_bit(
    world: World, num_sms: int, launched: Ways
) -> None:
    wanted = of_lengths(world, [*LENGTHS, *reversed(LENGTHS)])
    gpu_ranks.run(world, steps, wanted, CONFIG | {"num_sms": num_sms}, launched)


def halves(rank: Rank, world: World, pairs: list[list[Wanted]]) -> None:
    with gpu_ranks.make(rank, world, **CONFIG) as comm:
        gpu_ranks.prepare(rank, comm, pairs[0])
        for pair in pairs:
            two_in_flight(comm, pair, [])


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_halves_of_a_short_and_a_long_step_overlap(world: World) -> None:
    pairs = [
        [of_length(world, length, seed) for length in lengths]
        for seed, lengths in enumerate([(8, 300), (300, 8), (8, 8), (300, 300), (8, 300)])
    ]
    gpu_ranks.run(world, halves, pairs)


def released(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    """A dispatch whose rows nobody takes, and one that is not combined, before each step."""
    with gpu_ranks.make(rank, world, **CONFIG) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        for first, second, step in zip(wanted, wanted[1:], wanted[2:], strict=False):
            pending = comm.dispatch_send(**cases.dispatch_arguments(comm, first))
            comm.release(pending)
            comm.release(comm.dispatch(**cases.dispatch_arguments(comm, second)))
            cases.run_step(comm, step)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_released_steps_of_one_way_before_steps_of_the_other(world: World) -> None:
    lengths = [8, 300, 8, 8, 300, 300, 8, 300]
    wanted = [of_length(world, length, seed) for seed, length in enumerate(lengths)]
    gpu_ranks.run(world, released, wanted)


def gradients(comm: AllToAll, step: Wanted, max_tokens: int) -> list[torch.Tensor]:
    tokens = step.tokens[comm.rank]
    assert tokens.topk_weights is not None
    x = cases.on_device(comm, tokens.x).requires_grad_()
    weights = cases.on_device(comm, tokens.topk_weights).requires_grad_()
    idx = cases.on_device(comm, tokens.topk_idx)
    got = comm.dispatch(x, idx, weights, layout="grouped", max_tokens=max_tokens)
    out = comm.combine(got.x * 3, got)
    out.backward(x.detach())
    cases.finish(comm)
    assert x.grad is not None
    assert weights.grad is not None
    return [each.detach().cpu() for each in (out, x.grad, weights.grad)]


def trained(rank: Rank, world: World, step: Wanted) -> None:
    """Sums have one order: the same tokens have the same gradients whatever max_tokens is."""
    with gpu_ranks.make(rank, world, **CONFIG | {"dtype": torch.float32}) as comm:
        short, long, again = (gradients(comm, step, most) for most in (8, 300, 8))
        for got, bulk, same in zip(short, long, again, strict=True):
            assert got.any()
            assert torch.equal(got, bulk)
            assert torch.equal(got, same)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_gradients_are_the_same_both_ways(world: World) -> None:
    step = of_length(world, 8, 0, dtype=torch.float32)
    gpu_ranks.run(world, trained, step, processes=PROCESSES)
