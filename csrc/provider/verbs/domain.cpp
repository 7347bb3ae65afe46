#include "provider/verbs/domain.h"

#include <algorithm>

#include "base/log.h"
#include "provider/verbs/gid.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_verbs_domain(const DomainOptions& options) {
  return std::make_unique<verbs::VerbsDomain>(options);
}

namespace verbs {

namespace {

// Receives posted with one doorbell. Too small: a doorbell per few immediates. Too large: a small
// receive queue runs empty before it is refilled.
constexpr uint32_t kRefillBatch = 64;

}  // namespace

VerbsDomain::VerbsDomain(const DomainOptions& options)
    : nic_(parse_config(options.settings), options.nic, options.waker != nullptr),
      changes_(options.waker),
      sender_(nic_, peers_, kick_, failure_),
      memory_(nic_),
      control_(nic_, peers_, kick_, changes_, options.waker),
      may_sleep_(options.waker != nullptr),
      refill_batch_(std::clamp(nic_.num_receives / 4, 1u, kRefillBatch)),
      receives_(refill_batch_) {
  for (RecvWr& wr : receives_) {
    wr = {.wr_id = kReceiveId, .next = &wr + 1, .sg_list = nullptr, .num_sge = 0};
  }
  receives_.back().next = nullptr;
  num_owed_ = nic_.num_receives;
  refill();  // before peers know our address
  MOE_P2P_LOG(base::LogLevel::kInfo, "verbs NIC ", options.nic, ": ", control_.address().label,
              ", port ", int{nic_.config.port}, ", GID ", nic_.gid.index, " ",
              gid_text(nic_.gid.gid), ", ", nic_.num_receives, " receives");
}

DomainLimits VerbsDomain::limits() const noexcept {
  return {.max_write_bytes = std::min(nic_.config.max_write_bytes,
                                      nic_.port.max_msg_sz ? nic_.port.max_msg_sz : ~0u),
          .max_in_flight = nic_.config.max_in_flight};
}

std::string VerbsDomain::failure() const {
  // acquire: pairs with the release in refill().
  if (const int error = changes_.receive_error.load(std::memory_order_acquire))
    return base::concat(nic_.name(), ": the driver takes no more receives: ", error_text(error),
                        "; all peers of this NIC are given up");
  if (std::string loss = control_.nic_loss(); !loss.empty()) return loss;
  const Failure* failure = failure_.get();
  if (!failure) return control_.first_loss();
  return base::concat(
      nic_.name(), ": a ", failure->is_read ? "read of " : "write of ", failure->bytes,
      failure->is_read ? " bytes from " : " bytes to ", control_.peer_label(failure->peer),
      " (address 0x", std::hex, failure->remote_addr, ", key 0x", failure->remote_key, std::dec,
      ") failed: ", cause_of(failure->status.detail), ", vendor error ", failure->vendor_error);
}

}  // namespace verbs
}  // namespace moe_p2p::provider
