// The table of who may write where, of libfabric's tcp.
#include "provider/libfabric/writers.h"

#include <netinet/in.h>

#include <cstring>
#include <set>

#include "doctest/doctest.h"

namespace moe_p2p::provider::libfabric {
namespace {

TEST_CASE("writers: a name survives its way through an announcement, which is no immediate") {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(0xc0a80107);
  address.sin_port = htons(65535);
  base::Bytes name(sizeof(address));
  std::memcpy(name.data(), &address, sizeof(address));
  const WriterName writer = writer_name(name);
  CHECK(endpoint_name(writer) == name);
  CHECK(Writers::announces(Writers::announcement(writer, 0)));
  CHECK_FALSE(Writers::announces(0xffffffff));
  address.sin_family = AF_INET6;
  std::memcpy(name.data(), &address, sizeof(address));
  CHECK(writer_name(name) == 0);
  CHECK(writer_name({}) == 0);
}

TEST_CASE("writers: the writers of a memory are taken once, each once, and no others") {
  Writers writers;
  writers.open();
  const auto name = [](uint64_t i) { return uint64_t{0x7f000001} << 16 | (1000 + i); };
  for (int twice = 0; twice < 2; ++twice)
    for (uint64_t i = 0; i < 20000; ++i)
      writers.note(Writers::announcement(name(i % 200), i / 200));
  CHECK_FALSE(writers.full());
  for (const uint64_t key : {7, 99, 0}) {
    const auto found = writers.take(key);
    CHECK(found.size() == 200);
    CHECK(std::set(found.begin(), found.end()).size() == 200);
    CHECK(writers.take(key).empty());
  }
  CHECK(writers.take(8).size() == 200);  // not those of another memory
}

TEST_CASE("writers: a table that is full says so, and goes on") {
  Writers writers;
  writers.open();
  for (uint64_t i = 0; i < 100000; ++i) writers.note(Writers::announcement(1 << 20 | i, i));
  CHECK(writers.full());
}

}  // namespace
}  // namespace moe_p2p::provider::libfabric
