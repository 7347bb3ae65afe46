"""Senders of vLLM's adapter with a client that fails, and an engine whose own loader fails."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_p2p import AbortedError, ProtocolError, TimeoutError
from moe_p2p.integrations.weights import verl as verl_weights
from moe_p2p.integrations.weights import vllm as vllm_weights
from moe_p2p.integrations.weights.engine import EngineWeights, Fleet
from moe_p2p.integrations.weights.sglang import SglangUpdates
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, WeightTrainer, job
from tests.engines.scenarios import free_port
from tests.support.weights_fleet import BF16, engine_of

LONG_S = 60.0


class Source:
    def __init__(self) -> None:
        self.w = torch.ones(4, 8, dtype=torch.bfloat16)

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.w

    @cached_property
    def metadata(self) -> list[Any]:
        rows = types.SimpleNamespace(dim=0)
        return [types.SimpleNamespace(name="w", dtype=torch.bfloat16, shape=(8, 8), owners=(0, 1),
                                      mesh_shape=(2,), placements=(rows,))]  # fmt: skip


class Client:
    fails = False

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.fails:
            raise RuntimeError("503 from the server")


class Sender(vllm_weights.Sender):
    """Without vLLM's base."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool, rank: int) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


def test_trainers_stay_in_step_when_an_engine_cannot_finish() -> None:
    port, client, over = free_port(), Client(), threading.Event()

    def made(rank: int) -> Any:
        init = vllm_weights.TrainerInit(rank=rank, world_size=2, host="127.0.0.1", port=port,
                                        timeout_s=LONG_S / 2)  # fmt: skip
        return Sender.trainer_init(init, client=client, source=Source())

    def generate() -> int | None:
        store = Fleet(host="127.0.0.1", port=port, timeout_s=LONG_S / 2).store()
        layout = WeightLayout([Param("w", (8, 8), BF16, (0,))], 1)
        tensors = {"w": torch.zeros(8, 8, dtype=torch.bfloat16)}
        with engine_of("generator", 1) as engine, \
                WeightEngineRank(engine, store, layout, 0, tensors) as engine_rank:  # fmt: skip
            while not over.wait(0.002):
                engine_rank.step()
            return engine_rank.version

    with ThreadPoolExecutor(3) as pool:
        engine_rank = pool.submit(generate)
        trainers = [each.result(LONG_S) for each in [pool.submit(made, rank) for rank in range(2)]]
        for version in (1, 2, 3):
            client.fails = version == 1
            sent = [pool.submit(each.send_weights) for each in trainers]
            errors = [str(each.exception(LONG_S)) for each in sent]
            assert errors == (["503 from the server", "None"] if client.fails else ["None"] * 2)
            assert [each.version for each in trainers] == [version] * 2
        over.set()
        assert engine_rank.result(LONG_S) in (2, 3)
        for each in trainers:
            each.shutdown()


def test_trainers_hear_that_vllm_refuses_to_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for its workers."""
    port, client, begun = free_port(), Client(), threading.Semaphore(0)
    begin = job.SetUp.__init__

    def beginning(self: job.SetUp, *given: Any, **how: Any) -> None:
        begin(self, *given, **how)
        begun.release()

    def refuse(info: dict[str, Any]) -> None:
        for _ in range(4):  # trainers, each before it makes its end, and when it does
            assert begun.acquire(timeout=LONG_S / 2)
        raise RuntimeError("422 from the server")

    monkeypatch.setattr(job.SetUp, "__init__", beginning)
    client.init_weight_transfer_engine = refuse  # type: ignore[method-assign]

    def made(rank: int) -> Any:
        init = vllm_weights.TrainerInit(rank=rank, world_size=2, host="127.0.0.1", port=port,
                                        timeout_s=LONG_S)  # fmt: skip
        return Sender.trainer_init(init, client=client, source=Source())

    with ThreadPoolExecutor(2) as pool:
        trainers = [pool.submit(made, rank) for rank in range(2)]
        errors = [str(each.exception(LONG_S / 2)) for each in trainers]
    assert errors[0] == "422 from the server"
    assert "the set-up failed: vLLM's client: 422 from the server" in errors[1]


def test_trainers_hear_that_sglang_refuses_to_set_up() -> None:
    """SGLang itself, before its ranks are asked; a trainer that begins later hears it, too."""
    fleet = Fleet(host="127.0.0.1", port=free_port(), timeout_s=LONG_S)
    store, refused = fleet.store(serves=True), threading.Event()
    layout = WeightLayout([Param("w", (8, 8), BF16, (0, 1))], 2)
    updates = SglangUpdates("http://127.0.0.1:1", fleet)

    def refuse(name: str, **fields: Any) -> None:
        refused.set()
        raise OSError(f"{name}: 400 from the server")

    updates._call = refuse
    tensors = {"w": torch.zeros(8, 8, dtype=torch.bfloat16)}
    text = "the set-up failed: SGLang: pause_generation: 400"

    def sets_up() -> None:
        with engine_of("trainer", 1) as engine, updates.opening():
            assert refused.wait(LONG_S)
            with pytest.raises(AbortedError, match=text):
                WeightTrainer(engine, store, layout, 1, tensors, timeout_s=LONG_S)

    with pytest.raises(OSError, match="pause_generation: 400 from the server"):
        sets_up()


@pytest.mark.parametrize("of", ["worker 0", "actor 0"])
def test_ranks_of_verl_hear_that_one_has_no_engine(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU is gone, say: it fails before it makes its end."""
    waiting, heard = threading.Event(), list[str]()

    def engine(label: str, **how: Any) -> Any:
        if label == of:
            assert waiting.wait(LONG_S / 2)
            raise OSError("no device")
        return engine_of(label, 1)

    listen = job.SetUp.listen

    def listens(self: job.SetUp, *missing: Any) -> None:
        heard.append(self._who)
        if len(heard) > 1:  # the first time it has not begun to wait
            waiting.set()
        listen(self, *missing)

    monkeypatch.setattr(verl_weights, "Engine", engine)
    monkeypatch.setattr(job.SetUp, "listen", listens)
    ends = {side: verl_weights.Checkpoint(64, "cpu", LONG_S) for side in ("worker", "actor")}
    meeting = ends["worker"].prepare() | {"host": "127.0.0.1"}
    served, ends["worker"]._served = ends["worker"]._served, None
    with ThreadPoolExecutor(2) as pool:
        made = {side: pool.submit(each.init_process_group, side, 0, 1, 1, meeting)
                for side, each in ends.items()}  # fmt: skip
        for side, each in made.items():
            wanted = "no device" if side in of else f"the set-up failed: {of}: no device"
            assert wanted in str(each.exception(LONG_S / 2))
    for each in ends.values():
        each.finalize()
    assert served is not None


def test_a_store_that_nobody_serves_is_named() -> None:
    port = free_port()
    with pytest.raises(TimeoutError, match=f"within 0.1 s no store of rl at 127.0.0.1:{port}"):
        Fleet(host="127.0.0.1", port=port, name="rl", timeout_s=0.1).store()


class Loaded(torch.nn.Module):
    """Its loader copies, and fails while `fails`."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self.fails:
            raise OSError("no memory")
        for _, tensor in named:
            self.w.data.copy_(tensor)


def test_an_engine_whose_loader_failed_is_no_good_one() -> None:
    store, model = HashStore(), Loaded()
    ours = {"w": torch.ones(4, 4, dtype=torch.bfloat16)}
    fleet = Fleet(host="", port=0, timeout_s=LONG_S / 2)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        layout = WeightLayout([Param("w", (4, 4), BF16, (0,))], 1)
        made = pool.submit(EngineWeights, model, model.load_weights, fleet, 0, 1, direct=False,
                           store=store)  # fmt: skip
        trainer = stack.enter_context(
            WeightTrainer(engine_of("trainer", 0), store, layout, 0, ours)
        )
        worker = made.result(LONG_S)
        stack.callback(worker.close)
        for version in (1, 2, 3):
            model.fails = version == 2
            ours["w"].fill_(version)
            worker.begin()
            trainer.update(version)
            if model.fails:
                with pytest.raises(ProtocolError, match="the engine's loader failed"):
                    worker.commit()
            else:
                assert worker.commit() == version
                assert model.w.unique().tolist() == [version]
            until = time.monotonic() + LONG_S
            while trainer.live() != {None if model.fails else version: 1}:
                assert time.monotonic() < until, trainer.live()
