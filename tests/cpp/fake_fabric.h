// A libfabric for machines without EFA: the table of functions answers as the efa provider does,
// and harder than a device would. Completions and immediates come in any order, requests are
// refused with EAGAIN (at first contact until the peers have shaken hands, when the queue is full,
// and now and then), immediates have four bytes, memory has to be registered at both ends, and
// nothing inside has a lock of its own: a second thread in one domain is counted, unless it
// registers memory and the domain was opened for that (FI_THREAD_COMPLETION). What was posted with
// FI_MORE does not leave until a post without it. All peers share a send queue. GPU memory cannot
// be written from unless the endpoint was forbidden to call CUDA. Between unlike machines writes
// are emulated, which aborts where the target is GPU memory said to be the host's.
//
// Its NICs are named after the seed that they draw from: interfaces=efa7. Endpoints of one process
// reach each other.
#pragma once

#include <cstdint>
#include <string_view>

#include "provider/libfabric/api.h"

namespace moe_p2p::test {

struct FakeFabric {
  // Since use_for() installed it last.
  struct Counts {
    uint64_t refused = 0;        // EAGAIN
    uint64_t chained = 0;        // posts with FI_MORE
    uint64_t across_peers = 0;   // posts in a chain whose last was to another peer
    uint64_t left_open = 0;      // polls that found a chain open which no EAGAIN had cut
    uint64_t intruders = 0;      // calls into a domain while another thread was inside
    uint64_t dmabufs = 0;        // registrations by dma-buf
    uint64_t as_cuda = 0;        // registrations as memory of CUDA
    uint64_t as_host = 0;        // of these, said to be the host's
    uint64_t direct = 0;         // fabrics opened that are "efa-direct"
    uint64_t failed = 0;         // error completions
    uint64_t emulated = 0;       // writes by packets and copies
    uint64_t shm_transfers = 0;  // endpoints enabled with EFA's own shared memory permitted
  };
  static Counts counts();

  // Stands in for libfabric when the settings ask for efa, else the real one is used again.
  static void use_for(std::string_view settings);

  // What libfabric finds on this machine.
  struct Machine {
    uint32_t version = provider::libfabric::make_version(2, 1);
    bool cuda = true;              // the loader finds libcudart.so
    bool gpu_direct = true;        // EFA reaches GPU memory
    bool emulates_writes = false;  // the device has no RDMA write
  };
  static void set_machine(const Machine& machine);

  // What is written to endpoints of that NIC ("efa8") stays under way, and they shake no hands; "":
  // all answer.
  static void silence(std::string_view nic);
  // Registrations do not return until they are let go; how many there are.
  static void hold_registrations(bool hold);
  static uint32_t num_registering();

  // The status of the device that the next write completes with, and libfabric's number; 0: none.
  static void fail_next(int err, int prov_errno);
  // No post gets through to anybody.
  static void refuse_all(bool refuse);
  // What registering memory is answered with; 0: it works.
  static void fail_registration(int err);
  // The device is gone: completion queues that exist are answered with EIO, also for the reason.
  static void lose_devices();
};

}  // namespace moe_p2p::test
