"""Reads, and pages of several rows, through the transfer engine for users."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import moe_p2p
from moe_p2p import PageRows
from tests.engine.test_engine import pair
from tests.support import warm


@pytest.mark.parametrize("settings", ["", "seed=5"])
@pytest.mark.parametrize("num_nics", [1, 3])
def test_reads_bring_what_the_peer_has(settings: str, num_nics: int) -> None:
    reader, owner = pair(num_nics, settings)
    with reader, owner:
        theirs = torch.randint(0, 255, (12_000,), dtype=torch.uint8)
        mine = torch.zeros(10_000, dtype=torch.uint8)
        region = reader.resolve(owner.register(theirs).descriptor)
        memory = reader.register(mine)
        reader.read(memory, region, offset=1000, region_offset=500, nbytes=9000).wait()
        assert torch.equal(mine[1000:], theirs[500:9500])
        assert not mine[:1000].any()
        reader.read(memory, region, region_offset=2000).wait()
        assert torch.equal(mine, theirs[2000:])
        assert sum(nic["bytes_read"] for nic in reader.counters()) == 19_000
        assert sum(nic["reads"] for nic in reader.counters()) == 2 * num_nics
        assert sum(nic["writes"] for nic in reader.counters()) == 0
        with pytest.raises(moe_p2p.InvalidArgumentError, match="Read source: 10000 bytes"):
            reader.read(memory, region, region_offset=2001)


@pytest.mark.parametrize("settings", ["", "seed=9"])
def test_pages_are_read_where_they_are_told(settings: str) -> None:
    reader, owner = pair(2, settings)
    with reader, owner:
        cache = torch.randn(8, 16)
        mine = torch.zeros(10, 16)
        region = reader.resolve(owner.register(cache).descriptor)
        pages, theirs = torch.tensor([1, 9, 4]), torch.tensor([5, 0, 7])
        reader.read_pages(
            reader.register(mine),
            region,
            rows=PageRows(page_bytes=32, stride=64, region_stride=64),
            pages=pages,
            region_pages=theirs,
        ).wait()
        assert torch.equal(mine[pages, :8], cache[theirs, :8])
        assert not mine[:, 8:].any()
        assert not mine[[0, 2, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("settings", ["", "seed=9"])
def test_a_slice_of_heads_is_one_request_both_ways(settings: str) -> None:
    here, there = pair(2, settings)
    with here, there:
        cache = torch.randn(8, 4, 6, 16)  # [pages, tokens, heads, head_dim]
        other = torch.zeros(10, 4, 3, 16)  # the peer holds heads 2 to 4 of each token
        memory = here.register(cache)
        region = here.resolve(there.register(other).descriptor)
        pages, theirs = torch.tensor([5, 0, 7]), torch.tensor([1, 9, 4])
        head = 16 * cache.element_size()
        layout = {
            "rows": PageRows(
                page_bytes=4 * 3 * head,
                row_bytes=3 * head,
                stride=4 * 6 * head,
                row_stride=6 * head,
            ),
            "offset": 2 * head,
            "pages": pages,
            "region_pages": theirs,
        }
        here.write_pages(memory, region, imm=3, imm_per_page=False, **layout).wait()
        assert there.wait_imm(3, 2) == 2
        assert torch.equal(other[theirs], cache[pages][:, :, 2:5])
        assert not other[[0, 2, 3, 5, 6, 7, 8]].any()
        expected = cache.clone()
        expected[pages, :, 2:5] += 1
        other[theirs] += 1
        here.read_pages(memory, region, **layout).wait()
        assert torch.equal(cache, expected)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="immediate per page and 4 rows"):
            here.write_pages(memory, region, imm=3, **layout)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="row_bytes is 0"):
            PageRows(page_bytes=4, row_bytes=0)
        for pages_of in (here.write_pages, here.read_pages):
            with pytest.raises(
                moe_p2p.InvalidArgumentError, match="rows is None, must be a PageRows"
            ):
                pages_of(memory, region, pages=pages, region_pages=theirs)
            with pytest.raises(moe_p2p.InvalidArgumentError, match="rows are given, and stride"):
                pages_of(memory, region, **layout, stride=4)


def test_fields_of_rows_are_taken_as_arguments_for_one_release() -> None:
    here, there = pair(1)
    with here, there:
        memory, inbox = here.register(torch.randn(8, 16)), torch.zeros(8, 16)
        region = here.resolve(there.register(inbox).descriptor)
        pages, old = torch.arange(8), {"page_bytes": 32, "stride": 64, "region_stride": 64}
        for pages_of in (here.write_pages, here.read_pages):
            with pytest.warns(DeprecationWarning, match=r"rows=PageRows\(page_bytes=32,") as warned:
                pages_of(memory, region, pages=pages, region_pages=pages, **old).wait()
            assert warned[0].filename == __file__
        assert torch.equal(inbox[:, :8], memory.tensor[:, :8])
        assert not inbox[:, 8:].any()


def test_runs_of_pages_are_merged() -> None:
    here, there = pair(1)
    with here, there:
        memory = here.register(torch.randn(64, 16))
        inbox = torch.zeros(64, 16)
        region = here.resolve(there.register(inbox).descriptor)
        pages = torch.arange(64)
        here.write_pages(
            memory, region, rows=PageRows(page_bytes=64), pages=pages, region_pages=pages
        ).wait()
        assert torch.equal(inbox, memory.tensor)
        assert here.counters()[0]["writes"] == 1


OWNER = """
import sys, torch, moe_p2p
settings = "provider=tcp,interfaces=lo"
engine = moe_p2p.Engine(moe_p2p.EngineConfig(transport="libfabric", transport_settings=settings))
memory = engine.register(torch.ones(1000))
print(memory.descriptor.hex(), flush=True)
sys.stdin.read()
"""


def test_memory_that_a_peer_may_still_answer_into_is_unregistered_later() -> None:
    """tcp takes no read back: unregistering works once the stopped peer goes on."""
    config = moe_p2p.EngineConfig(
        transport="libfabric", transport_settings="provider=tcp,interfaces=lo"
    )
    try:
        reader = moe_p2p.Engine(config)
    except moe_p2p.UnavailableError as error:
        pytest.skip(str(error))
    owner = warm.popen("-c", OWNER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout
        with reader:
            region = reader.resolve(bytes.fromhex(owner.stdout.readline()))
            memory = reader.register(torch.zeros(1000))
            reader.read(memory, region).wait()
            owner.send_signal(signal.SIGSTOP)
            while not _is_stopped(owner.pid):  # the signal reaches each thread by itself
                time.sleep(0.001)
            late = reader.read(memory, region)
            while reader.counters()[0]["reads"] < 2:  # the first one is done, this one is posted
                time.sleep(0.001)
            for _ in range(2):
                with pytest.raises(moe_p2p.TimeoutError, match="must not be freed"):
                    memory.unregister()
            owner.send_signal(signal.SIGCONT)
            _unregister_in_the_end(memory)
            with pytest.raises(moe_p2p.ClosedError):
                late.wait()
            with pytest.raises(moe_p2p.InvalidArgumentError, match="is not known here"):
                memory.unregister()
    finally:
        owner.kill()
        owner.communicate()


def _is_stopped(pid: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _unregister_in_the_end(memory: moe_p2p.engine.transfers.Memory) -> None:
    for _ in range(160):  # half a second each
        with contextlib.suppress(moe_p2p.TimeoutError):
            memory.unregister()
            return
    raise AssertionError("the peer goes on, and the memory stays registered")


def test_reads_of_memory_that_was_given_back_fail() -> None:
    reader, owner = pair()
    with reader, owner:
        memory = reader.register(torch.zeros(1000))
        theirs = owner.register(torch.ones(1000))
        region = reader.resolve(theirs.descriptor)
        theirs.unregister()
        with pytest.raises(moe_p2p.RemoteAccessError, match="read of 4000 bytes"):
            reader.read(memory, region).wait()
        assert not memory.tensor.any()
