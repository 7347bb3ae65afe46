#include "provider/settings.h"

#include <algorithm>
#include <charconv>

#include "base/log.h"

namespace moe_p2p::provider {

using base::Code;

namespace {

std::string join(std::initializer_list<std::string_view> words) {
  std::string all;
  for (const auto word : words) all.append(all.empty() ? "" : ", ").append(word);
  return all;
}

// False unless all of `text` is the number.
template <typename Number>
bool parse(const std::string& text, Number& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end;
}

}  // namespace

Settings::Settings(std::string owner, std::string_view text,
                   std::initializer_list<std::string_view> valid_keys)
    : owner_(std::move(owner)) {
  while (!text.empty()) {
    const auto item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const auto equals = item.find('=');
    const auto key = item.substr(0, equals);
    MOE_P2P_CHECK(equals != item.npos && std::ranges::count(valid_keys, key) == 1,
                  Code::kInvalidArgument, owner_, " settings: \"", item,
                  "\" is not understood; write key=value,... with the keys ", join(valid_keys));
    const bool is_new = values_.emplace(key, item.substr(equals + 1)).second;
    MOE_P2P_CHECK(is_new, Code::kInvalidArgument, owner_, " settings: ", key, " is given twice");
  }
}

uint64_t Settings::integer(std::string_view key, uint64_t fallback, uint64_t low,
                           uint64_t high) const {
  const std::string* text = find(key);
  if (!text) return fallback;
  uint64_t value = 0;
  if (!parse(*text, value) || value < low || value > high)
    refuse(key, *text, base::concat("an integer from ", low, " to ", high));
  return value;
}

double Settings::real(std::string_view key, double fallback, double low, double high) const {
  const std::string* text = find(key);
  if (!text) return fallback;
  double value = 0;
  if (!parse(*text, value) || !(value >= low && value <= high))
    refuse(key, *text, base::concat("a number from ", low, " to ", high));
  return value;
}

std::string Settings::word(std::string_view key, std::string_view fallback,
                           std::initializer_list<std::string_view> choices) const {
  const std::string* text = find(key);
  if (!text) return std::string(fallback);
  if (std::ranges::count(choices, *text) == 0) refuse(key, *text, "one of " + join(choices));
  return *text;
}

std::vector<int64_t> Settings::integers(std::string_view key) const {
  const std::string* text = find(key);
  std::vector<int64_t> values;
  if (!text) return values;
  std::string_view rest = *text;
  for (bool more = true; more;) {
    const auto item = rest.substr(0, rest.find(':'));
    more = item.size() < rest.size();
    rest.remove_prefix(item.size() + (more ? 1 : 0));
    if (!parse(std::string(item), values.emplace_back()))
      refuse(key, *text, "integers with colons between them");
  }
  return values;
}

std::string Settings::text(std::string_view key, std::string_view fallback) const {
  const std::string* given = find(key);
  return given ? *given : std::string(fallback);
}

const std::string* Settings::find(std::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

void Settings::refuse(std::string_view key, const std::string& value,
                      const std::string& wanted) const {
  throw base::Error(Code::kInvalidArgument, base::concat(owner_, " settings: ", key, "=", value,
                                                         " is refused; it must be ", wanted));
}

}  // namespace moe_p2p::provider
