// csrc/provider/verbs/api.h against the library's own header, where that is installed: sizes and
// offsets are compared while this file compiles.
#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

#include "abi_fields.h"
#include "provider/verbs/api.h"

namespace moe_p2p::provider::verbs {
namespace {

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(VerbsDevice, ibv_device);
SAME_FIELDS(VerbsDevice, ibv_device, ibdev_path, name);
SAME_SIZE(Mr, ibv_mr);
SAME_FIELDS(Mr, ibv_mr, rkey);
SAME_SIZE(CompChannel, ibv_comp_channel);
SAME_SIZE(Cq, ibv_cq);
SAME_FIELDS(Cq, ibv_cq, cqe);
SAME_SIZE(Srq, ibv_srq);
SAME_SIZE(Qp, ibv_qp);
SAME_FIELDS(Qp, ibv_qp, qp_num);
SAME_SIZE(DeviceAttr, ibv_device_attr);
SAME_FIELDS(DeviceAttr, ibv_device_attr, max_qp_wr, max_cqe, max_qp_rd_atom, max_qp_init_rd_atom,
            max_srq_wr, phys_port_cnt);
SAME_SIZE(PortAttr, ibv_port_attr);
SAME_FIELDS(PortAttr, ibv_port_attr, lid, link_layer, flags);
static_assert(kPortNeedsGrh == IBV_QPF_GRH_REQUIRED);
SAME_SIZE(SrqInitAttr, ibv_srq_init_attr);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME_FIELDS(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME_SIZE(AhAttr, ibv_ah_attr);
SAME_FIELDS(AhAttr, ibv_ah_attr, port_num, dlid);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME_FIELDS(QpAttr, ibv_qp_attr, ah_attr, pkey_index, timeout, rnr_retry);
SAME_SIZE(Sge, ibv_sge);
SAME_SIZE(SendWr, ibv_send_wr);
SAME_FIELDS(SendWr, ibv_send_wr, imm_data);
SAME_FIELD(SendWr, remote_addr, ibv_send_wr, wr.rdma.remote_addr);
SAME_FIELD(SendWr, rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(RecvWr, ibv_recv_wr);
SAME_SIZE(Wc, ibv_wc);
SAME_FIELDS(Wc, ibv_wc, imm_data, wc_flags);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_SIZE(ContextOps, ibv_context_ops);
SAME_FIELDS(ContextOps, ibv_context_ops, poll_cq, req_notify_cq, post_srq_recv, post_send);
SAME_SIZE(Context, ibv_context);
SAME_SIZE(TdInitAttr, ibv_td_init_attr);
SAME_SIZE(ParentDomainInitAttr, ibv_parent_domain_init_attr);
SAME_FIELDS(ParentDomainInitAttr, ibv_parent_domain_init_attr, comp_mask);
// From the Context back.
#define SAME_DISTANCE(ours, theirs)                                  \
  static_assert(sizeof(ExtendedOps) - offsetof(ExtendedOps, ours) == \
                offsetof(verbs_context, context) - offsetof(verbs_context, theirs))
SAME_DISTANCE(alloc_parent_domain, alloc_parent_domain);
SAME_DISTANCE(dealloc_td, dealloc_td);
SAME_DISTANCE(alloc_td, alloc_td);
SAME_DISTANCE(bytes, sz);
SAME_FIELDS(Context, ibv_context, async_fd);

static_assert(kPortActive == IBV_PORT_ACTIVE && kLinkEthernet == IBV_LINK_LAYER_ETHERNET);
static_assert(kForkDisabled == +IBV_FORK_DISABLED && kForkUnneeded == +IBV_FORK_UNNEEDED);
static_assert(kQpReliable == IBV_QPT_RC);
static_assert(kEventCqError == +IBV_EVENT_CQ_ERR && kEventSrqError == +IBV_EVENT_SRQ_ERR);
static_assert(kEventQpFatal == +IBV_EVENT_QP_FATAL);
static_assert(kEventQpRequestError == +IBV_EVENT_QP_REQ_ERR);
static_assert(kEventQpAccessError == +IBV_EVENT_QP_ACCESS_ERR);
static_assert(kEventGidChange == +IBV_EVENT_GID_CHANGE);
static_assert(kEventLidChange == +IBV_EVENT_LID_CHANGE);
static_assert(kQpInit == +IBV_QPS_INIT && kQpReadyToReceive == +IBV_QPS_RTR);
static_assert(kQpReadyToSend == +IBV_QPS_RTS && kQpError == +IBV_QPS_ERR);
static_assert(kMaskState == +IBV_QP_STATE && kMaskAccess == +IBV_QP_ACCESS_FLAGS);
static_assert(kMaskPkey == +IBV_QP_PKEY_INDEX && kMaskPort == +IBV_QP_PORT);
static_assert(kMaskAddress == +IBV_QP_AV && kMaskMtu == +IBV_QP_PATH_MTU);
static_assert(kMaskTimeout == +IBV_QP_TIMEOUT && kMaskRetries == +IBV_QP_RETRY_CNT);
static_assert(kMaskRnrRetries == +IBV_QP_RNR_RETRY && kMaskReceivePsn == +IBV_QP_RQ_PSN);
static_assert(kMaskMaxReads == +IBV_QP_MAX_QP_RD_ATOMIC && kMaskRnrTimer == +IBV_QP_MIN_RNR_TIMER);
static_assert(kMaskSendPsn == +IBV_QP_SQ_PSN && kMaskMaxPeerReads == +IBV_QP_MAX_DEST_RD_ATOMIC);
static_assert(kMaskPeerQp == +IBV_QP_DEST_QPN);
static_assert(kAccessLocalWrite == +IBV_ACCESS_LOCAL_WRITE);
static_assert(kAccessRemoteWrite == +IBV_ACCESS_REMOTE_WRITE);
static_assert(kAccessRemoteRead == +IBV_ACCESS_REMOTE_READ);
static_assert(kOpRead == +IBV_WR_RDMA_READ);
static_assert(kAccessRelaxedOrdering == +IBV_ACCESS_RELAXED_ORDERING);
static_assert(kOpWrite == +IBV_WR_RDMA_WRITE && kOpWriteImm == +IBV_WR_RDMA_WRITE_WITH_IMM);
static_assert(kSendSignaled == +IBV_SEND_SIGNALED && kSendInline == +IBV_SEND_INLINE);
static_assert(kWcLocalLength == +IBV_WC_LOC_LEN_ERR && kWcFlushed == +IBV_WC_WR_FLUSH_ERR);
static_assert(kWcLocalQpOperation == +IBV_WC_LOC_QP_OP_ERR);
static_assert(kWcLocalProtection == +IBV_WC_LOC_PROT_ERR);
static_assert(kWcRemoteInvalidRequest == +IBV_WC_REM_INV_REQ_ERR);
static_assert(kWcRemoteAccess == +IBV_WC_REM_ACCESS_ERR);
static_assert(kWcRemoteOperation == +IBV_WC_REM_OP_ERR);
static_assert(kWcRetriesExceeded == +IBV_WC_RETRY_EXC_ERR);
static_assert(kWcRnrRetriesExceeded == +IBV_WC_RNR_RETRY_EXC_ERR);
static_assert(kWcWithImm == +IBV_WC_WITH_IMM);
static_assert(kEventDeviceFatal == +IBV_EVENT_DEVICE_FATAL);
static_assert(kEventPortActive == +IBV_EVENT_PORT_ACTIVE && kEventPortError == +IBV_EVENT_PORT_ERR);

}  // namespace
}  // namespace moe_p2p::provider::verbs
#endif
