"""Versions are true: failures by name, late writes, forward passes, and each part is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError, MoeP2pError, ProtocolError
from moe_p2p.errors import AbortedError, RemoteAccessError
from moe_p2p.fleet.client import Deadline
from moe_p2p.weights import WeightEngineRank, attempt
from moe_p2p.weights.attempt import COMMIT
from moe_p2p.weights.sending import UnwrittenError
from moe_p2p.weights.trainer_buffers import TrainerBuffers
from tests.support.weights_fleet import MODELS, Fleet, fleet
from tests.support.weights_mutations import MUTATIONS, mutated


class NotTrueError(AssertionError):
    """A promise is broken: what a mutation must lead to."""


def check(found: Fleet, version: int) -> None:
    try:
        found.check(version)
    except AssertionError as error:
        raise NotTrueError(str(error)) from error


def update(found: Fleet, version: int) -> None:
    try:
        found.finish(found.train(version))
    except MoeP2pError as error:
        raise NotTrueError(f"version {version} could not be updated to: {error}") from error


def fail_an_update(found: Fleet, version: int) -> list[Future[Any]]:
    """One trainer has wrong tensors, the others may have written by then."""
    values = found.model.values(version)
    running = [
        found.pool.submit(
            each.update,
            version,
            {"none": torch.zeros(1)}
            if each.rank == 3
            else found.model.trainer_tensors(each.rank, values),
        )
        for each in found.trainers
    ]
    waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
    ends: list[Future[Any]] = [*running, *waits]
    for each in ends:
        with pytest.raises(MoeP2pError, match=r"trainer 3|none of this trainer's"):
            each.result(60)
    return running


def bytes_that_come_late_are_counted_first(name: str) -> None:
    """Trainer 2 begins to write only when engine ranks had time to report."""
    hold = threading.Event()
    with fleet(MODELS[name]) as found:
        writer = found.trainers[2]._buffers.writer
        write = writer.write

        def held(*args: Any) -> Any:
            assert hold.wait(20)
            return write(*args)

        writer.write = held  # type: ignore[method-assign]
        running = found.train(1)
        waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
        words = found.trainers[0]._words
        for _ in range(100):  # an engine rank that does not count reports within it
            if words.get(found.trainers[0]._keys.arrived(found.engine_ranks[0]._member.id)):
                break
            threading.Event().wait(0.005)
        assert all(each.version is None for each in found.engine_ranks)
        hold.set()
        for each in [*running, *waits]:
            each.result(60)
        check(found, 1)


def immediates_come_after_their_update() -> None:
    with fleet(MODELS["fused"]) as found:
        fail_an_update(found, 1)
        late = attempt.immediate(found.trainers[0]._keys)
        for trainer in found.trainers[:2]:  # as a NIC that had them would
            for target in trainer._buffers.writer._targets.values():
                for _ in range(40):  # more than an engine rank counts in an update
                    trainer.engine.send_imm(target.peer, late).wait(20)
        update(found, 2)
        check(found, 2)


def a_write_comes_after_its_update() -> None:
    """A trainer that was stopped goes on with what it had posted, after the next version."""
    with fleet(MODELS["fused"]) as found:
        writer = found.trainers[0]._buffers.writer
        prepared = found.trainers[0]._buffers._replicas[""].prepared({})[0]
        engine_rank = found.engine_ranks[prepared.write.target_rank]._member.id
        batch = writer.grouped([(engine_rank, prepared)])
        fail_an_update(found, 1)
        # The next update disconnects; a write that is under way stands for one that is not.
        try:
            writer.write(batch, attempt.immediate(found.trainers[0]._keys))
            writer.finish(None, Deadline(20), lambda missing: None)
        except UnwrittenError as error:
            if isinstance(error.error, RemoteAccessError):
                writer._direct.clear()
                return
        raise NotTrueError("a write of an update that failed reached the shadow of the next one")


def derived_tensors_are_made() -> None:
    with fleet(MODELS["derived"]) as found:
        update(found, 1)
        check(found, 1)


def blocks_of_neighbours_have_one_scale() -> None:
    with fleet(MODELS["fp8"]) as found:
        update(found, 1)
        check(found, 1)


def an_engine_rank_that_was_replaced_stops() -> None:
    with fleet(MODELS["fused"], lease_s=0.4) as found:
        update(found, 1)
        old = found.engine_ranks[1]
        found.join("", 1)
        del found.engine_ranks[1], found.live[1]
        try:
            update(found, 2)
            check(found, 2)
            if not old._member._beat.stopped.wait(3):  # at its next renewal
                raise NotTrueError("it goes on")
            with pytest.raises(AbortedError, match="was replaced"):
                old.step()
            assert old.version == 1
        finally:
            old.close()


def a_decision_counts_for_who_has_reported() -> None:
    with fleet(MODELS["fused"]) as found:
        update(found, 1)
        running = found.train(2, timeout_s=1.0)
        words, keys = found.trainers[0]._words, found.engine_ranks[0]._keys
        words.wait({keys.update: "trainer 0"}, Deadline(20))
        words.decide(keys.decision, COMMIT)
        engine_rank = found.engine_ranks[0]
        engine_rank._progress()
        for each in running:
            each.exception(60)
        if engine_rank.step() != 1:
            raise NotTrueError("it went to a version that it had not reported")


def a_copy_fails() -> None:
    with fleet(MODELS["fused"]) as found:
        update(found, 1)
        engine_rank = found.engine_ranks[0]
        running = found.train(2)
        other = found.pool.submit(found.engine_ranks[1].wait)
        with (
            mock.patch.object(engine_rank._buffers, "commit", side_effect=OSError("a copy fails")),
            pytest.raises(OSError, match="a copy fails"),
        ):
            engine_rank.wait()
        for each in [*running, other]:
            each.result(60)
        if not engine_rank.dirty or engine_rank.version != 1:
            raise NotTrueError("it is clean, and was not copied")


SCENARIOS: dict[str, Callable[[], None]] = {
    "publish before count": lambda: bytes_that_come_late_are_counted_first("derived"),
    "no epoch": immediates_come_after_their_update,
    "skip finalize": derived_tensors_are_made,
    "no boundary maxima": blocks_of_neighbours_have_one_scale,
    "no incarnation in the record": an_engine_rank_that_was_replaced_stops,
    "commit without arrival": a_decision_counts_for_who_has_reported,
    "clean before copied": a_copy_fails,
    "no fence": a_write_comes_after_its_update,
}


def test_there_is_a_scenario_for_each() -> None:
    assert SCENARIOS.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_part_is_needed(name: str) -> None:
    SCENARIOS[name]()
    with mutated(name), pytest.raises(NotTrueError):
        SCENARIOS[name]()


# --- forward passes ---


class InferenceEngine:
    """An inference engine of both engine ranks: forward passes, each after a step, in lockstep."""

    def __init__(self, together: bool) -> None:
        self._barrier, self._together = threading.Barrier(2, timeout=20), together
        self._numbers: list[int] = []
        self._lock = threading.Lock()

    def agree(self, number: int) -> int:
        smallest = self.smallest(number)
        return smallest if self._together else number

    def smallest(self, number: int) -> int:
        with self._lock:
            self._numbers.append(number)
        self._barrier.wait()
        smallest = min(self._numbers[-2:])
        self._barrier.wait()  # nobody adds the next one before both have looked
        return smallest


def late_decision(engine_rank: WeightEngineRank, looks: int) -> None:
    """Its store shows decisions only after so many looks at them."""
    get, seen = engine_rank._words.get, [0]

    def slow(key: str) -> Any:
        value = get(key)
        if key.endswith("/decision") and value is not None:
            seen[0] += 1
            return value if seen[0] % looks == 0 else None
        return value

    engine_rank._words.get = slow  # type: ignore[method-assign]


def passes_of(
    found: Fleet, engine: InferenceEngine, rank: int, last: int
) -> list[tuple[int, dict[str, int]]]:
    """Of each pass: the version it ran under, and sums of the weights that it read."""
    engine_rank = found.engine_ranks[rank]
    seen: list[tuple[int, dict[str, int]]] = []
    while engine.smallest(engine_rank.version or 0) != last:
        version = engine_rank.step()
        seen.append((version or 0, engine_rank.checksums()))
    return seen


def run_passes(together: bool) -> int:
    """How many forward passes saw two versions."""
    engine, model, last = InferenceEngine(together), MODELS["fused"], 5
    how: dict[str, Any] = {"engine_ranks": (0, 1), "agree": engine.agree}
    with fleet(model, **how) as found:
        late_decision(found.engine_ranks[1], 5)
        passes = [found.pool.submit(passes_of, found, engine, i, last) for i in range(2)]
        for version in range(1, last + 1):
            for each in found.train(version):
                each.result(60)
        seen = [each.result(60) for each in passes]
    sums: dict[tuple[int, int], dict[str, int]] = {}
    for version in range(last + 1):
        for rank in range(2):
            tensors = model.wanted(rank, model.values(version)) if version else model.empty(rank)
            sums[version, rank] = {n: attempt.whole_sum(each) for n, each in tensors.items()}
    mixed = 0
    for one, other in zip(*seen, strict=True):
        read = [each == sums[version, rank] for rank, (version, each) in enumerate((one, other))]
        mixed += not (one[0] == other[0] and all(read))
    return mixed


def test_no_forward_pass_sees_two_versions() -> None:
    assert run_passes(together=True) == 0


# --- failures and arguments ---


def test_a_failed_update_keeps_the_shadows_version_and_the_next_one_is_complete() -> None:
    with fleet(MODELS["mixed"]) as found:
        update(found, 1)
        fail_an_update(found, 2)
        check(found, 1)
        assert [each.step() for each in found.engine_ranks] == [1, 1]
        assert found.trainers[0].live() == {1: 2}
        update(found, 3)
        check(found, 3)


def test_a_trainer_that_is_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(MODELS["fused"]) as found:
        update(found, 1)
        send = TrainerBuffers.send

        def interrupted(self: TrainerBuffers, *args: Any) -> dict[str, dict[str, int]]:
            if self._rank == 3:
                raise KeyboardInterrupt
            return send(self, *args)

        monkeypatch.setattr(TrainerBuffers, "send", interrupted)
        running = found.train(2)
        waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
        with pytest.raises(KeyboardInterrupt):
            running.pop().result(60)
        for each in [*running, *waits]:
            with pytest.raises(MoeP2pError, match="trainer 3: KeyboardInterrupt"):
                each.result(60)
        check(found, 1)


def test_a_failed_update_in_place_is_dirty_until_a_complete_one() -> None:
    with fleet(MODELS["fused"], mode="in_place", poison=True) as found:
        for engine_rank in found.engine_ranks:
            engine_rank.begin()
            assert all(bool(each.isnan().any()) for each in found.live[engine_rank.rank].values())
        fail_an_update(found, 1)
        for engine_rank in found.engine_ranks:
            with pytest.raises(ProtocolError, match=r"dirty, a mix of versions.*trainer 3"):
                engine_rank.step()
            engine_rank.begin()
        assert found.trainers[0].live() == {None: 2}
        update(found, 2)
        check(found, 2)
        assert [each.step() for each in found.engine_ranks] == [2, 2]


def test_an_update_in_place_that_nobody_sends_is_over_by_its_deadline() -> None:
    with fleet(MODELS["fused"], mode="in_place") as found:
        engine_rank = found.engine_ranks[0]
        engine_rank.begin()
        with pytest.raises(MoeP2pError, match="no update was over within"):
            engine_rank.wait(0.1)
        with pytest.raises(ProtocolError, match="dirty"):
            engine_rank.require_clean()


def test_trainers_of_different_versions_are_refused() -> None:
    with fleet(MODELS["fused"]) as found:
        running = [found.pool.submit(each.update, 1 + each.rank // 3) for each in found.trainers]
        for each in running:
            with pytest.raises(MoeP2pError, match="another one to"):
                each.result(60)
        assert [each.step() for each in found.engine_ranks] == [None, None]


def test_a_late_trainer_hears_of_versions_that_differ() -> None:
    """The attempt is decided against by one of another version before it begins."""
    with fleet(MODELS["fused"]) as found:
        late = found.trainers[1]
        early = [each for each in found.trainers if each is not late]
        running = [found.pool.submit(each.update, 1 + each.rank // 3) for each in early]
        for each in running:
            with pytest.raises(MoeP2pError, match="another one to"):
                each.result(60)
        began = time.monotonic()
        with pytest.raises(MoeP2pError, match="another one to"):
            late.update(1)
        assert time.monotonic() - began < late.timeout_s / 2


def test_bytes_that_changed_on_the_way_are_found_by_their_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fleet(MODELS["mixed"]) as found:
        send = TrainerBuffers.send

        def wrong(self: TrainerBuffers, *args: Any) -> dict[str, dict[str, int]]:
            found = send(self, *args)
            return {who: {n: s + 1 for n, s in each.items()} for who, each in found.items()}

        monkeypatch.setattr(TrainerBuffers, "send", wrong)
        running = found.train(1, verify=True)
        waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
        for each in [*running, *waits]:
            with pytest.raises(MoeP2pError, match="is not what it sent"):
                each.result(60)


def test_check_equal_names_the_tensor() -> None:
    model = MODELS["fused"]
    with fleet(model, poison=True) as found:
        update(found, 1)
        engine_rank = found.engine_ranks[1]
        wanted = model.wanted(1, model.values(1))
        engine_rank.check_equal(wanted)
        with pytest.raises(ProtocolError, match="generator 1 at version 1: qkv differ"):
            engine_rank.check_equal(model.wanted(1, model.values(2)))
        found.live[1]["qkv"].view(-1)[-1] += 1
        with pytest.raises(ProtocolError, match="qkv differ"):
            engine_rank.check_equal(wanted)


def forgetful(received: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    tensors["twice"].copy_(received["d"].float().flatten() * 2)


def test_a_derived_tensor_that_finalize_forgets_fails_the_update() -> None:
    with fleet(MODELS["derived"], finalize=forgetful) as found:
        with pytest.raises(MoeP2pError, match="finalize did not make tensor 'sums'"):
            found.finish(found.train(1))
        assert all(each.version is None for each in found.engine_ranks)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_finalize_has_no_mode_of_the_engines_thread(mode: str) -> None:
    model, seen = MODELS["derived"], set[tuple[bool, ...]]()
    stepping = threading.get_ident()

    def finalize(received: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                  torch.empty(0).is_meta, threading.get_ident() == stepping))  # fmt: skip
        assert model.finalize is not None
        model.finalize(received, tensors)

    def go(engine_rank: WeightEngineRank) -> None:
        with torch.inference_mode(), torch.device("meta"):
            engine_rank.begin()
            engine_rank.wait()

    with fleet(model, finalize=finalize, mode=mode) as found:
        running = found.train(1)
        if mode == "in_place":
            for each in [*[found.pool.submit(go, each) for each in found.engine_ranks], *running]:
                each.result(60)
        until = time.monotonic() + 60
        while mode == "shadow" and any(each.version != 1 for each in found.engine_ranks):
            assert time.monotonic() < until
            with torch.inference_mode(), torch.device("meta"):
                for each in found.engine_ranks:
                    each.step()
        for each in running:
            each.result(60)
        found.check(1)
    assert seen == {(False, False, False, False)}


@pytest.mark.parametrize(
    ("name", "how", "match"),
    [
        ("derived", {"finalize": None}, "pass finalize"),
        ("fused", {"mode": "both"}, "mode is 'both'"),
        ("fused", {"engine_ranks": (0, 1)}, "pass agree"),
    ],
)
def test_wrong_arguments(name: str, how: dict[str, Any], match: str) -> None:
    with (
        pytest.raises(InvalidArgumentError, match=match),
        fleet(MODELS[name], timeout_s=2.0, **how),
    ):
        pass


def test_passes_of_ranks_that_do_not_agree_are_found() -> None:
    """The test of the test above: each rank goes to a version by itself."""
    assert run_passes(together=False) > 0
