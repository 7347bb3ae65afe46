#include "platform/ranges.h"

#include "platform/library.h"

namespace moe_p2p::platform {

void use_ranges(const std::vector<std::string>& files) {
  if (range_functions.load(std::memory_order_acquire)) return;
  const Library library(files, {.what = "a library of NVTX",
                                .install = "pip install nvidia-nvtx, or unset MOE_P2P_NVTX",
                                .name = "the library of NVTX",
                                .needed = "pip install nvidia-nvtx"});
  auto* const functions = new RangeFunctions;  // for good
  library.load("nvtxRangePushA", functions->push);
  library.load("nvtxRangePop", functions->pop);
  range_functions.store(functions, std::memory_order_release);  // pairs with Range
}

}  // namespace moe_p2p::platform
