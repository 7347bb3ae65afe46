// A CUDA driver for machines without one: what passes for GPU memory is memory of the host, and a
// stream does its copies late, while somebody asks for one of its events. How late is drawn from a
// seed, so a reader that believes an immediate before the copy sees old bytes, each time the same.
//
// It refuses what would be wrong on a device: copies on a thread without a context, and event
// queries that may break a stream capture. A launch is of the copy kernel (kernels/copy.cu),
// whatever function it names: a thread that keeps the same protocol. What a NIC writes to memory
// that was placed on a GPU is not there for those who read it until the GPU is flushed, unless it
// orders such writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "platform/cuda_driver.h"

namespace moe_p2p::test {

class FakeDriver {
 public:
  // Stands in for the driver from now on, for the whole process; the same one at each call.
  static FakeDriver& install();

  // A copy takes up to so many queries after those before it. At first 12.
  void set_max_queries(uint32_t max_queries);
  void hold(bool held);  // no copy is done
  // Bytes of a page of the host from now on, for all who ask the system; 0: its own.
  static void set_host_page(long bytes);
  // What each copy or event query returns from now on; 0: what is right.
  void fail_copies(int error);
  void fail_queries(int error);
  // Copy kernels wait for room on the device from now on, or no longer.
  void keep_kernels_out(bool out) { kernels_out = out; }
  void keep_kernels_in(bool in) { kernels_in = in; }  // they do not leave when nothing comes
  // Each leaves once it has done so many copies, whatever is asked for by then.
  void let_kernels_leave_after(uint64_t num_copies) { kernel_copies = num_copies; }
  uint64_t num_launches() const { return launches; }
  // Since install() was first called.
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
  };
  struct Stream {
    std::deque<Operation> operations;
    std::mt19937_64 random{1};  // each its own, so that a run of one thread repeats exactly
    int64_t queries_left = -1;  // of the copy at the front; -1: not drawn
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
  void advance(Stream& stream);

  bool held = false;
  uint32_t max_queries = 12;
  int copy_error = 0, query_error = 0, contexts = 0, broken_off = 0;
  uint64_t copies = 0;
  std::atomic<bool> kernels_out{false}, kernels_in{false};
  std::atomic<uint64_t> kernel_copies{~uint64_t{0}}, launches{0};
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
  std::span<std::byte> exported;  // the last dma-buf

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
