"""Plans move the bytes that the oracle says: sharded, fused, padded, transposed, quantized."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_p2p import InvalidArgumentError
from moe_p2p.weights import Blocks, Param, Replicate, Shard, WeightLayout, WeightPlan, weight_plan
from tests.support.weights_oracle import check, numbered

BF16 = "bfloat16"
FP8 = "float8_e4m3fn"


def plan_of(
    source: list[Param], target: list[Param], *, worlds: tuple[int, int] | None = None
) -> WeightPlan:
    sizes = worlds or [1 + max(max(p.ranks) for p in side) for side in (source, target)]
    return weight_plan(WeightLayout(source, sizes[0]), WeightLayout(target, sizes[1]))


def values_of(plan: WeightPlan, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        each.name: torch.randn(each.elements).mul(3).to(getattr(torch, each.dtype))
        for each in plan.source.params
    }


def numbers_of(plan: WeightPlan) -> dict[str, torch.Tensor]:
    found, first = {}, 0
    for name, (param, *_) in plan.source.by_name.items():
        found[name] = numbered(param.elements, getattr(torch, param.dtype), first)
        first += found[name].numel()
    return found


def test_fsdp_into_fused_qkv_of_tensor_parallelism() -> None:
    hidden, heads, kv = 24, 8, 2
    sizes = {"q": heads * 4, "k": kv * 4, "v": kv * 4}
    source = [Param(n, (rows, hidden), BF16, range(6), placements=(Shard(0),))
              for n, rows in sizes.items()]  # fmt: skip
    at = {"q": 0, "k": 8 * hidden, "v": 12 * hidden}  # 8 rows of q and 4 of k on each of 4 ranks
    target = [Param("q", (32, hidden), BF16, range(4), placements=(Shard(0),), tensor="qkv")]
    target += [
        Param(n, (8, hidden), BF16, range(4), (2, 2), (Shard(0), Replicate()), tensor="qkv",
              offset=at[n])
        for n in "kv"
    ]  # fmt: skip
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))
    assert {copy.tensor for rank in range(6) for copy in plan.copies(rank)} == set()


def test_experts_stacked_sharded_and_fused_go_to_physical_copies() -> None:
    experts, inner, hidden = 5, 8, 12
    shape = (experts, 2 * inner, hidden)
    source, target = [], []
    for e in range(experts):
        for i, part in enumerate(("gate", "up")):
            window = ((e, 1), (i * inner, inner), (0, hidden))
            source.append(
                Param(f"{e}.{part}", shape, BF16, range(6), (3, 2), (Shard(0), Shard(1)), window,
                      tensor="w13")
            )  # fmt: skip
    slots = {0: (0, 3, 4), 1: (1, 2, 3)}  # expert 3 on both ranks, 4 on rank 0 only
    for rank, logical in slots.items():
        for slot, e in enumerate(logical):
            for i, part in enumerate(("gate", "up")):
                offset = (slot * 2 + i) * inner * hidden
                target.append(Param(f"{e}.{part}", (inner, hidden), BF16, (rank,), tensor="w13",
                                    offset=offset))  # fmt: skip
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))


@pytest.mark.parametrize("how", ["transposed", "padded", "interleaved"])
def test_other_orders_and_gaps(how: str) -> None:
    source = [Param("w", (10, 14), BF16, range(4), (2, 2), (Shard(0), Shard(1)))]
    changes = {
        "transposed": {"order": (1, 0)},
        "padded": {"strides": (16, 1), "offset": 3},
        "interleaved": {"strides": (28, 1), "offset": 14},
    }[how]
    target = [Param("w", (10, 14), BF16, range(2), placements=(Shard(0),), **changes)]  # type: ignore[arg-type]
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))
    copied = [copy for rank in range(4) for copy in plan.copies(rank)]
    assert bool(copied) == (how == "transposed")  # a copy in the target's order: rows stay long


def test_strided_shards_are_those_of_fsdp_over_tensor_parallelism() -> None:
    placements = (Shard(0, 3), Shard(0))
    source = [Param("w", (12, 4), "float32", range(6), (2, 3), placements)]
    target = [Param("w", (12, 4), "float32", range(4), placements=(Shard(0),))]
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))


@pytest.mark.parametrize("blocks", [(128, 128), (4, 8)])
def test_fp8_without_gathering(blocks: tuple[int, int]) -> None:
    shape = (5 * blocks[0] + 2, 3 * blocks[1] + 3)
    source = [Param("w", shape, BF16, range(6), (3, 2), (Shard(0, 2), Shard(0)))]
    target = [
        Param("w", shape, FP8, (0, 1), tensor="packed", offset=5,
              blocks=Blocks("packed_scale", 2, blocks)),
        Param("w", shape, BF16, (2,)),
    ]  # fmt: skip
    plan = plan_of(source, target)
    check(plan, values_of(plan))
    assert any(True for rank in range(6) for _ in plan.maxima(rank))
    assert plan.gathered == ()


@pytest.mark.parametrize("stacked", [False, True])
def test_fp8_of_one_row(stacked: bool) -> None:
    """A gate of one output, also where its trainer has those of several layers in one tensor."""
    whole = {"shape": (3, 300), "window": ((1, 1), (0, 300))} if stacked else {"shape": (1, 300)}
    source = [Param("w", dtype=BF16, ranks=range(4), placements=(Shard(1),), **whole)]  # type: ignore[arg-type]
    target = [
        Param("w", (1, 300), FP8, (0,), tensor="q", blocks=Blocks("s", 3, order=(1, 0))),
        Param("w", (1, 300), FP8, (0,), tensor="p", blocks=Blocks("t", 0, (4, 8), strides=(9, 2))),
        Param("w", (1, 300), FP8, (1,), tensor="q", offset=7, blocks=Blocks("s", 0, (1, 75))),
    ]
    plan = plan_of(source, target)
    assert plan.gathered == ()
    wanted = [  # as the oracle has what lies along one dimension
        dataclasses.replace(
            each, blocks=dataclasses.replace(each.blocks, order=(), strides=each.blocks.strides[1:])
        )
        for each in target
        if each.blocks
    ]
    check(dataclasses.replace(plan, target=WeightLayout(wanted, 2)), values_of(plan))


def test_targets_of_one_parameter_have_blocks_of_their_own() -> None:
    source = [Param("w", (8, 12), BF16, range(2), placements=(Shard(0),))]
    target = [
        Param("w", (8, 12), FP8, (i,), tensor=f"w{i}", blocks=Blocks(f"s{i}", 0, shape))
        for i, shape in enumerate(((4, 4), (2, 12), (4, 4)))
    ]
    plan = plan_of(source, target)
    assert len({copy.tensor for copy in plan.copies(0)}) == 2
    check(plan, values_of(plan))


def test_a_window_of_one_element_that_some_ranks_lack() -> None:
    window = ((2, 1), (1, 1))
    source = [Param("w", (3, 2), BF16, range(3), placements=(Shard(0),), window=window)]
    plan = plan_of(source, [Param("w", (1,), "float32", (0,), offset=3)])
    check(plan, values_of(plan))
    assert [len(list(plan.of_source(rank))) for rank in range(3)] == [0, 0, 1]


def test_a_scalar_and_a_single_element() -> None:
    source = [Param(n, s, "float32", (0, 1)) for n, s in (("scalar", ()), ("one", (1, 1)))]
    plan = plan_of(source, [dataclasses.replace(each, ranks=(2, 0)) for each in source])
    check(plan, values_of(plan))


def test_without_boundary_maxima_blocks_differ() -> None:
    """The test of the test: plans whose exchanges are dropped are found out."""
    source = [Param("w", (8, 8), BF16, range(4), placements=(Shard(0),))]
    target = [Param("w", (8, 8), FP8, (0,), blocks=Blocks("s", shape=(4, 8)))]
    plan = plan_of(source, target)
    check(plan, values_of(plan))
    bare = dataclasses.replace(
        plan, templates=tuple(each._replace(exchanges=()) for each in plan.templates)
    )
    with pytest.raises(AssertionError):
        check(bare, values_of(plan))


def test_shards_of_a_target_that_begin_inside_a_block_are_gathered_and_say_why() -> None:
    source = [Param("w", (24, 8), BF16, range(2), placements=(Shard(0),))]
    sharded = Param(
        "w", (24, 8), FP8, range(2), placements=(Shard(0),), blocks=Blocks("s", 0, (8, 8))
    )
    plan = plan_of(source, [sharded])
    (gathered,) = plan.gathered
    assert gathered.nbytes == 24 * 8 * 2
    assert "w: indices 12 to 23 of dimension 0 begin inside a block of 8" in gathered.why
    received = dataclasses.replace(sharded, dtype=BF16, blocks=None, finalize="as above")
    check(dataclasses.replace(plan, target=WeightLayout((received,), 2)), values_of(plan))


def test_copies_that_a_rank_finalizes_have_tensors_of_their_own() -> None:
    source = [Param("w", (2, 2), BF16, (0,))]
    places = (("w", 0), ("w", 4), ("other", 0))
    target = [Param("w", (2, 2), BF16, (0,), tensor=t, offset=o, finalize="x") for t, o in places]
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))
    assert [write.target_tensor for write in plan.of_source(0)] == [
        "w:received", "w:received:w:4", "w:received:other:0"
    ]  # fmt: skip


def test_what_a_target_finalizes_is_sent_as_it_is() -> None:
    source = [Param("w", (6, 8), BF16, range(3), placements=(Shard(0),))]
    target = [Param("w", (6, 8), BF16, range(2), finalize="repacked by a kernel")]
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))
    assert [(each.name, each.nbytes, each.why) for each in plan.gathered] == [
        ("w", 2 * 6 * 8 * 2, "w: repacked by a kernel")
    ]


def test_replicas_share_what_is_large_and_take_turns_at_what_is_small() -> None:
    mesh, placements = (4, 2), (Replicate(), Shard(0))
    large = Param("large", (512, 1024), BF16, range(8), mesh, placements)
    small = [Param(f"small{i}", (8,), BF16, range(8), mesh, placements) for i in range(16)]
    target = [Param(p.name, p.shape, BF16, (0, 1, 2)) for p in (large, *small)]
    plan = plan_of([large, *small], target)
    sent = [sum(w.nbytes for w in plan.of_source(rank, ["large"])) for rank in range(8)]
    assert sent == [3 * 512 * 1024 * 2 // 8] * 8
    times = [sum(w.name != "large" for w in plan.of_source(rank)) for rank in range(8)]
    assert times == [16 * 2 * 3 // 8] * 8
    check(plan, numbers_of(plan))


def test_pipeline_stages_and_tied_embeddings() -> None:
    source = [Param("embed", (8, 4), BF16, (0, 1), placements=(Shard(0),)),
              Param("embed", (8, 4), BF16, (2, 3), placements=(Shard(0),)),
              Param("late", (8, 4), BF16, (2, 3), placements=(Shard(1),))]  # fmt: skip
    target = [Param(n, (8, 4), BF16, range(4)) for n in ("embed", "late")]
    plan = plan_of(source, target)
    check(plan, numbers_of(plan))
    assert {w.source_rank for rank in range(4) for w in plan.of_source(rank, ["embed"])} == {
        *range(4)
    }


def test_parameters_that_are_alike_are_planned_once() -> None:
    source, target = [], []
    for layer in range(20):
        for e in range(4):
            name = f"{layer}.{e}"
            source.append(Param(name, (8, 8), BF16, range(4), placements=(Shard(0),)))
            target.append(Param(name, (8, 8), BF16, (e % 2,), tensor=f"{layer}.w",
                                offset=e // 2 * 64))  # fmt: skip
    plan = plan_of(source, target)
    assert len(plan.templates) == 1
    check(plan, numbers_of(plan))


def test_sources_begin_with_different_targets() -> None:
    source = [Param("w", (8, 8), BF16, range(4), placements=(Shard(1),))]
    plan = plan_of(source, [Param("w", (8, 8), BF16, range(4), placements=(Shard(0),))])
    assert {next(plan.of_source(rank)).target_rank for rank in range(4)} == set(range(4))


def test_a_plan_travels_as_bytes_and_is_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = WeightLayout(
        [Param("w", (8, 300), BF16, range(4), (2, 2), (Shard(0, 2), Shard(1)))], 4
    )
    blocks = Blocks("s", 3, (4, 128), (1, 0))
    target = WeightLayout([Param("w", (8, 300), FP8, (1, 0), offset=2, blocks=blocks)], 2)
    plan = weight_plan(source, target, cache=tmp_path)
    assert WeightPlan.from_bytes(plan.to_bytes()) == plan
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("moe_p2p.weights.plan.template", None)  # nothing is planned
        assert weight_plan(source, target, cache=tmp_path) == plan
    other = WeightLayout([dataclasses.replace(target.params[0], offset=4)], 2)
    assert weight_plan(source, other, cache=tmp_path).target == other
    assert len(list(tmp_path.iterdir())) == 2
    file.write_bytes(b"torn")
    assert weight_plan(source, target, cache=tmp_path) == plan


def test_a_file_of_something_else_is_not_believed(tmp_path: Path) -> None:
    source = WeightLayout([Param("w", (8, 4), BF16, range(2), placements=(Shard(0),))], 2)
    targets = [WeightLayout([Param("w", (8, 4), BF16, (0,), offset=at)], 1) for at in (0, 4)]
    plans = [weight_plan(source, target, cache=tmp_path / str(i)) for i, target in
             enumerate(targets)]  # fmt: skip
    (mine,), (other,) = ((tmp_path / str(i)).iterdir() for i in range(2))
    flipped = bytearray(mine.read_bytes())
    flipped[-1] ^= 1
    for wrong in (other.read_bytes(), bytes(flipped), b""):
        mine.write_bytes(wrong)
        assert weight_plan(source, targets[0], cache=tmp_path / "0") == plans[0]


def test_a_folder_that_cannot_be_used_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = WeightLayout([Param("w", (8, 4), BF16, (0,))], 1)
    (tmp_path / "file").write_text("")
    assert weight_plan(layout, layout, cache=tmp_path / "file" / "plans") == weight_plan(
        layout, layout
    )
    assert "does not keep the plan" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ({"name": "v"}, {}, "no source rank has w"),
        ({}, {"shape": (8, 6)}, r"w: the source has shape \(8, 8\), the target \(8, 6\)"),
        ({"dtype": "int32"}, {}, "w: int32 does not become bfloat16 without blocks"),
        ({}, {"dtype": FP8}, "w: bfloat16 does not become float8_e4m3fn without blocks"),
        ({"dtype": FP8}, {"dtype": FP8, "blocks": Blocks("s")}, "w: float8_e4m3fn does not become"),
        (
            {"finalize": "x"},
            {},
            "w: the source has blocks, finalize or part, which only targets have",
        ),
        ({"shape": (8,)}, {"shape": (8,), "dtype": FP8, "blocks": Blocks("s")}, "need two dim"),
    ],
)
def test_errors_name_the_parameter(
    source: dict[str, object], target: dict[str, object], text: str
) -> None:
    base = Param("w", (8, 8), BF16, (0,))
    with pytest.raises(InvalidArgumentError, match=text):
        plan_of([dataclasses.replace(base, **source)], [dataclasses.replace(base, **target)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mesh": (2, 2)}, r"w: mesh \(2, 2\) has not 2 ranks"),
        ({"ranks": (1, 1)}, r"w: ranks \(1, 1\) name one twice"),
        ({"placements": (Shard(2),)}, "w: .* is no dimension of shape"),
        ({"placements": (Shard(0), Shard(1))}, "must be one for each of mesh"),
        ({"dtype": "bf16"}, "w: torch has no dtype 'bf16'"),
        ({"window": ((0, 9), (0, 8))}, "w: window .* is not inside shape"),
        ({"order": (0, 0)}, "w: order .* must name each of 2 dimensions once"),
        ({"strides": (8,)}, "w: strides .* must be 2 of 0 or more"),
        ({"part": ((0, 9), (0, 8))}, "w: part .* must be inside shape"),
        ({"part": ((0, 1), (0, 1)), "placements": (Shard(0),)}, "w: part .* and not sharded"),
        ({"offset": -1}, "w: an offset is below 0"),
        ({"blocks": Blocks("s")}, "w: has blocks, so dtype must be float8_e4m3fn"),
    ],
)
def test_wrong_descriptions_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Param(**{"name": "w", "shape": (8, 8), "dtype": BF16, "ranks": (0, 1), **changes})  # type: ignore[arg-type]


def test_ranks_and_bytes_that_do_not_belong_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"w: ranks \(4,\) must be 0 to 3"):
        WeightLayout([Param("w", (1,), BF16, (4,))], 4)
    with pytest.raises(InvalidArgumentError, match="these bytes are no WeightLayout"):
        WeightLayout.from_bytes(b"something else")
    with pytest.raises(InvalidArgumentError, match="source rank 1 must be 0 to 0"):
        list(plan_of([Param("w", (1,), BF16, (0,))], [Param("w", (1,), BF16, (0,))]).of_source(1))
