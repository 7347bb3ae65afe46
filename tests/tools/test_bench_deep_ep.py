"""How the benchmark calls DeepEP: against a stand-in of one rank that answers as documented."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.bench import cases, deep_ep
from moe_p2p.bench.options import Options
from moe_p2p.moe import reference

GIVEN = Options(
    ranks=1, ranks_per_node=1, tokens=(5,), hidden=256, topk=2, experts=4, dtype="fp8",
)  # fmt: skip


class Buffer:
    """One rank, so every row stays; `lost` tokens are forgotten by combine."""

    lost = 0

    def __init__(self, group: dist.ProcessGroup, *_: int, **options: Any) -> None:
        assert group.size() == 1
        assert options["explicitly_destroy"]
        self.low_latency = options.get("low_latency_mode", False)

    def destroy(self) -> None:
        pass

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms % 2 == 0

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    def low_latency_dispatch(
        self, x: Tensor, idx: Tensor, most: int, experts: int, *, use_fp8: bool, **sync: bool
    ) -> tuple[Any, ...]:
        assert self.low_latency
        assert sync == {"async_finish": False, "return_recv_hook": False}
        rows = x.new_zeros(experts, most, x.shape[1])
        place = {}
        counts = [0] * experts
        for token, k in ((t, k) for t in range(len(idx)) for k in range(idx.shape[1])):
            expert = int(idx[token, k])
            place[token, k] = expert, counts[expert]
            rows[place[token, k]] = x[token]
            counts[expert] += 1
        packed: Any = rows
        if use_fp8:
            q, scales = reference.quantize(rows.flatten(0, 1))
            packed = q.view(rows.shape), scales.view(experts, most, -1)
        return packed, torch.tensor(counts), place, None, None

    def low_latency_combine(
        self, y: Tensor, idx: Tensor, weights: Tensor, place: Any, *, out: Tensor, **_: bool
    ) -> None:
        total = torch.zeros(out.shape)
        for (token, k), at in place.items():
            if token >= self.lost:
                total[token] += weights[token, k] * y[at].float()
        out.copy_(total)

    def get_dispatch_layout(self, idx: Tensor, experts: int) -> tuple[Any, ...]:
        counts = idx.flatten().bincount(minlength=experts)
        everyone = torch.ones(len(idx), 1, dtype=torch.bool)
        return torch.tensor([len(idx)]), None, counts, everyone, None

    def dispatch(self, x: Any, **given: Any) -> tuple[Any, ...]:
        assert not self.low_latency
        if "handle" in given:
            assert given == {"handle": "handle"}
            return x, None, None, None, None, None
        assert given["is_token_in_rank"].all()
        return x, given["topk_idx"], given["topk_weights"], [], "handle", None

    def combine(self, y: Tensor, handle: str) -> tuple[Tensor, None, None]:
        assert handle == "handle"
        out = y.clone()
        out[: self.lost] = 0
        return out, None, None


class ElasticBuffer:
    """V2: room for more rows than came, which hold anything."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        self.most = options["num_max_tokens_per_rank"]

    def destroy(self) -> None:
        pass

    def get_theoretical_num_sms(self, experts: int, topk: int) -> int:
        return 16

    def dispatch(self, x: Any, **given: Any) -> tuple[Any, ...]:
        assert given["do_cpu_sync"] is False
        handle = types.SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([self.most])
        )

        def spare(a: Tensor, value: float) -> Tensor:
            return torch.cat([a, torch.full_like(a[:1].float(), value).to(a.dtype)])

        rows = tuple(spare(a, 7.0) for a in x) if isinstance(x, tuple) else spare(x, 7.0)
        return rows, spare(given["topk_idx"], 1), spare(given["topk_weights"], 1), handle, None

    def combine(self, y: Tensor, *, handle: Any, num_sms: int) -> tuple[Tensor, None, None]:
        assert num_sms == 16
        return y[: self.most].clone(), None, None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    module = types.ModuleType("deep_ep")
    module.__dict__.update(Buffer=Buffer, ElasticBuffer=ElasticBuffer, topk_idx_t=torch.int64)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def run(group: dist.ProcessGroup, options: Options, **changes: Any) -> tuple[list[Any], list[str]]:
    job, notes = cases.make_job(options), list[str]()
    (tokens,) = job.tokens(0, [options.tokens[0]])
    with ExitStack() as stack:
        api = deep_ep.Api(
            module=sys.modules["deep_ep"],
            label="deep_ep",
            options=options,
            job=job,
            tokens=tokens,
            group=group,
            stack=stack,
            **changes,
        )
        found = list(deep_ep.systems(api, notes))
        for calls, _ in found:
            calls.pair()
    return found, notes


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_every_interface_gives_the_sums(group: dist.ProcessGroup, dtype: Any, cached: bool) -> None:
    options = Options(**(vars(GIVEN) | {"dtype": dtype}))
    found, notes = run(group, options, cached=cached)
    assert notes == []
    assert [(calls.system, calls.capturable, wrong) for calls, wrong in found] == [
        ("deep_ep v1 low-latency", True, []),
        ("deep_ep v1 normal", False, []),
        ("deep_ep v2", True, []),
    ]


def test_wrong_sums_are_reported(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "lost", 1)
    found, _ = run(group, GIVEN)
    assert [bool(wrong) for _, wrong in found] == [True, True, False]
    assert "first in row 0" in found[0][1][0]


def test_what_it_cannot_do_is_left_out_with_a_note(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["deep_ep"], "ElasticBuffer")
    found, notes = run(group, GIVEN, low_latency_tokens=4)
    assert [calls.system for calls, _ in found] == ["deep_ep v1 normal"]
    assert notes[0] == "deep_ep low-latency: takes up to 4 tokens of bf16 rows"
    assert "no V2" in notes[1]


def test_reports_that_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep.importlib.util, "find_spec", lambda _: None)
    assert deep_ep.missing() == "deep_ep is not installed"
