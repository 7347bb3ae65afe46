"""Mooncake's constants and return codes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from moe_p2p import log

# As the wheel gives them.
FAILED, NOT_REGISTERED, REGISTERED, NO_PEER = -1, -3, -7, -102
PENDING, COMPLETED = 0, 1


class TransferOpcode(enum.Enum):
    """What a transfer does with the peer's memory."""

    Read = 0
    Write = 1


@dataclass
class TransferNotify:
    """A message that the peer finds in get_notifies() once a transfer is done."""

    name: str = ""
    msg: str = ""


_P = ParamSpec("_P")


def instead_of_errors(
    code: int, name: str = ""
) -> Callable[[Callable[_P, int]], Callable[_P, int]]:
    """Makes a call that fails log the error and return `code`. name: of the caller's call, where it
    is not the method's."""

    def of(method: Callable[_P, int]) -> Callable[_P, int]:
        @functools.wraps(method)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> int:
            try:
                return method(*args, **kwargs)
            except (RuntimeError, OSError, ValueError, OverflowError) as error:
                log.warning(f"mooncake: {name or method.__name__} returns {code}: {error}")
                return code

        return wrapped

    return of
