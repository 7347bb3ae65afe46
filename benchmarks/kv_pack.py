"""What packing of small KV rows reaches, in GB/s: gather, scatter, and whole requests.

    python benchmarks/kv_pack.py --sms 6 12 24      on two GPUs if there are, else on one, or none

`gather` and `scatter` are the copies alone, from and to pages in random order. `request` is gather,
write and scatter between two workers, each a process, over the software NIC, which copies through
NVLink between GPUs: from the first layer() until all rows are in the receiver's pages. Half of a
GPU's memory traffic is reads: it moves twice the bytes that are counted. Best of 5.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed import TCPStore

from moe_p2p import Engine, EngineConfig, kv
from moe_p2p.kv.ring import Copier, Rows
from tests.support.kv_fakes import cache_of
from tests.support.kv_workers import QUICK, random_bytes, random_cache, some_pages

LAYERS, HEADS, PAGE = 4, 2, 64
REPEATS = 5
NAMES = ("prefill", "decode")


def best_s(work: Callable[[], None]) -> float:
    work()  # compiles kernels
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def copies(device: str, row_bytes: int, part_bytes: int, num_sms: int) -> tuple[float, float]:
    """GB/s of one part after the other, as `Packer` and `Unpacker` start them."""
    num_rows, parts = part_bytes // row_bytes, 32
    memory = torch.randint(0, 255, (2 * parts * num_rows * row_bytes,), dtype=torch.uint8)
    memory = memory.to(device)
    copier = Copier(memory.device, num_sms)
    placed = copier.place(torch.randperm(2 * parts * num_rows)[: parts * num_rows])
    packed = torch.empty(num_rows * row_bytes, dtype=torch.uint8, device=device)
    where = (0, row_bytes, row_bytes, 1, row_bytes)

    def work(gather: bool) -> None:
        for part in range(parts):
            last = copier.copy(Rows(memory, placed, where, part * num_rows), packed, gather=gather)
        last.wait()

    nbytes = parts * len(packed)
    return nbytes / best_s(lambda: work(True)) / 1e9, nbytes / best_s(lambda: work(False)) / 1e9


@dataclass(frozen=True)
class Case:
    """A request of `pages` pages from one worker to another: processes, as in use."""

    devices: tuple[str, str]
    link: kv.KVLink
    row_bytes: int
    pages: int
    port: int = 0  # of the store

    @property
    def nbytes(self) -> int:
        return LAYERS * self.pages * PAGE * HEADS * self.row_bytes

    def numbers(self, side: int) -> torch.Tensor:
        return some_pages(self.pages, self.pages, 1 + side)

    @contextmanager
    def worker(self, side: int) -> Iterator[Any]:
        """side: 0 sends. Knows the other one."""
        group = kv.KVGroup("kv", tuple(range(LAYERS)), HEADS, self.row_bytes, 0, PAGE)
        layout, device = kv.KVLayout((group,), ("NHD", "HND")[side]), self.devices[side]
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", self.port, is_master=False)
        with Engine(EngineConfig(), gpu=torch.device(device).index) as engine:
            cache = cache_of(layout, 0, self.pages, device)
            given = {"instance": NAMES[side], "link": self.link, "timeouts": QUICK}
            worker = (
                kv.KVReceiver(engine, cache, verify="off", **given)
                if side
                else kv.KVSender(engine, cache, **given)
            )
            with kv.LeaseKeeper(worker, kv.TorchLeases(store, QUICK.lease_s)):
                worker.wait_for(NAMES[1 - side])
                yield worker


def receive(case: Case, pipe: Connection) -> None:
    """In a process of its own: says when each request has arrived, then whether bytes are right."""
    with case.worker(1) as receiver:
        while pipe.recv():
            pages, total = {"kv": case.numbers(1)}, case.pages * PAGE
            reservation = receiver.reserve("r", NAMES[0], pages, total=total)
            pipe.send("reserved")
            reservation.wait(60)
            pipe.send(time.perf_counter())  # one clock on a host
        cache = receiver.cache.tensors[0]
        sent, got = (
            tensor.cpu().view(LAYERS, case.pages, -1)[:, case.numbers(side).long()]
            for side, tensor in enumerate((random_bytes(cache.shape, 1), cache))
        )
        tokens = sent.view(LAYERS, case.pages, PAGE, HEADS, case.row_bytes).transpose(2, 3)
        pipe.send(torch.equal(tokens.flatten(2), got))


def requests(case: Case) -> float:
    """GB/s of the fastest request."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    case = replace(case, port=store.port)
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")  # imports this file once
    process = context.Process(target=receive, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    times = []
    with case.worker(0) as sender:
        random_cache(sender.cache, 1)
        if sender.cache.tensors[0].is_cuda:
            torch.cuda.synchronize(case.devices[0])
        for _ in range(REPEATS + 1):
            pipe.send(True)
            pipe.recv()
            pages, total = {"kv": case.numbers(0)}, case.pages * PAGE
            sending = sender.start("r", NAMES[1], pages, total=total)
            while sending.transfers[0].state == "waiting":
                time.sleep(0)
            began = time.perf_counter()
            for layer in range(LAYERS):
                sending.layer(layer)
            sending.commit()
            times.append(pipe.recv() - began)
            sending.wait(60)
        pipe.send(False)
        if not pipe.recv():
            raise SystemExit("kv_pack: bytes differ")
        process.join()
    return case.nbytes / min(times[1:]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--row-bytes", type=int, default=576)
    parser.add_argument("--sms", type=int, nargs="+", default=[6], help="multiprocessors")
    parser.add_argument(
        "--write-bytes", type=int, nargs="+", default=[1 << 20, 4 << 20], help="of a part"
    )
    parser.add_argument("--ring-bytes", type=int, default=64 << 20)
    parser.add_argument("--pages", type=int, help="of a request, 64 tokens each")
    given = parser.parse_args()
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices = (gpus[0], gpus[-1]) if gpus else ("cpu", "cpu")
    pages = given.pages or (512 if gpus else 64)
    torch.set_num_threads(1)
    print(f"rows of {given.row_bytes} B, {' to '.join(devices)}, {pages} pages of {PAGE} tokens")
    print(f"{'sms':>4} {'write':>9} {'gather':>8} {'scatter':>8} {'request':>8}  GB/s")
    for num_sms in given.sms if gpus else given.sms[:1]:
        for part in given.write_bytes:
            link = kv.KVLink(  # so few writes that no unit lands in pages by itself
                "bench", 50e9, 1e3, part, True, given.ring_bytes, num_sms
            )
            rates = copies(devices[0], given.row_bytes, part, num_sms)
            whole = requests(Case(devices, link, given.row_bytes, pages))
            sms = num_sms if gpus else "-"
            print(f"{sms:>4} {part:>9,} {rates[0]:>8.2f} {rates[1]:>8.2f} {whole:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
