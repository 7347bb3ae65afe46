"""What goes wrong on a GPU is reported in time, and the device's context stays usable.

Ranks are threads that share one GPU but where one of them is killed; each test would hang without a
deadline somewhere.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_p2p
from moe_p2p import AllToAll, DispatchOptions
from tests.gpu.test_gpu import call
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import HIDDEN_DIM, LATER_S, MAX_TOKENS, SOON_S, World
from tests.support.ranks import DiedError, Rank

pytestmark = pytest.mark.gpu

IN_TIME_S = 60.0  # until their error is reported, on a machine with much else to do


def settle(comm: AllToAll) -> str:
    """Waits for what was launched; returns the error text, if any."""
    if comm.config.on_gpu:
        torch.cuda.current_stream().synchronize()
    return comm.broken


def error_of(comm: AllToAll, launch: Callable[[], Any]) -> str:
    """launch() gives an error, itself or what it launched, and every later call the same one."""
    try:
        launch()
        text = settle(comm)
    except moe_p2p.MoeP2pError as error:
        text = str(error)
    assert text, "no error came"
    tokens = cases.make_tokens(0, 0, 1, num_experts=comm.config.num_experts, hidden_dim=HIDDEN_DIM)
    given = cases.on_device(comm, tokens.x), cases.on_device(comm, tokens.topk_idx)
    with pytest.raises(moe_p2p.MoeP2pError) as again:
        comm.dispatch(*given)
    assert comm.broken in str(again.value)
    return text


def absent(rank: Rank, world: World, wanted: list[Wanted]) -> str:
    lost = world.ranks - 1
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        cases.run_step(comm, wanted[0])
        text = ""
        if rank.rank != lost:
            arguments = cases.dispatch_arguments(comm, wanted[1])
            began = time.monotonic()
            text = error_of(comm, lambda: comm.dispatch(**arguments))
            assert time.monotonic() - began < IN_TIME_S
        gpu_ranks.meet(rank, "reported")  # a rank that closes would be noticed sooner
        gpu_ranks.assert_device_usable()
        return text


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2), (3, 3)))
def test_a_rank_that_does_not_come_is_named(world: World) -> None:
    texts = gpu_ranks.run(world, absent, [call(world, 0), call(world, 2)])[:-1]
    assert any(f"rank {world.ranks - 1}" in text for text in texts), texts
    for text in texts:
        assert f"rank {world.ranks - 1}" in text or "gave up" in text, texts


def run_until_killed(rank: Rank, world: World, num_steps: int) -> tuple[float, str]:
    comm = gpu_ranks.make(rank, world, timeout_s=LATER_S)
    for seed in range(num_steps):
        counts = random.Random(seed).choices(range(MAX_TOKENS + 1), k=world.ranks)
        cases.run_step(comm, call(world, seed, counts=counts))
    arguments = cases.dispatch_arguments(comm, call(world, 0))
    gpu_ranks.meet(rank, "ready")
    comm.dispatch(**arguments)
    if rank.rank == world.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()

    def more() -> None:
        # The lost rank's last dispatch may have got through, or not.
        for _ in range(3):
            comm.dispatch(**arguments | {"options": DispatchOptions(solo=True)})
            settle(comm)

    text = error_of(comm, more)
    took = time.monotonic() - began
    gpu_ranks.assert_device_usable()
    comm.close()
    # A new communicator of a rank alone works: what was lost is not the context.
    alone = World(1, 1)
    with gpu_ranks.make(Rank(0, 1, dist.HashStore()), alone) as comm:
        cases.run_step(comm, call(alone, 0))
    return took, text


def run_with_a_killed_rank(world: World, num_steps: int) -> None:
    lost = world.ranks - 1
    results = gpu_ranks.run(world, run_until_killed, num_steps, processes=True, return_errors=True)
    assert isinstance(results[lost], DiedError), results
    texts = results[:lost]
    assert all(isinstance(text, tuple) for text in texts), texts
    for took, text in texts:
        assert took < IN_TIME_S, text
        assert f"rank {lost}" in text or "gave up" in text, texts
    assert any(f"rank {lost}" in text for _, text in texts), texts


# Without a device for each, processes take turns on one.
@pytest.mark.parametrize(
    "world", gpu_ranks.worlds((2, 2), (2, 1)) + gpu_ranks.worlds((4, 2), devices=True)
)
def test_a_process_that_is_killed_within_a_step(world: World) -> None:
    run_with_a_killed_rank(world, 3)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4), (4, 2), (8, 8), devices=True))
def test_many_steps_of_changing_counts_before_one_is_killed(world: World) -> None:
    run_with_a_killed_rank(world, 200)


def failing_nic(rank: Rank, world: World, wanted: list[Wanted]) -> str:
    # One write for each NIC and phase: the third is the dispatch of the second step.
    with gpu_ranks.make(rank, world, timeout_s=SOON_S, transport_settings="fail_nth=3") as comm:

        def until_it_fails() -> None:
            for step in wanted:
                comm.dispatch(**cases.dispatch_arguments(comm, step, solo=True))
                if settle(comm):
                    return

        text = error_of(comm, until_it_fails)
        gpu_ranks.meet(rank, "reported")
        gpu_ranks.assert_device_usable()
        return text


def test_a_failing_nic_names_the_peer() -> None:
    world = World(2, 1)
    texts = gpu_ranks.run(world, failing_nic, [call(world, seed) for seed in range(6)])
    assert any("failed" in s and "transport" in s for s in texts), texts
    for rank, text in enumerate(texts):
        assert f"rank {1 - rank}" in text, texts


# --- calls that cannot be right: rank 0 makes them, the others make good ones ---


def bad_expert(arguments: dict[str, Any]) -> None:
    arguments["topk_idx"][3, 1] = 4000


def negative_expert(arguments: dict[str, Any]) -> None:
    arguments["topk_idx"][0, 2] = -7


def expert_twice(arguments: dict[str, Any]) -> None:
    arguments["topk_idx"][3] = torch.tensor([5, -1, 5])


def too_many_tokens(arguments: dict[str, Any]) -> None:
    arguments["num_tokens"] = torch.tensor(13)


def negative_count(arguments: dict[str, Any]) -> None:
    arguments["num_tokens"] = torch.tensor([-1], dtype=torch.int32)


def little_capacity(arguments: dict[str, Any]) -> None:
    arguments["capacity"] = 1


def other_type(arguments: dict[str, Any]) -> None:
    arguments["x"] = arguments["x"].half()


def other_layout(arguments: dict[str, Any]) -> None:
    arguments["layout"] = "padded" if arguments["layout"] == "by_rank" else "by_rank"


def a_smaller_call(arguments: dict[str, Any]) -> None:
    arguments |= {name: arguments[name][:2] for name in ("x", "topk_idx")}
    arguments["max_tokens"] = 2


def another_bound(arguments: dict[str, Any]) -> None:
    """All slots would fit."""
    a_smaller_call(arguments)
    arguments["max_tokens"] = gpu_ranks.MAX_TOKENS - 1


BAD: dict[str, tuple[Callable[[dict[str, Any]], None], type[Exception], str]] = {
    "expert too large": (bad_expert, moe_p2p.InvalidArgumentError, "expert 4000"),
    "expert too small": (negative_expert, moe_p2p.InvalidArgumentError, "expert -7"),
    "expert twice": (
        expert_twice,
        moe_p2p.InvalidArgumentError,
        "token 3 names expert 5 twice",
    ),
    "more tokens than rows": (too_many_tokens, moe_p2p.InvalidArgumentError, "num_tokens is 13"),
    "fewer than no tokens": (negative_count, moe_p2p.InvalidArgumentError, "num_tokens is -1"),
    "capacity too small": (little_capacity, moe_p2p.ResourceExhaustedError, "capacity is 1"),
    "another type": (other_type, moe_p2p.ProtocolError, "all ranks must make the same calls"),
    "another layout": (other_layout, moe_p2p.ProtocolError, "all ranks must make the same calls"),
    "another max_tokens": (a_smaller_call, moe_p2p.ProtocolError, "'s call is "),
    "another max_tokens of few tokens": (another_bound, moe_p2p.ProtocolError, "'s call is "),
}


def bad_call(
    rank: Rank, world: World, name: str, wanted: Wanted, layout: str
) -> tuple[str, type[Exception]]:
    change, _, _ = BAD[name]
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        mine = wanted.tokens[rank.rank]
        arguments: dict[str, Any] = {"x": mine.x, "topk_idx": mine.topk_idx.clone()}
        arguments["layout"] = layout
        if rank.rank == 0:
            change(arguments)
        arguments = {name: cases.on_device(comm, value) for name, value in arguments.items()}
        if comm._device is not None:
            variant = DispatchOptions(layout=arguments["layout"]).number
            comm._device.prepare_dispatch(arguments["x"].dtype, variant)
        gpu_ranks.meet(rank, "prepared")
        try:
            comm.dispatch(**arguments)
            settle(comm)
            comm.dispatch(**arguments)
        except moe_p2p.MoeP2pError as error:
            result = str(error), type(error)
        else:
            result = settle(comm), type(None)
        settle(comm)
        gpu_ranks.meet(rank, "reported")
        gpu_ranks.assert_device_usable()
        return result


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    ("world", "layout"),
    [(World(2, 2), "padded"), (World(2, 1), "padded"), (World(2, 1), "by_rank")],
    ids=str,
)
def test_a_bad_call_gives_a_typed_error(world: World, layout: str, name: str) -> None:
    wanted = call(world, 2)
    results = gpu_ranks.run(world, bad_call, name, wanted, layout)
    _, kind, match = BAD[name]
    # A wrong header is seen by whoever reads it; the rest by the rank that makes the call.
    seen_by = results if name.startswith("another") else results[:1]
    assert any(match in text and issubclass(got, kind) for text, got in seen_by), results


def in_isolation(rank: Rank, world: World, wanted: list[Wanted], settings: str) -> str:
    with gpu_ranks.make(rank, world, timeout_s=SOON_S, transport_settings=settings) as comm:
        try:
            for step in wanted:
                cases.run_step(comm, step)
        except (AssertionError, moe_p2p.MoeP2pError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            settle(comm)
    return ""


def early_immediates(world: World, settings: str) -> list[str]:
    gpu_ranks.compile_ahead([(world, {})])  # or the deadline would contain it
    wanted = [call(world, seed) for seed in range(10)]
    texts: list[str] = gpu_ranks.run_apart(world, in_isolation, wanted, settings, deadline_s=50.0)
    return texts


def test_an_immediate_before_its_payload_is_noticed() -> None:
    """The software NIC has settings for it: tests that pass all the same would see nothing."""
    world = World(2, 1)
    assert not any(early_immediates(world, "seed=1"))
    seeds = range(1, 9)
    assert any(any(early_immediates(world, f"seed={seed},mutate=early_imm")) for seed in seeds)
