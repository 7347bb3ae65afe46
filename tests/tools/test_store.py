"""`python -m moe_p2p store`: workers meet in it, and Ctrl-C ends it."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_p2p import kv
from moe_p2p.integrations.kv.worker import join_store
from moe_p2p.tools import store
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 100


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = warm.popen(
        *("-m", "moe_p2p", "store", address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"serving {address}; ends with Ctrl-C\n"
        yield process, address
    finally:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.timeout(DEADLINE_S)
def test_workers_meet_in_it_and_ctrl_c_ends_it(
    served: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    process, address = served
    one, two = (kv.TorchLeases(join_store(address), 5.0) for _ in range(2))
    one.renew("prefill-0/0", b"here")
    assert two.members() == {"prefill-0/0": b"here"}
    assert store.main([address]) == 1  # a second one for the same address
    assert "is served already" in capsys.readouterr().out
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert (out, error.strip()) == ("", "store: interrupted")


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1:port", "127.0.0.1:99999999", "127.0.0.1:0"]
)
def test_an_address_that_is_none_is_refused(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.main([address]) == 2
    assert "HOST:PORT" in capsys.readouterr().out
