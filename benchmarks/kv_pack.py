"""What packing of small KV rows reaches, in GB/s: gather, scatter, and whole requests.

    python benchmarks/kv_pack.py --sms 6 12 24      on two GPUs if there are, else on one, or none

`gather` and `scatter` are the copies alone, from and to pages in random order. `request` is gather,
write and scatter between two workers over the software NIC, which copies through NVLink between
GPUs: from the first layer() until all rows are in the receiver's pages. Half of a GPU's memory
traffic is reads: it moves twice the bytes that are counted. Best of 5.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from moe_p2p import kv
from moe_p2p.kv.copies import Copier, Rows
from tests.support.kv_workers import random_cache, some_pages, workers

LAYERS, HEADS, PAGE = 4, 2, 64
REPEATS = 5


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


def requests(devices: tuple[str, str], link: kv.KVLink, row_bytes: int, pages: int) -> float:
    group = kv.KVGroup("kv", tuple(range(LAYERS)), HEADS, row_bytes, 0, PAGE)
    sides = kv.KVLayout((group,), "NHD"), kv.KVLayout((group,), "HND")
    nbytes = LAYERS * pages * PAGE * HEADS * row_bytes
    with workers(
        *sides, num_pages=(pages, pages), settings="", verify="off", link=link, devices=devices
    ) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        random_cache(sender.cache, 1)
        ours, theirs = some_pages(pages, pages, 1), some_pages(pages, pages, 2)
        if devices[0] != "cpu":
            torch.cuda.synchronize(devices[0])

        def work() -> None:
            total = pages * PAGE
            reservation = receiver.reserve("r", "prefill", {"kv": theirs}, total=total)
            sending = sender.start("r", "decode", {"kv": ours}, total=total)
            while sending.flights[0].state == "waiting":
                time.sleep(0)
            began = time.perf_counter()
            for layer in range(LAYERS):
                sending.layer(layer)
            sending.commit()
            reservation.wait(60)
            times.append(time.perf_counter() - began)
            sending.wait(60)

        times: list[float] = []
        for _ in range(REPEATS + 1):
            work()
        sent, got = (
            worker.cache.tensors[0].cpu().view(LAYERS, pages, -1)[:, numbers.long()]
            for worker, numbers in ((sender, ours), (receiver, theirs))
        )
        tokens = sent.view(LAYERS, pages, PAGE, HEADS, row_bytes).transpose(2, 3)
        if not torch.equal(tokens.flatten(2), got):
            raise SystemExit("kv_pack: bytes differ")
    return nbytes / min(times[1:]) / 1e9


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
            whole = requests(devices, link, given.row_bytes, pages)
            sms = num_sms if gpus else "-"
            print(f"{sms:>4} {part:>9,} {rates[0]:>8.2f} {rates[1]:>8.2f} {whole:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
