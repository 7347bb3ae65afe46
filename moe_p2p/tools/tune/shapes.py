"""Launch shapes worth a try beside the shipped ones (moe_p2p/moe/gpu/launch_shape.py). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moe_p2p.machine.launches import LaunchShape, few
from moe_p2p.moe.gpu.launch_shape import Job, num_threads, up

MAX_BLOCK = 1024  # threads
MOST_RESIDENT = 1024  # threads of a multiprocessor: each then has 64 registers
LEAST_WORKER = 128
PIECES = (1, 2, 4)  # 16-byte pieces of a row that a thread carries
# Largest step of each class that has shapes of its own; longer steps are the last class.
CLASSES = (16, 32, 128, 256, 512)
LONGEST = 1 << 24


def class_of(step_tokens: int) -> tuple[int, int]:
    """Returns the least and the most tokens of the steps that share a shape with this one."""
    least = 1
    for most in CLASSES:
        if step_tokens <= most:
            return least, most
        least = most + 1
    return least, LONGEST


def alternatives(
    row_bytes: int, step_tokens: int, num_sms: int | None, job: Job, multiprocessors: int
) -> list[LaunchShape]:
    """Other divisions of a GPU with so many multiprocessors, each once."""
    made = _few if few(num_sms) else _all
    return list(dict.fromkeys(made(row_bytes, step_tokens, job, multiprocessors)))


def _few(row_bytes: int, _: int, job: Job, sms: int) -> Iterator[LaunchShape]:
    for most in (128, 256, 512):
        worker = num_threads(row_bytes, most=most, step=32)
        for block in (768, MAX_BLOCK):
            n = min(block // worker, 15)
            if n:
                yield LaunchShape(worker * n, n, n, 1, sms, sms if job.adds else 2 * sms)


def _all(row_bytes: int, step_tokens: int, _: Job, sms: int) -> Iterator[LaunchShape]:
    most_tokens = class_of(step_tokens)[1]
    for pieces in PIECES:
        worker = max(LEAST_WORKER, up(-(-row_bytes // (16 * pieces)), 32))
        for workers in (1, 2):
            threads = worker * workers
            if threads > MAX_BLOCK:
                continue
            per_sm = max(n for n in (1, 2, 4) if n * threads <= MOST_RESIDENT or n == 1)
            blocks = per_sm * sms - 1  # one block relays
            tokens = min(1 + -(-most_tokens // workers), blocks // 2)
            yield LaunchShape(threads, workers, workers, per_sm, tokens, blocks - tokens)
