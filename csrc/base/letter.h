// The letter of this build: the version of the memory layout and of the handshakes that ranks must
// have in common (csrc/letter.py). Every message of set-up begins with its tag and the letter, so
// that a mix of versions is refused by name before the rest is used.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/wire.h"

namespace moe_p2p::base {

uint64_t letter() noexcept;
std::string letter_text(uint64_t letter);  // 16 hexadecimal digits, as csrc/letter.py prints it

void put_letter(WireWriter& out, uint32_t tag);
// Throws Error{code} when `what` begins with another tag or was made by a build with another
// letter.
void expect_letter(WireReader& in, uint32_t tag, Code code, const std::string& what);

}  // namespace moe_p2p::base
