"""SGLang's `--moe-a2a-backend customized` on CPU ranks.

Its own loader of plugins applies our hooks, and nothing else of SGLang is replaced. contrib/sglang
has a test for its servers.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import InvalidArgumentError
from moe_p2p.integrations.moe import sglang_hooks
from tests.engines import absent, sglang_layers
from tests.engines.sglang_layers import extend, run_modes, take_turns
from tests.support import engine_layers as plain
from tests.support.engine_layers import EXPERTS, HIDDEN, TOPK, WORLD
from tests.support.ranks import Rank, run_processes

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SERVER_TEST = ROOT / "contrib/sglang/test_moe_p2p_small.py"
GROUP = "sglang.srt.plugins"


def load_plugins() -> None:
    """SGLang's own, which finds this package as if it were installed."""
    from sglang.srt import plugins

    (named,) = re.findall(rf'"{GROUP}"\]\nmoe_p2p = "(.+)"', (ROOT / "pyproject.toml").read_text())
    ours = EntryPoint("moe_p2p", named, GROUP)
    plugins.entry_points = lambda group: [ours] if group == GROUP else []
    plugins.load_plugins()


def parse(*arguments: str) -> Any:
    """As a server reads its command line; returns its ServerArgs."""
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", "model", *arguments])


def use(backend: str, mode: str = "auto", *, overlapping: bool = False) -> Any:
    """As initialize_moe_config sets it from a server's arguments."""
    from sglang.srt.layers.moe import utils

    flags = utils.get_flags().moe
    flags.a2a_backend = utils.MoeA2ABackend(backend)
    flags.deepep_mode, flags.tbo_enabled = utils.DeepEPMode(mode), overlapping
    return flags.a2a_backend


def make(rank: Rank, mode: str, *, overlapping: bool = False, num_local: int | None = None) -> Any:
    """By create_moe_dispatcher."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    layer._get_deepep_comm_group = lambda _: dist.group.WORLD  # of a server's groups
    use("customized", mode, overlapping=overlapping)
    config = MoeRunnerConfig(
        num_experts=EXPERTS,
        num_local_experts=num_local or EXPERTS // rank.world_size,
        hidden_size=HIDDEN,
        top_k=TOPK,
        params_dtype=torch.bfloat16,
    )
    return layer.create_moe_dispatcher(config, None)


def run(rank: Rank) -> None:
    absent.importing("sglang", absent.SGLANG)
    plain.join(rank, "cpu")
    assert importlib.util.find_spec("deep_ep") is None
    with pytest.raises(SystemExit):
        parse("--moe-a2a-backend", "customized")  # SGLang alone does not offer it
    sglang_layers.settings()
    from sglang.srt.layers.moe.token_dispatcher import deepep

    theirs = deepep.DeepEPDispatcher
    load_plugins()
    assert deepep.DeepEPDispatcher is theirs
    assert parse("--moe-a2a-backend", "customized").moe_a2a_backend == "customized"
    offered_once()
    other_backends_stay_as_they_are()
    for dtype in ("bf16", "fp8"):
        run_modes(rank, dtype, make=make)
    models_treat_it_as_deep_ep()
    overlapping_batches(rank)
    modes_in_turns()
    with pytest.raises(InvalidArgumentError, match=f"start SGLang with --ep-size {WORLD}"):
        make(rank, "auto", num_local=EXPERTS)  # without --ep-size
    assert "deep_ep" not in sys.modules


def offered_once() -> None:
    """Versions whose option has other choices, or none, are no error."""
    parser = argparse.ArgumentParser()
    sglang_hooks._offer(None, parser)
    option = parser.add_argument("--moe-a2a-backend", choices=["none"])
    for _ in range(2):
        sglang_hooks._offer(None, parser)
        assert option.choices == ["none", "customized"]


def other_backends_stay_as_they_are() -> None:
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.token_dispatcher import deepep

    asked = {each.value: each.is_deepep() for each in utils.MoeA2ABackend}
    assert {name for name, is_deepep in asked.items() if is_deepep} == {"deepep", "customized"}
    assert parse().moe_a2a_backend == "none"
    use("deepep")
    with pytest.raises(AttributeError, match="low_latency_mode"):
        deepep.DeepEPBuffer.clean_buffer()  # of a buffer that this process has not made


def models_treat_it_as_deep_ep() -> None:
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.ep_moe import layer

    use("customized")
    assert utils.is_deepep_class_backend()
    assert layer.get_moe_impl_class(None) is layer.DeepEPMoE
    use("none")
    assert layer.get_moe_impl_class(None) is layer.FusedMoE


def overlapping_batches(rank: Rank) -> None:
    """Halves of two micro-batches take turns."""
    extend(False)
    two = make(rank, "low_latency", overlapping=True)
    assert len(two._inners) == 2
    take_turns(rank, two)


def modes_in_turns() -> None:
    """EAGLE captures an extend batch and then decode batches (deepep_adapter.py)."""
    from sglang.srt.model_executor.runner_utils.deepep_adapter import DeepEPCudaGraphRunnerAdapter

    use("customized")
    extended, decoded = (DeepEPCudaGraphRunnerAdapter() for _ in range(2))
    extended.capture(is_extend_in_batch=True)
    decoded.capture(is_extend_in_batch=False)
    extended.replay()
    decoded.replay()


def test_hooks_alone_give_dispatchers_that_compute_a_plain_moe() -> None:
    run_processes(WORLD, run, deadline_s=200.0)


def arguments_of_the_server_test(rank: Rank) -> None:
    """SGLang with our hooks takes the command lines of contrib/sglang's test."""
    absent.importing("sglang", absent.SGLANG)
    load_plugins()
    lists = {
        node.targets[0].id: [each.value for each in node.value.elts]
        for node in ast.parse(SERVER_TEST.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    }
    given = parse(*lists["EP_ARGS"], *lists["ATTENTION_DP_ARGS"])
    assert given.moe_a2a_backend == "customized"
    assert given.ep_size == given.tp_size == given.attn_dp_size == 4


def test_the_server_test_uses_arguments_that_exist() -> None:
    run_processes(1, arguments_of_the_server_test)
