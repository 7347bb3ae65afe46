"""The processes of moe_p2p/examples/disaggregated.py: one that prefills, one that decodes.

Each has the model, a KV cache and an engine. The front end sends jobs through a pipe, and gets
events back: (kind, request, value, begin, end), times on this host's monotonic clock. Checksums are
on for all requests; "wrong" says that the bytes of one were.
"""

from __future__ import annotations

import functools
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_p2p import Engine, EngineConfig, MoeP2pError, errors, kv
from moe_p2p.examples.small_model import PAGE_TOKENS, SmallModel, make_cache

NUM_PAGES = 256
END_S = 5.0  # for jobs under way


@dataclass(frozen=True)
class Job:
    """One attempt of a request: another prefill worker is another attempt, with another name."""

    request: int
    attempt: int
    prefill: str
    decode: str
    prompt: list[int]
    num_tokens: int
    chunk: int

    @property
    def name(self) -> str:
        return f"{self.request}.{self.attempt}"


class Pages:
    """Free pages of this worker."""

    def __init__(self) -> None:
        self._free = list(range(NUM_PAGES))
        self._changed = threading.Condition()

    def take(self, tokens: int) -> Tensor:
        count = -(-tokens // PAGE_TOKENS)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count, 60):
                raise RuntimeError(f"{count} pages are not free after 60 s")
            return torch.tensor([self._free.pop() for _ in range(count)], dtype=torch.int32)

    def give(self, pages: Tensor) -> None:
        with self._changed:
            self._free += pages.tolist()
            self._changed.notify_all()


class WorkerProcess:
    def __init__(
        self, role: str, instance: str, port: int, gpu: int | None, pipe: Connection
    ) -> None:
        torch.set_num_threads(1)
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self.pipe, self.pages, self.model = pipe, Pages(), SmallModel(device)
        self.say_lock, self.model_lock = threading.Lock(), threading.Lock()
        self.engine = Engine(EngineConfig(), label=instance, gpu=gpu)
        self.cache = make_cache(NUM_PAGES, device)
        own, timeouts = (self.engine, self.cache), kv.KVTimeouts(open_s=15, lease_s=8)
        self.worker: Any
        if role == "prefill":
            self.run = self.prefill
            self.worker = kv.KVSender(*own, instance=instance, timeouts=timeouts)
        else:
            self.run = self.decode
            self.worker = kv.KVReceiver(*own, instance=instance, timeouts=timeouts, verify="always")
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        leases = kv.TorchLeases(store, self.worker.timeouts.lease_s)
        self.keeper = kv.LeaseKeeper(self.worker, leases)

    def serve(self) -> None:
        self.say("ready", -1)
        threads = []
        while (job := self.pipe.recv()) is not None:
            threads.append(threading.Thread(target=self._handle, args=(job,), daemon=True))
            threads[-1].start()
        self.keeper.close()  # requests fail, and their threads end
        until = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))
        self.engine.close()

    def _handle(self, job: Job) -> None:
        try:
            self.run(job)
        except errors.ProtocolError as error:  # a checksum, say: nothing was lost
            self.say("wrong", job.request, f"{job.prefill} to {job.decode}: {error}")
            self.say("failed", job.request, (job.attempt, str(error)))
        except (MoeP2pError, TimeoutError, RuntimeError) as error:
            self.say("failed", job.request, (job.attempt, str(error)))

    def say(self, kind: str, request: int, value: Any = None, begin: float | None = None) -> None:
        now = time.monotonic()
        with self.say_lock, suppress(BrokenPipeError):
            self.pipe.send((kind, request, value, now if begin is None else begin, now))

    def prefill(self, job: Job) -> None:
        """Layer by layer: a layer's pages travel while the next one is computed."""
        total = len(job.prompt)
        self.worker.wait_for(job.decode)
        pages = self.pages.take(total)
        sending = None
        try:
            sending = self.worker.start(job.name, job.decode, {"kv": pages}, total=total)
            began, token = time.monotonic(), 0
            for begin in range(0, total, job.chunk):
                tokens = job.prompt[begin : begin + job.chunk]
                send = functools.partial(sending.layer, end=begin + len(tokens))
                with self.model_lock:
                    token = self.model.forward(self.cache, pages, tokens, begin, send)
            sending.commit(struct.pack("<i", token))
            self.say("prefill", job.request, None, began)
            sending.wait(60)
        finally:
            if sending is not None:
                sending.cancel()
                sending.wait_reusable(60)
            self.pages.give(pages)

    def decode(self, job: Job) -> None:
        total = len(job.prompt)
        self.worker.wait_for(job.prefill)
        pages, began = self.pages.take(total + job.num_tokens), time.monotonic()
        reservation = None
        try:
            reservation = self.worker.reserve(job.name, job.prefill, {"kv": pages}, total=total)
            (token,) = struct.unpack("<i", reservation.wait(60))
            self.say("transfer", job.request, None, began)
            began = time.monotonic()
            for position in range(total, total + job.num_tokens):
                self.say("token", job.request, (position - total, token))
                if position + 1 < total + job.num_tokens:
                    with self.model_lock:
                        token = self.model.forward(self.cache, pages, [token], position)
            self.say("decode", job.request, None, began)
        finally:
            if reservation is not None:
                reservation.cancel()
                reservation.wait_reusable(60)
            self.pages.give(pages)


def main(role: str, instance: str, port: int, gpu: int | None, pipe: Connection) -> None:
    with suppress(EOFError, ConnectionResetError):
        WorkerProcess(role, instance, port, gpu, pipe).serve()
