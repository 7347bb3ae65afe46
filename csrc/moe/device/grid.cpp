#include "moe/device/grid.h"

#include <algorithm>

namespace moe_p2p::moe {

namespace {

int64_t blocks_for(int64_t items, int num_workers, int64_t most) noexcept {
  return items == 0 ? 0 : std::clamp<int64_t>((items + num_workers - 1) / num_workers, 1, most);
}

}  // namespace

abi::Grid choose_grid(const DeviceKernel& kernel, const GridInput& in) noexcept {
  const int64_t most_send = !in.copies    ? kernel.max_send_blocks
                            : in.own_stay ? kernel.max_away_blocks
                                          : kernel.max_copy_blocks;
  int64_t send = blocks_for(in.send_items, kernel.num_send_workers, most_send);
  int64_t recv = blocks_for(in.recv_items, kernel.num_recv_workers, kernel.max_recv_blocks);
  int64_t most = kernel.max_resident_blocks;
  if (in.num_sms > 0) most = std::min<int64_t>(most, in.num_sms);
  const int64_t least = (send > 0) + (recv > 0);
  const int64_t budget = std::max<int64_t>(most - in.relay_blocks, least);
  const int64_t share =
      std::clamp<int64_t>(budget * most_send / (most_send + kernel.max_recv_blocks), 1,
                          std::max<int64_t>(budget - 1, 1));
  send = std::min(send, std::max(share, budget - recv));
  recv = std::min(recv, budget - send);
  return {static_cast<int32_t>(send), static_cast<int32_t>(recv), in.relay_blocks};
}

}  // namespace moe_p2p::moe
