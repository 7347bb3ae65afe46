#include "provider/libfabric/failure.h"

#include <cerrno>

#include "base/log.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

// Completion statuses of the device that the general number hides: EFA's and libibverbs'.
constexpr int kEfaRemoteBadAddress = 7, kEfaRemoteBadLength = 11;
constexpr int kWcFlushed = 5, kWcRemoteInvalidRequest = 9, kWcRemoteAccess = 10,
              kWcRetriesExceeded = 12, kWcRnrRetriesExceeded = 13;

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
      return "it has given that memory back, or the key belongs to another NIC";
    case Code::kInvalidArgument: return "the source is not memory that is registered at this NIC";
    default: return "FI_LOG_LEVEL=warn makes libfabric log the cause";
  }
}

}  // namespace

std::string describe(const Failure& failure) {
  return base::concat(failure.is_read ? "a read of " : "a write of ", failure.bytes,
                      failure.is_read ? " bytes from peer " : " bytes to peer ", failure.peer,
                      " failed: ", base::code_name(failure.status.code), ", ",
                      error_text(failure.status.detail), ", device status ", failure.prov_errno,
                      "; likely cause: ", cause_of(failure.status.code));
}

base::Status status_of(int error) noexcept { return {code_of(error), error}; }

base::Status status_of(int error, int prov_errno, const Config& config) noexcept {
  if (config.is_efa() && (prov_errno == kEfaRemoteBadAddress || prov_errno == kEfaRemoteBadLength))
    return {Code::kRemoteAccess, error};
  if (config.is_verbs()) {
    switch (prov_errno) {
      case kWcRemoteInvalidRequest:
      case kWcRemoteAccess: return {Code::kRemoteAccess, error};
      case kWcFlushed:
      case kWcRetriesExceeded:
      case kWcRnrRetriesExceeded: return {Code::kPeerDead, error};
      default: break;
    }
  }
  return status_of(error);
}

}  // namespace moe_p2p::provider::libfabric
