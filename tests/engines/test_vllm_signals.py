"""Where vLLM's real decorator calls a KV connector: signals of layers get into a captured graph.

vLLM calls `save_kv_layer` from inside the attention op, so a replay does not. While it captures, no
metadata is bound, and it does not either, unless the connector says otherwise. Without a GPU, a
capture here records what ops of the package were called, and a replay calls those alone.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import kv
from tests.engines import absent, packages
from tests.support.kv_workers import Workers, some_pages, workers
from tests.support.ranks import Rank, run_processes

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]

LAYERS, PAGES, TOKENS = 3, 32, 18
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
SAME = kv.KVLayout((GROUP,))
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


class Capture(TorchDispatchMode):
    """Of a stream: kernels of the package are recorded, and run by `replay`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.moe_p2p.signal.default:
            self.calls.append((func, args))
            return None
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        for func, args in self.calls:
            func(*args)


def connector_classes() -> tuple[type[Any], type[Any]]:
    """One whose save_kv_layer signals, and the same one that asks for the call while a graph is
    captured."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    class Plain(KVConnectorBase_V1):
        signals: kv.KVSignals

        def save_kv_layer(self, layer_name: str, kv_layer: Tensor, *_: Any, **__: Any) -> None:
            self.signals.signal(NAMES.index(layer_name), kv_layer)

        def start_load_kv(self, *_: Any, **__: Any) -> None: ...
        def wait_for_layer_load(self, *_: Any) -> None: ...
        def wait_for_save(self) -> None: ...
        def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
            return 0, False

        def update_state_after_alloc(self, *_: Any) -> None: ...
        def build_connector_meta(self, *_: Any) -> None: ...

    class Captured(Plain):
        def has_connector_metadata(self) -> bool:
            bound: bool = super().has_connector_metadata()
            return bound or self.signals.capturing()

    return Plain, Captured


class Model:
    """Attention layers as vLLM has them, under its decorator and its forward context."""

    def __init__(self, cache: Tensor) -> None:
        from vllm.forward_context import ForwardContext, override_forward_context
        from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

        self.cache = cache.view(LAYERS, PAGES, -1)
        layers = {
            name: types.SimpleNamespace(kv_cache=self.cache[i]) for i, name in enumerate(NAMES)
        }
        self._context = lambda: override_forward_context(
            ForwardContext(
                no_compile_layers=layers,
                attn_metadata={name: object() for name in NAMES},  # as a full graph's capture has
                slot_mapping={},
            )
        )

        @maybe_transfer_kv_layer
        def attention(layer_name: str, value: int) -> None:
            layers[layer_name].kv_cache.fill_(value)

        self._attention = attention

    def forward(self, value: int) -> None:
        with self._context():
            for name in NAMES:
                self._attention(name, value)


def run(_: Rank) -> None:
    absent.importing("vllm", absent.VLLM.replace("vllm.distributed.kv_transfer", ""))
    for number, connector_class in enumerate(connector_classes()):
        with workers(SAME, SAME) as made, kv.KVSignals(made.senders[0]) as signals:
            check(made, signals, connector_class, captured=number == 1)


def check(
    found: Workers, signals: kv.KVSignals, connector_class: type[Any], *, captured: bool
) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    config = types.SimpleNamespace(kv_transfer_config=types.SimpleNamespace(is_kv_producer=True))
    connector = connector_class(config, KVConnectorRole.WORKER, None)
    connector.signals = signals
    assert not connector_class.requires_piecewise_for_cudagraph({})
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    runner_side = ActiveKVConnector(config, {})
    model = Model(signals.sender.cache.tensors[0])

    model.forward(1)  # warms up: no metadata, no capture
    graph = record(lambda: model.forward(2))
    assert len(graph.calls) == (LAYERS if captured else 0)
    connector.bind_connector_metadata(KVConnectorMetadata())
    eager = Capture()
    with eager:
        model.forward(3)  # a step that is not a graph, or the eager part of a piecewise one
    assert len(eager.calls) == LAYERS
    connector.clear_connector_metadata()
    runner_side.set_disabled(True)  # vLLM's dummy runs
    assert not record(lambda: model.forward(4)).calls
    runner_side.set_disabled(False)
    if captured:
        replays(found, signals, model, graph)
    kv_transfer_state._KV_CONNECTOR_AGENT = None


def record(body: Callable[[], None]) -> Capture:
    capture = Capture()
    with pytest.MonkeyPatch.context() as patch, capture:
        patch.setattr(kv.KVSignals, "capturing", lambda _: True)
        body()
    return capture


def replays(found: Workers, signals: kv.KVSignals, model: Model, graph: Capture) -> None:
    """A replay sends its step's layers, without a call of vLLM or the connector."""
    for number in (1, 2):
        ours, theirs = some_pages(5, PAGES, number), some_pages(5, PAGES, number + 2)
        name = f"r{number}"
        reservation = found.receivers[0].reserve(name, "prefill", {"kv": theirs}, total=TOKENS)
        sending = found.senders[0].start(name, "decode", {"kv": ours}, total=TOKENS)
        graph.replay()  # a dummy batch
        model.cache.fill_(50 + number)
        with signals.step([(sending, None)]):
            graph.replay()
        sending.commit()
        reservation.wait(20)
        sending.wait(20)
        got = found.receivers[0].cache.tensors[0].view(LAYERS, PAGES, -1)[:, theirs.long()]
        assert bool((got == 50 + number).all())


def test_signals_of_a_connector_get_into_a_captured_graph() -> None:
    run_processes(1, run, deadline_s=200.0)


def test_graphs_are_captured_with_the_connector_in_place() -> None:
    """vLLM takes it away in dummy runs; the code that captures must not."""
    found = packages.find("vllm")
    if found is None:
        pytest.skip(packages.why_not("vllm"))
    runner = Path(found, "vllm/v1/worker/gpu/model_runner.py")
    functions = {
        node.name: {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        for node in ast.walk(ast.parse(runner.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert "set_disabled" in functions["_dummy_run"]
    assert "set_disabled" not in functions["capture_model"]
    capture = Path(found, "vllm/v1/worker/gpu/cudagraph_utils.py").read_text()
    assert "set_disabled" not in capture
