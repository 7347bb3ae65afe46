// Which writes a thread of an emulated GPU may rely on, by the memory model of PTX: tests/emulation
// keeps the memory of the host, which forgets nothing, and finds out here what a GPU could have
// kept back.
//
// Each write is stamped with its thread and a time of its block. Reads of it need a chain: the same
// thread; a barrier of the block that both came to, the writer first; or a release, by the writer
// or a thread that it met before, and an acquire of the reader behind it. Writes over what was read
// need the same chain from the last reader. The copy unit needs a fence of its own on the chain. A
// kernel that waits for earlier ones (griddepcontrol.wait) has all of theirs. Without a chain the
// process ends with a story, whatever the order of threads was.
//
// A word carries the time of its last release: the store's own, or of its thread's last fence
// before it. Who acquires the word, or reads it before a fence, has everything that was released up
// to then, by whoever. So a wait that is missing altogether is for wrong results to show. What the
// driver copied for the host needs more: an acquire of a word that the host wrote, and a chain of
// words from there. A word of host memory carries all that was released until it is read: what the
// host has seen in between is not known. Words that are written and read by atomic accesses need no
// chain themselves, nor does what the host writes but for copies by the driver.
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

inline constexpr uint32_t kUnderWay = (1u << 30) - 1;  // of a copy that nobody has waited for
// Who accessed a word last, and when by its block's clock; 0: nobody.
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
  When released = 0;  // by anybody up to then
  When host = 0;      // by copies of the host up to then

  void join(const Carried& other) {
    released = std::max(released, other.released);
    host = std::max(host, other.host);
  }
};

struct View {
  When acquired = 0;  // what was released up to then
  When host = 0;      // what the host copied up to then
  Times arrived{};    // what threads of these warps wrote before they came to a barrier, up to then

  void join(const View& other) {
    acquired = std::max(acquired, other.acquired);
    host = std::max(host, other.host);
    for (size_t w = 0; w < arrived.size(); ++w) arrived[w] = std::max(arrived[w], other.arrived[w]);
  }
};
// What a thread may rely on, and its copies; joined with that of others at barriers.
struct Knowledge {
  View own, copies;

  void join(const Knowledge& other) {
    own.join(other.own);
    copies.join(other.copies);
  }
};

// When something was covered first; of each addition only what goes beyond those before it.
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
};

// That of the calling thread: one of its own, unless it takes that of another one.
Device*& own_device();

// What became of the writes of a block, as long as a kernel may ask.
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
  std::vector<Thread> threads;
  std::array<Coverage<uint32_t>, 32> released, released_to_system;  // arrivals of warps
};

// One thread.
struct Actor {
  Block* block = nullptr;
  uint32_t thread = 0;
  Knowledge knows;
  Times fenced{};      // what had arrived at its last fence for copies of shared memory
  Carried seen;        // by words that it has read, for its next fence
  Carried fenced_all;  // at its last fence, for words that it writes behind it
  bool holds = false;  // it has written or acquired since it released to the system last
  const std::byte* stack = nullptr;

  bool is_own(const void* at) const;  // on its stack
  Stamp stamp() const;
  void wrote(const void* at, size_t bytes, const void* where);
  void read(const void* at, size_t bytes, const void* where) const;
  bool sees(Stamp stamp) const;      // a write of another thread
  void arrive();                     // before a barrier of its block, or what orders as one
  void leave(const Knowledge& all);  // and behind it, with what all who came know
  When release(bool to_system);
  void release(const void* word, bool to_system);
  void release_too(const void* word, bool to_system);  // what it carried, it still does
  void saw(const void* word);                          // read it, without an order
  void marked(const void* word);                       // wrote it, without an order
  void acquire(const void* word);
  void has(const Carried& all);
  void fence();  // for both directions, to the whole system
  void wait_for_kernels();
  void fence_global();
  void fence_shared();
  // Copies: from global memory, from shared memory, and to either, between their beginning and
  // their end.
  void copies_global(const void* from, size_t bytes) const;
  void copies_shared(const void* from, size_t bytes) const;
  void has_read(const void* from, size_t bytes) const;  // a copy, which the thread has waited for
  void begins(const void* to, size_t bytes) const;
  void ends(const void* to, size_t bytes) const;
  // A word for the host, which then reads what this thread knows.
  void tells_host(const void* word) const;
};

// The blocks of a kernel: from its launch until nobody asks any more.
class Kernel {
 public:
  // early: it may have begun before earlier kernels of its stream ended.
  explicit Kernel(bool early);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  Block& add_block(unsigned num_threads);
  View first_view() const { return began_early_ ? View{} : View{began_, began_, {}}; }

 private:
  const bool began_early_;
  const When began_;
  std::vector<Block*> blocks_;
};

// What was written there is for nobody any more.
void forget(const void* at, size_t bytes);
// Memory of the host that kernels write doorbells and faults to.
void add_host_memory(const void* at, size_t bytes);
void remove_host_memory(const void* at);
// A copy by the engine of a GPU: it reads what was released to the system until the host asked for
// it, and who acquires what the host then writes has it.
void copy_for_host(void* to, const void* from, size_t bytes);

inline constexpr size_t kStackBytes = 64 << 10;
[[noreturn]] void fail(const std::string& story);

}  // namespace moe_p2p::emulation::order
