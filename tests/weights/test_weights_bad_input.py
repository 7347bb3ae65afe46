"""Weight updates refuse wrong arguments before the fleet decides, and give back what they held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from moe_p2p import Engine, InvalidArgumentError, MoeP2pError, TimeoutError, errors
from moe_p2p.engine.transfers import Memory
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.kv import TorchLeases
from moe_p2p.weights import (
    Blocks,
    Param,
    Shard,
    WeightEngineRank,
    WeightLayout,
    WeightTrainer,
    job,
    joining,
    sending,
)

LAYOUT = WeightLayout([Param("w", (4, 4), "bfloat16", (0,))], 1)


def make_tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}


class Fleet:
    def __init__(self) -> None:
        self.store = HashStore()
        self.engines = (Engine(label="trainer"), Engine(label="generator"))
        self.ours, self.theirs = make_tensors(), make_tensors()
        found: list[WeightEngineRank] = []
        thread = threading.Thread(target=lambda: found.append(self._engine_rank()))
        thread.start()
        self.trainer = WeightTrainer(self.engines[0], self.store, LAYOUT, 0, self.ours)
        thread.join()
        self.engine_rank = found[0]

    def _engine_rank(self) -> WeightEngineRank:
        return WeightEngineRank(self.engines[1], self.store, LAYOUT, 0, self.theirs)

    def update(self, version: int, **arguments: Any) -> None:
        over = threading.Event()

        def step() -> None:
            while not over.is_set() or self.engine_rank.version != self.trainer.version:
                self.engine_rank.step()
                time.sleep(0.001)

        thread = threading.Thread(target=step)
        thread.start()
        try:
            self.trainer.update(version, **arguments)
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        self.trainer.close()
        self.engine_rank.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"version": "2"}, "version is '2'"),
        ({"version": None}, "version is None"),
        ({"version": 1.5}, "version is 1.5"),
        ({"version": -1}, "version is -1"),  # "none" among ranks that join
        ({"version": 1 << 63}, "must be an int from 0 to"),
        ({"version": True}, "version is True"),
        ({"version": 2, "timeout_s": 0}, "timeout_s is 0"),
        ({"version": 2, "timeout_s": float("nan")}, "timeout_s is nan"),
        ({"version": 2, "only": 5}, "only is 5"),
        ({"version": 2, "only": ["w"], "changed": True}, "pass one"),
        ({"version": 2, "tensors": 5}, "tensors is 5"),
        ({"version": 2, "tensors": {"w": 5}}, r"tensors\['w'\] is 5"),
    ],
)
def test_an_update_that_no_engine_rank_could_take_is_refused(
    fleet: Fleet, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        fleet.trainer.update(**arguments)
    fleet.ours["w"].fill_(3)
    fleet.update(1)
    assert fleet.engine_rank.version == 1
    assert bool((fleet.theirs["w"] == 3).all())
    assert fleet.trainer.totals["failed"] == 0


def test_no_tensor_is_taken_where_one_does_not_fit(fleet: Fleet) -> None:
    new = {"w": torch.ones(4, 4, dtype=torch.bfloat16), "other": torch.ones(1)}
    with pytest.raises(InvalidArgumentError, match="tensor 'other' is none of this trainer's"):
        fleet.trainer.update(1, new, timeout_s=2)
    assert not fleet.ours["w"].any()


def test_wait_of_no_time_is_refused_and_not_taken_for_the_default(fleet: Fleet) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s is 0"):
        fleet.engine_rank.wait(0)


def test_what_is_closed_says_so(fleet: Fleet) -> None:
    fleet.update(1)
    fleet.close()
    trainer, rank = fleet.trainer, fleet.engine_rank
    calls: list[Callable[[], Any]] = [
        lambda: trainer.update(2), trainer.admit, lambda: trainer.abort("x"), trainer.live,
        trainer.__enter__,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(errors.ClosedError, match="trainer 0 is closed"):
            call()
    for call in (rank.step, rank.wait, rank.begin, rank.__enter__):
        with pytest.raises(errors.ClosedError, match="generator 0 is closed"):
            call()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of memory that is registered at any engine."""
    found: set[int] = set()
    register, unregister = Engine.register, Memory.unregister

    def counted(engine: Engine, tensor: torch.Tensor, **more: bool) -> Memory:
        memory = register(engine, tensor, **more)
        found.add(memory.number)
        return memory

    def given_back(memory: Memory) -> None:
        unregister(memory)
        found.remove(memory.number)

    monkeypatch.setattr(Engine, "register", counted)
    monkeypatch.setattr(Memory, "unregister", given_back)
    return found


def test_close_unregisters_all(registered: set[int]) -> None:
    fleet = Fleet()
    fleet.update(1)
    assert registered
    fleet.trainer.close()
    fleet.engine_rank.close()
    assert not registered
    assert fleet.engine_rank._lent._word[0] % 2  # whoever reads it now takes it for no version
    fleet.close()


def test_a_set_up_that_fails_leaves_nothing(
    registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    with Engine() as engine:
        with pytest.raises(TimeoutError, match="no word from generator 0") as _:
            WeightTrainer(engine, store, LAYOUT, 0, make_tensors(), timeout_s=0.3)
        assert not registered
        monkeypatch.setattr(job, "engine_ranks_layout", lambda *_: LAYOUT)  # they have ended since
        kept: list[BaseException] = []  # with their frames, and so the trainer
        try:
            WeightTrainer(engine, store, LAYOUT, 0, make_tensors(), timeout_s=0.5)
        except TimeoutError as error:
            kept.append(error)
        assert kept
        assert not registered
        of_fleet = torch.distributed.PrefixStore("moe_p2p weights/weights", store)
        assert not TorchLeases(of_fleet).members()
        with pytest.raises(TimeoutError, match="no word from trainer 0"):
            WeightEngineRank(engine, store, LAYOUT, 0, make_tensors(), timeout_s=0.3)
        assert not registered


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": None}, "Param.name is None"),
        ({"shape": (-4, 4)}, "shape must be a tuple of ints of 0 or more"),
        ({"shape": [4, 4]}, "must be tuples"),
        ({"dtype": torch.bfloat16}, "no dtype torch.bfloat16; pass its name"),
        ({"dtype": "Tensor"}, "no dtype 'Tensor'"),
        ({"ranks": 5}, "ranks is 5"),
        ({"ranks": ("a",)}, "what is no int"),
        ({"mesh": (-1, -1)}, "mesh must be"),
        ({"placements": ("x",)}, "placements must be"),
        ({"placements": (Shard("a"),)}, "placements must be"),
        ({"window": 5}, "window must be"),
        ({"offset": 1.5}, "offset is 1.5"),
        ({"strides": (-1, 1)}, "strides must be"),
        ({"blocks": "x"}, "blocks is 'x'"),
        ({"blocks": Blocks("s")}, "dtype must be"),
    ],
)
def test_wrong_fields_of_a_param_are_named(changes: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {"name": "w", "shape": (4, 4), "dtype": "bfloat16", "ranks": (0,)}
    with pytest.raises(InvalidArgumentError, match=text):
        Param(**(usual | changes))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda e, s, t: WeightLayout(LAYOUT.params, 0), "world_size is 0"),
        (lambda e, s, t: WeightLayout(LAYOUT.params, "1"), "world_size is '1'"),
        (lambda e, s, t: WeightLayout(None, 1), "params is None"),
        (lambda e, s, t: WeightTrainer(None, s, LAYOUT, 0, t), "engine is None"),
        (lambda e, s, t: WeightTrainer(e, None, LAYOUT, 0, t), "store is None"),
        (
            lambda e, s, t: WeightTrainer(e, s, LAYOUT, 1, t),
            "rank is 1, must be an int from 0 to 0",
        ),
        (lambda e, s, t: WeightEngineRank(e, s, LAYOUT, "0", t), "rank is '0', must be an int"),
        (lambda e, s, t: WeightEngineRank(e, s, LAYOUT, 0, t, agree=3), "agree is 3, must be a f"),
        (lambda e, s, t: WeightTrainer(e, s, None, 0, t), "layout is None"),
        (lambda e, s, t: WeightTrainer(e, s, LAYOUT, 0, None), "tensors is None"),
        (lambda e, s, t: WeightTrainer(e, s, LAYOUT, 0, t, lease_s=0), "lease_s is 0"),
        (lambda e, s, t: WeightTrainer(e, s, LAYOUT, 0, t, timeout_s=float("nan")), "is nan"),
        (lambda e, s, t: WeightEngineRank(e, s, LAYOUT, 0, {"w": 5}), r"tensors\['w'\] is 5"),
        (lambda e, s, t: WeightEngineRank(e, s, LAYOUT, 0, t, engine_ranks=5), "engine_ranks is 5"),
    ],
)
def test_ranks_name_what_they_do_not_take(make: Callable[..., object], text: str) -> None:
    with Engine() as engine, pytest.raises(InvalidArgumentError, match=text):
        make(engine, HashStore(), make_tensors())


class _Late:
    """A request that a stopped peer has not answered."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        return

    def wait(self, timeout_s: float) -> None:
        self.waited.append(timeout_s)
        time.sleep(min(timeout_s, 0.05))
        raise errors.make(TimeoutError, "late")


@pytest.mark.parametrize(
    ("first", "second"), [(WeightEngineRank, WeightTrainer), (WeightTrainer, WeightEngineRank)]
)
def test_who_begins_after_a_refusal_and_waits_in_vain_names_it(first: Any, second: Any) -> None:
    store, wrong = HashStore(), {"w": torch.zeros(4, 4)}
    with pytest.raises(InvalidArgumentError, match="tensor 'w' is float32") as refused:
        first(Engine(), store, LAYOUT, 0, wrong)
    with pytest.raises(TimeoutError, match=r"no word from .* 0; the last set-up failed: ") as late:
        second(Engine(), store, LAYOUT, 0, make_tensors(), timeout_s=0.5)
    assert str(refused.value) in str(late.value)


def test_what_a_set_up_failed_for_is_over_when_one_has_succeeded(fleet: Fleet) -> None:
    words = StoreKeys(fleet.store, job.prefix_of("weights"), alone=True)
    assert words.get(job.REFUSED) is None
    words.put(job.REFUSED, {"why": "long ago", "id": "a", "job": None})
    fleet.engine_rank.close()
    found = list[WeightEngineRank]()
    thread = threading.Thread(target=lambda: found.append(fleet._engine_rank()))
    thread.start()
    fleet.trainer.close()
    fleet.trainer = WeightTrainer(fleet.engines[0], fleet.store, LAYOUT, 0, fleet.ours)
    thread.join()
    fleet.engine_rank = found[0]
    assert words.get(job.REFUSED) is None


def test_a_read_that_may_still_land_ends_a_join() -> None:
    """It would land in the memory that an update is then written to."""

    class Stub:
        def register(self, tensor: torch.Tensor) -> Any:
            return type("Memory", (), {"tensor": torch.zeros(2, dtype=torch.int64)})()

        def connect(self, *_: Any, **__: Any) -> Any:
            return type("Peer", (), {"disconnect": lambda self: None})()

        def resolve(self, *_: Any, **__: Any) -> object:
            return object()

        def read(self, memory: Any, region: Any, nbytes: int, **_: Any) -> Any:
            if nbytes == joining._WORD_BYTES:
                return type("Done", (), {"wait": lambda self, timeout_s: None})()
            return _Late()

    places: Any = {"w": (type("M", (), {"tensor": torch.zeros(1)})(), 0, 4)}
    stub: Any = Stub()
    lent = {"address": "", "word": "", "tensors": {"w": ""}}
    with pytest.raises(MoeP2pError, match="may still answer 1 reads"):
        joining.PeerReader(stub, places).read(lent, Deadline(0.01))


def test_a_cancel_has_one_deadline_for_all_its_requests() -> None:
    late: list[Any] = [_Late() for _ in range(20)]
    engine: Any = None
    sending.RegionWriter(engine, 0).cancel(late, 0.1)
    assert sum(sum(each.waited) for each in late) < 20 * 0.1 / 2
    assert not any(late[-1].waited)
