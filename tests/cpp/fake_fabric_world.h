// The state behind the fake of EFA: libfabric's objects, and what both of its halves share.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "fake_fabric.h"

namespace moe_p2p::test::fabric_world {

using namespace provider::libfabric;  // NOLINT(google-build-using-namespace): all of the ABI

inline constexpr size_t kNameBytes = 32, kQueue = 96;

struct FakeDomain;
struct FakeCq;
struct FakeEndpoint;

struct FakeRegion : MemoryRegion {
  FakeDomain* domain = nullptr;
  std::byte* data = nullptr;
  size_t bytes = 0;
  uint64_t access = 0;
  bool needs_sync = false;  // registered as CUDA's: not synchronised with CUDA yet
  bool is_foreign = false;  // a dma-buf said to be the host's: CPUs cannot reach it
};

struct Operation {
  FakeEndpoint* source;
  FakeRegion* local_region;
  std::byte* local;
  size_t bytes;
  RmaIov remote;
  uint64_t target;  // id of the endpoint
  uint64_t imm;
  bool has_imm;
  void* context;
  uint32_t delay;  // in polls of anybody
  bool more;       // posted with FI_MORE
  bool is_read;
};

struct FakeDomain : AccessDomain {
  std::string name;
  std::mt19937_64 random;
  bool has_hmem = false;
  bool keeps_early_writes = false;
  bool registers_alone = true;  // FI_THREAD_DOMAIN: also registering takes turns with all else
  std::atomic<bool> inside{false};
  std::map<uint64_t, FakeRegion*> regions;
};

struct FakeAv : AddressVector {
  FakeDomain* domain = nullptr;
  std::vector<uint64_t> ids;  // 0: removed
};

struct FakeCq : CompletionQueue {
  FakeDomain* domain = nullptr;
  FakeEndpoint* endpoint = nullptr;
  std::vector<CqEntry> entries;
  std::vector<CqError> errors;
  bool broken = false;
};

struct FakeEndpoint : Endpoint {
  FakeDomain* domain = nullptr;
  FakeAv* av = nullptr;
  FakeCq* cq = nullptr;
  uint64_t id = 0;
  bool enabled = false, cuda_permitted = true, shm_permitted = true;
  bool unsolicited = false, emulates = false;  // of the machine, as it was opened
  std::vector<Operation> unrung;
  std::vector<Operation> before_handshake;  // accepted, kept back
  bool cut = false;                         // the last post was refused
  size_t num_outstanding = 0;
  std::map<uint64_t, uint32_t> handshakes;  // polls left until the peer answers
};

// All endpoints of the process and what is between them. One lock, taken by every call.
struct Network {
  std::mutex mutex;
  std::map<uint64_t, FakeEndpoint*> endpoints;
  std::vector<Operation> wire;
  uint64_t next_id = 1, next_key = 1000;
  FakeFabric::Counts counts;
  int next_err = 0, next_prov_errno = 0, registration_err = 0;
  bool refuse_all = false;
  std::string silent;  // NIC whose endpoints do not answer
  FakeFabric::Machine machine;
  std::atomic<bool> hold_registrations{false};
  std::atomic<uint32_t> num_registering{0};
};
Network& network();

// One call into a domain: counts those that are not alone, and holds the network.
class Call {
 public:
  explicit Call(FakeDomain& domain)
      : domain_(domain), alone_(!domain.inside.exchange(true)), lock_(network().mutex) {
    if (!alone_) ++network().counts.intruders;
  }
  ~Call() {
    if (alone_) domain_.inside.store(false);
  }

 private:
  FakeDomain& domain_;
  const bool alone_;
  const std::lock_guard<std::mutex> lock_;
};

// The data path (fake_fabric_datapath.cpp).
ssize_t readmsg(Endpoint* object, const RmaMessage* message, uint64_t flags);
ssize_t writemsg(Endpoint* object, const RmaMessage* message, uint64_t flags);
ssize_t cq_read(CompletionQueue* object, void* out, size_t count);
ssize_t cq_readerr(CompletionQueue* object, CqError* error, uint64_t flags);

}  // namespace moe_p2p::test::fabric_world
