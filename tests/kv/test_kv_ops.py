"""Ops of KV transfer: their schemas and fake kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from moe_p2p import Engine, EngineConfig, InvalidArgumentError, PageRows
from moe_p2p.engine.transfers import LayerPlace

ops = torch.ops.moe_p2p
ONCE = ("test_schema", "test_faketensor")


def test_signals() -> None:
    words, step = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cache = torch.zeros(64, dtype=torch.uint8)
    with Engine(EngineConfig(transport="loopback", timeout_s=10)) as engine:
        arguments = (engine.number, words, step, [cache], 0)
        number = ops.signals_create(*arguments)
        with FakeTensorMode() as mode:  # opcheck would pass a copy of the cache, which is refused
            assert ops.signal(number, 1, mode.from_tensor(cache)) is None
        step.fill_(7)
        ops.signal(number, 1, cache)
        assert words.tolist() == [0, 7]
        ops.signals_close(number)
        opcheck(ops.signals_create.default, arguments, test_utils="test_schema")


def test_layers_are_written_in_one_call() -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    pages, to = torch.tensor([0, 2]), torch.tensor([3, 1])
    with Engine(EngineConfig(transport="loopback", timeout_s=10)) as engine:
        memory = engine.register(source)
        region = engine.resolve(engine.register(target).descriptor)
        places = engine.layer_places(
            [
                LayerPlace(memory, 0, region, 0, layer=0),
                LayerPlace(memory, 32, region, 32, layer=1),
            ]
        )
        how: dict[str, Any] = {"pages": pages, "region_pages": to}
        rows = PageRows(page_bytes=8)
        requests = engine.write_layers(places, rows=rows, imm=5, **how)
        for request in requests:
            request.wait()
        assert engine.wait_imm(5, 2 * engine.num_nics) == 2 * engine.num_nics
        assert torch.equal(target.view(2, 4, 8)[:, to], source.view(2, 4, 8)[:, pages])
        with pytest.raises(InvalidArgumentError, match=r"outside|beyond|registered"):
            engine.write_layers(places, rows=PageRows(page_bytes=80, row_bytes=80), **how)
        arguments = (engine.number, places, rows.numbers, pages, to)
        for util in ONCE:
            opcheck(ops.engine_write_layers.default, arguments, test_utils=util)


def test_requests_of_any_memory_are_written_in_one_call() -> None:
    sources = torch.arange(64, dtype=torch.uint8), torch.arange(64, 128, dtype=torch.uint8)
    targets = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with Engine(EngineConfig(transport="loopback", timeout_s=10)) as engine:
        ours = [engine.register(each).number for each in sources]
        theirs = [engine.resolve(engine.register(each).descriptor).number for each in targets]
        # One of two pages; one of a page that is two rows with gaps on this side.
        rows = [(ours[0], theirs[1], 8, 8, 8, 8, 0, 2), (ours[1], theirs[0], 8, 4, 16, 4, 2, 1)]
        table, pages, to = torch.tensor(rows), torch.tensor([0, 16, 3]), torch.tensor([40, 8, 1])
        for request in engine.write_all(table, pages, to, imm=5):
            request.wait()
        assert engine.wait_imm(5, 2 * engine.num_nics) == 2 * engine.num_nics
        wanted = torch.zeros(2, 64, dtype=torch.uint8)
        wanted[1, 40:48], wanted[1, 8:16] = sources[0][:8], sources[0][16:24]
        wanted[0, 1:5], wanted[0, 5:9] = sources[1][3:7], sources[1][19:23]
        assert torch.equal(torch.stack(targets), wanted)
        for column, value, why in ((6, 3, "pages 3 to 4 of 3"), (2, 300, "registered bytes")):
            bad = table.clone()
            bad[1, column] = value
            with pytest.raises(InvalidArgumentError, match=why):
                engine.write_all(bad, pages, to)
        arguments = (engine.number, table, pages, to)
        for util in ONCE:
            opcheck(ops.engine_write_all.default, arguments, test_utils=util)


@pytest.mark.parametrize("util", ONCE)
@pytest.mark.parametrize("gather", [True, False])
def test_copy_rows(util: str, gather: bool) -> None:
    memory, packed = torch.arange(64, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    units = torch.tensor([3, 1])
    arguments = (memory, packed, units, 0, 16, 8, 1, 8, 0, gather)
    opcheck(ops.copy_rows.default, arguments, test_utils=util)
