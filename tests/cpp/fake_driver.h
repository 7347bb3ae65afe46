// A CUDA driver for machines without one: what passes for GPU memory is memory of the host, and a
// stream does its copies late, while somebody asks for one of its events. How late is drawn from a
// seed, so a reader that believes an immediate before the copy sees old bytes, each time the same.
//
// It refuses what would be wrong on a device: copies on a thread without a context, and all that
// may break a stream capture elsewhere: event queries, pinned memory and handles of memory on a
// thread whose capture mode is not relaxed. A launch is of the copy kernel (kernels/copy.cu),
// whatever function it names: a thread that keeps the same protocol; but kRowKernel is
// kernels/rows.cu. What a NIC writes to memory that was placed on a GPU is not there for those who
// read it until the GPU is flushed, unless it orders such writes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "fake_driver_kernels.h"
#include "platform/cuda_driver.h"

namespace moe_p2p::test {

class FakeDriver {
 public:
  // Stands in for the driver from now on, for the whole process; the same one at each call.
  static FakeDriver& install();

  // A copy takes up to so many queries after those before it. At first 12.
  void set_max_queries(uint32_t max_queries);
  void hold(bool held);       // no copy is done
  void hold_rows(bool held);  // no kernel of rows has room on the device
  // Bytes of a page of the host from now on, for all who ask the system; 0: its own.
  static void set_host_page(long bytes);
  // What each copy or event query returns from now on; 0: what is right.
  void fail_copies(int error);
  void fail_queries(int error);
  // Copy kernels wait for room on the device from now on, or no longer.
  void keep_kernels_out(bool out);
  void keep_kernels_in(bool in) { kernels_in = in; }  // they do not leave when nothing comes
  // Each leaves once it has done so many copies, whatever is asked for by then.
  void let_kernels_leave_after(uint64_t num_copies) { kernel_copies = num_copies; }
  uint64_t num_launches() const { return launches; }
  uint64_t num_row_launches() const { return row_launches; }
  // From now on the driver gives handles of memory, which passes for memory of two GPUs.
  void share_memory(bool on) { shares_memory = on; }
  // Memory of cudaMalloc, or of a pool, which has no handles; until free_memory(), after which it
  // may be allocated again, and has another handle.
  void allocate(std::span<std::byte> memory, bool pool = false);
  void free_memory(std::span<std::byte> memory);
  size_t num_mapped();  // handles opened and not closed
  // Streams write no words, or no page of the host can be registered, from now on, or no longer.
  void write_words(bool on) { writes_words = on; }
  void register_pages(bool on) { registers_pages = on; }
  void reach_peers(bool on) { reaches_peers = on; }  // GPUs use memory of each other, or cannot
  static constexpr uint64_t kRowKernel = 77;         // its function
  // Since install() was first called.
  bool runs_by_itself();  // a kernel has not ended, or a word is not written yet
  uint64_t num_copies();  // begun
  int num_contexts();     // retained and not released
  // Streams that were destroyed with copies left.
  int num_broken_off();

  // What the driver's functions do; see fake_driver.cpp.
  struct Copy {
    uint64_t to, from;
    size_t bytes;
  };
  struct Event;
  struct Operation {
    Copy copy;
    Event* event;                                        // null: a copy, or a kernel
    std::shared_ptr<std::atomic<bool>> ended = nullptr;  // of a kernel
    uint64_t* word = nullptr;                            // of a write of a word
    uint64_t value = 0;
  };
  struct Stream {
    std::deque<Operation> operations;
    std::mt19937_64 random{1};  // each its own, so that a run of one thread repeats exactly
    std::unique_ptr<Kernels> kernels = nullptr;  // from the first launch on
    bool writes = false;                         // a thread goes on until all words are written
    int64_t queries_left = -1;                   // of the copy at the front; -1: not drawn
  };
  struct Event {
    Stream* stream = nullptr;
    int num_pending = 0;  // times it was recorded and not reached
  };
  template <typename Step>
  auto locked(Step&& step) {
    const std::lock_guard lock(mutex_);
    return step(*this);
  }
  // The same for what others wait for in wait_while().
  template <typename Change>
  void change(Change&& change) {
    const std::lock_guard lock(mutex_);
    change(*this);
    changed.notify_all();
  }
  template <typename Condition>
  void wait_while(Condition&& condition) {
    std::unique_lock lock(mutex_);
    changed.wait(lock, [&] { return !condition(*this); });
  }
  void advance(Stream& stream);
  bool stands_still(const Stream& stream) const;  // until a kernel ends or copies are let go on

  std::condition_variable changed;

  std::set<Stream*> streams;  // that were not destroyed
  bool held = false, rows_held = false, kernels_out = false;
  uint32_t max_queries = 12;
  int copy_error = 0, query_error = 0, contexts = 0, broken_off = 0;
  uint64_t copies = 0;
  std::atomic<bool> kernels_in{false};
  std::atomic<bool> shares_memory{false}, writes_words{true}, registers_pages{true};
  std::atomic<bool> reaches_peers{true};
  std::set<std::pair<void*, void*>> peers;  // contexts: the first uses memory of the second
  std::set<void*> registered;               // pages of the host
  std::atomic<uint64_t> kernel_copies{~uint64_t{0}}, launches{0}, row_launches{0};
  // `memory` passes for that of a GPU, whose own kernels read it (readers 100), or other GPUs as
  // well (200), until it is given back with take_back().
  void place(std::span<std::byte> memory, int device, int readers);
  void take_back(std::span<std::byte> memory);
  // A NIC's write: at once, or not before the GPU of that memory flushes.
  static void write_by_nic(void* to, const void* from, size_t bytes);
  int flush(int device);

  // Writes of NICs: how far they are ordered, what flushes and exports return, flushes so far.
  int writes_ordering = 200, flush_options = 1, flush_error = 0, dmabuf_error = 0;
  uint64_t flushes = 0;
  int flush_scope = 0;            // of the last one
  std::span<std::byte> exported;  // the last dma-buf

  struct Allocation {
    std::span<std::byte> memory;
    bool pool;
    uint64_t id;
  };
  struct Mapping {
    uint64_t id, base, bytes;
    int count;
  };
  std::vector<Allocation> allocations;
  std::vector<Mapping> mappings;
  uint64_t num_allocations = 0;

 private:
  struct Placed {
    std::span<std::byte> memory;
    int device, readers;
  };
  struct Unseen {
    int device;
    std::byte* to;
    std::vector<std::byte> bytes;
  };

  std::vector<Placed> placed_;
  std::vector<Unseen> unseen_;
  std::mutex mutex_;
};

}  // namespace moe_p2p::test
