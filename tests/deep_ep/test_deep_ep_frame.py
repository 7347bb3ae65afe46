"""What is around the calls of moe_p2p.deep_ep: installing, events, Config, groups, the end."""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import moe_p2p.deep_ep
from moe_p2p.deep_ep import Buffer, Config, EventHandle, EventOverlap, installation, streams
from moe_p2p.deep_ep.__main__ import main
from tests.support import deep_ep_cases as cases
from tests.support import warm
from tests.support.ranks import Rank, on_ranks, run_processes, run_threads

ROOT = Path(__file__).resolve().parents[2]
BOTH_SPELLINGS = """
import importlib.util
import deep_ep, deep_ep.buffer, deep_ep.utils.event
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle, EventOverlap as Again
assert importlib.util.find_spec("deep_ep") is not None
assert deep_ep.__name__ == "moe_p2p.deep_ep" and Again is EventOverlap
assert deep_ep.buffer.Buffer is Buffer and deep_ep.__version__.startswith("2.")
"""


# --- installing ---


@pytest.fixture(name="installed")
def _installed() -> Iterator[None]:
    moe_p2p.deep_ep.install()
    yield
    moe_p2p.deep_ep.uninstall()


def run_python(
    *arguments: str, run: Callable[..., Any] = warm.run, path: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """run: warm.run, or another server's. path: a folder where programs look for modules first."""
    paths = [str(path) if path else "", str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more
    done: subprocess.CompletedProcess[str] = run(
        *arguments, capture_output=True, text=True, timeout=250, env=environment
    )
    return done


@pytest.mark.usefixtures("installed")
def test_install_serves_the_imports_of_both_versions() -> None:
    exec(BOTH_SPELLINGS, {})
    moe_p2p.deep_ep.install()  # once more does nothing


def test_uninstall_leaves_nothing() -> None:
    moe_p2p.deep_ep.install()
    moe_p2p.deep_ep.uninstall()
    assert [name for name in sys.modules if name.partition(".")[0] == "deep_ep"] == []
    with pytest.raises(ImportError):
        importlib.import_module("deep_ep")


def test_install_refuses_next_to_the_real_one_and_can_be_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("from deep_ep import utils\n")
    (tmp_path / "deep_ep" / "utils.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    real = importlib.import_module("deep_ep")
    try:
        with pytest.raises(ImportError, match=re.escape(str(tmp_path / "deep_ep"))):
            moe_p2p.deep_ep.install()
        assert sys.modules["deep_ep"] is real
        moe_p2p.deep_ep.install(force=True)
        assert sys.modules["deep_ep"] is moe_p2p.deep_ep
        moe_p2p.deep_ep.uninstall()
        assert sys.modules["deep_ep"] is real
        assert sys.modules["deep_ep.utils"] is real.utils
    finally:
        for name in ("deep_ep", "deep_ep.utils"):
            sys.modules.pop(name, None)


def test_the_environment_installs_when_moe_p2p_is_imported() -> None:
    program = "import moe_p2p\n" + BOTH_SPELLINGS
    done = run_python("-c", program, run=warm.without_moe_p2p().run, MOE_P2P_AS_DEEP_EP="1")
    assert done.returncode == 0, done.stderr


def test_a_folder_on_the_path_installs_where_it_is_imported() -> None:
    run = warm.without_moe_p2p().run
    done = run_python("-c", BOTH_SPELLINGS, run=run, path=installation.PATH)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("as_module", [False, True])
def test_the_runner_serves_a_program_and_what_it_starts(tmp_path: Path, as_module: bool) -> None:
    # What is started looks for deep_ep, and does not import it: that takes seconds.
    program = """
import importlib.util, multiprocessing, subprocess, sys

def look(how):
    print(how, importlib.util.find_spec("deep_ep").origin, flush=True)

if __name__ == "__main__":
    import deep_ep
    print(sys.argv[1:], deep_ep.__name__, flush=True)
    for how in ("fork", "forkserver", "spawn"):
        process = multiprocessing.get_context(how).Process(target=look, args=(how,))
        process.start()
        process.join()
    look_again = "import engine; engine.look('subprocess')"
    subprocess.run([sys.executable, "-c", look_again])
"""
    (tmp_path / "engine.py").write_text(program)
    named = ["-m", "engine"] if as_module else [str(tmp_path / "engine.py")]
    done = run_python("-m", "moe_p2p.deep_ep", *named, "-a", "b", path=tmp_path)
    ours, forked = installation.PATH / "deep_ep.py", moe_p2p.deep_ep.__file__
    assert done.stdout.splitlines() == [
        "['-a', 'b'] moe_p2p.deep_ep",
        f"fork {forked}",
        *[f"{how} {ours}" for how in ("forkserver", "spawn", "subprocess")],
    ], done.stderr


def test_the_runner_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["-m"]) == main(["--help"]) == 2
    assert "usage: python -m moe_p2p.deep_ep" in capsys.readouterr().err
    assert main(["--path"]) == 0
    assert capsys.readouterr().out == f"{installation.PATH}\n"


@pytest.mark.parametrize(
    ("program", "missing"),
    [(["nope.py"], "file nope.py"), (["-m", "no.pe"], "module no.pe")],
)
def test_the_runner_names_a_program_that_is_not_there(program: list[str], missing: str) -> None:
    done = run_python("-m", "moe_p2p.deep_ep", *program)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"python -m moe_p2p.deep_ep: there is no {missing}"


# --- events and Config ---


def test_an_event_waits_at_the_end_of_a_block_and_then_calls_its_hook() -> None:
    calls: list[str] = []
    event = Buffer.capture()
    assert event.event is not None
    event.register_hook_after_wait(lambda: calls.append("hook"))
    with pytest.raises(AssertionError, match="has a hook already"):
        event.register_hook_after_wait(lambda: None)
    with event(release_handle=True):
        calls.append("work")
    assert calls == ["work", "hook"]
    assert event.event is None
    event.register_hook_after_wait(lambda: 7)
    assert event.current_stream_wait() == 7
    assert event.current_stream_wait() is None


def test_an_event_keeps_its_tensors() -> None:
    tensors = (torch.zeros(1),)
    event = EventOverlap(EventHandle(), tensors)
    assert event.extra_tensors is tensors
    assert EventOverlap().event is None


class OnGpu:
    """As much of a tensor on cuda:0 as a turn looks at."""

    def get_device(self) -> int:
        return 0


def test_a_call_on_the_stream_of_the_latest_one_switches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, made, x = 5, list[tuple[Any, ...]](), cast(torch.Tensor, OnGpu())

    def cuda_turn(*arguments: Any) -> streams.Turn:
        made.append(arguments[1:3])
        return streams.Turn(False)

    monkeypatch.setattr(streams, "_current_raw", lambda _: current)
    monkeypatch.setattr(streams, "CudaTurn", cuda_turn)
    ours = streams.Streams()
    ours.turn(x)
    assert made.pop() == (None, False)  # the first call, on a stream that is not known yet
    ours.follow(cast(torch.cuda.Stream, SimpleNamespace(cuda_stream=current)))
    ours.turn(x)
    ours.turn(x, EventOverlap())  # of a synchronous call
    assert not made
    event = EventHandle()
    ours.turn(x, event)
    assert made.pop() == (event, False)
    ours.turn(x, None, True)
    assert made.pop() == (None, True)
    current = 6
    ours.turn(x)
    assert made.pop() == (None, False)


@pytest.mark.parametrize("wrap", [EventOverlap, lambda handle: handle])
def test_host_memory_is_used_after_the_event(wrap: Callable[[EventHandle], Any]) -> None:
    waited: list[str] = []
    event = EventHandle()
    event._event = cast(
        torch.cuda.Event, SimpleNamespace(synchronize=lambda: waited.append("host"))
    )
    with streams.Streams().turn(torch.zeros(1), wrap(event), True, True) as turn:
        assert waited == ["host"]
    assert turn.event.event is not None
    turn.event.current_stream_wait()
    streams.wait_for(wrap(event), torch.zeros(1))
    assert waited == ["host"] * 2


class Recorded:
    """As much of a tensor as two streams share."""

    def __init__(self) -> None:
        self.streams: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.streams.append(stream)


def test_what_two_streams_use_is_kept_for_the_one_it_was_not_made_on() -> None:
    turn: Any = object.__new__(streams.CudaTurn)
    turn._stream, turn._callers = "of communication", "of the caller"
    argument, result = Recorded(), Recorded()
    turn.uses((argument, None), [result])
    assert (argument.streams, result.streams) == (["of communication"], ["of the caller"])


def test_without_a_gpu_there_is_no_communication_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(moe_p2p.UnavailableError, match="no communication stream"):
        _ = streams.Streams().comm


def test_size_hints_are_of_the_size_that_users_know() -> None:
    config = Buffer.get_dispatch_config(8)
    # 320 MiB for 8 ranks of hidden size 7168 in bfloat16 at 20 SMs.
    assert 315 < config.get_nvl_buffer_size_hint(2 * 7168, 8) / 2**20 < 325
    assert config.get_rdma_buffer_size_hint(2 * 7168, 8) == 0
    assert config.get_rdma_buffer_size_hint(2 * 7168, 16) > 0
    for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        assert hint(hidden_bytes=5120, num_ranks=32) % 128 == 0


def test_there_is_a_config_for_every_number_of_ranks() -> None:
    eight = Config(
        num_sms=Buffer.num_sms,
        num_max_nvl_chunked_send_tokens=6,
        num_max_nvl_chunked_recv_tokens=256,
        num_max_rdma_chunked_send_tokens=6,
        num_max_rdma_chunked_recv_tokens=128,
    )
    assert Buffer.get_dispatch_config(8) == Buffer.get_dispatch_config(7) == eight
    assert Buffer.get_combine_config(8).num_max_nvl_chunked_send_tokens == 4
    for num_ranks in (1, 3, 5, 20, 64, 500):
        assert Buffer.get_dispatch_config(num_ranks).num_sms == Buffer.num_sms
        assert Buffer.get_combine_config(num_ranks).num_sms == Buffer.num_sms


def test_the_number_of_sms_is_of_all_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", 20)
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == Buffer.get_dispatch_config(4).num_sms == 24
    with pytest.raises(AssertionError, match="must be even"):
        Buffer.set_num_sms(23)


# --- groups, and the end ---


def _in_group(rank: Rank, given: bool) -> tuple[int, int, bool]:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    group = dist.new_group(backend="gloo") if given else None
    buffer = Buffer(group, 1 << 20, 0, explicitly_destroy=True)
    place = cases.Place(buffer.rank, buffer.group_size, "cpu", buffer)
    cases.check_combine(place, cases.SETTINGS["bf16"])
    buffer.destroy()
    return buffer.rank, buffer.group_size, buffer.group is group


@pytest.mark.parametrize("given", [True, False], ids=["a-group", "default-group"])
def test_takes_process_groups_of_the_cpu(given: bool) -> None:
    assert run_processes(2, _in_group, given) == [(0, 2, True), (1, 2, True)]


class FakeMpi:
    """What is used of mpi4py, among threads."""

    def __init__(self, rank: int, world: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._world, self._barrier = rank, world, barrier

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._barrier.parties

    def bcast(self, obj: Any, root: int = 0) -> Any:
        if self._rank == root:
            self._world.append(obj)
        self._barrier.wait(20)
        return self._world[-1]


def _over_mpi(rank: Rank, world: list[Any], barrier: threading.Barrier) -> None:
    comm = FakeMpi(rank.rank, world, barrier)
    buffer = Buffer(None, 1 << 20, comm=comm, explicitly_destroy=True)
    assert buffer.group is comm
    place = cases.Place(buffer.rank, buffer.group_size, "cpu", buffer)
    cases.check_dispatch(place, cases.SETTINGS["bf16"])
    buffer.destroy()
    barrier.wait(20)  # the store is rank 0's


def test_takes_a_communicator_of_mpi() -> None:
    run_threads(3, _over_mpi, [], threading.Barrier(3))


@on_ranks(2)
def test_has_the_attributes_that_users_read_until_it_is_destroyed(rank: Rank) -> None:
    place = cases.open_buffer(rank, "cpu", num_nvl_bytes=1 << 20, low_latency_mode=True)
    buffer = place.buffer
    assert (buffer.rank, buffer.group_size) == (rank.rank, rank.world_size)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 0)
    assert buffer.low_latency_mode
    assert buffer.explicitly_destroy
    assert not buffer.enable_shrink
    assert buffer.runtime is not None
    assert buffer.runtime.is_available()
    assert buffer.runtime.get_num_rdma_ranks() == 1
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() == 0
    assert buffer.get_local_buffer_tensor(torch.float32, torch.Size((2, 3))).shape == (2, 3)
    sent = cases.send(place, cases.SETTINGS["bf16"])
    buffer.destroy()
    assert buffer.runtime is None
    with pytest.raises(moe_p2p.ClosedError):
        buffer.combine(sent.rows, sent.handle)
    buffer.destroy()  # again does nothing


@on_ranks(1)
def test_without_destroy_everything_is_released(rank: Rank) -> None:
    place = cases.open_buffer(rank, "cpu", explicitly_destroy=False)
    with pytest.raises(AssertionError, match="explicitly_destroy=True"):
        place.buffer.destroy()
    communicator = weakref.ref(cases.send(place, cases.SETTINGS["bf16"]).handle.all_to_all)
    del place
    gc.collect()
    assert communicator() is None


def _leaves_first(rank: Rank) -> str:
    group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
    buffer = Buffer(group, explicitly_destroy=True, timeout_s=1.0)
    if rank.rank == 0:
        return ""
    with pytest.raises(moe_p2p.TimeoutError) as raised:
        buffer.destroy()
    return str(raised.value)


def test_destroy_names_missing_ranks() -> None:
    assert (
        "all ranks to destroy their buffers, rank 0 did not come"
        in run_threads(2, _leaves_first)[1]
    )


def test_what_a_hook_uses_on_another_stream_is_recorded_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else torch could reuse its memory when the stream that sent is done with it."""
    used: list[object] = []

    class Rows:
        def record_stream(self, stream: object) -> None:
            used.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "here")
    monkeypatch.setattr(streams, "current", lambda like: 7)
    streams.use_here(torch.empty(0), (Rows(), None, Rows()), 7)  # type: ignore[arg-type]
    assert used == []
    streams.use_here(torch.empty(0), (Rows(), None, Rows()), 3)  # type: ignore[arg-type]
    assert used == ["here", "here"]
