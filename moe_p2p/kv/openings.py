"""What receivers said of requests that a sender has not started, and what those that it gave up are
answered. Used by moe_p2p/kv/sender.py, under its lock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from moe_p2p.kv.channel import Message
from moe_p2p.kv.chunks import int32_tensor
from moe_p2p.kv.pair import Pair

_KEPT = 4096  # names of requests, of each kind
_Key = TypeVar("_Key")


@dataclass(frozen=True, eq=False)
class Opened:
    """A receiver's message: where the request's bytes go, and by what they are counted."""

    pair: Pair
    request: str
    nonce: int
    imm: int
    row: int
    begin: int
    total: int
    pull: bool
    verify: bool
    pages: dict[str, Tensor]

    @staticmethod
    def of(pair: Pair, message: Message) -> Opened:
        fields = message.fields
        return Opened(
            pair,
            str(fields["request"]),
            nonce=int(fields["nonce"]),
            imm=int(fields["imm"]),
            row=int(fields["row"]),
            begin=int(fields["begin"]),
            total=int(fields["total"]),
            pull=bool(fields["pull"]),
            verify=bool(fields["verify"]),
            pages=dict(zip(fields["groups"], map(int32_tensor, message.arrays), strict=True)),
        )


class Openings:
    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], Opened] = {}  # by receiver and request
        # By instance and request, "" for any instance: what a receiver that opens it later hears.
        self._given_up: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._declined: OrderedDict[str, str] = OrderedDict()  # by request

    def begin(self, target: str, request: str) -> str:
        """The request is started, to `target` or to any. Returns why a receiver declined it."""
        self._given_up.pop((target, request), None)
        return self._declined.pop(request, "")

    def add(self, opened: Opened) -> None:
        """Keeps it until the request is started, or answers it where the request was given up."""
        pair, request = opened.pair, opened.request
        for instance in (pair.worker.instance, ""):
            why = self._given_up.get((instance, request))
            if why is not None:
                pair.send("drained", nonce=opened.nonce, why=why)
                return
        self._declined.pop(request, None)
        self._opened[pair.name, request] = opened

    def take(self, receiver: str, request: str) -> Opened | None:
        return self._opened.pop((receiver, request), None)

    def instance_of(self, request: str) -> str | None:
        """One that has opened the request."""
        for opened in self._opened.values():
            if opened.request == request:
                return opened.pair.worker.instance
        return None

    def begin_of(self, request: str) -> int | None:
        begins = [each.begin for each in self._opened.values() if each.request == request]
        return min(begins, default=None)

    def give_up(self, target: str, request: str, why: str) -> None:
        _keep(self._given_up, (target, request), why)
        for key, opened in list(self._opened.items()):
            if opened.request == request and target in ("", opened.pair.worker.instance):
                del self._opened[key]
                opened.pair.send("drained", nonce=opened.nonce, why=why)

    def decline(self, request: str, why: str) -> None:
        if ("", request) not in self._given_up:
            _keep(self._declined, request, why)

    def cancel(self, pair: Pair, nonce: object, why: str) -> None:
        """A receiver gives up what it has opened: where that is not started yet, `begin` says so,
        unless a receiver opens it anew before."""
        for opened in list(self._opened.values()):
            if opened.pair is pair and opened.nonce == nonce:
                self.decline(opened.request, why)
        self.forget(pair, nonce)

    def forget(self, pair: Pair, nonce: object = None) -> None:
        """What the pair has opened: the request of `nonce`, or all of them."""
        for key, opened in list(self._opened.items()):
            if opened.pair is pair and nonce in (None, opened.nonce):
                del self._opened[key]


def _keep(kept: OrderedDict[_Key, str], key: _Key, why: str) -> None:
    kept[key] = why
    while len(kept) > _KEPT:
        kept.popitem(last=False)
