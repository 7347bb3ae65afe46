// Handles that were overwritten after their dispatch: a host combine refuses what it cannot follow,
// and stays inside its memory with the rest (run under ASan). Four ranks in two nodes, in one
// thread.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "doctest/doctest.h"
#include "moe/all_to_all.h"
#include "moe/host/backend.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::moe {
namespace {

constexpr int kNumRanks = 4, kHidden = 4, kTopk = 3, kTokens = 5, kNumExperts = 8;
constexpr int64_t kRows = kNumRanks * kTokens * kTopk;
constexpr uint32_t kCommunicator = 2;

// One rank with one call: everything but the handle lies in buffers of just the right size.
class Rank {
 public:
  explicit Rank(int rank) : engine_({.settings = "ring_kib=4,channels=4"}) {
    AllToAllOptions options;
    options.plan = {.world_size = kNumRanks,
                    .ranks_per_node = 2,
                    .num_experts = kNumExperts,
                    .hidden_dim = kHidden,
                    .topk = kTopk,
                    .max_tokens = kTokens,
                    .chunk_tokens = kTokens,
                    .payload_item_bytes = 4,
                    .combine_item_bytes = 4,
                    .expert_rank = {}};
    options.rank = rank;
    options.communicator = kCommunicator;
    all_to_all_ = std::make_unique<AllToAll>(engine_, nullptr, options);
    handle.resize(static_cast<size_t>(all_to_all_->handle_words(kTokens, kTokens)));
  }
  AllToAll& all_to_all() { return *all_to_all_; }

  void begin_dispatch(int rank) {
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < kTopk; ++k) topk_.push_back((rank + 2 * t + 3 * k) % kNumExperts);
    DispatchSend send;
    send.x = x_.data();
    send.x_dtype = abi::DType::kFloat32;
    send.topk_idx = topk_.data();
    send.topk_is_int64 = false;
    send.num_rows = send.num_tokens = send.max_tokens = kTokens;
    send.handle = words();
    HostBackend& host = all_to_all_->host();
    dispatch_.emplace(host.context(), send);
  }
  bool advance_dispatch() {
    DispatchRecv recv;
    recv.handle = words();
    recv.options.layout = abi::RowLayout::kGrouped;
    recv.capacity = kRows;
    recv.x_dtype = abi::DType::kFloat32;
    recv.x = rows_.data();
    recv.row_weights = row_weights_.data();
    recv.counts = counts_.data();
    recv.offsets = offsets_.data();
    return dispatch_->advance_recv(recv);
  }
  // Throws when the handle is refused.
  void begin_combine(bool late_weights) {
    CombineSend send;
    send.handle = words();
    send.y = rows_.data();
    send.y_dtype = send.out_dtype = abi::DType::kFloat32;
    send.y_rows = kRows;
    send.row_scalars = scalars_.data();
    if (late_weights) {
      send.topk_weights = late_.data();
      send.num_rows = kTokens;
    } else {
      send.row_weights = row_weights_.data();
    }
    HostBackend& host = all_to_all_->host();
    combine_.emplace(host.context(), send);
    MOE_P2P_CHECK(combine_->meta().num_rows == kTokens, base::Code::kInvalidArgument,
                  "as AllToAll::combine does: out has other rows");
  }
  bool advance_combine() {
    return combine_->advance_recv({.handle = words(),
                                   .num_rows = kTokens,
                                   .out = out_.data(),
                                   .out_dtype = abi::DType::kFloat32,
                                   .out_scalars = out_scalars_.data()});
  }
  void turn_proxy() {
    proxy::ProxyTask* const tasks[] = {all_to_all_->task()};
    proxy::ProxyThread::turn(engine_, tasks);
  }

  std::vector<int32_t> handle;

 private:
  Handle words() { return {handle.data(), static_cast<int64_t>(handle.size())}; }

  engine::TransferEngine engine_;
  std::unique_ptr<AllToAll> all_to_all_;
  std::optional<DispatchCall> dispatch_;
  std::optional<CombineCall> combine_;
  std::vector<int32_t> topk_, counts_ = std::vector<int32_t>(2), offsets_ = std::vector<int32_t>(3);
  std::vector<float> x_ = std::vector<float>(size_t{kTokens} * kHidden, 1);
  std::vector<float> rows_ = std::vector<float>(size_t{kRows} * kHidden, 1);
  std::vector<float> row_weights_ = std::vector<float>(kRows, 1), scalars_ = row_weights_;
  std::vector<float> late_ = std::vector<float>(size_t{kTokens} * kTopk, 1), out_scalars_ = late_;
  std::vector<float> out_ = x_;
};

using World = std::vector<std::unique_ptr<Rank>>;

// Until every rank says that it is done, in turns.
void drive(World& world, const std::function<bool(Rank&)>& advance) {
  for (int turn = 0; turn < 10'000; ++turn) {
    bool done = true;
    for (auto& rank : world) {
      done = advance(*rank) && done;
      rank->turn_proxy();
    }
    if (done) return;
  }
  FAIL("ranks wait for each other");
}

// Ranks that have received a dispatch.
World make_world() {
  World world;
  std::vector<base::Bytes> addresses;
  for (int r = 0; r < kNumRanks; ++r) {
    world.push_back(std::make_unique<Rank>(r));
    addresses.push_back(world.back()->all_to_all().address());
  }
  for (auto& rank : world) rank->all_to_all().connect(addresses);
  for (int r = 0; r < kNumRanks; ++r) world[static_cast<size_t>(r)]->begin_dispatch(r);
  std::vector<bool> done(kNumRanks);
  drive(world, [&](Rank& rank) {
    const auto at = static_cast<size_t>(
        std::find_if(world.begin(), world.end(), [&](auto& r) { return r.get() == &rank; }) -
        world.begin());
    return done[at] = done[at] || rank.advance_dispatch();
  });
  return world;
}

// Overwrites some words from `begin` to `end`.
void overwrite(std::vector<int32_t>& words, size_t begin, size_t end, std::mt19937_64& random) {
  const size_t from = begin + random() % (end - begin);
  const size_t to = random() % 2 ? from + 1 : from + 1 + random() % (end - from);
  const uint64_t kind = random() % 4;
  constexpr int32_t kLimits[] = {0x7fffffff, -0x7fffffff - 1, -2, 0, kTokens, int32_t{kRows}};
  const int32_t limit = kLimits[random() % std::size(kLimits)];
  for (size_t i = from; i < to; ++i)
    words[i] = kind == 0   ? static_cast<int32_t>(random())
               : kind == 1 ? static_cast<int32_t>(random() % 64) - 8
               : kind == 2 ? words[i] ^ (1 << random() % 32)
                           : limit;
}

}  // namespace

TEST_CASE("handle: one that was overwritten is refused, or followed within bounds") {
  std::mt19937_64 random(20);
  int num_refused = 0, num_followed = 0;
  World world = make_world();
  const abi::Shape shape = world[0]->all_to_all().plan().shape;
  const auto layout = abi::HandleLayout::make(shape, kTokens, 1, kTokens);
  // A step's number is no index: another one that is open, or none, cannot be told from the right
  // one. Everything else from the number of chunks on, by its parts.
  const size_t parts[] = {offsetof(abi::HandleMeta, num_chunks) / 4,
                          layout.slot_counts,
                          layout.slot_rows,
                          layout.slot_ranks,
                          layout.send_slots,
                          layout.total};
  for (int i = 0; i < 600; ++i) {
    const size_t victim = random() % kNumRanks, part = random() % (std::size(parts) - 1);
    const bool late_weights = random() % 2;
    const auto good = world[victim]->handle;
    overwrite(world[victim]->handle, parts[part], parts[part + 1], random);
    try {
      world[victim]->begin_combine(late_weights);
    } catch (const base::Error& error) {
      CHECK(error.code() == base::Code::kInvalidArgument);
      world[victim]->handle = good;
      ++num_refused;
      continue;
    }
    ++num_followed;
    for (size_t r = 0; r < kNumRanks; ++r)
      if (r != victim) world[r]->begin_combine(late_weights);
    std::vector<bool> done(kNumRanks);
    size_t at = 0;
    drive(world, [&](Rank& rank) {
      const size_t r = at++ % kNumRanks;
      return done[r] = done[r] || rank.advance_combine();
    });
    world = make_world();
  }
  CHECK(num_refused > 200);
  CHECK(num_followed > 20);
  MESSAGE(num_refused, " refused, ", num_followed, " followed");
}

}  // namespace moe_p2p::moe
