"""How the kernels of a communicator divide a GPU: threads of a block, its workers, and blocks.

A worker carries one token or slot at a time (kernels/device/worker.cuh). Large workers hide the
latency of one token, small ones keep more tokens under way. All blocks of a kernel should be on the
device together: a receiver that starts when a sender ends has missed what it could have hidden.

Symbols: W ranks, L ranks per node, E experts, H hidden size, K top-k, M tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moe_p2p import errors

_MAX_THREADS = 512  # of a block with one worker
_SMS = 132  # of an H200; elsewhere blocks wait for each other or leave some idle
_FEW_SMS = 48  # up to here blocks are large, each alone on its multiprocessor
_SMALL_STEP, _LARGE_STEP = 16, 512  # tokens of a step; between them slots are shared by halves
_MAX_SHARED_BYTES = 227 << 10  # of a multiprocessor, for one block


class LaunchShape(NamedTuple):
    """Workers of a block in the half that works on own tokens and in the one that works on slots.

    token_blocks, slot_blocks: the most that each half gets, and their proportion when blocks are
        few.
    """

    block_threads: int
    token_workers: int
    slot_workers: int
    blocks_per_sm: int
    token_blocks: int
    slot_blocks: int


def num_threads(row_bytes: int) -> int:
    """Threads of a worker for rows of 16-byte pieces: as few rounds as fit, equally full.

    For example rows of 7168 bytes: 448 pieces, 448 threads, one round.
    """
    pieces = row_bytes // 16
    rounds = -(-pieces // _MAX_THREADS)
    return max(128, up(-(-pieces // rounds), 64))


def up(value: int, step: int) -> int:
    """value, or the next multiple of step."""
    return -(-value // step) * step


def candidates(row_bytes: int, step_tokens: int, num_sms: int | None) -> list[LaunchShape]:
    """The best first; later ones need less shared memory. Figures are in docs/tuning.md."""
    threads = num_threads(row_bytes)
    single = LaunchShape(threads, 1, 1, 2, _SMS, _SMS)
    if num_sms is not None and num_sms <= _FEW_SMS:
        few = [LaunchShape(128 * n, n, n, 1, _SMS, 2 * _SMS) for n in (8, 4, 2)]
        return [*few, single]
    if step_tokens <= _SMALL_STEP:
        return [single]
    if step_tokens <= _LARGE_STEP:
        return [LaunchShape(threads, 1, 2, 2, _SMS, _SMS), single]
    return [LaunchShape(512, 4, 4, 2, _SMS, _SMS), single]


def choose(
    row_bytes: int,
    step_tokens: int,
    num_sms: int | None,
    shared_bytes: Callable[[LaunchShape], int],
) -> LaunchShape:
    """The first candidate whose blocks fit. Raises InvalidArgumentError when none does."""
    for shape in candidates(row_bytes, step_tokens, num_sms):
        needed = shared_bytes(shape)
        if needed <= _MAX_SHARED_BYTES // shape.blocks_per_sm:
            return shape
    last = shape._replace(blocks_per_sm=1)
    errors.require(
        needed <= _MAX_SHARED_BYTES,
        f"a block needs {needed} bytes of shared memory, a GPU has {_MAX_SHARED_BYTES}: choose a "
        "smaller chunk_tokens, or fewer experts",
    )
    return last


def dispatch_shared_bytes(macros: dict[str, int], by_rank: bool, launch: LaunchShape) -> int:
    """At least what dispatch.cu asks for; SendShared and RecvShared there are compared with it."""
    world, local = macros["MOE_P2P_WORLD_SIZE"], macros["MOE_P2P_RANKS_PER_NODE"]
    topk, columns = macros["MOE_P2P_TOPK"], local + world // local
    head = up(8 + 10 * topk + 2 * (topk % 2), 128)
    scales = 4 * up(macros["MOE_P2P_HIDDEN_DIM"], 128) // 128
    ranks = world if by_rank else 0  # what by_rank keeps of each
    words = 4 * (columns + ranks) * (up(macros["MOE_P2P_CHUNK_TOKENS"], 32) // 32) + 4 * ranks
    counts = 4 * (macros["MOE_P2P_NUM_EXPERTS"] + ranks)
    send = words + launch.token_workers * (counts + head + scales + 16 * columns + 256)
    table = 4 * macros["MOE_P2P_MAX_LOCAL_EXPERTS"] * (world + 2) + 16 * world
    recv = table + launch.slot_workers * (24 * topk + 256) + launch.block_threads
    return max(send, recv) + 1024


def combine_shared_bytes(macros: dict[str, int], launch: LaunchShape) -> int:
    """The same for combine.cu: rows, weights, counts and ranks of a batch, or addresses of rows."""
    world, local = macros["MOE_P2P_WORLD_SIZE"], macros["MOE_P2P_RANKS_PER_NODE"]
    speakers = 8 * (local + world // local)
    workers = max(launch.token_workers, launch.slot_workers)
    return launch.block_threads * 20 + workers * (speakers + 512) + 1024
