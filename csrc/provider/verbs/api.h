// The part of libibverbs that this provider calls, opened with dlopen: the package builds without
// RDMA headers and loads on machines without the library. This is the library's stable binary
// interface, in our own names; tests/cpp/verbs_abi_test.cpp compares it with <infiniband/verbs.h>
// where that is installed. The calls of the data path are not symbols but members of Context::ops.
//
// Only fields that every rdma-core has: must not assume the fields of newer ones.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace moe_p2p::provider::verbs {

union Gid {
  uint8_t raw[16];
  uint64_t words[2];
};

struct GidTableEntry {
  Gid gid;
  uint32_t index;
  uint32_t port;
  uint32_t type;  // 0 InfiniBand, 1 RoCE v1, 2 RoCE v2
  uint32_t ifindex;
};

struct VerbsDevice {
  void* ops[2];
  int node_type;
  int transport_type;
  char name[64];
  char dev_name[64];
  char dev_path[256];
  char ibdev_path[256];  // /sys/class/infiniband/<name>
};

struct Context;
struct Pd;  // opaque
struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};
struct CompChannel {
  Context* context;
  int fd;
  int refcnt;
};
struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed;
  uint32_t async_events_completed;
};
struct Srq {
  Context* context;
  void* srq_context;
  Pd* pd;
  uint32_t handle;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};
struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  uint32_t handle;
  uint32_t qp_num;
  int state;
  int qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

struct DeviceAttr {
  char fw_ver[64];
  uint64_t node_guid;
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint32_t vendor_id;
  uint32_t vendor_part_id;
  uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int unused0[2];
  int max_qp_rd_atom;  // reads of a peer that one queue pair serves at a time
  int unused1[2];
  int max_qp_init_rd_atom;  // own reads that one queue pair has under way
  int unused2[13];
  int max_srq;
  int max_srq_wr;
  int max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay;
  uint8_t phys_port_cnt;
};

struct PortAttr {
  int state;
  int max_mtu;
  int active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t bad_pkey_cntr;
  uint32_t qkey_viol_cntr;
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t sm_lid;
  uint8_t lmc;
  uint8_t max_vl_num;
  uint8_t sm_sl;
  uint8_t subnet_timeout;
  uint8_t init_type_reply;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};
inline constexpr int kPortActive = 4;
inline constexpr uint8_t kLinkEthernet = 2;
// In PortAttr::flags of an InfiniBand port: addresses must be global, in all packets.
inline constexpr uint8_t kPortNeedsGrh = 1;

struct SrqInitAttr {
  void* srq_context;
  uint32_t max_wr;
  uint32_t max_sge;
  uint32_t srq_limit;
};

struct QpCap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};
struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  QpCap cap;
  int qp_type;
  int sq_sig_all;
};
inline constexpr int kQpReliable = 2;

struct AhAttr {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};
struct QpAttr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint32_t rate_limit;
};
enum QpState : int { kQpReset, kQpInit, kQpReadyToReceive, kQpReadyToSend, kQpError = 6 };
enum QpMask : int {
  kMaskState = 1 << 0,
  kMaskAccess = 1 << 3,
  kMaskPkey = 1 << 4,
  kMaskPort = 1 << 5,
  kMaskAddress = 1 << 7,
  kMaskMtu = 1 << 8,
  kMaskTimeout = 1 << 9,
  kMaskRetries = 1 << 10,
  kMaskRnrRetries = 1 << 11,
  kMaskReceivePsn = 1 << 12,
  kMaskMaxReads = 1 << 13,
  kMaskRnrTimer = 1 << 15,
  kMaskSendPsn = 1 << 16,
  kMaskMaxPeerReads = 1 << 17,
  kMaskPeerQp = 1 << 20,
};
enum Access : int {
  kAccessLocalWrite = 1,
  kAccessRemoteWrite = 2,
  kAccessRemoteRead = 4,
  kAccessRelaxedOrdering = 1 << 20,
};

struct Sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};
struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;  // big-endian
  uint64_t remote_addr;
  uint32_t rkey;
  uint32_t unused[19];
};
static_assert(sizeof(SendWr) == 128);
enum Opcode : int { kOpWrite = 0, kOpWriteImm = 1, kOpRead = 4 };
enum SendFlag : unsigned { kSendSignaled = 2, kSendInline = 8 };
struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

struct Wc {
  uint64_t wr_id;
  int status;
  int opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;  // big-endian
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};
static_assert(sizeof(Wc) == 48);
enum WcStatus : int {
  kWcSuccess = 0,
  kWcLocalLength = 1,
  kWcLocalQpOperation = 2,
  kWcLocalProtection = 4,
  kWcFlushed = 5,
  kWcRemoteInvalidRequest = 9,
  kWcRemoteAccess = 10,
  kWcRemoteOperation = 11,
  kWcRetriesExceeded = 12,
  kWcRnrRetriesExceeded = 13,
};
enum WcFlag : unsigned { kWcWithImm = 2 };

struct AsyncEvent {
  void* element;
  int type;
};
enum AsyncType : int {
  kEventCqError = 0,
  kEventQpFatal = 1,  // `element` of these three: the queue pair
  kEventQpRequestError = 2,
  kEventQpAccessError = 3,
  kEventDeviceFatal = 8,
  kEventPortActive = 9,
  kEventPortError = 10,
  kEventLidChange = 11,
  kEventSrqError = 14,
  kEventLastReceive = 16,  // `element`: a queue pair in error that takes no more receives
  kEventGidChange = 18,
};

// Only the data path's calls are used; the other members keep their offsets.
struct ContextOps {
  void* unused0[11];
  int (*poll_cq)(Cq*, int num_entries, Wc*);
  int (*req_notify_cq)(Cq*, int solicited_only);
  void* unused1[7];
  int (*post_srq_recv)(Srq*, RecvWr*, RecvWr** bad);
  void* unused2[4];
  int (*post_send)(Qp*, SendWr*, SendWr** bad);
  void* unused3[6];
};
struct Context {
  VerbsDevice* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

// More calls without a symbol, which not every library or device has. They lie right before a
// Context whose `abi_compat` marks them; the library adds new ones in front.
struct Td;  // opaque
struct TdInitAttr {
  uint32_t comp_mask;
};
struct ParentDomainInitAttr {
  Pd* pd;
  Td* td;
  uint32_t comp_mask;
  void* unused[3];
};
struct ExtendedOps {
  Pd* (*alloc_parent_domain)(Context*, ParentDomainInitAttr*);  // ended by dealloc_pd
  int (*dealloc_td)(Td*);
  Td* (*alloc_td)(Context*, TdInitAttr*);
  void* unused[22];
  size_t bytes;  // size of the library's own struct, with the Context
};
// Null when the library has no such calls; each of them may be null, too.
const ExtendedOps* extended_ops(const Context* context) noexcept;

// What is_fork_initialized() returns: from 5.12 on the kernel keeps registered pages.
enum ForkStatus : int { kForkDisabled, kForkEnabled, kForkUnneeded };

// Named without the library's prefix. query_gid_table, reg_mr_iova2, reg_dmabuf_mr and
// is_fork_initialized are null in older libraries.
struct Api {
  VerbsDevice** (*get_device_list)(int* num_devices);
  void (*free_device_list)(VerbsDevice** list);
  Context* (*open_device)(VerbsDevice*);
  int (*close_device)(Context*);
  int (*query_device)(Context*, DeviceAttr*);
  int (*query_port)(Context*, uint8_t port, PortAttr*);
  int (*query_gid)(Context*, uint8_t port, int index, Gid*);
  ssize_t (*query_gid_table)(Context*, GidTableEntry*, size_t num, uint32_t flags,
                             size_t entry_bytes);
  Pd* (*alloc_pd)(Context*);
  int (*dealloc_pd)(Pd*);
  Mr* (*reg_mr)(Pd*, void* addr, size_t bytes, int access);
  Mr* (*reg_mr_iova2)(Pd*, void* addr, size_t bytes, uint64_t iova, unsigned access);
  Mr* (*reg_dmabuf_mr)(Pd*, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access);
  int (*dereg_mr)(Mr*);
  CompChannel* (*create_comp_channel)(Context*);
  int (*destroy_comp_channel)(CompChannel*);
  Cq* (*create_cq)(Context*, int num_entries, void* context, CompChannel*, int vector);
  int (*destroy_cq)(Cq*);
  int (*get_cq_event)(CompChannel*, Cq**, void** context);
  void (*ack_cq_events)(Cq*, unsigned num);
  Srq* (*create_srq)(Pd*, SrqInitAttr*);
  int (*destroy_srq)(Srq*);
  Qp* (*create_qp)(Pd*, QpInitAttr*);
  int (*modify_qp)(Qp*, QpAttr*, int mask);
  int (*destroy_qp)(Qp*);
  int (*get_async_event)(Context*, AsyncEvent*);
  void (*ack_async_event)(AsyncEvent*);
  int (*fork_init)();
  int (*is_fork_initialized)();
};

// Opened once per name and kept, with fork protection where the kernel needs it. Throws
// Error{kUnavailable} that names what to install.
const Api& load_api(const std::string& library);

#if defined(MOE_P2P_TESTING)
// Sets what load_api(kFakeLibrary) returns.
inline constexpr const char* kFakeLibrary = "fake";
void set_fake_api_for_tests(const Api* api) noexcept;
#endif

}  // namespace moe_p2p::provider::verbs
