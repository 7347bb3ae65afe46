"""Scenarios of weight updates with slime's own training actor, weight updater and converter to the
checkpoint's names, over two pipeline stages, and SGLang's own session at two engines.

slime is no package of an index: MOE_P2P_SLIME names a folder that has its `slime`. Stand-ins are
Ray, what trains, and a model of Megatron's names. The second stage is a process of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import absent, packages, sglang_weights_scenarios
from tests.engines.scenarios import HANG_S, Scenarios, free_port, refused
from tests.engines.sglang_weights_scenarios import TP, Manager, Server
from tests.support.tp_model import HEADS, HIDDEN, LAYERS, VOCAB, TpModel, checkpoint


class TwoStages(Scenarios):
    """peer: the second stage's end of a pipe."""

    peer: Any


scenario = TwoStages()
_KEY = "secret"
_ABSENT = (
    "httpx megatron.training ray ring_flash_attn sglang_router tensorboard torch_memory_saver tqdm "
    "wandb"
)
# Of a layer, and of the rest: names in the checkpoint by those of TpModel.
_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
}


def begin() -> None:
    """Both stages, from here on in a process each."""
    sglang_weights_scenarios.begin()
    sys.path[:0] = [str(packages.find(project)) for project in ("slime", "megatron-core")]
    absent.stand_in(_ABSENT)
    ray = importlib.import_module("ray")
    ray.get = lambda answered: answered
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    actor = importlib.import_module("slime.backends.megatron_utils.actor")
    actor.print_memory = lambda _: None  # of a GPU
    port = free_port()
    theirs, scenario.peer = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(
        target=_second_stage, args=(theirs, port), daemon=True
    ).start()
    _meet(port, 0)


def _meet(port: int, stage: int) -> None:
    from megatron.core import mpu
    from slime.utils import distributed_utils

    from moe_p2p.integrations.weights import slime as slime_weights

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=stage, world_size=2)
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    distributed_utils.init_gloo_group()
    slime_weights._TIMEOUT_S = HANG_S
    slime_weights.install()


def _second_stage(pipe: Any, port: int) -> None:
    _meet(port, 1)
    trainer = Trainer(1)
    while True:
        call, *given = pipe.recv()
        try:
            getattr(trainer, call)(*given)
            pipe.send("")
        except Exception:
            pipe.send(traceback.format_exc())


def hf_name(name: str) -> str:
    """The checkpoint's, of one of TpModel's."""
    *at, last, weight = name.split(".")
    if at[:1] == ["layers"]:
        last = "input_layernorm" if last == "norm" else _NAMES[f"{at[2]}.{last}"]
        return f"model.layers.{at[1]}.{last}.{weight}"
    return f"{_NAMES[last]}.{weight}"


OURS = {hf_name(name): name for name in checkpoint(0)}


class Model(torch.nn.Module):
    """An engine's, with the checkpoint's names."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.model = TpModel(rank, world_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return self.model.load_weights((OURS[name], each) for name, each in weights)

    def holds(self, version: int | None) -> bool:
        return self.model.holds(version)


def megatron_values(version: int, stage: int) -> dict[str, Tensor]:
    """Of a stage, by Megatron's names there; each group of heads has its q, k and v together."""
    values = checkpoint(version)
    found = {}
    if stage == 0:
        found["embedding.word_embeddings.weight"] = values["embed.weight"]
    else:
        found["decoder.final_layernorm.weight"] = values["norm.weight"]
    at = f"layers.{stage}"
    qkv = [values[f"{at}.attn.{name}.weight"].view(HEADS, -1, HIDDEN) for name in "qkv"]
    ours = "decoder.layers.0.self_attention"
    found[f"{ours}.linear_qkv.weight"] = torch.cat(qkv, 1).reshape(-1, HIDDEN)
    found[f"{ours}.linear_qkv.layer_norm_weight"] = values[f"{at}.norm.weight"]
    found[f"{ours}.linear_proj.weight"] = values[f"{at}.attn.o.weight"]
    return found


class Trainer:
    """slime's training actor of a stage, as far as weights go."""

    def __init__(self, stage: int) -> None:
        from megatron.core.transformer import TransformerConfig
        from slime.backends.megatron_utils import actor

        self.stage = stage
        self.actor = actor.MegatronTrainRayActor.__new__(actor.MegatronTrainRayActor)
        off = "debug_train_only debug_rollout_only use_fault_tolerance offload_train use_critic"
        self.args = types.SimpleNamespace(
            **dict.fromkeys([*off.split(), "colocate"], False),
            **dict.fromkeys(("num_experts", "q_lora_rank"), None),
            **dict.fromkeys(("num_attention_heads", "num_query_groups"), HEADS),
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            kv_channels=4,
            rollout_num_gpus_per_engine=TP,
            update_weight_buffer_size=1 << 11,  # of some parameters
        )
        self.model = torch.nn.Module()
        self.model.config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.bfloat16,
        )
        for name, value in megatron_values(0, stage).items():
            at = self.model
            *path, last = f"module.{name}".split(".")
            for each in path:
                if not hasattr(at, each):
                    at.add_module(each, torch.nn.Module())
                at = getattr(at, each)
            at.register_parameter(last, torch.nn.Parameter(value.clone(), requires_grad=False))
            getattr(at, last).tensor_model_parallel = False
        self.actor.args, self.actor.role = self.args, "actor"
        self.make()

    def make(self, quantization: Any = None) -> None:
        """As slime's `init` does, after it has chosen the class."""
        from slime.backends.megatron_utils import actor

        self.actor.weight_updater = actor.UpdateWeightFromDistributed(
            self.args,
            [self.model],
            weights_getter=dict,
            model_name="qwen2",
            quantization_config=quantization,
        )

    def update(self, version: int, ports: list[int], num_new: int, pp_size: int = 1) -> None:
        """ports: of the engines' servers; all of a size."""
        with torch.no_grad():
            for name, value in megatron_values(version, self.stage).items():
                self.model.get_parameter(f"module.{name}").copy_(value)
        counts = [TP] * len(ports)
        configs = [{"pp_size": pp_size}] * len(ports)
        self.actor.rollout_manager = remote(
            get_updatable_engines_and_lock=lambda: (
                *([remote(get_url=engine(port).get_url) for port in ports], None, num_new),
                *(counts, [0] * len(ports), configs),
            ),
            clear_updatable_num_new_engines=lambda: None,
        )
        self.actor.update_weights()

    def fail(self, version: int, ports: list[int]) -> None:
        """An update in which this stage sends nothing."""
        trainer = self.actor.weight_updater._trainer
        trainer.update = lambda *_: (trainer.abort("out of memory"), _raise())
        try:
            self.update(version, ports, 0)
        finally:
            del trainer.update

    def close(self) -> None:
        self.actor.weight_updater.disconnect_rollout_engines()


def _raise() -> None:
    raise RuntimeError("out of memory")


def engine(port: int) -> Any:
    """slime's own, of a server that runs."""
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    made = SGLangEngine(types.SimpleNamespace(), 0)
    made.node_rank, made.server_host, made.server_port = 0, "127.0.0.1", port
    return made


def remote(**methods: Any) -> Any:
    """An actor of Ray's whose methods answer at once."""
    return types.SimpleNamespace(
        **{name: types.SimpleNamespace(remote=each) for name, each in methods.items()}
    )


class World:
    def __init__(self, engines: int) -> None:
        self.trainer = Trainer(0)
        self.managers = [Manager(Model) for _ in range(engines)]
        self.servers = [Server(each, "") for each in self.managers]
        self.num_new = engines
        scenario.peer.send(("make",))
        assert not self._answer()

    def begin_anew(self, index: int) -> None:
        """An engine that was lost is started again."""
        self.servers[index].close()
        self.managers[index] = Manager(Model)
        self.servers[index] = Server(self.managers[index], "")
        self.num_new = 1

    def update(self, version: int, *more: Any, call: str = "update") -> None:
        ports = [each.server.server_port for each in self.servers]
        scenario.peer.send(
            (call, version, ports, *([] if call == "fail" else [self.num_new, *more]))
        )
        try:
            self.trainer.update(version, ports, self.num_new, *more)
        finally:
            failure = self._answer()
            self.num_new = 0
        assert not failure, failure

    @staticmethod
    def _answer() -> str:
        """Of the second stage: what went wrong."""
        assert scenario.peer.poll(2 * HANG_S)
        return str(scenario.peer.recv())

    def hold(self, version: int | None) -> bool:
        return all(each.hold(version) for each in self.managers)

    def close(self) -> None:
        from moe_p2p.integrations.weights import sglang as sglang_weights

        for worker in sglang_weights._workers.values():
            worker.close()
        for kept in (sglang_weights._workers, sglang_weights._stores, sglang_weights._answers):
            kept.clear()
        scenario.peer.send(("close",))
        self.trainer.close()
        self._answer()
        for server in self.servers:
            server.close()


@contextmanager
def world(engines: int = 1) -> Iterator[World]:
    made = World(engines)
    try:
        yield made
    finally:
        made.close()


@scenario
def two_engines_take_what_two_stages_have() -> None:
    with world(2) as w:
        assert w.hold(None)
        for version in (1, 2):
            w.update(version)
            assert w.hold(version)
        for manager in w.managers:
            assert [rank.versions for rank in manager.ranks] == [["1", "2"]] * TP
            assert manager.paused == [False] * TP
            assert manager.calls.count("pause abort") == 2  # for the copies alone
        assert w.trainer.actor.weight_updater.weight_version == 2


@scenario
def an_engine_that_began_anew_is_connected_again() -> None:
    with world(2) as w:
        w.update(1)
        w.begin_anew(1)
        w.update(2)
        assert w.hold(2)


@scenario
def a_stage_that_fails_fails_the_update_and_engines_go_on() -> None:
    with world() as w:
        w.update(1)
        refused(lambda: w.update(2, call="fail"), "out of memory")
        assert w.hold(1)
        assert w.managers[0].paused == [False] * TP


@scenario
def what_is_not_carried_is_refused_by_name() -> None:
    with world() as w:
        refused(lambda: w.update(1, 2), "pp_size=2", "--sglang-pp-size 1")
        refused(
            lambda: w.trainer.make({"quant_method": "compressed-tensors"}), "compressed-tensors"
        )


if __name__ == "__main__":
    scenario.main(begin)
