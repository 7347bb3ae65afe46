"""The matrix of faults: fault x point x transport, each with what runs it and what has to come out.

    python -m tests.faults                  # prints the table and its counts
    python -m tests.faults --cell kill      # what the cells of a fault, a point or a transport are

An outcome is a row of docs/failure.md ("Outcomes"). A cell is one of four kinds: `Run` (here),
`Elsewhere` (tests that are there anyway, by name), `Never` (cannot be), and `Pair` (left to pairs,
over soft-RoCE).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from tests.faults import calls, joins, transfers
from tests.faults.calls import HALVES, WORLD
from tests.faults.causes import CONDITIONS
from tests.support.world_cases import SEATS

FAULTS = ("kill", "stop", "slow", "NIC error", "link flap", "wrong handshake", *CONDITIONS)
JOIN = tuple(f"join: {point}" for point in joins.POINTS)
POINTS = ("set-up", *HALVES, *JOIN, "KV push", "weight update")
LOCAL = ("loopback", "tcp")
OVER = (*LOCAL, "soft-RoCE", "gpu")
OF_GPUS = ("kill", "stop")

UNHARMED, NAMED, MASKED = "unharmed", "named", "masked"
REFUSED, GIVEN_BACK, LEFT_OUT = "refused", "given back", "left out"
TRIED_AGAIN = "tried again"

Key = tuple[str, str, str]
Case = calls.Case | transfers.Case | joins.Case


class Run(NamedTuple):
    """cases: each with its outcome; test_faults.py runs them. tests: as in Elsewhere, beside."""

    cases: tuple[tuple[Case, str], ...]
    tests: tuple[str, ...] = ()

    @property
    def outcomes(self) -> set[str]:
        return {outcome for _, outcome in self.cases}


class Elsewhere(NamedTuple):
    """tests: of pytest by id, or FILE::TEST_CASE of C++. soft-RoCE and GPUs have COMMANDS."""

    outcome: str
    tests: tuple[str, ...]

    @property
    def outcomes(self) -> set[str]:
        return {self.outcome}


class Never(NamedTuple):
    reason: str


class Pair(NamedTuple):
    """The fault is run at another point of this transport, and this pair over another one."""


Cell = Run | Elsewhere | Never | Pair
COMMANDS = {
    "soft-RoCE": "python -m pytest --all-cells tests/engine/test_rdma.py",
    "gpu": "python -m pytest --all-cells tests/faults tests/gpu/test_gpu_driver.py "
    "tests/kv/test_kv_stopped_sender.py -m gpu; "
    "python -m pytest tests/gpu/test_fd_exchange.py, which needs none",
}

# --- calls ---------------------------------------------------------------------------------------

NO_LINK = Never("the software NIC is memory of one host and has no link")
NO_DOOR = Never("ranks have mapped each other's memory; nothing listens in a call")
NO_RECEIVER = Never("writes are one-sided: the NIC of who receives posts nothing")
RDMA = "tests/engine/test_rdma.py::"


def _lost(fault: str, point: str, over: str, *nodes: int) -> Run:
    """In both modes."""
    modes = itertools.product(nodes, (False, True))
    masks_it = NAMED if (fault, point) == ("NIC error", "set-up") else MASKED  # no NIC to open
    return Run(
        tuple(
            (calls.Case(fault, point, over, masks, per_node), masks_it if masks else NAMED)
            for per_node, masks in modes
        )
    )


def _unharmed(fault: str, point: str, over: str) -> Run:
    """The mode changes from point to point."""
    at = ("set-up", *HALVES).index(point)
    per_node = WORLD if over == "loopback" and at // 2 % 2 else 1
    return Run(((calls.Case(fault, point, over, at % 2 == 1, per_node), UNHARMED),))


def _through(fault: str, over: str) -> Run:
    """A condition that holds at all points: one run, or two."""
    nodes = (1, WORLD) if over == "loopback" else (1,)
    return Run(
        tuple((calls.Case(fault, "set-up", over, each > 1, each), UNHARMED) for each in nodes)
    )


def _call(fault: str, point: str, over: str) -> Cell:
    nodes = (WORLD, 1) if over == "loopback" and point != "set-up" else (1,)
    if fault in CONDITIONS:
        return _through(fault, over)
    if fault in ("kill", "stop"):
        return _lost(fault, point, over, *nodes)
    if fault == "slow":
        return _unharmed(fault, point, over)
    if over == "tcp":
        return (_lost if fault == "NIC error" else _unharmed)(fault, point, over, *_one(fault))
    if fault == "NIC error":
        return _lost(fault, point, over, 1) if point.endswith("send") else NO_RECEIVER
    return NO_LINK if fault == "link flap" else NO_DOOR


def _one(fault: str) -> tuple[int, ...]:
    return (1,) if fault == "NIC error" else ()


def _transfer(fault: str, point: str, over: str) -> Cell:
    outcome = UNHARMED
    if fault in ("kill", "stop", "NIC error"):
        outcome = GIVEN_BACK if point == "KV push" else LEFT_OUT
    if fault == "link flap" and over == "loopback":
        return NO_LINK
    if (fault, point, over) == ("wrong handshake", "weight update", "loopback"):
        return Never("trainers and engine ranks meet in the store; nothing of theirs listens")
    return Run(((transfers.Case(fault, point, over), outcome),))


# --- joins ---------------------------------------------------------------------------------------

NO_WRITE = Never("no write of the software NIC is of this point, which could fail")
VICTIMS = ("joiner", "member")
IN_TURNS = (
    "joins: joiner and member have each fault at each point over loopback, in one node or with one "
    "rank a node, killed in both; over tcp both are killed, else one of the two from point to "
    "point; on GPUs, in one node, one of the two is killed and the other one stopped"
)


def _join(fault: str, point: str, over: str) -> Cell:
    at = joins.POINTS[JOIN.index(point)]
    if over == "gpu":
        who = VICTIMS[(JOIN.index(point) + OF_GPUS.index(fault)) % 2]  # see IN_TURNS
        return Run(((joins.Case(fault, at, over, who, SEATS), _lost_join(fault, at, who)),))
    if fault in CONDITIONS:  # hold at all points
        nodes = (1, SEATS) if over == "loopback" else (1,)
        held = (joins.Case(fault, joins.CLAIMS, over, "joiner", each) for each in nodes)
        return Run(tuple((case, UNHARMED) for case in held))
    if over == "loopback" and fault == "link flap":
        return NO_LINK
    found = {who: cases for who in VICTIMS if (cases := _joins(fault, at, over, who))}
    if not found:
        return NO_DOOR if fault == "wrong handshake" else NO_WRITE
    if over == "tcp" and fault != "kill":  # see IN_TURNS
        who = VICTIMS[joins.POINTS.index(at) % 2]
        found = {who: found[who]} if who in found else found
    return Run(tuple(itertools.chain(*found.values())))


def _joins(fault: str, at: str, over: str, who: str) -> list[tuple[joins.Case, str]]:
    """In one node, or with one rank a node, in turns; killed in both."""
    outcome = (_local_join if over == "loopback" else _tcp_join)(fault, at, who)
    if outcome is None:
        return []
    one_node = (joins.POINTS.index(at) + (who == "member")) % 2
    nodes: tuple[int, ...] = (SEATS,) if one_node else (1,)
    if over != "loopback" or fault in ("NIC error", "wrong handshake"):
        nodes = (1,)
    elif fault == "kill":
        nodes = (1, SEATS)
    return [(joins.Case(fault, at, over, who, each), outcome) for each in nodes]


def _lost_join(fault: str, at: str, who: str) -> str:
    """docs/elastic.md, section 7."""
    place = joins.POINTS.index(at)
    if at == joins.WAITS and (fault, who) == ("stop", "joiner"):
        return TRIED_AGAIN  # it has a lease
    if place < joins.POINTS.index(joins.MAKES):
        return UNHARMED if who == "joiner" else MASKED
    return TRIED_AGAIN if place < joins.POINTS.index(joins.STAGED) else MASKED


def _local_join(fault: str, at: str, who: str) -> str | None:
    """None: it cannot be."""
    if fault in ("kill", "stop"):
        return _lost_join(fault, at, who)
    if fault == "slow":
        return UNHARMED
    if who == "joiner" and at == joins.MAKES:  # another version, or no NIC
        return TRIED_AGAIN
    if fault == "wrong handshake":
        return None
    writes = (joins.FIRST, joins.DRAINS) if who == "joiner" else joins.POINTS
    if at == joins.ENTERS or at not in writes:
        return None
    return UNHARMED if (who, at) == ("member", joins.DRAINS) else MASKED  # of a farewell


def _tcp_join(fault: str, at: str, who: str) -> str | None:
    has_nic = who == "member" or at not in (joins.CLAIMS, joins.WAITS)
    if fault in ("kill", "stop"):
        return _lost_join(fault, at, who)
    if fault == "NIC error":
        return MASKED if has_nic else TRIED_AGAIN
    return UNHARMED if has_nic or fault != "wrong handshake" else None


OTHERS: dict[Key, Cell] = {
    # Tests that are there anyway.
    ("NIC error", "set-up", "loopback"): Elsewhere(
        REFUSED,
        (
            "tests/moe/test_lost_ranks.py::test_a_rank_that_fails_reports_to_the_others",
            "tests/cpp/loopback_test.cpp::"
            "loopback: a full /dev/shm is an error with the size in it",
        ),
    ),
    ("wrong handshake", "set-up", "loopback"): Elsewhere(
        REFUSED,
        (
            "tests/fleet/test_bootstrap.py::test_a_mix_of_versions_is_refused_by_name",
            "tests/cpp/provider_contract_lifetime_test.cpp::"
            "provider contract: an address of another version is refused by name",
        ),
    ),
    ("kill", "weight update", "loopback"): Elsewhere(
        LEFT_OUT, ("tests/weights/test_weights_killed.py::test_what_is_left_tells_the_truth",)
    ),
    ("stop", "weight update", "loopback"): Elsewhere(
        LEFT_OUT,
        (
            "tests/weights/test_weights_killed.py::"
            "test_an_engine_rank_that_is_stopped_is_left_out_and_comes_back",
        ),
    ),
    **{
        ("stop", "KV push", over): Elsewhere(
            GIVEN_BACK,
            (
                "tests/kv/test_kv_stopped_sender.py::"
                f"test_a_stopped_sender_writes_nothing_later[{over}-3]",
            ),
        )
        for over in LOCAL
    },
    # soft-RoCE.
    ("kill", "dispatch_send", "soft-RoCE"): Elsewhere(
        NAMED,
        (
            "tests/cpp/verbs_device_test.cpp::"
            "verbs devices: a process that is killed fails what it owes, soon",
        ),
    ),
    ("kill", "dispatch_recv", "soft-RoCE"): Elsewhere(
        NAMED, (f"{RDMA}test_exchange_equals_the_reference_and_survivors_report",)
    ),
    ("stop", "KV push", "soft-RoCE"): Elsewhere(
        GIVEN_BACK, (f"{RDMA}test_stopped_senders_write_nothing_later",)
    ),
    **{
        ("slow", point, "soft-RoCE"): Elsewhere(
            UNHARMED, (f"{RDMA}test_exchange_equals_the_reference_and_survivors_report",)
        )
        for point in ("set-up", *HALVES)
    },
    ("NIC error", "dispatch_send", "soft-RoCE"): Elsewhere(
        NAMED,
        (
            "tests/cpp/verbs_device_test.cpp::"
            "verbs devices: a link that stays down fails what is under way, and says so",
        ),
    ),
    ("link flap", "dispatch_send", "soft-RoCE"): Elsewhere(
        UNHARMED,
        (
            "tests/cpp/verbs_device_test.cpp::"
            "verbs devices: a link that is down for a moment loses nothing",
        ),
    ),
    ("wrong handshake", "set-up", "soft-RoCE"): Elsewhere(
        REFUSED,
        (
            "tests/cpp/provider_contract_lifetime_test.cpp::"
            "provider contract: an address of another version is refused by name",
        ),
    ),
    ("wrong handshake", "dispatch_send", "soft-RoCE"): Elsewhere(
        UNHARMED, (f"{RDMA}test_exchange_equals_the_reference_and_survivors_report",)
    ),
    ("full queue", "combine_send", "soft-RoCE"): Elsewhere(
        UNHARMED,
        (
            "tests/cpp/provider_contract_test.cpp::"
            "provider contract: a full queue takes fewer, and all of them later",
        ),
    ),
    ("no locked memory", "set-up", "soft-RoCE"): Elsewhere(
        REFUSED,
        (
            "tests/cpp/verbs_device_test.cpp::"
            "verbs devices: memory beyond the limit on locked memory is refused with the limit",
        ),
    ),
    # GPUs.
    ("kill", "set-up", "gpu"): Elsewhere(
        NAMED,
        (
            "tests/gpu/test_fd_exchange.py::test_a_rank_that_is_killed_before_it_came_is_missed_at_once",
        ),
    ),
    ("stop", "set-up", "gpu"): Elsewhere(
        NAMED,
        (
            "tests/gpu/test_fd_exchange.py::"
            "test_a_rank_that_is_stopped_before_it_came_is_named_and_finds_nobody_later",
        ),
    ),
    ("kill", "KV push", "gpu"): Elsewhere(
        GIVEN_BACK,
        (
            "tests/gpu/test_gpu_driver.py::"
            "test_a_killed_process_writes_no_more_soon_after_its_lock_is_gone",
        ),
    ),
    ("stop", "KV push", "gpu"): Elsewhere(
        GIVEN_BACK,
        ("tests/kv/test_kv_stopped_sender.py::test_a_stopped_sender_writes_nothing_later[gpu-3]",),
    ),
    **{
        (fault, "weight update", "gpu"): Run(
            ((transfers.Case(fault, "weight update", "gpu"), LEFT_OUT),)
        )
        for fault in OF_GPUS
    },
}


def _over_roce(fault: str, point: str) -> Cell:
    if fault == "no locked memory" and point in (*HALVES, *JOIN) and joins.MAKES not in point:
        return Never("memory is registered at set-up, which is refused")
    return Pair()


def _cell(fault: str, point: str, over: str) -> Cell:
    if (fault, point, over) in OTHERS:
        return OTHERS[fault, point, over]
    if over == "soft-RoCE":
        return _over_roce(fault, point)
    if point in JOIN:
        return _join(fault, point, over)
    if over == "gpu":
        return _lost(fault, point, over, WORLD)
    return (_call if point in ("set-up", *HALVES) else _transfer)(fault, point, over)


def keys() -> list[Key]:
    """The whole product."""
    return [
        (fault, point, over)
        for over in OVER
        for fault in (OF_GPUS if over == "gpu" else FAULTS)
        for point in POINTS
    ]


CELLS: dict[Key, Cell] = {key: _cell(*key) for key in keys()}


def cases() -> dict[Case, str]:
    """All runs of the table, once each, with their outcomes."""
    return {
        case: out for cell in CELLS.values() if isinstance(cell, Run) for case, out in cell.cases
    }


def few(every: list[Case]) -> set[Case]:
    """Returns runs in which each fault meets each transport and mode, and each point each transport
    and each of the ways to be lost."""

    def pairs(case: Case) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = {(case.fault, case.over), (case.point, case.over)}
        if isinstance(case, calls.Case):
            found |= {(case.fault, str(case.masks))}
            found |= {(case.fault, str(case.ranks_per_node))}
        if isinstance(case, joins.Case):
            found |= {(case.fault, case.victim, "joins"), (case.point, case.victim)}
        return found

    wanted, taken = set[tuple[str, ...]]().union(*map(pairs, every)), set[Case]()
    while wanted:
        best = max(every, key=lambda case: len(pairs(case) & wanted))
        taken.add(best)
        wanted -= pairs(best)
    return taken
