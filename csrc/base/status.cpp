#include "base/status.h"

namespace moe_p2p::base {

const char* code_name(Code code) noexcept {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kInvalidArgument: return "invalid argument";
    case Code::kTimeout: return "timeout";
    case Code::kPeerDead: return "peer dead";
    case Code::kRemoteAccess: return "remote access";
    case Code::kTransport: return "transport";
    case Code::kProtocol: return "protocol";
    case Code::kAborted: return "aborted";
    case Code::kClosed: return "closed";
    case Code::kResourceExhausted: return "resource exhausted";
    case Code::kUnavailable: return "unavailable";
    case Code::kCancelled: return "cancelled";
  }
  return "unknown";
}

std::string describe(Status status) {
  const std::string name = code_name(status.code);
  return status.detail == 0 ? name : name + ", detail " + std::to_string(status.detail);
}

// "moe_p2p [timeout] message": moe_p2p/errors.py reads the word in brackets.
Error::Error(Code code, const std::string& message)
    : std::runtime_error(std::string("moe_p2p [") + code_name(code) + "] " + message),
      code_(code) {}

}  // namespace moe_p2p::base
