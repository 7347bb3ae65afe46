#include "base/letter.h"

#include <iomanip>

#include "base/log.h"

#ifndef MOE_P2P_LETTER
#error "the build passes what csrc/letter.py prints, as -DMOE_P2P_LETTER=0x..."
#endif

namespace moe_p2p::base {

uint64_t letter() noexcept { return MOE_P2P_LETTER; }

std::string letter_text(uint64_t letter) {
  std::ostringstream out;
  out << std::hex << std::setfill('0') << std::setw(16) << letter;
  return out.str();
}

void put_letter(WireWriter& out, uint32_t tag) {
  out.put(tag);
  out.put(letter());
}

void expect_letter(WireReader& in, uint32_t tag, Code code, const std::string& what) {
  const auto theirs_tag = in.get<uint32_t>();
  MOE_P2P_CHECK(theirs_tag == tag, code, what, ": starts with tag ", theirs_tag, ", expected ", tag,
                "; it is something else, or was made by another provider");
  const auto theirs = in.get<uint64_t>();
  MOE_P2P_CHECK(theirs == letter(), code, what,
                ": made by another version of moe_p2p: its letter is ", letter_text(theirs),
                ", here it is ", letter_text(letter()), ". Install one version on all ranks");
}

}  // namespace moe_p2p::base
