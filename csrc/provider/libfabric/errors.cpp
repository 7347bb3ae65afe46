#include "provider/libfabric/errors.h"

#include <cerrno>

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

// Completion statuses of the EFA device that the general number hides.
constexpr int kEfaRemoteBadAddress = 7, kEfaRemoteBadLength = 11;

Code code_of(int error) noexcept {
  switch (error) {
    case EACCES:
    case EFAULT:
    case EKEYREJECTED:
    case EPERM:
    case EREMOTEIO:
    case kErrorNoKey:
      return Code::kRemoteAccess;
    case ECANCELED:  // flushed, because the connection went down
    case ECONNABORTED:
    case ECONNREFUSED:
    case ECONNRESET:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENETUNREACH:
    case ENOTCONN:
    case EPIPE:
    case ESHUTDOWN:
    case ETIMEDOUT:
      return Code::kPeerDead;
    default:
      return Code::kTransport;
  }
}

}  // namespace

base::Status status_of(int error, int prov_errno, bool is_efa) noexcept {
  if (is_efa && (prov_errno == kEfaRemoteBadAddress || prov_errno == kEfaRemoteBadLength))
    return {Code::kRemoteAccess, error};
  return {code_of(error), error};
}

}  // namespace moe_p2p::provider::libfabric
