// How failure travels. Set-up code throws Error; the data path returns Status, which is a plain
// value: no allocation, no text. The code that reports a Status turns it into text (describe()).
// Used in every folder of csrc; must not include any other file of the project.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace moe_p2p::base {

enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument,    // the caller's values are invalid; nothing was started
  kTimeout,            // a deadline passed
  kPeerDead,           // the peer's process or link is gone
  kRemoteAccess,       // the peer refused the address or key of a write
  kTransport,          // the NIC or its driver reported a failure
  kProtocol,           // a peer sent something that this step does not expect
  kAborted,            // another part of this object failed first
  kClosed,             // the object was closed
  kResourceExhausted,  // a table or queue of fixed size is full
  kUnavailable,        // hardware or library not there
  kCancelled,          // the caller took it back
};

// The word in an Error's brackets, which Python maps to an exception type.
const char* code_name(Code code) noexcept;

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  int32_t detail = 0;  // provider-specific (errno, work completion status); 0 when there is none

  bool ok() const noexcept { return code == Code::kOk; }
  friend bool operator==(const Status&, const Status&) = default;
};

// "peer dead", "transport, detail 5".
std::string describe(Status status);

// The text with a "?" for each byte that is neither UTF-8 nor printable, but for line ends and
// tabs: text of another process or of a file must not stop an error from being reported.
std::string readable(std::string_view text);

// Its message is readable().
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message);
  Code code() const noexcept { return code_; }

 private:
  Code code_;
};

}  // namespace moe_p2p::base
