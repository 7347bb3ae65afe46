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

namespace {

// Bytes of the character that the text begins with; 0: it begins with none (RFC 3629, section 4).
size_t character_bytes(std::string_view text) noexcept {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0; };
  const auto continues = [&](size_t i, int low = 0x80, int high = 0xbf) {
    return at(i) >= low && at(i) <= high;
  };
  const int first = at(0);
  if (first < 0x80) {
    const bool printable = first >= 0x20 && first != 0x7f;
    return printable || first == '\n' || first == '\t' ? 1 : 0;
  }
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool second = continues(1, first == 0xe0 ? 0xa0 : 0x80, first == 0xed ? 0x9f : 0xbf);
    return second && continues(2) ? 3 : 0;
  }
  if (first < 0xf0 || first > 0xf4) return 0;
  const bool second = continues(1, first == 0xf0 ? 0x90 : 0x80, first == 0xf4 ? 0x8f : 0xbf);
  return second && continues(2) && continues(3) ? 4 : 0;
}

}  // namespace

std::string readable(std::string_view text) {
  std::string all;
  while (!text.empty()) {
    const size_t bytes = character_bytes(text);
    all += bytes > 0 ? text.substr(0, bytes) : "?";
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return all;
}

// "moe_p2p [timeout] message": moe_p2p/errors.py reads the word in brackets.
Error::Error(Code code, const std::string& message)
    : std::runtime_error(std::string("moe_p2p [") + code_name(code) + "] " + readable(message)),
      code_(code) {}

}  // namespace moe_p2p::base
