#include "moe/host/gather.h"

#include <cstring>

#include "base/log.h"

namespace moe_p2p::moe {

using base::Code;
using base::Error;

HostGather::HostGather(const Plan& plan, NodeMemory& memory, engine::TransferEngine& engine,
                       uint32_t communicator)
    : plan_(plan), memory_(memory), engine_(engine), communicator_(communicator) {
  if (plan.shape.num_nodes() > 1)
    board_ = engine.register_memory(
        {memory.board(memory.local()), static_cast<size_t>(plan.board.total_bytes)});
}

base::Bytes HostGather::descriptor() const {
  return board_ ? engine_.descriptor(board_).serialize() : base::Bytes{};
}

void HostGather::connect(const std::vector<Remote>& remotes) {
  links_ = std::make_unique<Link[]>(remotes.size());
  for (num_links_ = 0; num_links_ < remotes.size(); ++num_links_)
    links_[num_links_].remote = remotes[num_links_];
}

void HostGather::close(platform::Deadline deadline) {
  for (size_t i = 0; i < num_links_; ++i)
    if (links_[i].request.active() && !links_[i].request.wait(deadline)) {
      (void)links_.release();  // the engine still holds the Requests: leaked rather than freed
      throw Error(Code::kTimeout, "writes of gather_counts did not end");
    }
  if (board_) engine_.unregister_memory(board_);
}

int HostGather::rank_of(const Link& link) const noexcept {
  return link.remote.node * plan_.shape.ranks_per_node + memory_.local();
}

uint64_t HostGather::row_offset(uint64_t call, int node) const noexcept {
  const auto row =
      (call % 2) * static_cast<uint64_t>(plan_.shape.num_nodes()) + static_cast<uint64_t>(node);
  return plan_.board.rows + row * plan_.board.row_bytes;
}

NodeMemory::Word HostGather::word(int local, int node) const noexcept {
  return NodeMemory::Word(
      *reinterpret_cast<uint64_t*>(memory_.board(local) + 8 * static_cast<uint64_t>(node)));
}

void HostGather::publish(int node, uint64_t call) noexcept {
  // release: pairs with the acquire in arrived(); the row is complete.
  word(memory_.local(), node).store(call, std::memory_order_release);
  for (int l = 0; l < memory_.num_local(); ++l) platform::notify_all(memory_.bell(l));
}

void HostGather::send(std::span<const int32_t> values) {
  MOE_P2P_CHECK(values.size() <= plan_.board.max_values, Code::kInvalidArgument,
                "gather_counts was given ", values.size(), " values, must be at most ",
                plan_.board.max_values, " (num_experts + world_size + 16)");
  ++call_;
  const uint64_t row = row_offset(call_, memory_.node());
  const auto num_values = static_cast<int32_t>(values.size());
  std::byte* const to = memory_.board(memory_.local()) + row;
  std::memcpy(to, &num_values, sizeof(num_values));
  if (!values.empty()) std::memcpy(to + sizeof(num_values), values.data(), values.size_bytes());
  const engine::ImmKey key{communicator_, kPhase, static_cast<uint32_t>(call_ % 2),
                           static_cast<uint32_t>(memory_.rank())};
  for (size_t i = 0; i < num_links_; ++i) {
    links_[i].request.operation = engine::Write{.source = board_,
                                                .source_offset = row,
                                                .target = links_[i].remote.board,
                                                .target_offset = row,  // of this node there too
                                                .bytes = sizeof(num_values) + values.size_bytes(),
                                                .imm = key.pack()};
    engine_.submit(links_[i].request);
  }
  publish(memory_.node(), call_);
}

void HostGather::on_imm(const engine::ImmKey& key) noexcept {
  const int node = static_cast<int>(key.source) / plan_.shape.ranks_per_node;
  const int local = static_cast<int>(key.source) % plan_.shape.ranks_per_node;
  if (key.slot >= kNumRows || node >= plan_.shape.num_nodes() || node == memory_.node() ||
      local != memory_.local())
    return;  // not from a partner of this rank
  Link& link = links_[static_cast<size_t>(abi::other_index(node, memory_.node()))];
  link.immediates[key.slot].fetch_add(1, std::memory_order_relaxed);
  const auto complete = [&link](uint64_t call) {
    return link.immediates[call % 2].load(std::memory_order_relaxed) >=
           uses(call) * static_cast<uint64_t>(link.remote.num_nics);
  };
  // The payload is visible to this thread (provider.h, assumption 1), so it is to every thread that
  // acquires the word. Publishes two calls when the later one overtook.
  while (complete(link.published + 1)) publish(node, ++link.published);
}

bool HostGather::arrived(int source) const noexcept {
  const int node = source / plan_.shape.ranks_per_node;
  const int local = source % plan_.shape.ranks_per_node;
  return word(local, node).load(std::memory_order_acquire) >= call_;  // pairs with publish()
}

std::string HostGather::call() const { return base::concat("gather_counts call ", call_); }

std::string HostGather::progress(int node) const {
  const Link& link = links_[static_cast<size_t>(abi::other_index(node, memory_.node()))];
  const auto nics = static_cast<uint64_t>(link.remote.num_nics);
  const uint64_t came = link.immediates[call_ % 2].load(std::memory_order_relaxed);
  return base::concat(came - (uses(call_) - 1) * nics, " of ", nics, " immediates came");
}

void HostGather::fail(Code code, const std::string& message) const {
  throw Error(code, base::concat("rank ", memory_.rank(), ": ", call(), ": ", message));
}

void HostGather::check_write(const Link& link, platform::Deadline deadline) const {
  if (!link.request.done() || link.request.status().ok()) return;
  // Its farewell arrived before its NICs were gone (Exchange::partner_left), and belongs to the
  // polling thread.
  bool left = false;
  engine_.run_on_poller([&] { left = memory_.farewell_in(link.remote.node).load() != 0; },
                        deadline);
  if (left) return;
  const base::Status status = link.request.status();
  fail(status.code, base::concat("the write to rank ", rank_of(link), " (node ", link.remote.node,
                                 ") failed: ", base::describe(status), engine_.first_failure()));
}

std::optional<uint64_t> HostGather::num_arrived(int node) const noexcept {
  const engine::Request& last =
      links_[static_cast<size_t>(abi::other_index(node, memory_.node()))].request;
  if (last.active() && !last.done()) return std::nullopt;
  return last.status().ok() ? call_ : call_ - 1;  // a write that fails is a rank's last
}

bool HostGather::complete(platform::Deadline deadline) const {
  for (size_t i = 0; i < num_links_; ++i) check_write(links_[i], deadline);
  for (int source = 0; source < plan_.shape.world_size; ++source)
    if (!arrived(source)) return false;
  return true;
}

void HostGather::read(std::span<int32_t> gathered, platform::Deadline deadline) {
  for (size_t i = 0; i < num_links_; ++i) {
    if (!links_[i].request.wait(deadline))
      fail(Code::kTimeout,
           base::concat("the write to rank ", rank_of(links_[i]), " was not acknowledged in time"));
    check_write(links_[i], deadline);
  }
  const size_t num_values = gathered.size() / static_cast<size_t>(plan_.shape.world_size);
  for (int source = 0; source < plan_.shape.world_size; ++source) {
    const std::byte* const row = memory_.board(source % plan_.shape.ranks_per_node) +
                                 row_offset(call_, source / plan_.shape.ranks_per_node);
    int32_t given = 0;
    std::memcpy(&given, row, sizeof(given));
    if (static_cast<size_t>(given) != num_values)
      fail(Code::kProtocol, base::concat("rank ", source, " gave ", given, " values, this rank ",
                                         num_values, "; all ranks must give the same number"));
    if (num_values > 0)
      std::memcpy(gathered.data() + static_cast<size_t>(source) * num_values, row + sizeof(given),
                  num_values * sizeof(int32_t));
  }
}

}  // namespace moe_p2p::moe
