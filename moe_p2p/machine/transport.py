"""Chooses the provider and the NICs with which an engine is opened.

transport="auto" means libfabric where there are EFA devices, else verbs where there is another
usable RDMA device, else loopback, which reaches only ranks of one host. TCP needs a setting.

Two steps, because ranks must agree between them: `choose` names this rank's provider,
moe_p2p/moe/rendezvous/agreement.py compares the names of all ranks, and `open_with` picks the NICs.
Providers take NICs in one setting, devices=mlx5_0:mlx5_1 or
interfaces=rdmap79s0-rdm:rdmap80s0-rdm: NIC i of the engine is the i-th name, starting over after
the last.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import NamedTuple

from moe_p2p import env, errors, log
from moe_p2p.machine import driver, jit, topology
from moe_p2p.machine.topology import Host, Nic

LOOPBACK, TIMED, LIBFABRIC, VERBS = "loopback", "timed", "libfabric", "verbs"
SOFTWARE = (LOOPBACK, TIMED)  # providers without devices
# Of transport_settings: read by EngineConfig, no provider sees them.
OF_ENGINE = CPU_KEY, FLAGS_KEY = "proxy_cpu", "arrival_flags"
MAX_NICS = 8  # kMaxNics of csrc/engine/memory_region.h
DEFAULT_NICS = 2  # for providers without devices


class Provider(NamedTuple):
    """A provider that has NICs of its own kind."""

    kind: str  # of its NICs, in topology.py
    title: str  # of the kind, in error texts
    names_key: str  # the setting that names NICs
    libraries: tuple[str, ...]  # where it looks for its library, as the api.cpp of its folder


# In order of preference.
PROVIDERS = {
    LIBFABRIC: Provider(
        "efa",
        "EFA",
        "interfaces",
        (
            "/opt/amazon/efa/lib/libfabric.so.1",
            "/opt/amazon/efa/lib64/libfabric.so.1",
            "libfabric.so.1",
        ),
    ),
    VERBS: Provider("verbs", "RDMA", "devices", ("libibverbs.so.1",)),
}
OF_KIND = {provider.kind: name for name, provider in PROVIDERS.items()}
_OF_ONE_HOST = ("devices", "interfaces", "host", "bind", "gid_index", "gid_address")
_DOCTOR = "`python -m moe_p2p doctor` says more"


class Choice(NamedTuple):
    """The provider that this rank proposes."""

    provider: str
    why: str
    automatic: bool


class Wish(NamedTuple):
    """The NICs that an engine asks for."""

    num_nics: int | None = None  # None: what the topology gives
    nics: str = ""  # names in rail order; empty: MOE_P2P_NICS, else the nearest NICs
    pci: str = ""  # address of the rank's GPU; empty: none
    share: tuple[int, int] = (0, 1)  # (i, n): i-th of n ranks of this host; used without a GPU


class Opening(NamedTuple):
    """Arguments with which an engine is opened."""

    provider: str
    num_nics: int
    settings: str


def load_problem(provider: str) -> str:
    """Returns why a provider's library cannot be loaded; empty when it can."""
    problem = ""
    for name in PROVIDERS[provider].libraries:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            problem = problem or str(error)
        else:
            return ""
    return problem


def choose(transport: str, *, nics: str = "", root: Path = Path("/")) -> Choice:
    """Returns the provider for `transport`; "auto": MOE_P2P_TRANSPORT, else by the machine."""
    if transport != "auto":
        return Choice(transport, "it was asked for", automatic=False)
    if asked := env.transport():
        return Choice(asked, "MOE_P2P_TRANSPORT asks for it", automatic=False)
    host = topology.read_host(root)
    if named := names_of(nics or env.nics()):
        host = dataclasses.replace(host, nics=tuple(_named(host, named)))
    return prefer(host)


def prefer(host: Host) -> Choice:
    """Returns the best usable provider, and why each preferred one is not usable."""
    against: list[str] = []
    for provider, (kind, title, _, _) in PROVIDERS.items():
        nics = topology.usable(host, kind)
        problem = load_problem(provider) if nics else ""
        if nics and not problem:
            found = f"{len(nics)} {title} devices ({', '.join(nic.name for nic in nics[:8])})"
            return Choice(provider, "; ".join([found, *against]), automatic=True)
        against.append(f"no {provider}: {problem or why_none(host, kind)}")
    return Choice(LOOPBACK, "; ".join(against), automatic=True)


def rail_nics(host: Host) -> list[Nic]:
    """NICs that rails are chosen from: EFA devices, else other RDMA devices."""
    return topology.usable(host, "efa") or topology.usable(host, "verbs")


def why_none(host: Host, kind: str) -> str:
    """Returns why a machine has no usable NIC of a kind."""
    problems = [f"{nic.name}: {nic.problem}" for nic in host.nics if nic.kind == kind]
    return "; ".join(problems[:8]) or f"there is no {PROVIDERS[OF_KIND[kind]].title} device"


def open_with(provider: str, settings: str, wish: Wish, *, root: Path = Path("/")) -> Opening:
    """Returns the arguments that open one rank's engine; settings that name devices are kept.

    Raises InvalidArgumentError for an unknown device name, UnavailableError when no device is
    usable.
    """
    share = wish.share
    errors.require(
        isinstance(share, tuple)
        and [type(number) for number in share] == [int, int]
        and 0 <= share[0] < share[1],
        f"share is {share!r}, must be (i, n): the i-th, from 0 on, of n engines of this host",
    )
    names, key = named_in(provider, settings), ""
    if provider in PROVIDERS:
        key = PROVIDERS[provider].names_key
    if key and not names:
        names = _rails(provider, settings, wish, root)
        named = f"{key}={':'.join(names)}" if names else ""
        settings = ",".join(filter(None, [settings, named]))
    found = len(names[:MAX_NICS]) or (1 if key else DEFAULT_NICS)
    return Opening(provider, found if wish.num_nics is None else wish.num_nics, settings)


def _rails(provider: str, settings: str, wish: Wish, root: Path) -> list[str]:
    """Device names for the provider's setting; empty where the provider finds its own."""
    asked = names_of(wish.nics or env.nics())
    kind = kind_of(provider, settings)
    if not kind:
        return asked
    host = topology.read_host(root)
    if asked:
        chosen = _named(host, asked)
    elif any(nic.kind == kind for nic in host.nics):
        nics = topology.usable(host, kind)
        if not nics:
            why = why_none(host, kind)
            raise errors.make(errors.UnavailableError, f"no {kind} device can be used: {why}")
        chosen = topology.pick(host, nics, pci=wish.pci, share=wish.share, wanted=wish.num_nics)
    else:
        chosen = []  # the provider's own error text for a missing device is the better one
    for nic in chosen:
        errors.require(
            nic.kind == kind,
            f"nics names {nic.name}, which {provider} cannot use; it is for {OF_KIND[nic.kind]}",
        )
    return [f"{nic.name}-rdm" if kind == "efa" else nic.name for nic in chosen[:MAX_NICS]]


def kind_of(provider: str, settings: str) -> str:
    """Kind of NICs that a provider uses; empty for software, and where a setting names another."""
    if provider == LIBFABRIC and setting(settings, "provider") not in ("", "efa"):
        return ""
    return PROVIDERS[provider].kind if provider in PROVIDERS else ""


def named_in(provider: str, settings: str) -> list[str]:
    """Device names in a provider's settings, in rail order."""
    key = PROVIDERS[provider].names_key if provider in PROVIDERS else "devices"
    named = setting(settings, key)
    return named.split(":") if named else []


def names_of(text: str) -> list[str]:
    """Splits "mlx5_0,mlx5_1"."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _named(host: Host, names: list[str]) -> list[Nic]:
    """Returns the NICs of these names. Raises InvalidArgumentError when one is not usable."""
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


def setting(settings: str, key: str) -> str:
    """Returns the value of a key; empty when it is not there."""
    pairs = (item.partition("=") for item in settings.split(","))
    return next((value for name, _, value in pairs if name == key), "")


def with_copy_kernel(provider: str, settings: str, device: int) -> str:
    """Adds to `settings` a kernel with which the software NIC copies memory of CUDA `device`.

    Unchanged for other providers, and where `settings` already say how to copy.
    """
    if provider != LOOPBACK or setting(settings, "copy_kernel"):
        return settings
    kernel = jit.load(device, "copy.cu", "moe_p2p_copy", {})
    return ",".join(filter(None, [settings, f"copy_kernel={kernel}"]))


def with_row_kernel(provider: str, settings: str, device: int | None) -> str:
    """Adds a kernel with which software NICs copy many rows into GPU memory of peers at once.

    device: CUDA device of the engine, None: none. Unchanged where `settings` name a kernel already,
    and, with a line at level info, where none can be compiled: copy engines then carry each row.
    """
    if device is None or provider not in (LOOPBACK, TIMED) or setting(settings, "row_kernel"):
        return settings
    try:
        kernel = jit.load(device, "rows.cu", "moe_p2p_rows", {})
    except errors.UnavailableError as error:
        log.info(f"rows of GPU {device} are copied one by one: {error}")
        return settings
    return ",".join(filter(None, [settings, f"row_kernel={kernel}"]))


def shared_settings(settings: str) -> str:
    """`settings` without keys that name devices of one host: comparable between hosts."""
    return without(settings, *_OF_ONE_HOST)


def in_environment(provider: str) -> str:
    """MOE_P2P_TRANSPORT_SETTINGS, as far as they are for `provider`, or "auto".

    They are for the transport that MOE_P2P_TRANSPORT names. Without a name, what the software NIC
    would not understand is for this machine's NICs, where it has some.
    """
    settings = env.transport_settings()
    if not settings or provider == "auto":
        return settings
    named = env.transport()
    if not named and provider == LOOPBACK:
        named = choose("auto").provider
    return settings if named in ("", provider) else for_any(settings)


def for_any(settings: str) -> str:
    """What of `settings` is for the engine, over whatever provider."""
    items = settings.split(",")
    return ",".join(item for item in items if item.partition("=")[0] in OF_ENGINE)


def without(settings: str, *keys: str) -> str:
    """`settings` without these keys."""
    items = settings.split(",")
    return ",".join(item for item in items if item.partition("=")[0] not in keys)


def pci_of(device: int) -> str:
    """PCI address of a CUDA device."""
    domain, bus, slot = (
        driver.attribute(device, f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE")
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def announce(label: str, choice: Choice, opening: Opening) -> None:
    """Logs a choice at level info."""
    names = ", ".join(named_in(opening.provider, opening.settings))
    where = names or f"{opening.num_nics} NICs"
    log.info(f"{label}: transport {opening.provider} over {where}: {choice.why}")
