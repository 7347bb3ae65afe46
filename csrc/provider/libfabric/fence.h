// Whether closing a memory region is the end of what peers write there, when a peer was stopped in
// the middle of a write (Domain::why_no_fence). Control path.
//
// efa, verbs     the NIC refuses the rest.
// tcp;ofi_rxm    libfabric may hold half a write, and does not check its key again. So peers
//                announce what they may write to, and are asked about half writes
//                (LibfabricDomain::end_half_writes); and the removal of a peer's address ends its
//                connection (FI_AV_REMOVE_CLEANUP).
// shm            with cross-memory attach the owner of the memory copies the whole write in one
//                call, after the check of its key (smr_progress.c, smr_progress_cmd_rma and
//                smr_progress_iov, of 1.17): there is no half write. Without, both sides copy in
//                turns, without another look (smr_progress_sar_list), and a peer that was stopped
//                while it copied holds the lock of this end.
// net, sockets   as tcp, without a call that ends a connection.
//
// ofi_rxm of libfabric 1.17 crashes when it closes a tcp connection, by the removal of an address
// or with the endpoint, over which half of a write with an immediate or half of a read's answer has
// come: tcp reports it without a context, and ofi_rxm looks for its state there (tcpx_ep.c,
// tcpx_ep_flush_all_queues; rxm_cq.c, rxm_handle_comp_error). So writes with bytes take no
// immediate there, which follows in an empty write (Writes), and no connection is closed while a
// read is under way over it (LibfabricDomain).
#pragma once

#include <string>

#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

// Connections are ofi_rxm's, over tcp.
bool is_tcp_of_rxm(const Config& config, const Info& info);
// The removal of a peer's address ends its connection, and addresses fit announcements (writers.h).
bool ends_connections(const Config& config, const Info& info);
std::string why_no_fence(const Config& config, const Info& info);

}  // namespace moe_p2p::provider::libfabric
