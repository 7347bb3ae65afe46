// The data path of a libfabric NIC: what the polling thread runs.
#include <algorithm>
#include <array>
#include <cerrno>

#include "provider/libfabric/domain.h"
#include "provider/libfabric/failure.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

constexpr size_t kEntries = 64;  // read at a time

}  // namespace

size_t LibfabricDomain::post(std::span<const WorkRequest> requests) noexcept {
  if (!gate_.try_enter()) return 0;
  const size_t count = writes_.accept(requests);
  writes_.pump();
  gate_.leave();
  return count;
}

size_t LibfabricDomain::poll(std::span<Completion> completions) noexcept {
  if (!gate_.try_enter()) return 0;
  writes_.pump();
  size_t count = take_ready(completions);
  while (count < completions.size()) {
    const size_t wanted = std::min(kEntries, completions.size() - count);
    const size_t shown = read_queue(completions.subspan(count, wanted));
    count += shown;
    if (shown < wanted) break;
  }
  gate_.leave();
  return count;
}

bool LibfabricDomain::idle() const noexcept {
  if (sleeps_ || !gate_.try_enter()) return false;
  const bool idle = writes_.num_in_flight() == 0 && ready_.empty();
  gate_.leave();
  return idle;
}

size_t LibfabricDomain::take_ready(std::span<Completion> completions) noexcept {
  const size_t count = std::min(completions.size(), ready_.size());
  for (size_t i = 0; i < count; ++i) {
    completions[i] = ready_.back();
    ready_.pop_back();
  }
  return count;
}

// Also the provider's progress. At most 64 completions at a time.
size_t LibfabricDomain::read_queue(std::span<Completion> completions) noexcept {
  std::array<CqEntry, kEntries> entries;
  CompletionQueue& cq = *session_.cq;
  const ssize_t result =
      cq.ops->read(&cq, entries.data(), std::min(completions.size(), entries.size()));
  if (result == -EAGAIN) return 0;
  if (result < 0) return read_error(completions);
  size_t count = 0;
  for (const CqEntry& entry : std::span(entries).first(static_cast<size_t>(result))) {
    if (Writers::announces(entry.data) && own_writer_ != 0 && entry.flags & kRemoteWrite) {
      writers_.note(entry.data);
    } else if (entry.flags & kRemoteWrite) {  // not all providers report its length
      completions[count++] = {.kind = Completion::Kind::kImmediate,
                              .imm = static_cast<uint32_t>(entry.data),
                              .status = {}};
    } else if (const auto done = writes_.finish(entry.op_context, {})) {
      completions[count++] = *done;
    }
  }
  return count;
}

size_t LibfabricDomain::read_error(std::span<Completion> completions) noexcept {
  CqError error{};
  CompletionQueue& cq = *session_.cq;
  const ssize_t result = cq.ops->readerr(&cq, &error, 0);
  if (result == -EAGAIN) return 0;
  if (result < 0) {  // the queue itself is broken
    writes_.fail_all({Code::kTransport, static_cast<int32_t>(-result)});
    return take_ready(completions);
  }
  // Also reports a peer's write that was refused here, without a context or with a foreign one.
  if (!writes_.owns(error.op_context)) return 0;
  const auto status = status_of(error.err, error.prov_errno, config_);
  const auto done = writes_.finish(error.op_context, status, error.prov_errno);
  if (!done) return 0;
  completions[0] = *done;
  return 1;
}

}  // namespace moe_p2p::provider::libfabric
