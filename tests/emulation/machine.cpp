// Fibers, and a launch that runs on them. Only x86-64.
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
#include <deque>
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

// Saves the registers that a call keeps and its stack, and goes on where `to` was left.
extern "C" void moe_p2p_switch(void** from, void* to);
asm(R"(
.globl moe_p2p_switch
moe_p2p_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace moe_p2p::emulation {
namespace {

using order::fail;
using order::kStackBytes;
constexpr size_t kGuardBytes = 256;  // behind shared memory
constexpr std::byte kGarbage{0xa5};
constexpr unsigned kIdleUs = 20, kMostIdleUs = 160;  // for peers, other threads of this machine
constexpr unsigned kAwake = 64;  // turns of a warp, on average, until it falls asleep
constexpr auto kPatience = std::chrono::seconds(60);  // for what no peer can bring

// Stacks of threads, kept from launch to launch: the kernel takes longer to map and unmap one than most
// threads run.
class Stacks {
 public:
  void take(size_t count, std::vector<char*>& to) {
    const std::lock_guard lock(mutex_);
    if (free_.size() < count) {
      void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) fail("no memory for the stacks of threads");
      for (size_t i = 0; i < count; ++i)
        free_.push_back(static_cast<char*>(memory) + i * kStackBytes);
    }
    to.assign(free_.end() - static_cast<ptrdiff_t>(count), free_.end());
    free_.resize(free_.size() - count);
  }
  void give_back(const std::vector<char*>& stacks) {
    const std::lock_guard lock(mutex_);
    free_.insert(free_.end(), stacks.begin(), stacks.end());
  }

 private:
  std::mutex mutex_;
  std::vector<char*> free_;
};
Stacks stacks;

// mbarrier: who is awaited in this phase. 64 bits, as on a GPU.
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
  bool is_slow = false;  // goes on when nothing else does
  std::byte* target = nullptr;
  bool may_be_read = false;  // of a store: nobody has waited until it is read
};

struct Block;
struct Fiber : Thread {
  void* stack = nullptr;
  order::Actor actor;
  Block* owner = nullptr;
  bool blocked = false, ended = false;
  std::vector<std::shared_ptr<Copy>> open;                // stores that are not committed
  std::deque<std::vector<std::shared_ptr<Copy>>> groups;  // committed, oldest first
};

struct Meeting {
  unsigned come = 0, count = 0;
  bool all = true;
  Votes result{};
  order::Knowledge joined, known;  // of this time, of the last
  std::vector<Fiber*> waiting;
};
struct Warp {
  struct Gathering {
    uint32_t come = 0;
    uint64_t values[2][32];  // in turns: who is late still reads the last ones
    order::Knowledge known[2];
    std::array<uint8_t, 32> turns{};
    std::vector<Fiber*> waiting;
  };
  std::map<uint32_t, Gathering> by_mask;
  bool asleep = false;  // until nothing else goes on
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::array<Meeting, 16> meetings;
  std::vector<std::shared_ptr<Copy>> copies;  // under way
  std::vector<std::shared_ptr<Copy>> unread;  // stores, until their thread has waited for that
  std::vector<char*> stacks;
  order::Block* log = nullptr;
  std::unordered_map<const void*, order::Knowledge> words;  // barriers and flags, by address
  std::unique_ptr<std::byte[], decltype(&std::free)> shared{nullptr, std::free};
  size_t shared_bytes = 0;
  unsigned num_live = 0;
};

class Launch;
thread_local Launch* current = nullptr;

// One launch, on the thread that asked for it.
class Launch {
 public:
  Launch(const Config& config, Kernel kernel, const void* params)
      : config_(config), kernel_(kernel), params_(params), order_(config.early), random_(seed()) {}
  void run();

  void pause() { leave(/*blocked=*/false); }
  const uint64_t* warp(uint32_t mask, uint64_t value, bool orders);
  Votes meet(int id, unsigned num_threads, bool vote);
  std::shared_ptr<Copy> copy(const Copy& given);
  void store(const Copy& given) { fiber_->open.push_back(copy(given)); }
  void commit();
  void wait_stores(unsigned num_left, bool written);
  void arrive(const void* word);
  void depart(const void* word) { actor().leave(fiber_->owner->words[word]); }
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
  void leave(bool blocked);
  void wake(std::vector<Fiber*>& fibers);
  void settle(Meeting& meeting, unsigned num_threads);

  const Config& config_;
  const Kernel kernel_;
  const void* const params_;
  order::Kernel order_;
  std::mt19937 random_;
  std::list<Block> blocks_;
  Fiber* fiber_ = nullptr;  // that runs
  void* scheduler_ = nullptr;
  bool progress_ = false, had_progress_ = false;  // in this round, in the last one
};

unsigned most_blocks() {
  const char* given = std::getenv("MOE_P2P_EMULATED_BLOCKS");
  return given ? static_cast<unsigned>(std::atoi(given)) : ~0u;
}

void Launch::run() {
  Launch* const outer = std::exchange(current, this);
  const unsigned most = most_blocks(), num_blocks = config_.num_blocks;
  unsigned started = 0, idle_us = kIdleUs;
  auto last_progress = std::chrono::steady_clock::now();
  while (started < num_blocks || !blocks_.empty()) {
    while (started < num_blocks && blocks_.size() < most) start(started++);
    had_progress_ = std::exchange(progress_, false);
    bool any = false;
    for (Block& block : blocks_) any = turn(block) || any;
    for (auto block = blocks_.begin(); block != blocks_.end();) {
      if (block->num_live > 0) {
        ++block;
        continue;
      }
      end(*block);
      block = blocks_.erase(block);
      progress_ = true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (progress_) {
      last_progress = now;
      idle_us = kIdleUs;
    } else {
      if (!any) fail("all threads wait for each other: some of a warp or a block do not come");
      if (now - last_progress > kPatience) fail("nothing has happened for a minute");
      usleep(idle_us);
      idle_us = std::min(2 * idle_us, kMostIdleUs);
    }
  }
  current = outer;
}

void Launch::start(unsigned index) {
  Block& block = blocks_.emplace_back();
  const unsigned count = config_.num_threads;
  block.shared_bytes = config_.shared_bytes;
  const size_t bytes = (block.shared_bytes + kGuardBytes + 1023) / 1024 * 1024;
  block.shared.reset(static_cast<std::byte*>(std::aligned_alloc(1024, bytes)));
  std::fill_n(block.shared.get(), bytes, kGarbage);
  block.fibers = std::vector<Fiber>(count);
  block.warps.resize((count + 31) / 32);
  block.num_live = count;
  stacks.take(count, block.stacks);
  block.log = &order_.add_block(count);
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.thread = {i};
    fiber.block = {index};
    fiber.block_dim = {count};
    fiber.grid_dim = {config_.num_blocks};
    fiber.shared = reinterpret_cast<char*>(block.shared.get());
    fiber.owner = &block;
    const order::View view = order_.first_view();
    fiber.actor = {block.log, i, {view, view}};
    fiber.actor.stack = reinterpret_cast<const std::byte*>(block.stacks[i]);
    // As moe_p2p_switch leaves a stack: six registers, then where to go on; aligned as after a call.
    void** top = reinterpret_cast<void**>(block.stacks[i] + kStackBytes) - 8;
    std::fill_n(top, 8, nullptr);
    top[6] = reinterpret_cast<void*>(&Launch::enter);
    fiber.stack = top;
  }
}

void Launch::enter() {
  Launch& launch = *current;
  launch.kernel_(launch.params_);
  Fiber& fiber = *launch.fiber_;
  Block& block = *fiber.owner;
  if (!fiber.open.empty()) fail("a thread ended with copies that belong to no group");
  fiber.ended = true;
  --block.num_live;
  launch.progress_ = true;
  Meeting& meeting = block.meetings[0];
  if (meeting.come > 0) launch.settle(meeting, block.num_live);
  launch.leave(/*blocked=*/true);
}

// Each thread of the block that can go on does, from a random one on, but for those of warps that
// sleep: others get as far ahead of them as they can. False: none can.
bool Launch::turn(Block& block) {
  for (Warp& warp : block.warps)
    warp.asleep = had_progress_ && (warp.asleep || random_() % kAwake == 0);
  const size_t count = block.fibers.size(), first = random_() % count;
  const bool backwards = random_() % 2;
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = block.fibers[(backwards ? count - 1 - i + first : i + first) % count];
    if (fiber.blocked || fiber.ended) continue;
    any = true;
    if (block.warps[fiber.thread.x / 32].asleep) continue;
    fiber_ = &fiber;
    moe_p2p_switch(&scheduler_, fiber.stack);
  }
  advance_copies(block, /*all=*/false);
  return any || !block.copies.empty();
}

void Launch::leave(bool blocked) {
  Fiber& fiber = *fiber_;
  fiber.blocked = blocked;
  moe_p2p_switch(&fiber.stack, scheduler_);
}

void Launch::wake(std::vector<Fiber*>& fibers) {
  for (Fiber* fiber : fibers) fiber->blocked = false;
  fibers.clear();
  progress_ = true;
}

const uint64_t* Launch::warp(uint32_t mask, uint64_t value, bool orders) {
  Fiber& fiber = *fiber_;
  Warp& warp = fiber.owner->warps[fiber.thread.x / 32];
  const unsigned lane = fiber.thread.x % 32;
  if (!(mask >> lane & 1)) fail("a lane that is not of the mask takes part");
  Warp::Gathering& gathering = warp.by_mask[mask];
  const int turn = gathering.turns[lane]++ % 2;
  uint64_t* values = gathering.values[turn];
  values[lane] = value;
  if (orders) {
    if (gathering.come == 0) gathering.known[turn] = {};
    fiber.actor.arrive();
    gathering.known[turn].join(fiber.actor.knows);
  }
  gathering.come |= 1u << lane;
  if (gathering.come == mask) {
    gathering.come = 0;
    wake(gathering.waiting);
  } else {
    gathering.waiting.push_back(&fiber);
    leave(/*blocked=*/true);
  }
  if (orders) fiber.actor.leave(gathering.known[turn]);
  return values;
}

void Launch::settle(Meeting& meeting, unsigned num_threads) {
  if (meeting.come < num_threads) return;
  if (meeting.come > num_threads) fail("more threads at a barrier than it is for");
  meeting.result = {meeting.count, meeting.all};
  meeting.known = std::exchange(meeting.joined, {});
  meeting.come = meeting.count = 0;
  meeting.all = true;
  wake(meeting.waiting);
}

Votes Launch::meet(int id, unsigned num_threads, bool vote) {
  Fiber& fiber = *fiber_;
  Block& block = *fiber.owner;
  Meeting& meeting = block.meetings.at(static_cast<size_t>(id));
  ++meeting.come;
  meeting.count += vote;
  meeting.all = meeting.all && vote;
  fiber.actor.arrive();
  meeting.joined.join(fiber.actor.knows);
  meeting.waiting.push_back(&fiber);
  fiber.blocked = true;
  settle(meeting, num_threads ? num_threads : block.num_live);
  if (fiber.blocked) leave(/*blocked=*/true);
  fiber.actor.leave(meeting.known);
  return meeting.result;
}

void Launch::arrive(const void* word) {
  actor().arrive();
  fiber_->owner->words[word].join(actor().knows);
}

// --- copies in bulk ---

std::shared_ptr<Copy> Launch::copy(const Copy& given) {
  const auto made = std::make_shared<Copy>(given);
  made->is_slow = random_() % 2;
  made->target = made->to;
  made->may_be_read = !made->barrier;
  auto& unread = fiber_->owner->unread;
  std::erase_if(unread, [](const auto& store) { return !store->may_be_read; });
  if (!made->barrier) unread.push_back(made);
  for (const auto& store : unread)
    if (made->barrier && store->from < made->to + made->bytes &&
        made->to < store->from + store->bytes)
      fail("a copy goes to shared memory that another may still be reading");
  return fiber_->owner->copies.emplace_back(made);
}

void Launch::commit() {
  fiber_->groups.push_back(std::move(fiber_->open));
  fiber_->open.clear();
}

void Launch::wait_stores(unsigned num_left, bool written) {
  Fiber& fiber = *fiber_;
  const auto is_done = [&](const std::vector<std::shared_ptr<Copy>>& group) {
    return std::ranges::all_of(group, [&](const std::shared_ptr<Copy>& copy) {
      return written ? copy->to == nullptr : copy->is_read;
    });
  };
  while (fiber.groups.size() > num_left &&
         !std::all_of(fiber.groups.begin(), fiber.groups.end() - num_left, is_done))
    pause();
  for (size_t i = 0; i + num_left < fiber.groups.size(); ++i)
    for (const auto& copy : fiber.groups[i]) copy->may_be_read = false;
  if (!written) return;
  for (; fiber.groups.size() > num_left; fiber.groups.pop_front())
    for (const auto& copy : fiber.groups.front()) fiber.actor.ends(copy->target, copy->bytes);
}

// A store is read, and some time later written; `to` is null once a copy is done.
void Launch::advance_copies(Block& block, bool all) {
  for (size_t i = 0; i < block.copies.size(); ++i) {
    Copy& copy = *block.copies[i];
    if (!all && ((copy.is_slow && progress_) || random_() % 4 != 0)) continue;
    progress_ = true;
    if (copy.barrier) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      auto& barrier = *reinterpret_cast<Barrier*>(copy.barrier);
      barrier.bytes -= static_cast<int32_t>(copy.bytes);
      barrier.settle();
    } else if (!copy.is_read) {
      copy.read.assign(copy.from, copy.from + copy.bytes);
      copy.is_read = true;
      continue;
    } else {
      std::memcpy(copy.to, copy.read.data(), copy.bytes);
    }
    copy.to = nullptr;
    std::swap(block.copies[i--], block.copies.back());
    block.copies.pop_back();
  }
}

void Launch::end(Block& block) {
  for (const auto& copy : block.copies)
    if (copy->barrier || !copy->is_read) fail("a block ended while copies used its shared memory");
  advance_copies(block, /*all=*/true);
  stacks.give_back(block.stacks);
  order::forget(block.shared.get(), block.shared_bytes);  // somebody else has it next
  const std::byte* guard = block.shared.get() + block.shared_bytes;
  if (std::any_of(guard, guard + kGuardBytes, [](std::byte b) { return b != kGarbage; }))
    fail("a block wrote behind its shared memory");
}

}  // namespace

void run(const Config& config, Kernel kernel, const void* params) {
  Launch(config, kernel, params).run();
}

namespace {
const std::string& mutation() {
  static const std::string name = [] {
    const char* given = std::getenv("MOE_P2P_MUTATION");
    return std::string(given ? given : "");
  }();
  return name;
}
}  // namespace

extern "C" {

bool moe_p2p_mutated(const char* name) { return !mutation().empty() && mutation() == name; }
bool moe_p2p_left_out(const char* file, unsigned line) {
  static const size_t colon = mutation().find(':');
  if (colon == std::string::npos) return false;
  static const unsigned at = static_cast<unsigned>(std::stoul(mutation().substr(colon + 1)));
  static const std::string name = "/" + mutation().substr(0, colon);
  return line == at && std::string_view(file).ends_with(name);
}
const Thread& moe_p2p_thread() { return current->fiber(); }
void moe_p2p_pause() { current->pause(); }
const uint64_t* moe_p2p_warp(uint32_t mask, uint64_t value, bool orders) {
  return current->warp(mask, value, orders);
}
Votes moe_p2p_meet(int id, unsigned num_threads, bool vote) {
  return current->meet(id, num_threads, vote);
}
void moe_p2p_barrier_init(uint64_t* barrier, unsigned num_arrivals) {
  const auto count = static_cast<uint16_t>(num_arrivals);
  *reinterpret_cast<Barrier*>(barrier) = {.bytes = 0, .pending = count, .expected = count};
}
void moe_p2p_barrier_expect(uint64_t* barrier, unsigned bytes) {
  current->arrive(barrier);
  auto& b = *reinterpret_cast<Barrier*>(barrier);
  b.bytes += static_cast<int32_t>(bytes);
  --b.pending;
  b.settle();
}
bool moe_p2p_barrier_test(uint64_t* barrier, bool parity) {
  if (reinterpret_cast<const Barrier*>(barrier)->parity() == parity) return false;
  current->depart(barrier);
  return true;
}
void moe_p2p_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  current->actor().copies_global(from, bytes);
  current->copy(
      {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, barrier, {}});
}
void moe_p2p_store(void* to, const void* from, uint32_t bytes) {
  current->actor().copies_shared(from, bytes);
  current->actor().begins(to, bytes);
  current->store(
      {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, nullptr, {}});
}
void moe_p2p_commit() { current->commit(); }
void moe_p2p_wait_stores(unsigned num_left, bool written) {
  current->wait_stores(num_left, written);
}
void moe_p2p_arrive(const void* word) { current->arrive(word); }
void moe_p2p_depart(const void* word) { current->depart(word); }
void moe_p2p_release(bool to_system) { current->actor().release(to_system); }
void moe_p2p_acquire() { current->actor().acquire(); }
void moe_p2p_wait_for_kernels() { current->actor().wait_for_kernels(); }
void moe_p2p_fence_global() { current->actor().fence_global(); }
void moe_p2p_fence_shared() { current->actor().fence_shared(); }
void moe_p2p_tell_host(const void* word) { current->actor().tells_host(word); }
void moe_p2p_host_memory(const void* at, size_t bytes) { order::add_host_memory(at, bytes); }

// What the compiler calls with -fsanitize=thread: before each access of a kernel to memory.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): its names
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define MOE_P2P_ACCESS(bytes)                                                   \
  void __tsan_read##bytes(void* at) {                                           \
    if (current) current->actor().read(at, bytes, __builtin_return_address(0)); \
  }                                                                             \
  void __tsan_unaligned_read##bytes(void* at) {                                 \
    if (current) current->actor().read(at, bytes, __builtin_return_address(0)); \
  }                                                                             \
  void __tsan_write##bytes(void* at) {                                          \
    if (current) current->actor().wrote(at, bytes);                             \
  }                                                                             \
  void __tsan_unaligned_write##bytes(void* at) {                                \
    if (current) current->actor().wrote(at, bytes);                             \
  }
MOE_P2P_ACCESS(1)
MOE_P2P_ACCESS(2)
MOE_P2P_ACCESS(4)
MOE_P2P_ACCESS(8)
MOE_P2P_ACCESS(16)
#undef MOE_P2P_ACCESS
void __tsan_read_range(void* at, size_t bytes) {
  if (current) current->actor().read(at, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t bytes) {
  if (current) current->actor().wrote(at, bytes);
}
#define MOE_P2P_ATOMIC(bits)                                                                  \
  uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* p, int) {                   \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                              \
  }                                                                                           \
  void __tsan_atomic##bits##_store(uint##bits##_t* p, uint##bits##_t v, int) {                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t* p, uint##bits##_t v, int) {   \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                       \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t* p, uint##bits##_t v, int) {  \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                        \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_fetch_or(uint##bits##_t* p, uint##bits##_t v, int) {   \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                         \
  }                                                                                           \
  int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t* p, uint##bits##_t* old,   \
                                                    uint##bits##_t v, int, int) {             \
    return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
MOE_P2P_ATOMIC(32)
MOE_P2P_ATOMIC(64)
#undef MOE_P2P_ATOMIC
void __tsan_atomic_thread_fence(int) {}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
}

}  // namespace moe_p2p::emulation
