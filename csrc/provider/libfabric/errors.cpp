#include "provider/libfabric/errors.h"

#include <cerrno>

#include "base/log.h"

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
    case kErrorNoKey: return Code::kRemoteAccess;
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
    case ETIMEDOUT: return Code::kPeerDead;
    default: return Code::kTransport;
  }
}

const char* cause_of(Code code) noexcept {
  switch (code) {
    case Code::kPeerDead:
      return "its process or host is gone, or a firewall or security group drops what is sent to "
             "it";
    case Code::kRemoteAccess:
      return "it has given that memory back, or the key is that of another NIC";
    case Code::kInvalidArgument: return "the source is not memory that is registered at this NIC";
    default: return "FI_LOG_LEVEL=warn makes libfabric say more";
  }
}

}  // namespace

std::string describe(const Failure& failure) {
  return base::concat("a write of ", failure.bytes, " bytes to peer ", failure.peer,
                      " failed: ", base::code_name(failure.status.code), ", ",
                      error_text(failure.status.detail), ", device status ", failure.prov_errno,
                      "; likely cause: ", cause_of(failure.status.code));
}

base::Status status_of(int error, int prov_errno, bool is_efa) noexcept {
  if (is_efa && (prov_errno == kEfaRemoteBadAddress || prov_errno == kEfaRemoteBadLength))
    return {Code::kRemoteAccess, error};
  return {code_of(error), error};
}

}  // namespace moe_p2p::provider::libfabric
