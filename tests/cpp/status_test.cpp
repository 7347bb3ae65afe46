// Texts of errors: whatever bytes come from outside, Python can decode them.
#include "base/status.h"

#include "base/wire.h"
#include "doctest/doctest.h"

namespace moe_p2p {
namespace {

TEST_CASE("status: bytes that are no text are shown as question marks, others as they are") {
  for (const char* kept : {"", "mlx5_0 of host7\n\t(pid 12)", "h\xc3\xb6st", "\xe2\x82\xac",
                           "\xed\x9f\xbf", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"})
    CHECK(base::readable(kept) == kept);
  CHECK(base::readable("a\xff\x62") == "a?b");
  CHECK(base::readable("\x1b[2J\x7f") == "?[2J?");
  CHECK(base::readable({"\0x", 2}) == "?x");
  CHECK(base::readable("\xc3") == "?");         // cut off
  CHECK(base::readable("\xe2\x82z") == "??z");  // cut off
  CHECK(base::readable("\xc0\xaf") == "??");    // too long for its value
  CHECK(base::readable("\xe0\x80\xaf") == "???");
  CHECK(base::readable("\xed\xa0\x80") == "???");  // half of a pair
  CHECK(base::readable("\xf4\x90\x80\x80") == "????");
  CHECK(base::readable("\xf5\x80\x80\x80") == "????");
}

TEST_CASE("status: errors and names of peers are texts") {
  CHECK(std::string(base::Error(base::Code::kTimeout, "of \xff").what()) ==
        "moe_p2p [timeout] of ?");
  base::WireWriter out;
  out.put_string("host\xfe");
  const base::Bytes bytes = out.take();
  CHECK(base::WireReader(bytes, "name").get_string() == "host?");
}

}  // namespace
}  // namespace moe_p2p
