"""deep_ep.utils: helpers that scripts borrow, under the names by which they import them."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
from math import isnan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_p2p.deep_ep
from moe_p2p.deep_ep.utils import gate, math, testing
from tests.support import warm

IMPORTED = {  # by DeepEP's own tests and by users
    "deep_ep.buffers.elastic": ("ElasticBuffer", "EPHandle"),
    "deep_ep.buffers.legacy": ("Buffer",),
    "deep_ep.utils.envs": ("init_dist", "init_seed", "dist_print", "get_physical_domain_size"),
    "deep_ep.utils.event": ("EventHandle", "EventOverlap"),
    "deep_ep.utils.gate": ("get_unbalanced_scores",),
    "deep_ep.utils.refs": (
        "dispatch",
        "combine",
        "generate_pre_combine_data",
        "ordered_accumulate",
    ),
    "deep_ep.utils.math": ("calc_diff", "per_token_cast_to_fp8", "per_token_cast_back", "align"),
    "deep_ep.utils.testing": ("bench", "bench_kineto", "flush_l2_cache"),
}


def test_modules_are_found_under_deep_eps_names() -> None:
    moe_p2p.deep_ep.install()
    try:
        for module, names in IMPORTED.items():
            found = importlib.import_module(module)
            for name in names:
                assert callable(getattr(found, name)), (module, name)
    finally:
        moe_p2p.deep_ep.uninstall()


@pytest.mark.parametrize("hidden", [128, 512, 200])
def test_what_is_cast_comes_back(hidden: int) -> None:
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(hidden)) * 3
    values, scales = math.per_token_cast_to_fp8(x)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (5, -(-hidden // 128)))
    back = math.per_token_cast_back(values, scales).float()
    # Three bits of mantissa in each number, and then bfloat16.
    assert ((back - x).abs() <= x.abs() / 16 + scales.amax() / 64 + x.abs() / 256).all()
    assert math.calc_diff(back, x) < 1e-3 < math.calc_diff(back, -x)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-12)


def test_a_compiled_cast_has_the_same_bits() -> None:
    """CollectiveX compiles it, and compares with the bits of the eager one."""
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[1, 3], x[2, 5], x[3, 7] = torch.nan, -torch.inf, -torch.nan
    torch._dynamo.reset()
    compiled: Any = torch.compile(math.per_token_cast_to_fp8, fullgraph=True, dynamic=False)
    wanted, scales = math.per_token_cast_to_fp8(x)
    got, got_scales = compiled(x)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(got_scales, scales)
    assert wanted.view(torch.uint8)[[1, 2, 3], [3, 5, 7]].tolist() == [0x7F] * 3


def test_packed_exponents_are_scales() -> None:
    values = torch.ones(2, 512).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[126, 127, 128, 130], [127, 127, 120, 1]], dtype=torch.uint8)
    got = math.per_token_cast_back(values, exponents.view(torch.int32))
    wanted = torch.exp2(exponents.float() - 127).repeat_interleave(128, dim=1)
    assert torch.equal(got.float(), wanted)
    assert math.per_token_cast_back(values[:0], exponents.view(torch.int32)[:0]).shape == (0, 512)


def test_numbers() -> None:
    assert (math.ceil_div(7, 3), math.ceil_div(6, 3), math.align(7, 4)) == (3, 2, 8)
    assert (math.safe_div(0, 0), math.safe_div(3, 2)) == (0, 1.5)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)
    ranks = torch.tensor([[3, 1, 3, -1], [0, 0, 0, 0], [-1, -1, -1, -1]])
    math.inplace_unique(ranks, 5)
    assert ranks.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]
    wide = torch.tensor([[1, 0, 1, 0]])
    math.inplace_unique(wide, 2)
    assert wide.tolist() == [[1, 0, -1, -1]]
    scores = math.create_grouped_scores(torch.ones(2, 6), torch.tensor([[0, 2], [1, 1]]), 3)
    assert scores.tolist() == [[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]


def test_bytes_and_hashes_of_what_calls_return() -> None:
    one, two = torch.arange(4, dtype=torch.int32), torch.ones(3, 2)
    given: Any = (one, [two, None])
    assert math.count_bytes(given, None) == 16 + 24
    assert math.hash_tensor(one) == 6
    assert math.hash_tensors(given, None) == 6 ^ math.hash_tensor(two)


def counts_of(scores: Tensor, num_ranks: int, num_topk: int) -> Tensor:
    """Tokens that each rank gets: [W]."""
    ranks = scores.topk(num_topk, dim=1).indices // (scores.shape[1] // num_ranks)
    return torch.nn.functional.one_hot(ranks, num_ranks).amax(dim=1).sum(dim=0)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(("num_ranks", "num_topk"), [(2, 1), (4, 2), (8, 6), (16, 8)])
def test_rank_0_gets_more_tokens_by_the_ratio(num_ranks: int, num_topk: int, ratio: float) -> None:
    torch.manual_seed(num_ranks)
    args = 2000, 8 * num_ranks, num_ranks, num_topk, ratio
    counts = counts_of(gate.get_unbalanced_scores(*args, precise=True), num_ranks, num_topk)
    assert counts[1:].max() - counts[1:].min() <= 1
    # Its share is rounded to a copy, the others' to one each.
    others = float(counts[1:].sum()) / (num_ranks - 1)
    assert abs(float(counts[0]) - ratio * others) <= 1 + ratio
    counts = counts_of(gate.get_unbalanced_scores(*args, precise=False), num_ranks, num_topk)
    others = float(counts[1:].sum()) / (num_ranks - 1)
    most = 2000 / others  # rank 0 has every token
    # A draw of 2,000 tokens has a deviation of about 2%.
    assert float(counts[0]) / others == pytest.approx(min(ratio, most), rel=0.1)


def test_scores_that_cannot_be_are_refused() -> None:
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"ratio is 0.5, must be at least 1"):
        gate.get_unbalanced_scores(4, 8, 2, 2, 0.5, precise=False)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="top-6 needs 3 ranks of 2 experts"):
        gate.get_unbalanced_scores(4, 16, 8, 6, 4.0, precise=True)


def event(name: str, start: float, duration: float) -> SimpleNamespace:
    span = SimpleNamespace(start=start, elapsed_us=lambda: duration)
    return SimpleNamespace(name=name, time_range=span)


def test_kernels_are_found_by_their_names() -> None:
    """The names that profilers have of our kernels, as scripts look for them."""
    name = "moe_p2p::dispatch(moe_p2p::abi::DispatchParams)"
    sends = [event(name, start, 4.0) for start in (9, 1, 5)]
    receives = [event(name, start, 2.0) for start in (3, 7, 11)]
    events = [*sends, *receives, event("memset", 2, 50.0)]
    assert testing.mean_seconds(events, "dispatch", 1) == pytest.approx(3e-6)
    assert testing.mean_seconds(events, "::dispatch", 2) == pytest.approx([4e-6, 2e-6])
    assert testing.mean_seconds(events, "dispatch_impl", 1) == pytest.approx(3e-6)
    assert isnan(testing.mean_seconds(events, "dispatch_copy_epilogue_impl", 1))
    with pytest.raises(AssertionError, match="6 kernels have 'dispatch' in their names, no multip"):
        testing.mean_seconds(events, "dispatch", 4)


STARTS = """
import sys, torch
from moe_p2p.deep_ep.utils import envs
rank, world, group = envs.init_dist(int(sys.argv[1]), 2, seed=7)
assert (rank, world, group.size()) == (int(sys.argv[1]), 2, 2)
assert torch.get_default_dtype() == torch.bfloat16
assert (envs.get_global_seed(), envs.get_local_seed()) == (7, 7 + rank)
drawn = torch.rand(1, dtype=torch.float32, device="cpu")
envs.dist_print(f"rank {rank}", once_in_node=True)
envs.init_seed(7)
assert torch.equal(drawn, torch.rand(1, dtype=torch.float32, device="cpu"))
"""


def test_ranks_of_a_script_meet() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_PORT": str(port)}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        environment.pop(name, None)
    started = [
        warm.popen(
            *("-c", STARTS, str(rank)),
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=250)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], texts
    assert sum("rank 0" in text.splitlines() for text in texts) == 1


@pytest.mark.gpu
def test_times_on_a_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda")

    def fn() -> Tensor:
        return x.mul_(1.0)

    mean, least, most = testing.bench(fn, num_warmups=2, num_tests=5)
    assert 0 < least <= mean <= most < 1
    assert 0 < testing.bench_kineto(fn, "elementwise", num_tests=3, suppress_kineto_output=True) < 1
