#include "fake_fabric.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fake_fabric_info.h"

namespace moe_p2p::test {

using namespace provider::libfabric;  // NOLINT(google-build-using-namespace): all of the ABI

namespace {

constexpr size_t kNameBytes = 32, kQueue = 96;
constexpr int kNoData = 61, kBadLocalKey = 5, kBadAddress = 7, kUnresponsive = 13;

struct FakeDomain;
struct FakeCq;
struct FakeEndpoint;

struct FakeRegion : MemoryRegion {
  FakeDomain* domain = nullptr;
  std::byte* data = nullptr;
  size_t bytes = 0;
};

struct Operation {
  FakeEndpoint* source;
  FakeRegion* local_region;
  const std::byte* local;
  size_t bytes;
  RmaIov remote;
  uint64_t target;  // id of the endpoint
  uint64_t imm;
  bool has_imm;
  void* context;
  uint32_t delay;  // in polls of anybody
};

struct FakeDomain : AccessDomain {
  std::string name;
  std::mt19937_64 random;
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
  std::vector<Operation> unrung;
  bool cut = false;  // the last post was refused
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
};
Network& network() {
  static Network instance;
  return instance;
}

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

bool one_in(FakeDomain& domain, uint32_t n) { return domain.random() % n == 0; }

void report(const Operation& op, int err, int prov_errno) {
  --op.source->num_outstanding;
  if (err == 0) {
    op.source->cq->entries.push_back({op.context, kRma | kWrite, 0, nullptr, 0});
    return;
  }
  ++network().counts.failed;
  CqError error{};
  error.op_context = op.context;
  error.flags = kRma | kWrite;
  error.err = err;
  error.prov_errno = prov_errno;
  op.source->cq->errors.push_back(error);
}

void carry_out(const Operation& op) {
  Network& n = network();
  if (const int err = std::exchange(n.next_err, 0)) return report(op, err, n.next_prov_errno);
  const auto target = n.endpoints.find(op.target);
  if (target == n.endpoints.end()) return report(op, ECONNABORTED, kUnresponsive);
  const auto& local = op.source->domain->regions;
  const bool has_local = std::ranges::any_of(
      local, [&](const auto& entry) { return entry.second == op.local_region; });
  if (!has_local) return report(op, EINVAL, kBadLocalKey);
  const auto& regions = target->second->domain->regions;
  const auto found = regions.find(op.remote.key);
  if (found == regions.end()) return report(op, EINVAL, kBadAddress);
  const auto base = reinterpret_cast<uint64_t>(found->second->data);
  const uint64_t offset = op.remote.addr - base;
  if (op.remote.addr < base || offset > found->second->bytes ||
      op.bytes > found->second->bytes - offset)
    return report(op, EINVAL, kBadAddress);
  std::memcpy(found->second->data + offset, op.local, op.bytes);
  if (op.has_imm)
    target->second->cq->entries.push_back(
        {nullptr, kRma | kRemoteWrite | kRemoteCqData, 0, nullptr, op.imm});
  report(op, 0, 0);
}

void advance(FakeDomain& domain) {
  auto& wire = network().wire;
  for (size_t i = 0; i < wire.size();) {
    if (wire[i].delay > 0) {
      --wire[i++].delay;
      continue;
    }
    const Operation op = wire[i];
    wire[i] = wire.back();
    wire.pop_back();
    carry_out(op);
  }
  std::ranges::shuffle(wire, domain.random);
}

// --- data ---

ssize_t refuse(FakeEndpoint& endpoint) {
  endpoint.cut = true;
  ++network().counts.refused;
  return -EAGAIN;
}

bool is_ready(FakeEndpoint& endpoint, uint64_t target) {
  const auto [peer, is_new] = endpoint.handshakes.try_emplace(target, 0);
  if (is_new) peer->second = endpoint.domain->random() % 20;
  return peer->second == 0;
}

ssize_t writemsg(Endpoint* object, const RmaMessage* message, uint64_t flags) {
  auto& endpoint = *static_cast<FakeEndpoint*>(object);
  FakeDomain& domain = *endpoint.domain;
  const Call call(domain);
  Network& n = network();
  const uint64_t wanted = kCompletion | kDeliveryComplete;
  if (message->iov_count != 1 || message->rma_iov_count != 1 || (flags & wanted) != wanted ||
      message->data >> 32 != 0 || message->addr >= endpoint.av->ids.size() || !message->desc ||
      !message->desc[0])
    return -EINVAL;
  const uint64_t target = endpoint.av->ids[message->addr];
  if (target == 0) return -EINVAL;
  if (n.refuse_all || endpoint.num_outstanding >= kQueue || !is_ready(endpoint, target) ||
      one_in(domain, 8))
    return refuse(endpoint);
  endpoint.cut = false;
  ++endpoint.num_outstanding;
  const uint32_t delay = one_in(domain, 16) ? domain.random() % 64 : domain.random() % 4;
  endpoint.unrung.push_back({&endpoint, static_cast<FakeRegion*>(message->desc[0]),
                             static_cast<const std::byte*>(message->msg_iov->iov_base),
                             message->msg_iov->iov_len, *message->rma_iov, target, message->data,
                             (flags & kRemoteCqData) != 0, message->context, delay});
  if (flags & kMore) {
    ++n.counts.chained;
    return 0;
  }
  n.wire.insert(n.wire.end(), endpoint.unrung.begin(), endpoint.unrung.end());
  endpoint.unrung.clear();
  return 0;
}

ssize_t cq_read(CompletionQueue* object, void* out, size_t count) {
  auto& cq = *static_cast<FakeCq*>(object);
  const Call call(*cq.domain);
  if (cq.broken) return -EIO;
  if (!cq.endpoint->unrung.empty() && !cq.endpoint->cut) ++network().counts.left_open;
  for (auto& [peer, polls] : cq.endpoint->handshakes) polls -= polls > 0 ? 1 : 0;
  advance(*cq.domain);
  if (!cq.errors.empty()) return -kErrorAvailable;
  if (cq.entries.empty()) return -EAGAIN;
  std::ranges::shuffle(cq.entries, cq.domain->random);
  const size_t shown = std::min(count, cq.entries.size());
  std::copy_n(cq.entries.end() - static_cast<std::ptrdiff_t>(shown), shown,
              static_cast<CqEntry*>(out));
  cq.entries.resize(cq.entries.size() - shown);
  return static_cast<ssize_t>(shown);
}

ssize_t cq_readerr(CompletionQueue* object, CqError* error, uint64_t) {
  auto& cq = *static_cast<FakeCq*>(object);
  const Call call(*cq.domain);
  if (cq.broken) return -EIO;
  if (cq.errors.empty()) return -EAGAIN;
  *error = cq.errors.back();
  cq.errors.pop_back();
  return 1;
}

// --- control ---

template <typename T>
int close_object(Fid* fid) {
  delete reinterpret_cast<T*>(fid);
  return 0;
}

int close_region(Fid* fid) {
  auto* region = reinterpret_cast<FakeRegion*>(fid);
  {
    const Call call(*region->domain);
    region->domain->regions.erase(region->key);
  }
  delete region;
  return 0;
}

int close_endpoint(Fid* fid) {
  auto* endpoint = reinterpret_cast<FakeEndpoint*>(fid);
  {
    const Call call(*endpoint->domain);
    network().endpoints.erase(endpoint->id);
    std::erase_if(network().wire, [&](const Operation& op) { return op.source == endpoint; });
  }
  delete endpoint;
  return 0;
}

int bind_endpoint(Fid* fid, Fid* to, uint64_t) {
  auto& endpoint = *reinterpret_cast<FakeEndpoint*>(fid);
  if (to->fclass == 1) endpoint.av = reinterpret_cast<FakeAv*>(to);
  if (to->fclass == 2) {
    endpoint.cq = reinterpret_cast<FakeCq*>(to);
    endpoint.cq->endpoint = &endpoint;
  }
  return 0;
}

int enable(Fid*, int command, void*) { return command == kControlEnable ? 0 : -ENOSYS; }

template <int (*Close)(Fid*)>
FidOps* fid_ops() {
  static FidOps ops{sizeof(FidOps), Close, bind_endpoint, enable};
  return &ops;
}

int get_name(Fid* fid, void* address, size_t* length) {
  const auto& endpoint = *reinterpret_cast<FakeEndpoint*>(fid);
  const size_t room = std::exchange(*length, kNameBytes);
  if (room < kNameBytes) return -257;
  std::memset(address, 0, kNameBytes);
  std::memcpy(address, &endpoint.id, sizeof(endpoint.id));
  return 0;
}

// The same address yields the same place, as efa's does.
int av_insert(AddressVector* object, const void* address, size_t, uint64_t* fi_addr, uint64_t,
              void*) {
  auto& av = *static_cast<FakeAv*>(object);
  const Call call(*av.domain);
  uint64_t id = 0;
  std::memcpy(&id, address, sizeof(id));
  const auto found = std::ranges::find(av.ids, id);
  *fi_addr = static_cast<uint64_t>(found - av.ids.begin());
  if (found == av.ids.end()) av.ids.push_back(id);
  return 1;
}

int av_remove(AddressVector* object, uint64_t* fi_addr, size_t, uint64_t) {
  auto& av = *static_cast<FakeAv*>(object);
  const Call call(*av.domain);
  if (*fi_addr >= av.ids.size() || av.ids[*fi_addr] == 0) return -EINVAL;
  av.ids[*fi_addr] = 0;
  return 0;
}

int open_av(AccessDomain* domain, AvAttr*, AddressVector** out, void*) {
  static AvOps ops{sizeof(AvOps), av_insert, nullptr, nullptr, av_remove};
  auto* av = new FakeAv;
  av->fid = {1, nullptr, fid_ops<close_object<FakeAv>>()};
  av->ops = &ops;
  av->domain = static_cast<FakeDomain*>(domain);
  *out = av;
  return 0;
}

int open_cq(AccessDomain* domain, CqAttr* attr, CompletionQueue** out, void*) {
  static CqOps ops{sizeof(CqOps), cq_read, nullptr, cq_readerr, nullptr, nullptr, nullptr, nullptr};
  if (attr->format != kCqFormatData || attr->size < kQueue) return -EINVAL;
  auto* cq = new FakeCq;
  cq->fid = {2, nullptr, fid_ops<close_object<FakeCq>>()};
  cq->ops = &ops;
  cq->domain = static_cast<FakeDomain*>(domain);
  *out = cq;
  return 0;
}

int open_endpoint(AccessDomain* domain, Info*, Endpoint** out, void*) {
  static CmOps cm{sizeof(CmOps), nullptr, get_name};
  static RmaOps rma{sizeof(RmaOps), nullptr, nullptr, nullptr, nullptr, nullptr, writemsg};
  auto* endpoint = new FakeEndpoint;
  endpoint->fid = {3, nullptr, fid_ops<close_endpoint>()};
  endpoint->cm = &cm;
  endpoint->rma = &rma;
  endpoint->domain = static_cast<FakeDomain*>(domain);
  const Call call(*endpoint->domain);
  endpoint->id = network().next_id++;
  network().endpoints[endpoint->id] = endpoint;
  *out = endpoint;
  return 0;
}

int register_memory(Fid* fid, const MrAttr* attr, uint64_t flags, MemoryRegion** out) {
  auto* domain = reinterpret_cast<FakeDomain*>(fid);
  auto region = std::make_unique<FakeRegion>();
  if (flags & kMrDmabuf) {
    const auto& dmabuf = *static_cast<const Dmabuf*>(attr->memory);
    if (dmabuf.fd < 0 || attr->iface != kHmemCuda) return -EINVAL;
    region->data = static_cast<std::byte*>(dmabuf.base_addr) + dmabuf.offset;
    region->bytes = dmabuf.len;
  } else {
    const auto& whole = *static_cast<const iovec*>(attr->memory);
    region->data = static_cast<std::byte*>(whole.iov_base);
    region->bytes = whole.iov_len;
  }
  const Call call(*domain);
  if (network().registration_err != 0) return -network().registration_err;
  network().counts.dmabufs += flags & kMrDmabuf ? 1 : 0;
  region->fid = {4, nullptr, fid_ops<close_region>()};
  region->domain = domain;
  region->key = network().next_key += 2;
  region->mem_desc = region.get();
  domain->regions[region->key] = region.get();
  *out = region.release();
  return 0;
}

int open_domain(Fabric*, Info* info, AccessDomain** out, void*) {
  static DomainOps ops{sizeof(DomainOps), open_av, open_cq, open_endpoint};
  static MrOps mr{sizeof(MrOps), nullptr, nullptr, register_memory};
  auto* domain = new FakeDomain;
  domain->fid = {5, nullptr, fid_ops<close_object<FakeDomain>>()};
  domain->ops = &ops;
  domain->mr = &mr;
  domain->name = info->domain_attr->name;
  domain->random.seed(std::strtoull(domain->name.c_str() + 3, nullptr, 10));
  *out = domain;
  return 0;
}

int open_fabric(FabricAttr*, Fabric** out, void*) {
  static FabricOps ops{sizeof(FabricOps), open_domain};
  auto* fabric = new Fabric{{6, nullptr, fid_ops<close_object<Fabric>>()}, &ops};
  *out = fabric;
  return 0;
}

int get_info(uint32_t, const char*, const char*, uint64_t, const Info* hints, Info** out) {
  if (std::strcmp(hints->fabric_attr->prov_name, "efa") != 0) return -kNoData;
  const char* shm = std::getenv("FI_EFA_ENABLE_SHM_TRANSFER");
  if (!shm || std::strcmp(shm, "0") != 0) ++network().counts.shm_transfers;
  *out = make_efa_infos(*hints, kQueue);
  return 0;
}

const char* error_name(int error) { return std::strerror(error); }
uint32_t version() { return make_version(1, 20); }

constexpr Library kLibrary{get_info, free_efa_info, dup_efa_info, open_fabric, error_name, version};

}  // namespace

FakeFabric::Counts FakeFabric::counts() {
  const std::lock_guard lock(network().mutex);
  return network().counts;
}

void FakeFabric::use_for(std::string_view settings) {
  const bool fake = settings.find("provider=efa") != settings.npos;
  set_library_for_tests(fake ? &kLibrary : nullptr);
  const std::lock_guard lock(network().mutex);
  if (network().endpoints.empty()) network().counts = {};
}

void FakeFabric::fail_next(int err, int prov_errno) {
  const std::lock_guard lock(network().mutex);
  network().next_err = err;
  network().next_prov_errno = prov_errno;
}

void FakeFabric::fail_registration(int err) {
  const std::lock_guard lock(network().mutex);
  network().registration_err = err;
}

void FakeFabric::lose_devices() {
  const std::lock_guard lock(network().mutex);
  for (const auto& [id, endpoint] : network().endpoints) endpoint->cq->broken = true;
}

void FakeFabric::refuse_all(bool refuse) {
  const std::lock_guard lock(network().mutex);
  network().refuse_all = refuse;
}

}  // namespace moe_p2p::test
