"""GPU memory in the public engine, over the software NIC: on one GPU, between two, and processes.

Memory comes from torch's caching allocator (offsets inside its blocks), from its expandable
segments, which are virtual memory (VMM), and from the driver itself, as cudaMalloc has it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moe_p2p
from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine.transfers import Region, Slice
from tests.support.ranks import Rank, run_processes

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu

DEADLINE_S = 250  # processes import torch and compile kernels, beside other workers

SIZES = [1, 7, 4096, 65_537, 1_000_003, 5 << 20]
SETTINGS = ["", "seed=3", "ring_kib=16"]


def bytes_on(device: str | torch.device, nbytes: int, seed: int, offset: int = 0) -> Tensor:
    """Random bytes at an odd place of a larger block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    block = torch.zeros(nbytes + offset, dtype=torch.uint8, device=device)
    block[offset:] = values.to(device)
    if block.is_cuda:
        torch.cuda.synchronize(block.device)
    return block[offset:]


def engine(name: str, settings: str = "") -> Engine:
    return Engine(
        EngineConfig(
            transport="loopback", nics_per_rank=2, transport_settings=settings, timeout_s=60
        ),
        label=name,
    )


def send(source: str, target: str, settings: str) -> None:
    """Every size from memory on `source` to memory on `target`, and back, written and read."""
    with engine("left", settings) as left, engine("right", settings) as right:
        for seed, nbytes in enumerate(SIZES):
            data = bytes_on(source, nbytes, seed, offset=seed)
            room = bytes_on(target, nbytes + 64, 99, offset=3 * seed)
            before = room.cpu()
            memory, inbox = left.register(data), right.register(room)
            region = left.resolve(inbox.descriptor)
            left.write(memory, region, region_offset=32, imm=seed).wait()
            right.wait_imm(seed, left.num_nics)
            got = room.cpu()
            assert torch.equal(got[32:-32], data.cpu())
            assert torch.equal(got[:32], before[:32])
            assert torch.equal(got[-32:], before[-32:])

            data.zero_()
            torch.cuda.synchronize()
            back = right.resolve(memory.descriptor)
            right.write(inbox, back, offset=32, nbytes=nbytes, imm=seed).wait()
            left.wait_imm(seed, right.num_nics)
            assert torch.equal(data.cpu(), got[32:-32])

            data.zero_()
            torch.cuda.synchronize()
            left.read(memory, region, nbytes=nbytes, region_offset=32).wait()
            assert torch.equal(data.cpu(), got[32:-32])
            memory.unregister()
            inbox.unregister()


@pytest.mark.parametrize("settings", SETTINGS)
def test_on_one_gpu(settings: str) -> None:
    send("cuda:0", "cuda:0", settings)


@pytest.mark.parametrize("settings", SETTINGS[:2])
def test_between_a_gpu_and_the_host(settings: str) -> None:
    send("cuda:0", "cpu", settings)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("settings", SETTINGS)
def test_between_two_gpus(settings: str) -> None:
    send("cuda:0", "cuda:1", settings)


def pages_and_slices(source: str, target: str) -> None:
    with engine("left") as left, engine("right") as right:
        page, count = 3 * 1024, 50
        data = bytes_on(source, page * count, 1)
        room = torch.zeros(page * count, dtype=torch.uint8, device=target)
        torch.cuda.synchronize()
        memory = left.register(data)
        region = left.resolve(right.register(room).descriptor)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
        left.write_pages(
            memory,
            region,
            rows=PageRows(page_bytes=page),
            pages=torch.arange(count),
            region_pages=order,
            imm=5,
        ).wait()
        right.wait_imm(5, count)
        assert torch.equal(room.cpu().view(count, page)[order], data.cpu().view(count, page))
        room.zero_()
        torch.cuda.synchronize()
        slices = [Slice(7, region, 0, 1000), Slice(2000, region, 5001, 77)]
        left.scatter(memory, slices, imm=6).wait()
        right.wait_imm(6, len(slices))
        got, given = room.cpu(), data.cpu()
        for part in slices:
            end = part.region_offset + part.nbytes
            assert torch.equal(
                got[part.region_offset : end], given[part.offset : part.offset + part.nbytes]
            )


def test_pages_and_slices_on_one_gpu() -> None:
    pages_and_slices("cuda:0", "cuda:0")


@pytest.mark.multi_gpu
def test_pages_and_slices_between_two_gpus() -> None:
    pages_and_slices("cuda:0", "cuda:1")


def rows_until_revoked(source: str, target: str) -> None:
    """PageRows at odd and even places by one launch; then the target takes its memory back."""
    config = EngineConfig(transport="loopback", nics_per_rank=2, timeout_s=60)
    row, count = 576, 3000
    with (
        Engine(config, label="left", gpu=torch.device(source).index) as left,
        Engine(config, label="right", gpu=torch.device(target).index) as right,
    ):
        data = bytes_on(source, row * count, 1, offset=16)
        room = torch.zeros(2 * row * count + 3, dtype=torch.uint8, device=target)[3:]
        torch.cuda.synchronize(room.device)
        memory, inbox = left.register(data), right.register(room)
        granted = right.grant(inbox, "left")
        region = left.resolve(granted.descriptor)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
        how = {"pages": torch.arange(count), "region_pages": order}
        strides = {
            "rows": PageRows(page_bytes=row, region_stride=2 * row),
            "imm": 5,
            "imm_per_page": False,
        }
        left.write_pages(memory, region, **how, **strides).wait()  # type: ignore[arg-type]
        right.wait_imm(5, left.num_nics)
        got = room.cpu().view(count, 2, row)
        assert torch.equal(got[order, 0], data.cpu().view(count, row))
        assert not got[:, 1].any()
        granted.revoke()
        room.fill_(7)
        torch.cuda.synchronize(room.device)
        late = left.write_pages(memory, region, **how, **strides)  # type: ignore[arg-type]
        with pytest.raises(moe_p2p.RemoteAccessError):
            late.wait()
        assert bool((room == 7).all())


def test_rows_until_revoked_on_one_gpu() -> None:
    rows_until_revoked("cuda:0", "cuda:0")


@pytest.mark.multi_gpu
def test_rows_until_revoked_between_two_gpus() -> None:
    rows_until_revoked("cuda:0", "cuda:1")


def exchange(rank: Rank, devices: tuple[int, int], rounds: int) -> None:
    """Both write to the other, many times, and look at what came behind its immediate."""
    device = torch.device("cuda", devices[rank.rank])
    nbytes = 300_001
    with engine(f"rank {rank.rank}") as mine:
        room = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        inbox = mine.register(room)
        rank.store.set(f"room {rank.rank}", inbox.descriptor.hex())
        other = 1 - rank.rank
        region = mine.resolve(bytes.fromhex(rank.store.get(f"room {other}").decode()))
        for number in range(rounds):
            data = bytes_on(device, nbytes, 10 * number + rank.rank, offset=number)
            source = mine.register(data)
            request = mine.write(source, region, imm=number)
            mine.wait_imm(number, mine.num_nics)
            assert torch.equal(room.cpu(), bytes_on("cpu", nbytes, 10 * number + other))
            request.wait()
            source.unregister()
            rank.store.set(f"read {number} {rank.rank}", "")
            rank.store.wait([f"read {number} {other}"])
            mine.free_imm(number)


def test_between_processes_on_one_gpu() -> None:
    run_processes(2, exchange, (0, 0), 10, deadline_s=DEADLINE_S)


@pytest.mark.multi_gpu
def test_between_processes_on_two_gpus() -> None:
    run_processes(2, exchange, (0, 1), 10, deadline_s=DEADLINE_S)


def rows_between(rank: Rank, devices: tuple[int, int]) -> None:
    """By one launch, into two memories of one allocation, one of which is taken back, and then into
    another allocation."""
    device = torch.device("cuda", devices[rank.rank])
    torch.cuda.set_device(device)
    config = EngineConfig(transport="loopback", nics_per_rank=2, timeout_s=60)
    with Engine(config, label=f"rank {rank.rank}", gpu=device.index) as mine:
        for number in range(3):
            (take_rows if rank.rank else give_rows)(mine, rank, number, device)
            torch.cuda.empty_cache()  # so that the next memory is of another allocation


ROW, NUM_ROWS = 576, 3000
ORDER = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))


def give_rows(mine: Engine, rank: Rank, number: int, device: torch.device) -> None:
    source = mine.register(bytes_on(device, ROW * NUM_ROWS, number, offset=16))
    first, second = (
        mine.resolve(bytes.fromhex(rank.store.get(f"grant {number} {part}").decode()))
        for part in range(2)
    )

    def write(region: Region, imm: int) -> None:
        mine.write_pages(
            source,
            region,
            rows=PageRows(page_bytes=ROW),
            pages=torch.arange(NUM_ROWS),
            region_pages=ORDER,
            imm=imm,
            imm_per_page=False,
        ).wait()

    write(first, 2 * number)
    write(second, 2 * number)
    rank.store.wait([f"revoked {number}"])
    with pytest.raises(moe_p2p.RemoteAccessError):
        write(first, 9)
    write(second, 2 * number + 1)
    source.unregister()


def take_rows(mine: Engine, rank: Rank, number: int, device: torch.device) -> None:
    block = torch.zeros(2, NUM_ROWS * ROW, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    memories = [mine.register(part) for part in block]
    grants = [mine.grant(memory, "rank 0") for memory in memories]
    for part, grant in enumerate(grants):
        rank.store.set(f"grant {number} {part}", grant.descriptor.hex())
    mine.wait_imm(2 * number, 2 * mine.num_nics)
    given = bytes_on("cpu", NUM_ROWS * ROW, number).view(NUM_ROWS, ROW)
    assert all(torch.equal(each.cpu().view(NUM_ROWS, ROW)[ORDER], given) for each in block)
    grants[0].revoke()
    block[0].fill_(7)
    torch.cuda.synchronize(device)
    rank.store.set(f"revoked {number}", "")
    mine.wait_imm(2 * number + 1, mine.num_nics)
    assert bool((block[0] == 7).all())
    for memory in memories:
        memory.unregister()


def run_alone(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a line with this module as `t`, in a process that is set up so before it uses CUDA."""
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-c", f"from tests.gpu import test_gpu_engine as t\n{body}"],
        env=os.environ | more | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def in_windows(devices: str) -> None:
    """Runs rows_between where what goes another way is logged."""
    from tests.gpu.test_gpu_driver import why_not_lent

    if reason := why_not_lent():
        pytest.skip(reason)
    body = f"t.run_processes(2, t.rows_between, {devices}, deadline_s={DEADLINE_S - 20})"
    found = run_alone(body, MOE_P2P_LOG="info")
    assert found.returncode == 0, found.stderr
    assert "slower" not in found.stderr, found.stderr
    assert "one by one" not in found.stderr, found.stderr


def test_rows_between_processes_on_one_gpu() -> None:
    in_windows("(0, 0)")


@pytest.mark.multi_gpu
def test_rows_between_processes_on_two_gpus() -> None:
    in_windows("(0, 1)")


def test_memory_of_expandable_segments() -> None:
    """Virtual memory of torch's allocator, which is set up when a process begins to use CUDA."""
    found = run_alone(
        "t.send('cuda:0', 'cuda:0', '')", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
    )
    assert found.returncode == 0, found.stderr


class Allocation:
    """Memory of the driver itself, as a tensor."""

    def __init__(self, allocate: str, nbytes: int) -> None:
        torch.zeros(1, device="cuda")  # its context is current from here on
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.address = ctypes.c_uint64()
        flags = (1,) if allocate == "cuMemAllocManaged" else ()  # to be used by every device
        size = ctypes.c_size_t(nbytes)
        assert getattr(self.driver, allocate)(ctypes.byref(self.address), size, *flags) == 0
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address.value, False),
            "version": 3,
        }

    def free(self) -> None:
        assert self.driver.cuMemFree_v2(self.address) == 0


def allocated(allocate: str, use: Callable[[Tensor], None]) -> None:
    memory = Allocation(allocate, 10_001)
    use(torch.as_tensor(memory, device="cuda"))
    torch.cuda.synchronize()
    memory.free()


def test_memory_of_the_driver() -> None:
    def use(room: Tensor) -> None:
        with engine("left") as left, engine("right") as right:
            data = bytes_on("cuda", room.numel(), 4)
            region = left.resolve(right.register(room).descriptor)
            left.write(left.register(data), region, imm=1).wait()
            right.wait_imm(1, left.num_nics)
            assert torch.equal(room.cpu(), data.cpu())

    allocated("cuMemAlloc_v2", use)


def test_managed_memory_is_refused() -> None:
    def use(room: Tensor) -> None:
        with (
            engine("left") as left,
            pytest.raises(moe_p2p.InvalidArgumentError, match="managed memory"),
        ):
            left.register(room)

    allocated("cuMemAllocManaged", use)


def test_refused_by_name() -> None:
    with engine("left") as left, engine("right") as right:
        room = torch.zeros(8, 8, device="cuda")
        with pytest.raises(moe_p2p.InvalidArgumentError, match="must be contiguous"):
            left.register(room.t())
        with pytest.raises(moe_p2p.InvalidArgumentError, match="at least one element"):
            left.register(room[:0])
        freed = torch.zeros(8, device="cuda")
        freed.untyped_storage().resize_(0)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="storage was freed"):
            left.register(freed)
        inbox = right.register(room)
        region = left.resolve(inbox.descriptor)
        source = left.register(bytes_on("cuda", 256, 1))
        inbox.unregister()
        with pytest.raises(moe_p2p.RemoteAccessError):
            left.write(source, region).wait()
        assert int(room.abs().sum()) == 0


@pytest.mark.multi_gpu
def test_one_engine_takes_memory_of_one_gpu() -> None:
    with engine("left") as left:
        left.register(torch.zeros(8, device="cuda:0"))
        with pytest.raises(moe_p2p.InvalidArgumentError, match="device 1"):
            left.register(torch.zeros(8, device="cuda:1"))
