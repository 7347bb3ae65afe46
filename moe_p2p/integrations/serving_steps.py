"""Each step of a serving engine ends with check(), also one that only replays CUDA graphs.

A replay makes no call, so nothing would raise what its kernels report. Pools are made where an
engine has loaded its model runner: its method for one step is wrapped then, once per process.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Checked(Protocol):
    def check(self) -> None: ...


# Module, class and method that carry out one step. A version without one is left as it is.
STEPS = (
    ("vllm.v1.worker.gpu_worker", "Worker", "execute_model"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner", "forward"),
)
_pools: weakref.WeakSet[Checked] = weakref.WeakSet()


def end_with_check(pool: Checked) -> None:
    """Makes each step of this process's engine, if it is one, end with pool.check()."""
    _pools.add(pool)
    for module, owner, method in STEPS:
        runner = getattr(sys.modules.get(module), owner, None)
        step = getattr(runner, method, None)
        if step is not None and not hasattr(step, "ends_with_check"):
            setattr(runner, method, _checked(step))


def _checked(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        for pool in tuple(_pools):
            pool.check()
        return result

    checked.ends_with_check = True  # type: ignore[attr-defined]
    return checked
