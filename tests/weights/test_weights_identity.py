"""Who is there: processes of one name, trainers that restart, ranks that were away, keys that stay.

Each case compares the engine's bytes with the version that it says it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_p2p import MoeP2pError
from moe_p2p.errors import AbortedError, ProtocolError
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.weights import Param, Shard, WeightEngineRank, WeightLayout, WeightTrainer, job
from moe_p2p.weights.attempt import COMMIT, Keys
from moe_p2p.weights.engine_buffers import EngineBuffers
from moe_p2p.weights.job import SetUp, current
from tests.support.weights_fleet import BF16, engine_of, tell_stages

SHAPE = (8, 6)
SOURCE = WeightLayout([Param("w", SHAPE, BF16, (0, 1), placements=(Shard(0),))], 2)
WHOLE = WeightLayout([Param("w", SHAPE, BF16, (0,))], 1)
LIMITS = {"timeout_s": 20.0, "lease_s": 0.4}


class World:
    """Two trainers, and engine ranks by their tensors; all are threads of this process."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.store = stack, HashStore()
        self.pool = stack.enter_context(ThreadPoolExecutor(16))
        self.trainers: list[WeightTrainer] = []
        self.engine_ranks: list[WeightEngineRank] = []
        self.live: dict[WeightEngineRank, Tensor] = {}

    def _closed(self, found: Any) -> Any:
        self.stack.callback(found.close)
        return found

    def begin_trainer(
        self, rank: int, value: float, layout: WeightLayout = SOURCE, **how: Any
    ) -> Future[WeightTrainer]:
        engine = self.stack.enter_context(engine_of(f"trainer {rank}", rank))
        rows = SHAPE[0] // layout.world_size
        tensors = {"w": torch.full((rows, SHAPE[1]), value).bfloat16()}
        given = {**LIMITS, **how}
        return self.pool.submit(
            lambda: self._closed(WeightTrainer(engine, self.store, layout, rank, tensors, **given))
        )

    def begin_engine_rank(self, replica: str = "", **how: Any) -> Future[WeightEngineRank]:
        engine = self.stack.enter_context(engine_of(f"generator {replica}", len(self.live)))
        tensors = {"w": torch.zeros(SHAPE, dtype=torch.bfloat16)}
        given = {**LIMITS, **how}

        def make() -> WeightEngineRank:
            found = WeightEngineRank(
                engine, self.store, WHOLE, 0, tensors, replica=replica, **given
            )
            self.live[found] = tensors["w"]
            return self._closed(found)  # type: ignore[no-any-return]

        return self.pool.submit(make)

    def train(self, value: float = 0, layout: WeightLayout = SOURCE) -> None:
        """A job of trainers."""
        made = [self.begin_trainer(i, value, layout) for i in range(layout.world_size)]
        self.trainers = [each.result(60) for each in made]

    def start(self, version: int, value: float, **how: Any) -> list[Future[None]]:
        for each in self.trainers:
            each._tensors["w"].fill_(value)
        return [self.pool.submit(each.update, version, **how) for each in self.trainers]

    def update(self, version: int, value: float | None = None, **how: Any) -> None:
        """All engine ranks that there are go to it."""
        running = self.start(version, version if value is None else value, **how)
        for each in self.engine_ranks:
            if each.mode == "in_place":
                each.begin()
        waits = [self.pool.submit(each.wait) for each in self.engine_ranks]
        for done in [*running, *waits]:
            done.result(60)

    def check(self, version: int, value: float | None = None) -> None:
        for each in self.engine_ranks:
            self.is_true(each)
            assert each.version == version
            assert self.live[each].unique().tolist() == [version if value is None else value]

    def is_true(self, engine_rank: WeightEngineRank) -> None:
        """What is clean holds one version."""
        assert engine_rank.dirty or len(self.live[engine_rank].unique()) == 1


@contextmanager
def world(mode: Any = "shadow", engine_ranks: int = 1, **how: Any) -> Iterator[World]:
    with ExitStack() as stack:
        found = World(stack)
        first = found.begin_engine_rank(mode=mode, **how)
        found.train()
        found.engine_ranks = [first.result(60)]
        found.engine_ranks += [
            found.begin_engine_rank(f"late-{i}", mode=mode, **how).result(60)
            for i in range(1, engine_ranks)
        ]
        yield found


def is_replaced(engine_rank: WeightEngineRank) -> None:
    """It finds out within a lease, or at its next look."""
    with pytest.raises(AbortedError, match="was replaced: another process has taken its name"):
        _go_on(engine_rank, time.monotonic() + LIMITS["timeout_s"])


def _go_on(engine_rank: WeightEngineRank, until: float) -> None:
    while time.monotonic() < until:
        engine_rank.begin() if engine_rank.mode == "in_place" else engine_rank.step()
        time.sleep(0.001)


# --- two of one name ---


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("replica", ["", "late"])
def test_the_one_that_was_replaced_stops_and_the_new_one_has_the_bytes(
    mode: str, replica: str
) -> None:
    with world(mode) as found:
        if replica:
            found.engine_ranks.append(found.begin_engine_rank(replica, mode=mode).result(60))
        found.update(1)
        old = found.engine_ranks.pop()
        new = found.begin_engine_rank(replica, mode=mode).result(60)
        # Of the founder nobody else has the tensors: the next update brings them.
        has = (1, [1.0]) if replica else (None, [0.0])
        assert (new.version, found.live[new].unique().tolist()) == has
        found.engine_ranks.append(new)
        found.update(2)
        found.check(2)
        is_replaced(old)
        assert found.live[old].unique().tolist() == [1.0]
        assert found.trainers[0].live() == {2: len(found.engine_ranks)}


def test_it_is_replaced_while_an_update_is_under_way() -> None:
    """The update is for the process that was there; the new one has it too, or the next."""
    with world() as found:
        found.update(1)
        old = found.engine_ranks.pop()
        running = found.start(2, 2.0)
        while old._update is None:
            old._progress()
        new = found.begin_engine_rank().result(60)
        found.engine_ranks.append(new)
        for version in (3, 4):
            while not all(each.done() for each in running):
                new.step()
            for each in running:
                each.result()
            running = found.start(version, 2.0)
        while not all(each.done() for each in running):
            new.step()
        while new.step() != 4:
            pass
        found.check(4, 2.0)
        is_replaced(old)
        assert found.live[old].unique().tolist() == [1.0]


def test_of_two_founders_of_a_rank_one_is_refused_by_name() -> None:
    with ExitStack() as stack:
        found = World(stack)
        both = [found.begin_engine_rank(), found.begin_engine_rank()]
        found.train()
        made, errors = [], []
        for each in both:
            try:
                made.append(each.result(60))
            except AbortedError as error:
                errors.append(str(error))
        found.engine_ranks = [each for each in made if not each._member.replaced]
        for _ in range(2 if len(made) == 2 else 0):
            for each in made:
                each._member._beat.look()
        found.engine_ranks = [each for each in made if not each._member.replaced]
        assert len(found.engine_ranks) == 1
        found.update(1)
        found.check(1)
        for each in made:
            if each not in found.engine_ranks:
                is_replaced(each)
        assert all("was replaced" in each for each in errors)


def test_of_two_trainers_0_that_call_the_roll_one_is_in_the_job() -> None:
    words = StoreKeys(HashStore(), alone=True)
    set_up = SetUp(words, "trainer 0")
    job.open_job(words, WHOLE)
    number = words.get(job.NOW)["job"]
    for who in ("trainer 0#a", "trainer 0#b"):
        mine = {"id": who, "nics": 1, "source": WHOLE.digest}
        words.put(f"{number}/trainer 0", mine)
        member: Any = None  # is asked only while others are missing
        job._call_the_roll(words, member, set_up, words.get(job.NOW), WHOLE, Deadline(5.0))
    found = current(words)
    assert found is not None
    assert found.ids == ["trainer 0#a"]


def test_a_trainer_whose_name_was_taken_within_its_job_finds_out() -> None:
    """Its lease is gone: others would take it for lost once an update takes longer."""
    with world() as found:
        found.update(1)
        second = found.begin_trainer(1, 0.0, timeout_s=1.0)
        found.trainers[1]._member._beat.stopped.wait(LIMITS["timeout_s"])
        with pytest.raises(AbortedError, match="trainer 1 was replaced"):
            found.trainers[1].update(2)
        with pytest.raises(MoeP2pError, match="has another process in this place"):
            second.result(60)


# --- trainers restart ---


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("version", [1, 7])
def test_trainers_restart_beside_engine_ranks_that_run(
    mode: str, before: int, version: int
) -> None:
    with world(mode) as found:
        for each in range(1, before + 1):
            found.update(each)
        for each in found.trainers:
            each.close()
        found.train()
        engine_rank = found.engine_ranks[0]
        assert engine_rank.step() == before
        running = found.start(version, 40.0)
        if mode == "in_place":  # nothing lands before it says so
            assert found.live[engine_rank].unique().tolist() == [before]
            engine_rank.begin()
        found.pool.submit(engine_rank.wait).result(60)
        for each in running:
            each.result(60)
        found.check(version, 40.0)
        found.update(version + 1, 41.0, only=["w"])
        found.check(version + 1, 41.0)


def test_trainers_that_were_replaced_find_out_and_cannot_write() -> None:
    """They were stopped, and a supervisor has started others."""
    with world() as found:
        found.update(1)
        old = found.trainers
        found.train()
        found.update(2, 20.0)
        for each in old:
            each._tensors["w"].fill_(99)
            with pytest.raises(MoeP2pError, match="another job of trainers has taken the name"):
                each.update(3)
        found.check(2, 20.0)
        found.update(3)
        found.check(3)


def test_what_the_old_job_has_under_way_lands_nowhere() -> None:
    with world() as found:
        found.update(1)
        old, writer = found.trainers, found.trainers[0]._buffers.writer
        prepared = old[0]._buffers._replicas[""].prepared({})[0]
        batch = writer.grouped([(found.engine_ranks[0]._member.id, prepared)])
        found.train()
        found.update(2, 20.0)
        old[0]._tensors["w"].fill_(99)
        for request in old[0].engine.write_all(*batch[1:], imm=7, priority=2):
            with pytest.raises(MoeP2pError):
                request.wait(20)
        found.update(3)
        found.check(3)


def test_trainers_restart_with_another_layout() -> None:
    alone = WeightLayout([Param("w", SHAPE, BF16, (0,))], 1)
    with world() as found:
        found.update(1)
        for each in found.trainers:
            each.close()
        found.train(layout=alone)
        found.update(2, 20.0, verify=True)
        found.check(2, 20.0)


# --- who was away, and who missed one ---


def test_a_joiner_takes_the_version_that_was_decided_and_not_the_largest() -> None:
    with world(engine_ranks=2) as found:
        found.update(5)
        away = found.engine_ranks.pop()
        away._member._beat.stopped.set()
        found.update(3)  # back, without the one that is away
        found.check(3)
        away._member._beat.stopped.clear()
        away._member._beat.renew()
        late = found.begin_engine_rank("later").result(60)
        assert (late.version, found.live[late].unique().tolist()) == (3, [3.0])


def misses(found: World, missing: int, version: int, *, by_engine_rank: bool = False) -> None:
    """One trainer is called alone. by_engine_rank: it is the engine rank that gives up."""
    engine_rank, patience = found.engine_ranks[0], found.engine_ranks[0].timeout_s
    engine_rank.timeout_s = 0.3 if by_engine_rank else patience
    failed, how = engine_rank.totals["failed"], {} if by_engine_rank else {"timeout_s": 0.3}
    alone = found.pool.submit(found.trainers[1 - missing].update, version, **how)
    while not alone.done() or engine_rank.totals["failed"] == failed:
        engine_rank.step()
    engine_rank.timeout_s = patience
    text = f"(no word from|not done:) trainer {missing}|writing w to"
    with pytest.raises(MoeP2pError, match=text):
        alone.result(60)


@pytest.mark.parametrize(("missing", "by_engine_rank"), [(0, False), (1, False), (1, True)])
def test_a_trainer_that_missed_an_update_goes_on_with_the_others(
    missing: int, by_engine_rank: bool
) -> None:
    """Also where it is the leader."""
    with world() as found:
        found.update(1)
        misses(found, missing, 2, by_engine_rank=by_engine_rank)
        assert found.trainers[missing].version == 1
        found.update(3)
        found.check(3)


@pytest.mark.parametrize("missing", [0, 1])
def test_who_missed_an_update_goes_on_when_that_is_tried_again(missing: int) -> None:
    """Whether it is late, or called again, shows when it is called again: with others at once."""
    with world() as found:
        found.update(1)
        misses(found, missing, 2)
        with pytest.raises(MoeP2pError, match=f"no word from trainer {missing}"):
            found.trainers[missing].update(2)  # it may be late
        misses(found, missing, 2)
        for each in found.trainers:
            each._tensors["w"].fill_(2)
        both = [found.pool.submit(found.trainers[missing].update, 2)]
        while found.trainers[missing].totals["attempts"] < 4:
            assert not both[0].done()
        both.append(found.pool.submit(found.trainers[1 - missing].update, 2))
        found.pool.submit(found.engine_ranks[0].wait).result(60)
        for each in both:
            each.result(60)
        found.check(2)


def test_a_trainer_that_was_away_counts_up_to_the_others() -> None:
    """It was stopped, and its loop goes on with the versions that it missed."""
    with world() as found:
        found.update(1)
        for version in (2, 3, 4):
            misses(found, 1, version)
        for each in found.trainers:
            each._tensors["w"].fill_(5)
        first, late = found.trainers
        running = [found.pool.submit(first.update, 5)]
        for version in (2, 3, 4):
            with pytest.raises(AbortedError, match="it is behind: this trainer updates to"):
                late.update(version)
        running.append(found.pool.submit(late.update, 5))
        found.pool.submit(found.engine_ranks[0].wait).result(60)
        for each in running:
            each.result(60)
        found.check(5)
        found.update(6)
        found.check(6)


def test_a_part_may_follow_before_the_engine_has_made_its_next_step() -> None:
    with world() as found:
        engine_rank = found.engine_ranks[0]
        running = found.start(1, 1.0)
        while engine_rank._committed != engine_rank._keys.stamp:
            engine_rank._progress()
        for each in running:
            each.result(60)
        assert engine_rank.version is None  # its forward pass takes long
        running = found.start(2, 2.0, only=["w"])
        while engine_rank.step() != 2:
            pass
        for each in running:
            each.result(60)
        found.check(2)


# --- derived tensors of who did not receive ---


def test_a_part_on_what_came_from_a_peer_is_sent_whole() -> None:
    def transpose(received: Any, tensors: Any) -> None:
        tensors["d"].copy_(received["d"].t())

    source = WeightLayout([Param(n, (4, 4), BF16, (0,)) for n in ("w", "d")], 1)
    target = WeightLayout(
        [Param("w", (4, 4), BF16, (0,)), Param("d", (4, 4), BF16, (0,), finalize="a test")], 1
    )

    def tensors() -> dict[str, Tensor]:
        return {name: torch.zeros(4, 4, dtype=torch.bfloat16) for name in ("w", "d")}

    with ExitStack() as stack:
        pool, store = stack.enter_context(ThreadPoolExecutor(8)), HashStore()
        engines = [stack.enter_context(engine_of(f"{i}", i)) for i in range(3)]
        ours, mine, late = tensors(), tensors(), tensors()
        ours["d"].copy_(torch.arange(16).view(4, 4))
        trainer_made = pool.submit(WeightTrainer, engines[0], store, source, 0, ours)
        founder = WeightEngineRank(engines[1], store, target, 0, mine, finalize=transpose)
        trainer = stack.enter_context(trainer_made.result(60))
        engine_ranks = [stack.enter_context(founder)]

        def update(version: int, **how: Any) -> None:
            ours["w"].fill_(version)
            running = [pool.submit(trainer.update, version, **how)]
            running += [pool.submit(each.wait) for each in engine_ranks]  # type: ignore[misc]
            failed = [each.exception(60) for each in running]
            if failed[0] is not None:
                raise failed[0]

        update(1)
        joined = WeightEngineRank(
            engines[2], store, target, 0, late, replica="late", finalize=transpose
        )
        engine_ranks.append(stack.enter_context(joined))
        for version in (2, 3):  # at first it has no d in checkpoint layout
            update(version, only=["w"])
            assert trainer.totals["failed"] == 1
            for each in (mine, late):
                assert torch.equal(each["d"], ours["d"].t())
                assert torch.equal(each["w"], ours["w"])


# --- set-up, keys, flags ---


def begins_afterwards(found: World) -> None:
    """In the same place, where a set-up was refused."""
    fine = found.begin_engine_rank()
    found.train()
    found.engine_ranks = [fine.result(60)]
    found.update(1)
    found.check(1)


def test_a_refusal_at_set_up_is_heard_by_all() -> None:
    with ExitStack() as stack:
        found = World(stack)
        made = [found.begin_trainer(i, 0.0) for i in range(2)]
        made.append(found.begin_engine_rank(watermark=1))  # type: ignore[arg-type]
        began = time.monotonic()
        for each in made:
            with pytest.raises(MoeP2pError, match="the watermark is 1"):
                each.result(60)
        assert time.monotonic() - began < LIMITS["timeout_s"] / 2  # not at its deadline
        begins_afterwards(found)


def test_layouts_of_trainers_that_differ_are_named() -> None:
    """A parameter of each rank's own mesh, say."""
    other = WeightLayout([*SOURCE.params, Param("norm", (6,), BF16, (1,))], 2)
    with ExitStack() as stack:
        found = World(stack)
        made = [found.begin_trainer(0, 0.0), found.begin_trainer(1, 0.0, other)]
        made.append(found.begin_engine_rank())  # type: ignore[arg-type]
        for each in made:
            with pytest.raises(MoeP2pError, match=r"trainer 1 has another layout .* norm: \[Param"):
                each.result(60)


def test_who_runs_another_version_is_refused_by_name() -> None:
    with world() as found:
        found.update(1)
        words, engine_rank = found.trainers[0]._words, found.engine_ranks[0]
        now = words.get(job.NOW)
        words.put(job.NOW, {**now, "letter": "another"})
        with pytest.raises(ProtocolError, match="trainer 0 runs another version of moe_p2p, lett"):
            found.begin_engine_rank("late").result(60)
        words.put(job.NOW, {**now, "job": now["job"] + 1, "letter": None})
        with pytest.raises(ProtocolError, match="trainer 0 runs another version of moe_p2p, lett"):
            found.begin_trainer(1, 0.0).result(60)
        assert engine_rank.step() == 1  # it goes on with what it has
        engine_rank._member.announce(letter="another")
        words.put(job.NOW, {**now, "letter": "another"})  # its roll is there: it has ended
        for each in found.trainers:
            each.close()
        assert engine_rank._words.get(f"{now['job']}/roll")
        with pytest.raises(MoeP2pError, match="generator 0 runs another version of moe_p2p"):
            found.train()


@pytest.mark.parametrize("who", ["trainer 0", "trainer 1", "generator 0"])
def test_a_wrong_argument_of_one_rank_is_heard_by_all_that_wait(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checks come first: trainer 0 has opened no job yet."""
    waiting, listen = set[str](), SetUp.listen

    def listens(self: SetUp, *missing: Any) -> None:
        waiting.add(self._who)
        listen(self, *missing)

    monkeypatch.setattr(SetUp, "listen", listens)
    with ExitStack() as stack:
        found = World(stack)
        ranks = {"trainer 0": lambda **how: found.begin_trainer(0, 0.0, **how),
                 "trainer 1": lambda **how: found.begin_trainer(1, 0.0, **how),
                 "generator 0": found.begin_engine_rank}  # fmt: skip
        others = [ranks[each]() for each in ranks if each != who]
        until = time.monotonic() + LIMITS["timeout_s"] / 2
        while waiting != ranks.keys() - {who}:
            assert time.monotonic() < until
            time.sleep(0.001)
        wrong = ranks[who](lease_s=-1.0)
        began = time.monotonic()
        for each in (wrong, *others):
            with pytest.raises(MoeP2pError, match=f"{who}: lease_s is -1.0"):
                each.result(60)
        assert time.monotonic() - began < LIMITS["timeout_s"] / 2  # not at its deadline
        begins_afterwards(found)


def test_a_joiner_that_is_refused_stands_in_nobodys_way() -> None:
    """Neither of later ones, nor of trainers and joiners that are in their set-up."""
    with world() as found:
        found.update(1)

        def refused(**how: Any) -> None:
            with pytest.raises(MoeP2pError):
                found.begin_engine_rank("wrong", **how).result(60)

        refused(watermark=1)
        found.engine_ranks.append(found.begin_engine_rank("late").result(60))
        for each in found.trainers:
            each.close()
        first = found.begin_trainer(0, 0.0)
        words = found.engine_ranks[0]._words
        while current(words) is not None:
            time.sleep(0.001)
        joining = found.begin_engine_rank("later")
        refused(lease_s=-1.0)
        second = found.begin_trainer(1, 0.0)
        found.trainers = [first.result(60), second.result(60)]
        found.engine_ranks.append(joining.result(60))
        found.update(2)
        found.check(2)


def test_keys_of_old_updates_leave_the_store() -> None:
    with world() as found:
        counts = []
        for version in range(1, 13):
            found.update(version)
            counts.append(found.store.num_keys())
        assert counts[-1] <= counts[3] + 1


def test_a_decision_without_this_ranks_report_publishes_nothing() -> None:
    with world() as found:
        found.update(1)
        engine_rank = found.engine_ranks[0]
        running = found.start(2, 2.0, timeout_s=1.0)
        words, keys = found.trainers[0]._words, engine_rank._keys
        while words.get(keys.update) is None:
            time.sleep(0.001)
        words.decide(keys.decision, COMMIT)
        until = time.monotonic() + 20
        while not engine_rank.totals["failed"]:  # a thread looks
            assert time.monotonic() < until
            assert engine_rank.step() == 1
            found.is_true(engine_rank)
        assert found.live[engine_rank].unique().tolist() == [1.0]
        for each in running:
            each.exception(60)


def test_a_version_is_clean_once_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as found:
        found.update(1)
        engine_rank = found.engine_ranks[0]

        def fails(*_: object) -> None:
            raise OSError("a copy that fails")

        running = found.start(2, 2.0)
        with monkeypatch.context() as patched:
            patched.setattr(EngineBuffers, "commit", fails)
            with pytest.raises(OSError, match="a copy that fails"):
                engine_rank.wait()
        for each in running:
            each.result(60)
        assert (engine_rank.version, found.trainers[0].live()) == (1, {1: 1})


def test_stamps_rise_over_jobs_and_attempts() -> None:
    stamps = [
        Keys(job, number).stamp for job in (1_800_000_000, 1_800_000_001) for number in (1, 9)
    ]
    assert stamps == sorted(set(stamps))
    assert stamps[-1] < 1 << 63


def test_an_update_whose_job_was_replaced_as_it_was_decided_says_so() -> None:
    """Engine ranks have followed another job: nobody looks at the decision."""
    with world() as found:
        found.update(1)
        leader = found.trainers[0]

        def restart(stage: str) -> None:
            if stage == "arrived":
                job.open_job(leader._words, SOURCE)

        tell_stages(leader.stages, restart)
        running = found.start(2, 2.0)
        until = time.monotonic() + 60
        while not running[0].done():
            assert time.monotonic() < until
            found.engine_ranks[0]._progress()
        with pytest.raises(AbortedError, match="another job of trainers has taken the name"):
            running[0].result()
        assert leader.version == 1


def test_an_attempt_that_was_decided_for_another_update_is_named() -> None:
    with world() as found:
        found.update(1)
        trainer = found.trainers[0]
        keys = Keys(trainer._job.number, trainer._attempt + 1)
        update = {"version": 7, "wish": dict.fromkeys(("version", "verify", "changed", "only",
                                                       "newcomers"))}  # fmt: skip
        trainer._words.put(keys.update, update)
        trainer._words.put(keys.decision, COMMIT)
        with pytest.raises(ProtocolError, match=r"this trainer updates to .* another one to"):
            trainer.update(2)
        assert trainer.version == 1


def test_ranks_that_describe_a_side_otherwise_hear_which_parameter() -> None:
    """As trainers of a 2-D mesh that each describe what they have themselves."""
    other = WeightLayout([Param("w", SHAPE, BF16, (1, 0), placements=(Shard(0),))], 2)
    with ExitStack() as stack:
        found = World(stack)
        found.begin_engine_rank()
        trainers = [found.begin_trainer(0, 0.0), found.begin_trainer(1, 0.0, other)]
        for each in trainers:
            error = each.exception(LIMITS["timeout_s"])
            assert "trainer 1 has another layout than trainer 0: w: [Param(name='w'" in str(error)
            assert "layout_of" in str(error)


def test_engine_ranks_that_describe_their_side_otherwise_hear_which_parameter() -> None:
    sides = [WeightLayout([Param("w", (8, 6), BF16, ranks)], 2) for ranks in ((0, 1), (1,))]
    store = HashStore()

    def said(words: StoreKeys) -> Any:
        now = words.get(job.NOW)
        return now and words.get(f"{now['job']}/layout")

    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        engines = [stack.enter_context(engine_of(f"{i}", i)) for i in range(3)]
        w = torch.zeros(8, 6, dtype=torch.bfloat16)
        source = WeightLayout([Param("w", (8, 6), BF16, (0,))], 1)
        trainer = pool.submit(WeightTrainer, engines[2], store, source, 0, {"w": w}, **LIMITS)
        made = []
        for rank, layout in enumerate(sides):
            until = time.monotonic() + 60
            while rank and not said(StoreKeys(store, job.prefix_of("weights"))):
                assert time.monotonic() < until
            given = (engines[rank], store, layout, rank, {"w": w.clone()})
            made.append(pool.submit(WeightEngineRank, *given, **LIMITS))
        for each in (made[1], trainer):  # the first engine rank may be set up by then
            text = "generator 1 has another layout than generator 0: w: [Param(name='w'"
            assert text in str(each.exception(60))
        with suppress(MoeP2pError):
            made[0].result(60).close()
