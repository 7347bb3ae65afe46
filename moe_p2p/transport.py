"""Which provider and which NICs an engine is opened with.

transport="auto" is libfabric where there are EFA devices, else verbs where there is another usable
RDMA device, else loopback, which reaches the ranks of one host. TCP is never chosen, only asked for.

Two steps, because ranks must agree between them: `choose` names the provider of this rank, and
agreement.py compares it with that of the others; `open_with` then picks the NICs. Providers are told them
by rail in one setting, devices=mlx5_0:mlx5_1; NIC i of the engine is the i-th name.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

from moe_p2p import cuda_driver, env, errors, topology
from moe_p2p.topology import Host

LOOPBACK, LIBFABRIC, VERBS = "loopback", "libfabric", "verbs"
MAX_NICS = 8  # kMaxNics of csrc/engine/memory_region.h
DEFAULT_NICS = 2  # of providers without devices
LIBRARIES = {LIBFABRIC: "libfabric.so.1", VERBS: "libibverbs.so.1"}
_OF_ONE_HOST = ("devices", "interfaces", "addresses")
_DOCTOR = "`python -m moe_p2p doctor` says more"


class Choice(NamedTuple):
    """The provider that this rank would use."""

    provider: str
    why: str
    automatic: bool


class Opening(NamedTuple):
    """What an engine is opened with."""

    provider: str
    num_nics: int
    settings: str


def load_problem(library: str) -> str:
    """Why a shared library cannot be loaded; empty when it can."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def choose(transport: str, *, nics: str = "", root: Path = Path("/")) -> Choice:
    """The provider for `transport`; "auto" asks the environment, then the machine."""
    if transport != "auto":
        return Choice(transport, "it was asked for", automatic=False)
    if asked := env.transport():
        return Choice(asked, "MOE_P2P_TRANSPORT asks for it", automatic=False)
    host = topology.read_host(root)
    if named := names_of(nics or env.nics()):
        host = host._replace(nics=tuple(_named(host, named)))
    return prefer(host)


def prefer(host: Host) -> Choice:
    """The best provider of a machine, with the reason against each better one."""
    against: list[str] = []
    for provider, kind, name in ((LIBFABRIC, "efa", "EFA"), (VERBS, "verbs", "RDMA")):
        nics = topology.usable(host, kind)
        problem = load_problem(LIBRARIES[provider]) if nics else ""
        if nics and not problem:
            found = f"{len(nics)} {name} devices ({', '.join(nic.name for nic in nics[:8])})"
            return Choice(provider, "; ".join([found, *against]), automatic=True)
        against.append(f"no {provider}: {problem or why_none(host, kind, name)}")
    return Choice(LOOPBACK, "; ".join(against), automatic=True)


def why_none(host: Host, kind: str, name: str) -> str:
    """Why a machine has no usable NIC of a kind."""
    problems = [f"{nic.name}: {nic.problem}" for nic in host.nics if nic.kind == kind]
    return "; ".join(problems[:8]) or f"there is no {name} device"


def open_with(
    provider: str,
    *,
    num_nics: int | None,
    settings: str,
    nics: str = "",
    pci: str = "",
    share: tuple[int, int] = (0, 1),
    root: Path = Path("/"),
) -> Opening:
    """What the engine of one rank is opened with.

    num_nics: None: what the topology gives. nics: names, in rail order; empty: the environment's,
    else the nearest. pci: address of the rank's GPU; empty: none. share: (index, number) of the
    rank on its host. Raises InvalidArgumentError when the numbers do not fit, UnavailableError
    when all devices have a problem.
    """
    names = _setting(settings, "devices").split(":") if _setting(settings, "devices") else []
    if not names and provider in LIBRARIES:
        names = names_of(nics or env.nics())
        host, kind = topology.read_host(root), _kind(provider, settings)
        if names and kind:
            _named(host, names)
        elif kind:
            names = _nearest(host, kind, pci, share, num_nics)
        if names:
            settings = ",".join(filter(None, [settings, f"devices={':'.join(names)}"]))
    if names:
        errors.require(
            num_nics in (None, len(names)),
            f"{num_nics} NICs are asked for, but {len(names)} are named: {', '.join(names)}",
        )
        num_nics = len(names)
    errors.require(
        num_nics is None or 1 <= num_nics <= MAX_NICS,
        f"num_nics is {num_nics}, must be from 1 to {MAX_NICS}",
    )
    few = 1 if provider in LIBRARIES else DEFAULT_NICS
    return Opening(provider, num_nics or few, settings)


def _kind(provider: str, settings: str) -> str:
    """Kind of NICs that a provider wants to be told; empty when it finds its own."""
    if provider == LIBFABRIC:
        return "efa" if _setting(settings, "provider") in ("", "efa") else ""
    return "verbs"


def _nearest(
    host: Host, kind: str, pci: str, share: tuple[int, int], wanted: int | None
) -> list[str]:
    nics = topology.usable(host, kind)
    if not nics:
        # Without any device the provider itself says best what it lacks.
        if not any(nic.kind == kind for nic in host.nics):
            return []
        raise errors.make(
            errors.UnavailableError,
            f"no device can be used: {why_none(host, kind, kind)}; {_DOCTOR}",
        )
    chosen = topology.pick(host, nics, pci=pci, share=share, wanted=wanted)[:MAX_NICS]
    errors.require(
        wanted is None or len(chosen) == wanted,
        f"{wanted} NICs are asked for, but only {len(nics)} can be used "
        f"({', '.join(nic.name for nic in nics)}); {_DOCTOR}",
    )
    return [nic.name for nic in chosen]


def names_of(text: str) -> list[str]:
    """The names in "mlx5_0,mlx5_1"."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _named(host: Host, names: list[str]) -> list[topology.Nic]:
    """The NICs of these names. Raises when one is not there or cannot be used."""
    found = {nic.name: nic for nic in host.nics}
    for name in names:
        errors.require(
            name in found,
            f"nics names {name}, which is not an RDMA device of this machine; there are: "
            f"{', '.join(found) or 'none'}",
        )
        if found[name].problem:
            raise errors.make(
                errors.UnavailableError,
                f"nics names {name}, which cannot be used: {found[name].problem}; {_DOCTOR}",
            )
    return [found[name] for name in names]


def _setting(settings: str, key: str) -> str:
    pairs = (item.partition("=") for item in settings.split(","))
    return next((value for name, _, value in pairs if name == key), "")


def shared_settings(settings: str) -> str:
    """`settings` without what names devices of one host, to be compared between hosts."""
    items = settings.split(",")
    return ",".join(item for item in items if item.partition("=")[0] not in _OF_ONE_HOST)


def pci_of(device: int) -> str:
    """PCI address of a CUDA device."""
    domain, bus, slot = (
        cuda_driver.attribute(device, f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE")
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def announce(label: str, choice: Choice, opening: Opening) -> None:
    """One line about a choice, in the form of csrc/base/log.cpp, when MOE_P2P_LOG wants it."""
    if env.log_level() not in ("info", "debug"):
        return
    names = _setting(opening.settings, "devices").replace(":", ", ")
    line = (
        f"{label}: transport {opening.provider} over {names or f'{opening.num_nics} NICs'}: "
        f"{choice.why}"
    )
    print(f"moe_p2p info [pid {os.getpid()}] {line}", file=sys.stderr)
