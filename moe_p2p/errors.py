"""What can go wrong, as exception types.

C++ says `moe_p2p [timeout] rank 3 ...`; the word in brackets chooses the type and the text stays as
it is. Every type is a RuntimeError, so code compiled by torch.compile, where the plain RuntimeError
comes through, may be guarded by the same `except`.
"""

from __future__ import annotations

import builtins
import re


class MoeP2pError(RuntimeError):
    """Base of all errors of this package."""


class InvalidArgumentError(MoeP2pError, ValueError):
    """The caller's values are off. Nothing was sent; the object stays usable."""


class TimeoutError(MoeP2pError, builtins.TimeoutError):
    """A deadline passed; the text says who, phase and step, what was expected and what came."""


class PeerDeadError(MoeP2pError):
    """The peer's process or link is gone."""


class RemoteAccessError(MoeP2pError):
    """The peer refused the address or the key of a write."""


class TransportError(MoeP2pError):
    """The NIC, its driver or the store reported a failure."""


class ProtocolError(MoeP2pError):
    """A peer sent something that this step does not expect: calls differ between ranks."""


class AbortedError(MoeP2pError):
    """Another part of this object, or another rank during set-up, failed first, or a signal did."""


class ClosedError(MoeP2pError):
    """The object was closed."""


class ResourceExhaustedError(MoeP2pError):
    """A table, a queue or shared memory is full."""


class UnavailableError(MoeP2pError):
    """Hardware or a library that was asked for is not there."""


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
}
_WORDS = {error: word for word, error in _BY_WORD.items()}
_PATTERN = re.compile(r"moe_p2p \[([a-z ]+)\] .*", re.DOTALL)
# What torch says before an op of ours is called with something that its schema does not allow.
_REFUSED = re.compile(
    r"moe_p2p::\w+\(\) Expected a value of type '(?P<wanted>.+?)' for argument '(?P<name>\w+)' but "
    r"instead found type '(?P<kind>.+?)'\.\nPosition: \d+\nValue: (?P<value>.*)"
)
_WANTED = {
    "Tensor": "a torch.Tensor",
    "Optional[Tensor]": "a torch.Tensor or None",
    "List[Tensor]": "torch.Tensors",
    "int": "an int",
    "bool": "a bool",
}
_SHOWN = ("NoneType", "bool", "int", "float", "str")  # types whose values are short


def typed(error: RuntimeError) -> RuntimeError:
    """`error` as the type that its text names, or as it is when the text is not ours."""
    if isinstance(error, MoeP2pError):
        return error
    found = _PATTERN.search(str(error))
    if found is None:
        refused = _REFUSED.match(str(error))
        return error if refused is None else _not_of_the_schema(**refused.groupdict())
    return _BY_WORD.get(found[1], MoeP2pError)(found[0])


def _not_of_the_schema(name: str, kind: str, value: str, wanted: str) -> MoeP2pError:
    if name == "num_tokens_host":
        name = "num_tokens"
    wanted = "a torch.dtype" if name.endswith("dtype") else _WANTED.get(wanted, wanted)
    return _wrong_type(name, kind, value, wanted)


def _wrong_type(name: str, kind: str, shown: str, wanted: str) -> MoeP2pError:
    help_ = ""
    if wanted.startswith("a torch.Tensor") and kind in ("list", "ndarray") and name != "out":
        help_ = f"; pass torch.as_tensor({name})"
    given = shown if kind in _SHOWN else f"of type {kind}"
    return make(InvalidArgumentError, f"{name} is {given}, must be {wanted}{help_}")


def wrong_type(name: str, value: object, wanted: str = "a torch.Tensor") -> MoeP2pError:
    """An argument that is of another type than it must be."""
    return _wrong_type(name, type(value).__name__, repr(value), wanted)


def require_type(
    name: str, value: object, kinds: type | tuple[type, ...], wanted: str = "a torch.Tensor"
) -> None:
    """Raises InvalidArgumentError unless `value` is an instance of one of `kinds`."""
    if not isinstance(value, kinds):
        raise wrong_type(name, value, wanted)


def make(kind: type[MoeP2pError], message: str) -> MoeP2pError:
    """An error raised in Python, with the same prefix as those of C++."""
    return kind(f"moe_p2p [{_WORDS[kind]}] {message}")


def require(condition: bool, message: str) -> None:
    """Raises InvalidArgumentError unless `condition` holds."""
    if not condition:
        raise make(InvalidArgumentError, message)
