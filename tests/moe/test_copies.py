"""Engines and communicators are not copied or pickled, by themselves or within a module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_p2p import AllToAllConfig, Engine, EngineConfig
from moe_p2p.layer import MoELayer
from tests.support.cases import make, steps
from tests.support.ranks import Rank, on_ranks

COPIES: list[Callable[[Any], object]] = [
    copy.copy,
    copy.deepcopy,
    pickle.dumps,
    lambda thing: torch.save(thing, io.BytesIO()),
]


@on_ranks(2)
def test_a_communicator_is_not_copied_and_goes_on(rank: Rank) -> None:
    with make(rank) as comm:
        config = comm.config
        layer = MoELayer(config.hidden_dim, config.num_experts, topk=2, ffn_dim=8, all_to_all=comm)
        for thing in (comm, layer):
            for made in COPIES:
                if made is copy.copy and thing is layer:
                    continue  # another module object with the same communicator
                with pytest.raises(TypeError, match="AllToAll cannot be copied, pickled or"):
                    made(thing)
        shared = copy.deepcopy(layer, {id(comm): comm})  # as the error says
        assert shared.all_to_all is comm
        assert next(shared.parameters()) is not next(layer.parameters())
        assert isinstance(pickle.loads(pickle.dumps(config)), AllToAllConfig)
        assert layer.state_dict()
        steps(comm)


def test_an_engine_is_not_copied() -> None:
    with Engine(EngineConfig(transport="loopback")) as engine:
        memory = engine.register(torch.zeros(4))
        for made in COPIES:
            with pytest.raises(TypeError, match="Engine cannot be copied, pickled or saved"):
                made(engine)
        for made in COPIES[1:3]:
            with pytest.raises(TypeError, match="Engine cannot be copied"):
                made(memory)
