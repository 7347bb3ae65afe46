// One launch of a kernel on the emulated GPU: its blocks, warps and fibers, and the copies under
// way.
#pragma once

#include "tests/emulation/machine.h"

#include "tests/emulation/order.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe_p2p::emulation {

using order::fail;
using order::kStackBytes;
constexpr size_t kGuardBytes = 256;  // behind shared memory
constexpr std::byte kGarbage{0xa5};
constexpr unsigned kIdleUs = 20;   // for peers: other threads of this machine
constexpr unsigned kMostIdle = 8;  // times what a look at all threads took, while no peer releases
constexpr unsigned kLate = 64;     // rounds in which some stores to shared memory are not seen
constexpr unsigned kAwake = 64;    // turns of a warp, on average, until it sleeps
constexpr auto kPatience = std::chrono::minutes(3);  // when no progress is possible

// Stacks of threads, kept from launch to launch: mapping and unmapping one takes the host's kernel
// longer than most threads run. Not a power of two apart, or their ends, of which there are
// thousands, would share a few lines of the host's caches.
class Stacks {
 public:
  void take(size_t count, std::vector<char*>& to) {
    const std::lock_guard lock(mutex_);
    if (free_.size() < count) {
      void* memory = mmap(nullptr, count * kApart, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) fail("no memory for the stacks of threads");
      for (size_t i = 0; i < count; ++i) free_.push_back(static_cast<char*>(memory) + i * kApart);
    }
    to.assign(free_.end() - static_cast<ptrdiff_t>(count), free_.end());
    free_.resize(free_.size() - count);
  }
  void give_back(const std::vector<char*>& stacks) {
    const std::lock_guard lock(mutex_);
    free_.insert(free_.end(), stacks.begin(), stacks.end());
  }

 private:
  static constexpr size_t kApart = kStackBytes + 13 * 64;
  std::mutex mutex_;
  std::vector<char*> free_;
};
inline Stacks stacks;

// mbarrier: arrivals awaited in this phase. 64 bits, as on a GPU.
struct Barrier {
  int32_t bytes;  // of copies under way
  uint16_t pending, expected;

  uint16_t left() const { return pending & 0x7fff; }
  bool parity() const { return pending >> 15; }
  void settle() {
    if (left() == 0 && bytes == 0)
      pending = static_cast<uint16_t>((parity() ? 0 : 0x8000) | expected);
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

struct Copy {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
  uint64_t* barrier;            // of a load
  std::vector<std::byte> read;  // of a store, between its halves
  bool is_read = false;
  bool is_slow = false;  // advances only when nothing else does
  std::byte* target = nullptr;
  bool may_be_read = false;  // of a store: its thread has not waited until it is read
};

// A word of shared memory that threads store to.
struct Word {
  uint32_t before;      // its last store
  order::Stamp stored;  // the last
  uint32_t num_stores = 0;
  uint64_t round = 0;  // of the last store
};

struct Block;
struct Fiber : Thread {
  order::Actor actor;
  Block* owner = nullptr;
  std::vector<std::shared_ptr<Copy>> open;                 // stores that are not committed
  std::vector<std::vector<std::shared_ptr<Copy>>> groups;  // committed, oldest first
  std::unordered_map<const void*, uint32_t> seen;          // stores of a Word
};

struct Meeting {
  unsigned come = 0, count = 0;
  bool all = true;
  Votes result{};
  order::Knowledge joined, known;  // at this meeting, at the last
  std::vector<Fiber*> waiting;
};
struct Warp {
  struct Gathering {
    uint32_t come = 0;
    uint64_t values[2][32];  // alternating: a late lane still reads the last values
    order::Knowledge known[2];
    std::array<uint8_t, 32> turns{};
    std::vector<Fiber*> waiting;
  };
  std::map<uint32_t, Gathering> by_mask;
  uint32_t ready = ~0u;  // lanes that can go on
  bool asleep = false;   // until nothing else goes on
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<void*> left_at;  // of their stacks
  std::vector<Warp> warps;
  std::array<Meeting, 16> meetings;
  std::vector<std::shared_ptr<Copy>> copies;  // under way
  std::vector<std::shared_ptr<Copy>> unread;  // stores, until their thread has waited for the read
  std::vector<char*> stacks;
  order::Block* log = nullptr;
  std::unordered_map<const void*, order::Knowledge> words;  // barriers and flags, by address
  std::unordered_map<const void*, Word> stores;
  std::unique_ptr<std::byte[], decltype(&std::free)> shared{nullptr, std::free};
  size_t shared_bytes = 0;
  unsigned num_live = 0;
  bool lets_next_begin = false;

  uint32_t& ready(unsigned thread) { return warps[thread / 32].ready; }
  bool is_ready(unsigned thread) { return ready(thread) >> thread % 32 & 1; }
  void wait(unsigned thread) { ready(thread) &= ~(1u << thread % 32); }
  void go_on(unsigned thread) { ready(thread) |= 1u << thread % 32; }
};

class Launch;
inline thread_local Launch* current = nullptr;

// One launch. The launches of one stream run on the thread that asked for them (run()).
class Launch {
 public:
  // before: the launch before it that has not ended.
  Launch(const Work& work, Launch* before)
      : config_(work.config),
        kernel_(work.kernel),
        params_(work.params),
        order_(work.config.early),
        random_(seed()),
        before_(before) {}
  // Runs every thread that can go on once. Returns false if none can.
  bool round();
  bool has_ended() const { return num_started_ == config_.num_blocks && blocks_.empty(); }
  bool made_progress() const { return progress_; }
  // Whether a launch behind it that may begin early may do so now.
  bool lets_next_begin() const;
  void ended(const Launch& launch);

  void pause() { leave(); }
  const uint64_t* warp(uint32_t mask, uint64_t value, bool orders);
  Votes meet(int id, unsigned num_threads, bool vote);
  std::shared_ptr<Copy> copy(const Copy& given);
  void store(const Copy& given) { fiber_->open.push_back(copy(given)); }
  void commit();
  void wait_stores(unsigned num_left, bool written);
  void arrive(const void* word);
  void let_next_begin() { fiber_->owner->lets_next_begin = true; }
  void wait_for_kernels();
  void depart(const void* word) { actor().leave(fiber_->owner->words[word]); }
  void st_block(uint32_t* word, uint32_t value);
  uint32_t ld_block(const uint32_t* word);
  const Fiber& fiber() const { return *fiber_; }
  order::Actor& actor() { return fiber_->actor; }

 private:
  static uint32_t seed() {
    static std::atomic<uint32_t> next{1};
    return next++;
  }
  static void enter();
  void start(unsigned index);
  bool turn(Block& block);
  void advance_copies(Block& block, bool all);
  void end(Block& block);
  void leave();
  void wait();
  void wake(std::vector<Fiber*>& fibers);
  void settle(Meeting& meeting, unsigned num_threads);

  const Config config_;
  const Kernel kernel_;
  const void* const params_;
  order::Kernel order_;
  std::mt19937 random_;
  Launch* before_;
  std::vector<Fiber*> waiting_;  // for before_
  unsigned num_started_ = 0;
  std::list<Block> blocks_;
  Fiber* fiber_ = nullptr;  // the one that runs
  void* scheduler_ = nullptr;
  uint64_t round_ = 0;
  bool progress_ = false, had_progress_ = false;  // in this round, in the last
};

}  // namespace moe_p2p::emulation
