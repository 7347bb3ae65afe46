// Maps libfabric's error numbers to a Status. Status::detail keeps the number for the error text;
// the device's own number is used where it is more exact than the general one.
#pragma once

#include <string>

#include "base/status.h"
#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

base::Status status_of(int error) noexcept;
// For a completion.
base::Status status_of(int error, int prov_errno, const Config& config) noexcept;

// A failed write, for the error text.
struct Failure {
  base::Status status;
  int prov_errno = 0;  // the provider's own number
  uint32_t bytes = 0;
  uint32_t peer = 0;
  bool is_read = false;
};
std::string describe(const Failure& failure);

}  // namespace moe_p2p::provider::libfabric
