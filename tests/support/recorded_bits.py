"""What eager calls return while tests run, as digests in a file: a plugin of pytest.

    MOE_P2P_RECORD=FILE python -m pytest -p tests.support.recorded_bits tests/moe

Each call adds a line: its test, its name and a digest of what it returned, or the error's type
("lost" if another rank was).
Processes that a test forks add theirs. Times, handles and rows without a token are left out: they
differ from run to run. So do calls that a compiler or a mode sees, which are never direct.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, errors
from moe_p2p.library import num_modes, watched
from moe_p2p.moe import bare
from moe_p2p.moe.dispatched import Dispatched
from moe_p2p.moe.pool import ReleasingAllToAll

FILE = "MOE_P2P_RECORD"
# Clocks decide which of these a rank hears of one that is gone, and in which call.
LOST = (errors.AbortedError, errors.ClosedError, errors.PeerDeadError, errors.TimeoutError)


class _Thread(threading.local):
    calls = False  # whether it is in one of the calls


_thread = _Thread()


def read(file: Path) -> dict[str, Counter[str]]:
    """Returns how often each test had each line."""
    found: dict[str, Counter[str]] = {}
    for line in file.read_text().splitlines():
        test, _, rest = line.partition(" (call) ")
        found.setdefault(test, Counter())[rest] += 1
    return found


def set_rows(made: Dispatched) -> Tensor:
    """Which rows have a token, [R]."""
    is_set = torch.zeros(made.row_weights.shape[0], dtype=torch.bool, device="cpu")
    offsets, counts = made.offsets.tolist(), made.counts.tolist()
    if made.row_topk is not None:
        is_set[: offsets[-1]] = True
    else:
        for first, count in zip(offsets, counts, strict=False):
            is_set[first : first + count] = True
    return is_set


def of_dispatch(made: Dispatched) -> Iterable[Tensor | None]:
    rows = set_rows(made)
    by_row = [made.x, made.scales, *made.extras, made.row_weights, made.row_topk, made.source]
    for each in by_row:
        if each is not None:
            yield (each.flatten(0, 1) if each.dim() == 3 else each)[rows]
    yield from (made.counts, made.offsets, made.ranges, made.topk_idx)


def digest_of(tensors: Iterable[Tensor | None]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for each in tensors:
        digest.update(f"{None if each is None else (each.dtype, tuple(each.shape))}".encode())
        if each is not None:
            data = each.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(bytes(data.tolist()))
    return digest.hexdigest()


def recorded(name: str, call: Callable[..., Any], tensors: Callable[[Any], Any]) -> Any:
    @functools.wraps(call)
    def run(*given: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling() or watched() or num_modes() or _thread.calls:
            return call(*given, **more)
        _thread.calls = True
        try:
            made = call(*given, **more)
        except Exception as error:
            add(f"{name} {'lost' if isinstance(error, LOST) else type(error).__name__}")
            raise
        finally:
            _thread.calls = False
        if made is not None:  # else it was not made, and another one follows
            add(f"{name} {digest_of(tensors(made))}")
        return made

    return run


def add(line: str) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{os.environ['PYTEST_CURRENT_TEST']} {line}\n")


def without_times(made: Any) -> list[Tensor]:
    """Of a combine: wait_ticks are the only int64 it returns."""
    tensors = made if isinstance(made, tuple) else (made,)
    return [each for each in tensors if each.dtype != torch.int64]


def pytest_configure() -> None:
    for kind, name, tensors in (
        (AllToAll, "dispatch_with", of_dispatch),
        (AllToAll, "combine_with", without_times),
        (bare, "dispatch", of_dispatch),
        (bare, "combine", without_times),
        (ReleasingAllToAll, "dispatch_counted", lambda made: of_dispatch(made[0])),
    ):
        of_all = name.removesuffix("_with")
        setattr(kind, name, recorded(of_all, getattr(kind, name), tensors))


def pytest_runtest_setup() -> None:
    """Tests that draw without a seed draw the same in both runs, also in processes they fork."""
    torch.manual_seed(1)
