#include "engine/loop_back.h"

#include <algorithm>
#include <numeric>

#include "base/log.h"
#include "engine/peer.h"

namespace moe_p2p::engine {

using base::Code;

namespace {

constexpr uint64_t kBytes = 64;  // of a read: any byte will do
constexpr int kKvPriority = 1;

}  // namespace

LoopBack::LoopBack(TransferEngine& engine)
    : engine_(engine),
      landing_(kBytes * static_cast<size_t>(engine.num_nics())),
      first_(static_cast<size_t>(engine.num_nics()), 0),
      own_(first_.size()),
      handle_(engine.register_memory({.data = landing_.data(), .bytes = landing_.size()})),
      self_(engine.connect(engine.address(), kKvPriority)) {
  std::iota(own_.begin(), own_.end(), 0);
}

void LoopBack::read(std::span<const MemoryHandle* const> memory, platform::Deadline deadline) {
  readings_.remove_if([](const Reading& reading) { return reading.request.done(); });
  const auto before = static_cast<std::ptrdiff_t>(readings_.size());
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
    reading.request.priority = kKvPriority;
    engine_.submit(reading.request);
  }
  for (auto reading = std::next(readings_.begin(), before); reading != readings_.end(); ++reading) {
    MOE_P2P_CHECK(reading->request.wait(deadline), Code::kTimeout,
                  "reading own memory through own NICs takes too long");
    MOE_P2P_CHECK(reading->request.status().ok(), Code::kTransport,
                  "reading own memory through own NICs failed (",
                  base::code_name(reading->request.status().code), ")", engine_.first_failure());
  }
}

}  // namespace moe_p2p::engine
