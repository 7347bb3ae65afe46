// What the fake of EFA answers to fi_getinfo: ten NICs, efa0 to efa9, with the limits of the
// device, each in the fabrics efa-direct and efa, in this order (efa_util_prov_initialize() of
// libfabric 2.1).
#pragma once

#include "provider/libfabric/api.h"

namespace moe_p2p::test {

using provider::libfabric::Info;

// A list, given back with free_efa_info().
Info* make_efa_infos(const Info& hints, size_t queue);
Info* dup_efa_info(const Info* info);  // null: an empty one
void free_efa_info(Info* info);

}  // namespace moe_p2p::test
