"""vLLM's real managers, prepare-finalize classes and modular kernel over ours, on CPU ranks.

The same runs over moe_p2p.deep_ep with vLLM's own classes.
"""

from __future__ import annotations

import ast
import contextlib
import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError, UnavailableError
from moe_p2p.integrations.serving_steps import STEPS
from tests.engines import packages, vllm_layers, vllm_ranks
from tests.engines.vllm_layers import BLOCKS, HIGH_THROUGHPUT, LOW_LATENCY, V2
from tests.support import engine_layers as plain
from tests.support.engine_layers import BF16, EXPERTS, HIDDEN, TOKENS, WORLD
from tests.support.ranks import Rank, run_processes

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]


# --- over AllToAll ---


def run_ours(rank: Rank) -> None:
    vllm_layers.begin(rank)
    for backend in (LOW_LATENCY, HIGH_THROUGHPUT, V2):
        vllm_layers.run_backend(rank, backend, ["none", "blocks", "rows"])
        for on_wrong in (False, True):
            weights_on_the_input(rank, backend, on_wrong)
    manager = vllm_ranks.make_manager(LOW_LATENCY)
    assert not manager.support_fault_tolerance
    with pytest.raises(InvalidArgumentError, match="--enable-fault-tolerance"):
        manager.query_fault()
    packed_scales(rank)
    other_order_of_experts(rank)
    scales_of_other_formats(rank)
    multiprocessors()
    with contextlib.ExitStack() as stack:
        overlapping_batches(rank, stack)


def weights_on_the_input(rank: Rank, backend: str, wrong: bool) -> None:
    manager, prepare_finalize, quant_config = vllm_layers.make_layer(rank, backend, {})
    kernel = vllm_layers.make_kernel(rank, prepare_finalize, quant_config)
    if wrong:
        x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
        with pytest.raises(InvalidArgumentError, match="top-3: it is for top-1"):
            vllm_layers.run_kernel(kernel, x, ids, weights, on_input=True)
    else:
        x, ids, weights = plain.inputs(rank.rank, 1, torch.bfloat16, topk=1)
        out = vllm_layers.run_kernel(kernel, x, ids, weights, on_input=True)
        expected = plain.plain(x * weights.to(x.dtype), ids, torch.ones_like(weights))
        torch.testing.assert_close(out.float(), expected, **BF16)
    manager.destroy()


def packed_scales(rank: Rank) -> None:
    """Experts for Blackwell's DeepGEMM take four exponents in a word."""
    manager, prepare_finalize, quant_config = vllm_layers.make_layer(rank, LOW_LATENCY, BLOCKS)
    packing = types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: True)
    prepare_finalize.post_init_setup(packing)
    kernel = vllm_layers.make_kernel(rank, prepare_finalize, quant_config)
    inner = kernel.fused_experts.run

    def run(rows: Tensor, scales: Tensor, *rest: Any) -> Tensor:
        assert scales.dtype == torch.int32
        assert scales.shape == (*rows.shape[:2], 1)  # four exponents, of which H has two
        assert scales.stride()[1] == 1  # column by column
        packed = scales.clone(memory_format=torch.contiguous_format)
        exponents = packed.view(torch.uint8)[..., : HIDDEN // 128]
        return inner(rows, torch.exp2(exponents.float() - 127), *rest)

    kernel.fused_experts.run = run
    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    out = vllm_layers.run_kernel(kernel, x, ids, weights)
    torch.testing.assert_close(out.float(), plain.plain(rounded_up(x), ids, weights), **BF16)
    manager.destroy()


def rounded_up(x: Tensor) -> Tensor:
    """x as it arrives when scales are powers of two."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def other_order_of_experts(rank: Rank) -> None:
    from moe_p2p.integrations.moe import vllm

    batched, _ = vllm.prepare_and_finalize_classes()
    manager, _, quant_config = vllm_layers.make_layer(rank, LOW_LATENCY, {})
    handle = manager.get_handle({"max_num_tokens_per_dp_rank": TOKENS})
    physical = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    layer = batched(handle, num_dispatchers=WORLD, global_to_physical=physical)
    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    out = vllm_layers.run_kernel(
        vllm_layers.make_kernel(rank, layer, quant_config), x, ids, weights
    )
    torch.testing.assert_close(out.float(), plain.plain(x, physical[ids], weights), **BF16)
    manager.destroy()


def scales_of_other_formats(rank: Rank) -> None:
    """DeepGEMM may read exponents only (V6); nvfp4's scale and layouts of scales (V5)."""
    from vllm.model_executor.layers.fused_moe import utils
    from vllm.utils import deep_gemm

    x, ids, weights = plain.inputs(rank.rank, 0, torch.bfloat16)
    x *= 3  # scales of a power of two differ from others
    manager, prepare_finalize, quant_config = vllm_layers.make_layer(rank, HIGH_THROUGHPUT, BLOCKS)
    kernel = vllm_layers.make_kernel(rank, prepare_finalize, quant_config)
    before, deep_gemm.is_deep_gemm_e8m0_used = deep_gemm.is_deep_gemm_e8m0_used, lambda: True
    rows, scales, *rest = kernel._prepare(x, weights, ids, EXPERTS, None, False)
    deep_gemm.is_deep_gemm_e8m0_used = before
    assert torch.equal(torch.exp2(scales.log2().round()), scales)
    out, y = torch.empty_like(x), kernel.fused_experts.run(rows, scales, *rest)
    kernel._finalize(out, y, x, rest[2], rest[1], False, None, None)
    torch.testing.assert_close(out.float(), plain.plain(rounded_up(x), ids, weights), **BF16)

    asked: list[tuple[Any, dict[str, Any]]] = []

    def quantize(rows: Tensor, scale: Any, *_: Any, **options: Any) -> tuple[Tensor, None]:
        asked.append((scale, options))
        return rows, None

    before, utils.moe_kernel_quantize_input = utils.moe_kernel_quantize_input, quantize
    gscale = torch.tensor([2.0])
    for dtype, swizzled in (("nvfp4", False), ("nvfp4", True), ("mxfp8", False)):
        config = {"quant_dtype": dtype, "a1_gscale": gscale, "is_scale_swizzled": swizzled}
        _, layer, quant_config = vllm_layers.make_layer(rank, HIGH_THROUGHPUT, config)
        kernel = vllm_layers.make_kernel(rank, layer, quant_config)
        vllm_layers.run_kernel(kernel, x, ids, weights)
        if asked:  # not where no row arrived
            scale, options = asked.pop()
            assert scale is (gscale if dtype == "nvfp4" else None)
            assert options["is_scale_swizzled"] == swizzled
            assert options["mx_alignment"] == quant_config.mx_alignment
    utils.moe_kernel_quantize_input = before
    manager.destroy()


def multiprocessors() -> None:
    """vLLM reserves some while micro-batches overlap, and gives all back (ubatch_utils.py)."""
    manager = vllm_ranks.make_manager(HIGH_THROUGHPUT)
    handle = manager.get_handle({})
    assert manager.max_sms_used() is None
    manager.set_num_sms(20)
    manager.set_num_sms(132)
    assert manager.max_sms_used() == handle.num_sms == manager.get_handle({}).num_sms == 20
    assert vllm_ranks.make_manager(LOW_LATENCY).max_sms_used() == 0
    manager.destroy()


class Stream:
    """A CUDA stream of the CPU: what was called is done."""

    def wait_event(self, _: object) -> None: ...


class Event:
    def record(self, _: object = None) -> None: ...


def overlapping_batches(rank: Rank, stack: contextlib.ExitStack) -> None:
    """Two threads with vLLM's micro-batch contexts, each with half of the tokens."""
    from vllm.v1.worker import ubatching

    at: dict[int, Any] = {}
    patch = pytest.MonkeyPatch()
    stack.callback(patch.undo)
    patch.setattr(ubatching, "current_stream", lambda: at.get(threading.get_ident()))
    patch.setattr(torch.cuda, "set_stream", lambda s: at.__setitem__(threading.get_ident(), s))
    patch.setattr(torch, "Event", Event)
    for backend in (LOW_LATENCY, HIGH_THROUGHPUT, V2):
        manager, prepare_finalize, quant_config = vllm_layers.make_layer(rank, backend, {})
        assert prepare_finalize.supports_dbo()
        kernel = vllm_layers.make_kernel(rank, prepare_finalize, quant_config)
        batches = [plain.inputs(rank.rank, step, torch.bfloat16) for step in (0, 1)]
        for out, (x, ids, weights) in zip(in_turns(kernel, batches), batches, strict=True):
            torch.testing.assert_close(out.float(), plain.plain(x, ids, weights), **BF16)
        manager.destroy()


def in_turns(kernel: Any, batches: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Runs each batch on a thread of its own; one thread at a time, as vLLM's contexts decide."""
    from vllm.v1.worker import ubatching

    barrier = threading.Barrier(3)
    contexts = ubatching.make_ubatch_contexts(2, Stream(), Stream(), [None, None], barrier)
    outs: list[Any] = [None, None]

    def run(index: int) -> None:
        try:
            with contexts[index]:
                outs[index] = vllm_layers.run_kernel(kernel, *batches[index])
        except BaseException as error:
            outs[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in (0, 1)]
    for thread in threads:
        thread.start()
    barrier.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), outs
    for out in outs:
        if isinstance(out, BaseException):
            raise out
    return outs


def test_layers_over_all_to_all_compute_a_plain_moe() -> None:
    run_processes(WORLD, run_ours, deadline_s=200.0)


# --- fault tolerance ---


def run_masking(rank: Rank) -> None:
    """A rank that is late is masked; clean_buffers takes it back, on one host in place."""
    vllm_layers.begin(rank, fault_tolerance=True)
    from moe_p2p.integrations.moe import vllm_managers

    vllm_managers.TIMEOUT_S = 10.0
    plainly = vllm_ranks.make_manager(HIGH_THROUGHPUT)
    with pytest.raises(NotImplementedError):
        plainly.query_active_mask()
    manager, prepare_finalize, quant_config = vllm_layers.make_layer(rank, LOW_LATENCY, {})
    assert manager.support_fault_tolerance
    kernel = vllm_layers.make_kernel(rank, prepare_finalize, quant_config)
    x, ids, weights = plain.inputs(0, 0, torch.bfloat16)
    owner = ids // (EXPERTS // rank.world_size)

    def compare(masked: int | None) -> None:
        """Experts of a masked rank add nothing."""
        out = vllm_layers.run_kernel(kernel, x, ids, weights)
        kept = weights if masked is None else torch.where(owner == masked, 0.0, weights)
        torch.testing.assert_close(out.float(), plain.plain(x, ids, kept), **BF16)

    compare(None)
    assert manager.query_active_mask().tolist() == [0, 0]
    assert not manager.query_fault()
    if rank.rank == 0:
        compare(1)  # rank 1 makes no such call
        assert manager.query_active_mask().tolist() == [0, 1]
        assert manager.query_fault()
        compare(1)
        rank.store.set("masked", "1")
    else:
        rank.store.wait(["masked"])
    (handle,) = manager._handles.values()
    made = dict(handle._pool._made)
    manager._masks.captured = True
    refuse_between_hosts(rank, manager)
    manager.clean_buffers()
    assert handle._pool._made == made  # what graphs hold stays
    assert manager.query_active_mask().tolist() == [0, 0]
    assert not manager.query_fault()
    for _ in range(3):
        compare(None)
    assert not manager.query_fault()
    manager.destroy()


def refuse_between_hosts(rank: Rank, manager: Any) -> None:
    """clean_buffers with graphs, as if each rank were a node."""
    with pytest.MonkeyPatch.context() as patch:
        for handle in manager._handles.values():
            patch.setattr(handle._pool, "ranks_per_node", 1)
        if rank.rank == 1:
            manager.clean_buffers()  # it has masked none
            return
        with pytest.raises(UnavailableError, match=r"ranks \[1\] are masked, and CUDA graphs hold"):
            manager.clean_buffers()


def test_lost_ranks_are_masked_and_taken_back() -> None:
    run_processes(2, run_masking, deadline_s=200.0)


# --- vLLM's own classes over moe_p2p.deep_ep, and plugins ---


def run_shim(rank: Rank) -> None:
    os.environ["MOE_P2P_AS_DEEP_EP"] = "1"
    vllm_ranks.begin(rank)
    from moe_p2p.integrations.moe import vllm

    vllm.plugin()
    from vllm.utils import import_utils

    assert import_utils.has_deep_ep_v2()
    assert os.environ["EP_DISABLE_GIN"] == "1"
    vllm_ranks.use(vllm_ranks.config())
    vllm_layers.use_quantizer()
    patch = pytest.MonkeyPatch()
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ll

    patch.setattr(deepep_ll.DeepEPLLPrepareAndFinalize, "SUPPORTED_HIDDEN_SIZES", [HIDDEN])
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    patch.setattr(mk, "PIN_MEMORY", False)
    # It sums a number over NCCL first, and then leaves the check out.
    patch.setattr(all2all.DeepEPV2All2AllManager, "_check_gin_support", lambda *_: None)
    for backend in (LOW_LATENCY, HIGH_THROUGHPUT, V2):
        vllm_layers.run_backend(rank, backend, ["none", "blocks"])
    patch.undo()


def test_vllms_own_classes_run_over_the_deep_ep_calls() -> None:
    run_processes(2, run_shim, deadline_s=200.0)


def test_steps_end_where_the_engines_have_them() -> None:
    """serving_steps.py wraps them by name."""
    for (name, owner, method), project in zip(STEPS, ("vllm", "sglang"), strict=True):
        folder = packages.find(project)
        if folder is None:
            pytest.skip(packages.why_not(project))
        module = ast.parse(Path(folder, *name.split(".")).with_suffix(".py").read_text())
        found = [
            each.name
            for node in module.body
            if isinstance(node, ast.ClassDef) and node.name == owner
            for each in node.body
            if isinstance(each, ast.FunctionDef)
        ]
        assert method in found, f"{name}.{owner} of {project} has no {method}"
