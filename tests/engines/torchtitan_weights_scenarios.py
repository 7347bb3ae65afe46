"""Scenarios of weight updates with TorchTitan's own RL actors: PolicyTrainer's push and
VLLMGenerator's pull, and the override that puts ours in the place of TorchStore.

Each rank of either actor is a process, and scenarios call them as the controller does. Stand-ins
are Monarch, TorchStore, vLLM and the model, whose tensors are sharded as TorchTitan's are.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.engines import absent
from tests.engines.scenarios import HANG_S, Scenarios, free_port, refused

scenario = Scenarios()
RANKS = 2  # of each actor
OVERRIDE = "moe_p2p.integrations.weights.torchtitan.store"
SHAPES = {"embed": (12, 16), "wq": (16, 16), "wk": (8, 16), "wo": (16, 16), "bias": (7,)}
FUSED = ("wq", "wk")  # of the generator


def begin() -> None:
    absent.importing(
        "torchtitan",
        "monarch spmd_types torch.utils.tensorboard torchstore tyro vllm "
        "torchtitan.experiments.rl.models torchtitan.experiments.rl.routing",
    )
    monarch = importlib.import_module("monarch.actor")
    monarch.Actor, monarch.concurrent_endpoint = type("Actor", (), {}), lambda method: method
    for name in ("trainer", "generator"):
        importlib.import_module(f"torchtitan.experiments.rl.actors.{name}")


def values(version: int) -> dict[str, Tensor]:
    """In bf16, as the generator has them; the buffer is of fp32 on both sides."""
    generator = torch.Generator().manual_seed(version)
    found = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()
    }
    return found | {"bias": found["bias"].float()}


class TrainerModel(torch.nn.Module):
    """Masters of fp32, sharded by FSDP."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        for name, shape in SHAPES.items():
            if name == "bias":
                self.register_buffer(name, torch.zeros(shape))
                continue
            whole = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
            self.register_parameter(name, torch.nn.Parameter(whole))

    @torch.no_grad()
    def take(self, version: int) -> None:
        for name, each in values(version).items():
            if name == "bias":
                self.bias.copy_(each)
            else:
                mine = getattr(self, name)
                mine.copy_(distribute_tensor(each.float(), mine.device_mesh, mine.placements))


class GeneratorModel(torch.nn.Module):
    """Sharded over tensor parallelism; q and k are one parameter, of which a state dict has parts
    that are copies, as TorchTitan's hooks make them."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        self.placed = {"embed": Shard(0), "wq": Shard(0), "wk": Shard(0), "wo": Shard(1)}
        rows = sum(SHAPES[name][0] for name in FUSED) // RANKS
        self.wqk = torch.nn.Parameter(torch.zeros(rows, 16, dtype=torch.bfloat16))
        self.embed = torch.nn.Parameter(self.sharded("embed"))
        self.wo = torch.nn.Parameter(self.sharded("wo"))
        self.register_buffer("bias", torch.zeros(SHAPES["bias"]))
        self.register_buffer("own", torch.full((3,), 5.0))  # that no trainer has
        self.register_state_dict_post_hook(lambda *given: self.part(*given))
        self.register_load_state_dict_pre_hook(lambda *given: self.fuse(*given))

    def sharded(self, name: str, whole: Tensor | None = None) -> Any:
        whole = torch.zeros(SHAPES[name], dtype=torch.bfloat16) if whole is None else whole
        return distribute_tensor(whole, self.mesh, [self.placed.get(name, Replicate())])

    def part(self, _: Any, found: dict[str, Any], *__: Any) -> None:
        from torch.distributed.tensor import DTensor

        sizes = [SHAPES[name][0] // RANKS for name in FUSED]
        for name, each in zip(FUSED, found.pop("wqk").split(sizes), strict=True):
            found[name] = DTensor.from_local(each.clone(), self.mesh, [Shard(0)], run_check=False)

    def fuse(self, _: Any, found: dict[str, Any], *__: Any) -> None:
        found["wqk"] = torch.cat([found.pop(name).to_local() for name in FUSED])

    def holds(self, version: int) -> bool:
        wanted = values(version) if version else {n: torch.zeros(s) for n, s in SHAPES.items()}
        found = self.state_dict()
        return bool((self.own == 5.0).all()) and all(
            torch.equal(found[name], each)
            if name == "bias"
            else torch.equal(found[name].to_local(), self.sharded(name, each.bfloat16()).to_local())
            for name, each in wanted.items()
        )


def _apply_override() -> None:
    """As both actors do before they build their models."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.experiments.rl.losses import GRPOLoss

    from moe_p2p.integrations.weights import torchtitan as torchtitan_weights

    torchtitan_weights._TIMEOUT_S = HANG_S
    assert apply_overrides(OverrideConfig(imports=[OVERRIDE]), GRPOLoss.Config()) == []


class Trainer:
    """A rank of PolicyTrainer, as far as weights go."""

    def __init__(self) -> None:
        from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

        self.actor = PolicyTrainer.__new__(PolicyTrainer)
        self.actor.model, self.actor._transfer_dtype = TrainerModel(), torch.bfloat16

    def push(self, version: int) -> None:
        self.actor.model.take(version)
        asyncio.run(self.actor.push_model_state_dict())
        self.actor.model.take(99)  # the optimizer goes on


class Generator:
    """A rank of VLLMGenerator, as far as weights go."""

    def __init__(self) -> None:
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.experiments.rl.actors.generator import VLLMGenerator

        set_spmd_backend("full_dtensor")  # else it makes such DTensors first
        self.actor = VLLMGenerator.__new__(VLLMGenerator)
        self.model = GeneratorModel()
        self.actor._get_model = lambda: types.SimpleNamespace(model=self.model)
        self.actor._rank = 1  # no future to resolve
        self.actor.config = types.SimpleNamespace(reset_prefix_cache_on_weight_sync=False)

    def pull(self, version: int) -> int:
        asyncio.run(self.actor._pull_model_state_dict(version))
        return int(self.actor.policy_version)

    def holds(self, version: int) -> bool:
        return self.model.holds(version)


class Mesh:
    """All ranks of an actor: processes, which a call reaches at once."""

    def __init__(self, kind: type, store: str) -> None:
        port, fork = free_port(), multiprocessing.get_context("fork")
        self.store, self.pipes, self.processes = store, list[Any](), list[Any]()
        for rank in range(RANKS):
            pipe, theirs = fork.Pipe()
            self.pipes.append(pipe)
            self.processes.append(
                fork.Process(target=_serve, args=(kind, theirs, rank, port, store), daemon=True)
            )
            self.processes[-1].start()
        self.call("set_up")

    def begin(self, call: str, *given: Any) -> None:
        for pipe in self.pipes:
            pipe.send((call, given))

    def answers(self) -> list[Any]:
        assert all(pipe.poll(2 * HANG_S) for pipe in self.pipes)
        found = [pipe.recv() for pipe in self.pipes]
        failed = [failure for _, failure in found if failure]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [answer for answer, _ in found]

    def call(self, call: str, *given: Any) -> list[Any]:
        self.begin(call, *given)
        return self.answers()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(HANG_S)


def _serve(kind: type, pipe: Any, rank: int, port: int, store: str) -> None:
    os.environ["MOE_P2P_WEIGHTS_STORE"] = store
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    actor = None
    while True:
        call, given = pipe.recv()
        try:
            if call == "set_up":
                _apply_override()
                actor = kind()
                pipe.send((None, ""))
            else:
                pipe.send((getattr(actor, call)(*given), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))


@contextmanager
def world() -> Iterator[tuple[Mesh, Mesh]]:
    store = f"127.0.0.1:{free_port()}"
    trainers, generator = Mesh(Trainer, store), Mesh(Generator, store)
    try:
        yield trainers, generator
    finally:
        generator.close()
        trainers.close()


@scenario
def a_pull_brings_what_the_push_before_copied() -> None:
    with world() as (trainers, generator):
        assert generator.call("holds", 0) == [True] * RANKS
        for version in (1, 2, 3):
            trainers.call("push", version)  # returns before anybody pulls
            assert generator.call("pull", version) == [version] * RANKS
            assert generator.call("holds", version) == [True] * RANKS


@scenario
def a_second_generator_is_refused_by_name() -> None:
    with world() as (trainers, generator):
        trainers.call("push", 1)
        generator.call("pull", 1)
        other = Mesh(Generator, generator.store)
        refused(lambda: other.call("pull", 1), "moe_p2p serves one", "start TorchTitan with one")
        other.close()
        trainers.call("push", 2)
        generator.call("pull", 2)
        assert generator.call("holds", 2) == [True] * RANKS


if __name__ == "__main__":
    scenario.main(begin)
