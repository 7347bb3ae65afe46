// Byte encoding of what peers exchange through the bootstrap (addresses, descriptors).
// Little-endian, length-prefixed; the reader checks every length, because the bytes come from
// another process. Control path only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/log.h"

namespace moe_p2p::base {

using Bytes = std::vector<std::byte>;

class WireWriter {
 public:
  template <typename T>
    requires std::is_trivially_copyable_v<T>
  void put(const T& value) {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), p, p + sizeof(T));
  }
  void put_bytes(std::span<const std::byte> bytes) {
    put(static_cast<uint32_t>(bytes.size()));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void put_string(std::string_view text) { put_bytes(std::as_bytes(std::span(text))); }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

class WireReader {
 public:
  // `what` names the message in errors, for example "memory descriptor".
  WireReader(std::span<const std::byte> bytes, std::string_view what)
      : bytes_(bytes), what_(what) {}

  template <typename T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> get_bytes() { return take(get<uint32_t>()); }
  // For names and texts: readable().
  std::string get_string() {
    const auto bytes = get_bytes();
    return readable({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  void expect_end() const {
    MOE_P2P_CHECK(bytes_.empty(), Code::kInvalidArgument, what_, ": ", bytes_.size(),
                  " bytes left over; was it made by another version?");
  }

 private:
  std::span<const std::byte> take(size_t size) {
    MOE_P2P_CHECK(size <= bytes_.size(), Code::kInvalidArgument, what_, ": needs ", size,
                  " more bytes, has ", bytes_.size(), "; is it truncated?");
    const auto head = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return head;
  }

  std::span<const std::byte> bytes_;
  std::string_view what_;
};

}  // namespace moe_p2p::base
