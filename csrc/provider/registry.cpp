// The table of providers. A new one is a folder, begun as a copy of null/, and its include and row
// here; a row in tests/cpp/provider_table.h runs the contract suite over it. To be chosen by itself
// it needs a row in PROVIDERS of moe_p2p/machine/transport.py, too.
#include <string_view>

#include "base/log.h"
#include "provider/libfabric/domain.h"
#include "provider/loopback/domain.h"
#include "provider/loopback/timed.h"
#include "provider/null/domain.h"
#include "provider/provider.h"
#include "provider/verbs/domain.h"

namespace moe_p2p::provider {
namespace {

struct Entry {
  std::string_view name;
  std::unique_ptr<Domain> (*open)(const DomainOptions& options);
};

constexpr Entry kProviders[] = {
    {"libfabric", make_libfabric_domain}, {"loopback", make_loopback_domain},
    {"null", make_null_domain},           {"timed", make_timed_domain},
    {"verbs", make_verbs_domain},
};

}  // namespace

bool Domain::sever(uint64_t /*tag*/, platform::Deadline /*deadline*/) {
  throw base::Error(
      base::Code::kUnavailable,
      base::concat(provider_name(), " has no fence by queue pair; verbs and loopback have"));
}

std::unique_ptr<Domain> open_domain(const std::string& provider, const DomainOptions& options) {
  std::string known;
  for (const Entry& entry : kProviders) {
    if (entry.name == provider) return entry.open(options);
    known += known.empty() ? "" : ", ";
    known += entry.name;
  }
  throw base::Error(base::Code::kUnavailable,
                    base::concat("unknown provider \"", provider, "\"; there are: ", known));
}

}  // namespace moe_p2p::provider
