"""The example server: tokens equal one process while a worker joins and one is killed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p.examples import disaggregated, workers
from moe_p2p.examples.small_model import HIDDEN, PAGE_TOKENS, SmallModel, generate, make_cache
from moe_p2p.kv.source_transfer import SourceTransfer
from tests.support import cells, warm
from tests.support.programs import program

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(320)  # of a run that takes 15 s on two cores with nothing else


def test_tokens_equal_one_process(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    done = warm.run(
        *("-m", "moe_p2p.examples.disaggregated"),
        *("--requests", "16", "--timeline", str(picture)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 requests equal one process" in done.stdout
    assert "prefill-4" in done.stdout  # it joined
    assert picture.read_bytes()[:4] == b"\x89PNG"


def timeline_at(picture: Path) -> list[str]:
    return ["--timeline", str(picture)] if importlib.util.find_spec("matplotlib") else []


def workers_of(memory: set[str]) -> int:
    return len({name.split(".")[2] for name in memory})


# `serving` is a state of test_ctrl_c_ends_requests_under_way too, whose clients wait besides.
STATES = cells.few([("starts prefill-1",), ("http://",)], keep=[("starts prefill-1",)])


@pytest.mark.parametrize("line", STATES, ids=["starting", "serving"])
def test_ctrl_c_ends_all_processes_and_shows_no_traceback(line: str, tmp_path: Path) -> None:
    """A terminal sends it to the workers and their fork server, too."""
    picture = tmp_path / "timeline.png"
    serve = ["--serve", "--prefill", "2", *timeline_at(picture)]
    with program("-m", "moe_p2p.examples.disaggregated", *serve) as running:
        running.wait_for(line)
        memory = running.memory()
        rest = running.interrupt(100)
        running.wait_until_gone()
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest
    assert not memory & {*os.listdir("/dev/shm")}
    if line == "http://":
        assert workers_of(memory) >= 3
        pytest.importorskip("matplotlib")
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_ctrl_c_ends_requests_under_way(tmp_path: Path) -> None:
    """Their clients wait for tokens of workers that are ended."""
    picture = tmp_path / "timeline.png"
    requests = ["--requests", "400", *timeline_at(picture)]
    with program("-m", "moe_p2p.examples.disaggregated", *requests) as running:
        running.wait_for("4 of 400")
        memory = running.memory()
        rest = running.interrupt(45)  # less than a client waits for a token
        running.wait_until_gone()
    assert workers_of(memory) >= 3
    for text in ("Traceback", "KeyboardInterrupt", "terminate called"):
        assert text not in rest
    assert not memory & {*os.listdir("/dev/shm")}
    pytest.importorskip("matplotlib")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_model_depends_on_all_of_its_prompt_and_not_on_chunks() -> None:
    model, prompt = SmallModel("cpu"), list(b"the quick brown fox jumps over the lazy dog")
    tokens = generate(model, prompt, 8, 16)
    assert tokens == generate(model, prompt, 8, 8)
    for at in (0, 20, len(prompt) - 1):
        other = [*prompt[:at], 7, *prompt[at + 1 :]]
        assert generate(model, other, 8, 16) != tokens


class EnoughError(Exception):
    """A layer's K and V are in the cache."""


def test_a_layer_is_sent_once_the_stream_of_its_device_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not that of device 0, the current one of a thread that has set none."""
    synchronized: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.device = device

        def synchronize(self) -> None:
            synchronized.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)

    def after_layer(_: int) -> None:
        raise EnoughError

    # No GPU, but no CPU either: tensors without bytes.
    model = SmallModel("meta")
    cache: Any = SimpleNamespace(tensors=[make_cache(2, "cpu").tensors[0].to("meta")])
    with pytest.raises(EnoughError):
        model.forward(cache, torch.arange(2, dtype=torch.int32), [1, 2, 3], 0, after_layer)
    assert synchronized == ["meta"]


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_a_layer_is_sent_once_it_is_computed_on_another_gpu() -> None:
    device, idle = "cuda:1", []
    model, cache = SmallModel(device), make_cache(2, device)
    pages = torch.arange(2, dtype=torch.int32)
    model.forward(cache, pages, [1, 2, 3], 0)

    def forward() -> None:
        torch.cuda._sleep(1)  # of device 0
        with torch.cuda.device(device):
            torch.cuda._sleep(200_000_000)  # tenths of a second
        stream = torch.cuda.current_stream(device)
        model.forward(cache, pages, [1, 2, 3], 0, lambda _: idle.append(stream.query()))

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert idle == [True] * len(model.layers)


@pytest.fixture(name="threads")
def _as_many_threads() -> Iterator[None]:
    """A worker sets the number for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_bytes_that_are_not_right_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One value is another when it is checked."""
    checked = SourceTransfer.wrong_sum

    def with_another_byte(self: SourceTransfer) -> str:
        page = int(self._reserved.pages["kv"][0])
        self._worker.cache.tensors[0][page * 2 * PAGE_TOKENS * HIDDEN] += 1
        return checked(self)

    monkeypatch.setattr(SourceTransfer, "wrong_sum", with_another_byte)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made, pipes = [], []
    for role in ("prefill", "decode"):
        ours, theirs = multiprocessing.Pipe()
        made.append(workers.WorkerProcess(role, role, store.port, None, theirs))
        pipes.append(ours)
    serving = [threading.Thread(target=worker.serve) for worker in made]
    for thread in serving:
        thread.start()
    prompt = list(b"the quick brown fox")
    for pipe in pipes:
        pipe.send(workers.Job(1, 0, "prefill", "decode", prompt, 4, 16))
    kinds = until_failed(pipes[1])
    for pipe in pipes:
        pipe.send(None)
    for thread in serving:
        thread.join()
    assert [kind for kind, _ in kinds] == ["ready", "wrong", "failed"]
    assert "prefill to decode" in kinds[1][1]
    assert "checksum" in kinds[1][1]


def until_failed(pipe: Connection) -> list[tuple[str, Any]]:
    """Kinds and values of a worker's events."""
    found: list[tuple[str, Any]] = []
    while not found or found[-1][0] != "failed":
        assert pipe.poll(60), found
        kind, _, value, _, _ = pipe.recv()
        found.append((kind, value))
    return found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port=99999"], "--port 99999 cannot be served"),
        (["--decode=0"], "--decode: '0' is not a whole number from 1"),
        (["--timeline=/proc/x.png"], "--timeline: /proc/x.png cannot be written"),
        (["--timeline=x.png"], "--timeline: matplotlib is not installed"),
    ],
)
def test_what_it_cannot_do_is_refused_before_a_worker_starts(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        disaggregated.main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
