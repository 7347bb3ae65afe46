// torch.ops.moe_p2p.engine_*: transfers over an engine, and waits for them.
#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <utility>

#include "engine/pieces.h"
#include "ops/engine_object.h"
#include "ops/signals_object.h"
#include "platform/ranges.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

uint64_t unsigned_of(int64_t value, const char* name) {
  MOE_P2P_CHECK(value >= 0, Code::kInvalidArgument, name, " is ", value, ", must be at least 0");
  return static_cast<uint64_t>(value);
}

// Users have the lower half of the immediates, the communicators the upper one.
uint32_t free_form(int64_t imm) {
  MOE_P2P_CHECK(imm >= 0 && imm < int64_t{engine::ImmKey::kKeyedBit}, Code::kInvalidArgument,
                "imm is ", imm, ", must be from 0 to ", engine::ImmKey::kKeyedBit - 1);
  return static_cast<uint32_t>(imm);
}

std::optional<uint32_t> free_form(std::optional<int64_t> imm) {
  if (!imm) return std::nullopt;
  return free_form(*imm);
}

std::vector<int64_t> page_indices(const Tensor& pages, const char* name) {
  const auto* data = input<int64_t>(pages, {name, {ScalarType::Long}, {kAny}});
  return {data, data + pages.numel()};
}

std::shared_ptr<const RequestRecord::Indices> indices_of(const Tensor& source,
                                                         const char* source_name,
                                                         const Tensor& target,
                                                         const char* target_name) {
  return std::make_shared<const RequestRecord::Indices>(
      RequestRecord::Indices{page_indices(source, source_name), page_indices(target, target_name)});
}

Tensor tensor_of(std::initializer_list<uint64_t> values) {
  Tensor tensor = make_tensor({std::ssize(values)}, ScalarType::Long);
  std::ranges::copy(values, static_cast<int64_t*>(tensor.mutable_data_ptr()));
  return tensor;
}

// The engine's thread looks at the gates, so they are those of its own signals.
std::shared_ptr<SignalsObject> signals_of(int64_t engine, int64_t number) {
  auto object = signals().get(number);
  MOE_P2P_CHECK(object->engine() == engine, Code::kInvalidArgument, "signals ", number,
                " are of another engine; make KVSignals of the sender that writes");
  return object;
}

// after: [signals, layer, step], or empty.
void wait_for_signal(RequestRecord& record, int64_t engine, const std::vector<int64_t>& after) {
  if (after.empty()) return;
  MOE_P2P_CHECK(after.size() == 3, Code::kInvalidArgument, "after has ", after.size(),
                " numbers, must have 3: signals, layer and step");
  const auto object = signals_of(engine, after[0]);
  record.request.gate = &object->gate(after[1]);
  record.request.gate_value = unsigned_of(after[2], "step");
  record.gates = object;
}

int64_t engine_write(int64_t engine, int64_t memory, int64_t offset, int64_t region,
                     int64_t region_offset, int64_t bytes, std::optional<int64_t> imm,
                     int64_t priority) {
  const platform::Range range("moe_p2p.write");
  const auto object = engines().get(engine);
  auto record = std::make_shared<RequestRecord>();
  record->what = base::concat("write of ", bytes, " bytes");
  const auto named = object->naming();
  record->request.operation =
      engine::Write{.source = object->memory(memory),
                    .source_offset = unsigned_of(offset, "offset"),
                    .target = object->region(region),
                    .target_offset = unsigned_of(region_offset, "region_offset"),
                    .bytes = unsigned_of(bytes, "bytes"),
                    .imm = free_form(imm)};
  return object->submit(std::move(record), priority);
}

// How pages lie on both sides; the numbers of a moe_p2p.PageRows, in its order.
class PageRows {
 public:
  explicit PageRows(const std::vector<int64_t>& numbers) : numbers_(numbers) {
    MOE_P2P_CHECK(numbers.size() == std::size(kNames), Code::kInvalidArgument, "rows has ",
                  numbers.size(), " numbers, must have ", std::size(kNames));
  }
  int64_t page_bytes() const { return numbers_[0]; }

  engine::WritePages write(const RequestRecord::Indices& pages, const engine::MemoryHandle* source,
                           int64_t offset, const engine::RemoteRegion* target,
                           int64_t region_offset, std::optional<int64_t> imm) const {
    return {.source = source,
            .target = target,
            .page_bytes = at(0),
            .source_pages = here(pages.source, offset),
            .target_pages = there(pages.target, region_offset),
            .imm = free_form(imm),
            .row_bytes = at(3),
            .imms = engine::WritePages::Imms::kPerNic};
  }
  engine::ReadPages read(const RequestRecord::Indices& pages, const engine::MemoryHandle* target,
                         int64_t offset, const engine::RemoteRegion* source,
                         int64_t region_offset) const {
    return {.target = target,
            .source = source,
            .page_bytes = at(0),
            .target_pages = here(pages.target, offset),
            .source_pages = there(pages.source, region_offset),
            .row_bytes = at(3)};
  }

 private:
  static constexpr const char* kNames[] = {"page_bytes", "stride",     "region_stride",
                                           "row_bytes",  "row_stride", "region_row_stride"};

  uint64_t at(size_t i) const { return unsigned_of(numbers_[i], kNames[i]); }
  engine::Pages here(std::span<const int64_t> pages, int64_t offset) const {
    return {pages, at(1), unsigned_of(offset, "offset"), at(4)};
  }
  engine::Pages there(std::span<const int64_t> pages, int64_t offset) const {
    return {pages, at(2), unsigned_of(offset, "region_offset"), at(5)};
  }

  const std::vector<int64_t>& numbers_;
};

int64_t engine_write_pages(int64_t engine, int64_t memory, int64_t offset, int64_t region,
                           int64_t region_offset, const std::vector<int64_t>& rows_numbers,
                           const Tensor& pages, const Tensor& region_pages,
                           std::optional<int64_t> imm, bool imm_per_page, int64_t priority,
                           const std::vector<int64_t>& after) {
  const platform::Range range("moe_p2p.write_pages");
  const auto object = engines().get(engine);
  const PageRows rows(rows_numbers);
  auto record = std::make_shared<RequestRecord>();
  wait_for_signal(*record, engine, after);
  record->pages = indices_of(pages, "pages", region_pages, "region_pages");
  record->what = base::concat("write of ", record->pages->source.size(), " pages of ",
                              rows.page_bytes(), " bytes");
  const auto named = object->naming();
  auto write = rows.write(*record->pages, object->memory(memory), offset, object->region(region),
                          region_offset, imm);
  if (imm_per_page) write.imms = engine::WritePages::Imms::kPerPage;
  record->request.operation = write;
  return object->submit(std::move(record), priority);
}

// The same pages of several layers, a request for each: the first one's number; the others' follow.
// places [n, 5]: memory, offset, region, offset in the region, layer. after: [signals, step], or
// empty.
int64_t engine_write_layers(int64_t engine, const Tensor& places,
                            const std::vector<int64_t>& rows_numbers, const Tensor& pages,
                            const Tensor& region_pages, std::optional<int64_t> imm,
                            int64_t priority, const std::vector<int64_t>& after) {
  const platform::Range range("moe_p2p.write_layers");
  const auto object = engines().get(engine);
  const PageRows rows(rows_numbers);
  const auto* row = input<int64_t>(places, {"places", {ScalarType::Long}, {kAny, 5}});
  const auto shared = indices_of(pages, "pages", region_pages, "region_pages");
  const auto what =
      base::concat("write of ", shared->source.size(), " pages of ", rows.page_bytes(), " bytes");
  MOE_P2P_CHECK(after.empty() || after.size() == 2, Code::kInvalidArgument, "after has ",
                after.size(), " numbers, must have 2: signals and step");
  const auto gates = after.empty() ? nullptr : signals_of(engine, after[0]);
  std::vector<std::shared_ptr<RequestRecord>> records;
  const auto named = object->naming();
  for (int64_t i = 0; i < places.size(0); ++i, row += 5) {
    auto record = std::make_shared<RequestRecord>();
    record->pages = shared;
    record->what = base::concat(what, " of layer ", row[4]);
    if (gates) {
      record->request.gate = &gates->gate(row[4]);
      record->request.gate_value = unsigned_of(after[1], "step");
      record->gates = gates;
    }
    record->request.operation =
        rows.write(*shared, object->memory(row[0]), row[1], object->region(row[2]), row[3], imm);
    records.push_back(std::move(record));
  }
  return object->submit(records, priority);
}

// Several requests: the first one's number; the others' follow. table [n, 8]: memory, region, bytes
// of a page and of a row, row strides here and there, and its part of the pages, the first and how
// many. Pages are given by their first byte.
int64_t engine_write_all(int64_t engine, const Tensor& table, const Tensor& pages,
                         const Tensor& region_pages, std::optional<int64_t> imm, int64_t priority) {
  const platform::Range range("moe_p2p.write_all");
  const auto object = engines().get(engine);
  const auto* row = input<int64_t>(table, {"table", {ScalarType::Long}, {kAny, 8}});
  const auto shared = indices_of(pages, "pages", region_pages, "region_pages");
  const std::span<const int64_t> ours(shared->source), theirs(shared->target);
  const auto number = free_form(imm);
  std::vector<std::shared_ptr<RequestRecord>> records;
  for (int64_t i = 0; i < table.size(0); ++i, row += 8) {
    const auto first = unsigned_of(row[6], "first page"), count = unsigned_of(row[7], "count");
    MOE_P2P_CHECK(
        first <= ours.size() && count <= ours.size() - first && ours.size() == theirs.size(),
        Code::kInvalidArgument, "request ", i, " has pages ", first, " to ", first + count, " of ",
        ours.size(), ", and ", theirs.size(), " at the peer");
    auto record = std::make_shared<RequestRecord>();
    record->pages = shared;
    record->what = base::concat("write of ", count, " pages of ", row[2], " bytes");
    record->request.operation = engine::WritePages{
        .source = object->memory(row[0]),
        .target = object->region(row[1]),
        .page_bytes = unsigned_of(row[2], "page_bytes"),
        .source_pages = {ours.subspan(first, count), 1, 0, unsigned_of(row[4], "row_stride")},
        .target_pages = {theirs.subspan(first, count), 1, 0,
                         unsigned_of(row[5], "region_row_stride")},
        .imm = number,
        .row_bytes = unsigned_of(row[3], "row_bytes"),
        .imms = engine::WritePages::Imms::kPerNic};
    records.push_back(std::move(record));
  }
  return object->submit(records, priority);
}

int64_t engine_read(int64_t engine, int64_t memory, int64_t offset, int64_t region,
                    int64_t region_offset, int64_t bytes, int64_t priority) {
  const platform::Range range("moe_p2p.read");
  const auto object = engines().get(engine);
  auto record = std::make_shared<RequestRecord>();
  record->what = base::concat("read of ", bytes, " bytes");
  const auto named = object->naming();
  record->request.operation =
      engine::Read{.target = object->memory(memory),
                   .target_offset = unsigned_of(offset, "offset"),
                   .source = object->region(region),
                   .source_offset = unsigned_of(region_offset, "region_offset"),
                   .bytes = unsigned_of(bytes, "bytes")};
  return object->submit(std::move(record), priority);
}

int64_t engine_read_pages(int64_t engine, int64_t memory, int64_t offset, int64_t region,
                          int64_t region_offset, const std::vector<int64_t>& rows_numbers,
                          const Tensor& pages, const Tensor& region_pages, int64_t priority) {
  const platform::Range range("moe_p2p.read_pages");
  const auto object = engines().get(engine);
  const PageRows rows(rows_numbers);
  auto record = std::make_shared<RequestRecord>();
  record->pages = indices_of(region_pages, "region_pages", pages, "pages");
  record->what = base::concat("read of ", record->pages->target.size(), " pages of ",
                              rows.page_bytes(), " bytes");
  const auto named = object->naming();
  record->request.operation = rows.read(*record->pages, object->memory(memory), offset,
                                        object->region(region), region_offset);
  return object->submit(std::move(record), priority);
}

// slices [n, 4]: offset, region, offset in the region, bytes.
int64_t engine_scatter(int64_t engine, int64_t memory, const Tensor& slices, bool by_bytes,
                       std::optional<int64_t> imm, int64_t priority) {
  const platform::Range range("moe_p2p.scatter");
  const auto object = engines().get(engine);
  const auto* row = input<int64_t>(slices, {"slices", {ScalarType::Long}, {kAny, 4}});
  auto record = std::make_shared<RequestRecord>();
  const auto named = object->naming();
  for (int64_t i = 0; i < slices.size(0); ++i, row += 4)
    record->slices.push_back({.source_offset = unsigned_of(row[0], "offset of a slice"),
                              .target = object->region(row[1]),
                              .target_offset = unsigned_of(row[2], "region_offset of a slice"),
                              .bytes = unsigned_of(row[3], "bytes of a slice")});
  record->what = base::concat("scatter of ", record->slices.size(), " slices");
  record->request.operation =
      engine::Scatter{.source = object->memory(memory),
                      .slices = record->slices,
                      .sharding = by_bytes ? engine::Scatter::Sharding::kByBytes
                                           : engine::Scatter::Sharding::kByPeer,
                      .imm = free_form(imm)};
  return object->submit(std::move(record), priority);
}

int64_t engine_imm(int64_t engine, int64_t peer, int64_t imm, int64_t priority) {
  const auto object = engines().get(engine);
  auto record = std::make_shared<RequestRecord>();
  record->what = base::concat("immediate ", imm);
  const auto named = object->naming();
  record->request.operation = engine::Imm{.peer = object->peer(peer), .imm = free_form(imm)};
  return object->submit(std::move(record), priority);
}

// waited_s: what the caller has waited already, for the error text.
void engine_wait(int64_t engine, int64_t request, double timeout_s, double waited_s) {
  engines().get(engine)->wait_request(request, timeout_s, waited_s);
}

bool engine_poll(int64_t engine, int64_t request) {
  return engines().get(engine)->request(request)->request.done();
}

void engine_forget(int64_t engine, int64_t request) {
  engines().get(engine)->forget_request(request);
}

// [5]: bytes posted, work requests posted, immediates posted, bytes and immediates taken back; [0]
// when it had ended before.
Tensor engine_cancel(int64_t engine, int64_t request) {
  const auto found = engines().get(engine)->cancel_request(request);
  if (!found) return tensor_of({});
  return tensor_of({found->posted.bytes, found->posted_writes, found->posted.imms,
                    found->taken_back.bytes, found->taken_back.imms});
}

// [6] of a request that is done and was not waited for: nanoseconds of the steady clock at its
// first post (0: none) and at its end; bytes, work requests and immediates posted; rows that were
// merged, of a request that ended well.
Tensor engine_report(int64_t engine, int64_t request) {
  const auto object = engines().get(engine);
  const auto record = object->request(request);
  const engine::Request& ended = record->request;
  MOE_P2P_CHECK(ended.done(), Code::kInvalidArgument, object->label(), ": ", record->what,
                " is not done, so there is no report of it");
  engine::Amount posted = ended.cancellation().posted;
  uint64_t merged = 0;
  if (ended.status().ok()) {
    posted = {};
    const int num_nics = object->engine().num_nics();
    for (int nic = 0; nic < num_nics; ++nic)
      posted += engine::left(ended.operation, {.nic = nic, .num_nics = num_nics}, {});
    merged = engine::num_merged(ended.operation, ended.num_writes() - posted.imms);
  }
  const auto ns = [](platform::Deadline at) {
    return static_cast<uint64_t>(std::chrono::nanoseconds(at.time_since_epoch()).count());
  };
  return tensor_of({ns(ended.first_post()), ns(ended.end()), posted.bytes, ended.num_writes(),
                    posted.imms, merged});
}

// A new queue of finished requests, and the descriptor to sleep on; both live as long as the
// engine.
int64_t engine_queue(int64_t engine) { return engines().get(engine)->finished().open(); }
int64_t engine_queue_fd(int64_t engine, int64_t queue) {
  return engines().get(engine)->finished().fd(queue);
}

void engine_watch(int64_t engine, int64_t queue, int64_t request) {
  const auto object = engines().get(engine);
  object->finished().watch(queue, request, object->request(request));
}

// Numbers of watched requests that have ended since the last call; waits until there is one.
Tensor engine_take(int64_t engine, int64_t queue, double timeout_s) {
  const auto object = engines().get(engine);
  const std::vector<int64_t> ended = object->take_finished(queue, timeout_s);
  Tensor tensor = make_tensor({std::ssize(ended)}, ScalarType::Long);
  std::ranges::copy(ended, static_cast<int64_t*>(tensor.mutable_data_ptr()));
  return tensor;
}

int64_t engine_imm_wait(int64_t engine, int64_t imm, int64_t count, double timeout_s) {
  return static_cast<int64_t>(
      engines().get(engine)->wait_imm(free_form(imm), unsigned_of(count, "count"), timeout_s));
}

int64_t engine_imm_value(int64_t engine, int64_t imm) {
  const auto object = engines().get(engine);
  return static_cast<int64_t>(object->engine().imm_table().value(free_form(imm)));
}

int64_t engine_imm_free(int64_t engine, int64_t imm) {
  return static_cast<int64_t>(engines().get(engine)->free_imm(free_form(imm)));
}

int64_t engine_imm_discarded(int64_t engine) {
  return static_cast<int64_t>(engines().get(engine)->engine().imm_table().discarded());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("engine_write", TORCH_BOX(&engine_write));
  m.impl("engine_write_layers", TORCH_BOX(&engine_write_layers));
  m.impl("engine_write_all", TORCH_BOX(&engine_write_all));
  m.impl("engine_write_pages", TORCH_BOX(&engine_write_pages));
  m.impl("engine_read", TORCH_BOX(&engine_read));
  m.impl("engine_read_pages", TORCH_BOX(&engine_read_pages));
  m.impl("engine_scatter", TORCH_BOX(&engine_scatter));
  m.impl("engine_imm", TORCH_BOX(&engine_imm));
  m.impl("engine_wait", TORCH_BOX(&engine_wait));
  m.impl("engine_poll", TORCH_BOX(&engine_poll));
  m.impl("engine_forget", TORCH_BOX(&engine_forget));
  m.impl("engine_cancel", TORCH_BOX(&engine_cancel));
  m.impl("engine_report", TORCH_BOX(&engine_report));
  m.impl("engine_queue", TORCH_BOX(&engine_queue));
  m.impl("engine_queue_fd", TORCH_BOX(&engine_queue_fd));
  m.impl("engine_watch", TORCH_BOX(&engine_watch));
  m.impl("engine_take", TORCH_BOX(&engine_take));
  m.impl("engine_imm_wait", TORCH_BOX(&engine_imm_wait));
  m.impl("engine_imm_value", TORCH_BOX(&engine_imm_value));
  m.impl("engine_imm_free", TORCH_BOX(&engine_imm_free));
  m.impl("engine_imm_discarded", TORCH_BOX(&engine_imm_discarded));
}

}  // namespace moe_p2p::ops
