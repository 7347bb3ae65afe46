// Which writes a thread of an emulated GPU may rely on, by the memory model of PTX: tests/emulation
// uses the memory of the host, which forgets nothing, and checks here what a GPU could have kept
// back.
//
// Each write is stamped with its thread and a time of its block. Reads of it need a chain: the same
// thread; a barrier of the block that both reached, the writer first; or a release, by the writer
// or a thread that it met before, and an acquire of the reader behind it. A write that overwrites
// what was read needs the same chain from the last reader. The copy unit needs a fence of its own
// on the chain. A kernel that waits for earlier ones (griddepcontrol.wait) has all of their writes,
// and what their threads had acquired. Without a chain the process ends with an error text,
// whatever the order of threads was.
//
// Hosts order kernels of different ranks too, for instance by a barrier, and what they do is not
// seen here. So where ranks do not share memory, a kernel has all that any rank released before it
// began; memory that ranks share (add_shared_memory) needs a chain of words between the ranks.
//
// A word carries the time of its last release: of the store itself, or of its thread's last fence
// before it. A thread that acquires the word, or reads it before a fence, has everything that any
// thread released up to then. So a wait that is missing altogether shows only in wrong results.
// What the driver copied for the host needs more: an acquire of a word that the host wrote, and a
// chain of words from there. A word of host memory carries all that was released until it is read:
// what the host has seen in between is not known. Words that are written and read by atomic
// accesses need no chain themselves, nor does what the host writes, except copies by the driver.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace moe_p2p::emulation::order {

using When = uint64_t;  // of the whole process: how much has been released
inline constexpr When kNever = std::numeric_limits<When>::max();
When released_so_far();

inline constexpr uint32_t kUnderWay = (1u << 30) - 1;  // of a copy that no thread has waited for
// The thread that accessed a word last, and the time by its block's clock; 0: none.
struct Stamp {
  uint64_t bits;
  static Stamp of(uint32_t block, uint32_t thread, uint32_t time) {
    return {uint64_t{block} << 40 | uint64_t{thread} << 30 | time};
  }
  uint32_t block() const { return static_cast<uint32_t>(bits >> 40); }
  uint32_t thread() const { return static_cast<uint32_t>(bits >> 30) & 1023; }
  uint32_t time() const { return static_cast<uint32_t>(bits) & kUnderWay; }
};

using Times = std::array<uint32_t, 32>;  // of the block's clock, one for each of its warps

// What a word hands on.
struct Carried {
  When released = 0;  // by any thread up to then
  When host = 0;      // by copies of the host up to then

  void join(const Carried& other) {
    released = std::max(released, other.released);
    host = std::max(host, other.host);
  }
};

struct View {
  When began = 0;     // own kernels that ended up to then; what any rank released, where not shared
  When acquired = 0;  // what was released up to then
  When host = 0;      // what the host copied up to then
  Times arrived{};    // writes of these warps' threads before a barrier, up to then

  void join(const View& other) {
    began = std::max(began, other.began);
    acquired = std::max(acquired, other.acquired);
    host = std::max(host, other.host);
    for (size_t w = 0; w < arrived.size(); ++w) arrived[w] = std::max(arrived[w], other.arrived[w]);
  }
};
// What a thread, and its copies, may rely on; joined with the Knowledge of others at barriers.
struct Knowledge {
  View own, copies;

  void join(const Knowledge& other) {
    own.join(other.own);
    copies.join(other.copies);
  }
};

// When something was covered first; of each addition only what goes beyond earlier additions.
template <typename Bound>
class Coverage {
 public:
  void add(Bound bound, When when) {
    if (steps_.empty() || bound > steps_.back().first) steps_.emplace_back(bound, when);
  }
  When of(Bound bound) const {
    const auto step =
        std::ranges::lower_bound(steps_, bound, {}, [](const auto& s) { return s.first; });
    return step == steps_.end() ? kNever : step->second;
  }

 private:
  std::vector<std::pair<Bound, When>> steps_;
};

// What blocks of one rank released to the whole system: all that each had acquired.
struct Device {
  std::mutex mutex;
  Coverage<When> released;
  View known;  // to threads that have ended
};

// The Device of the calling thread: one of its own, unless it takes over another thread's.
Device*& own_device();

// What became of the writes of a block, as long as a kernel may need it.
struct Block {
  struct Thread {
    std::vector<uint32_t> arrivals, fences;  // for copies of shared memory
    Coverage<uint32_t> released, released_to_system;
  };
  std::mutex mutex;
  Device* device = nullptr;
  bool is_host = false;  // no block of a kernel
  uint32_t index = 0;    // of stamps
  uint32_t now = 1;
  When ended = kNever;  // with its kernel
  bool forgotten = false;
  std::vector<Thread> threads;
  std::array<Coverage<uint32_t>, 32> released, released_to_system;  // arrivals of warps
};

// One thread.
struct Actor {
  Block* block = nullptr;
  uint32_t thread = 0;
  Knowledge knows;
  Times fenced{};      // arrivals at its last fence for copies of shared memory
  Carried seen;        // carried by words that it has read, for its next fence
  Carried fenced_all;  // at its last fence, for words that it writes behind it
  bool holds = false;  // it has written or acquired since its last release to the system
  const std::byte* stack = nullptr;

  bool is_own(const void* at) const;  // on its stack
  Stamp stamp() const;
  void wrote(const void* at, size_t bytes, const void* where);
  void read(const void* at, size_t bytes, const void* where) const;
  bool sees(Stamp stamp) const;      // a write of another thread
  void arrive();                     // before a barrier of its block, or an equivalent
  void leave(const Knowledge& all);  // behind it, with the Knowledge of all that arrived
  When release(bool to_system);
  void release(const void* word, bool to_system);
  void release_too(const void* word, bool to_system);  // keeps what the word carried
  void saw(const void* word);                          // read it, without an order
  void marked(const void* word);                       // wrote it, without an order
  void acquire(const void* word);
  void has(const Carried& all);
  void fence();  // for both directions, to the whole system
  void wait_for_kernels();
  void ends() const;  // the thread does
  void fence_global();
  void fence_shared();
  // Copies: from global memory, from shared memory, and to either, between begin and end.
  void copies_global(const void* from, size_t bytes) const;
  void copies_shared(const void* from, size_t bytes) const;
  void has_read(const void* from, size_t bytes) const;  // a copy, which the thread has waited for
  void begins(const void* to, size_t bytes) const;
  void ends(const void* to, size_t bytes) const;
  // Before a word is stored for the host, which then reads what this thread knows.
  void signals_host(const void* word) const;
};

// The blocks of a kernel: from its launch until no kernel needs them any more.
class Kernel {
 public:
  // early: it may have begun before earlier kernels of its stream ended.
  explicit Kernel(bool early);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  Block& add_block(unsigned num_threads);
  View first_view() const;

 private:
  const bool began_early_;
  const When began_;
  std::vector<Block*> blocks_;
};

// Forgets accesses there: the memory gets a new use.
void forget(const void* at, size_t bytes);
// Adds memory of the host that kernels write doorbells and faults to.
void add_host_memory(const void* at, size_t bytes);
void remove_host_memory(const void* at);
// Adds memory that kernels of several ranks read and write.
void add_shared_memory(const void* at, size_t bytes);
void remove_shared_memory(const void* at, size_t bytes);
// A copy by the engine of a GPU: it reads what was released to the system until the host asked for
// it, and a thread that acquires what the host then writes has the copy.
void copy_for_host(void* to, const void* from, size_t bytes);

inline constexpr size_t kStackBytes = 64 << 10;
[[noreturn]] void fail(const std::string& text);

}  // namespace moe_p2p::emulation::order
