// Every op of the package with its schema; the one place that defines names, types and mutation.
// Objects are numbers (registry.h). Autograd is in moe_p2p/moe/ops.py; fake kernels are where
// register_fake is called.
#include <torch/csrc/stable/library.h>

#include <string>

namespace {

// `options` is the number of a moe_p2p.DispatchOptions (moe/dispatch_options.h); combine takes its
// dispatch's number with the order of its sums and the type of what travels (`partials`:
// abi::Partials) above it. dispatch's `more` holds source, ranges, wait_ticks and the copy of
// topk_idx if the options ask for them, then row_topk for rows by rank, then the extras; combine's
// `more` holds the scalars, then the wait_ticks.
//
// Whole calls exist twice. The `_inference` ones have no autograd: for the others torch.library
// calls a Python function first, which doubles what a call of few tokens costs. What few calls give
// comes last: an argument costs torch about 2,000 instructions, one left out at the end 1,000.
// dispatch checks `others`, communicators, first; `extras` and `bias` are lists or None. Eager
// calls of `_inference` that nobody watches are direct ones (direct/direct_calls.cpp).
const std::string kDispatch =
    "(int comm, int options, int max_tokens, int capacity, Tensor x, Tensor topk_idx, "
    "Tensor? topk_weights=None, Tensor? scales=None, int[] others=[], Tensor[]? extras=None, "
    "Tensor? num_tokens=None, int num_tokens_host=-1";
const std::string kDispatched =
    ") -> (Tensor rows, Tensor row_scales, Tensor row_weights, Tensor counts, Tensor offsets, "
    "Tensor handle, Tensor[] more)";
// Waits for the counts of all ranks, and makes outputs of exactly as many rows; max_tokens -1: as
// many as the rank with most has. kernel: counts topk_idx first; -1: that was done. On the host:
// gathered, the counts of all ranks; sizes, the rows of each local expert, rounded up to the
// alignment; tokens that come here, each once; grouped, the sum of sizes. All but rows and scales
// share one allocation.
const std::string kDispatchCounted =
    "(int comm, int options, Tensor x, Tensor? scales, Tensor topk_idx, Tensor? topk_weights, "
    "int max_tokens, int alignment, int kernel, int host, int call) -> (Tensor rows, "
    "Tensor row_scales, Tensor row_weights, Tensor counts, Tensor offsets, Tensor handle, "
    "Tensor[] more, Tensor gathered, Tensor sizes, int tokens, int max_tokens, int grouped)";
const std::string kCombine =  // out_dtype: None, y's
    "(int comm, int options, int max_tokens, Tensor handle, Tensor y, Tensor topk_idx, "
    "Tensor? row_weights=None, Tensor? topk_weights=None, Tensor? row_scalars=None, "
    "Tensor[]? bias=None, ScalarType? out_dtype=None, int capacity=0, bool with_wait_ticks=False";
const std::string kCombined = ") -> (Tensor out, Tensor[] more)";

// torch.library does not see what was left out, and wants a gradient for each argument.
std::string without_defaults(std::string arguments) {
  for (size_t at = 0; (at = arguments.find('=')) != std::string::npos;)
    arguments.erase(at, arguments.find(',', at) - at);
  return arguments;
}

}  // namespace

STABLE_TORCH_LIBRARY(moe_p2p, m) {
  // --- engine: set-up ---
  m.def(
      "engine_create(str provider, int num_nics, str settings, str label, str wait, "
      "int proxy_cpu) -> int");
  m.def("engine_close(int engine) -> ()");
  m.def("engine_address(int engine) -> Tensor");
  m.def("engine_register(int engine, Tensor memory, bool in_order=False) -> SymInt");
  m.def("engine_unregister(int engine, int memory) -> ()");
  m.def("engine_why_no_fence(int engine) -> str");
  m.def("engine_grant(int engine, int memory) -> SymInt");
  m.def("engine_descriptor(int engine, int memory) -> Tensor");
  m.def("engine_connect(int engine, Tensor address, int priority=1, int tag=0) -> SymInt");
  m.def("engine_disconnect(int engine, int peer) -> ()");
  m.def("engine_sever(int engine, int tag, int[] memories, float timeout_s) -> ()");
  m.def(
      "engine_resolve(int engine, Tensor descriptor, int? peer=None, "
      "int priority=1) -> SymInt");
  m.def("engine_region_bytes(int engine, int region) -> int");
  m.def("engine_counters(int engine) -> Tensor");
  m.def(
      "engine_record(int engine, int num_events) -> (Tensor events, int overwritten, Tensor "
      "counters)");
  m.def("software_nic_bytes(str settings, int num_peers, bool timed=False) -> int");
  m.def("timed_link(str settings) -> int[]");
  m.def("host_identity() -> str");
  m.def("letter() -> str");               // base/letter.h
  m.def("remove_stale_memory() -> int");  // of killed processes, in /dev/shm; number of objects
  m.def("ranges_open(str[] files) -> ()");
  m.def("range_push(str name) -> ()");
  m.def("range_pop() -> ()");
  m.def("take_interrupt() -> int");                              // python_signals.cpp
  m.def("direct_call(str name, int self, int[] torch) -> int");  // direct/direct_calls.cpp

  // --- engine: transfers; each returns a request to wait for; rows: of a moe_p2p.PageRows ---
  m.def(
      "engine_write(int engine, int memory, int offset, int region, int region_offset, int bytes, "
      "int? imm=None, int priority=1) -> int");
  m.def(
      "engine_write_pages(int engine, int memory, int offset, int region, int region_offset, "
      "int[] rows, Tensor pages, Tensor region_pages, int? imm=None, bool imm_per_page=True, "
      "int priority=1, int[] after=[]) -> SymInt");
  m.def(
      "engine_write_layers(int engine, Tensor places, int[] rows, Tensor pages, "
      "Tensor region_pages, int? imm=None, int priority=1, int[] after=[]) -> SymInt");
  m.def(
      "engine_write_all(int engine, Tensor table, Tensor pages, Tensor region_pages, "
      "int? imm=None, int priority=1) -> SymInt");
  m.def(
      "engine_read(int engine, int memory, int offset, int region, int region_offset, int bytes, "
      "int priority=1) -> SymInt");
  m.def(
      "engine_read_pages(int engine, int memory, int offset, int region, int region_offset, "
      "int[] rows, Tensor pages, Tensor region_pages, int priority=1) -> SymInt");
  m.def(
      "engine_scatter(int engine, int memory, Tensor slices, bool by_bytes, int? imm=None, "
      "int priority=1) -> SymInt");
  m.def("engine_imm(int engine, int peer, int imm, int priority=1) -> int");
  m.def("engine_wait(int engine, int request, float timeout_s, float waited_s=0) -> ()");
  m.def("engine_poll(int engine, int request) -> bool");
  m.def("engine_forget(int engine, int request) -> ()");
  m.def("engine_cancel(int engine, int request) -> Tensor");
  m.def("engine_report(int engine, int request) -> Tensor");
  m.def("engine_queue(int engine) -> SymInt");
  m.def("engine_queue_fd(int engine, int queue) -> int");
  m.def("engine_watch(int engine, int queue, int request) -> ()");
  m.def("engine_take(int engine, int queue, float timeout_s) -> Tensor");
  m.def("engine_imm_wait(int engine, int imm, int count, float timeout_s) -> int");
  m.def("engine_imm_value(int engine, int imm) -> int");
  m.def("engine_imm_free(int engine, int imm) -> int");
  m.def("engine_imm_discarded(int engine) -> int");
  m.def(
      "copy_rows(Tensor(a!) memory, Tensor(b!) packed, Tensor units, int offset, int unit, "
      "int row_bytes, int num_rows, int row_stride, int first_row, bool gather, int kernel=0, "
      "int num_blocks=0, int stream=0) -> ()");

  // --- signals: `after` of engine_write_pages is [signals, layer, step], or empty ---
  m.def(
      "signals_create(int engine, Tensor words, Tensor step, Tensor[] caches, int kernel) -> int");
  m.def("signals_close(int signals) -> ()");
  m.def("signals_values(int signals) -> Tensor");
  m.def("signal(int signals, int layer, Tensor(a!) kv) -> ()");

  // --- all to all: set-up ---
  m.def("check_ranks_per_node(int ranks) -> ()");
  m.def("plan(str settings) -> str");  // settings: communicator_settings.h, as in all_to_all_create
  m.def("shape(str settings) -> str");  // abi::Shape
  m.def("layout(int topk) -> str");
  m.def("all_to_all_create(int engine, str settings, Tensor? masks=None) -> int");
  m.def("all_to_all_use_device(int comm, str memory) -> ()");  // device_settings.h, as `kernel`
  m.def("all_to_all_signals(int comm) -> int[]");
  m.def("all_to_all_use_signals(int comm, int[] device_addresses) -> ()");
  m.def(
      "all_to_all_set_dispatch_kernel(int comm, ScalarType x_dtype, int options, str kernel, "
      "int x_bytes=0, bool plain=False, bool ready=False) -> ()");
  m.def(
      "all_to_all_set_combine_kernel(int comm, ScalarType y_dtype, ScalarType out_dtype, "
      "str kernel, bool by_topk=False, int partials=0, bool plain=False, bool ready=False) -> ()");
  m.def("all_to_all_address(int comm) -> Tensor");
  m.def("all_to_all_connect(int comm, Tensor[] addresses) -> ()");
  m.def("all_to_all_enter(int comm, int epoch) -> ()");
  m.def("all_to_all_lost(int comm) -> int");
  m.def("all_to_all_counters(int comm) -> int[]");
  m.def(
      "all_to_all_watch(int comm, int count, bool preparing, int step, int waited_ms, int[] "
      "masked) "
      "-> int[]");
  m.def("all_to_all_check_again(int comm, Tensor first, Tensor second) -> ()");
  m.def("all_to_all_ended(int comm) -> int[]");
  m.def("all_to_all_close(int comm) -> ()");
  m.def("all_to_all_broken(int comm) -> str");
  m.def("all_to_all_arrival_flags(int comm) -> str");
  m.def("all_to_all_check(int[] comms) -> ()");
  m.def("all_to_all_release_oldest(int comm) -> ()");
  m.def("all_to_all_clean_masks(int comm) -> ()");
  m.def("all_to_all_set_clean_kernel(int comm, str kernel) -> ()");
  m.def("all_to_all_set_enter_kernel(int comm, str kernel) -> ()");
  m.def("all_to_all_gather_counts(int comm, Tensor values) -> Tensor");
  m.def("all_to_all_times(int comm) -> int[]");
  m.def("all_to_all_snapshot(int comm) -> (str settings, Tensor flags, int[] nics)");
  m.def(
      "all_to_all_record(int comm, int num_events) -> "
      "(Tensor spans, int overwritten, int communicator)");
  m.def("handle_layout(int comm, int num_rows, int max_tokens) -> str");  // abi::HandleLayout

  // --- replay of recorded events (replay_ops.cpp); event: base/recorder.h ---
  m.def(
      "replay_create(str settings, int[] nics, int[] flags, int[] masked, int first_step) -> int");
  m.def("replay_connect(int[] replays) -> ()");
  m.def("replay_feed(int replay, int[] event) -> str");  // what differs
  m.def("replay_waits(int replay) -> (str lines, int num_untaken)");
  m.def("replay_close(int replay) -> ()");

  // --- counts: `host` is the address of abi::count_words(), which hold the call's number last ---
  m.def(
      "count_routing(int kernel, Tensor topk_idx, int num_experts, int num_ranks, int num_nodes, "
      "int host, int call) -> (Tensor per_rank, Tensor per_node, Tensor per_expert, "
      "Tensor in_rank)");
  m.def(
      "share_counts(int kernel, Tensor per_rank, Tensor per_expert, int num_tokens, int host, "
      "int call) -> ()");
  m.def(
      "all_to_all_agree(int comm, Tensor? topk_idx, int kernel, int num_values, int host, "
      "int call, int alignment) -> (Tensor gathered, Tensor sizes, int tokens, int max_tokens, "
      "int grouped)");
  m.def(
      "map_experts(int kernel, Tensor topk_idx, Tensor slots, Tensor counts, int num_slots, "
      "int first) -> Tensor");

  // --- all to all: halves ---
  m.def(
      "dispatch_send(int comm, int options, Tensor x, Tensor? scales, Tensor[] extras, "
      "Tensor topk_idx, Tensor? topk_weights, Tensor? num_tokens, int num_tokens_host, "
      "int max_tokens, Tensor(a!) handle) -> ()");
  m.def(
      "dispatch_recv(int comm, int options, Tensor(a!) handle, Tensor(b!) x, Tensor(c!)? scales, "
      "Tensor(d!)[] extras, Tensor(e!) row_weights, Tensor(f!) counts, Tensor(g!) offsets, "
      "Tensor(h!)? source, Tensor(i!)? ranges, Tensor(j!)? wait_ticks, Tensor(k!)? row_topk, "
      "int capacity, Tensor(l!)? ready=None, int num_sms=0) -> ()");
  m.def(
      "combine_send(int comm, Tensor(a!) handle, Tensor y, Tensor? row_weights, "
      "Tensor? row_scalars, Tensor? topk_weights, ScalarType out_dtype, int max_tokens, "
      "int partials=0, Tensor? ready=None, Tensor? ready_base=None, int ready_rows=0, "
      "int ready_want=0, int num_sms=0) -> ()");
  m.def(
      "combine_recv(int comm, Tensor(a!) handle, Tensor(b!) out, Tensor(c!)? out_scalars, "
      "Tensor[] bias, Tensor(d!)? wait_ticks, int partials=0) -> ()");
  m.def("release(int comm, Tensor(a!) handle) -> ()");

  // --- all to all: whole calls ---
  m.def(("dispatch" + without_defaults(kDispatch) + kDispatched).c_str());
  m.def(("dispatch_inference" + kDispatch + kDispatched).c_str());
  m.def(("dispatch_counted" + kDispatchCounted).c_str());
  m.def(("combine" + without_defaults(kCombine) + kCombined).c_str());
  m.def(("combine_inference" + kCombine + kCombined).c_str());
  m.def(
      "combine_out(int comm, Tensor y, Tensor? row_weights, Tensor? row_scalars, "
      "Tensor? topk_weights, Tensor[] bias, Tensor handle, int max_tokens, Tensor(a!) out, "
      "Tensor(b!)? out_scalars, Tensor(c!)? wait_ticks, int partials=0) -> ()");
}
