"""`bench --check`: right on CPU ranks, and each kind of line says so where something is not."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll, errors
from moe_p2p.bench import command, conformance, conformance_faults, conformance_ranks, worker
from moe_p2p.bench.conformance_faults import Fault, Spare
from moe_p2p.bench.conformance_ranks import LAYOUTS, TYPES, Ranks
from moe_p2p.bench.gpu_calls import on_device
from moe_p2p.bench.options import Options, parse
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools import launch
from tests.support import warm

SMALL = ["--check", "--device=cpu", "--ranks=2", "--tokens=4", "--hidden=256", "--topk=2"]
SMALL += ["--experts=4", "--checks=2"]
FAULTS = (
    "configurations that differ are refused",
    "a wrong argument is refused",
    "a rank that stays away from dispatch is named",
    "a rank that stays away from combine is named",
    "a rank that closes is named",
    "calls that differ are reported",
    "a process that is killed is named",
    "a NIC that fails is reported",
)


@pytest.mark.timeout(300)
def test_every_line_of_ranks_on_cpus() -> None:
    program = ("-m", "moe_p2p", "bench", *SMALL, "--ranks-per-node=1")
    done = warm.run(*program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ... ") for line in done.stdout.splitlines() if " ... " in line)
    assert all(re.fullmatch(r"ok, \d+\.\d s|skipped: .*", end) for end in lines.values()), lines
    kinds = (*TYPES, "calls of three steps", "extras", "bf16, NaN and infinities", "gradients")
    halves = ("dispatch in halves", "combine in halves", "both in halves, two calls open")
    alone = ("dispatch alone", "combine alone, weights given late")
    for layout in LAYOUTS:
        for kind in (*kinds, *halves, *alone, "NICs that reorder what they may"):
            assert lines[f"{layout}, {kind}"].startswith("ok"), kind
    for name in ("a rank that stays away is masked, the others go on", *FAULTS):
        assert lines[name].startswith("ok"), name
    assert lines["graphs"] == "skipped: ranks are on CPUs"


def test_all_of_a_calls_tensors_are_where_its_ranks_are() -> None:
    idx, weights = torch.zeros(2, 1).long(), torch.ones(2, 1)
    extras = (torch.zeros(2, 3), torch.zeros(2).byte())
    tokens = Tokens(x=torch.zeros(2, 8), topk_idx=idx, topk_weights=weights, extras=extras)
    given = on_device(tokens, "meta")
    tensors = (given.x, given.topk_idx, given.topk_weights, *given.extras)
    assert {str(each.device) for each in tensors if each is not None} == {"meta"}


def test_nodes_of_both_sizes_are_checked_unless_one_is_asked_for() -> None:
    assert [each.ranks_per_node for each in parse([*SMALL, "--ranks=4"])] == [4, 2, 1]
    assert [each.ranks_per_node for each in parse([*SMALL, "--ranks-per-node=2"])] == [2]
    with pytest.raises(SystemExit):
        parse(["--check", "--device=cpu", "--api=deep_ep"])


# --- what is wrong, in the ranks ---


def rows_swapped(patch: pytest.MonkeyPatch) -> None:
    def dispatch(self: AllToAll, *args: Any, **kwargs: Any) -> Any:
        got = real(self, *args, **kwargs)
        flat = got.x.reshape(-1, got.x.shape[-1]).view(torch.uint8)
        if int(got.counts.sum()):
            first = (
                int(got.offsets[int(got.counts.ne(0).nonzero()[0])]) if got.row_topk is None else 0
            )
            flat[first] ^= 1
        return got

    real = AllToAll.dispatch
    patch.setattr(AllToAll, "dispatch", dispatch)


def sums_changed(patch: pytest.MonkeyPatch) -> None:
    real = AllToAll.combine
    patch.setattr(AllToAll, "combine", lambda *args, **kwargs: real(*args, **kwargs) * 1.01)


def halves_changed(patch: pytest.MonkeyPatch) -> None:
    real = AllToAll.combine_recv
    patch.setattr(AllToAll, "combine_recv", lambda *args, **kwargs: real(*args, **kwargs) * 1.01)


def nobody_masked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AllToAll, "masked", property(lambda self: torch.zeros(self.world_size)))


def no_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fault, "provoke", lambda *_: "")


def another_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fault, "provoke", lambda *_: "something else")


def broken(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise errors.make(errors.TransportError, "no NIC")

    patch.setattr(AllToAll, "dispatch_send", fail)


def extras_changed(patch: pytest.MonkeyPatch) -> None:
    def dispatch(self: AllToAll, *args: Any, **kwargs: Any) -> Any:
        got = real(self, *args, **kwargs)
        return got._replace(extras=tuple(extra + 1 for extra in got.extras))

    real = AllToAll.dispatch
    patch.setattr(AllToAll, "dispatch", dispatch)


def nan_lost(patch: pytest.MonkeyPatch) -> None:
    real = AllToAll.combine
    patch.setattr(
        AllToAll, "combine", lambda *args, **kwargs: real(*args, **kwargs).nan_to_num(nan=0)
    )


def gradients_changed(patch: pytest.MonkeyPatch) -> None:
    """The sums are right, their gradient is not."""

    def combine(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        return out * 1.001 - (out * 0.001).detach()

    real = AllToAll.combine
    patch.setattr(AllToAll, "combine", combine)


def nobody_killed(patch: pytest.MonkeyPatch) -> None:
    """Spare processes report that all went well."""
    patch.setattr(Spare, "report", lambda _, rank: (f"all is well at rank {rank - 1}", 0.1))
    patch.setattr(conformance_faults, "_reported", lambda *_: [])


Sabotage = Callable[[pytest.MonkeyPatch], None]


def sabotaged(options: Options, sabotage: Sabotage, part: str) -> list[str]:
    """The names of lines that are wrong."""
    with Spare(options) as spare, launch.process_group() as (rank, _):
        ranks = Ranks(options, rank)
        conformance.world(ranks)
        sabotage(pytest.MonkeyPatch())
        more = (spare,) if part == "faults" else ()
        getattr(conformance, part)(ranks, *more)
        return ranks.wrong


@pytest.mark.parametrize(
    ("sabotage", "part", "names"),
    [
        (rows_swapped, "payloads", [f"{layout}, {kind}" for layout in LAYOUTS for kind in TYPES]),
        (sums_changed, "payloads", [f"{layout}, calls of three steps" for layout in LAYOUTS]),
        (halves_changed, "halves", [f"{layout}, combine in halves" for layout in LAYOUTS]),
        (broken, "halves", [f"{layout}, dispatch in halves" for layout in LAYOUTS]),
        (rows_swapped, "halves", [f"{layout}, dispatch alone" for layout in LAYOUTS]),
        (extras_changed, "unusual", [f"{layout}, extras" for layout in LAYOUTS]),
        (nan_lost, "unusual", [f"{layout}, bf16, NaN and infinities" for layout in LAYOUTS]),
        (gradients_changed, "training", [f"{layout}, gradients" for layout in LAYOUTS]),
        (nobody_masked, "masks", ["a rank that stays away is masked, the others go on"]),
        (no_error, "faults", FAULTS[2:-2]),
        (another_error, "faults", (*FAULTS[2:-2], FAULTS[-1])),
        (nobody_killed, "faults", ["a process that is killed is named"]),
    ],
)
def test_what_is_wrong_is_a_line(sabotage: Sabotage, part: str, names: list[str]) -> None:
    (options,) = parse([*SMALL, "--ranks-per-node=1", "--checks=1"])
    wrong: list[str] = launch.run_ranks(sabotaged, options, sabotage, part, num_ranks=2)[0]
    for name in names:
        assert any(text.startswith(f"{name}: rank ") for text in wrong), (name, wrong)


def stopped(options: Options) -> None:
    """The last rank's check does not end."""
    with launch.process_group() as (rank, _):
        ranks = Ranks(options, rank)
        pytest.MonkeyPatch().setattr(conformance_ranks, "CHECK_S", 1.0)
        ranks.line("soon done", list)
        ranks.line("one that stops", stop_at, rank)


def stop_at(rank: int) -> list[str]:
    if rank == 1:
        threading.Event().wait(100)
    return []


def run_stopped() -> None:
    (options,) = parse([*SMALL, "--ranks-per-node=1", "--timeout-s=1"])
    launch.run_ranks(stopped, options, num_ranks=2)


def test_a_check_that_stops_has_a_deadline() -> None:
    program = f"from {__name__} import run_stopped; run_stopped()"
    done = warm.run("-c", program, capture_output=True, text=True, timeout=250)
    assert re.search(r"rank [01] failed \(exit code 1\)", done.stderr), done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"soon done \.\.\. ok, \d\.\d s", lines[0])
    assert lines[1] == "one that stops ... "
    assert "in stop_at" in done.stderr


def replayed(options: Options, captured: Callable[..., Any]) -> list[str]:
    with launch.process_group() as (rank, _):
        ranks = Ranks(options, rank)
        pytest.MonkeyPatch().setattr(conformance, "captured", captured)
        with ranks.make() as comm:
            ranks.line("graph", conformance._replayed, ranks, comm, layout="padded")
        return ranks.wrong


def unrolled(run: Callable[[], None], *, repeats: int) -> Callable[[], None]:
    assert repeats == 1
    return run


def idle(run: Callable[[], None], *, repeats: int) -> Callable[[], None]:
    """As replays of a broken communicator: every kernel of theirs ends at once."""
    return lambda: None


def test_results_of_replays_are_compared() -> None:
    (options,) = parse([*SMALL, "--ranks-per-node=1"])
    assert launch.run_ranks(replayed, options, unrolled, num_ranks=2)[0] == []
    wrong = launch.run_ranks(replayed, options, idle, num_ranks=2)[0]
    # What was there before is the result of step 0.
    assert wrong
    assert all(re.match(r"graph: rank [01]: step 1: ", text) for text in wrong)


def reported_wrong(_: Options) -> list[str]:
    return ["padded, bf16: rank 1: counts are [1], expected [2]"]


def test_a_wrong_line_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance, "run", reported_wrong)
    assert command.main([*SMALL, "--ranks-per-node=1"]) == 1
    assert "WRONG: padded, bf16: rank 1: counts are [1]" in capsys.readouterr().err


def test_bytes_that_are_not_those_of_the_routing_are_wrong() -> None:
    (options,) = parse(["--device=cpu", "--tokens=4"])
    right = {"pair": 10, "dispatch": 7, "combine": 3}
    assert worker.miscounted(options, right, 10) == []
    assert worker.miscounted(options, None, 10) == []
    (text,) = worker.miscounted(options, right | {"combine": 4}, 10)
    assert "T 4: dispatch, then combine sent 11 bytes between nodes, the routing wants 10" in text
    assert len(worker.miscounted(replace(options, tokens=(8,)), right, 11)) == 2
