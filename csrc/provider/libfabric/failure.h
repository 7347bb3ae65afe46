// What libfabric's error numbers mean to the engine. Status::detail keeps the number, so that
// whoever reports it can say more; the device's own number counts where it is more exact than the
// general one.
#pragma once

#include <string>

#include "base/status.h"
#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

base::Status status_of(int error) noexcept;
base::Status status_of(int error, int prov_errno, const Config& config) noexcept;  // a completion's

// A write that failed, for whoever has to mend it.
struct Failure {
  base::Status status;
  int prov_errno = 0;  // the provider's own number
  uint32_t bytes = 0;
  uint32_t peer = 0;
};
std::string describe(const Failure& failure);

}  // namespace moe_p2p::provider::libfabric
