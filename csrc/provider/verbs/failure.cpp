#include "provider/verbs/failure.h"

#include <cstring>

#include "base/log.h"

namespace moe_p2p::provider::verbs {

using base::Code;

base::Status status_of(int wc_status, Code end) noexcept {
  switch (wc_status) {
    case kWcFlushed: return {end == Code::kOk ? Code::kTransport : end, wc_status};
    case kWcLocalLength:
    case kWcLocalQpOperation:
    case kWcLocalProtection: return {Code::kInvalidArgument, wc_status};
    case kWcRemoteInvalidRequest:
    case kWcRemoteAccess: return {Code::kRemoteAccess, wc_status};
    case kWcRetriesExceeded:
    case kWcRnrRetriesExceeded: return {Code::kPeerDead, wc_status};
    default: return {Code::kTransport, wc_status};
  }
}

bool refused_only(Code code) noexcept {
  return code == Code::kInvalidArgument || code == Code::kRemoteAccess;
}

std::string cause_of(int wc_status) {
  const auto text = [&](const char* what, const char* likely) {
    return base::concat(what, " (work completion status ", wc_status, "); ", likely);
  };
  switch (wc_status) {
    case kWcFlushed: return text("flushed", "the connection broke before it was sent");
    case kWcLocalLength:
    case kWcLocalQpOperation:
    case kWcLocalProtection:
      return text("local protection error",
                  "is the memory here registered, and as long as the write or read?");
    case kWcRemoteInvalidRequest:
    case kWcRemoteAccess:
      return text("remote access error",
                  "the peer has unregistered the memory, or the descriptor is of another NIC");
    case kWcRetriesExceeded:
      return text("no acknowledgement after all retries",
                  "the peer or its host is gone, a link is down longer than timeout and retries "
                  "allow, or the chosen GID, traffic class or MTU does not get through");
    case kWcRnrRetriesExceeded:
      return text("the peer had no receive posted", "its polling thread does not run");
    default: break;
  }
  if (wc_status < 0)
    return base::concat("the driver refused to post: ", std::strerror(-wc_status), " (", -wc_status,
                        "); see the kernel log");
  return text("failed", "see the kernel log of both hosts");
}

}  // namespace moe_p2p::provider::verbs
