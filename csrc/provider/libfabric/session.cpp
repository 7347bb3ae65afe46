#include "provider/libfabric/session.h"

#include "base/log.h"
#include "provider/libfabric/selection.h"
#include "provider/locked_memory.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

// Entries for arrivals beside those for own writes. Too small: EFA drops to its slow path, other
// providers to a list of their own.
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

// Runs open(T** out) and keeps what it made.
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
  // ofi_rxm makes its queues for as many peers as the environment says.
  opening.check(error, config.is_verbs() ? "enabling the endpoint (if the device's queues are too "
                                           "small for 256 peers: FI_UNIVERSE_SIZE=8)"
                                         : "enabling the endpoint");
}

}  // namespace

Session open_session(const Config& config, int nic) {
  Session s;
  s.info = select_info(config, nic);
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
  bind(opening, config, s);
  MOE_P2P_LOG(base::LogLevel::kInfo, opening.name(), ": open, ", s.info->fabric_attr->prov_name,
              s.has_hmem() ? ", with GPU memory" : "");
  return s;
}

}  // namespace moe_p2p::provider::libfabric
