"""Deliberate faults of the device kernels; a test on the emulated GPU has to catch each of them.

    python -m tests.kernel_mutations                      # all: five minutes of two CPUs
    python -m tests.kernel_mutations kPartBefore device/steps.cuh:118
    python -m tests.kernel_mutations --since REV          # of kernel files that changed since

Named mutations are listed in kernels/device/mutation.cuh. The others remove one line that orders
memory: a fence, a release, an acquire, a wait for copies or earlier kernels (emulation/order.h).
Exit status 1: a mutation that UNSEEN does not list was not caught, or a test failed without any.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support import emulated_runs

ROOT = Path(__file__).resolve().parents[1]
# Limits for the cases of one mutation; reaching them counts as caught. CPU time, because other load
# stretches wall time; the wall limit covers all deadlines of a device.
LIMIT_CPU_S, LIMIT_S = 120, 1800
CHUNKS = "test_gpu_calls.py::test_long_calls_run_in_chunks[4ranks-2pernode]"
CLEAN = (
    "test_gpu_clean_masks.py::test_ranks_that_made_different_calls_agree_again[2ranks-2pernode-2]"
)
SOLO_SLOT = (
    "test_gpu_calls.py::"
    "test_a_sending_half_takes_the_slot_of_a_solo_dispatch[2ranks-2pernode-False]"
)
PLAIN_SLOT = (
    "test_gpu_long_steps.py::"
    "test_a_plain_sending_half_takes_the_slot_of_a_solo_dispatch[2ranks-2pernode]"
)
LONG_STEPS = "test_gpu_long_steps.py::test_steps_of_three_hundred_tokens[4ranks-2pernode]"
LONG_CHUNKS = "test_gpu_long_steps.py::test_long_calls_run_in_chunks[4ranks-2pernode]"
LATE = (
    "test_gpu_late_weights.py::test_one_handle_takes_other_late_weights_each_time[4ranks-2pernode]"
)
BULK = "test_gpu_bulk.py::test_rows_that_need_no_sum_between_sums[4ranks-4pernode]"
BULK_MANY = "test_gpu_bulk.py::test_a_worker_waits_for_room_for_flags[2ranks-2pernode]"
BULK_QUANTIZED = "test_gpu_bulk.py::test_rows_of_seven_thousand_values[2ranks-2pernode]"
BULK_ROUTES = "test_gpu_bulk.py::test_more_tokens_than_a_block_routes_at_once[2ranks-2pernode]"
MASKS = "test_gpu_masks.py::test_nothing_changes_while_all_are_there[4ranks-1pernode]"
SLOW_LINK = "test_gpu_long_steps.py::test_parts_over_a_slow_link"
SLOW_NEIGHBOUR = "test_gpu_calls.py::test_a_step_is_not_sent_over_what_a_slow_neighbour_reads"
FAILURE = "test_gpu_failures.py::test_a_rank_that_does_not_come_is_named[3ranks-3pernode]"
BLOCKS = "test_gpu_int10.py::test_no_word_of_a_block_is_all_ones[2ranks-2pernode]"
SCALES = "test_gpu_layouts.py::test_scales_beside_powers_of_two"
PATIENCE = "test_gpu_masks.py::test_a_rank_that_waits_for_a_lost_one_is_not_masked"

READY = "test_gpu_ready.py::test_rows_are_sent_once_their_counters_are_up[4ranks-2pernode]"
ARRIVING = "test_gpu_arriving.py::test_rows_are_taken_once_their_counters_are_up[2ranks-2pernode]"
FLAGS = "test_gpu_arrival_flags.py::test_a_hostile_network_changes_nothing[1-write]"

NAMED = {
    "kReuseSlotEarly": CHUNKS,
    "kRingWithoutNode": SLOW_NEIGHBOUR,
    "kPartBefore": SLOW_LINK,
    "kFirstPartIsAll": SLOW_LINK,
    "kFlagOfOneNic": FLAGS,
    "kSumBeforeNode": LONG_STEPS,
    "kSumsOverwritten": LONG_CHUNKS,
    "kSoloReadByFirst": CHUNKS,
    "kSumBeforeWeights": LATE,
    "kRowsUnasked": READY,
    "kMaskAtOnce": PATIENCE,
    "kStepOfOneWord": "one block at a time",
    "kScaleRoundedDown": SCALES,
    "kBlockOfOnes": BLOCKS,
}
# Cases of which one fails when a line of a file no longer orders memory: the cheapest first. A run
# ends with the first that does.
ORDERED_BY = {
    "bulk_routes": [BULK_ROUTES],
    "bulk": [BULK_MANY, BULK, BULK_QUANTIZED],
    "combine/weights": [LATE],
    "dispatch/place": [MASKS],
    "dispatch/ready": [ARRIVING],
    "dispatch/recv": [LONG_CHUNKS, CHUNKS],
    "dispatch/route": [PLAIN_SLOT, SOLO_SLOT, LONG_STEPS, CHUNKS],
    "clean": [CLEAN],
    "combine/send": [READY, LONG_STEPS, CHUNKS],
    "combine/sums_read": [LONG_CHUNKS, CHUNKS],
    "wait": [FAILURE, LONG_STEPS, CHUNKS],
    "": [LONG_STEPS, CHUNKS],
}
ORDERS = re.compile(
    r"\b(?:fence_acq_rel_sys|fence_(?:shared|global)_for_bulk|st_release_\w+|ld_acquire_\w+|"
    r"atom_inc_acq_rel\w+|red_add_release\w+|bulk_wait(?:_read)?<\w+>|griddepcontrol_wait)\("
)
# Lines whose removal no test can catch, by file and a part of their text, and why. The cases above
# are of `make test` (tests/gpu/test_emulated_gpu.py), so that it misses these and no others.
_ATOMIC = "needed, but orders atomic accesses alone, at which the emulated GPU does not look"
UNSEEN: dict[tuple[str, str], str] = {
    ("clean.cu", "->cleaning, p.round"): _ATOMIC,  # flags are cleared behind it, by other ranks too
    ("clean.cu", "->cleaning) >= p.round"): _ATOMIC,
    ("clean.cu", "st_release_sys_u64(word, step + 1)"): _ATOMIC,  # flags are cleared before it
}


class Site(NamedTuple):
    """A line that orders memory."""

    path: Path
    line: int
    text: str

    @property
    def file(self) -> str:
        """Returns its path within kernels/."""
        return self.path.relative_to(ROOT / "kernels").as_posix()

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def why_unseen(self) -> str:
        """Returns why no test can catch its removal; empty: a test has to."""
        reasons = (
            why for (name, text), why in UNSEEN.items() if name == self.file and text in self.text
        )
        return next(reasons, "")


def sites() -> Iterator[Site]:
    """Yields ordering lines of the dispatch and combine kernels."""
    files = sorted(path for end in ("*.cuh", "*.cu") for path in (ROOT / "kernels").rglob(end))
    for path in files:
        if path.name in ("ptx.cuh", "copy.cu", "rows.cu", "count.cu", "signal.cu", "probe.cu"):
            continue
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if ORDERS.search(text.split("//")[0]):
                yield Site(path, number, text.strip())


def site_of(file: str, text: str) -> Site:
    """Returns the first ordering line of that file with this text."""
    return next(site for site in sites() if site.file == file and text in site.text)


def run(mutation: str, cases: list[str], **more: str) -> tuple[int, str]:
    """Runs the cases with that mutation; returns exit status and output."""
    if cases == ["one block at a time"]:
        more["MOE_P2P_EMULATED_BLOCKS"] = "1"
        cases = ["test_gpu.py::test_every_format_is_the_reference_bit_for_bit[3ranks-3pernode]"]
    more["MOE_P2P_MUTATION"] = mutation
    options = ("-x", "-o", f"timeout={LIMIT_S}")
    ran = emulated_runs.run(cases, *options, deadline_s=LIMIT_S, cpu_s=LIMIT_CPU_S, **more)
    if ran.status in (-signal.SIGKILL, -signal.SIGXCPU):
        return 1, "the tests did not end"
    return ran.status, ran.output


def first_error(output: str) -> str:
    """Returns the first error line of a failing test."""
    error = re.search(
        r"emulated GPU: .*|^E   +(?!ranks|Traceback|File)\S.*|the tests did not end",
        output,
        re.MULTILINE,
    )
    return error[0] if error else output[-400:]


def caught(mutation: str, cases: list[str], **more: str) -> str:
    """Returns the error of a failing test; empty: none failed. more: environment variables."""
    status, output = run(mutation, cases, **more)
    # 1: a test failed; a signal: the emulated GPU ended the process. Else nothing was tested.
    assert status in (0, 1) or status < 0, output
    return first_error(output) if status else ""


def cases_of(mutation: str) -> list[str]:
    if mutation in NAMED:
        return [NAMED[mutation]]
    return next(cases for part, cases in ORDERED_BY.items() if part in mutation.split(":")[0])


def changed_since(revision: str) -> list[str]:
    """Returns mutations of files of kernels/ that differ from that revision."""
    command = ["git", "diff", "--name-only", revision, "--", "kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / path for path in done.stdout.split() if (ROOT / path).exists()]
    text = "".join(path.read_text() for path in files)
    named = [name for name in NAMED if f"MOE_P2P_MUTATED({name})" in text]
    return [*named, *(site.name for site in sites() if site.path in files)]


def main(wanted: list[str]) -> int:
    known = {site.name: site for site in sites()}
    if wanted[:1] == ["--since"] and not (wanted := changed_since(*wanted[1:])):
        print("no kernel changed")
        return 0
    mutations = wanted or [*NAMED, *known]
    # Runs are processes of their own, of which one server starts several.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        lists = list(dict.fromkeys(tuple(cases_of(mutation)) for mutation in mutations))
        # Again if one fails: the first run compiles, and ranks wait for each other meanwhile.
        errors = pool.map(lambda its: caught("", list(its)) and caught("", list(its)), lists)
        for cases, error in zip(lists, errors, strict=True):
            if error:
                print(f"without any fault: {', '.join(cases)}\n    {error}", flush=True)
                return 1
        errors = pool.map(lambda mutation: caught(mutation, cases_of(mutation)), mutations)
        return report(zip(mutations, errors, strict=True))


def report(errors: Iterable[tuple[str, str]]) -> int:
    """Prints what became of each mutation; returns the exit status."""
    known, missed = {site.name: site for site in sites()}, []
    for mutation, error in errors:
        why = known[mutation].why_unseen if mutation in known else ""
        if not error and not why:
            missed.append(mutation)
        text = known[mutation].text if mutation in known else ""
        verdict = error or (f"not seen: {why}" if why else "NOT CAUGHT")
        print(f"{mutation} {text}\n    {verdict}", flush=True)
    print(f"not caught: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
