// The order in which a NIC takes work requests and ends them, written to a file for tests of that
// order: setting trace=PATH, file PATH.<nic>. The file is an array of Entry, the first of which has
// the number of the others in `batch`. The polling thread stores into the mapped file; a full one
// takes no more.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "provider/provider.h"

namespace moe_p2p::provider::loopback {

class Trace {
 public:
  struct Entry {
    enum class Kind : uint8_t { kPosted = 0, kEnded = 1, kFull = 2 };  // kFull: took not all
    uint32_t batch;                                                    // call of post(), from 1
    uint32_t bytes;
    Kind kind;
    uint8_t priority;  // of the connection
    uint8_t is_read;
    uint8_t has_imm;
    uint32_t imm;
  };
  static_assert(sizeof(Entry) == 16);

  // An empty path: records nothing. Throws Error{kInvalidArgument} for one that cannot be written.
  Trace(const std::string& path, int nic);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // --- polling thread ---
  void begin_batch() noexcept { ++batch_; }
  void add(Entry::Kind kind, const WorkRequest& request, int priority) noexcept {
    if (next_ < entries_.size()) store(kind, request, priority);
  }

 private:
  void store(Entry::Kind kind, const WorkRequest& request, int priority) noexcept;

  std::span<Entry> entries_;
  size_t next_ = 1;
  uint32_t batch_ = 0;
};

}  // namespace moe_p2p::provider::loopback
