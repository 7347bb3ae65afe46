// Whether closing a memory region is the end of what peers write there, when a peer was stopped in
// the middle of a write (Domain::why_no_fence). Control path.
//
// efa, verbs     the NIC refuses the rest.
// tcp;ofi_rxm    half a write lies in libfabric, which looks at its key no more. So peers announce
//                what they may write to, and are asked (LibfabricDomain::end_half_writes); and the
//                removal of a peer's address ends its connection (FI_AV_REMOVE_CLEANUP).
// shm            with cross-memory attach the owner of the memory copies the whole write in one
//                call, behind the look at its key (smr_progress.c, smr_progress_cmd_rma and
//                smr_progress_iov, of 1.17): there is no half write. Without, both sides copy in
//                turns, without another look (smr_progress_sar_list), and a peer that was stopped
//                while it copied holds the lock of this end.
// net, sockets   as tcp, without a call that ends a connection.
#pragma once

#include <string>

#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

// The removal of a peer's address ends its connection, and addresses fit announcements (writers.h).
bool ends_connections(const Config& config, const Info& info);
std::string why_no_fence(const Config& config, const Info& info);

}  // namespace moe_p2p::provider::libfabric
