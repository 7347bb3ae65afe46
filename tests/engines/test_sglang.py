"""SGLang's real dispatchers over ours, on CPU ranks, against one process's MoE."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError
from tests.engines import sglang_layers
from tests.engines.sglang_layers import (
    combined,
    extend,
    make,
    run_layer,
    run_modes,
    take_turns,
    topk_of,
)
from tests.support import engine_layers as plain
from tests.support.engine_layers import BF16, COUNTS, EXPERTS, WORLD
from tests.support.ranks import Rank, run_processes

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(400)]
BEGINNING: dict[str, Any] = {"deadline_s": 200.0}


def run_ours(rank: Rank) -> None:
    sglang_layers.begin(rank, real_deep_ep=True)
    real = sys.modules["deep_ep"]
    from moe_p2p.integrations.moe import sglang

    sglang.install()
    assert sys.modules["deep_ep"] is real
    for dtype in ("bf16", "fp8"):
        run_modes(rank, dtype)
    types_of_rows(rank)
    modes_in_turns()
    recorder(rank)
    two_batches(rank)
    hooks(rank)
    refusals(rank)
    for blackwell in (False, True):
        single_batch_overlap(rank, blackwell)


def types_of_rows(rank: Rank) -> None:
    """Which type travels is SGLang's decision: by runner, by mode, and by configuration."""
    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    cases = [
        (None, {}, {False: "fp8", True: "fp8"}),
        ("flashinfer_cutedsl", {}, {False: "bf16", True: "bf16"}),
        ("cutlass", {}, {False: "bf16", True: "bf16"}),
        (
            "deep_gemm",  # w4afp8.py
            {
                "normal_dispatcher_output_dtype": "bf16",
                "low_latency_dispatcher_output_dtype": "fp8",
            },
            {False: "fp8", True: "bf16"},
        ),
    ]
    for backend, quant_config, wanted in cases:
        dispatcher = make(rank, "auto", backend=backend)
        dispatcher.set_quant_config(quant_config)
        for extending, dtype in wanted.items():
            extend(extending)
            got, out = run_layer(rank, dispatcher, x, ids, weights)
            assert got.hidden_states.dtype == (
                torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
            )
            expected = plain.plain(plain.as_sent(x) if dtype == "fp8" else x, ids, weights)
            torch.testing.assert_close(out.float(), expected, **BF16)


def modes_in_turns() -> None:
    """EAGLE captures an extend batch and then decode batches (deepep_adapter.py)."""
    from sglang.srt.model_executor.runner_utils import deepep_adapter as adapters

    adapters.get_moe_a2a_backend = lambda: types.SimpleNamespace(is_deepep=lambda: True)
    adapters.get_deepep_mode = lambda: adapters.DeepEPMode.AUTO
    from sglang.srt.layers.moe.utils import DeepEPMode

    adapters.get_deepep_mode = lambda: DeepEPMode.AUTO
    extended, decoded = (adapters.DeepEPCudaGraphRunnerAdapter() for _ in range(2))
    extended.capture(is_extend_in_batch=True)
    decoded.capture(is_extend_in_batch=False)
    extended.replay()
    decoded.replay()


class Recorder:
    """What dispatches report for SGLang's placement of experts."""

    recording = True

    def __init__(self) -> None:
        self.normal: list[tuple[list[int], dict[str, Any]]] = []
        self.low_latency: list[list[int]] = []

    def on_deepep_dispatch_normal(self, counts: list[int], **sent: Any) -> None:
        self.normal.append((counts, sent))

    def on_deepep_dispatch_low_latency(self, counts: torch.Tensor) -> None:
        self.low_latency.append(counts.tolist())


def recorder(rank: Rank) -> None:
    from sglang.srt.eplb import expert_distribution

    seen = Recorder()
    expert_distribution.set_global_expert_distribution_recorder(seen)
    dispatcher = make(rank, "auto")
    num_local, first = EXPERTS // rank.world_size, plain.first_expert(rank)
    everyone = torch.cat([plain.inputs(r, 0, torch.bfloat16)[1] for r in range(rank.world_size)])
    wanted = everyone.flatten().bincount(minlength=EXPERTS)[first : first + num_local].tolist()
    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    for extending in (False, True):
        extend(extending)
        run_layer(rank, dispatcher, x, ids, weights)
    assert seen.low_latency == [wanted]
    ((counts, sent),) = seen.normal
    assert counts == wanted
    assert (
        sent["num_tokens_per_expert"].tolist() == ids.flatten().bincount(minlength=EXPERTS).tolist()
    )
    to_rank = [int((ids // num_local == r).any(1).sum()) for r in range(rank.world_size)]
    assert sent["num_tokens_per_rank"].tolist() == to_rank
    assert sent["num_tokens_per_rdma_rank"] is None
    seen.recording = False
    run_layer(rank, dispatcher, x, ids, weights)
    assert len(seen.normal) == 1


def two_batches(rank: Rank) -> None:
    """Halves of two micro-batches take turns."""
    extend(False)
    two = make(rank, "low_latency", tbo=True)
    take_turns(rank, two)


def hooks(rank: Rank) -> None:
    extend(False)
    dispatcher, between = make(rank, "auto"), list[Any]()
    (registered,) = dispatcher.register_deepep_dispatch_hook(between.append)
    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    run_layer(rank, dispatcher, x, ids, weights)
    registered.remove()
    run_layer(rank, dispatcher, x, ids, weights)
    assert between == dispatcher._inners
    assert dispatcher.expert_mask_gpu is None


class Stream:
    """Of a machine without GPUs, where everything runs in order."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: Any) -> None:
        self.waited.append(stream)


def write_slowly(
    y: torch.Tensor, result: torch.Tensor, signal: torch.Tensor, block_m: int, threshold: int
) -> None:
    """A product that raises signals."""
    blocks = -(-y.shape[1] // block_m)
    for expert in reversed(range(len(y))):
        for block in range(blocks):
            time.sleep(0.002)
            part = slice(block * block_m, (block + 1) * block_m)
            y[expert, part] = result[expert, part]
            signal[expert * blocks + block] += threshold


def single_batch_overlap(rank: Rank, blackwell: bool) -> None:
    """Combine begins while the product writes y, as SGLang's runner raises its signals."""
    from sglang.srt.batch_overlap.single_batch_overlap import CombineOverlapArgs
    from sglang.srt.layers.moe.token_dispatcher import deepep

    deepep.is_blackwell = lambda: blackwell
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_stream = Stream
    extend(False)
    dispatcher = make(rank, "low_latency")
    for step in range(3):
        x, ids, weights = plain.inputs(rank.rank, step, torch.bfloat16)
        got = dispatcher.dispatch(hidden_states=x, topk_output=topk_of(ids, weights))
        given = combined(rank, dispatcher, got, ids, weights)
        result, y = given.hidden_states, torch.full_like(given.hidden_states, float("nan"))
        num_experts, num_rows = y.shape[:2]
        if blackwell:
            signal = torch.zeros(num_experts, dtype=torch.int32).view(torch.uint32)
            block_m, threshold = num_rows, 129
        else:
            # Room for blocks of 64 rows, of which the product takes fewer.
            signal = torch.zeros(num_experts * -(-num_rows // 64) + 9, dtype=torch.int32)
            block_m, threshold = 128, 4
        stream = Stream()
        overlap = CombineOverlapArgs(
            overlap=True,
            stream=stream,
            wait_event="began",
            num_sms=3,
            signal=signal,
            threshold=threshold if blackwell else 0,
        )
        dispatcher.set_overlap_args(overlap, {"block_m": block_m, "threshold": threshold})
        raised = signal.view(torch.int32)
        running = threading.Thread(
            target=write_slowly, args=(y, result, raised, block_m, threshold)
        )
        running.start()
        dispatcher.combine_a(combine_input=given._replace(hidden_states=y))
        running.join()
        out = dispatcher.combine_b()
        dispatcher.clear_overlap_args()
        expected = plain.plain(plain.as_sent(x), ids, weights)
        torch.testing.assert_close(out.float(), expected, **BF16)
        assert "began" in stream.waited


def refusals(rank: Rank) -> None:
    dispatcher = make(rank, "low_latency")
    dispatcher.set_quant_config({"dispatcher_output_dtype": "nvfp4"})
    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="nvfp4; bf16 and fp8"):
        run_layer(rank, dispatcher, x, ids, weights)


def test_dispatchers_over_all_to_all_compute_a_plain_moe() -> None:
    run_processes(WORLD, run_ours, **BEGINNING)


def run_shim(rank: Rank) -> None:
    sglang_layers.begin(rank)
    of_gpu = types.SimpleNamespace(multi_processor_count=132)
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "get_device_properties", lambda **_: of_gpu)
    for dtype in ("bf16", "fp8"):
        run_modes(rank, dtype)
    for blackwell in (False, True):
        single_batch_overlap(rank, blackwell)
    patch.undo()
    assert len(COUNTS) > 2  # of which some ranks have no tokens


def test_sglangs_own_dispatchers_run_over_the_deep_ep_calls() -> None:
    run_processes(WORLD, run_shim, **BEGINNING)
