#include "base/sha256.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/log.h"

namespace moe_p2p::base {
namespace {

constexpr size_t kBlockBytes = 64;

// FIPS 180-4, section 4.2.2: from the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_block(uint32_t (&state)[8], const std::byte* block) {
  uint32_t w[64];
  for (size_t i = 0; i < 16; ++i) {
    w[i] = 0;
    for (size_t j = 0; j < 4; ++j) w[i] = w[i] << 8 | static_cast<uint32_t>(block[4 * i + j]);
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t sum[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += sum[i];
}

}  // namespace

Digest sha256(std::span<const std::byte> message) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = uint64_t{message.size()} * 8;
  for (; message.size() >= kBlockBytes; message = message.subspan(kBlockBytes))
    add_block(state, message.data());
  // The rest, a one bit, zeros, and the length in the last eight bytes.
  std::byte tail[2 * kBlockBytes] = {};
  if (!message.empty()) std::memcpy(tail, message.data(), message.size());
  tail[message.size()] = std::byte{0x80};
  const size_t bytes = message.size() + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  for (size_t i = 0; i < 8; ++i) tail[bytes - 1 - i] = static_cast<std::byte>(bits >> (8 * i));
  for (size_t at = 0; at < bytes; at += kBlockBytes) add_block(state, tail + at);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::byte block[kBlockBytes] = {};
  const Digest hashed = sha256(key);
  if (key.size() > kBlockBytes) key = hashed;
  if (!key.empty()) std::memcpy(block, key.data(), key.size());
  const auto padded = [&](std::byte pad, std::span<const std::byte> rest) {
    std::vector<std::byte> bytes(kBlockBytes + rest.size());
    for (size_t i = 0; i < kBlockBytes; ++i) bytes[i] = block[i] ^ pad;
    if (!rest.empty()) std::memcpy(bytes.data() + kBlockBytes, rest.data(), rest.size());
    return sha256(bytes);
  };
  return padded(std::byte{0x5c}, padded(std::byte{0x36}, message));
}

bool same_digest(const Digest& a, std::span<const std::byte> b) noexcept {
  if (b.size() != a.size()) return false;
  auto different = std::byte{0};
  for (size_t i = 0; i < a.size(); ++i) different |= a[i] ^ b[i];
  return different == std::byte{0};
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    MOE_P2P_CHECK(got > 0, Code::kUnavailable,
                  "the system gives no random numbers: ", std::strerror(errno));
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
}

}  // namespace moe_p2p::base
