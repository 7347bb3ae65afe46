#include "provider/libfabric/selection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "platform/signal_handlers.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

std::string address_of(const Info& info) {
  char text[INET6_ADDRSTRLEN] = "";
  if (info.addr_format == kFormatSockaddrIn && info.src_addrlen >= sizeof(sockaddr_in))
    inet_ntop(AF_INET, &static_cast<const sockaddr_in*>(info.src_addr)->sin_addr, text,
              sizeof(text));
  if (info.addr_format == kFormatSockaddrIn6 && info.src_addrlen >= sizeof(sockaddr_in6))
    inet_ntop(AF_INET6, &static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr, text,
              sizeof(text));
  return text;
}

std::string_view domain_of(const Info& info) { return info.domain_attr->name; }

// Requirements for every provider. Memory modes: all that we support; the answer has the required
// ones. Manual progress: no threads of the provider beside the polling thread.
OwnedInfo make_hints(const Config& config, bool hmem, uint64_t completion_level) {
  OwnedInfo hints(library().dupinfo(nullptr));
  MOE_P2P_CHECK(hints, Code::kResourceExhausted, "libfabric: out of memory");
  hints->caps = kMsg | kRma | kWrite | kRemoteWrite | kRead | kRemoteRead | (hmem ? kHmem : 0);
  hints->mode = kContext | kContext2;
  hints->ep_attr->type = kEndpointRdm;
  hints->tx_attr->op_flags = completion_level;
  hints->tx_attr->tclass = config.tclass;
  hints->domain_attr->mr_mode =
      kMrLocal | kMrVirtAddr | kMrAllocated | kMrProvKey | kMrEndpoint | (hmem ? kMrHmem : 0);
  // With a NIC, memory is registered beside traffic (gate.h).
  hints->domain_attr->threading = config.is_software() ? kThreadDomain : kThreadCompletion;
  hints->domain_attr->control_progress = kProgressManual;
  hints->domain_attr->data_progress = kProgressManual;
  // tcp by ofi_rxm has a call that ends a connection (fence.h), and tcp by itself, which newer
  // releases name first, has none.
  hints->fabric_attr->prov_name =
      strdup(config.provider == "tcp" ? "tcp;ofi_rxm" : config.provider.c_str());
  return hints;
}

// Returns why libfabric does not take GPU memory; `error` is its answer to the request.
std::string why_no_hmem(const Config& config, int error) {
  if (config.is_software()) return base::concat("provider ", config.provider, " is software");
  if (config.hmem == Config::Hmem::kOff) return "hmem=off was set";
  return base::concat(
      "libfabric offers none (FI_HMEM): ", error_text(error),
      "; it must be built with CUDA, and finds CUDA as \"libcudart.so\", by that very "
      "name: where only the pip packages are, the loader finds none (LD_LIBRARY_PATH "
      "of a folder with a link of that name to libcudart.so.12 or 13)");
}

Selection ask(const Config& config) {
  // 1.20 is the first release with dma-buf registration; an older library gets its own version.
  const uint32_t version = std::min(library().version(), make_version(1, 20));
  const bool want_hmem = config.hmem == Config::Hmem::kOn ||
                         (config.hmem == Config::Hmem::kAuto && !config.is_software());
  int error = 0, hmem_error = 0;
  for (const bool hmem : {true, false}) {
    if (hmem ? !want_hmem : config.hmem == Config::Hmem::kOn) continue;
    // For a provider without a level above transmit-complete, transmit-complete already means that
    // the target's NIC has answered (reliable connections).
    for (const uint64_t level : {kDeliveryComplete, uint64_t{0}}) {
      if (level == 0 && config.is_software()) continue;
      const OwnedInfo hints = make_hints(config, hmem, level);
      Info* found = nullptr;
      error = library().getinfo(version, nullptr, nullptr, 0, hints.get(), &found);
      if (error == 0)
        return {OwnedInfo(found), hmem ? std::string() : why_no_hmem(config, hmem_error)};
    }
    if (hmem) hmem_error = error;
  }
  throw base::Error(
      Code::kUnavailable,
      base::concat("libfabric has no provider \"", config.provider, "\" that can write with ",
                   "immediates here: ", error_text(error),
                   config.is_efa() ? "; is this an EC2 instance with EFA, and its driver loaded? "
                                     "(fi_info -p efa)"
                                   : "; see what fi_info lists",
                   config.hmem == Config::Hmem::kOn
                       ? "; hmem=on asks for GPU memory: " + why_no_hmem(config, error)
                       : std::string()));
}

// A release below 1.18 emulates EFA's writes with packets and copies; one below 1.20 registers no
// dma-buf.
void check_version(const Config& config) {
  const uint32_t version = library().version();
  MOE_P2P_CHECK(
      !config.is_efa() || version >= make_version(1, 20), Code::kUnavailable, "libfabric ",
      version >> 16, ".", version & 0xffff,
      " is too old for provider efa, which needs 1.20 or newer: install the library of AWS's EFA "
      "installer (/opt/amazon/efa), or name its file with library=");
}

// Since 2.1 EFA offers each device under the fabric "efa-direct" too, before "efa" (efa_prov.c).
// There writes with immediates need posted receives, and are not retried.
bool is_direct(const Info& info) { return std::strcmp(info.fabric_attr->name, "efa-direct") == 0; }

// tcp lists addresses that no interface has: 127.0.0.1 where there is only ::1.
bool has_address(const Info& info) {
  const bool v4 = info.addr_format == kFormatSockaddrIn;
  const size_t bytes = v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if ((!v4 && info.addr_format != kFormatSockaddrIn6) || info.src_addrlen < bytes) return true;
  sockaddr_in6 address{};
  std::memcpy(&address, info.src_addr, bytes);
  address.sin6_port = 0;  // where that of IPv4 lies too
  static_assert(offsetof(sockaddr_in6, sin6_port) == offsetof(sockaddr_in, sin_port));
  const int probe = ::socket(v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool bound = ::bind(probe, reinterpret_cast<const sockaddr*>(&address),
                            static_cast<socklen_t>(bytes)) == 0;
  const int error = errno;
  ::close(probe);
  return bound || error != EADDRNOTAVAIL;
}

bool is_usable(const Info& info) { return !is_direct(info) && has_address(info); }

bool is_loopback(const Info& info) { return domain_of(info) == "lo"; }

// One info per domain, IPv4 before other addresses, the loopback interface only when it is alone.
std::vector<Info*> usable(Info* first) {
  std::vector<Info*> found;
  const auto add = [&](bool ipv4_only) {
    for (Info* info = first; info; info = info->next) {
      if (ipv4_only != (info->addr_format == kFormatSockaddrIn)) continue;
      if (!is_usable(*info)) continue;
      const auto same = [&](const Info* other) { return domain_of(*other) == domain_of(*info); };
      if (std::ranges::none_of(found, same)) found.push_back(info);
    }
  };
  add(true);
  add(false);
  const auto real = std::ranges::count_if(found, [](Info* info) { return !is_loopback(*info); });
  if (real > 0) std::erase_if(found, [](Info* info) { return is_loopback(*info); });
  return found;
}

Info* find_named(Info* first, const std::string& name) {
  Info* other = nullptr;
  for (Info* info = first; info; info = info->next) {
    if (!is_usable(*info)) continue;
    if (address_of(*info) == name) return info;
    if (domain_of(*info) != name) continue;
    if (info->addr_format == kFormatSockaddrIn) return info;
    if (!other) other = info;
  }
  return other;
}

std::string list(Info* first) {
  std::vector<std::string> names;
  for (Info* info = first; info; info = info->next)
    if (std::ranges::count(names, describe(*info)) == 0) names.push_back(describe(*info));
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Info* choose(const Config& config, int nic, Info* first) {
  const auto index = static_cast<size_t>(nic);
  if (config.interfaces.empty()) {
    const auto domains = usable(first);
    MOE_P2P_CHECK(!domains.empty(), Code::kUnavailable, "libfabric NIC ", nic, ": provider ",
                  config.provider, " has no usable domain");
    return domains[index % domains.size()];
  }
  const std::string& name = config.interfaces[index % config.interfaces.size()];
  Info* found = find_named(first, name);
  MOE_P2P_CHECK(found, Code::kUnavailable, "libfabric NIC ", nic, ": interfaces names \"", name,
                "\", provider ", config.provider, " has: ", list(first));
  return found;
}

// libfabric reads them once, at its first call. EFA writes to ranks of the same host through shared
// memory unless this forbids it; such writes follow another provider's rules. verbs keeps
// registrations in a cache after they are closed: peers could still write to memory that was given
// back, and outside a region that lies in an older one. The software providers keep a peer's
// connection when its address is removed, unless they are asked to end it: what a stopped peer has
// sent half of a write would land when it goes on, after the memory was given back.
void set_environment(const Config& config) {
  static std::once_flag efa, verbs, software;
  if (config.is_efa())
    std::call_once(efa, [] { ::setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0", /*overwrite=*/0); });
  if (config.is_verbs())
    std::call_once(verbs, [] { ::setenv("FI_MR_CACHE_MAX_COUNT", "0", /*overwrite=*/0); });
  if (config.is_software())
    std::call_once(software, [] { ::setenv("FI_AV_REMOVE_CLEANUP", "1", /*overwrite=*/1); });
}

}  // namespace

Selection select_info(const Config& config, int nic) {
  const platform::KeptSignalHandlers kept;  // the first call loads providers from files
  set_environment(config);
  open_library(config.library, config.is_efa());
  check_version(config);
  const Selection all = ask(config);
  OwnedInfo own(library().dupinfo(choose(config, nic, all.info.get())));
  MOE_P2P_CHECK(own, Code::kResourceExhausted, "libfabric: out of memory");
  return {std::move(own), all.why_no_hmem};
}

std::string describe(const Info& info) {
  const std::string address = address_of(info);
  return base::concat(domain_of(info), address.empty() ? "" : " ", address);
}

}  // namespace moe_p2p::provider::libfabric
