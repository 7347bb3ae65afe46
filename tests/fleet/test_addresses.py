"""Hosts and ports: what users write, and hosts whose only addresses are IPv6."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from moe_p2p import InvalidArgumentError, UnavailableError
from moe_p2p.fleet import addresses
from moe_p2p.integrations.kv.sglang import instance_of
from moe_p2p.machine.transport import LIBFABRIC, load_problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host7:14579", "host7", 14579),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("::1:14579", "::1", 14579),
        ("[::1]:14579", "::1", 14579),
        ("[fe80::1%lo]:65535", "fe80::1%lo", 65535),
    ],
)
def test_addresses_are_split_and_joined(text: str, host: str, port: int) -> None:
    assert addresses.split(text, "it") == (host, port)
    assert addresses.split(addresses.join(host, port), "it") == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "[]:1", "host:0", "host:65536", "a:b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the store is '.*', must be HOST:PORT"):
        addresses.split(text, "the store")


def test_a_host_that_is_not_known_differs_from_a_port_in_use_and_from_another_host() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'no-such\.invalid' is no host that is known"):
        addresses.listen("no-such.invalid", backlog=1)
    with addresses.listen("127.0.0.1", backlog=1) as taken:
        with pytest.raises(OSError, match="in use") as used:
            addresses.listen("127.0.0.1", taken.getsockname()[1], backlog=1)
        assert used.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="assign") as other:
        addresses.listen("192.0.2.1", backlog=1)
    assert other.value.errno == errno.EADDRNOTAVAIL
    assert addresses.is_own("127.0.0.1")
    assert not addresses.is_own("192.0.2.1")
    assert addresses.towards("127.0.0.1") == "127.0.0.1"
    with addresses.listen("", backlog=1) as everywhere:
        place = ("127.0.0.1", everywhere.getsockname()[1])
        socket.create_connection(place, 5).close()


@pytest.mark.parametrize(("host", "table"), [("127.0.0.1", "tcp"), ("::1", "tcp6")])
def test_a_store_sees_clients_by_addresses_that_a_hosts_file_names(host: str, table: str) -> None:
    """Else its server asks a name server, and serves nobody meanwhile."""
    if not addresses.is_own(host):
        pytest.skip(f"{host} is no address of this machine")
    served = addresses.serve(host, timeout_s=20)
    sockets = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    listening = [int(each[1].rpartition(":")[2], 16) for each in sockets if each[3] == "0A"]
    assert served.port in listening
    client = TCPStore(host, served.port, is_master=False, timeout=timedelta(seconds=20))
    client.set("a", "b")
    assert served.get("a") == b"b"
    with pytest.raises(UnavailableError, match=r"no store can be served at .*in use"):
        addresses.serve(host, served.port)


def test_prefillers_are_named_by_the_address_that_decoders_see() -> None:
    assert instance_of("127.0.0.1", 8000, 0, "10.0.0.7") == "10.0.0.7:8000:dp0"
    assert instance_of("0.0.0.0", 8000, 0, "10.0.0.7") == "10.0.0.7:8000:dp0"
    assert instance_of("[::1]", 8000, 1, "fd00::7") == "[fd00::7]:8000:dp1"
    assert instance_of("192.0.2.1", 8000, 0, "10.0.0.7") == "192.0.2.1:8000:dp0"


_PROGRAM = """
import datetime, socket, sys, threading
import torch
from torch.distributed import HashStore, TCPStore
from moe_p2p import Engine, EngineConfig, kv
from moe_p2p.fleet import addresses
from moe_p2p.integrations.kv import worker
from moe_p2p.integrations.weights.engine import own_address
from moe_p2p.tools import launch, store

assert not addresses.is_own("127.0.0.1"), "this host has IPv4"
assert addresses.loopback() == "::1"
assert own_address() == "::1", own_address()
assert launch.interface_to("::1") == "lo"

group = kv.KVGroup("kv", (0,), heads=1, k_bytes=8, v_bytes=8, page_size=1)
layout = kv.KVLayout((group,))

def cache():
    memory, sizes = kv.dense_memory(layout, 0, 4)
    tensors = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    return kv.KVCache(layout, 0, memory.layers, tensors, {"kv": 4})

loopback = EngineConfig(transport="loopback", nics_per_rank=1)
for host in ("::1", "[::1]"):
    leases = HashStore()
    sender = kv.KVSender(Engine(loopback), cache(), instance="p")
    receiver = kv.KVReceiver(Engine(loopback), cache(), instance="d")
    with kv.LeaseKeeper(sender, kv.TorchLeases(leases), host=host):
        with kv.LeaseKeeper(receiver, kv.TorchLeases(leases), host=host):
            receiver.wait_for("p", 60)
            sender.wait_for("d", 60)

with addresses.listen("", backlog=1) as free:
    port = free.getsockname()[1]
assert worker.serve_store(f"[::1]:{port}") is not None
assert worker.own_host(f"::1:{port}") == "::1"
worker.join_store(f"[::1]:{port}").set("a", "b")
assert worker.serve_store(f"[::1]:{port}") is None
assert store.main([f"[::1]:{port}"]) == 1
assert store.main([f"192.0.2.1:{port}"]) == 1
assert store.main([f"no-such.invalid:{port}"]) == 2

def reaches(config):
    with Engine(config) as a, Engine(config) as b:
        inbox = torch.zeros(64, dtype=torch.uint8)
        region = a.resolve(b.register(inbox).descriptor)
        a.write(a.register(torch.ones(64, dtype=torch.uint8)), region, imm=1).wait()
        b.wait_imm(1, 1)
        assert inbox.all()

if sys.argv[1:]:
    reaches(EngineConfig(transport="libfabric", nics_per_rank=1, transport_settings="provider=tcp"))
    print("libfabric too")

import moe_p2p.mooncake as mooncake
engine = mooncake.TransferEngine()
assert engine.initialize("::1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.get_rpc_port() > 0
print("all of it", flush=True)
"""


def test_a_host_whose_only_address_is_ipv6s_loopback() -> None:
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if not unshare or not ip or os.geteuid() != 0:
        pytest.skip("a network namespace takes root, unshare and ip")
    has_libfabric = not load_problem(LIBFABRIC)
    script = (
        f"hostname no-such-name; {ip} link set lo up && {ip} -4 addr flush dev lo && "
        f"exec {sys.executable} -c '{_PROGRAM}' {'libfabric' if has_libfabric else ''}"
    )
    done = subprocess.run(
        [unshare, "-n", "-u", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if "Operation not permitted" in done.stderr and not done.stdout:
        pytest.skip(f"no network namespace here: {done.stderr.strip()[:200]}")
    assert done.stdout.splitlines()[-1:] == ["all of it"], done.stdout + done.stderr
    assert ("libfabric too" in done.stdout) == has_libfabric
    assert "is served already\n" in done.stdout
    assert "192.0.2.1 is no address of this machine\n" in done.stdout
    assert "'no-such.invalid' is no host that is known here" in done.stdout
