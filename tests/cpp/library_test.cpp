// Opening a library at run time: which file is taken, and what is said when there is none.
#include "platform/library.h"

#include "base/status.h"
#include "doctest/doctest.h"

namespace moe_p2p::test {
namespace {

using platform::Library;

constexpr platform::LibraryTexts kTexts{"the C library", "install it", "libc", "a newer is needed"};

template <typename Body>
std::string unavailable(Body&& body) {
  try {
    body();
  } catch (const base::Error& error) {
    CHECK(error.code() == base::Code::kUnavailable);
    return error.what();
  }
  return "nothing was thrown";
}

TEST_CASE("library: the first file that opens is taken, and says what it lacks") {
  const Library library({"/nowhere/libc.so.6", "libc.so.6"}, kTexts);
  int (*absolute)(int) = nullptr;
  library.load("abs", absolute);
  CHECK(absolute(-3) == 3);
  library.load_if_there("no_such_symbol", absolute);
  CHECK(!absolute);
  CHECK(unavailable([&] {
          library.load("no_such_symbol", absolute);
        }).ends_with("libc has no no_such_symbol; a newer is needed"));
}

TEST_CASE("library: symbols of a version that the library does not know are those without") {
  const Library library({"libc.so.6"}, kTexts, "NO_SUCH_VERSION_1.1");
  int (*absolute)(int) = nullptr;
  library.load("abs", absolute);
  CHECK(absolute(-3) == 3);
}

TEST_CASE("library: where no file opens, the reason is that of the first") {
  const auto text = unavailable([] { Library({"/nowhere/a.so", "/nowhere/b.so"}, kTexts); });
  CHECK(text.find("the C library cannot be opened: /nowhere/a.so") != text.npos);
  CHECK(text.find("b.so") == text.npos);
  CHECK(text.ends_with("; install it"));
}

}  // namespace
}  // namespace moe_p2p::test
