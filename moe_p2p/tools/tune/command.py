"""`python -m moe_p2p tune`: starts the ranks, measures in turns, writes the file of tuned.py.

Under torchrun it is one rank, and rank 0 of each host writes that host's file.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_p2p import env, errors
from moe_p2p.machine import tuned
from moe_p2p.machine.launches import BulkSteps, TunedLaunch
from moe_p2p.machine.tuned import Parts, Rates, Tuned
from moe_p2p.tools import launch
from moe_p2p.tools.meeting import MIRROR_GPUS
from moe_p2p.tools.option_types import Parser, above_zero, at_least_1, each_at_least_1, output_file
from moe_p2p.tools.tune import launches, link, steps
from moe_p2p.tools.tune.world import TuneOptions, World

PARTS_OF_A_RUN = ("launches", "bulk", "parts", "link")
GPU_ONLY = ("launches", "bulk")


class Measured(NamedTuple):
    """None: not asked for."""

    launches: list[TunedLaunch] | None = None
    bulk: BulkSteps | None = None
    parts: Parts | None = None
    rates: Rates | None = None

    def sections(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.launches is not None:
            found["launches"] = [tuned.launch_as_json(each) for each in self.launches]
        for name in ("bulk", "parts", "rates"):
            if (value := getattr(self, name)) is not None:
                found[name] = value._asdict()
        return found


def main(arguments: list[str]) -> int:
    """Returns 0: measured and written, 2: bad input, a rank failed, the file cannot be written."""
    options, path = _parse(arguments)
    began = time.monotonic()
    try:
        if env.launched():
            torch.set_num_threads(launch.threads_per_rank(env.local_world_size()))
            measured = run(options)
        else:
            measured = launch.run_ranks(run, options, num_ranks=options.processes)[0]
    except (launch.RanksFailedError, errors.MoeP2pError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    if env.launched() and env.local_rank():
        return 0
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    try:
        tuned.write(path, now, measured.sections())
    except OSError as error:
        print(
            f"tune: {path} cannot be written ({error}); name another one: --into", file=sys.stderr
        )
        return 2
    print(f"wrote {path} in {time.monotonic() - began:.0f} s; it is found by itself" + _how(path))
    return 0


def _how(path: Path) -> str:
    return "" if path == tuned.path_here() else f" with MOE_P2P_TUNED={path}"


def run(options: TuneOptions) -> Measured:
    """Runs one rank; the result is the same on all."""
    with launch.process_group() as (rank, _):
        if options.device == "cuda":
            torch.cuda.set_device(launch.device_index())
        with tuned.using(Tuned()):  # not what an earlier run has found
            world = World(options, rank)
            measured = measure(world)
            world.close()
            return measured


def measure(world: World) -> Measured:
    only, found = world.options.only, Measured()
    if "launches" in only:
        found = found._replace(launches=launches.measure(world))
    if "bulk" in only:
        found = found._replace(bulk=steps.bulk(world, tuple(found.launches or ())))
    if "parts" in only:
        found = found._replace(parts=steps.parts(world))
    if "link" in only:
        found = found._replace(rates=link.measure(world))
    return found


def _parse(arguments: list[str]) -> tuple[TuneOptions, Path]:
    parser = Parser(
        prog="python -m moe_p2p tune",
        description="Measures this machine once: launch shapes of the kernels, which steps go in "
        "bulk, parts between nodes, rates of the NICs. AllToAll and KV workers find the file by "
        "themselves; what their configuration gives goes before it. On CPUs parts and link only.",
        epilog="Between hosts: torchrun --nnodes 2 --nproc-per-node 8 ... -m moe_p2p tune. "
        "MOE_P2P_TRANSPORT and MOE_P2P_NICS choose the NICs.",
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if any (auto)"
    )
    add("--ranks", type=at_least_1, help="processes (all GPUs; 2 on CPUs)")
    add(
        "--mirror",
        type=at_least_1,
        help="measure as rank 0 of so many ranks, like bench --mirror (no)",
    )
    add("--only", default=",".join(PARTS_OF_A_RUN), help="these parts, with commas")
    add(
        "--tokens",
        type=each_at_least_1,
        help="of a step, with commas (8,32,128,256,512,4096; on CPUs 32,512)",
    )
    add("--hidden", type=at_least_1, default=7168, help="H")
    add("--topk", type=at_least_1, default=8, help="K")
    add("--experts", type=at_least_1, help="E (256; on CPUs 64)")
    add("--num-sms", type=at_least_1, default=24, help='of "few multiprocessors"')
    add("--seconds", type=above_zero, default=0.4, help="of timing for each value")
    add("--timeout-s", type=above_zero, default=60.0, help="deadline of every wait")
    add("--into", type=Path, help="file to write (the one that is found)")
    given = parser.parse_args(arguments)
    device = ("cuda" if cuda else "cpu") if given.device == "auto" else given.device
    if device == "cuda" and not cuda:
        parser.error("--device cuda: torch finds no GPU; see python -m moe_p2p doctor")
    only = tuple(given.only.split(","))
    if unknown := set(only) - set(PARTS_OF_A_RUN):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS_OF_A_RUN)}")
    if device == "cpu":
        only = tuple(each for each in only if each not in GPU_ONLY)
    if not only:
        parser.error(f"--only {given.only}: on CPUs there is nothing of it to measure")
    options = _options(parser, given, device, only)
    path = given.into or (tuned.path_here() if env.tuned_file() != tuned.NONE else None)
    if path is None:
        parser.error("MOE_P2P_TUNED is none, so no file would be found; unset it, or give --into")
    try:
        output_file(str(path))  # now, not after a minute of measuring
    except argparse.ArgumentTypeError as error:
        parser.error(f"--into: {error}")
    return options, path.absolute()


def _options(
    parser: argparse.ArgumentParser, given: argparse.Namespace, device: str, only: tuple[str, ...]
) -> TuneOptions:
    on_gpu = device == "cuda"
    processes, hosts = given.ranks or (torch.cuda.device_count() if on_gpu else 2), 1
    if env.launched():
        if given.ranks or given.mirror:
            parser.error("--ranks, --mirror: torchrun has started the ranks")
        processes = env.world_size()
        hosts = processes // env.local_world_size()
    world = processes
    if given.mirror:
        if not on_gpu:
            parser.error("--mirror is for GPUs")
        processes, world = min(MIRROR_GPUS, processes), given.mirror
        only = tuple(each for each in only if each in GPU_ONLY)
    if hosts > 1:
        only = tuple(each for each in only if each not in GPU_ONLY)  # one node's
    if processes > 1 and processes % 2 and "parts" in only and hosts == 1:
        only = tuple(each for each in only if each != "parts")  # not two nodes of equal size
    experts = given.experts or (256 if on_gpu else 64)
    if experts % world:
        parser.error(f"{experts} experts cannot be divided among {world} ranks")
    return TuneOptions(
        device=device,
        processes=processes,
        world=world,
        hosts=hosts,
        tokens=given.tokens or ((8, 32, 128, 256, 512, 4096) if on_gpu else (32, 512)),
        hidden=given.hidden,
        topk=given.topk,
        experts=experts,
        num_sms=given.num_sms,
        only=only,
        seconds=given.seconds,
        timeout_s=given.timeout_s,
    )
