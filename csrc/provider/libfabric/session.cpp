#include "provider/libfabric/session.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "provider/libfabric/selection.h"
#include "provider/locked_memory.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

// Entries for arrivals, besides the entries for own writes. Too small: EFA uses its slow path,
// other providers a list of their own.
constexpr size_t kArrivals = 4096;
constexpr size_t kMinImmBytes = 4;

class Opening {
 public:
  Opening(const Config& config, int nic, const Info& info)
      : name_(base::concat("libfabric NIC ", nic, " (", config.provider, ", ", describe(info),
                           ")")) {}
  void check(int error, const char* step) const {
    MOE_P2P_CHECK(error == 0, Code::kUnavailable, name_, ": ", step, ": ", error_text(error),
                  locked_memory_hint(-error));
  }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

// Runs open(T** out) and owns what it made.
template <typename T, typename Open>
Owned<T> own(const Opening& opening, const char* step, Open&& open) {
  T* object = nullptr;
  opening.check(open(&object), step);
  return Owned<T>(object);
}

void check_answer(const Opening& opening, const Info& info) {
  const DomainAttr& domain = *info.domain_attr;
  MOE_P2P_CHECK(domain.cq_data_size >= kMinImmBytes, Code::kUnavailable, opening.name(),
                ": immediates have ", domain.cq_data_size, " bytes, needed are ", kMinImmBytes);
  MOE_P2P_CHECK(info.tx_attr->rma_iov_limit >= 1 && info.ep_attr->max_msg_size > 0,
                Code::kUnavailable, opening.name(), ": takes no remote writes");
}

void bind(const Opening& opening, const Config& config, Session& session) {
  const auto bind_to = [&](Fid& to, uint64_t flags, const char* step) {
    Fid& endpoint = session.endpoint->fid;
    opening.check(endpoint.ops->bind(&endpoint, &to, flags), step);
  };
  bind_to(session.av->fid, 0, "binding the address vector");
  bind_to(session.cq->fid, kTransmit | kRecv, "binding the completion queue");
  Fid& endpoint = session.endpoint->fid;
  const int error = endpoint.ops->control(&endpoint, kControlEnable, nullptr);
  // ofi_rxm sizes its queues by the number of peers in the environment.
  opening.check(error, config.is_verbs() ? "enabling the endpoint (if the device's queues are too "
                                           "small for 256 peers: FI_UNIVERSE_SIZE=8)"
                                         : "enabling the endpoint");
}

// True unless FI_EFA_USE_UNSOLICITED_WRITE_RECV switches it off, in libfabric's own words
// (fi_param_get). Releases before 1.22 do not have it.
bool has_unsolicited_writes() {
  constexpr std::string_view kOff[] = {"0", "false", "no", "off"};
  const char* given = std::getenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV");
  std::string word = given ? given : "";
  std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
  return library().version() >= make_version(1, 22) && std::ranges::count(kOff, word) == 0;
}

// libfabric decides for each peer: a write with an immediate is one of the device if both ends have
// RDMA writes, and both or neither have "unsolicited write recv" (efa_rdm_rma.h of 2.1 and later,
// efa_rdm_rma_should_write_using_rdma). It depends on driver, library and environment, and
// libfabric says neither what it has nor, but for a line at level info, what it decided.
// FI_OPT_EFA_HOMOGENEOUS_PEERS would leave the question out, and stays off (docs/providers.md).
std::string efa_software(bool emulates_writes) {
  std::string driver;
  std::getline(std::ifstream("/sys/module/efa/version"), driver);  // of the host, in containers too
  const uint32_t version = library().version();
  return base::concat("libfabric ", version >> 16, ".", version & 0xffff, ", driver ",
                      driver.empty() ? "of the kernel" : driver, ", unsolicited writes ",
                      has_unsolicited_writes() ? "on" : "off",
                      emulates_writes ? ", no RDMA writes" : "");
}

// Sets EFA's own options, before the endpoint is enabled. Unless this forbids it, EFA calls CUDA
// for each region of GPU memory at its first write (efa_rdm_ep.h,
// efa_rdm_attempt_to_sync_memops_iov): CUDA refuses that for memory of cuMemCreate, and the write
// fails. It also copies with CUDA where GPUDirect is missing.
void set_efa_options(const Opening& opening, const Config& config, Session& s) {
  Endpoint& endpoint = *s.endpoint;
  const auto forbid = [&](int option) {
    const bool permitted = false;
    return -endpoint.ops->setopt(&endpoint.fid, kOptEndpoint, option, &permitted, sizeof(bool));
  };
  const int error = forbid(kOptSharedMemoryPermitted);
  if (error != ENOPROTOOPT)  // with 1.20 the environment forbids it (selection.cpp)
    opening.check(error, "forbidding EFA's own shared memory");
  bool emulated = false;
  size_t length = sizeof(emulated);
  if (endpoint.ops->getopt(&endpoint.fid, kOptEndpoint, kOptEfaEmulatedWrite, &emulated, &length) ==
          0 &&
      emulated) {
    s.gpu_memory = Session::GpuMemory::kNone;
    s.why_no_hmem =
        "EFA emulates writes here with packets that CPUs copy (a device without RDMA write, p4d "
        "and "
        "older, or FI_EFA_USE_DEVICE_RDMA=0)";
    MOE_P2P_LOG(base::LogLevel::kWarning, opening.name(), ": ", s.why_no_hmem);
  } else if (s.gpu_memory == Session::GpuMemory::kHmem) {
    if (const int refused = forbid(kOptCudaApiPermitted)) {
      s.gpu_memory = Session::GpuMemory::kDmabuf;
      s.why_no_hmem =
          base::concat(refused == EOPNOTSUPP ? "EFA reports that it has no GPUDirect RDMA: "
                                             : "EFA cannot be kept from calling CUDA: ",
                       error_text(refused));
    }
  } else if (config.hmem == Config::Hmem::kAuto) {
    s.gpu_memory = Session::GpuMemory::kDmabuf;
  }
  s.software = efa_software(emulated);
  MOE_P2P_CHECK(config.hmem != Config::Hmem::kOn || s.gpu_memory == Session::GpuMemory::kHmem,
                Code::kUnavailable, opening.name(),
                ": hmem=on asks for GPU memory: ", s.why_no_hmem);
}

}  // namespace

Session open_session(const Config& config, int nic) {
  Session s;
  Selection selection = select_info(config, nic);
  s.info = std::move(selection.info);
  s.why_no_hmem = std::move(selection.why_no_hmem);
  if (s.why_no_hmem.empty()) s.gpu_memory = Session::GpuMemory::kHmem;
  const Opening opening(config, nic, *s.info);
  check_answer(opening, *s.info);
  s.fabric = own<Fabric>(opening, "opening the fabric", [&](Fabric** out) {
    return library().fabric(s.info->fabric_attr, out, nullptr);
  });
  s.domain = own<AccessDomain>(opening, "opening the domain", [&](AccessDomain** out) {
    return s.fabric->ops->domain(s.fabric.get(), s.info.get(), out, nullptr);
  });
  s.av = own<AddressVector>(opening, "opening the address vector", [&](AddressVector** out) {
    AvAttr attr{};
    attr.type = kAvTable;
    return s.domain->ops->av_open(s.domain.get(), &attr, out, nullptr);
  });
  s.cq = own<CompletionQueue>(opening, "opening the completion queue", [&](CompletionQueue** out) {
    CqAttr attr{};
    attr.size = kArrivals + config.max_in_flight;
    attr.format = kCqFormatData;
    attr.wait_obj = kWaitNone;
    return s.domain->ops->cq_open(s.domain.get(), &attr, out, nullptr);
  });
  s.endpoint = own<Endpoint>(opening, "opening the endpoint", [&](Endpoint** out) {
    return s.domain->ops->endpoint(s.domain.get(), s.info.get(), out, nullptr);
  });
  if (config.is_efa()) set_efa_options(opening, config, s);
  bind(opening, config, s);
  MOE_P2P_LOG(base::LogLevel::kInfo, opening.name(), ": open, ", s.info->fabric_attr->prov_name,
              s.gpu_memory == Session::GpuMemory::kHmem     ? ", with GPU memory"
              : s.gpu_memory == Session::GpuMemory::kDmabuf ? ", with GPU memory by dma-buf"
                                                            : "");
  return s;
}

}  // namespace moe_p2p::provider::libfabric
