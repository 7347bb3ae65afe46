"""Takes out of a report what is nobody else's: secrets, names of hosts and users, addresses.

Each rank takes its own secrets out before anything leaves it, rank 0 the names of all hosts. Values
of variables are taken out wherever they stand, and whatever looks like an address, a key or a home.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import platform
import re
from collections.abc import Iterable, Sequence
from typing import Any

from moe_p2p import env

_ADDRESS = re.compile(r"(?<![\w.:])\[?(?:[0-9a-fA-F:]*:[0-9a-fA-F:.]*|\d+(?:\.\d+){3})(?![\w])")
_VERSION = re.compile(r"\.so\.(\d+(?:\.\d+){3})")  # of a library; it may stand before its path, too
_PATTERNS = {
    r"\bip-\d+-\d+-\d+-\d+\b": "host",
    r"\b(?:[0-9a-fA-F]{2}[:-]){5,19}[0-9a-fA-F]{2}\b": "address",
    r"\b(?:[0-9a-fA-F]{4}:){3}[0-9a-fA-F]{4}\b": "address",  # a GUID
    r"\b(?:GPU|MIG)-[0-9a-f-]{8,}": "GPU-id",
    r"[\w.+-]+@[\w-]+\.[\w.-]+": "address",
    r"\b(?:[\w-]+\.)+(?:com|org|net|edu|gov|mil|internal|lan|corp|intra)\b(?!\.)": "host",
    r"\b(?:hf_|sk-|gh[a-z]_|AKIA|xox[a-z]-|eyJ)[\w.-]{8,}": "secret",
    r"/(home|Users|users|fsx|scratch|data)/[^/\s'\",:]+": r"/\1/user",
}
_WELL_KNOWN = {"root", "user", "host", "localhost", "none", "true", "false", "cpu", "cuda"}
_LEAST_SECRET = 4  # characters: a shorter value stands by chance, and is taken out as a whole word


class Private:
    """secrets, users: values; hosts: for each host, what it is called."""

    def __init__(
        self, secrets: Iterable[str], users: Iterable[str], hosts: Sequence[Iterable[str]]
    ) -> None:
        self._secrets = sorted({*secrets} - {""}, key=len, reverse=True)
        names = dict.fromkeys(_names(users), "user")
        for number, called in enumerate(hosts):
            for name in _names(called):  # of several hosts, as the one of the rendezvous: of none
                names[name] = (
                    f"host-{number}" if names.get(name) in (None, f"host-{number}") else "host"
                )
        self._names = {
            re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE): instead
            for name, instead in sorted(names.items(), key=lambda item: -len(item[0]))
        }

    def text(self, text: str) -> str:
        for secret in self._secrets:
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "secret")
            else:
                text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "secret", text)
        for name, instead in self._names.items():
            text = name.sub(instead, text)
        for each, instead in _PATTERNS.items():
            text = re.sub(each, instead, text)
        versions = _VERSION.findall(text)
        return _ADDRESS.sub(lambda it: it[0] if it[0] in versions else _instead(it), text)

    def all_of(self, value: Any) -> Any:
        """The same of all texts in lists and dicts, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.all_of(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.all_of(each) for each in value]
        return value


def own_secrets() -> Private:
    """What a rank takes out of its results before it sends them."""
    return Private(env.private()["secret"], (), ())


def names_here() -> dict[str, list[str]]:
    """Names of this host, and of its users."""
    private, node = env.private(), platform.node()
    users = list(private["user"])
    with contextlib.suppress(OSError, KeyError):  # no name for this number
        users.append(getpass.getuser())
    return {"hosts": [node, node.partition(".")[0], *private["host"]], "users": users}


def _names(found: Iterable[str]) -> list[str]:
    """Without those that are no names, as localhost; addresses have a pattern of their own."""
    names = (re.sub(r":\d+$", "", name) for each in found for name in re.split(r"[,\s]+", each))
    return [
        name
        for name in names
        if len(name) > 1 and name.lower() not in _WELL_KNOWN and not name.isdecimal()
    ]


def _instead(found: re.Match[str]) -> str:
    """Of what may be an address; ports, times, PCI places and versions stay."""
    text = found[0].lstrip("[").rstrip(".:")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return found[0].replace(text, "address")
    host, _, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return found[0].replace(text, f"address:{port}")
    return found[0]
