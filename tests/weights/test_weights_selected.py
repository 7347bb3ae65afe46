"""Some parameters only, and conversions in a bounded ring: every byte, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError, MoeP2pError, ResourceExhaustedError, TimeoutError
from moe_p2p.errors import make
from moe_p2p.weights import WeightTrainer, conversion, job, weight_plan
from moe_p2p.weights.attempt import Keys
from moe_p2p.weights.conversion import Conversions, _in_order
from moe_p2p.weights.models import MODELS as SHAPES
from moe_p2p.weights.models import engine_ranks, trainers
from moe_p2p.weights.sending import Batch, RegionWriter, UnwrittenError
from tests.support.weights_fleet import MODELS, Fleet, fleet

Values = dict[str, torch.Tensor]


def mixed(found: Fleet, old: int, new: int, names: set[str]) -> Values:
    """Values of version `new` for these parameters, and of `old` for the others."""
    before, after = found.model.values(old), found.model.values(new)
    return {name: (after if name in names else before)[name] for name in before}


def begin(found: Fleet, version: int, values: Values, **how: Any) -> list[Any]:
    return [
        found.pool.submit(
            each.update, version, found.model.trainer_tensors(each.rank, values), **how
        )
        for each in found.trainers
    ]


def update(found: Fleet, version: int, values: Values, **how: Any) -> None:
    running = begin(found, version, values, **how)
    if found.engine_ranks[0].mode == "in_place":
        for engine_rank in found.engine_ranks:
            engine_rank.begin()
    found.finish(running)


def attempts(found: Fleet) -> list[int]:
    return [each.totals["attempts"] for each in found.trainers]


def update_all_at_once(found: Fleet, version: int, values: Values, **how: Any) -> None:
    """Engine ranks are asked, and may refuse, when each trainer has begun. A trainer that begins
    after an attempt was refused takes part in the next one alone."""
    before = attempts(found)
    running = begin(found, version, values, **how)
    _until(lambda: attempts(found) == [each + 1 for each in before])
    if found.engine_ranks[0].mode == "in_place":
        for engine_rank in found.engine_ranks:
            engine_rank.begin()
    found.finish(running)


def fail(found: Fleet, running: list[Any], text: str) -> None:
    """On all ranks."""
    waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
    for each in [*running, *waits]:
        with pytest.raises(MoeP2pError, match=text):
            each.result(100)


def check(found: Fleet, version: int, values: Values) -> None:
    for engine_rank, live in zip(found.engine_ranks, found.live, strict=True):
        assert engine_rank.version == version
        for name, each in found.model.wanted(engine_rank.rank, values).items():
            assert torch.equal(live[name].view(-1).view(torch.uint8),
                               each.view(-1).view(torch.uint8)), (version, name)  # fmt: skip


def written(found: Fleet) -> int:
    return sum(each.totals["bytes_written"] for each in found.trainers)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize(
    ("name", "names"), [("fused", {"k", "v"}), ("mixed", {"a", "e1"}), ("derived", {"w"})]
)
def test_only_some_parameters(name: str, names: set[str], mode: str) -> None:
    with fleet(MODELS[name], mode=mode) as found:
        update(found, 1, found.model.values(1))
        whole = written(found)
        values = mixed(found, 1, 2, names)
        update(found, 2, values, only=names, verify=True)
        check(found, 2, values)
        assert 0 < written(found) - whole < whole
        with pytest.raises(MoeP2pError, match="no generator gets none"):
            found.trainers[0].update(3, only={"none"})


def test_a_part_straight_after_an_update_that_engines_have_not_copied() -> None:
    """A forward pass takes longer than the next update takes to begin."""
    with fleet(MODELS["fused"]) as found:
        running = begin(found, 1, found.model.values(1))
        while not all(each.done() for each in running):
            for each in found.engine_ranks:
                each._progress()  # bytes arrive, and nothing is copied: the pass goes on
        for each in found.engine_ranks:
            each._progress()  # hears the decision, which trainers may have made since
        assert [each.version for each in found.engine_ranks] == [None, None]
        whole, values = written(found), mixed(found, 1, 2, {"k"})
        running = begin(found, 2, values, only={"k"})
        for each in found.trainers:
            _until(lambda t=each: "begin" in t.stages and t.totals["attempts"] == 2)
        for each in found.engine_ranks:
            assert each.step() == 1
        found.finish(running)
        check(found, 2, values)
        assert 0 < written(found) - whole < whole


def _until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_calls_that_overlap_are_refused_and_no_version_is_mixed() -> None:
    with fleet(MODELS["fused"]) as found:
        update(found, 1, found.model.values(1))
        running = begin(found, 2, found.model.values(2))  # engine ranks are not asked: it goes on
        for each in found.trainers:
            _until(lambda t=each: t.totals["attempts"] == 2)
            other = found.model.trainer_tensors(each.rank, found.model.values(3))
            for call in (
                lambda t=each, other=other: t.update(3, other),
                lambda t=each: t.update(3),
                lambda t=each: t.admit(),
                lambda t=each: t.abort("a reason"),
            ):
                with pytest.raises(
                    InvalidArgumentError, match=r"trainer \d: .*: an update is under way"
                ):
                    call()
        found.finish(running)
        check(found, 2, found.model.values(2))
        update(found, 3, found.model.values(3))
        check(found, 3, found.model.values(3))
        assert found.trainers[0].totals["failed"] == 0


def test_what_changed_is_all_for_one_release() -> None:
    with fleet(MODELS["mixed"]) as found:
        update(found, 1, found.model.values(1))
        whole, values = written(found), mixed(found, 1, 2, {"b"})
        with pytest.warns(DeprecationWarning, match="say which ones, only=") as warned:
            update(found, 2, values, changed=True)
        check(found, 2, values)
        assert written(found) == 2 * whole
        assert len(warned) == len(found.trainers)
        with (
            pytest.raises(InvalidArgumentError, match="pass one"),
            pytest.warns(DeprecationWarning, match="only="),
        ):
            found.trainers[0].update(3, only={"b"}, changed=True)


def test_a_part_is_sent_whole_where_an_engine_rank_has_no_version() -> None:
    """One that joined, and could not read from a peer. The leader knows it from the store."""
    with fleet(MODELS["fused"]) as found:
        update(found, 1, found.model.values(1))
        for each in found.engine_ranks:
            each._lent.shut()  # a joining rank finds no peer
        late = found.join("late", 0)
        assert late.version is None
        values = mixed(found, 1, 2, {"q"})
        update(found, 2, values, only={"q"})
        check(found, 2, values)
        assert found.trainers[0].totals["failed"] == 0


def refuse_a_part(found: Fleet) -> Values:
    """Returns values of which the next update of a part is refused by an engine rank."""
    update(found, 1, found.model.values(1))
    found.engine_ranks[1]._stamp = 0
    return mixed(found, 1, 2, {"q"})


def test_a_part_is_sent_whole_where_an_engine_rank_missed_a_version() -> None:
    """The leader believes the store; the engine rank knows what it has."""
    with fleet(MODELS["fused"]) as found:
        values = refuse_a_part(found)
        update_all_at_once(found, 2, values, only={"q"})
        check(found, 2, values)
        assert [each.totals["failed"] for each in found.trainers] == [1] * len(found.trainers)
        values = mixed(found, 1, 3, {"q"})
        update(found, 3, values, only={"q"})  # the next one is of a part again
        check(found, 3, values)
        assert found.trainers[0].totals["failed"] == 1


def test_a_trainer_that_begins_after_a_refusal_takes_part_in_the_next_attempt() -> None:
    with fleet(MODELS["fused"]) as found:
        values, late = refuse_a_part(found), found.trainers[-1]

        def update_of(each: WeightTrainer) -> Any:
            tensors = found.model.trainer_tensors(each.rank, values)
            return found.pool.submit(each.update, 2, tensors, only={"q"})

        running = [update_of(each) for each in found.trainers if each is not late]
        while late._words.get(job.NOW)["attempt"] < 3:
            for engine_rank in found.engine_ranks:
                engine_rank.step()
        found.finish([*running, update_of(late)])
        check(found, 2, values)
        assert attempts(found) == [3] * len(found.trainers)
        assert [each.attempts_failed for each in found.trainers] == [1, 1, 1, 0]
        update(found, 3, found.model.values(3), only={"q"})
        assert attempts(found) == [4] * len(found.trainers)


def test_a_trainer_that_connects_after_a_refusal_goes_on_at_once() -> None:
    """What it was told is lent has been taken back: what it waits for would never come."""
    with fleet(MODELS["fused"]) as found:
        values, late = refuse_a_part(found), found.trainers[1]
        late.timeout_s *= 1.5  # others give up before
        words, generation = late._words, late._buffers.writer.generation

        def late_look(engine_rank: str) -> str:
            """Between what is ready and what is lent."""
            ready = words.get(Keys(late._job.number, 2).ready(engine_rank))
            while late.totals["attempts"] == 2 and lent(engine_rank) == ready:
                time.sleep(0.001)
            return generation(engine_rank)

        def lent(engine_rank: str) -> str:
            return str(words.get(late._job.key(f"lends/{engine_rank}"))["generation"])

        late._buffers.writer.generation = late_look  # type: ignore[method-assign]
        began = time.monotonic()
        update_all_at_once(found, 2, values, only={"q"})
        assert time.monotonic() - began < late.timeout_s / 2
        check(found, 2, values)
        assert late.totals["failed"] == 1


def test_an_engine_rank_that_begins_anew_within_an_attempt_is_named() -> None:
    with fleet(MODELS["fused"]) as found:
        update(found, 1, found.model.values(1))
        words = found.trainers[0]._words
        keys = Keys(found.trainers[0]._job.number, 2)
        words.put(keys.ready(found.engine_ranks[1]._member.id), "of another process")
        running = begin(found, 2, found.model.values(2))
        fail(found, running, "generator 1 has begun anew: it lends of another process no more")
        update(found, 3, found.model.values(3))
        check(found, 3, found.model.values(3))


def test_a_write_that_began_late_says_so() -> None:
    late = make(TimeoutError, "trainer 0: write is not done within 0 s")
    error = UnwrittenError("generator 1", "q", late).named({"begin": 39.96, "ready": 39.98})
    assert isinstance(error, TimeoutError)
    assert "writing q to generator 1" in str(error)
    assert "within 0 s; this attempt was at begin after 40.0 s, ready after 40.0 s" in str(error)


@pytest.mark.parametrize("name", ["fused", "mixed"])
def test_a_part_after_a_failed_update_has_nothing_of_that_one(name: str) -> None:
    with fleet(MODELS[name], poison=True) as found:
        update(found, 1, found.model.values(1))
        names = {"k"} if name == "fused" else {"a", "e0"}
        bad = found.model.values(2)
        running = [
            found.pool.submit(
                each.update, 2,
                {"none": torch.zeros(1)} if each.rank == 3
                else found.model.trainer_tensors(each.rank, bad),
            )
            for each in found.trainers
        ]  # fmt: skip
        fail(found, running, "none of this trainer's")
        values = mixed(found, 1, 3, names)
        update(found, 3, values, only=names)
        check(found, 3, values)


@pytest.mark.parametrize(
    ("name", "part", "how"), [("derived", "w", {}), ("fused", "q", {"mode": "in_place"})]
)
def test_a_part_is_sent_whole_where_the_others_are_lost(
    name: str, part: str, how: dict[str, Any]
) -> None:
    """What finalize needs of them, or the tensors themselves, which poison has overwritten."""
    with fleet(MODELS[name], poison=True, **how) as found:
        update(found, 1, found.model.values(1))
        values = mixed(found, 1, 2, {part})
        update_all_at_once(found, 2, values, only={part})
        check(found, 2, values)
        for each in found.trainers:
            assert each.attempts_failed == 1


# --- the ring ---


@pytest.mark.parametrize("name", ["fp8", "mixed", "replicas"])
def test_updates_through_a_small_ring(name: str) -> None:
    watermark = 256 if name == "mixed" else 1800  # of "mixed" two copies have one place
    with fleet(MODELS[name], training={"watermark": watermark}) as found:
        for version in (1, 2, 3):
            update(found, version, found.model.values(version), verify=version > 1)
            check(found, version, found.model.values(version))
        assert 0 < max(each.totals["staging_bytes"] for each in found.trainers) <= watermark


def test_a_batch_is_converted_before_the_one_before_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a GPU stands idle while the CPU submits."""
    seen: list[tuple[object, int]] = []
    convert, write = Conversions.convert, RegionWriter.write

    def converted(self: Conversions, batch: list[int]) -> None:
        seen.append((self, batch[0]))
        convert(self, batch)

    def written(self: RegionWriter, batch: Batch, imm: int) -> None:
        seen.append((self, min((each.copy for each in batch.groups), default=-1)))
        write(self, batch, imm)

    monkeypatch.setattr(Conversions, "convert", converted)
    monkeypatch.setattr(RegionWriter, "write", written)
    with fleet(MODELS["mixed"]) as found:
        update(found, 1, found.model.values(1))
        check(found, 1, found.model.values(1))
        buffers = found.trainers[3]._buffers  # sends both copies
        firsts = [batch[0] for batch, _ in buffers._grouped[1] if batch]
        assert len(firsts) > 1
        for before, number in itertools.pairwise(firsts):
            at = seen.index((buffers._conversions, number))
            assert seen.index((buffers._conversions, before)) < at
            assert at < seen.index((buffers.writer, before))


def test_copies_for_other_ranks_come_first() -> None:
    """A trainer and the engine rank of its number often share a GPU."""
    model = dataclasses.replace(SHAPES["qwen3-30b-a3b"], layers=1, experts=8)
    plan = weight_plan(trainers(model, 2), engine_ranks(model, 2, ep=2, tp=2))
    for rank in (0, 1):
        to = {each.source_tensor: each.target_rank for each in plan.of_source(rank)}
        experts = [to[each.tensor] for each in _in_order([plan], rank) if ".experts." in each.name]
        assert experts == [1 - rank] * 12 + [rank] * 12


def test_a_copy_that_does_not_fit_is_named() -> None:
    plan = weight_plan(*MODELS["fp8"].layouts)
    tensors = MODELS["fp8"].trainer_tensors(0, MODELS["fp8"].values(1))
    with pytest.raises(ResourceExhaustedError, match=r"trainer 0: converting w .* watermark"):
        Conversions([plan], 0, tensors, device=torch.device("cpu"), watermark=300)


def test_a_shadow_that_does_not_fit_is_named() -> None:
    with (
        pytest.raises(ResourceExhaustedError, match=r"generator [01]: mode .shadow. takes"),
        fleet(MODELS["fused"], watermark=100, timeout_s=2.0),
    ):
        pass


def test_copies_in_the_ring_do_not_meet() -> None:
    draw = random.Random(3)
    for _ in range(200):
        needs = [conversion.Need(str(i), *(draw.randint(0, most) for most in (900, 99, 400)))
                 for i in range(draw.randint(1, 40))]  # fmt: skip
        most = max(sum(conversion.sizes(each)) for each in needs)
        places, size = conversion.ring(needs, draw.choice([None, most, 2 * most, 5 * most]), "t")
        assert [each.after for each in places] == sorted(each.after for each in places)
        for i, place in enumerate(places):
            assert place.end <= size
            for j, other in enumerate(places[:i]):
                if other.elements < place.end and place.elements < other.end:
                    assert j <= place.after
        chosen = sorted(draw.sample(range(len(needs)), draw.randint(1, len(needs))))
        made = list(conversion.batches(places, chosen, size))
        assert [number for batch in made for number in batch] == chosen
        for batch in made:
            assert all(places[number].after < batch[0] for number in batch)


@pytest.mark.parametrize("name", ["fp8", "mixed"])
def test_what_is_in_host_memory_is_loaded_into_the_ring(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU: sources are copied into the ring, and converted there."""
    monkeypatch.setattr(Conversions, "_is_away", lambda self, copy: True)
    with fleet(MODELS[name], training={"watermark": 2000}) as found:
        for version in (1, 2):
            update(found, version, found.model.values(version))
            check(found, version, found.model.values(version))
        assert all(each._buffers._conversions._loaded for each in found.trainers)


def test_a_rank_has_numbers_of_the_blocks_it_touches_alone() -> None:
    plan = weight_plan(*MODELS["fp8"].layouts)  # rows 5 to 9 of 18, in blocks of 8 x 8
    tensors = MODELS["fp8"].trainer_tensors(1, MODELS["fp8"].values(1))
    made = Conversions([plan], 1, tensors, device=torch.device("cpu"))
    made.allocate()
    assert made.grids.flat.numel() == 2 * 3
