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

#include "abi_fields.h"

namespace fabric = moe_p2p::provider::libfabric;

SAME_FIELDS(fabric::FidOps, fi_ops, control);
SAME_SIZE(fabric::Fid, fid);
SAME_FIELDS(fabric::TxAttr, fi_tx_attr, op_flags, size, rma_iov_limit, tclass);
static_assert(fabric::kBestEffort == FI_TC_BEST_EFFORT &&
              fabric::kLowLatency == FI_TC_LOW_LATENCY && fabric::kBulkData == FI_TC_BULK_DATA &&
              fabric::kScavenger == FI_TC_SCAVENGER);
SAME_FIELDS(fabric::EpAttr, fi_ep_attr, type, max_msg_size);
SAME_FIELDS(fabric::DomainAttr, fi_domain_attr, name, threading, data_progress, mr_mode,
            mr_key_size, cq_data_size);
SAME_FIELDS(fabric::FabricAttr, fi_fabric_attr, prov_name);
SAME_SIZE(fabric::Info, fi_info);
SAME_FIELDS(fabric::Info, fi_info, addr_format, src_addr, tx_attr, fabric_attr);
SAME_SIZE(fabric::AvAttr, fi_av_attr);
SAME_FIELDS(fabric::AvOps, fi_ops_av, remove);
SAME_FIELDS(fabric::AddressVector, fid_av, ops);
SAME_SIZE(fabric::CqAttr, fi_cq_attr);
SAME_FIELDS(fabric::CqAttr, fi_cq_attr, wait_set);
SAME_SIZE(fabric::CqEntry, fi_cq_data_entry);
static_assert(sizeof(fabric::CqError) >= sizeof(fi_cq_err_entry));
SAME_FIELDS(fabric::CqError, fi_cq_err_entry, prov_errno, err_data_size);
SAME_FIELDS(fabric::CqOps, fi_ops_cq, readerr, strerror);
SAME_SIZE(fabric::MemoryRegion, fid_mr);
SAME_FIELDS(fabric::MrAttr, fi_mr_attr, requested_key, iface, device);
SAME_FIELDS(fabric::MrOps, fi_ops_mr, regattr);
SAME_FIELDS(fabric::CmOps, fi_ops_cm, getname);
SAME_SIZE(fabric::RmaIov, fi_rma_iov);
SAME_SIZE(fabric::RmaMessage, fi_msg_rma);
SAME_FIELDS(fabric::RmaMessage, fi_msg_rma, data);
SAME_FIELDS(fabric::RmaOps, fi_ops_rma, readmsg, writemsg);
SAME_FIELDS(fabric::Endpoint, fid_ep, cm, rma);
SAME_FIELDS(fabric::DomainOps, fi_ops_domain, endpoint);
SAME_FIELDS(fabric::AccessDomain, fid_domain, mr);
SAME_FIELDS(fabric::FabricOps, fi_ops_fabric, domain);
SAME_FIELDS(fabric::Fabric, fid_fabric, ops);
SAME_SIZE(fabric::Context, fi_context2);

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
              fabric::kFormatSockaddrIn6 == FI_SOCKADDR_IN6 &&
              fabric::kErrorAvailable == FI_EAVAIL && fabric::kErrorNoKey == FI_ENOKEY);
#endif

TEST_CASE("libfabric: the declared interface is that of the installed header") {
#if defined(MOE_P2P_HAS_HEADER)
  CHECK(FI_MAJOR_VERSION >= 1);  // compared by the compiler, above
#else
  MESSAGE("skipped: <rdma/fabric.h> is not installed (apt-get install libfabric-dev)");
#endif
}
