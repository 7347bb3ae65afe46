#include "tests/emulation/order.h"

#include "tests/emulation/ranges.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>

namespace moe_p2p::emulation::order {
namespace {

std::atomic<When> clock_now{1};

// --- stamps: one for each four bytes ---

struct Cell {
  std::atomic<uint64_t> wrote, read;  // last access of each kind
};
struct Carrying {  // of the word that begins there
  std::atomic<When> released, host;
};
constexpr size_t kPageBits = 12, kCells = (size_t{1} << kPageBits) / 4;
struct Page {
  std::array<Cell, kCells> cells;
  std::atomic<std::array<Carrying, kCells>*> carrying;
};
constexpr size_t kLeafBits = 18, kAddressBits = 47;
using Leaf = std::array<std::atomic<Page*>, size_t{1} << kLeafBits>;
std::array<std::atomic<Leaf*>, size_t{1} << (kAddressBits - kPageBits - kLeafBits)> leaves;

// Returns what `place` points at; if nothing, something of zeros with `add`. It stays.
template <typename T>
T* get(std::atomic<T*>& place, bool add) {
  T* found = place.load(std::memory_order_acquire);
  if (found || !add) return found;
  auto* made = static_cast<T*>(std::calloc(1, sizeof(T)));  // of a leaf few pages are touched
  if (!made) fail("no memory for stamps");
  if (place.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
  std::free(made);
  return found;
}
Page* find_page(uintptr_t address, bool add) {
  const uintptr_t number = address >> kPageBits;
  Leaf* const leaf = get(leaves[number >> kLeafBits], add);
  return leaf ? get((*leaf)[number % leaf->size()], add) : nullptr;
}

// Calls f(cell) for all cells that these bytes touch.
template <typename F>
void each_cell(const void* at, size_t bytes, bool add, const F& f) {
  auto address = reinterpret_cast<uintptr_t>(at);
  const uintptr_t end = address + bytes;
  for (address &= ~uintptr_t{3}; address < end;) {
    Page* page = find_page(address, add);
    const uintptr_t page_end = std::min(end, ((address >> kPageBits) + 1) << kPageBits);
    if (!page) {
      address = page_end;
      continue;
    }
    for (; address < page_end; address += 4) f(page->cells[address / 4 % kCells]);
  }
}
void set_stamps(const void* at, size_t bytes, Stamp stamp, std::atomic<uint64_t> Cell::* which) {
  each_cell(at, bytes, /*add=*/true,
            [&](Cell& cell) { (cell.*which).store(stamp.bits, std::memory_order_relaxed); });
}
Carrying* find_carrying(const void* word, bool add) {
  const auto address = reinterpret_cast<uintptr_t>(word);
  Page* const page = find_page(address, add);
  auto* const all = page ? get(page->carrying, add) : nullptr;
  return all ? &(*all)[address / 4 % kCells] : nullptr;
}

// --- blocks, and how long they are remembered ---

std::mutex registry;
std::array<std::atomic<Block*>, 1 << 20> blocks;
uint32_t num_blocks = 1;      // 0 is no stamp
std::multiset<When> running;  // begin times of kernels that have not ended
struct Ended {
  When when;
  std::vector<Block*> blocks;
};
std::deque<Ended> ended;
constexpr size_t kKept = 64;  // kernels

// Returns the first of `times` after `time`; 0: none.
uint32_t first_after(const std::vector<uint32_t>& times, uint32_t time) {
  const auto found = std::ranges::upper_bound(times, time);
  return found == times.end() ? 0 : *found;
}

When released(const Block& block, Stamp stamp, bool to_system) {
  const Block::Thread& thread = block.threads[stamp.thread()];
  const uint32_t arrival = first_after(thread.arrivals, stamp.time());
  const When own = (to_system ? thread.released_to_system : thread.released).of(stamp.time() + 1);
  const auto& mates = (to_system ? block.released_to_system : block.released)[stamp.thread() / 32];
  return arrival ? std::min(own, mates.of(arrival)) : own;
}

// Whether a chain of words and kernels leads from there to a reader with this view.
bool is_chained(Stamp stamp, const Block& reader, const View& view) {
  Block& block = *blocks[stamp.block()].load(std::memory_order_acquire);
  const std::lock_guard lock(block.mutex);
  if (block.is_host) return released(block, stamp, /*to_system=*/true) <= view.host;
  const bool is_own = block.device == reader.device;
  if (block.ended <= view.acquired || (is_own && block.ended <= view.began)) return true;
  if (block.forgotten) return true;
  if (&block == &reader) {
    const uint32_t arrival = first_after(block.threads[stamp.thread()].arrivals, stamp.time());
    if (arrival && arrival <= view.arrived[stamp.thread() / 32]) return true;
  }
  const When to_device = released(block, stamp, /*to_system=*/false);
  if (to_device > view.acquired) return false;
  if (is_own) return true;
  if (released(block, stamp, /*to_system=*/true) <= view.acquired) return true;
  const std::lock_guard device_lock(block.device->mutex);
  return block.device->released.of(to_device) <= view.acquired;
}

Ranges host_memory, shared_memory;

bool is_of_host(const void* word) { return host_memory.have(word); }

bool is_visible(Stamp stamp, const Block& reader, const View& view, const void* at) {
  if (is_chained(stamp, reader, view)) return true;
  if (shared_memory.have(at)) return false;
  View wider = view;
  wider.acquired = std::max(view.acquired, view.began);
  wider.host = std::max(view.host, view.began);
  return is_chained(stamp, reader, wider);
}

Carried carried(const void* word) {
  if (is_of_host(word)) return {clock_now.load(), clock_now.load()};
  const Carrying* found = find_carrying(word, /*add=*/false);
  if (!found) return {};
  return {found->released.load(std::memory_order_relaxed),
          found->host.load(std::memory_order_relaxed)};
}
void carry(const void* word, const Carried& what) {
  Carrying& place = *find_carrying(word, /*add=*/true);
  place.released.store(what.released, std::memory_order_relaxed);
  place.host.store(what.host, std::memory_order_relaxed);
}

Block* new_block(unsigned num_threads, bool is_host = false) {
  auto* block = new Block;  // lives as long as the process: stamps name it
  block->is_host = is_host;
  block->device = own_device();
  block->threads.resize(num_threads);
  const std::lock_guard lock(registry);
  if (num_blocks == blocks.size()) fail("too many blocks for one process");
  block->index = num_blocks++;
  blocks[block->index].store(block, std::memory_order_release);
  return block;
}

std::string place_of(const void* where) {
  Dl_info info{};
  char text[256] = "";
  if (dladdr(where, &info))
    std::snprintf(text, sizeof text, "%s+%#zx", info.dli_fname,
                  static_cast<size_t>(static_cast<const char*>(where) -
                                      static_cast<const char*>(info.dli_fbase)));
  return text;
}
std::string name_of(const Actor& actor) {
  const std::string number = std::to_string(actor.block->index);
  if (actor.block->is_host) return "a copy that the host has asked for, block " + number;
  return "thread " + std::to_string(actor.thread) + " of block " + number;
}
// How an access conflicts with an earlier one, by the stamps of one kind, and leaves its own.
struct Earlier {
  const char* does;  // the later access
  const char* did;
  const char* under_way;
  std::atomic<uint64_t> Cell::*stamps, Cell::*own;
};
constexpr Earlier kReads{"reads", "wrote", "by a copy that nobody has waited for", &Cell::wrote,
                         &Cell::read};
constexpr Earlier kCopies{"copies", "wrote", kReads.under_way, &Cell::wrote, &Cell::read};
constexpr Earlier kWrites{"writes", "read", "by a copy that may not have read it yet", &Cell::read,
                          &Cell::wrote};

[[noreturn]] void fail_unordered(const Actor& actor, const Earlier& what, const void* at,
                                 size_t bytes, Stamp stamp, const void* where) {
  const bool mine = stamp.block() == actor.block->index;
  char text[160];
  std::snprintf(text, sizeof text, " %s %zu bytes at %p which thread %u of block %u%s %s%s%s",
                what.does, bytes, at, stamp.thread(), stamp.block(), mine ? ", the same," : "",
                what.did, stamp.time() == kUnderWay ? " " : ": nothing orders the two",
                stamp.time() == kUnderWay ? what.under_way : "");
  fail(name_of(actor) + text + (where ? "\n  addr2line -ifCe " + place_of(where) : ""));
}

// Checks an access and leaves its stamp.
template <const Earlier& What, typename IsOrdered>
void access(const Actor& actor, const void* at, size_t bytes, Stamp own, const void* where,
            const IsOrdered& is_ordered) {
  uint64_t good = 0;
  each_cell(at, bytes, /*add=*/true, [&](Cell& cell) {
    const uint64_t bits = (cell.*What.stamps).load(std::memory_order_relaxed);
    if (bits != good && bits != 0) {
      if (!is_ordered(Stamp{bits})) fail_unordered(actor, What, at, bytes, Stamp{bits}, where);
      good = bits;
    }
    (cell.*What.own).store(own.bits, std::memory_order_relaxed);
  });
}
// The same of the thread itself, which sees its own accesses in their order.
template <const Earlier& What>
void access(const Actor& actor, const void* at, size_t bytes, Stamp own, const void* where) {
  access<What>(actor, at, bytes, own, where, [&](Stamp stamp) {
    if (stamp.block() == actor.block->index && stamp.thread() == actor.thread)
      return stamp.time() != kUnderWay;
    return is_visible(stamp, *actor.block, actor.knows.own, at);
  });
}

}  // namespace

When released_so_far() { return clock_now.load(); }

Device*& own_device() {
  thread_local auto* device = new Device;  // as long as the process
  return device;
}

void fail(const std::string& text) {
  std::fprintf(stderr, "emulated GPU: %s\n", text.c_str());
  std::abort();
}

Kernel::Kernel(bool early) : began_early_(early), began_(clock_now.load()) {
  const std::lock_guard lock(registry);
  running.insert(began_);
}

View Kernel::first_view() const {
  if (began_early_) return {};
  Device& device = *own_device();
  const std::lock_guard lock(device.mutex);
  View view = device.known;
  view.began = began_;
  return view;
}

Block& Kernel::add_block(unsigned num_threads) {
  blocks_.push_back(new_block(num_threads));
  return *blocks_.back();
}

// Forgets blocks once all kernels that ran with them have ended, and kKept later ones: nothing of
// the protocol reads or overwrites what older ones did.
Kernel::~Kernel() {
  const When now = ++clock_now;
  for (Block* block : blocks_) {
    const std::lock_guard lock(block->mutex);
    block->ended = now;
  }
  const std::lock_guard lock(registry);
  running.erase(running.find(began_));
  ended.push_back({now, std::move(blocks_)});
  for (; ended.size() > kKept && (running.empty() || *running.begin() >= ended.front().when);
       ended.pop_front())
    for (Block* block : ended.front().blocks) {
      const std::lock_guard block_lock(block->mutex);
      block->forgotten = true;
      block->threads = {};
      block->released = {};
      block->released_to_system = {};
    }
}

void forget(const void* at, size_t bytes) {
  each_cell(at, bytes, /*add=*/false, [](Cell& cell) {
    cell.wrote.store(0, std::memory_order_relaxed);
    cell.read.store(0, std::memory_order_relaxed);
  });
}

void add_host_memory(const void* at, size_t bytes) { host_memory.add(at, bytes); }
void remove_host_memory(const void* at) { host_memory.remove(at); }
void add_shared_memory(const void* at, size_t bytes) {
  forget(at, bytes);  // what it was used for before
  shared_memory.add(at, bytes);
}
void remove_shared_memory(const void* at, size_t bytes) {
  shared_memory.remove(at);
  forget(at, bytes);
}

void copy_for_host(void* to, const void* from, size_t bytes) {
  thread_local auto* const own = new Actor{.block = new_block(1, /*is_host=*/true)};  // for ever
  Actor& actor = *own;
  actor.has({clock_now.load(), clock_now.load()});
  actor.read(from, bytes, nullptr);
  actor.wrote(to, bytes, nullptr);
  std::memmove(to, from, bytes);
  actor.release(/*to_system=*/true);
}

bool Actor::is_own(const void* at) const {
  return static_cast<size_t>(static_cast<const std::byte*>(at) - stack) < kStackBytes;
}
Stamp Actor::stamp() const { return Stamp::of(block->index, thread, block->now); }

void Actor::wrote(const void* at, size_t bytes, const void* where) {
  if (is_own(at)) return;
  holds = true;
  access<kWrites>(*this, at, bytes, stamp(), where);
}

void Actor::read(const void* at, size_t bytes, const void* where) const {
  if (is_own(at)) return;
  access<kReads>(*this, at, bytes, stamp(), where);
}

bool Actor::sees(Stamp stamp) const { return is_chained(stamp, *block, knows.own); }

void Actor::arrive() {
  const std::lock_guard lock(block->mutex);
  block->threads[thread].arrivals.push_back(++block->now);
  knows.own.arrived[thread / 32] = block->now;
}

void Actor::leave(const Knowledge& all) { knows.join(all); }

When Actor::release(bool to_system) {
  const std::lock_guard lock(block->mutex);
  const uint32_t now = ++block->now;
  Block::Thread& log = block->threads[thread];
  const When when = ++clock_now;
  log.arrivals.push_back(now);
  log.released.add(now, when);
  for (size_t w = 0; w < 32; ++w) block->released[w].add(knows.own.arrived[w], when);
  if (!to_system) return when;
  holds = false;
  log.released_to_system.add(now, when);
  for (size_t w = 0; w < 32; ++w) block->released_to_system[w].add(knows.own.arrived[w], when);
  const std::lock_guard device_lock(block->device->mutex);
  block->device->released.add(knows.own.acquired, when);
  return when;
}
void Actor::release(const void* word, bool to_system) {
  carry(word, {release(to_system), knows.own.host});
}
void Actor::release_too(const void* word, bool to_system) {
  Carried all{release(to_system), knows.own.host};
  all.join(carried(word));
  carry(word, all);
}
void Actor::marked(const void* word) { carry(word, fenced_all); }

void Actor::saw(const void* word) { seen.join(carried(word)); }
void Actor::acquire(const void* word) { has(carried(word)); }
void Actor::has(const Carried& all) {
  if (all.released <= knows.own.acquired && all.host <= knows.own.host) return;
  knows.own.acquired = std::max(knows.own.acquired, all.released);
  knows.own.host = std::max(knows.own.host, all.host);
  holds = true;
}
void Actor::fence() {
  has(seen);
  fenced_all = {release(/*to_system=*/true), knows.own.host};
}

void Actor::wait_for_kernels() {
  View known;
  {
    const std::lock_guard lock(block->device->mutex);
    known = block->device->known;
  }
  known.began = clock_now.load();
  for (View* view : {&knows.own, &knows.copies}) view->join(known);
}
void Actor::ends() const {
  const std::lock_guard lock(block->device->mutex);
  View& known = block->device->known;
  known.acquired = std::max(known.acquired, knows.own.acquired);
  known.host = std::max(known.host, knows.own.host);
}

void Actor::fence_global() {
  arrive();  // its own writes too
  knows.copies = knows.own;
}

void Actor::fence_shared() {
  const std::lock_guard lock(block->mutex);
  block->threads[thread].fences.push_back(++block->now);
  fenced = knows.own.arrived;
}

void Actor::copies_global(const void* from, size_t bytes) const {
  access<kCopies>(*this, from, bytes, stamp(), nullptr,
                  [&](Stamp stamp) { return is_visible(stamp, *block, knows.copies, from); });
}

void Actor::copies_shared(const void* from, size_t bytes) const {
  const Stamp under_way = Stamp::of(block->index, thread, kUnderWay);
  access<kCopies>(*this, from, bytes, under_way, nullptr, [&](Stamp stamp) {
    if (stamp.block() != block->index) return true;  // of a block that had this memory before
    const std::lock_guard lock(block->mutex);
    const Block::Thread& writer = block->threads[stamp.thread()];
    const uint32_t fence = first_after(writer.fences, stamp.time());
    if (fence && stamp.thread() == thread) return true;
    const uint32_t behind = fence ? first_after(writer.arrivals, fence) : 0;
    if (behind && behind <= knows.own.arrived[stamp.thread() / 32]) return true;
    const uint32_t arrival = first_after(writer.arrivals, stamp.time());
    return arrival != 0 && arrival <= fenced[stamp.thread() / 32];
  });
}
void Actor::has_read(const void* from, size_t bytes) const {
  set_stamps(from, bytes, stamp(), &Cell::read);
}

void Actor::begins(const void* to, size_t bytes) const {
  access<kWrites>(*this, to, bytes, Stamp::of(block->index, thread, kUnderWay), nullptr);
}
void Actor::ends(const void* to, size_t bytes) const {
  set_stamps(to, bytes, stamp(), &Cell::wrote);
}

void Actor::signals_host(const void* word) const {
  if (holds && is_of_host(word))
    fail(name_of(*this) + " rings, and nothing orders what it knows before the bell");
}

}  // namespace moe_p2p::emulation::order
