"""What `python -m moe_p2p tune` has measured on this machine: its file, who reads it, when.

The file lies in the folder of compiled kernels, under a name made of the machine's GPUs and NICs.
MOE_P2P_TUNED names another one. `find` is called when a communicator or a KV worker is made, never
on the data path. A file of another build or machine is ignored, with a line in the log; one that
cannot be read is an error. What a configuration gives always goes before what was measured.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_p2p import env, errors, log
from moe_p2p.machine import driver, topology, transport
from moe_p2p.machine.launches import (
    BULK_STEP,
    FEW_BULK_STEP,
    BulkSteps,
    LaunchShape,
    TunedLaunch,
    few,
)
from moe_p2p.version import __version__

MOST = 1 << 30  # of every number in the file that has no limit of its own
NONE = "none"  # of MOE_P2P_TUNED: use no file
BROKEN = "not usable"  # how `describe` begins where `find` raises
_AGAIN = "measure anew with `python -m moe_p2p tune`"
# Settings that no measurement depends on, or that differ from one process to the next.
_OF_A_PROCESS = ("copy_kernel", "proxy_cpu", "seed")


class Parts(NamedTuple):
    """part_bytes between nodes, over this transport, with tensors in `memory`: cpu or cuda."""

    transport: str
    memory: str
    part_bytes: int


class Rates(NamedTuple):
    """Of all `nics` NICs of one engine together; writes_per_s: of small rows."""

    transport: str
    memory: str
    nics: int
    writes_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Nothing, or what a file has. measured: date and time of the last measurement."""

    path: Path | None = None
    measured: str = ""
    launches: tuple[TunedLaunch, ...] = ()
    bulk: BulkSteps | None = None
    parts: Parts | None = None
    rates: Rates | None = None

    def shared(self, transport_now: str, memory: str) -> tuple[int, ...]:
        """What all ranks have to do alike: rank 0's counts (agreement.Offer, tuned)."""
        bulk = self.bulk or BulkSteps(FEW_BULK_STEP)
        parts = self.parts
        fits = parts is not None and parts[:2] == (transport_now, memory)
        return (*bulk, parts.part_bytes if parts is not None and fits else -1)


class Machine(NamedTuple):
    """What a measurement depends on, besides the build. nics: kind, name and rate of each."""

    gpu: str
    gpus: int
    nics: str

    def named(self) -> str:
        gpus = f"{self.gpus} x {self.gpu}" if self.gpus else "no GPU"
        return f"{gpus}, NICs: {self.nics or 'none'}"


def build() -> dict[str, str]:
    """What a file has to have been measured with."""
    return {"version": __version__, "letter": str(torch.ops.moe_p2p.letter.default())}


@functools.cache
def machine() -> Machine:
    """This one; makes no CUDA context."""
    host = topology.read_host()
    count = max(len(host.gpus), torch.cuda.device_count())
    kinds = [f"{nic.kind} {nic.name} {nic.rate_gbps:g}" for nic in transport.rail_nics(host)]
    return Machine(_gpu_name() if count else "", count, ", ".join(kinds))


def _gpu_name() -> str:
    try:
        name = driver.call("cuDeviceGetName", 256, driver.call("cuDeviceGet", 0))
    except errors.MoeP2pError:
        return "a GPU without a driver"
    return bytes(name).split(b"\0")[0].decode(errors="replace").strip()


def transport_name(provider: str, settings: str) -> str:
    """Names what a measurement went over: the provider, and settings that change its figures."""
    rest = transport.without(transport.shared_settings(settings), *_OF_A_PROCESS)
    return " ".join(filter(None, (provider, rest)))


def path_here() -> Path:
    """Where `tune` writes, and `find` looks, on this machine."""
    if (named := env.tuned_file()) and named != NONE:
        return Path(named)
    key = hashlib.sha256(repr(tuple(machine())).encode()).hexdigest()[:12]
    short = re.sub(r"\W+", "-", machine().gpu or "cpu").strip("-")
    return env.cache_folder() / f"tuned-{short}-{key}.json"


_instead: Tuned | None = None  # of `using`


def find() -> Tuned:
    """Returns what was measured on this machine with this build; empty when nothing was.

    Raises InvalidArgumentError, naming the file, when it is broken.
    """
    if _instead is not None:
        return _instead
    if env.tuned_file() == NONE:
        return Tuned()
    path = path_here()
    try:
        facts = path.stat()
    except OSError:
        if env.tuned_file():
            _warn_once(f"MOE_P2P_TUNED names {path}, which is not there: {_AGAIN}")
        return Tuned()
    return _read(path, facts.st_mtime_ns, facts.st_size)


@contextlib.contextmanager
def using(tuned: Tuned) -> Iterator[None]:
    """Makes `find` of this process return `tuned`, while `tune` tries values."""
    global _instead
    before, _instead = _instead, tuned
    try:
        yield
    finally:
        _instead = before


def describe() -> str:
    """One line for people: which file is used, from when, and what it has; BROKEN: why not."""
    if env.tuned_file() == NONE:
        return "not used: MOE_P2P_TUNED=none"
    try:
        tuned = find()
    except errors.MoeP2pError as error:
        return f"{BROKEN}: {error}"
    if tuned.path is None:
        text = "is of another build or machine" if path_here().exists() else "is not there"
        return f"none: {path_here()} {text}; {_AGAIN}"
    has = [f"{len(tuned.launches)} launch shapes"] if tuned.launches else []
    if tuned.bulk:
        has.append(f"bulk from {tuned.bulk.few} tokens on few multiprocessors")
    if tuned.parts:
        has.append(f"parts of {tuned.parts.part_bytes:,} B")
    if tuned.rates:
        rates = tuned.rates
        has.append(f"{rates.writes_per_s / 1e6:.2f} M writes/s, {rates.bytes_per_s / 1e9:.2f} GB/s")
    return f"{tuned.path}, measured {tuned.measured}: {', '.join(has) or 'nothing'}"


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


# --- the file ---


@functools.lru_cache(maxsize=8)
def _read(path: Path, _mtime_ns: int, _size: int) -> Tuned:
    try:
        data = json.loads(path.read_bytes())
        errors.require(isinstance(data, dict), "it is not an object of JSON")
        if other := _of_another(data):
            _warn_once(f"{path} is ignored: {other}; {_AGAIN}")
            return Tuned()
        return _parsed(path, data)
    except (OSError, ValueError, LookupError, TypeError, errors.MoeP2pError) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise errors.make(
            errors.InvalidArgumentError,
            f"{path}, which `python -m moe_p2p tune` writes, cannot be used ({what}); delete it, "
            f"or {_AGAIN}",
        ) from None


def _of_another(data: dict[str, Any]) -> str:
    """Why a file is not of this build and machine; empty when it is."""
    for name, mine in build().items():
        if data.get(name) != mine:
            return f"it was measured with {name} {data.get(name)}, this is {mine}"
    here = machine()
    if data["machine"] != here._asdict():
        return f"it was measured on {Machine(**data['machine']).named()}, this is {here.named()}"
    return ""


def _parsed(path: Path, data: dict[str, Any]) -> Tuned:
    bulk, parts, rates = (data.get(name) for name in ("bulk", "parts", "rates"))
    return Tuned(
        path=path,
        measured=str(data["measured"]),
        launches=tuple(_launch(each) for each in data.get("launches", [])),
        bulk=None if bulk is None else _bulk(bulk),
        parts=None
        if parts is None
        else Parts(
            str(parts["transport"]), str(parts["memory"]), _int(parts, "part_bytes", 0, MOST)
        ),
        rates=None
        if rates is None
        else Rates(
            str(rates["transport"]),
            str(rates["memory"]),
            _int(rates, "nics", 1, transport.MAX_NICS),
            _rate(rates, "writes_per_s"),
            _rate(rates, "bytes_per_s"),
        ),
    )


def _int(data: dict[str, Any], name: str, low: int, high: int) -> int:
    value = data[name]
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    errors.require(good, f"{name} is {value!r}, must be an integer from {low} to {high}")
    return int(value)


def _rate(data: dict[str, Any], name: str) -> float:
    value = data[name]
    good = isinstance(value, (int, float)) and 0 < value < float("inf")
    errors.require(good, f"{name} is {value!r}, must be above 0")
    return float(value)


def _bulk(data: dict[str, Any]) -> BulkSteps:
    steps = BulkSteps(
        _int(data, "few", 0, BULK_STEP), _int(data, "above", 0, MOST), _int(data, "blocks", 0, 1024)
    )
    # Shorter steps flag themselves where all multiprocessors are used.
    good = not steps.above or (steps.above >= BULK_STEP and steps.blocks and few(steps.blocks))
    errors.require(
        bool(good),
        f"above is {steps.above} with {steps.blocks} blocks, must be 0 or at least {BULK_STEP}, "
        "with few blocks",
    )
    return steps


def _launch(data: dict[str, Any]) -> TunedLaunch:
    errors.require(data["kernel"] in ("dispatch", "combine"), f"kernel is {data['kernel']!r}")
    errors.require(isinstance(data["few"], bool), f"few is {data['few']!r}")
    shape = data["shape"]
    threads = _int(shape, "block_threads", 128, 1024)
    workers = [_int(shape, name, 1, 15) for name in ("token_workers", "slot_workers")]
    for each in workers:
        errors.require(threads % (32 * each) == 0, f"{threads} threads are not {each} workers")
    return TunedLaunch(
        adds=data["kernel"] == "combine",
        few=data["few"],
        ranks=_int(data, "ranks", 1, 64),
        row_bytes=_int(data, "row_bytes", 1, MOST),
        least_tokens=_int(data, "least_tokens", 1, MOST),
        most_tokens=_int(data, "most_tokens", 1, MOST),
        shape=LaunchShape(
            threads,
            workers[0],
            workers[1],
            _int(shape, "blocks_per_sm", 1, 16),
            _int(shape, "token_blocks", 1, MOST),
            _int(shape, "slot_blocks", 1, MOST),
        ),
    )


def launch_as_json(launch: TunedLaunch) -> dict[str, Any]:
    fields = launch._asdict()
    kernel = "combine" if fields.pop("adds") else "dispatch"
    return {"kernel": kernel, **fields, "shape": launch.shape._asdict()}


def write(path: Path, measured: str, sections: dict[str, Any]) -> None:
    """Replaces these sections of the file, and the whole file where it is of another build.

    sections: "launches", "bulk", "parts", "rates" as `_parsed` reads them. Atomic: who reads
    meanwhile finds the old file or the new one. Raises OSError.
    """
    data: dict[str, Any] = {**build(), "machine": machine()._asdict(), "measured": measured}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        old = json.loads(path.read_bytes())
        if not _of_another(old):
            data = old | {"measured": measured}
    data |= sections
    _parsed(path, data)  # what is written can be read
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        made.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
