"""DeepEP's normal calls on ranks of the CPU, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import deep_ep_cases as cases
from deep_ep_cases import Place, Setting
from ranks import Rank, run_threads

_Check = Callable[[Place, Setting], None]


def _body(rank: Rank, check: _Check, setting: Setting, num_nvl_bytes: int) -> None:
    place = cases.open_buffer(rank, "cpu", num_nvl_bytes=num_nvl_bytes)
    check(place, setting)
    place.buffer.destroy()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__[6:])
def test_in_worlds_of_any_size(check: _Check, world_size: int) -> None:
    run_threads(world_size, _body, check, cases.SETTINGS["bf16"], 16 << 20)


@pytest.mark.parametrize("name", [name for name in cases.SETTINGS if name != "bf16"])
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda check: check.__name__[6:])
def test_with_tokens_of_any_kind(check: _Check, name: str) -> None:
    # Little memory: 64 tokens a step, so that some settings take several.
    run_threads(3, _body, check, cases.SETTINGS[name], 1 << 20)
