"""The edges of what a configuration allows, sums that no schedule changes, bytes to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import AllToAll, AllToAllConfig, Engine, EngineConfig, errors
from moe_p2p.machine.launches import BulkSteps
from moe_p2p.moe import epoch, reference
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.shape_macros import shape_macros
from moe_p2p.moe.reference.wire import floor_bytes, wire_bytes
from moe_p2p.moe.rendezvous.agreement import Agreement
from tests.support.cases import SMALL, check_step, make, make_tokens, topology_of
from tests.support.ranks import Rank, run_threads

EDGES = [
    pytest.param({"topk": 32, "num_experts": 1024, "hidden_dim": 8}, id="most experts a token"),
    pytest.param({"topk": 1, "num_experts": 4, "hidden_dim": 8}, id="one of each, 16 bytes a row"),
    pytest.param({"topk": 12, "num_experts": 36, "hidden_dim": 136}, id="last scale block short"),
    pytest.param({"topk": 13, "num_experts": 40, "hidden_dim": 7168}, id="head of two lines"),
    pytest.param({"topk": 8, "num_experts": 896, "hidden_dim": 3584}, id="not a power of two"),
]


def edge(rank: Rank, shape: dict[str, int], quantize: bool) -> None:
    with make(rank, ranks_per_node=2, dtype=torch.bfloat16, **shape) as comm:
        for seed, counts in enumerate([(12, 0, 5, 1), (0, 0, 0, 0), (3, 12, 12, 12)]):
            tokens = [
                make_tokens(seed, r, n, dtype=torch.bfloat16, **shape) for r, n in enumerate(counts)
            ]
            check_step(comm, tokens, layout="grouped", quantize=quantize)


@pytest.mark.parametrize("shape", EDGES)
@pytest.mark.parametrize("quantize", [False, True])
def test_shapes_at_the_edges(shape: dict[str, int], quantize: bool) -> None:
    run_threads(4, edge, shape, quantize)


def sums(rank: Rank, settings: str) -> list[torch.Tensor]:
    """Combined rows of a few steps, with weights whose sums round differently in another order."""
    out = []
    with make(rank, ranks_per_node=2, dtype=torch.bfloat16, transport_settings=settings) as comm:
        for seed in range(6):
            tokens = make_tokens(seed, rank.rank, 12, dtype=torch.bfloat16)
            got = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
            y = got.x.float().mul(torch.linspace(0.1, 3, got.x.shape[1])[:, None]).bfloat16()
            out.append(comm.combine(y, got))
    return out


def test_sums_are_the_same_bits_for_every_seed_and_run() -> None:
    first = run_threads(4, sums, "")
    for settings in ("", "seed=1", "seed=2", "seed=3", "seed=99"):
        again = run_threads(4, sums, settings)
        for mine, theirs in zip(again, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), settings


WIRES = [
    pytest.param({"ranks_per_node": 2}, {}, id="2 nodes of 2"),
    pytest.param({"ranks_per_node": 1, "nics_per_rank": 3}, {}, id="4 nodes of 1, 3 NICs"),
    pytest.param({"ranks_per_node": 2, "chunk_tokens": 5}, {}, id="3 chunks a call"),
    pytest.param({"ranks_per_node": 2, "dtype": torch.bfloat16}, {"quantize": True}, id="fp8"),
]


def wire(rank: Rank, config: dict[str, Any], options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that this rank's NICs wrote, what the reference says of its tokens, and the floor."""
    expected = floor = 0
    config = dict(config)
    with Engine(EngineConfig(nics_per_rank=config.pop("nics_per_rank", 2))) as engine:
        with make(rank, engine=engine, **config) as comm:
            for seed, counts in enumerate([(12, 0, 5, 1), (0, 0, 0, 0), (3, 12, 12, 12)]):
                dtype = comm.config.dtype
                tokens = [make_tokens(seed, r, n, dtype=dtype) for r, n in enumerate(counts)]
                check_step(comm, tokens, **options)
                routing = reference.route(
                    topology_of(comm),
                    tokens,
                    max_tokens=12,
                    quantized=options.get("quantize", False),
                )
                steps = -(-12 // comm.config.step_tokens)
                counted = wire_bytes(routing, rank.rank, combine_dtype=dtype, num_steps=steps)
                least = floor_bytes(routing, rank.rank, combine_dtype=dtype)
                expected += counted.pair
                floor += least.dispatch + least.combine
        # Closing waits for what the gateway still had to send.
        written = sum(nic["bytes_written"] for nic in engine.counters())
    return written, expected, floor


@pytest.mark.parametrize(("config", "options"), WIRES)
def test_bytes_on_the_wire_are_the_floor_plus_headers_to_the_byte(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    counted = run_threads(4, wire, config, options)
    written, expected, floor = (sum(column) for column in zip(*counted, strict=True))
    # The first of two partners to close says so in 8 bytes, and the second unless it has heard it.
    nodes = 4 // config["ranks_per_node"]
    partners = config["ranks_per_node"] * nodes * (nodes - 1) // 2
    assert written - expected in range(8 * partners, 16 * partners + 1, 8)
    assert floor < written


MEMORY = [
    pytest.param(8, 8, 64, id="8 GPUs of one node"),
    pytest.param(64, 8, 450, id="8 nodes of 8"),
]


@pytest.mark.parametrize(("world_size", "local", "mib"), MEMORY)
def test_a_gpu_gives_little_memory_for_the_main_job(world_size: int, local: int, mib: int) -> None:
    config = AllToAllConfig(num_experts=256, hidden_dim=7168, topk=8, max_tokens=128)
    plan = config.plan(world_size=world_size, ranks_per_node=local)
    assert sum(plan.values()) <= mib << 20, plan


def macros(num_sms: int | None = None, by_rank: bool = False, **fields: Any) -> dict[str, int]:
    job: dict[str, Any] = {"num_experts": 256, "hidden_dim": 7168, "topk": 8, "max_tokens": 128}
    shape = shape_macros(AllToAllConfig(**job | fields), world_size=8, ranks_per_node=8)
    kernel = kernels.dispatch_kernel(
        shape, torch.bfloat16, quantize=True, layout=2 * by_rank, num_sms=num_sms
    )
    return kernel.macros


def workers(made: dict[str, int]) -> tuple[int, int]:
    return made["MOE_P2P_SEND_WORKERS"], made["MOE_P2P_BLOCK_THREADS"]


def test_few_blocks_have_many_workers_as_far_as_shared_memory_goes() -> None:
    assert workers(macros()) == workers(macros(num_sms=49)) == (1, 128)
    assert workers(macros(num_sms=48)) == (4, 896)
    assert workers(macros(num_sms=48, by_rank=True)) == (6, 768)
    assert workers(macros(num_sms=48, by_rank=True, max_tokens=16)) == (4, 896)
    many = macros(num_sms=24, num_experts=16384)  # a count for each expert and worker
    assert workers(many) == (2, 448)
    assert many["MOE_P2P_SHARED_BYTES"] <= 227 << 10


def short_of(
    steps: BulkSteps | None = None, num_sms: int | None = 24, **fields: Any
) -> list[kernels.Kernel | None]:
    """What takes short calls of a dispatch and of a combine."""
    job: dict[str, Any] = {"num_experts": 256, "hidden_dim": 7168, "topk": 8, "max_tokens": 4096}
    config = AllToAllConfig(**job | {"chunk_tokens": 4096} | fields, num_sms=num_sms)
    shape = shape_macros(config, world_size=8, ranks_per_node=8, bulk=steps)
    few: dict[str, Any] = {"num_sms": num_sms, "steps": steps}
    bf16 = torch.bfloat16
    made = kernels.dispatch_kernel(shape, bf16, quantize=True, **few)
    return [made.short, kernels.combine_kernel(shape, bf16, bf16, **few).short]


@pytest.mark.parametrize(("steps", "most"), [(None, 32), (BulkSteps(16), 16), (BulkSteps(999), 32)])
def test_short_calls_of_long_steps_have_kernels_of_their_own(
    steps: BulkSteps | None, most: int
) -> None:
    for short in short_of(steps):
        assert short is not None
        assert (short.max_tokens, short.macros["MOE_P2P_CHUNK_TOKENS"]) == (most, most)
        assert (short.macros["MOE_P2P_BULK"], short.macros["MOE_P2P_SELF_FLAGGED"]) == (0, 0)


def test_where_nothing_goes_in_bulk_short_calls_have_none() -> None:
    assert short_of(BulkSteps(0)) == [None] * 2  # nor where everything does
    assert short_of(num_sms=None) == [None] * 2
    assert short_of(chunk_tokens=128) == [None] * 2
    assert short_of(mask_lost_ranks=True) == [None] * 2


@pytest.mark.parametrize(
    ("device", "tokens", "classes"),
    [("cuda", 128, 1), ("cuda", 129, 2), ("cuda", 256, 2), ("cuda", 257, 1), ("cpu", 128, 1)],
)
def test_ranks_agree_on_num_sms_where_it_decides_how_rows_travel(
    device: str, tokens: int, classes: int
) -> None:
    job: dict[str, Any] = {"num_experts": 8, "hidden_dim": 128, "topk": 2, "device": device}
    counted = [
        AllToAllConfig(**job, max_tokens=tokens, num_sms=num_sms).agreed()["num_sms"]
        for num_sms in (None, 1, 48, 49)
    ]
    assert len(set(counted)) == classes
    assert (counted[0], counted[1]) == (counted[3], counted[2])


@pytest.mark.parametrize(("local", "flagged"), [(8, 0), (4, 1)])
def test_rows_that_cannot_go_in_bulk_flag_themselves(local: int, flagged: int) -> None:
    config = AllToAllConfig(num_experts=8, hidden_dim=128, topk=2, max_tokens=200, num_sms=24)
    shape = shape_macros(config, world_size=8, ranks_per_node=local)
    kernel = kernels.combine_kernel(shape, torch.bfloat16, torch.bfloat16, num_sms=24)
    assert shape["MOE_P2P_SELF_FLAGGED"] == flagged
    assert kernel.macros["MOE_P2P_BULK"] == 1 - flagged


def test_a_shape_beyond_shared_memory_is_refused() -> None:
    assert macros(num_experts=32768)["MOE_P2P_SHARED_BYTES"] <= 227 << 10
    with pytest.raises(errors.InvalidArgumentError, match="shared memory"):
        macros(max_tokens=1 << 20, chunk_tokens=1 << 20)


@pytest.mark.parametrize(("ranks", "fits"), [(72, 36), (65, 13), (128, 64), (67, 1)])
def test_a_node_of_more_than_64_ranks_is_refused_with_what_fits(ranks: int, fits: int) -> None:
    config = AllToAllConfig(num_experts=ranks * 8, hidden_dim=64, topk=2, max_tokens=16)
    reason = (
        f"a node of {ranks} ranks is too large: .* word of 64 bits.*"
        f"ranks_per_node={fits} it is {ranks // fits} nodes"
    )
    with pytest.raises(errors.InvalidArgumentError, match=reason):
        config.plan(world_size=2 * ranks, ranks_per_node=ranks)
    assert config.plan(world_size=2 * ranks, ranks_per_node=fits)
    with pytest.raises(errors.InvalidArgumentError, match=reason):  # before there are any ranks
        dataclasses.replace(config, ranks_per_node=ranks)
    assert dataclasses.replace(config, ranks_per_node=fits)


def test_all_to_all_refuses_a_host_of_more_than_64_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks find it that share a host, by themselves or as they were asked to."""
    monkeypatch.setattr(epoch, "conclude", lambda *_: Agreement(72, 0, 1, 72))
    with pytest.raises(errors.InvalidArgumentError, match="ranks_per_node=36 it is 2 nodes"):
        make(Rank(0, 1, dist.HashStore()))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"config": {"num_experts": 8}}, errors.InvalidArgumentError, "config is of type dict"),
        ({"config": AllToAllConfig}, errors.InvalidArgumentError, "must be an AllToAllConfig"),
        ({"engine": 3}, errors.InvalidArgumentError, "engine is 3, must be an Engine or None"),
        ({"rank": "0"}, errors.InvalidArgumentError, "rank is '0' of 1, must be an integer"),
        ({"rank": 0.0}, errors.InvalidArgumentError, "rank is 0.0 of 1, must be an integer"),
        (
            {"world_size": 0},
            errors.InvalidArgumentError,
            "rank is 0 of 0, must be an integer",
        ),
        (
            {"config": AllToAllConfig(**SMALL, device="cuda")},
            errors.UnavailableError,
            r"device is 'cuda', but torch .* finds no GPU \(no GPUs\); see python -m moe_p2p do",
        ),
    ],
)
def test_what_makes_no_communicator_is_named(
    given: dict[str, Any],
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_gpu() -> int:
        raise AssertionError("no GPUs")  # so does torch for CPUs

    monkeypatch.setattr(torch.cuda, "current_device", no_gpu)
    known = {"config": AllToAllConfig(**SMALL), "rank": 0, "world_size": 1}
    with pytest.raises(error, match=text):
        AllToAll(dist.HashStore(), **{**known, **given})


def test_prepare_takes_options_alone() -> None:
    alone = make(Rank(0, 1, dist.HashStore()))
    with pytest.raises(errors.InvalidArgumentError, match="options is None, must be DispatchOpt"):
        alone.prepare(None)  # type: ignore[arg-type]
