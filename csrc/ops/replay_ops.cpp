// torch.ops.moe_p2p.replay_*: ranks of a recording (moe/replay/rank.h), under numbers.
#include <algorithm>
#include <array>
#include <bit>

#include "moe/replay/rank.h"
#include "ops/communicator_settings.h"
#include "ops/registry.h"
#include "ops/tensor_checks.h"

namespace moe_p2p::ops {

namespace {

using moe::replay::Rank;

struct Replay {
  explicit Replay(const Rank::Facts& facts)
      : number(facts.options.rank),
        ranks_per_node(static_cast<int>(facts.options.plan.ranks_per_node)),
        rank(facts) {}
  const int number, ranks_per_node;
  Rank rank;
};

ObjectTable<Replay>& replays() {
  static ObjectTable<Replay> table("replay");
  return table;
}

int64_t replay_create(const std::string& settings, std::vector<int64_t> nics,
                      std::vector<int64_t> flags, std::vector<int64_t> masked, int64_t first_step) {
  Rank::Facts facts{.options = communicator_options_from(settings),
                    .nics = std::move(nics),
                    .flags = std::move(flags),
                    .masked = std::move(masked),
                    .first_step = static_cast<uint64_t>(first_step)};
  return replays().add(std::make_shared<Replay>(facts));
}

// Ranks of one node see each other's flags; others nothing of each other.
void replay_connect(const std::vector<int64_t>& numbers) {
  for (const int64_t number : numbers) {
    const auto own = replays().get(number);
    std::vector<moe::NodeMemory::Neighbour> neighbours(static_cast<size_t>(own->ranks_per_node));
    for (const int64_t other : numbers) {
      const auto each = replays().get(other);
      if (each->number / own->ranks_per_node == own->number / own->ranks_per_node)
        neighbours[static_cast<size_t>(each->number % own->ranks_per_node)] =
            each->rank.neighbour();
    }
    own->rank.connect(neighbours);
  }
}

std::string replay_feed(int64_t replay, const std::vector<int64_t>& event) {
  std::array<int64_t, sizeof(base::Event) / sizeof(int64_t)> words{};
  MOE_P2P_CHECK(event.size() == words.size(), base::Code::kInvalidArgument, "an event has ",
                words.size(), " words, not ", event.size());
  std::ranges::copy(event, words.begin());
  return replays().get(replay)->rank.feed(std::bit_cast<base::Event>(words));
}

std::tuple<std::string, int64_t> replay_waits(int64_t replay) {
  const auto object = replays().get(replay);
  std::string lines;
  for (const std::string& line : object->rank.waits()) lines += line + "\n";
  return {lines, static_cast<int64_t>(object->rank.num_untaken())};
}

void replay_close(int64_t replay) { replays().take(replay); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("replay_create", TORCH_BOX(&replay_create));
  m.impl("replay_connect", TORCH_BOX(&replay_connect));
  m.impl("replay_feed", TORCH_BOX(&replay_feed));
  m.impl("replay_waits", TORCH_BOX(&replay_waits));
  m.impl("replay_close", TORCH_BOX(&replay_close));
}

}  // namespace moe_p2p::ops
