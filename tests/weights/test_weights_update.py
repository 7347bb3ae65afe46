"""Updates over real engines and the software NIC that reorders: every byte, versions, failures."""

from __future__ import annotations

import pytest

from tests.support.weights_fleet import MODELS, fleet


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_twenty_updates_equals_the_reference(name: str, mode: str) -> None:
    with fleet(MODELS[name], mode=mode, poison=True) as found:
        for version in range(1, 21 if mode == "shadow" else 6):
            if mode == "in_place":
                for generator in found.generators:
                    generator.begin()
            found.finish(found.train(version, verify=version % 2 == 0))
            found.check(version)
        assert found.trainers[0].live() == {version: 2}
