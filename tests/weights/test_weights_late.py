"""A rank that an update waits for is named at half of its deadline, and counted."""

from __future__ import annotations

import re
import time

import pytest

import moe_p2p
from tests.support.weights_fleet import MODELS, Fleet, fleet

TIMEOUT_S = 6.0


def lines_until(
    text: str, found: Fleet, ranks: list[int], capfd: pytest.CaptureFixture[str]
) -> str:
    """What is logged until `text` is; engine ranks of `ranks` go on meanwhile."""
    err = ""
    while text not in err:
        for i in ranks:
            found.engine_ranks[i].step()
        time.sleep(0.01)
        err += capfd.readouterr().err
    return err


def test_who_is_late_is_named_by_those_who_wait(capfd: pytest.CaptureFixture[str]) -> None:
    model = MODELS["fused"]
    with fleet(model, timeout_s=TIMEOUT_S) as found:
        found.finish(found.train(1))
        assert "waited" not in capfd.readouterr().err

        last = found.trainers.pop()
        running = found.train(2)
        found.trainers.append(last)
        err = lines_until("generator 1 has waited", found, [0, 1], capfd)
        values = model.trainer_tensors(last.rank, model.values(2))
        running.append(found.pool.submit(last.update, 2, values))
        found.finish(running)
        err += capfd.readouterr().err
        limit = r"has waited \d\.\d s, of at most 6: \d+ immediates counted; not done: trainer 3"
        for name in ("generator 0", "generator 1"):
            assert len(re.findall(f"{name} {limit}\n", err)) <= 1
            assert err.count(f"{name} has waited") == err.count(f"{name}: a wait is over after")
        assert re.search(f"generator 1 {limit}\n", err)

        running = found.train(3)
        err = lines_until("for the update", found, [0], capfd)
        found.finish(running)
        found.check(3)
        err += capfd.readouterr().err
        text = "a word from generator 1 for the update"
        assert re.search(rf"trainer 0 has waited \d+\.\d s, of at most [\d.]+: {text}\n", err)
        assert len(re.findall(rf"trainer 0: a wait is over after \d+\.\d s: {text}\n", err)) == 1

        text = moe_p2p.prometheus_text(*found.trainers, *found.engine_ranks)
        assert 'moe_p2p_weights_stragglers_total{name="trainer 0"} 1\n' in text
        assert 'moe_p2p_weights_version{name="generator 1"} 3.0\n' in text
        assert 'moe_p2p_weights_attempts_total{name="trainer 3"} 3\n' in text
        written = re.findall(r'weights_written_bytes_total{name="trainer \d"} (\d+)\n', text)
        nics = re.findall(
            r'nic_written_bytes_total{engine="\d+",name="trainer \d",.*} (\d+)\n', text
        )
        assert sum(map(int, written)) == sum(map(int, nics)) > 0
