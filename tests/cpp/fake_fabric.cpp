#include "fake_fabric.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_fabric_info.h"
#include "fake_fabric_world.h"

namespace moe_p2p::test {

using namespace fabric_world;  // NOLINT(google-build-using-namespace): its other half

fabric_world::Network& fabric_world::network() {
  static Network instance;
  return instance;
}

namespace {

constexpr int kNoData = 61;

// Registering, or the end of it: alone in its domain only under FI_THREAD_DOMAIN.
class RegionCall {
 public:
  explicit RegionCall(FakeDomain& domain) {
    if (domain.registers_alone)
      call_.emplace(domain);
    else
      lock_ = std::unique_lock(network().mutex);
  }

 private:
  std::optional<Call> call_;
  std::unique_lock<std::mutex> lock_;
};

template <typename T>
int close_object(Fid* fid) {
  delete reinterpret_cast<T*>(fid);
  return 0;
}

int close_region(Fid* fid) {
  auto* region = reinterpret_cast<FakeRegion*>(fid);
  {
    const RegionCall call(*region->domain);
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

int enable(Fid* fid, int command, void*) {
  if (command != kControlEnable) return -ENOSYS;
  if (fid->fclass != 3) return 0;
  auto& endpoint = *reinterpret_cast<FakeEndpoint*>(fid);
  endpoint.enabled = true;
  const char* shm = std::getenv("FI_EFA_ENABLE_SHM_TRANSFER");
  if (endpoint.shm_permitted && (!shm || std::strcmp(shm, "0") != 0))
    ++network().counts.shm_transfers;
  return 0;
}

// As efa_rdm_ep_setopt() and efa_rdm_ep_set_cuda_api_permitted() (efa_rdm_ep_fiops.c).
int set_option(Fid* fid, int level, int option, const void* value, size_t length) {
  auto& endpoint = *reinterpret_cast<FakeEndpoint*>(fid);
  const FakeFabric::Machine& machine = network().machine;
  if (level != kOptEndpoint) return -ENOPROTOOPT;
  if (option == kOptSharedMemoryPermitted && machine.version < make_version(1, 21))
    return -ENOPROTOOPT;
  if (option != kOptSharedMemoryPermitted && option != kOptCudaApiPermitted) return -ENOPROTOOPT;
  if (length != sizeof(bool) || endpoint.enabled) return -EINVAL;
  const bool permitted = *static_cast<const bool*>(value);
  if (option == kOptSharedMemoryPermitted) return endpoint.shm_permitted = permitted, 0;
  if (!machine.cuda) return -EINVAL;
  if (!permitted && !machine.gpu_direct) return -EOPNOTSUPP;
  return endpoint.cuda_permitted = permitted, 0;
}
int get_option(Fid*, int level, int option, void* value, size_t* length) {
  if (level != kOptEndpoint || option != kOptEfaEmulatedWrite || *length < sizeof(bool))
    return -ENOPROTOOPT;
  *static_cast<bool*>(value) = network().machine.emulates_writes;
  return *length = sizeof(bool), 0;
}

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
  static RmaOps rma{sizeof(RmaOps), nullptr, nullptr, readmsg, nullptr, nullptr, writemsg};
  auto* endpoint = new FakeEndpoint;
  endpoint->fid = {3, nullptr, fid_ops<close_endpoint>()};
  static EndpointOps options{sizeof(EndpointOps), nullptr, get_option, set_option};
  endpoint->ops = &options;
  endpoint->cm = &cm;
  endpoint->rma = &rma;
  endpoint->domain = static_cast<FakeDomain*>(domain);
  const Call call(*endpoint->domain);
  const FakeFabric::Machine& machine = network().machine;
  const char* wish = std::getenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV");
  endpoint->unsolicited =
      machine.version >= make_version(1, 22) && (!wish || std::strcmp(wish, "0") != 0);
  endpoint->emulates = machine.emulates_writes;
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
    if (dmabuf.fd < 0) return -EBADF;
    region->data = static_cast<std::byte*>(dmabuf.base_addr) + dmabuf.offset;
    region->bytes = dmabuf.len;
  } else {
    const auto& whole = *static_cast<const iovec*>(attr->memory);
    region->data = static_cast<std::byte*>(whole.iov_base);
    region->bytes = whole.iov_len;
  }
  // efa_mr_regattr(): -FI_ENOSYS for an interface that is not initialized. Without FI_HMEM at the
  // domain CUDA's memory is taken for the host's (efa_mr_hmem_setup).
  if (attr->iface == kHmemCuda && !network().machine.cuda) return -ENOSYS;
  region->access = attr->access;
  region->is_foreign = flags & kMrDmabuf && attr->iface == kHmemSystem;
  region->needs_sync = attr->iface == kHmemCuda && domain->has_hmem;
  ++network().num_registering;
  while (network().hold_registrations) std::this_thread::yield();
  --network().num_registering;
  const RegionCall call(*domain);
  if (network().registration_err != 0) return -network().registration_err;
  network().counts.as_host += flags & kMrDmabuf && attr->iface == kHmemSystem ? 1 : 0;
  network().counts.as_cuda += attr->iface == kHmemCuda ? 1 : 0;
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
  domain->has_hmem = (info->caps & kHmem) != 0;
  domain->registers_alone = info->domain_attr->threading == kThreadDomain;
  domain->random.seed(std::strtoull(domain->name.c_str() + 3, nullptr, 10));
  domain->keeps_early_writes = network().machine.version >= make_version(1, 22);
  *out = domain;
  return 0;
}

int open_fabric(FabricAttr* attr, Fabric** out, void*) {
  if (std::strcmp(attr->name, "efa-direct") == 0) ++network().counts.direct;
  static FabricOps ops{sizeof(FabricOps), open_domain};
  auto* fabric = new Fabric{{6, nullptr, fid_ops<close_object<Fabric>>()}, &ops};
  *out = fabric;
  return 0;
}

int get_info(uint32_t, const char*, const char*, uint64_t, const Info* hints, Info** out) {
  if (std::strcmp(hints->fabric_attr->prov_name, "efa") != 0) return -kNoData;
  // efa_user_info_should_support_hmem(): only where CUDA's runtime was loaded.
  if (hints->caps & kHmem && !network().machine.cuda) return -kNoData;
  *out = make_efa_infos(*hints, kQueue);
  return 0;
}

const char* error_name(int error) { return std::strerror(error); }
uint32_t version() { return network().machine.version; }

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
  if (network().endpoints.empty()) network().counts = {}, network().silent.clear();
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

void FakeFabric::set_machine(const Machine& machine) {
  const std::lock_guard lock(network().mutex);
  network().machine = machine;
}

void FakeFabric::silence(std::string_view nic) {
  const std::lock_guard lock(network().mutex);
  network().silent = nic;
}

void FakeFabric::hold_registrations(bool hold) { network().hold_registrations = hold; }
uint32_t FakeFabric::num_registering() { return network().num_registering; }

void FakeFabric::refuse_all(bool refuse) {
  const std::lock_guard lock(network().mutex);
  network().refuse_all = refuse;
}

}  // namespace moe_p2p::test
