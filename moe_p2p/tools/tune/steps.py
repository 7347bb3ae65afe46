"""From how many tokens on steps go in bulk, and in parts of how many bytes they leave a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack

from moe_p2p.machine import tuned
from moe_p2p.machine.launches import BULK_STEP, FEW_BULK_STEP, BulkSteps, TunedLaunch
from moe_p2p.machine.tuned import Parts, Tuned
from moe_p2p.tools.tune.world import GAIN, Timed, World, best

FEW_STEPS = (32, 64, 128, 256)  # tokens
ALL_STEPS = (512, 1024, 4096)
BLOCKS = (24, 32, 40, 48)
PART_BYTES = (0, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)


def bulk(world: World, launches: tuple[TunedLaunch, ...]) -> BulkSteps:
    """Of one node. Ranks that are several nodes have no bulk way."""
    few = list[tuple[int, float, float]]()
    most = max(world.options.tokens)
    for tokens in (each for each in FEW_STEPS if each <= most):
        runs, sms = {}, world.options.num_sms
        with ExitStack() as stack:
            for name, longest in (("registers", tokens), ("bulk", tokens - 1)):
                with tuned.using(Tuned(launches=launches, bulk=BulkSteps(longest))):
                    comm = stack.enter_context(world.communicator(tokens, num_sms=sms))
                runs[name] = Timed(world.pair(comm, tokens))
            medians = world.medians_us(runs)
        few.append((tokens, medians["registers"], medians["bulk"]))
        world.say(
            f"bulk: {tokens} tokens on {sms} multiprocessors: registers {medians['registers']:.1f} "
            f"us, bulk {medians['bulk']:.1f}"
        )
    spans = dict[int, dict[int, float]]()
    for tokens in (each for each in ALL_STEPS if each <= most):
        spans[tokens] = _by_blocks(world, tokens, launches)
        shown = ", ".join(f"{n or 'all'}: {us:.1f}" for n, us in spans[tokens].items())
        world.say(f"bulk: {tokens} tokens by blocks: {shown} us")
    return BulkSteps(last_without_bulk(few), *first_with_bulk(spans))


def _by_blocks(world: World, tokens: int, launches: tuple[TunedLaunch, ...]) -> dict[int, float]:
    with ExitStack() as stack:
        stack.enter_context(tuned.using(Tuned(launches=launches)))
        runs = {}
        for blocks in (0, *BLOCKS):
            comm = stack.enter_context(world.communicator(tokens, num_sms=blocks or None))
            runs[blocks] = Timed(world.pair(comm, tokens))
        return world.medians_us(runs)


def last_without_bulk(few: list[tuple[int, float, float]]) -> int:
    """Returns the most tokens of a step that goes through registers on few multiprocessors.

    few: tokens, us through registers, us in bulk. Equal within noise: as shipped.
    """
    last = 0
    for tokens, registers, in_bulk in few:
        shipped_is_bulk = tokens > FEW_BULK_STEP
        faster = in_bulk < (1 - GAIN) * registers
        slower = registers < (1 - GAIN) * in_bulk
        if faster or (shipped_is_bulk and not slower):
            return last if few[0][0] < tokens else tokens // 2
        last = tokens
    return min(max(last, FEW_BULK_STEP if not few else last), BULK_STEP)


def first_with_bulk(spans: Mapping[int, Mapping[int, float]]) -> tuple[int, int]:
    """Returns `above` and `blocks` of BulkSteps. spans: us by tokens, then by blocks, 0: all.

    Bulk has to win at this step and at all longer ones, by the same blocks.
    """
    found = (0, 0)
    for tokens in sorted(spans, reverse=True):
        longer = [spans[each] for each in spans if each >= tokens]
        total = {n: sum(each[n] / each[0] for each in longer) for n in spans[tokens] if n}
        blocks = min(total, key=lambda n: total[n])
        if any(each[blocks] >= (1 - GAIN) * each[0] for each in longer):
            break
        found = (max(tokens - 1, BULK_STEP), blocks)
    return found


def parts(world: World) -> Parts | None:
    """Between two nodes: the job's own, or the ranks of this host as two."""
    options = world.options
    if options.processes < 2 or options.mirrored:
        world.say("parts: there is one rank, nothing leaves a node")
        return None
    nodes = options.hosts if options.hosts > 1 else 2
    gains = dict.fromkeys(PART_BYTES, 1.0)
    name, shipped = "", 0
    for tokens in sorted({each for each in options.tokens if each <= 1024}, reverse=True)[:2]:
        with ExitStack() as stack:
            runs = {}
            for part_bytes in PART_BYTES:
                local = options.processes // nodes
                more = {"part_bytes": part_bytes, "ranks_per_node": local}
                comm = stack.enter_context(world.communicator(tokens, **more))
                name = tuned.transport_name(comm.engine.provider, comm.engine.opening.settings)
                config = dataclasses.replace(comm.config, part_bytes=None)
                usual = config.with_parts(comm.engine.provider).least_part_bytes
                shipped = shipped or usual  # of the longest steps
                runs[part_bytes] = Timed(world.pair(comm, tokens))
            medians = world.medians_us(runs)
        gains = {each: gain * medians[each] for each, gain in gains.items()}
        shown = ", ".join(f"{each >> 10} KiB: {us:.1f}" for each, us in medians.items())
        world.say(f"parts: {tokens} tokens, {nodes} nodes over {name}: {shown} us")
    return Parts(name, options.device, best(gains, shipped))
