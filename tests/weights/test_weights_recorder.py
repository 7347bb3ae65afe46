"""What a loader does is learned from values: fused, cut, transposed, padded, quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError
from moe_p2p.weights import Param, Shard, WeightLayout, weight_plan
from moe_p2p.weights.recorder import Recording, record

BF16 = torch.bfloat16
TP, HIDDEN, HEADS, DIM, EXPERTS, INNER = 2, 12, 4, 6, 4, 10
SHAPES = {
    "q": ((HEADS * DIM, HIDDEN), BF16),
    "k": ((2 * DIM, HIDDEN), BF16),
    "v": ((2 * DIM, HIDDEN), BF16),
    "norm": ((HIDDEN,), torch.float32),
    **{f"{e}.{part}": ((INNER, HIDDEN), BF16) for e in range(EXPERTS) for part in ("gate", "up")},
    **{f"{e}.down": ((HIDDEN, INNER), BF16) for e in range(EXPERTS)},
}
Given = dict[str, Tensor]


def loader(rank: int, given: Given) -> dict[str, Tensor]:
    """Heads and experts of a rank; w13 interleaved and padded, w2 transposed; rotary halves of q
    interleaved; expert 0 on every rank."""
    q = given["q"].view(HEADS, 2, DIM // 2, HIDDEN).transpose(1, 2).reshape(HEADS * DIM, HIDDEN)
    qkv = torch.cat([each.chunk(TP)[rank] for each in (q, given["k"], given["v"])])
    mine = [0, *range(1 + rank, EXPERTS, TP)]
    w13 = torch.ones(len(mine), 2 * INNER, HIDDEN + 4, dtype=BF16)
    for slot, e in enumerate(mine):
        w13[slot, 0::2, :HIDDEN], w13[slot, 1::2, :HIDDEN] = given[f"{e}.gate"], given[f"{e}.up"]
    w2 = torch.stack([given[f"{e}.down"].t() for e in mine])
    return {"qkv": qkv, "w13": w13, "w2": w2, "norm": given["norm"].to(BF16)}


def recorded(load: Callable[[int, Given], Mapping[str, Tensor]] = loader) -> list[Recording]:
    return [record(lambda given, r=rank: load(r, given), SHAPES, rank=rank) for rank in range(TP)]  # type: ignore[misc]


def updated(recordings: list[Recording], values: Given) -> dict[tuple[int, str], Tensor]:
    """What targets hold, as bytes, after an update from sharded trainers; 0xEE elsewhere."""
    from tests.support.weights_oracle import add_copies, tensors_of

    source = WeightLayout(
        tuple(Param(name, shape, str(dtype)[6:], range(3), placements=(Shard(0),))
              for name, (shape, dtype) in SHAPES.items()), 3)  # fmt: skip
    target = WeightLayout(tuple(p for each in recordings for p in each.params), TP)
    plan = weight_plan(source, target)
    ours = tensors_of(source, values, sent=False).bytes
    add_copies(plan, ours)
    got: dict[tuple[int, str], Tensor] = {}
    for rank in range(3):
        for write in plan.of_source(rank):
            key = (write.target_rank, write.target_tensor)
            there = got.setdefault(key, torch.full((1 << 13,), 0xEE, dtype=torch.uint8))
            rows = write.rows
            for at, to in rows.offsets:
                for row in range(rows.num_rows):
                    a, b = at + row * rows.source_stride, to + row * rows.target_stride
                    there[b : b + rows.row_bytes] = ours[rank, write.source_tensor][
                        a : a + rows.row_bytes
                    ]
    return got


def random_values() -> Given:
    torch.manual_seed(3)
    return {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def test_an_update_by_the_recording_is_what_the_loader_makes() -> None:
    recordings, values = recorded(), random_values()
    assert all(each.derived == {} and each.fallback == {} for each in recordings)
    assert recordings[0].report().splitlines() == ["all parameters are written in place",
                                                   "2.gate, 2.up, 2.down land nowhere"]  # fmt: skip
    assert [each.padding for each in recordings] == [("w13",)] * TP
    got = updated(recordings, values)
    for rank in range(TP):
        for name, tensor in loader(rank, values).items():
            wanted = tensor.contiguous().view(-1)
            ours = got[rank, name][: wanted.numel() * 2].view(BF16)
            if name == "w13":  # what is padding keeps what it was
                wanted, ours = (x.view(-1, HIDDEN + 4)[:, :HIDDEN] for x in (wanted, ours))
            assert torch.equal(ours, wanted), (rank, name)


def test_what_is_quantized_falls_back_alone_and_says_so() -> None:
    def load(rank: int, given: Given) -> dict[str, Tensor]:
        tensors = loader(rank, given)
        w2 = tensors.pop("w2").float()
        scale = w2.abs().amax(dim=(1, 2)) / 448
        quantized = (w2 / scale.view(-1, 1, 1)).to(torch.float8_e4m3fn)
        return {**tensors, "w2_q": quantized, "w2_scale": scale, "swizzled": scale.flip(0)}

    recordings = recorded(load)
    downs = ("0.down", "1.down", "3.down")
    assert recordings[0].derived == dict.fromkeys(("w2_q", "w2_scale", "swizzled"), downs)
    assert recordings[0].fallback == dict.fromkeys(downs, HIDDEN * INNER * 2)
    assert "720 B are received in checkpoint layout" in recordings[0].report()
    assert "w2_scale is recomputed from 0.down, 1.down, 3.down" in recordings[0].report()
    values = random_values()
    got = updated(recordings, values)
    for name in downs:
        received = got[0, f"{name}:received"][: HIDDEN * INNER * 2].view(BF16)
        assert torch.equal(received.view(HIDDEN, INNER), values[name])
    assert (0, "w2") not in got


def test_what_is_moved_and_used_otherwise_too_is_written_and_received() -> None:
    def load(given: Given) -> dict[str, Tensor]:
        return {"moved": given["w"].t().contiguous(), "norms": given["w"].float().norm(dim=1)}

    found = record(load, {"w": ((5, 6), BF16), "other": ((3,), BF16)}, rank=0)
    assert found.derived == {"norms": ("w",)}
    assert [(each.name, each.tensor, bool(each.finalize)) for each in found.params] == [
        ("w", "moved", False),
        ("w", "w", True),
    ]


@pytest.mark.parametrize(
    "change",
    [lambda x: x + 1, torch.abs, lambda x: x.clamp(max=100), lambda x: x * 2, torch.neg],
)
def test_arithmetic_is_no_rearrangement(change: Callable[[Tensor], Tensor]) -> None:
    found = record(lambda given: {"w": change(given["w"])}, {"w": ((7, 5), BF16)}, rank=0)
    assert found.derived == {"w": ("w",)}
    assert [each.finalize for each in found.params] != [""]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float32, torch.uint8])
def test_types_with_few_exact_integers_take_more_passes(dtype: torch.dtype) -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))

    def load(given: Given) -> dict[str, Tensor]:
        return {"w": given["w"].view(torch.uint8).view(40, -1)[order].view(dtype)}

    found = record(load, {"w": ((40, 25), dtype)}, rank=0)
    assert found.derived == {}
    landed = {
        each.part[0][0] + i: (each.offset + i * each.strides[0]) // 25
        for each in found.params
        for i in range(each.part[0][1])
    }
    assert [landed[int(row)] for row in order] == list(range(40))


def test_a_loader_that_returns_other_tensors_is_refused() -> None:
    calls = []

    def load(given: Given) -> dict[str, Tensor]:
        calls.append(1)
        return {f"w{len(calls)}": given["w"]}

    with pytest.raises(InvalidArgumentError, match="the loader returned other tensors than before"):
        record(load, {"w": ((300,), BF16)}, rank=0)


TWO = {"a": ((16, 8), BF16), "b": ((16, 8), BF16)}
SMALL = 1e-3


def _once(given: Given, kept: list[Tensor] = []) -> Given:  # noqa: B006
    if not kept:
        kept.append(given["a"].clone())
    return {"o": kept[0]}


FOOLS: dict[str, Callable[[Given], Given]] = {
    "clamps large values": lambda g: {"o": g["a"].clamp(-448, 448)},
    "small values to zero": lambda g: {"o": torch.where(g["a"].abs() < SMALL, 0, g["a"])},
    "scales a tensor of small values": lambda g: {
        "o": g["a"] * (1 if g["a"].abs().max() > 1 else 16)
    },
    "adds zero": lambda g: {"o": g["a"] + 0.0},
    "replaces NaN": lambda g: {"o": torch.nan_to_num(g["a"])},
    "replaces infinite ones": lambda g: {
        "o": g["a"].clamp(torch.finfo(BF16).min, torch.finfo(BF16).max)
    },
    "takes the larger": lambda g: {"o": torch.maximum(g["a"], g["b"])},
    "casts to fp8": lambda g: {"o": g["a"].to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("name", FOOLS)
def test_what_depends_on_values_is_derived(name: str) -> None:
    found = record(FOOLS[name], TWO, rank=0)
    assert "a" in found.derived["o"]


def test_parameters_that_land_nowhere_are_named() -> None:
    found = record(_once, TWO, rank=0)  # it loads only the first time
    assert found.unused == ("a", "b")
    assert "a, b land nowhere" in found.report()


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("made", [BF16, torch.float32])
def test_other_types_of_trainers_are_written_in_place(
    source: torch.dtype, made: torch.dtype
) -> None:
    """fp32 masters: 15 bits of an element's number are exact there, and 8 in the engine."""
    shapes = {"w": ((64, 40), source), "v": ((64, 40), source)}
    found = record(lambda g: {"o": torch.cat([g["w"], g["v"]], 1).to(made)}, shapes, rank=0)
    assert not found.derived
    got = torch.zeros(64 * 80, dtype=made)
    values = {name: torch.randn(64, 40).to(source) for name in shapes}
    for each in found.params:
        torch.as_strided(got, (64, 40), each.strides, each.offset).copy_(values[each.name])
    assert torch.equal(got.view(64, 80), torch.cat(list(values.values()), 1).to(made))
    target = WeightLayout(found.params, 1)
    trainers = [Param(n, s, str(t)[6:], (0,)) for n, (s, t) in shapes.items()]
    assert weight_plan(WeightLayout(trainers, 1), target).gathered == ()


@pytest.mark.parametrize("name", ["bool", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "uint8"])
def test_types_without_arithmetic_are_moved_as_bytes(name: str) -> None:
    dtype = getattr(torch, name)

    def load(given: Given) -> Given:
        rows = given["m"].view(torch.uint8).view(12, -1).flip(0).contiguous()
        return {"o": rows.view(dtype), "p": given["w"]}

    found = record(load, {"m": ((12, 8), dtype), "w": ((3, 4), BF16)}, rank=0)
    assert not found.derived
    assert [(e.tensor, e.dtype, e.part[0]) for e in found.params if e.name == "m"] == [
        ("o", name, (row, 1)) for row in range(12)
    ]


def test_what_torch_cannot_do_in_a_type_is_refused_by_the_parameter() -> None:
    rows = torch.tensor([1, 0])
    with pytest.raises(InvalidArgumentError, match=r"with m \(float4_e2m1fn_x2\): .* uint8"):
        record(lambda given: {"o": given["m"][rows], "p": given["w"]},
               {"m": ((2, 8), torch.float4_e2m1fn_x2), "w": ((3, 4), BF16)}, rank=0)  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="record: m is complex64"):
        record(lambda given: {"o": given["m"]}, {"m": ((2, 8), torch.complex64)}, rank=0)
