// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the proof that a peer knows a secret.
// Written here because the package loads on machines without a library for them, and OpenSSL's name
// and version differ between the others. Control path: some 100 MB/s, no hardware instructions.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace moe_p2p::base {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> message);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);
// Takes the same time wherever they differ.
bool same_digest(const Digest& a, std::span<const std::byte> b) noexcept;
// Uses the system's generator; throws Error{kUnavailable} when there is none.
void fill_random(std::span<std::byte> bytes);

}  // namespace moe_p2p::base
