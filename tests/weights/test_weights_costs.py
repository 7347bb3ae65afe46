"""What an update and a join must not cost on a GPU: kernels for each write, plans made anew, device
memory beside the tensors, and long waits between two looks at the store."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import Engine
from moe_p2p.engine.strides import Rows
from moe_p2p.fleet import board
from moe_p2p.fleet.board import Board
from moe_p2p.fleet.client import Deadline
from moe_p2p.weights import Param, Shard, WeightLayout, generator, weight_plan
from moe_p2p.weights.covered import covered
from moe_p2p.weights.inbox import Inbox
from moe_p2p.weights.joining import Lent, Reader
from moe_p2p.weights.plan import WeightPlan, Write
from tests.support.weights_fleet import BF16, GENERATORS, MODELS, fleet

EXPERTS, INNER, HIDDEN = 16, 8, 12


class Registering:
    """An engine that keeps what is registered."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def register(self, tensor: torch.Tensor) -> Any:
        self.tensors.append(tensor)
        return type("Memory", (), {"tensor": tensor, "unregister": lambda self: None})()


class Calls(TorchDispatchMode):
    """Counts calls that change a tensor, each of which is a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.__name__.split(".")[0] in ("fill_", "copy_")
        return func(*args, **(kwargs or {}))


def stacked() -> tuple[WeightPlan, dict[str, torch.Tensor]]:
    """Gate and up of experts behind each other in w13, and two rows that nobody writes."""
    names = [f"{e}.{part}" for e in range(EXPERTS) for part in ("gate", "up")]
    shape = (INNER, HIDDEN)
    source = [Param(n, shape, BF16, range(2), placements=(Shard(0),)) for n in names]
    target = [
        Param(n, shape, BF16, (0,), tensor="w13", offset=(i * INNER + 1) * HIDDEN)
        for i, n in enumerate(names)
    ]
    plan = weight_plan(WeightLayout(source, 2), WeightLayout(target, 1))
    rows = 2 * EXPERTS * INNER + 2
    return plan, {"w13": torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)}


@pytest.mark.parametrize("shadow", [True, False])
def test_poison_is_a_kernel_for_a_stretch_of_a_tensor_and_not_for_a_write(shadow: bool) -> None:
    plan, live = stacked()
    engine: Any = Registering()
    inbox = Inbox(engine, plan, 0, live, shadow=shadow, finalize=None)
    assert len(inbox.writes) == 4 * EXPERTS
    with Calls() as calls:
        inbox.poison()
    assert calls.num == 1
    w13 = inbox.target["w13"]
    assert bool(w13[1:-1].isnan().all())
    assert not w13[0].any()
    assert not w13[-1].any()


def test_a_part_of_an_update_is_copied_in_stretches() -> None:
    plan, live = stacked()
    engine: Any = Registering()
    inbox = Inbox(engine, plan, 0, live, shadow=True, finalize=None)
    inbox.target["w13"].fill_(1)
    names = {f"{e}.{part}" for e in (3, 4, 9) for part in ("gate", "up")}
    with Calls() as calls:
        inbox.commit(names)
    assert calls.num == 2
    changed = live["w13"][1:-1].view(EXPERTS, 2 * INNER, HIDDEN)
    assert [e for e in range(EXPERTS) if changed[e].all()] == [3, 4, 9]
    assert not live["w13"][0].any()


def write(at: list[int], num_rows: int, row_bytes: int, stride: int) -> Write:
    rows = Rows(row_bytes, num_rows, 0, stride, tuple((0, each) for each in at))
    return Write("w", False, 0, "w", 0, "t", rows)


@pytest.mark.parametrize(
    ("writes", "parts"),
    [
        ([write([0, 8], 1, 8, 0)], 1),
        ([write([8], 2, 4, 4), write([0], 1, 8, 0)], 1),
        ([write([0], 1, 8, 0), write([9], 1, 3, 0)], 2),
        ([write([4], 1, 8, 0), write([0], 1, 8, 0)], 1),  # tied parameters overlap
        ([write([0, 16], 3, 2, 4), write([2], 1, 2, 0)], 3),  # rows with gaps stay as they are
    ],
)
def test_parts_cover_what_writes_cover_and_nothing_else(writes: list[Write], parts: int) -> None:
    wanted, found = (torch.zeros(40, dtype=torch.uint8) for _ in range(2))
    for each in writes:
        for _, at in each.rows.offsets:
            for row in range(each.rows.num_rows):
                begin = at + row * each.rows.target_stride
                wanted[begin : begin + each.rows.row_bytes] = 1
    made = covered(writes)
    for part in made:
        part.of({"t": found}).fill_(1)
    assert torch.equal(found, wanted)
    assert len(made) == parts


def test_a_generator_takes_no_device_memory_to_say_that_its_tensors_change() -> None:
    """A tensor of 16 bytes there is 512 of torch's allocator: above a watermark of 0."""
    engine: Any = Registering()
    tensors = {"w": torch.empty(4, device="meta"), "b": torch.empty(2, device="meta")}
    Lent(engine, tensors).shut()
    places: Any = {"w": (type("Memory", (), {"tensor": tensors["w"]})(), 0, 16)}
    Reader(engine, places)
    on_device = [each for each in engine.tensors if each.device.type != "cpu"]
    assert len(engine.tensors) == 4
    assert [id(each) for each in on_device] == [id(each) for each in tensors.values()]


def test_a_reader_learns_of_a_version_once_kernels_that_copy_it_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The word is no part of the stream that copies."""
    events: dict[int, list[str]] = defaultdict(list)  # by thread: each generator has one
    for of, name in ((Lent, "shut"), (Inbox, "commit"), (Lent, "open"), (generator, "settle")):
        noted(monkeypatch, of, name, events)
    with fleet(MODELS["fused"]) as found:
        found.finish(found.train(1))
        changes = [" ".join(each) for each in events.values() if "open" in each]
    assert len(changes) == GENERATORS
    assert all("shut commit settle open" in each for each in changes), changes


def noted(
    monkeypatch: pytest.MonkeyPatch, of: Any, name: str, events: dict[int, list[str]]
) -> None:
    real = getattr(of, name)

    def call(*args: Any, **how: Any) -> Any:
        events[threading.get_ident()].append(name)
        return real(*args, **how)

    monkeypatch.setattr(of, name, call)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_an_update_plans_and_registers_nothing_anew(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: dict[int, list[str]] = defaultdict(list)
    with fleet(MODELS["fp8"], mode=mode, poison=True) as found:
        noted(monkeypatch, WeightPlan, "writes_to", events)
        for name in ("register", "grant", "resolve", "connect"):
            noted(monkeypatch, Engine, name, events)
        for version in (1, 2):
            for each in found.generators if mode == "in_place" else ():
                each.begin()
            found.finish(found.train(version))
        found.check(2)
    assert not events


def test_waits_look_often_at_first_and_never_much_later_than_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    class Store:
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            return b"7" if len(pauses) == 12 else expected.encode()

    monkeypatch.setattr(board.time, "sleep", pauses.append)
    assert Board(Store(), "f").wait({"k": "trainer 0"}, Deadline(10.0)) == {"k": 7}
    assert pauses[0] <= 0.0005
    for i, pause in enumerate(pauses):
        assert pause <= 0.0005 + sum(pauses[:i]) / 2


def test_stages_of_a_join_and_of_an_update_have_no_holes() -> None:
    with fleet(MODELS["fused"], poison=True) as found:
        found.finish(found.train(1))
        assert list(found.generators[0].stages) == [
            "begin", "arrived", "decided", "copied", "offered",
        ]  # fmt: skip
        late = found.join("late", 0)
        assert list(late.stages) == ["planned", "registered", "read", "copied", "offered"]
        assert late.totals["join_ms"] == 1e3 * late.stages["offered"]
