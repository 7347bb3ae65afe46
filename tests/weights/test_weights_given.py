"""The caller's tensors against what was said of them: right bytes, or an error that names one.

Kinds of tensors on both sides and in both modes; what is published as clean is compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from moe_p2p import Engine, InvalidArgumentError, MoeP2pError
from moe_p2p.weights import Blocks, Param, WeightEngineRank, WeightLayout, WeightTrainer, of_tensor

BF16, FP8 = "bfloat16", "float8_e4m3fn"
VALUES = torch.arange(64.0).view(8, 8)
W = Param("w", (8, 8), BF16, (0,))


def bf16(times: float = 1) -> Tensor:
    return (times * VALUES).bfloat16()


def empty() -> Tensor:
    return torch.zeros(8, 8, dtype=torch.bfloat16)


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def updated(
    source: list[Param],
    theirs: dict[str, Tensor],
    target: list[Param],
    mine: dict[str, Tensor],
    *,
    news: dict[str, Tensor] | None = None,
    kind: type[WeightEngineRank] = WeightEngineRank,
    **how: Any,
) -> WeightEngineRank:
    """One update of one trainer and one engine rank, a second one with `news`; raises what either
    does."""
    store, errors, over = HashStore(), list[BaseException](), threading.Event()
    layouts = WeightLayout(source, 1), WeightLayout(target, 1)
    last = 1 if news is None else 2

    def train() -> None:
        try:
            with WeightTrainer(Engine(), store, layouts[0], 0, theirs, timeout_s=3) as trainer:
                trainer.update(1, verify=True)
                if news is not None:
                    trainer.update(2, news)
                over.wait(5)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with kind(Engine(), store, layouts[1], 0, mine, timeout_s=3, **how) as engine_rank:
            until = time.monotonic() + 8
            while engine_rank.version != last and not errors and time.monotonic() < until:
                if engine_rank.mode == "in_place":
                    engine_rank.begin()
                    engine_rank.wait(5)
                else:
                    engine_rank.step()
    except BaseException as error:
        errors.insert(0, error)
    over.set()
    thread.join()
    for error in errors:  # the side that refuses is found first: the other one waits for it
        if isinstance(error, InvalidArgumentError):
            raise error
    if errors:
        raise errors[0]
    return engine_rank


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "requires grad": nn.Parameter,
    "not a leaf": lambda t: nn.Parameter(t) * 1,
    "inference mode": inference,
    "bytes": lambda t: t.view(-1).view(torch.uint8),
    "one dimension": lambda t: t.view(-1),
}


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("kind", SAME)
def test_tensors_that_are_what_was_said_are_right_in_any_mode_of_torch(
    kind: str, mode: str
) -> None:
    made, live = SAME[kind](bf16()), SAME[kind](empty())
    updated([W], {"w": made}, [W], {"w": live}, mode=mode, news={"w": SAME[kind](bf16(2))})
    assert torch.equal(live.detach().view(-1).view(torch.bfloat16), bf16(2).view(-1))


@pytest.mark.parametrize("said", [BF16, "float32"])
def test_a_converted_source_is_read_by_what_was_said(said: str) -> None:
    """Of a transposed view, and of bytes."""
    target = Param("w", (8, 8), said, (0,))
    for made in (bf16().t().contiguous().t(), bf16().view(torch.uint8)):
        source = W if made.dtype == torch.uint8 else of_tensor("w", made)
        live = torch.zeros(8, 8, dtype=getattr(torch, said))
        updated([source], {"w": made}, [target], {"w": live})
        assert torch.equal(live.float(), VALUES)


def test_calls_in_inference_mode_leave_buffers_that_others_can_write() -> None:
    with torch.inference_mode():
        target = Param("w", (8, 8), "float32", (0,))
        live = torch.zeros(8, 8)
        updated([W], {"w": bf16()}, [target], {"w": live}, news={"w": bf16(2)}, poison=True)
    assert torch.equal(live, 2 * VALUES)


WRONG: dict[str, tuple[Callable[[], Tensor], str]] = {
    "float32": (lambda: VALUES.clone(), "'w' is float32, but its layout says bfloat16 for 'w'"),
    "float16": (lambda: VALUES.half(), "'w' is float16, but its layout says bfloat16"),
    "int16": (lambda: VALUES.short(), "'w' is int16, but its layout says bfloat16"),
    "too small": (lambda: bf16()[:4], r"'w' has 64 bytes, but its layout puts 'w' up to byte 128"),
    "in a larger storage": (lambda: bf16().repeat(2, 1)[:4], "'w' has 64 bytes"),
    "longer": (lambda: bf16().repeat(2, 1), r"'w' is \[16, 8\], 256 bytes, .* \[8, 8\], 128"),
    "padded": (lambda: torch.zeros(9, 10).bfloat16(), r"'w' is \[9, 10\].* padded by strides"),
    "a transposed view": (lambda: bf16().t().contiguous().t(), r"'w' has strides \(1, 8\)"),
    "columns": (lambda: bf16().repeat(1, 2)[:, :8], r"'w' has strides \(16, 1\)"),
}


@pytest.mark.parametrize("to", [BF16, "float32"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_trainers_tensor_that_is_not_what_was_said_is_refused(kind: str, to: str) -> None:
    make, text = WRONG[kind]
    layout = WeightLayout([W], 1)
    with Engine() as engine, pytest.raises(InvalidArgumentError, match=f"trainer 0: tensor {text}"):
        WeightTrainer(engine, HashStore(), layout, 0, {"w": make()}, timeout_s=0.2)


@pytest.mark.parametrize("kind", WRONG)
def test_an_engine_ranks_tensor_that_is_not_what_was_said_is_refused(kind: str) -> None:
    make, text = WRONG[kind]
    with (
        Engine() as engine,
        pytest.raises(InvalidArgumentError, match=f"generator 0: tensor {text}"),
    ):
        WeightEngineRank(engine, HashStore(), WeightLayout([W], 1), 0, {"w": make()}, timeout_s=0.2)


def test_other_shapes_types_and_scales_are_refused() -> None:
    tall = Param("w", (4, 16), BF16, (0,))
    blocks = Param("w", (8, 8), FP8, (0,), blocks=Blocks("s", shape=(4, 4)))
    fp8 = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
    for param, tensors, text in (
        (tall, {"w": empty().view(16, 4)}, r"is \[16, 4\], but its layout says \[4, 16\]"),
        (blocks, {"w": fp8, "s": torch.zeros(2, 2).half()}, "'s' is float16, .* says float32"),
        (blocks, {"w": fp8, "s": torch.zeros(1)}, "'s' has 4 bytes, .* up to byte 16"),
        (blocks, {"w": empty(), "s": torch.zeros(4)}, "'w' is bfloat16, .* float8_e4m3fn"),
        (W, {}, "has no tensor 'w'"),
        (W, {"w": empty().view(-1)[1:]}, "'w' has 126 bytes"),
    ):
        layout = WeightLayout([param], 1)
        with Engine() as engine, pytest.raises(InvalidArgumentError, match=text):
            WeightEngineRank(engine, HashStore(), layout, 0, tensors, timeout_s=0.2)
    live = {"w": fp8.view(torch.uint8), "s": torch.zeros(4)}
    updated([W], {"w": bf16()}, [blocks], live)
    spread = live["s"].view(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.allclose(fp8.float() * spread, VALUES, rtol=0.07, atol=0.01)


def test_no_elements_ask_for_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A parameter without elements, with its tensor and without."""
    none = Param("none", (0, 8), BF16, (0,))
    nothing = {"none": torch.zeros(0, 8).bfloat16()}
    for beside in (nothing, {}):
        live = {"w": empty(), **beside}
        updated([W, none], {"w": bf16(), **beside}, [W, none], live)
        assert torch.equal(live["w"], bf16())
    assert not capfd.readouterr().err


def part(name: str, offset: int, **more: Any) -> Param:
    return Param(name, (4, 8), BF16, (0,), tensor="qkv", offset=offset, **more)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ([part("q", 0), part("k", 16)], "'q' and 'k'"),
        ([part("q", 0), part("k", 0)], "'q' and 'k'"),
        ([part("q", 0), part("k", 64), part("v", 95)], "'k' and 'v'"),
        ([part("q", 0, strides=(4, 1))], "'q' and 'q'"),
        ([part("q", 0, strides=(16, 1)), part("k", 7, strides=(16, 1))], "'q' and 'k'"),
        ([part("q", 0, finalize="a test"), part("q", 0, finalize="a test")], "'q' and 'q'"),
    ],
)
def test_places_that_overlap_are_refused_by_two_names(params: list[Param], names: str) -> None:
    tensors = {"qkv": torch.zeros(16, 8).bfloat16()}
    with Engine() as engine, pytest.raises(InvalidArgumentError, match=f"{names} overlap"):
        WeightEngineRank(engine, HashStore(), WeightLayout(params, 1), 0, tensors, timeout_s=0.2)


def test_tensors_that_share_a_part_of_their_memory_are_refused() -> None:
    layout, flat = WeightLayout([W, Param("v", (8, 8), BF16, (0,))], 1), torch.zeros(96).bfloat16()
    tensors = {"w": flat[:64].view(8, 8), "v": flat[32:].view(8, 8)}
    with Engine() as engine, pytest.raises(InvalidArgumentError, match="'w' and 'v' share memory"):
        WeightEngineRank(engine, HashStore(), layout, 0, tensors, timeout_s=0.2)


def test_interleaved_rows_do_not_overlap_and_tied_tensors_are_one() -> None:
    params = [part("q", 0, strides=(16, 1)), part("k", 8, strides=(16, 1)),
              Param("head", (8, 8), BF16, (0,), tensor="tied"),
              Param("embed", (8, 8), BF16, (0,))]  # fmt: skip
    tied = empty()
    live = {"qkv": empty(), "tied": tied, "embed": tied}
    given = {"q": bf16()[:4].clone(), "k": bf16()[4:].clone(), "head": bf16(), "embed": bf16()}
    source = [Param(name, tuple(each.shape), BF16, (0,)) for name, each in given.items()]
    updated(source, given, params, live)
    assert torch.equal(live["qkv"].view(4, 2, 8)[:, 1], bf16()[4:])
    assert torch.equal(tied, bf16())


def test_bytes_that_nobody_writes_are_named_once_unless_they_are_padding(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = [Param(n, (4, 8), BF16, (0,)) for n in "qk"]
    given = {n: torch.ones(4, 8).bfloat16() for n in "qk"}
    live = {"qkv": torch.zeros(12, 8).bfloat16(), "w": empty()}
    target = [
        part("q", 0),
        part("k", 64),
        Param("q", (4, 8), BF16, (0,), tensor="w", strides=(16, 1)),
    ]
    updated(source, given, target[:2], {"qkv": live["qkv"]})
    said = capfd.readouterr().err
    assert said.count("generator 0: no parameter is written to 64 B of 'qkv', from byte 64 on") == 1
    assert live["qkv"][:, 0].tolist() == [1] * 4 + [0] * 4 + [1] * 4
    updated(source, given, target, live, padding=["qkv", "w"])
    assert "no parameter is written" not in capfd.readouterr().err
    whole = {"w": torch.zeros(16, 8).bfloat16()}
    updated([W], {"w": bf16()}, [W], whole, padding=["w"])  # rows that fill up a vocabulary
    assert torch.equal(whole["w"][:8], bf16())
    with Engine() as engine, pytest.raises(InvalidArgumentError, match=r"padding names \['v'\]"):
        WeightEngineRank(engine, HashStore(), WeightLayout([W], 1), 0, live, padding=["v"])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_copy_that_fails_leaves_no_model_that_is_called_clean(at: int) -> None:
    """At the n-th tensor: those before are new, those behind old."""
    names = ("a", "b", "c")
    params = [Param(n, (8, 8), BF16, (0,)) for n in names]
    live = {n: empty() for n in names}
    broken: list[WeightEngineRank] = []

    class Breaks(WeightEngineRank):
        def step(self) -> int | None:
            if not broken:
                broken.append(self)
                self._buffers._live[names[at]] = inference(live[names[at]])  # it refuses a copy
            return super().step()

    store, layout = HashStore(), WeightLayout(params, 1)
    done = threading.Event()

    def train() -> None:
        tensors = {n: bf16() for n in names}
        with WeightTrainer(Engine(), store, layout, 0, tensors, timeout_s=5) as trainer:
            trainer.update(1)
            done.wait(10)

    thread = threading.Thread(target=train)
    thread.start()
    with Breaks(Engine(), store, layout, 0, live, timeout_s=5) as engine_rank:
        with pytest.raises(RuntimeError, match="inference"):
            engine_rank.wait()
        with pytest.raises(MoeP2pError, match=r"dirty.*the copy of version 1 failed"):
            engine_rank.require_clean()
        assert engine_rank.dirty
        assert engine_rank.version is None
        engine_rank._buffers._live[names[at]] = live[names[at]]
        assert engine_rank.step() == 1  # it is tried again
        engine_rank.require_clean()
        assert all(torch.equal(each, bf16()) for each in live.values())
    done.set()
    thread.join()


@pytest.mark.parametrize("how", ["finalize", "blocks"])
def test_fused_targets_are_finalized_from_all_of_their_parts(how: str) -> None:
    """Rows of gate and up in one tensor: an engine that repacks, and fp8 whose shards begin inside
    a block."""
    rows, names = 3, ("gate", "up")
    more: dict[str, Any] = {"finalize": "I repack"}
    if how == "blocks":
        more = {"blocks": Blocks("s", shape=(4, 4))}
    dtype = FP8 if how == "blocks" else BF16
    target = [
        Param(n, (2 * rows, 8), dtype, (0,), tensor="w13", offset=i * rows * 8,
              part=((rows, rows), (0, 8)), **more)
        for i, n in enumerate(names)
    ]  # fmt: skip
    values = {n: torch.randn(2 * rows, 8).bfloat16() for n in names}
    seen: dict[str, Tensor] = {}

    def finalize(received: Any, tensors: Any) -> None:
        seen.update({name: each.clone() for name, each in received.items()})
        tensors["w13"].copy_(torch.cat([received[n] for n in names]).to(tensors["w13"].dtype))
        if "s" in tensors:
            tensors["s"].fill_(1)

    live = {"w13": torch.zeros(2 * rows, 8, dtype=getattr(torch, dtype))}
    if how == "blocks":
        live["s"] = torch.zeros(4)
    source = [Param(n, tuple(each.shape), BF16, (0,)) for n, each in values.items()]
    updated(source, values, target, live, finalize=finalize)
    assert {n: torch.equal(each, values[n][rows:]) for n, each in seen.items()} == dict.fromkeys(
        names, True
    )
    wanted = torch.cat([values[n][rows:] for n in names]).to(live["w13"].dtype)
    assert torch.equal(live["w13"].float(), wanted.float())


def test_finalize_may_write_parameters_of_a_model() -> None:
    """They require gradients, and an engine calls `step` without; a thread of its own does not."""
    model = torch.nn.Parameter(empty())

    def finalize(received: Any, tensors: Any) -> None:
        model.copy_(received["w"])
        tensors["w"].copy_(model)

    live = {"w": empty()}
    updated(
        [W], {"w": bf16()}, [Param("w", (8, 8), BF16, (0,), finalize="x")], live, finalize=finalize
    )
    assert torch.equal(live["w"], bf16())
    assert torch.equal(model, bf16())


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_finalize_may_write_parts_of_tensors_of_inference_mode(mode: str) -> None:
    """torch forbids it outside of that mode, in which no engine's thread for it is."""

    def finalize(received: Any, tensors: Any) -> None:
        for row in range(8):
            tensors["w"][row].copy_(received["w"][row])

    live, target = {"w": inference(empty())}, [Param("w", (8, 8), BF16, (0,), finalize="x")]
    updated([W], {"w": inference(bf16())}, target, live, finalize=finalize, mode=mode)
    assert torch.equal(live["w"], bf16())


def test_all_places_of_one_parameter_reach_finalize() -> None:
    target = [Param("w", (8, 8), BF16, (0,), tensor=t, finalize="twice") for t in ("a", "b")]
    live = {"a": empty(), "b": empty()}

    def finalize(received: Any, tensors: Any) -> None:
        for name in live:
            tensors[name].copy_(received[f"w:received:{name}:0"])

    updated([W], {"w": bf16()}, target, live, finalize=finalize)
    assert torch.equal(live["a"], bf16())
    assert torch.equal(live["b"], bf16())


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_an_engine_without_a_version_is_not_clean_and_may_run(mode: str) -> None:
    seen: list[str] = []

    class Looks(WeightEngineRank):
        def _join(self, deadline: Any) -> None:
            super()._join(deadline)
            with pytest.raises(MoeP2pError, match="generator 0 has no version yet"):
                self.require_clean()
            self.require_not_dirty()
            assert self.step() is None
            seen.append("looked")

    live = empty()
    engine_rank = updated([W], {"w": bf16()}, [W], {"w": live}, mode=mode, kind=Looks)
    assert seen == ["looked"]
    engine_rank.require_clean()
