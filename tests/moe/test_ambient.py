"""What torch is set to around the calls changes nothing, nor does how a process was started.

All calls, with objects made in a state of torch or outside, and called there or outside, give the
same bits. A default device that no tensor should come to stands for every wrong one: "meta", and
on GPUs "cuda" too, which DeepEP's own scripts set.
"""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import sglang_layers, test_megatron, vllm_layers
from tests.support import gpu_ranks, warm
from tests.support.ambient_cases import (
    Made,
    W,
    default_device,
    default_dtype,
    difference,
    given_to,
)
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank, run_processes

ROOT = Path(__file__).resolve().parents[2]


# --- states ---


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """New memory is filled, too: torch.utils.deterministic.fill_uninitialized_memory is True."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: default_device("meta"),
    "default device cuda": lambda: default_device("cuda"),
    "device block": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": deterministic,
    "anomalies": torch.autograd.detect_anomaly,
}


def together(*names: str) -> AbstractContextManager[Any]:
    states = contextlib.ExitStack()
    for name in names:
        states.enter_context(STATES[name]())
    return states


def in_states(rank: Rank, _: World, names: list[str], device: str) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is not deterministic without
    given = given_to(rank.rank, device)
    made = Made(rank, device)
    expected = made.results(given)
    assert expected.keys() >= {"training", "layer_training"}
    for name in names:
        what = "made and called in it"
        try:
            with STATES[name]():
                new = Made(rank, device)
                assert not difference(new.results(given), expected)
            what = "made in it, called outside"
            assert not difference(new.results(given), expected)
            new.close()
            what = "made outside, called in it"
            with STATES[name]():
                assert not difference(made.results(given), expected)
        except BaseException as error:
            raise AssertionError(f"{name}: {what}") from error
    with together(*names):
        made.close()


def test_the_state_of_torch_changes_nothing() -> None:
    """All in two processes: the first call of an operator in Python takes a process seconds."""
    names = [name for name in STATES if "cuda" not in name]
    run_processes(W, in_states, World(W, W), names, "cpu")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", gpu_ranks.worlds((W, W)))
def test_the_state_of_torch_changes_nothing_on_gpus(world: World) -> None:
    given = [list(STATES), "cuda"]
    gpu_ranks.run(world, in_states, *given, processes=True, deadline_s=500.0)


# --- engines' layers ---


def all_at_once(
    rank: Rank,
    names: tuple[str, ...],
    begin: Callable[[Rank], None],
    body: Callable[..., None],
    *given: Any,
) -> None:
    """begin() imports the engine, whose own modules need not load in such states."""
    begin(rank)
    with together(*names):
        body(rank, *given)


SERVING = ("default device", "float64", "inference", "deterministic")
TRAINING = ("default device", "float64", "anomalies", "deterministic")


# Ranks import the engine, which takes each of them seconds.
IMPORTING: dict[str, Any] = {"deadline_s": 200.0}


@pytest.mark.timeout(400)
@pytest.mark.engine("vllm")
def test_nor_do_layers_of_vllm_change() -> None:
    run_processes(2, all_at_once, SERVING, vllm_layers.begin, vllm_layers.run_backends, **IMPORTING)


@pytest.mark.timeout(400)
@pytest.mark.engine("sglang")
def test_nor_do_layers_of_sglang_change() -> None:
    given = [SERVING, sglang_layers.begin_with_ours, sglang_layers.run_modes, "fp8"]
    run_processes(2, all_at_once, *given, **IMPORTING)


@pytest.mark.timeout(400)
@pytest.mark.engine("megatron-core")
def test_nor_do_layers_of_megatron_change() -> None:
    given = [TRAINING, test_megatron.begin, test_megatron.train_manager, 16, "cpu"]
    run_processes(2, all_at_once, *given, **IMPORTING)


# --- processes ---


def interpreter(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    return subprocess.run([sys.executable, *arguments], **options)


def in_new_process(program: str, timeout_s: float = 100.0, *, run: Callable[..., Any]) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path.strip(os.pathsep)}
    done = run("-c", program, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_ranks_may_be_started_in_any_way(how: str, device: str) -> None:
    timeout_s = 100.0 if device == "cpu" else 500.0  # kernels of all calls are compiled
    run = interpreter if how == "spawn" else warm.run  # whose children would be copies, too
    program = f"from tests.support import started; started.start({how!r}, {device!r})"
    in_new_process(program, timeout_s, run=run)


def test_importing_makes_no_tensor_on_the_default_device() -> None:
    """As in programs that set it first; here there is no GPU, and none is used where there is."""
    in_new_process(
        "import importlib, pkgutil, torch\n"
        "torch.set_default_device('cuda')\n"
        "torch.set_default_dtype(torch.float16)\n"
        "import moe_p2p\n"
        "for module in pkgutil.walk_packages(moe_p2p.__path__, 'moe_p2p.'):\n"
        "    name = module.name.rpartition('.')[2]\n"
        "    if not name.startswith('_') and '.kernels' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
        "assert not torch.cuda.is_initialized()\n",
        run=warm.without_moe_p2p().run,
    )


# --- the source ---

# What torch makes where its default device is, and of its default type. Modules have their weights
# there by torch's own convention, and commands are the only ones in their processes.
FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"}
FACTORIES |= {"ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}
OF_DEFAULT_TYPE = {"empty", "empty_strided", "eye", "linspace", "ones", "rand", "randn", "zeros"}
BY_DEFAULT = {"layer/moe_layer.py": 3}  # calls that take the defaults
COMMANDS = {"examples", "tools"}


def leaves_to_defaults(call: ast.Call) -> bool:
    made = call.func
    if not isinstance(made, ast.Attribute) or ast.unparse(made.value) != "torch":
        return False
    wanted = {"device"} if made.attr in FACTORIES else set()
    wanted |= {"dtype"} if made.attr in OF_DEFAULT_TYPE else set()
    return bool(wanted - {keyword.arg for keyword in call.keywords})


def test_every_new_tensor_names_its_device_and_type() -> None:
    library = ROOT / "moe_p2p"
    found: dict[str, int] = {}
    for path in library.rglob("*.py"):
        within = path.relative_to(library)
        nodes = ast.walk(ast.parse(path.read_text()))
        count = sum(isinstance(node, ast.Call) and leaves_to_defaults(node) for node in nodes)
        if count and within.parts[0] not in COMMANDS:
            found[str(within)] = count
    assert found == BY_DEFAULT
