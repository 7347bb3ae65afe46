"""What `KVSignals.begin_step` takes before a forward pass, in ms of this thread's CPU.

    python benchmarks/kv_step.py             61 layers, 1 and 4 requests of 16 and 256 pages

Two workers of this process over the software NIC. The rest of a step is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from moe_p2p import kv
from tests.support.kv_workers import some_pages, workers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    group = kv.KVGroup("kv", tuple(range(given.layers)), 1, 32, 32, 16)
    layout, most = kv.KVLayout((group,)), max(given.pages) * max(given.requests)
    print(f"{'requests':>8} {'pages':>6} {'least ms':>9} {'median':>7}")
    with workers(layout, layout, num_pages=(most, most), settings="", verify="off") as found:
        sender, receiver = found.senders[0], found.receivers[0]
        cache = sender.cache.tensors[0]
        with kv.KVSignals(sender) as signals:
            for requests in given.requests:
                for pages in given.pages:
                    times = []
                    for _ in range(given.repeats):
                        lists = some_pages(requests * pages, most, 1).view(requests, pages)
                        sends = []
                        waiting = []
                        for at, each in enumerate(lists):
                            place, total = {"kv": each.contiguous()}, 16 * pages
                            waiting.append(
                                receiver.reserve(f"r{at}", "prefill", place, total=total)
                            )
                            sends.append(
                                (sender.start(f"r{at}", "decode", place, total=total), None)
                            )
                        while any(sending.transfers[0].state != "open" for sending, _ in sends):
                            time.sleep(0.001)
                        began = time.thread_time()
                        signals.begin_step(sends)
                        times.append(time.thread_time() - began)
                        for layer in range(given.layers):
                            signals.signal(layer, cache)
                        signals.end_step()
                        for sending, _ in sends:
                            sending.commit()
                        for each in waiting:
                            each.wait(60)
                        for sending, _ in sends:
                            sending.wait(60)
                    best, middle = min(times) * 1e3, statistics.median(times) * 1e3
                    print(f"{requests:>8} {pages:>6} {best:>9.3f} {middle:>7.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
