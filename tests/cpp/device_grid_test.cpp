// How many blocks of a kernel send and receive.
#include "moe/device/grid.h"

#include <doctest/doctest.h>

#include <algorithm>

namespace moe_p2p::moe {
namespace {

constexpr DeviceKernel kWide{.num_send_workers = 4,
                             .num_recv_workers = 2,
                             .max_send_blocks = 50,
                             .max_recv_blocks = 60,
                             .max_copy_blocks = 30,
                             .max_away_blocks = 15,
                             .max_resident_blocks = 130};

TEST_CASE("device grid: a worker for each item, as far as more blocks help") {
  const abi::Grid few = choose_grid(kWide, {.send_items = 9, .recv_items = 3});
  CHECK(few.num_send_blocks == 3);
  CHECK(few.num_recv_blocks == 2);
  const abi::Grid many = choose_grid(kWide, {.send_items = 1000, .recv_items = 1000});
  CHECK(many.num_send_blocks == 50);
  CHECK(many.num_recv_blocks == 60);
  const abi::Grid half = choose_grid(kWide, {.recv_items = 1000});
  CHECK(half.num_send_blocks == 0);
  CHECK(half.num_recv_blocks == 60);
}

TEST_CASE("device grid: the whole of it stays within num_sms, and each half has a block") {
  for (int num_sms = 1; num_sms < 130; ++num_sms)
    for (int relay = 0; relay < 2; ++relay)
      for (const int64_t send : {0, 5, 1000})
        for (const int64_t recv : {0, 5, 1000}) {
          CAPTURE(num_sms);
          CAPTURE(relay);
          CAPTURE(send);
          CAPTURE(recv);
          const abi::Grid grid = choose_grid(
              kWide,
              {.send_items = send, .recv_items = recv, .relay_blocks = relay, .num_sms = num_sms});
          CHECK((grid.num_send_blocks > 0) == (send > 0));
          CHECK((grid.num_recv_blocks > 0) == (recv > 0));
          const int least = relay + (send > 0) + (recv > 0);
          CHECK(relay + grid.num_send_blocks + grid.num_recv_blocks <= std::max(num_sms, least));
        }
  // What one half does not need, the other gets.
  const abi::Grid grid = choose_grid(kWide, {.send_items = 5, .recv_items = 1000, .num_sms = 20});
  CHECK(grid.num_send_blocks == 2);
  CHECK(grid.num_recv_blocks == 18);
}

TEST_CASE("device grid: senders that only copy leave blocks to the receivers") {
  const GridInput sums{.send_items = 1000, .recv_items = 1000, .num_sms = 22};
  GridInput copies = sums;
  copies.copies = true;
  CHECK(choose_grid(kWide, sums).num_send_blocks == 10);
  CHECK(choose_grid(kWide, copies).num_send_blocks == 7);
  CHECK(choose_grid(kWide, copies).num_recv_blocks == 15);
  GridInput fewer = copies;
  fewer.own_stay = true;
  CHECK(choose_grid(kWide, fewer).num_send_blocks == 4);
  CHECK(choose_grid(kWide, fewer).num_recv_blocks == 18);
  fewer.copies = false;
  CHECK(choose_grid(kWide, fewer).num_send_blocks == 10);
}

TEST_CASE("device grid: a call fits on the device at once") {
  DeviceKernel kernel = kWide;
  kernel.max_resident_blocks = 70;
  const abi::Grid grid =
      choose_grid(kernel, {.send_items = 1000, .recv_items = 1000, .relay_blocks = 1});
  CHECK(1 + grid.num_send_blocks + grid.num_recv_blocks == 70);
  CHECK(grid.num_send_blocks == 31);  // 50 of 110
}

}  // namespace
}  // namespace moe_p2p::moe
