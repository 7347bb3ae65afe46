"""The device kernels where there is no GPU: a part of their tests, on an emulated one.

In processes of their own (emulated_runs.py), which believe that they have a driver. All of them run
the same way, but for those of graphs that hold kernels of torch as well, of torch's streams and of
processes: `pytest -p tests.support.emulated_gpu tests/gpu/test_gpu_layouts.py`.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests import kernel_mutations
from tests.support import emulated_gpu, emulated_runs

ROOT = Path(__file__).resolve().parents[2]
ONE_BLOCK = "one block at a time"
DEADLINE_S = 1200
ALL_LENGTHS = "test_calls_of_all_lengths_are_the_reference_bit_for_bit"
# One node, several of several ranks, ranks that are nodes; both ways of carrying rows; all layouts.
CASES = {
    "calls": [
        "test_gpu.py::test_every_format_is_the_reference_bit_for_bit[4ranks-2pernode]",
        "test_gpu.py::test_every_format_is_the_reference_bit_for_bit[3ranks-3pernode]",
        "test_gpu.py::test_a_hostile_network_changes_nothing[3]",
        "test_gpu.py::test_shape[parts of three tokens]",
        "test_gpu.py::test_shape[parts of some tokens]",
        "test_gpu.py::test_shape[experts anywhere on one node]",  # a rank has none
        "test_gpu_calls.py::test_long_calls_run_in_chunks[4ranks-2pernode]",
        "test_gpu_calls.py::test_halves_of_two_steps_overlap[0-2ranks-1pernode]",
        "test_gpu_layouts.py::test_all_outputs_of_one_call",
        "test_gpu_layouts.py::test_rows_by_rank_are_the_reference_bit_for_bit[4ranks-2pernode]",
        "test_gpu_layouts.py::test_no_number_comes_of_what_is_none[2ranks-2pernode]",
        "test_gpu_layouts.py::test_scales_beside_powers_of_two",
        "test_gpu_layouts.py::test_every_value_in_a_block[5.3]",
        "test_gpu_far_steps.py",
        "test_gpu_sum_order.py::test_sums_are_in_the_order_of_topk[dtype1-rows-4ranks-4pernode]",
        "test_gpu_opaque_rows.py::test_bytes_arrive_unchanged[short steps-2ranks-2pernode]",
        "test_gpu_opaque_rows.py::test_bytes_arrive_unchanged[bulk-2ranks-2pernode]",
        "test_gpu_sum_order.py::test_however_rows_arrive",
        "test_gpu_int10.py::test_sums_are_those_of_the_reference[dtype0-int10-4ranks-2pernode]",
        "test_gpu_int10.py::test_however_rows_arrive[flags-4ranks-2pernode-int10_nodes]",
        "test_gpu_int10.py::test_sums_are_those_of_the_reference[dtype1-block16-4ranks-2pernode]",
        "test_gpu_int10.py::test_however_rows_arrive[flags-4ranks-2pernode-block16]",
        "test_gpu_int10.py::test_no_word_of_a_block_is_all_ones[2ranks-2pernode]",
        "test_gpu_arriving.py::test_rows_are_taken_once_their_counters_are_up[2ranks-2pernode]",
        "test_gpu_arriving.py::test_rows_of_long_steps_in_chunks[4ranks-2pernode]",
        "test_gpu_ready.py::test_rows_are_sent_once_their_counters_are_up[4ranks-2pernode]",
        "test_gpu_ready.py::test_rows_with_flags_of_their_own[4ranks-2pernode]",
        "test_gpu_ready.py::test_a_counter_that_is_never_raised_is_named",
        "test_gpu_late_weights.py::test_one_handle_takes_other_late_weights_each_time[4ranks-2pernode]",
        "test_gpu_failures.py::test_a_rank_that_does_not_come_is_named[3ranks-3pernode]",
        "test_gpu_left_out.py::test_what_a_lost_rank_leaves_out_is_poisoned",
        "test_gpu_left_out.py::test_sums_with_rows_of_a_lost_rank_are_poisoned",
        "test_gpu_left_out.py::test_too_little_capacity_is_never_exceeded",
        "test_gpu_left_out.py::test_a_call_beside_another_one_is_poisoned",
        "test_gpu_self_flag.py::test_rows_of_all_ones_arrive[2ranks-2pernode]",
        "test_gpu_self_flag.py::test_scales_of_the_callers_own_may_be_any_words[4ranks-2pernode]",
        "test_gpu_self_flag.py::test_workers_that_are_fewer_than_the_parts_of_a_row[3]",
        "test_gpu_copy_kernel.py",
        "test_gpu_row_kernel.py",
        "test_gpu_pack.py",
        "test_gpu_count_kernel.py",
        "test_gpu_expert_map.py::test_each_id_becomes_a_slot[gpu-(70, 3, 6, 6)-dtype0]",
        "test_gpu_expert_map.py::test_each_id_becomes_a_slot[gpu-(9, 1, 1, 5)-dtype1]",
        "test_gpu_expert_map.py::test_a_dispatch_refuses_ids_that_no_expert_has",
        "test_gpu_expert_map.py::test_a_map_changes_between_replays_of_a_graph[2ranks-2pernode]",
        "test_gpu_signals.py::test_replays_send_their_step_and_nothing_else",
        "test_gpu_signals.py::test_a_layer_travels_before_later_ones_are_computed",
        "test_gpu_signals.py::test_a_receiver_may_open_after_a_dummy_batch",
        "test_gpu_signals.py::test_a_full_ring_is_an_error_by_name",
        "test_gpu_signals.py::test_a_graph_that_is_replayed_after_the_end_sends_nothing",
        "test_gpu_long_steps.py::test_steps_of_three_hundred_tokens[4ranks-2pernode]",
        "test_gpu_long_steps.py::test_long_calls_run_in_chunks[4ranks-2pernode]",
        "test_gpu_long_steps.py::test_parts_over_a_slow_link",
        kernel_mutations.PLAIN_SLOT,
        kernel_mutations.SOLO_SLOT,
        kernel_mutations.CLEAN,
        "test_gpu_calls.py::test_a_step_is_not_sent_over_what_a_slow_neighbour_reads",
        "test_gpu_timed_nic.py::test_every_format_is_the_reference_bit_for_bit[4ranks-2pernode]",
        "test_gpu_timed_nic.py::test_late_weights_go_the_same_way",
        "test_gpu_timed_nic.py::test_kernels_and_proxies_note_when_they_get_there",
        "test_gpu_tuned.py",
    ],
    "arrival flags": [
        "test_gpu_arrival_flags.py::test_every_format_is_the_reference_bit_for_bit[4ranks-2pernode-write]",
        "test_gpu_arrival_flags.py::test_a_hostile_network_changes_nothing[1-write]",
        "test_gpu_arrival_flags.py::test_a_hostile_network_changes_nothing[3-gdrcopy]",
        "test_gpu_arrival_flags.py::test_long_calls_run_in_chunks[write]",
        "test_gpu_arrival_flags.py::test_ranks_with_masks_see_them_too[gdrcopy]",
        "test_gpu_arrival_flags.py::test_late_weights_are_relayed_between_them[2ranks-1pernode-write]",
        "test_gpu_arrival_flags.py::test_without_anything_that_orders_it_is_relayed",
        "test_gpu_arrival_flags.py::test_what_cannot_be_is_refused_by_all_ranks",
        "test_gpu_arrival_flags.py::test_ranks_that_differ_are_refused_by_name",
    ],
    "graphs": [  # what they capture is replayed without the host
        f"test_gpu_graphs.py::test_a_part_of_a_step_in_a_graph[{which}]"
        for which in (
            "2ranks-2pernode-dispatch, combined twice",
            "2ranks-2pernode-combine",
            "2ranks-2pernode-graphs in turns",
            "2ranks-1pernode-sending halves",
        )
    ]
    + [
        "test_gpu_prepare.py",
        "test_gpu_duplicates.py::test_replays_merge_the_routing_that_they_find[2ranks-1pernode-padded]",
    ],
    "overlap": [  # several kernels of a rank are there at once
        "test_gpu_overlap.py::test_kernels_of_a_graph_begin_early[2ranks-2pernode]",
        "test_gpu_overlap.py::test_two_communicators_on_two_streams[2ranks-1pernode]",
        "test_gpu_overlap.py::test_one_communicator_on_two_streams_in_turns[2ranks-2pernode]",
    ],
    "in bulk": [
        "test_gpu_bulk.py::test_every_format_is_the_reference_bit_for_bit[3ranks-3pernode]",
        "test_gpu_bulk.py::test_rows_by_rank_are_the_reference_bit_for_bit[2ranks-2pernode]",
        "test_gpu_bulk.py::test_rows_of_seven_thousand_values[2ranks-2pernode]",
        "test_gpu_bulk.py::test_rows_by_rank_of_seven_thousand_values[2ranks-2pernode]",
        "test_gpu_bulk.py::test_scales_in_columns_and_of_one_byte[2ranks-2pernode]",
        "test_gpu_bulk.py::test_more_tokens_than_a_block_routes_at_once[2ranks-2pernode]",
        "test_gpu_bulk.py::test_a_worker_waits_for_room_for_flags[2ranks-2pernode]",
        "test_gpu_bulk.py::test_rows_that_need_no_sum_between_sums[4ranks-4pernode]",
        "test_gpu_bulk.py::test_rows_that_need_no_sum_between_sums[2ranks-2pernode]",
        "test_gpu_bulk.py::test_sums_of_negative_zeros_are_zeros[2ranks-2pernode]",
        "test_gpu_bulk.py::test_no_number_comes_of_what_is_none[2ranks-2pernode]",
        "test_gpu_bulk.py::test_long_calls_run_in_chunks[4ranks-4pernode]",
        "test_gpu_bulk.py::test_halves_of_two_steps_overlap[2ranks-2pernode]",
        "test_gpu_bulk.py::test_a_slot_that_does_not_arrive_is_named[2ranks-2pernode]",
        f"test_gpu_short_calls.py::{ALL_LENGTHS}[2ranks-2pernode-6]",
        f"test_gpu_short_calls.py::{ALL_LENGTHS}[4ranks-4pernode-4]",
        "test_gpu_short_calls.py::test_halves_of_a_short_and_a_long_step_overlap[2ranks-2pernode]",
        "test_gpu_short_calls.py::test_released_steps_of_one_way_before_steps_of_the_other[2ranks-2pernode]",
        "test_gpu_short_calls.py::test_gradients_are_the_same_both_ways[2ranks-2pernode]",
    ],
    ONE_BLOCK: [  # calls of one step must not need more: their receivers come last
        "test_gpu.py::test_every_format_is_the_reference_bit_for_bit[3ranks-3pernode]",
        "test_gpu_bulk.py::test_every_format_is_the_reference_bit_for_bit[2ranks-2pernode]",
    ],
    "training": [
        "test_gpu_training.py::test_gradients_are_those_of_a_dense_layer[2ranks-1pernode-padded]",
        "test_gpu_training.py::test_gradients_are_those_of_a_dense_layer[2ranks-2pernode-by rank]",
        "test_gpu_training.py::test_ranks_train_as_one_process_does[2ranks-2pernode]",
    ],
    "deep_ep": [  # what it waits for on the host is counted by a kernel
        "../deep_ep/test_deep_ep_elastic.py::test_rows_sums_and_handles[rows by rank-3]",
        "../deep_ep/test_deep_ep_normal.py::test_in_worlds_of_any_size[dispatch-2]",
        "../deep_ep/test_deep_ep_hybrid.py::test_rows_past_the_budget_are_dropped[2-4]",
        "../deep_ep/test_deep_ep_hybrid.py::test_rows_past_the_budget_are_dropped_between_nodes[2]",
    ],
    "mirror": [  # rank 0 of several, two of it or alone
        "test_gpu_mirror.py::test_rank_0_gets_what_it_gets_of_all[4ranks-4pernode-two]",
        "test_gpu_mirror.py::test_the_same_in_bulk[4ranks-4pernode-alone]",
        "test_gpu_mirror.py::test_late_weights_and_halves[two]",
    ],
    "masks": [
        "test_gpu_masks.py::test_nothing_changes_while_all_are_there[4ranks-1pernode]",
        "test_gpu_masks.py::test_ranks_that_never_came_are_masked[3ranks-3pernode-[1, 2]]",
        "test_gpu_masks.py::test_masks_set_by_hand_are_not_waited_for[4ranks-4pernode]",
        "test_gpu_masks.py::test_ranks_that_never_came_are_masked[4ranks-1pernode-[1]]",
        "test_gpu_masks.py::test_a_slow_rank_is_masked_and_masks_the_others[2ranks-2pernode]",
        "test_gpu_masks.py::test_a_rank_stops_behind_a_half[3ranks-3pernode-dispatch_send]",
        "test_gpu_masks.py::test_a_rank_stops_behind_a_half[4ranks-1pernode-dispatch]",
        "test_gpu_masks.py::test_a_rank_that_ends_within_its_sending_is_absent_as_a_whole",
        "test_gpu_masks.py::test_a_rank_that_waits_for_a_lost_one_is_not_masked",
        "test_gpu_masks.py::test_halves_in_flight_and_releases[3ranks-3pernode]",
    ],
    "worlds that change": [
        "test_gpu_elastic.py::test_a_captured_graph_goes_on[4 a node]",
        "test_gpu_elastic.py::test_sums_of_tokens_whose_rank_was_lost[1 a node-poison]",
        "test_gpu_elastic.py::test_what_is_refused",
        "test_gpu_elastic.py::test_grows_and_shrinks[2 a node, absent alone-drop]",
        "test_gpu_elastic.py::test_a_lost_rank_is_replaced[4 a node-drop]",
        "test_gpu_elastic.py::test_a_rank_that_is_lost_at_the_change_costs_no_other[1 a node]",
        "test_gpu_nixl_ep.py::test_masks_by_hand[3ranks-3pernode]",
    ],
}
# Of these, what `make test` leaves out: cases whose kernels, compiled for a shape of their own, are
# most of their time, while another case runs the same paths at another shape. No case that shows a
# fault of kernel_mutations.py is among them.
REST = (
    "test_gpu.py::test_every_format_is_the_reference_bit_for_bit[3ranks-3pernode]",
    "test_gpu_far_steps.py",
    "test_gpu_sum_order.py::test_sums_are_in_the_order_of_topk[dtype1-rows-4ranks-4pernode]",
    "test_gpu_opaque_rows.py::test_bytes_arrive_unchanged[bulk-2ranks-2pernode]",
    "test_gpu_int10.py::test_however_rows_arrive[flags-4ranks-2pernode-int10_nodes]",
    "test_gpu_int10.py::test_however_rows_arrive[flags-4ranks-2pernode-block16]",
    "test_gpu_timed_nic.py::test_every_format_is_the_reference_bit_for_bit[4ranks-2pernode]",
    "test_gpu_self_flag.py::test_workers_that_are_fewer_than_the_parts_of_a_row[3]",
    "test_gpu_tuned.py",
    "test_gpu.py::test_shape[parts of some tokens]",
    "test_gpu_arrival_flags.py::test_every_format_is_the_reference_bit_for_bit[4ranks-2pernode-write]",
    "test_gpu_arrival_flags.py::test_long_calls_run_in_chunks[write]",
    "test_gpu_arrival_flags.py::test_ranks_with_masks_see_them_too[gdrcopy]",
    "test_gpu_graphs.py::test_a_part_of_a_step_in_a_graph[2ranks-2pernode-combine]",
    "test_gpu_prepare.py",
    "test_gpu_overlap.py::test_two_communicators_on_two_streams[2ranks-1pernode]",
    "test_gpu_bulk.py::test_every_format_is_the_reference_bit_for_bit[3ranks-3pernode]",
    "test_gpu_bulk.py::test_rows_by_rank_of_seven_thousand_values[2ranks-2pernode]",
    "test_gpu_bulk.py::test_rows_that_need_no_sum_between_sums[2ranks-2pernode]",
    "test_gpu_bulk.py::test_long_calls_run_in_chunks[4ranks-4pernode]",
    "test_gpu_bulk.py::test_no_number_comes_of_what_is_none[2ranks-2pernode]",
    f"test_gpu_short_calls.py::{ALL_LENGTHS}[4ranks-4pernode-4]",
    "test_gpu_short_calls.py::test_gradients_are_the_same_both_ways[2ranks-2pernode]",
    "test_gpu_training.py::test_gradients_are_those_of_a_dense_layer[2ranks-1pernode-padded]",
    "test_gpu_training.py::test_ranks_train_as_one_process_does[2ranks-2pernode]",
    "test_gpu_mirror.py::test_the_same_in_bulk[4ranks-4pernode-alone]",
    "test_gpu_masks.py::test_masks_set_by_hand_are_not_waited_for[4ranks-4pernode]",
    "test_gpu_masks.py::test_a_rank_stops_behind_a_half[3ranks-3pernode-dispatch_send]",
    "test_gpu_masks.py::test_a_rank_stops_behind_a_half[4ranks-1pernode-dispatch]",
    "test_gpu_masks.py::test_halves_in_flight_and_releases[3ranks-3pernode]",
    "test_gpu_elastic.py::test_grows_and_shrinks[2 a node, absent alone-drop]",
    "test_gpu_elastic.py::test_a_lost_rank_is_replaced[4 a node-drop]",
    "test_gpu_elastic.py::test_a_rank_that_is_lost_at_the_change_costs_no_other[1 a node]",
    "test_gpu_nixl_ep.py::test_masks_by_hand[3ranks-3pernode]",
)


def cases_of(which: str, rest: bool) -> list[str]:
    """Returns the cases of a group that `make test` runs, or the rest."""
    if which == ONE_BLOCK:  # one of them shows a fault
        return [] if rest else CASES[which]
    return [case for case in CASES[which] if (case in REST) == rest]


def ordering_lines(which: str) -> list[str]:
    """Returns names of the lines that order memory and have to run in this group."""
    return [
        site.name
        for site in kernel_mutations.sites()
        if which == ("in bulk" if "bulk" in site.file else "calls")
    ]


GROUPS = [
    *(pytest.param(which, False, id=which) for which in CASES),
    *(
        pytest.param(which, True, id=f"{which}, the rest", marks=pytest.mark.more)
        for which in CASES
        if cases_of(which, rest=True)
    ),
]


# A few faults of kernel_mutations.py: named ones, and lines that order memory, by file and text.
FAULTS = [
    "kPartBefore",
    ("device/steps.cuh", "fence_acq_rel_sys"),
    ("dispatch.cu", "griddepcontrol_wait"),
    ("dispatch/bulk_recv.cuh", "fence_global_for_bulk"),
]
needs_an_emulated_gpu = pytest.mark.skipif(
    bool(emulated_gpu.why_not()), reason=emulated_gpu.why_not() or "it can run"
)


@pytest.mark.timeout(DEADLINE_S + 10)
@needs_an_emulated_gpu
@pytest.mark.parametrize(("which", "rest"), GROUPS)
def test_kernels_on_an_emulated_gpu(which: str, rest: bool, tmp_path: Path) -> None:
    cases, ordered = cases_of(which, rest), tmp_path / "ordered"
    more = {"MOE_P2P_EMULATED_BLOCKS": "1"} if which == ONE_BLOCK else {}
    more["MOE_P2P_EMULATED_ORDERED"] = str(ordered)
    limits = ("--durations=3", "-o", f"timeout={DEADLINE_S}")
    ran = emulated_runs.run(cases, *limits, deadline_s=DEADLINE_S, **more)
    assert ran.status == 0, ran.output
    passed = re.search(r"^(\d+) passed in", ran.output.splitlines()[-1])  # and none skipped
    assert passed is not None, ran.output
    assert int(passed[1]) >= len(cases), ran.output
    if not rest:
        assert set(ordering_lines(which)) <= set(ordered.read_text().splitlines())


@pytest.mark.timeout(DEADLINE_S + 10)
@needs_an_emulated_gpu
@pytest.mark.parametrize(
    "fault",
    [FAULTS[0], *(pytest.param(fault, marks=pytest.mark.more) for fault in FAULTS[1:])],
    ids=str,
)
def test_a_fault_of_a_kernel_is_caught(fault: str | tuple[str, str]) -> None:
    name = fault if isinstance(fault, str) else kernel_mutations.site_of(*fault).name
    assert kernel_mutations.caught(name, kernel_mutations.cases_of(name))


@pytest.mark.timeout(DEADLINE_S + 10)
@needs_an_emulated_gpu
def test_streams_that_do_not_wait_for_each_other_are_caught() -> None:
    case = "test_gpu_overlap.py::test_one_communicator_on_two_streams_in_turns[2ranks-2pernode]"
    text = kernel_mutations.caught("", [case], MOE_P2P_EMULATED_WITHOUT_EVENTS="1")
    assert re.search("emulated GPU|another call of this communicator was running", text), text


@needs_an_emulated_gpu
def test_a_run_is_killed_at_its_deadline_and_the_next_one_begins() -> None:
    ran = emulated_runs.run(["test_gpu.py"], deadline_s=0.1)
    assert ran.status == -signal.SIGKILL, ran
    ran = emulated_runs.run(["test_gpu.py"], "--collect-only", deadline_s=DEADLINE_S)
    assert ran.status == 0, ran.output
    assert "tests collected" in ran.output


def test_every_mutation_of_kernels_has_a_case() -> None:
    header = (ROOT / "kernels" / "device" / "mutation.cuh").read_text()
    assert set(re.findall(r"^  (k\w+),", header, re.MULTILINE)) == set(kernel_mutations.NAMED)
    kernels = "".join(path.read_text() for path in (ROOT / "kernels").rglob("*.cuh"))
    used = set(re.findall(r"MOE_P2P_MUTATED\((k\w+)\)", kernels))
    assert used == set(kernel_mutations.NAMED)


def test_make_test_runs_the_cases_that_show_faults() -> None:
    run = {case for which in CASES for case in cases_of(which, rest=False)} | {ONE_BLOCK}
    shown = {
        *kernel_mutations.NAMED.values(),
        *itertools.chain(*kernel_mutations.ORDERED_BY.values()),
    }
    assert shown <= run
    assert set(REST) <= {case for cases in CASES.values() for case in cases}


def test_make_test_catches_nine_of_ten_ordering_lines_of_each_file_but_one() -> None:
    """Each line that UNSEEN does not list is caught by cases of `make test`, as shown above."""
    sites = list(kernel_mutations.sites())
    for file, text in kernel_mutations.UNSEEN:
        assert len([site for site in sites if site.file == file and text in site.text]) == 1, text
    unseen = Counter(site.file for site in sites if site.why_unseen)
    lines = Counter(site.file for site in sites)
    assert {file for file in unseen if unseen[file] > lines[file] / 10} == {"clean.cu"}
