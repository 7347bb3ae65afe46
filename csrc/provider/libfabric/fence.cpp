#include "provider/libfabric/fence.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string_view>

#include "base/log.h"

namespace moe_p2p::provider::libfabric {

namespace {

constexpr int kCapSysPtrace = 19;

bool may_trace_all() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "CapEff:") continue;
    uint64_t capabilities = 0;
    status >> std::hex >> capabilities;
    return (capabilities >> kCapSysPtrace & 1) != 0;
  }
  return false;
}

// Why shm copies without cross-memory attach. libfabric asks the kernel the same of each pair of
// processes, and does not report what it found (util_shm.c, smr_cma_check).
std::string why_no_cross_memory_attach() {
  const char* off = std::getenv("FI_SHM_DISABLE_CMA");
  if (off != nullptr) {
    const std::string_view value(off);
    if (value != "0" && value != "no" && value != "false" && value != "off")
      return "FI_SHM_DISABLE_CMA is set";
  }
  char from = 0, to = 0;
  const iovec local{&to, 1}, remote{&from, 1};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != 1)
    return base::concat("the kernel refuses process_vm_readv: ", error_text(errno));
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope > 0 && !may_trace_all())
    return base::concat("kernel.yama.ptrace_scope is ", scope,
                        ", and this process has no CAP_SYS_PTRACE");
  return {};
}

}  // namespace

bool is_tcp_of_rxm(const Config& config, const Info& info) {
  return config.is_software() &&
         std::string_view(info.fabric_attr->prov_name).find("ofi_rxm") != std::string_view::npos;
}

bool ends_connections(const Config& config, const Info& info) {
  return is_tcp_of_rxm(config, info) && info.addr_format == kFormatSockaddrIn;
}

std::string why_no_fence(const Config& config, const Info& info) {
  if (!config.is_software() || ends_connections(config, info)) return {};
  constexpr const char* kLate =
      ": a peer that is stopped in the middle of a write may finish it after its memory was given "
      "back; ";
  if (config.provider == "shm") {
    const std::string why = why_no_cross_memory_attach();
    if (why.empty()) return {};
    return base::concat("libfabric's shm copies in turns where processes may not read each other (",
                        why, ")", kLate, "use transport loopback, or allow it");
  }
  return base::concat("libfabric's ", info.fabric_attr->prov_name,
                      " cannot end a peer's connection", kLate,
                      "use provider=tcp, over an interface with an IPv4 address");
}

}  // namespace moe_p2p::provider::libfabric
