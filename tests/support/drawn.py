"""Settings of tests whose cases hypothesis draws: the same ones each time, or as many as wanted."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from hypothesis import HealthCheck, settings

LARGE = (HealthCheck.too_slow, HealthCheck.data_too_large)


def drawn(
    variable: str, usual: int, *, suppressed: Collection[HealthCheck] = LARGE, **more: Any
) -> settings:
    """As many cases as the environment's variable says, others each time; else `usual` ones."""
    wanted = os.environ.get(variable)
    return settings(
        max_examples=int(wanted or usual),
        derandomize=wanted is None,
        deadline=None,  # other tests take the CPU
        database=None,
        print_blob=True,
        suppress_health_check=suppressed,
        **more,
    )
