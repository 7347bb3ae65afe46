"""The package's exception types.

C++ error texts look like `moe_p2p [timeout] rank 3 ...`: the word in brackets chooses the type, the
text is kept. Every type is a RuntimeError, so one `except` also covers code compiled by
torch.compile, which raises the plain RuntimeError.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable


class MoeP2pError(RuntimeError):
    """Base of all errors of this package."""


class InvalidArgumentError(MoeP2pError, ValueError):
    """The caller passed a wrong value. Nothing was sent; the object stays usable."""


class TimeoutError(MoeP2pError, builtins.TimeoutError):
    """A deadline passed; the text names ranks, phase, step, what was expected and what arrived."""


class PeerDeadError(MoeP2pError):
    """The peer's process or link is gone."""


class RemoteAccessError(MoeP2pError):
    """The peer refused the address or the key of a write."""


class TransportError(MoeP2pError):
    """The NIC, its driver or the store reported a failure."""


class ProtocolError(MoeP2pError):
    """A peer sent data that does not belong to this step: calls differ between ranks."""


class AbortedError(MoeP2pError):
    """Another part of this object, or another rank in set-up, failed first, or a signal came."""


class ClosedError(MoeP2pError):
    """The object was closed."""


class ResourceExhaustedError(MoeP2pError):
    """A table, a queue or shared memory is full."""


class UnavailableError(MoeP2pError):
    """Hardware or a library that is needed is missing."""


class CancelledError(MoeP2pError):
    """The request was cancelled; the text says what of it was posted."""


_BY_WORD: dict[str, type[MoeP2pError]] = {
    "invalid argument": InvalidArgumentError,
    "timeout": TimeoutError,
    "peer dead": PeerDeadError,
    "remote access": RemoteAccessError,
    "transport": TransportError,
    "protocol": ProtocolError,
    "aborted": AbortedError,
    "closed": ClosedError,
    "resource exhausted": ResourceExhaustedError,
    "unavailable": UnavailableError,
    "cancelled": CancelledError,
}
_WORDS = {error: word for word, error in _BY_WORD.items()}
_PATTERN = re.compile(r"moe_p2p \[([a-z ]+)\] .*", re.DOTALL)
# torch's error text when an argument does not fit the schema of one of our ops.
_REFUSED = re.compile(
    r"moe_p2p::\w+\(\) Expected a value of type '(?P<wanted>.+?)' for argument '(?P<name>\w+)' but "
    r"instead found type '(?P<kind>.+?)'\.\nPosition: \d+\nValue: (?P<value>.*)"
)
_WANTED = {
    "Tensor": "a torch.Tensor",
    "Optional[Tensor]": "a torch.Tensor or None",
    "List[Tensor]": "torch.Tensors",
    "Optional[List[Tensor]]": "torch.Tensors",  # Python gives a list in each call
    "int": "an int",
    "bool": "a bool",
}
_SHOWN = ("NoneType", "bool", "int", "float", "str")  # types whose values are short


def typed(error: RuntimeError) -> RuntimeError:
    """Returns `error` as the type named in its text; unchanged when the text is not ours."""
    if isinstance(error, MoeP2pError):
        return error
    found = _PATTERN.search(str(error))
    if found is None:
        return _refused_by_torch(error)
    return _BY_WORD.get(found[1], MoeP2pError)(found[0])


def _refused_by_torch(error: RuntimeError) -> RuntimeError:
    refused = _REFUSED.match(str(error))
    return error if refused is None else _not_of_the_schema(**refused.groupdict())


def _not_of_the_schema(name: str, kind: str, value: str, wanted: str) -> MoeP2pError:
    if name == "num_tokens_host":
        name = "num_tokens"
    wanted = "a torch.dtype" if name.endswith("dtype") else _WANTED.get(wanted, wanted)
    return _wrong_type(name, kind, value, wanted)


def _wrong_type(name: str, kind: str, shown: str, wanted: str) -> MoeP2pError:
    help_ = ""
    if wanted.startswith("a torch.Tensor") and kind in ("list", "ndarray") and name != "out":
        help_ = f"; pass torch.as_tensor({name if name.isidentifier() else '...'})"
    given = shown if kind in _SHOWN else f"of type {kind}"
    return make(InvalidArgumentError, f"{name} is {given}, must be {wanted}{help_}")


def wrong_type(name: str, value: object, wanted: str = "a torch.Tensor") -> MoeP2pError:
    """Returns the error for an argument of the wrong type."""
    return _wrong_type(name, type(value).__name__, repr(value), wanted)


def require_type(
    name: str, value: object, kinds: type | tuple[type, ...], wanted: str = "a torch.Tensor"
) -> None:
    """Raises InvalidArgumentError unless `value` is an instance of one of `kinds`."""
    if not isinstance(value, kinds):
        raise wrong_type(name, value, wanted)


def ranks_of(name: str, given: object) -> list[int]:
    """Returns `given` as a list. Raises InvalidArgumentError unless it is an iterable of different
    ints, not bools."""
    require_type(name, given, Iterable, "ranks, as [2, 3]")
    ranks: list[int] = list(given)  # type: ignore[call-overload]
    for rank in ranks:
        require_int(f"a rank of {name}", rank)
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    require(not twice, f"{name}: ranks {twice} are given more than once")
    return ranks


def require_int(name: str, given: object) -> None:
    """Raises InvalidArgumentError unless it is an int, and not a bool, which is one for Python."""
    require_type(name, given, int, "an int")
    require(not isinstance(given, bool), f"{name} is {given}, must be an int")


def make(kind: type[MoeP2pError], message: str) -> MoeP2pError:
    """Returns an error with the same prefix as errors of C++."""
    return kind(f"moe_p2p [{_WORDS[kind]}] {message}")


def require(condition: bool, message: str) -> None:
    """Raises InvalidArgumentError unless `condition` holds."""
    if not condition:
        raise make(InvalidArgumentError, message)
