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

// Returns the plain kernel for a plain call, where there is one.
template <typename Key>
const DeviceKernel& find_kernel(const std::map<Key, DeviceKernel>& kernels, Key key, bool plain,
                                const char* what) {
  key.plain = plain;
  auto found = kernels.find(key);
  key.plain = false;
  if (found == kernels.end()) found = kernels.find(key);
  MOE_P2P_CHECK(found != kernels.end(), base::Code::kUnavailable, what,
                " is not compiled for these types; make the same call once outside torch.compile");
  return found->second;
}

}  // namespace moe_p2p::moe
