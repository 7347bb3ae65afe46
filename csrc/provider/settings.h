// "key=value,key=value": the settings text of DomainOptions, and of a communicator. Its reader
// names the keys and reads each by type and range; a misspelt key is an Error{kInvalidArgument}
// that lists the valid keys, and is never ignored. Control path only.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace moe_p2p::provider {

class Settings {
 public:
  // `owner` begins error texts ("loopback"). Each key may be given once.
  Settings(std::string owner, std::string_view text,
           std::initializer_list<std::string_view> valid_keys);

  // The value of `key`, or `fallback` when it was not given. Throw when the text is no number, or
  // lies outside [low, high], or is not one of `choices`.
  uint64_t integer(std::string_view key, uint64_t fallback, uint64_t low, uint64_t high) const;
  double real(std::string_view key, double fallback, double low, double high) const;
  std::string word(std::string_view key, std::string_view fallback,
                   std::initializer_list<std::string_view> choices) const;
  // "1:2:3"; empty when it was not given.
  std::vector<int64_t> integers(std::string_view key) const;
  // Any text without a comma.
  std::string text(std::string_view key, std::string_view fallback) const;

 private:
  const std::string* find(std::string_view key) const;
  [[noreturn]] void refuse(std::string_view key, const std::string& value,
                           const std::string& wanted) const;

  std::string owner_;
  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace moe_p2p::provider
