// The adversary's random decisions. It decides what the contract leaves open: which fragment goes
// next, what is held back, which completion is reported first. Decisions depend on the seed and the
// sequence of calls alone (no clock, address or process id), so a single-threaded simulation
// replays exactly. Seed 0: the adversary is off.
#pragma once

#include <cstdint>

namespace moe_p2p::provider::loopback {

class Chaos {
 public:
  // Each user has a stream of its own, or a busy peer would change another peer's decisions.
  Chaos(uint64_t seed, uint64_t stream) noexcept : on_(seed != 0), state_(seed) {
    state_ = next() ^ stream * 0xda942042e4dd58b5;
    next();
  }

  bool on() const noexcept { return on_; }
  // In [0, bound); bound is not 0. The bias of the multiplication is below 2^-32.
  uint32_t below(uint64_t bound) noexcept {
    return static_cast<uint32_t>((next() >> 32) * bound >> 32);
  }
  bool one_in(uint32_t n) noexcept { return below(n) == 0; }

  // How many polls a new write waits before its first byte leaves: mostly none, sometimes so many
  // that hundreds of later writes overtake it.
  uint32_t hold_polls() noexcept {
    if (one_in(64)) return below(256);
    return one_in(8) ? below(32) : 0;
  }
  // Number of pieces of a write, at most 64; the pieces travel in any order.
  uint32_t num_pieces() noexcept { return 1 + below(one_in(4) ? 64 : 4); }

 private:
  // splitmix64, public domain (Steele, Lea, Flood 2014).
  uint64_t next() noexcept {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }

  bool on_;
  uint64_t state_;
};

}  // namespace moe_p2p::provider::loopback
