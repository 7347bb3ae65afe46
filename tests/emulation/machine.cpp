// Fibers, and a launch that runs on them. Only x86-64.
#include "tests/emulation/launch.h"

// Saves the registers that a call preserves and the stack, and continues where `to` was left.
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

static unsigned most_blocks() {
  const char* given = std::getenv("MOE_P2P_EMULATED_BLOCKS");
  return given ? static_cast<unsigned>(std::atoi(given)) : ~0u;
}

bool Launch::round() {
  Launch* const outer = std::exchange(current, this);
  while (num_started_ < config_.num_blocks && blocks_.size() < most_blocks()) start(num_started_++);
  had_progress_ = std::exchange(progress_, false);
  ++round_;
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
  current = outer;
  return any;
}

bool Launch::lets_next_begin() const {
  return num_started_ == config_.num_blocks &&
         std::ranges::all_of(blocks_, [](const Block& block) { return block.lets_next_begin; });
}

void Launch::wait_for_kernels() {
  if (before_) {
    waiting_.push_back(fiber_);
    wait();
  }
  actor().wait_for_kernels();
}
void Launch::ended(const Launch& launch) {
  if (before_ != &launch) return;
  before_ = nullptr;
  wake(waiting_);
}

void Launch::start(unsigned index) {
  Block& block = blocks_.emplace_back();
  const unsigned count = config_.num_threads;
  block.shared_bytes = config_.shared_bytes;
  const size_t bytes = (block.shared_bytes + kGuardBytes + 1023) / 1024 * 1024;
  block.shared.reset(static_cast<std::byte*>(std::aligned_alloc(1024, bytes)));
  std::fill_n(block.shared.get(), bytes, kGarbage);
  order::forget(block.shared.get(), bytes);  // the host used it for something else
  block.fibers = std::vector<Fiber>(count);
  block.left_at.resize(count);
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
    // As moe_p2p_switch leaves a stack: six registers, then the address to continue at; aligned as
    // after a call.
    void** top = reinterpret_cast<void**>(block.stacks[i] + kStackBytes) - 8;
    std::fill_n(top, 8, nullptr);
    top[6] = reinterpret_cast<void*>(&Launch::enter);
    block.left_at[i] = top;
  }
}

void Launch::enter() {
  Launch& launch = *current;
  launch.kernel_(launch.params_);
  Fiber& fiber = *launch.fiber_;
  Block& block = *fiber.owner;
  if (!fiber.open.empty()) fail("a thread ended with copies that belong to no group");
  fiber.actor.ends();
  --block.num_live;
  launch.progress_ = true;
  Meeting& meeting = block.meetings[0];
  if (meeting.come > 0) launch.settle(meeting, block.num_live);
  launch.wait();
}

// Runs each thread of the block that can go on, from a random one on, except threads of sleeping
// warps: others get as far ahead of them as they can. Returns false if none can.
bool Launch::turn(Block& block) {
  for (Warp& warp : block.warps)
    warp.asleep = had_progress_ && (warp.asleep || random_() % kAwake == 0);
  const auto count = static_cast<unsigned>(block.fibers.size());
  const auto first = static_cast<unsigned>(random_() % count);
  const bool backwards = random_() % 2;
  bool any = false;
  const auto thread_at = [&](unsigned i) {
    const unsigned at = first + (backwards ? count - 1 - i : i);
    return at < count ? at : at - count;
  };
  for (unsigned i = 0; i < count; ++i) {
    const unsigned thread = thread_at(i), next = thread_at(i + 1 < count ? i + 1 : i);
    if (!block.is_ready(thread)) continue;
    any = true;
    if (block.warps[thread / 32].asleep) continue;
    __builtin_prefetch(block.left_at[next]);
    __builtin_prefetch(&block.fibers[next]);
    fiber_ = &block.fibers[thread];
    moe_p2p_switch(&scheduler_, block.left_at[thread]);
  }
  advance_copies(block, /*all=*/false);
  return any || !block.copies.empty();
}

void Launch::leave() { moe_p2p_switch(&fiber_->owner->left_at[fiber_->thread.x], scheduler_); }
void Launch::wait() {
  fiber_->owner->wait(fiber_->thread.x);
  leave();
}

void Launch::wake(std::vector<Fiber*>& fibers) {
  for (Fiber* fiber : fibers) fiber->owner->go_on(fiber->thread.x);
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
    wait();
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
  block.wait(fiber.thread.x);
  settle(meeting, num_threads ? num_threads : block.num_live);
  if (!block.is_ready(fiber.thread.x)) leave();
  fiber.actor.leave(meeting.known);
  return meeting.result;
}

void Launch::arrive(const void* word) {
  actor().arrive();
  fiber_->owner->words[word].join(actor().knows);
}

void Launch::st_block(uint32_t* word, uint32_t value) {
  Word& stores = fiber_->owner->stores[word];
  stores = {*word, actor().stamp(), stores.num_stores + 1, round_};
  fiber_->seen[word] = stores.num_stores;
  *word = value;
}

// The last store may not have reached a thread that has not seen it, unless something orders the
// two: one store in four for some time, others in every other round.
uint32_t Launch::ld_block(const uint32_t* word) {
  const auto found = fiber_->owner->stores.find(word);
  if (found == fiber_->owner->stores.end()) return *word;
  const Word& stores = found->second;
  uint32_t& seen = fiber_->seen[word];
  // The same for a warp, whose lanes look together.
  const uint64_t place = reinterpret_cast<uint64_t>(word) / 4;
  const bool is_slow = (place + stores.num_stores) % 4 == 0 && round_ < stores.round + kLate;
  const bool is_late = is_slow || (place + round_) % 2;
  if (seen + 1 == stores.num_stores && is_late && !actor().sees(stores.stored))
    return stores.before;
  seen = stores.num_stores;
  return *word;
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
    for (const auto& copy : fiber.groups[i])
      if (std::exchange(copy->may_be_read, false)) fiber.actor.has_read(copy->from, copy->bytes);
  if (!written) return;
  for (; fiber.groups.size() > num_left; fiber.groups.erase(fiber.groups.begin()))
    for (const auto& copy : fiber.groups.front()) fiber.actor.ends(copy->target, copy->bytes);
}

// A store is read, and written some time later; `to` is null once a copy is done.
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
  order::forget(block.shared.get(), block.shared_bytes);  // the host has it next
  const std::byte* guard = block.shared.get() + block.shared_bytes;
  if (std::any_of(guard, guard + kGuardBytes, [](std::byte b) { return b != kGarbage; }))
    fail("a block wrote behind its shared memory");
}

static std::chrono::nanoseconds cpu_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}
// Lets peers go on: as long as a look at all threads took, and then until one of them releases
// something, or longer: what NICs and hosts write is not known here.
static void idle(std::chrono::nanoseconds look, order::When released) {
  using std::chrono::steady_clock;
  const auto nap = std::max<std::chrono::nanoseconds>(look, std::chrono::microseconds(kIdleUs));
  const auto until = steady_clock::now() + kMostIdle * nap;
  do {
    usleep(static_cast<useconds_t>(nap / std::chrono::microseconds(1)));
  } while (order::released_so_far() == released && steady_clock::now() < until);
}

// A launch may begin early once all blocks of the launch before it allow that; otherwise it begins
// when that has ended.
void run(const std::vector<Work>& stream) {
  std::list<Launch> launches;
  size_t next = 0;
  auto last_progress = std::chrono::steady_clock::now();
  while (next < stream.size() || !launches.empty()) {
    if (next < stream.size() &&
        (launches.empty() || (stream[next].config.early && launches.back().lets_next_begin()))) {
      Launch* const before = launches.empty() ? nullptr : &launches.back();
      launches.emplace_back(stream[next++], before);
    }
    bool any = false, progress = false;
    const order::When released = order::released_so_far();
    const std::chrono::nanoseconds began = cpu_time();
    for (Launch& launch : launches) {
      any = launch.round() || any;
      progress = progress || launch.made_progress();
    }
    for (auto launch = launches.begin(); launch != launches.end();) {
      if (!launch->has_ended()) {
        ++launch;
        continue;
      }
      for (Launch& other : launches) other.ended(*launch);
      launch = launches.erase(launch);
    }
    const auto now = std::chrono::steady_clock::now();
    if (progress) {
      last_progress = now;
    } else {
      if (!any) fail("all threads wait for each other: some of a warp or a block do not come");
      if (now - last_progress > kPatience) fail("nothing has happened for three minutes");
      idle(cpu_time() - began, released);
    }
  }
}

}  // namespace moe_p2p::emulation
