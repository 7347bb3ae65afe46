"""Ranges of NVTX, which Nsight Systems shows on its timeline (csrc/platform/ranges.h).

MOE_P2P_NVTX=1 turns them on; torch.profiler needs nothing, as it sees every op.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_p2p import env, errors, log
from moe_p2p.library import call

_ops = torch.ops.moe_p2p
# That of CUDA 13, and the one before it, which torch may have loaded.
_FILES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")


def turn_on_if_asked() -> None:
    """Warns where no library of NVTX can be opened."""
    if not env.nvtx():
        return
    try:
        call(_ops.ranges_open.default, [*_in_wheels(), *_FILES])
    except errors.UnavailableError as error:
        log.warning(f"MOE_P2P_NVTX is set, and there are no ranges: {error}")


def _in_wheels() -> list[str]:
    """As NVIDIA's wheels have them, beside torch."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    names = [
        path for file in _FILES for each in folders for path in Path(each).glob(f"*/lib/{file}")
    ]
    return [str(path) for path in names]


@contextmanager
def span(name: str) -> Iterator[None]:
    """For what is done now and then: both ends are ops, also where ranges are off."""
    _ops.range_push.default(name)
    try:
        yield
    finally:
        _ops.range_pop.default()
