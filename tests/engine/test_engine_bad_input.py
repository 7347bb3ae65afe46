"""What an Engine refuses: by name, and before anything is sent."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p import Engine, InvalidArgumentError, MoeP2pError, PageRows, kv
from moe_p2p.engine.lifetime import close_and_await
from moe_p2p.engine.transfers import Gate, Slice
from tests.engine.test_engine import pair
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
ONE = torch.zeros(1, dtype=torch.int64)


def test_memory_of_another_engine_is_refused_and_not_taken_for_an_own_one() -> None:
    sender, receiver = pair()
    with sender, receiver:
        sender.register(torch.ones(64, dtype=torch.uint8))
        inbox = torch.zeros(64, dtype=torch.uint8)
        theirs = receiver.register(inbox)
        region = sender.resolve(theirs.descriptor)
        for refused in (
            lambda: sender.write(theirs, region),
            lambda: sender.read(theirs, region),
            lambda: sender.grant(theirs, "peer"),
            lambda: receiver.write(theirs, region),
        ):
            with pytest.raises(InvalidArgumentError, match="does it belong to another engine"):
                refused()
        assert not inbox.any()
        request = sender.write(sender.register(torch.ones(64)), region, nbytes=4)
        with pytest.raises(InvalidArgumentError, match="does it belong to another engine"):
            receiver.watch(request)
        request.wait()


def test_memory_that_is_not_what_it_shows_is_refused() -> None:
    """Of a negative or conjugate view torch would give the engine a copy, which peers write to."""
    freed = torch.zeros(64)
    freed.untyped_storage().resize_(0)
    with pair()[0] as engine:
        for tensor, text in (
            (torch._neg_view(torch.zeros(64)), "tensor is a negative view, whose memory"),
            (torch.zeros(64, dtype=torch.complex64).conj(), "tensor is a conjugate view"),
            (freed, "memory is torch.float32 .64., and its storage was freed"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                engine.register(tensor)


def test_a_gate_of_another_engine_is_refused() -> None:
    sender, receiver = pair()
    with sender, receiver:
        group = kv.KVGroup("kv", (0,), heads=1, k_bytes=8, v_bytes=8, page_size=1)
        layout = kv.KVLayout((group,))
        memory, (size,) = kv.dense_memory(layout, 0, 4)
        cache = kv.KVCache(
            layout, 0, memory.layers, (torch.zeros(size, dtype=torch.uint8),), {"kv": 4}
        )
        region = sender.resolve(receiver.register(torch.zeros(64)).descriptor)
        source = sender.register(torch.zeros(64))
        with kv.KVSignals(kv.KVSender(receiver, cache, instance="other")) as signals:
            after = Gate(signals.number, 0, 1)
            with pytest.raises(InvalidArgumentError, match="are of another engine"):
                sender.write_pages(
                    source,
                    region,
                    rows=PageRows(page_bytes=8),
                    pages=ONE,
                    region_pages=ONE,
                    after=after,
                )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"rows": PageRows(page_bytes=0, row_bytes=8)},
            "pages of 0 bytes, must be a multiple of its rows",
        ),
        (
            {"rows": PageRows(page_bytes=1 << 61, row_bytes=1, row_stride=0, region_row_stride=0)},
            "more than 1152921504606846976 bytes",
        ),
        ({"pages": ONE.to("meta")}, "pages is on the meta device: it has no bytes"),
        ({"pages": None}, "must be a torch.Tensor"),
        ({"pages": [0]}, "pages is of type list"),
    ],
)
def test_pages_that_would_end_the_process_or_wrap_are_refused(
    arguments: dict[str, Any], text: str
) -> None:
    sender, receiver = pair()
    with sender, receiver:
        region = sender.resolve(receiver.register(torch.zeros(64)).descriptor)
        memory = sender.register(torch.zeros(64))
        usual = {"rows": PageRows(page_bytes=8), "pages": ONE, "region_pages": ONE}
        with pytest.raises(InvalidArgumentError, match=text):
            sender.write_pages(memory, region, **(usual | arguments))
        sender.write(memory, region).wait()  # the engine goes on


_Call = Callable[[Engine, Any, Any], object]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda e, m, r: e.write(None, r), "memory is None, must be a Memory"),
        (lambda e, m, r: e.write(m, None), "region is None, must be a Region"),
        (lambda e, m, r: e.write(m, r, offset=100), "offset is 100, must be 0 to 64"),
        (lambda e, m, r: e.write(m, r, offset="a"), "offset is 'a', must be an int"),
        (lambda e, m, r: e.read(r, r), "memory is of type Region, must be a Memory"),
        (lambda e, m, r: e.grant(r, "peer"), "must be a Memory"),
        (lambda e, m, r: e.send_imm(m, 1), "peer is of type Memory, must be a Peer"),
        (lambda e, m, r: e.scatter(m, [(0, r, 0, 4)]), "slices is of type tuple, must be a Slice"),
        (lambda e, m, r: e.scatter(m, [Slice(0, r, 0, 1.5)]), "nbytes of a slice is 1.5"),
        (lambda e, m, r: e.watch(None), "request is None, must be a Request"),
        (lambda e, m, r: e.connect("abc"), "address is 'abc', must be bytes"),
        (lambda e, m, r: e.connect(e.address, priority=1 << 32), "priority is 4294967296"),
        (lambda e, m, r: e.resolve(m.descriptor, priority=1 << 32), "priority is 4294967296"),
        (lambda e, m, r: e.resolve(None), "descriptor is None, must be bytes"),
        (lambda e, m, r: e.register(None), "must be a torch.Tensor"),
        (lambda e, m, r: e.register(torch.zeros(1, device="meta")), "memory is on the meta device"),
        (lambda e, m, r: Engine(5), "config is 5, must be an EngineConfig"),
        (lambda e, m, r: Engine(share=(2, 1)), r"share is \(2, 1\), must be"),
        (lambda e, m, r: Engine(share=None), "share is None, must be"),
    ],
)
def test_wrong_arguments_are_named(call: _Call, text: str) -> None:
    with Engine(label="one") as engine:
        memory = engine.register(torch.zeros(16))
        region = engine.resolve(memory.descriptor)
        with pytest.raises(InvalidArgumentError, match=text):
            call(engine, memory, region)
        engine.write(memory, region).wait()


_RACE = """
import ctypes, threading, torch, moe_p2p
ctypes.CDLL(None).mallopt(-6, 165)  # M_PERTURB
from moe_p2p import Engine, PageRows
from moe_p2p.engine.transfers import LayerPlace
a, b = Engine(label="A"), Engine(label="B")
data, one = torch.zeros(64, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
descriptor = b.register(torch.zeros(64, dtype=torch.uint8)).descriptor
for turn in range(40):
    peer = a.connect(b.address)
    memory, region = a.register(data), a.resolve(descriptor, peer)
    places = a.layer_places([LayerPlace(memory, 0, region, 0, i) for i in range(2000)])
    def write():
        try:
            a.write_layers(places, rows=PageRows(page_bytes=8), pages=one, region_pages=one)
        except moe_p2p.InvalidArgumentError:
            pass
    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(turn):
        torch.zeros(1)
    (peer.disconnect if turn % 2 else memory.unregister)()
    thread.join()
print("done")
"""


def test_what_a_request_names_is_not_removed_before_it_is_submitted() -> None:
    """Freed memory is overwritten here: what reads it crashes, or has a wrong number of NICs."""
    run = warm.run("-c", _RACE, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert run.stdout.endswith("done\n"), (run.returncode, run.stderr[-1000:])


_ENDS = """
import threading, time
from moe_p2p import Engine
engine = Engine()
for imm in range(16):
    threading.Thread(target=engine.wait_imm, args=(imm, 1, 60), daemon=True).start()
time.sleep(0.3)
"""


def test_a_program_may_end_while_its_threads_wait() -> None:
    """A thread that comes back from C++ when the interpreter has ended calls std::terminate."""
    run = warm.run("-c", _ENDS, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-1000:]


def test_a_software_nic_takes_memory_of_its_gpu_alone() -> None:
    """Its kernel is loaded for one GPU; on the stream of another it would fail all writes."""
    with Engine(label="left") as engine:
        for gpu in (None, 1):
            engine._gpu = gpu
            engine._check_gpu(torch.device("cuda", 1))
            engine._check_gpu(torch.device("cpu"))
        with pytest.raises(InvalidArgumentError, match=r"left: memory of GPU 0 .* with gpu=0"):
            engine._check_gpu(torch.device("cuda", 0))


def test_close_goes_on_once_threads_that_wait_are_back() -> None:
    waiting: list[None] = [None]
    closed: list[int] = []

    def close(number: int) -> None:
        closed.append(number)
        threading.Timer(0.1, waiting.pop).start()

    close_and_await(close, 3, waiting)
    assert (closed, waiting) == ([3], [])


def changed(draw: random.Random, data: bytes) -> bytes:
    """`data` with some bits, words or pieces that are others."""
    made = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(4):
            case 0 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 1:
                made[at : at + 4] = draw.choice([b"\xff" * 4, bytes(4), draw.randbytes(4)])
            case 2:
                del made[at : at + draw.randint(1, 9)]
            case _:
                made[at:at] = draw.randbytes(draw.randint(1, 9))
    return bytes(made)


def test_foreign_bytes_in_addresses_and_descriptors_are_errors_of_the_package() -> None:
    draw = random.Random(7)
    sender, receiver = pair()
    with sender, receiver:
        memory = receiver.register(torch.zeros(4096, dtype=torch.uint8))
        address, descriptor = receiver.address, memory.descriptor
        name = bytes(address).find(b"moe_p2p.nic")
        assert name > 0
        no_text = bytearray(address)
        no_text[name + 8] = 0xFF
        with pytest.raises(MoeP2pError, match=r"moe_p2p\.\?ic"):
            sender.connect(bytes(no_text))
        refused = 0
        for _ in range(300):
            for call, data in ((sender.connect, address), (sender.resolve, descriptor)):
                try:
                    call(changed(draw, bytes(data)))  # type: ignore[operator]
                except MoeP2pError:
                    refused += 1
        assert refused > 400
        sender.resolve(descriptor)  # it goes on
