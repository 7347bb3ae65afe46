"""Modules that have moved are found under their old names for one release."""

from __future__ import annotations

import importlib
import sys

import pytest

from moe_p2p import aliases, kv
from moe_p2p.kv import lease_keeper


@pytest.mark.parametrize("old", aliases.MOVED)
def test_a_moved_module_is_found_with_a_warning(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, new = f"moe_p2p.{old}", f"moe_p2p.{aliases.MOVED[old]}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns((DeprecationWarning, FutureWarning), match=f"{name} is {new} now"):
        found = importlib.import_module(name)
    assert found is importlib.import_module(new)


def test_a_renamed_class_is_found_with_a_warning() -> None:
    found = importlib.import_module("moe_p2p.weights")
    with pytest.warns(DeprecationWarning, match=r"WeightGenerator is moe_p2p\.weights.*EngineRank"):
        assert found.WeightGenerator is found.WeightEngineRank
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_other_names_are_not_found() -> None:
    for name in ("moe_p2p.nothing", "moe_p2p.pools", "moe_p2p.integrations.nothing"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_the_class_that_keeps_leases_is_found_under_its_old_name() -> None:
    for module in (kv, lease_keeper):
        with pytest.warns(DeprecationWarning, match=r"Membership is moe_p2p\.kv.*LeaseKeeper now"):
            assert module.Membership is kv.LeaseKeeper
    with pytest.raises(AttributeError, match=r"'moe_p2p\.kv' has no attribute 'Member'"):
        kv.Member  # noqa: B018
