// Which calls a plain kernel takes. It is compiled without all that only other calls use
// (kernels/device/shape.cuh, kPlain).
#pragma once

#include <map>

#include "base/log.h"
#include "kernels/abi/params.h"
#include "moe/device/grid.h"

namespace moe_p2p::moe {

inline bool is_plain(const abi::DispatchParams& p) noexcept {
  return p.num_chunks == 1 && !p.solo && !p.opaque && p.num_extras == 0 && !p.num_tokens &&
         !p.topk_copy && !p.zero_padding && !p.wait_ticks && !p.ready;
}

inline bool is_plain(const abi::CombineParams& p) noexcept {
  return p.num_chunks == 1 && !p.empty && !p.with_scalars && !p.rows_apart && !p.wait_ticks &&
         !p.ready.counters;
}

// Returns the plain kernel for a plain call, where there is one, else the general one, or null.
template <typename Key>
const DeviceKernel* find_variant(const std::map<Key, DeviceKernel>& kernels, Key key, bool plain) {
  key.plain = plain;
  auto found = kernels.find(key);
  key.plain = false;
  if (found == kernels.end()) found = kernels.find(key);
  return found == kernels.end() ? nullptr : &found->second;
}

// The same of kernels for short calls, where there are some and the call has at most `num_slots`
// tokens of each rank, as they take. Both do the same to memory that ranks share, so a rank may
// choose for itself (docs/gpu.md, "Short calls").
template <typename Key>
const DeviceKernel& find_kernel(const std::map<Key, DeviceKernel>& kernels, Key key, bool plain,
                                int32_t num_slots, const char* what) {
  key.is_short = true;
  const DeviceKernel* found = find_variant(kernels, key, plain);
  if (found && num_slots <= found->max_tokens) return *found;
  key.is_short = false;
  found = find_variant(kernels, key, plain);
  MOE_P2P_CHECK(found, base::Code::kUnavailable, what,
                " is not compiled for these types; make the same call once outside torch.compile");
  return *found;
}

}  // namespace moe_p2p::moe
