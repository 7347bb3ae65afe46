// provider/libfabric/api.h declares libfabric's binary interface by itself; where the header is
// installed (libfabric-dev) the compiler compares the two.
#include "provider/libfabric/api.h"

#include "doctest/doctest.h"

#if __has_include(<rdma/fi_rma.h>)
#define MOE_P2P_HAS_HEADER 1
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstddef>

namespace fabric = moe_p2p::provider::libfabric;

#define SAME_PLACE(own, own_field, theirs, their_field) \
  static_assert(offsetof(own, own_field) == offsetof(theirs, their_field))

SAME_PLACE(fabric::FidOps, control, fi_ops, control);
static_assert(sizeof(fabric::Fid) == sizeof(fid));
SAME_PLACE(fabric::TxAttr, op_flags, fi_tx_attr, op_flags);
SAME_PLACE(fabric::TxAttr, size, fi_tx_attr, size);
SAME_PLACE(fabric::TxAttr, rma_iov_limit, fi_tx_attr, rma_iov_limit);
SAME_PLACE(fabric::TxAttr, tclass, fi_tx_attr, tclass);
static_assert(fabric::kBestEffort == FI_TC_BEST_EFFORT &&
              fabric::kLowLatency == FI_TC_LOW_LATENCY && fabric::kBulkData == FI_TC_BULK_DATA &&
              fabric::kScavenger == FI_TC_SCAVENGER);
SAME_PLACE(fabric::EpAttr, type, fi_ep_attr, type);
SAME_PLACE(fabric::EpAttr, max_msg_size, fi_ep_attr, max_msg_size);
SAME_PLACE(fabric::DomainAttr, name, fi_domain_attr, name);
SAME_PLACE(fabric::DomainAttr, threading, fi_domain_attr, threading);
SAME_PLACE(fabric::DomainAttr, data_progress, fi_domain_attr, data_progress);
SAME_PLACE(fabric::DomainAttr, mr_mode, fi_domain_attr, mr_mode);
SAME_PLACE(fabric::DomainAttr, mr_key_size, fi_domain_attr, mr_key_size);
SAME_PLACE(fabric::DomainAttr, cq_data_size, fi_domain_attr, cq_data_size);
SAME_PLACE(fabric::FabricAttr, prov_name, fi_fabric_attr, prov_name);
static_assert(sizeof(fabric::Info) == sizeof(fi_info));
SAME_PLACE(fabric::Info, addr_format, fi_info, addr_format);
SAME_PLACE(fabric::Info, src_addr, fi_info, src_addr);
SAME_PLACE(fabric::Info, tx_attr, fi_info, tx_attr);
SAME_PLACE(fabric::Info, fabric_attr, fi_info, fabric_attr);
static_assert(sizeof(fabric::AvAttr) == sizeof(fi_av_attr));
SAME_PLACE(fabric::AvOps, remove, fi_ops_av, remove);
SAME_PLACE(fabric::AddressVector, ops, fid_av, ops);
static_assert(sizeof(fabric::CqAttr) == sizeof(fi_cq_attr));
SAME_PLACE(fabric::CqAttr, wait_set, fi_cq_attr, wait_set);
static_assert(sizeof(fabric::CqEntry) == sizeof(fi_cq_data_entry));
static_assert(sizeof(fabric::CqError) >= sizeof(fi_cq_err_entry));
SAME_PLACE(fabric::CqError, prov_errno, fi_cq_err_entry, prov_errno);
SAME_PLACE(fabric::CqError, err_data_size, fi_cq_err_entry, err_data_size);
SAME_PLACE(fabric::CqOps, readerr, fi_ops_cq, readerr);
SAME_PLACE(fabric::CqOps, strerror, fi_ops_cq, strerror);
static_assert(sizeof(fabric::MemoryRegion) == sizeof(fid_mr));
SAME_PLACE(fabric::MrAttr, requested_key, fi_mr_attr, requested_key);
SAME_PLACE(fabric::MrAttr, iface, fi_mr_attr, iface);
SAME_PLACE(fabric::MrAttr, device, fi_mr_attr, device);
SAME_PLACE(fabric::MrOps, regattr, fi_ops_mr, regattr);
SAME_PLACE(fabric::CmOps, getname, fi_ops_cm, getname);
static_assert(sizeof(fabric::RmaIov) == sizeof(fi_rma_iov));
static_assert(sizeof(fabric::RmaMessage) == sizeof(fi_msg_rma));
SAME_PLACE(fabric::RmaMessage, data, fi_msg_rma, data);
SAME_PLACE(fabric::RmaOps, readmsg, fi_ops_rma, readmsg);
SAME_PLACE(fabric::RmaOps, writemsg, fi_ops_rma, writemsg);
SAME_PLACE(fabric::Endpoint, cm, fid_ep, cm);
SAME_PLACE(fabric::Endpoint, rma, fid_ep, rma);
SAME_PLACE(fabric::DomainOps, endpoint, fi_ops_domain, endpoint);
SAME_PLACE(fabric::AccessDomain, mr, fid_domain, mr);
SAME_PLACE(fabric::FabricOps, domain, fi_ops_fabric, domain);
SAME_PLACE(fabric::Fabric, ops, fid_fabric, ops);
static_assert(sizeof(fabric::Context) == sizeof(fi_context2));

static_assert(fabric::kMsg == FI_MSG && fabric::kRma == FI_RMA && fabric::kRead == FI_READ &&
              fabric::kWrite == FI_WRITE && fabric::kRecv == FI_RECV &&
              fabric::kTransmit == FI_TRANSMIT && fabric::kRemoteRead == FI_REMOTE_READ &&
              fabric::kRemoteWrite == FI_REMOTE_WRITE &&
              fabric::kRemoteCqData == FI_REMOTE_CQ_DATA && fabric::kMore == FI_MORE &&
              fabric::kCompletion == FI_COMPLETION &&
              fabric::kDeliveryComplete == FI_DELIVERY_COMPLETE && fabric::kHmem == FI_HMEM &&
              fabric::kContext == FI_CONTEXT && fabric::kContext2 == FI_CONTEXT2);
static_assert(fabric::kMrLocal == FI_MR_LOCAL && fabric::kMrVirtAddr == FI_MR_VIRT_ADDR &&
              fabric::kMrAllocated == FI_MR_ALLOCATED && fabric::kMrProvKey == FI_MR_PROV_KEY &&
              fabric::kMrEndpoint == FI_MR_ENDPOINT && fabric::kMrHmem == FI_MR_HMEM);
static_assert(fabric::kAvTable == FI_AV_TABLE && fabric::kProgressManual == FI_PROGRESS_MANUAL &&
              fabric::kThreadDomain == FI_THREAD_DOMAIN && fabric::kEndpointRdm == FI_EP_RDM &&
              fabric::kCqFormatData == FI_CQ_FORMAT_DATA && fabric::kWaitNone == FI_WAIT_NONE &&
              fabric::kControlEnable == FI_ENABLE && fabric::kHmemSystem == FI_HMEM_SYSTEM &&
              fabric::kHmemCuda == FI_HMEM_CUDA && fabric::kFormatSockaddrIn == FI_SOCKADDR_IN &&
              fabric::kErrorAvailable == FI_EAVAIL && fabric::kErrorNoKey == FI_ENOKEY);
#endif

TEST_CASE("libfabric: the declared interface is that of the installed header") {
#if defined(MOE_P2P_HAS_HEADER)
  CHECK(FI_MAJOR_VERSION >= 1);  // compared by the compiler, above
#else
  MESSAGE("skipped: <rdma/fabric.h> is not installed (apt-get install libfabric-dev)");
#endif
}
