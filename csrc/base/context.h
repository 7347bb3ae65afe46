// Adds to an Error what was being done, which the throwing function does not know. For set-up.
#pragma once

#include <string>

#include "base/status.h"

namespace moe_p2p::base {

// The text given to an Error, without the code name that its constructor puts before it.
inline std::string message_of(const Error& error) {
  const std::string whole = error.what();
  const std::string empty = Error(error.code(), "").what();
  return whole.starts_with(empty) ? whole.substr(empty.size()) : whole;
}

template <typename Step>
auto with_context(const std::string& context, Step&& step) {
  try {
    return step();
  } catch (const Error& error) {
    throw Error(error.code(), context + ": " + message_of(error));
  }
}

}  // namespace moe_p2p::base
