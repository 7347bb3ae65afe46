"""Contestants: the package in every form that was asked for, baselines, DeepEP's calls.

Each is compared with the reference, or with the closed form, before it is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.bench import deep_ep
from moe_p2p.bench.baseline import TorchAllToAll
from moe_p2p.bench.cases import Job, changing_counts, make_job
from moe_p2p.bench.check import expect, verify, verify_by_rank, verify_whole
from moe_p2p.bench.gpu_calls import Calls, layout_of, on_device, package_calls, system_calls
from moe_p2p.bench.gpu_last import COMPARED, COMPARED_SUMS
from moe_p2p.bench.gpu_layer import LayerParts
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import MoeP2p, System, make_config
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools.gather import everyones

OURS = "moe_p2p.deep_ep"
CHECKED_TOKENS = (
    48  # of a rank in steps on GPUs that are compared bit for bit: on all ranks' behalf
)
MEMORY_PART = 0.25  # of a GPU; most for the regions of one communicator


@dataclass(frozen=True, kw_only=True)
class Contestant:
    calls: Calls
    wrong: list[str]  # errors in its results on this rank
    system: System | None = None  # for the small checked steps; None: it takes none
    package: MoeP2p | None = None  # the system whose bytes are counted

    @property
    def compared(self) -> str:
        how = "bit for bit" if self.calls.eager is not None else "within rounding"
        if self.calls.last is None:
            return "before timing, a step of this size within rounding"
        steps = f"small steps {how}, " if self.system is not None else ""
        after = COMPARED if self.calls.eager else COMPARED_SUMS
        return f"before timing, {steps}one of this size within rounding; {after}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One call that all contestants take: options.tokens has its number of tokens alone."""

    options: Options
    job: Job
    rank: int
    tokens: Tokens  # of this rank, on its device
    layer: LayerParts | None
    group: dist.ProcessGroup | None  # of the baselines; None: there are none
    ranks: Any = None  # the group of the package; None: the default one
    stack: ExitStack  # closes them
    notes: list[str]  # what was left out, with the reason

    def packages(self) -> Iterator[Contestant]:
        """Yields the package in every form that fits this GPU."""
        options, (tokens,) = self.options, self.options.tokens
        for chunk_tokens, num_sms in forms(options):
            what = f"T {tokens}, chunk_tokens {chunk_tokens}"
            system = self._made(what, chunk_tokens, num_sms)
            if system is None:
                continue
            self.stack.callback(system.close)
            wrong = self._whole(system)
            if layout_of(options, tokens) == "by_rank":
                wrong += verify_by_rank(system, self.job, options, self.rank, self.tokens)
            calls = package_calls(system, options, self.tokens, num_sms=num_sms, layer=self.layer)
            yield Contestant(calls=calls, wrong=wrong, system=system, package=system)

    def _made(self, what: str, chunk_tokens: int, num_sms: int) -> MoeP2p | None:
        options = self.options
        config = make_config(options, self.job, chunk_tokens=chunk_tokens)
        plan = config.plan(world_size=options.ranks, ranks_per_node=options.ranks_per_node)
        if options.device == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            if sum(plan.values()) > MEMORY_PART * properties.total_memory:
                self.notes.append(f"{what}: left out, {sum(plan.values()) >> 20} MiB of regions")
                return None
        try:
            limit = num_sms or None
            return MoeP2p(
                options, self.job, chunk_tokens=chunk_tokens, num_sms=limit, group=self.ranks
            )
        except (errors.InvalidArgumentError, errors.ResourceExhaustedError) as error:
            self.notes.append(f"{what}: left out, {error}")
            return None

    def baselines(self) -> Iterator[Contestant]:
        if self.group is None:
            return
        options = self.options
        system = TorchAllToAll(options, self.job, group=self.group)
        calls = system_calls(system, options, self.tokens, layer=self.layer)
        yield Contestant(calls=calls, wrong=self._whole(system), system=system)
        if options.device == "cuda" and options.hosts == 1 and deep_ep.missing() is None:
            api = self._api("deep_ep", "deep_ep")
            for calls, wrong in deep_ep.systems(api, self.notes):
                yield Contestant(calls=calls, wrong=wrong)

    def through_deep_ep(self, interface: str) -> Iterator[Contestant]:
        """Yields AllToAll itself, the shim, and another module if one was named."""
        num_sms = None if interface == "low-latency" else deep_ep.NORMAL_SMS
        yield self._all_to_all(interface, num_sms=num_sms)
        for name in (OURS, self.options.deep_ep_module):
            if name is None:
                continue
            api = replace(self._api(name, name), cached=True, num_sms=num_sms)
            if name == OURS:
                api = replace(api, low_latency_tokens=self.options.tokens[0])
            for calls, wrong in deep_ep.systems(api, self.notes, interfaces=[interface]):
                yield Contestant(calls=calls, wrong=wrong)

    def _api(self, module: str, label: str) -> deep_ep.Api:
        return deep_ep.Api(
            module=importlib.import_module(module),
            label=label,
            options=self.options,
            job=self.job,
            tokens=self.tokens,
            group=self.group if self.ranks is None else self.ranks,
            stack=self.stack,
        )

    def _all_to_all(self, interface: str, *, num_sms: int | None) -> Contestant:
        """This package's own calls, with the interface's inputs and the same rows asked for.

        Low-latency: rows by expert, quantized inside. Others: by rank, quantized by the caller.
        """
        options, tokens = self.options, self.tokens
        system = MoeP2p(options, self.job, num_sms=num_sms, group=self.ranks)
        self.stack.callback(system.close)
        if interface == "low-latency":
            options = replace(options, layout="padded")
            wrong = verify_whole(system, self.job, options, self.rank, tokens)
        else:
            options = replace(options, layout="by_rank")
            wrong = verify_by_rank(system, self.job, options, self.rank, tokens)
            if options.quantize:
                q, scales = reference.quantize(tokens.x)
                tokens = replace(tokens, x=q, scales=scales)
        calls = package_calls(system, options, tokens, num_sms=num_sms or 0, layer=None)
        return Contestant(calls=calls, wrong=wrong, package=system)

    def check(self, found: Sequence[Contestant], steps: range) -> None:
        """Compares steps with changing counts with the reference, small ones on GPUs."""
        options, (tokens,) = self.options, self.options.tokens
        most = min(tokens, CHECKED_TOKENS) if options.device == "cuda" else tokens
        for step in steps:
            counts = changing_counts(step, options.ranks, most, mirrored=self.job.mirrored)
            everyone = self.job.tokens(step, counts)
            expected = expect(self.job, options, self.rank, everyone)
            mine = on_device(everyone[self.rank], options.device)
            for one in found:
                if one.system is not None:
                    wrong = verify(one.system, mine, expected, exact=one.package is not None)
                    where = f"T {tokens}, rank {self.rank}: step {step}"
                    one.wrong.extend(f"{where}, {text}" for text in wrong)

    def _whole(self, system: System) -> list[str]:
        """Compares the call to be timed."""
        found = verify_whole(system, self.job, self.options, self.rank, self.tokens)
        return [f"T {self.options.tokens[0]}, rank {self.rank}: {text}" for text in found]


def forms(options: Options) -> list[tuple[int, int]]:
    """Returns (chunk_tokens, num_sms) of every form of the package for options.tokens[0]."""
    (tokens,) = options.tokens
    names = {"default": make_config(options, make_job(options)).step_tokens, "T": tokens}
    chunks = dict.fromkeys(min(names.get(c) or int(c), tokens) for c in options.chunks)
    return [(chunk, num_sms) for chunk in chunks for num_sms in options.sms]


def wrong_anywhere(wrong: list[str]) -> list[str]:
    """Returns the errors of any rank."""
    return [text for one in everyones(wrong) for text in one]
