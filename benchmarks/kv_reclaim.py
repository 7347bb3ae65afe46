"""How long pages are held after a cancel: at the receiver and at the sender, healthy or not.

    python benchmarks/kv_reclaim.py              200 cancels a side, 10 of each kind of failure
    python benchmarks/kv_reclaim.py --over tcp --token-bytes 65536

Two processes on this host, which have carried a request before. healthy: from the call of cancel()
to reusable pages, with a request under way. stopped: the other process is stopped (SIGSTOP) before
the cancel; dead: it is killed (SIGKILL), and the time counts from there. slowest: which cancel took
most, from 1. --gpu: the caches are memory of the first and of the last GPU. Exit status 1 where a
bound is broken: 5 ms p50 healthy, else drain_s + 100 ms.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import soak

# isort: split
import kv_soak
import torch
from kv_peer import Job, Result

from moe_p2p.bench.harness import at
from moe_p2p.tools import launch

HEALTHY_MS = 5.0
OTHER = {"prefill": "decode", "decode": "prefill"}


class Reclaim(kv_soak.Soak):
    """Two workers, one request at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.results: dict[tuple[int, str], Result] = {}
        self.number = 0

    def take(self, process: kv_soak.Process, message: object) -> None:
        if isinstance(message, Result):
            if message.end == "wrong":
                raise soak.FailedError(message.text)
            process.jobs.pop(message.number, None)
            self.results[message.number, message.role] = message
        else:
            super().take(process, message)

    def job(self, side: str, *, after_s: float, pause_s: float) -> int:
        self.number += 1
        prefill, decode = self.of("prefill")[0], self.of("decode")[0]
        job = Job(
            self.number,
            prefill.instance,
            decode.instance,
            total=56,
            prefix=0,
            ends=(56,),
            pull=False,
            cancel=side,
            cancel_after_s=after_s,
            pause_s=pause_s,
        )
        for process in (decode, prefill):
            process.jobs[self.number] = time.monotonic()
            process.pipe.send(job)
        return self.number

    def result(self, number: int, side: str) -> Result:
        while (number, side) not in self.results:
            self.receive(0.05)
        return self.results[number, side]

    def ready(self) -> None:
        """Returns once a request goes through: both workers are there and connected."""
        for _ in range(20):
            number = self.job("", after_s=0, pause_s=0)
            if {self.result(number, side).end for side in OTHER} == {"complete"}:
                return
        raise soak.FailedError("no request goes through")

    def healthy(self, side: str) -> float:
        number = self.job(side, after_s=0.01, pause_s=0.004)  # 16 ms for all layers
        found = self.result(number, side)
        self.result(number, OTHER[side])
        return found.reusable_at - found.ended_at

    def stopped(self, side: str) -> float:
        self.ready()
        other = self.of(OTHER[side])[0]
        number = self.job(side, after_s=0.3, pause_s=0.02 if side == "prefill" else 0.1)
        time.sleep(0.15)
        os.kill(other.handle.pid or 0, signal.SIGSTOP)
        try:
            found = self.result(number, side)
        finally:
            os.kill(other.handle.pid or 0, signal.SIGCONT)
        self.result(number, OTHER[side])
        return found.reusable_at - found.ended_at

    def dead(self, side: str) -> float:
        self.ready()
        other = self.of(OTHER[side])[0]
        number = self.job("", after_s=0, pause_s=0.1)
        time.sleep(0.15)
        killed = time.monotonic()
        other.handle.kill()
        other.handle.join(30)
        self.processes.remove(other)
        found = self.result(number, side)
        self.start(OTHER[side])
        return found.reusable_at - killed


def main() -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cancels", type=int, default=200)
    parser.add_argument("--failures", type=int, default=10)
    parser.add_argument("--over", choices=kv_soak.OVER, default="loopback")
    parser.add_argument("--seed", type=int, default=0, help="0: the software NIC keeps order")
    parser.add_argument("--token-bytes", type=int, default=4096, help="of a layer")
    parser.add_argument("--verify", default="sample:0.01")
    parser.add_argument("--drain-s", type=float, default=0.25)
    parser.add_argument("--margin-ms", type=float, default=100.0, help="above drain_s")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--fence", default="key", help="key, or queue_pair of verbs")
    parser.set_defaults(pack=False, verbose=False, requests=0, mutation="")
    arguments = parser.parse_args()
    arguments.device = {}
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch finds no GPU; see python -m moe_p2p doctor")
    if arguments.gpu:
        last = torch.cuda.device_count() - 1
        arguments.device = {"prefill": "cuda:0", "decode": f"cuda:{last}"}
    if reason := kv_soak.why_not(arguments.over):
        print(f"kv_reclaim: {reason}", file=sys.stderr)
        return 2
    run, ok = Reclaim(arguments), True
    try:
        for role in ("prefill", "decode"):
            run.start(role)
        drain_ms = run.timeouts.drain_s * 1e3
        print("side      case      times  p50 ms  p99 ms  most ms  slowest  bound ms")
        for side, name in (("decode", "receiver"), ("prefill", "sender")):
            run.ready()  # a first request loads kernels, on either side
            for case, times in (
                ("healthy", arguments.cancels),
                ("stopped", arguments.failures),
                ("dead", arguments.failures),
            ):
                got = [getattr(run, case)(side) * 1e3 for _ in range(times)]
                if not got:
                    continue
                slowest = got.index(max(got)) + 1
                p50, p99, most = at(got, 50), at(got, 99), max(got)
                bound = HEALTHY_MS if case == "healthy" else drain_ms + arguments.margin_ms
                good = (p50 if case == "healthy" else most) <= bound
                ok &= good
                print(
                    f"{name:9} {case:9} {times:5}  {p50:6.2f}  {p99:6.2f}  {most:7.2f}  "
                    f"{slowest:7}  {bound:g}{' (p50)' if case == 'healthy' else ''}"
                    f"{'' if good else '  BROKEN'}",
                    flush=True,
                )
    except soak.FailedError as error:
        print(f"kv_reclaim: {error}", file=sys.stderr)
        return 1
    finally:
        soak.end_all()
    return 0 if ok else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, launch.exit_by_signal)
    sys.exit(main())
