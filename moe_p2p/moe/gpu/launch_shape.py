"""How the kernels of a communicator divide a GPU: threads of a block, its workers, and blocks.

A worker carries one token or slot at a time (kernels/device/worker.cuh). Large workers hide the
latency of one token, small ones keep more tokens in flight. All blocks of a kernel should be on the
device together: a receiver that starts only when a sender ends overlaps nothing.

Symbols: W ranks, L ranks per node, E experts, H hidden size, K top-k, M tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_p2p import errors
from moe_p2p.machine.launches import (
    BULK_STEP,
    FEW_BULK_STEP,
    BulkSteps,
    LaunchShape,
    TunedLaunch,
    few,
)
from moe_p2p.moe.shape import layout, num_scales

_MAX_THREADS = 512  # of a block with one worker, two blocks per multiprocessor
_MOST_THREADS = 1024  # of a block that is alone on its multiprocessor
_SPARE_THREADS = 768  # of such a block whose threads need more registers
_SMS = 132  # of an H200; other GPUs leave multiprocessors idle or run blocks one after the other
_TINY_STEP, _SMALL_STEP, _LARGE_STEP = 16, 32, 512  # tokens of a step
_SHORT_CALL = 32  # tokens; of 64 both ways take the same time, of 128 this one 22% more
_QUICK_STEP = 128  # most tokens of a step whose dispatch has workers of few warps
_MAX_SHARED_BYTES = 227 << 10  # of a multiprocessor, for one block
# Threads that load and store for a worker, that compute, and that raise flags: device/bulk.cuh
_CARRY_THREADS, _COMPUTE_THREADS, _FLAG_THREADS = 64, 128, 32
_ROUTE_WARPS = 1  # of a block that sends in bulk: routes while its workers send
_LEAST_IMAGES, _MOST_IMAGES = 3, 8  # kernels/dispatch/bulk_send.cuh, kImages
_PIECES_OUT, _DEEP = 3, 4  # kernels/combine/bulk.cuh, kOuts and the most of kDeep
_FLAG_BYTES = 128  # flags and Progress, for each rank
_OWN_STAY_RANKS = 2  # kernels/device/bulk.cuh, kOwnStays
_MAX_BULK_RANKS = 32  # a lane of a warp for each rank
_MANY_RANKS = 4  # ranks per node beyond which short combines have large blocks


class Chosen(NamedTuple):
    """What was measured of this machine's GPUs. bulk: rank 0's; None: the shipped numbers."""

    launches: tuple[TunedLaunch, ...] = ()
    bulk: BulkSteps | None = None


def num_threads(row_bytes: int, most: int = _MAX_THREADS, step: int = 64) -> int:
    """Threads of a worker for rows of 16-byte pieces: as few rounds as fit, equally full.

    For example rows of 7168 bytes: 448 pieces, 448 threads, one round. step: of threads.
    """
    pieces = row_bytes // 16
    rounds = -(-pieces // most)
    return max(128, up(-(-pieces // rounds), step))


def up(value: int, step: int) -> int:
    """value, or the next multiple of step."""
    return -(-value // step) * step


class Job(NamedTuple):
    """What a kernel does.

    adds: it combines. per_token: it dispatches, in such a layout. splits_rows: workers share the
        rows of tiny steps. many_ranks: of a node. ranks: of the only node; 0: there are several.
    """

    adds: bool
    per_token: bool
    splits_rows: bool
    many_ranks: bool
    ranks: int = 0


def job_of(macros: dict[str, int], *, adds: bool, per_token: bool = False) -> Job:
    """Returns the Job of a dispatch or a combine of this shape."""
    ranks = macros["MOE_P2P_RANKS_PER_NODE"]
    one_node = macros["MOE_P2P_WORLD_SIZE"] == ranks
    splits_rows = adds and one_node and bool(macros["MOE_P2P_SELF_FLAGGED"])
    return Job(adds, per_token, splits_rows, ranks > _MANY_RANKS, ranks if one_node else 0)


def candidates(
    row_bytes: int, step_tokens: int, num_sms: int | None, job: Job
) -> list[LaunchShape]:
    """Fastest first; later ones need less shared memory. Figures: benchmarks/NOTES.md."""
    threads, tiny = num_threads(row_bytes), step_tokens <= _TINY_STEP
    single = LaunchShape(threads, 1, 1, 2, _SMS, _SMS)
    if few(num_sms):
        # Workers whose rounds over a row are full, as many as a block holds. Rows per token
        # take registers.
        wide, block = (128, _SPARE_THREADS) if job.per_token and not tiny else (256, _MOST_THREADS)
        worker, slots = num_threads(row_bytes, most=wide, step=32), _SMS if job.adds else 2 * _SMS
        most = block // worker
        shapes = [LaunchShape(worker * n, n, n, 1, _SMS, slots) for n in (most, most // 2)]
        return [*shapes, single]
    large = num_threads(row_bytes, most=_MOST_THREADS)
    if tiny and job.splits_rows:
        tokens = 1 + 4 * _TINY_STEP
        quarter = max(128, up(large // 4, 32))
        return [LaunchShape(quarter, 1, 1, 2, tokens, 2 * _SMS - 1 - tokens), single]
    if step_tokens <= _QUICK_STEP and not job.adds:
        # 16-byte pieces that a thread carries: more threads issue the same instructions more often,
        # and with fewer tokens a thread's own time counts.
        pieces = 2 if step_tokens <= _SMALL_STEP else 4
        quick = max(128, up(-(-row_bytes // (16 * pieces)), 32))
        per_sm = 2 if step_tokens <= _SMALL_STEP else 4
        tokens = 1 + 2 * _SMALL_STEP if step_tokens <= _SMALL_STEP else _SMS
        return [LaunchShape(quick, 1, 1, per_sm, tokens, per_sm * _SMS - 1 - tokens), single]
    if step_tokens <= _SMALL_STEP:
        tokens = 1 + _SMALL_STEP
        slots = _SMS - 1 - tokens  # one block relays
        return [LaunchShape(large, 1, 1 if tiny else 2, 1, tokens, slots), single]
    if step_tokens <= BULK_STEP and job.adds and job.many_ranks:
        return [LaunchShape(large, 1, 2, 1, _SMS // 2, _SMS // 2), single]
    if step_tokens <= _LARGE_STEP:
        return [LaunchShape(threads, 1, 2, 2, _SMS, _SMS), single]
    return [LaunchShape(512, 4, 4, 2, _SMS, _SMS), single]


def step_class(step_tokens: int) -> int:
    """The longest steps that share kernels with these: the next power of two, at least 16.

    Every number of tokens that decides on a shape here is one.
    """
    return max(_TINY_STEP, 1 << (step_tokens - 1).bit_length())


def choose(
    row_bytes: int,
    step_tokens: int,
    num_sms: int | None,
    job: Job,
    shared_bytes: Callable[[LaunchShape], int],
    tuned: Sequence[TunedLaunch] = (),
) -> LaunchShape:
    """The first shape whose blocks fit: tuned ones, then candidates().

    Raises InvalidArgumentError when none does.
    """
    asked = (row_bytes, step_tokens, num_sms, job)
    fitting = (each for each in tuned if each.is_for(*asked[:3], adds=job.adds, ranks=job.ranks))
    for shape in [*(each.shape for each in fitting), *candidates(*asked)]:
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


def dispatch_shared_bytes(macros: dict[str, int], per_token: bool, launch: LaunchShape) -> int:
    """Upper bound of dispatch.cu's shared memory; SendShared and RecvShared are checked with it."""
    world, local = macros["MOE_P2P_WORLD_SIZE"], macros["MOE_P2P_RANKS_PER_NODE"]
    topk, columns = macros["MOE_P2P_TOPK"], local + world // local
    head = layout(topk).slot_head_bytes
    scales = 4 * num_scales(macros["MOE_P2P_HIDDEN_DIM"])
    ranks = world if per_token else 0  # it keeps words for each rank
    words = 4 * (columns + ranks) * (up(macros["MOE_P2P_CHUNK_TOKENS"], 32) // 32) + 4 * ranks
    counts = 4 * (macros["MOE_P2P_NUM_EXPERTS"] + ranks)
    send = words + launch.token_workers * (counts + head + scales + 16 * columns + 256)
    table = 4 * macros["MOE_P2P_MAX_LOCAL_EXPERTS"] * (world + 2) + 16 * world
    taken = 2 * (head + scales)
    recv = table + launch.slot_workers * (24 * topk + taken + 256) + launch.block_threads
    return max(send, recv) + 1024


def combine_shared_bytes(macros: dict[str, int], by_topk: bool, launch: LaunchShape) -> int:
    """The same for combine.cu: rows, weights, counts and ranks of a batch, or addresses of rows."""
    world, local = macros["MOE_P2P_WORLD_SIZE"], macros["MOE_P2P_RANKS_PER_NODE"]
    speakers = 8 * (local + world // local) + (24 * macros["MOE_P2P_TOPK"] if by_topk else 0)
    workers = max(launch.token_workers, launch.slot_workers)
    unready = 4 * launch.block_threads + 128 if "MOE_P2P_READY" in macros else 0
    return launch.block_threads * 20 + workers * (speakers + 512) + 1024 + unready


class Bulk(NamedTuple):
    """A kernel that carries rows through shared memory (kernels/device/bulk.cuh)."""

    launch: LaunchShape
    macros: dict[str, int]
    shared_bytes: int


NO_BULK = {"MOE_P2P_BULK": 0}


def most_in_registers(steps: BulkSteps | None = None) -> int:
    """Most tokens of a step whose rows do not go in bulk on few multiprocessors.

    steps: as measured; None: shipped.
    """
    return min(BULK_STEP, FEW_BULK_STEP if steps is None else steps.few)


def most_of_short_calls(steps: BulkSteps | None = None) -> int:
    """Most tokens of a call that goes through registers where its communicator's steps go in bulk.

    Rows have flags there, which short steps of a communicator of their own need not.
    """
    return min(_SHORT_CALL, most_in_registers(steps))


def flags_itself(
    step_tokens: int, *, masks: bool, bulk: bool, steps: BulkSteps | None = None
) -> bool:
    """Whether rows go without flags (kernels/device/self_flag.cuh): alike on all ranks.

    That saves a fence and a look for each row, and costs a store for each that is read: worth it
    where a step is short. Masked ranks could leave half a row behind. bulk: longer steps can go in
    bulk, where rows cannot.
    """
    longest = most_in_registers(steps) if bulk else BULK_STEP
    return step_tokens <= longest and not masks


def can_go_in_bulk(world_size: int, ranks_per_node: int, num_sms: int | None) -> bool:
    """True for few multiprocessors, a single node and not too many ranks."""
    return few(num_sms) and world_size == ranks_per_node <= _MAX_BULK_RANKS


def goes_in_bulk(
    macros: dict[str, int], num_sms: int | None, steps: BulkSteps | None = None
) -> bool:
    """True for long steps without masks, when can_go_in_bulk() holds. steps: as measured."""
    if macros["MOE_P2P_MASKS"] or macros["MOE_P2P_SELF_FLAGGED"]:
        return False
    if macros["MOE_P2P_CHUNK_TOKENS"] <= most_in_registers(steps):  # of short calls
        return False
    ranks, local = macros["MOE_P2P_WORLD_SIZE"], macros["MOE_P2P_RANKS_PER_NODE"]
    return can_go_in_bulk(ranks, local, num_sms)


def bulk_dispatch(
    macros: dict[str, int], *, per_token: bool, x_bytes: int, row_bytes: int, quantize: bool
) -> Bulk | None:
    """x_bytes: bytes of the caller's row; row_bytes: as it travels. None: it does not fit."""
    topk = macros["MOE_P2P_TOPK"]
    scales = 4 * num_scales(macros["MOE_P2P_HIDDEN_DIM"])
    head = layout(topk).slot_head_bytes
    token = up(row_bytes, 16) + up(scales, 16) + macros["MOE_P2P_EXTRA_BYTES"]
    image = up(head + min(token, macros["MOE_P2P_MAX_TOKEN_BYTES"]), 128)
    ring_images = 3 if per_token else 4
    ring = up(ring_images * (image + 16) + 32 * topk + 128, 128)
    ranks = macros["MOE_P2P_RANKS_PER_NODE"]
    place = image + 4 * ranks + (16 if quantize else 32)
    rest = _FLAG_BYTES * ranks + 384 + (2 * x_bytes if quantize else 0)
    send, recv = (5, 6) if quantize or per_token else (2, 3)
    if ranks == _OWN_STAY_RANKS and per_token and not quantize:
        send, recv = 3, 5  # half of the slots are heads alone
    # Rows that are not quantized leave one warp of a worker little to do.
    pipe, most = (_CARRY_THREADS + _COMPUTE_THREADS, 3) if quantize else (_CARRY_THREADS + 32, 6)
    for workers in range(most, 0, -1):
        threads = pipe * workers + _FLAG_THREADS + 32 * _ROUTE_WARPS
        launch = LaunchShape(threads, workers, 1, 1, send * _SMS, recv * _SMS)
        base = dispatch_shared_bytes(macros, per_token, launch)
        room = _MAX_SHARED_BYTES - base
        rings = min(room // ring, launch.block_threads // 32)
        images = min((room // workers - rest) // place, _MOST_IMAGES)
        if images >= _LEAST_IMAGES and rings >= 1:
            bulk = {
                "MOE_P2P_BULK": 1,
                "MOE_P2P_IMAGES": images,
                "MOE_P2P_IMAGE_BYTES": image,
                "MOE_P2P_RINGS": rings,
                "MOE_P2P_RING_IMAGES": ring_images,
                "MOE_P2P_ROUTE_WARPS": _ROUTE_WARPS,
            }
            shared = base + max(workers * (images * place + rest), rings * ring)
            return Bulk(launch, bulk, shared)
    return None


def copy_blocks(macros: dict[str, int], launch: LaunchShape) -> tuple[int, int]:
    """Most sending blocks of a combine whose senders only copy, and where own rows stay besides.

    In bulk both halves read as many rows. Of two ranks, where own rows stay, a token has 2 rows to
    copy in one half and 3 in the other: 10 + 14 blocks are 4 to 12% faster than 12 + 12.
    """
    if not macros["MOE_P2P_BULK"]:
        return launch.slot_blocks, launch.slot_blocks
    most, two = launch.token_blocks, macros["MOE_P2P_RANKS_PER_NODE"] == _OWN_STAY_RANKS
    return most, -(-5 * most // 7) if two else most


def bulk_combine(macros: dict[str, int], *, y_item: int, out_item: int) -> Bulk | None:
    """y_item, out_item: bytes of a value of y, of a partial sum. None: it does not fit.

    Blocks are divided by the rows of a token that pass through each half: senders read one per
    expert and write one per rank with such an expert, receivers read one per rank.
    """
    values = 16 // min(y_item, out_item)
    deep = -(-macros["MOE_P2P_HIDDEN_DIM"] // (values * _COMPUTE_THREADS))
    deep = -(-deep // -(-deep // _DEEP))
    piece = _COMPUTE_THREADS * deep * values
    topk, ranks = macros["MOE_P2P_TOPK"], macros["MOE_P2P_RANKS_PER_NODE"]
    addends = max(topk, ranks + 2)
    sums = 4 * (8 * addends + 4 * topk + 64)
    partials = ranks * (1 - (1 - 1 / ranks) ** topk)
    piece_in = piece * max(y_item, out_item) + 16
    rest = _PIECES_OUT * (piece * out_item + 16) + sums + 1024
    for workers in (3, 2, 1):
        pieces = min((_MAX_SHARED_BYTES // workers - rest) // piece_in, 16)
        if pieces >= 4 or (workers == 1 and pieces >= 1):
            threads = (_CARRY_THREADS + _COMPUTE_THREADS) * workers + _FLAG_THREADS
            tokens = round(partials * _SMS)
            launch = LaunchShape(threads, 1, workers, 1, tokens, tokens + topk * _SMS)
            bulk = {"MOE_P2P_BULK": 1, "MOE_P2P_PIECES_IN": pieces}
            return Bulk(launch, bulk, workers * (pieces * piece_in + rest))
    return None
