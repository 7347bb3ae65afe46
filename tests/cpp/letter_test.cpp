// A mix of versions: what another build has made is refused by name, whatever the message.
#include "base/letter.h"

#include "doctest/doctest.h"
#include "engine/memory_region.h"
#include "provider/libfabric/peers.h"
#include "provider/provider.h"
#include "provider/verbs/wire.h"

namespace moe_p2p {
namespace {

base::Bytes of_another_version(base::Bytes bytes) {
  bytes[sizeof(uint32_t)] ^= std::byte{1};  // the lowest byte of the letter, behind the tag
  return bytes;
}

std::string letter_of_another() { return base::letter_text(base::letter() ^ 1); }

template <typename Parse>
std::string refusal(const base::Bytes& bytes, Parse&& parse) {
  CHECK_NOTHROW(static_cast<void>(parse(bytes)));
  try {
    static_cast<void>(parse(of_another_version(bytes)));
  } catch (const base::Error& error) {
    return error.what();
  }
  return "accepted";
}

void check_named(const std::string& reported) {
  CAPTURE(reported);
  CHECK(reported.find("another version of moe_p2p: its letter is " + letter_of_another()) !=
        std::string::npos);
  CHECK(reported.find("here it is " + base::letter_text(base::letter())) != std::string::npos);
}

TEST_CASE("letter: 16 digits, as csrc/letter.py prints it") {
  CHECK(base::letter_text(0x12ab) == "00000000000012ab");
}

TEST_CASE("letter: messages of another version are refused by name") {
  engine::EngineAddress engine;
  engine.nics.emplace_back(3, std::byte{7});
  check_named(
      refusal(engine.serialize(), [](const auto& b) { return engine::EngineAddress::parse(b); }));
  engine::MemoryDescriptor memory;
  memory.owner = engine;
  memory.rails.push_back({1, 2});
  check_named(refusal(memory.serialize(),
                      [](const auto& b) { return engine::MemoryDescriptor::parse(b); }));
  using provider::verbs::Greeting, provider::verbs::NicAddress;
  check_named(refusal(NicAddress{}.encode(), [](const auto& b) { return NicAddress::decode(b); }));
  check_named(refusal(Greeting{}.encode(), [](const auto& b) { return Greeting::decode(b); }));
  using FabricAddress = provider::libfabric::Address;
  check_named(refusal(FabricAddress{}.serialize("tcp"),
                      [](const auto& b) { return FabricAddress::parse(b, "tcp"); }));
  // The provider from which others are copied; the contract suite does not run over it.
  const auto null = provider::open_domain("null", {});
  check_named(refusal(null->address(), [&](const auto& b) { return null->connect(b); }));
}

}  // namespace
}  // namespace moe_p2p
