#include "engine/loop_back.h"

#include <algorithm>
#include <numeric>

namespace moe_p2p::engine {

namespace {

constexpr uint64_t kBytes = 64;  // of a read: any byte will do

}  // namespace

LoopBack::LoopBack(int num_nics)
    : landing_(kBytes * static_cast<size_t>(num_nics)),
      first_(static_cast<size_t>(num_nics), 0),
      own_(first_.size()) {
  std::iota(own_.begin(), own_.end(), 0);
}

std::vector<Request*> LoopBack::reads(std::span<const MemoryHandle* const> memory) {
  readings_.remove_if([](const Reading& reading) { return reading.request.done(); });
  std::vector<Request*> requests;
  for (const MemoryHandle* handle : memory) {
    Reading& reading = readings_.emplace_back();
    reading.region = {self_, handle->span.bytes, {}};
    for (size_t nic = 0; nic < handle->keys.size(); ++nic)
      reading.region.rails.push_back(
          {self_->rails()[nic], handle->keys[nic].remote_addr, handle->keys[nic].remote_key});
    reading.request.operation = ReadPages{.target = handle_,
                                          .source = &reading.region,
                                          .page_bytes = std::min(kBytes, handle->span.bytes),
                                          .target_pages = {own_, kBytes},
                                          .source_pages = {first_, kBytes}};
    reading.request.priority = kPriority;
    requests.push_back(&reading.request);
  }
  return requests;
}

}  // namespace moe_p2p::engine
