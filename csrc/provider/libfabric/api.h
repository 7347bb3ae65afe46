// libfabric's binary interface, as far as this folder uses it. The library is opened with dlopen,
// so that the package builds and loads where it is not installed; six functions are symbols,
// everything else is reached through the tables of functions that its objects carry. Layouts follow
// <rdma/fabric.h> 1.17; later releases only append. tests/cpp/libfabric_abi_test.cpp compares them
// with the header where it is installed. Functions and fields that this folder does not use have no
// type.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace moe_p2p::provider::libfabric {

using Unused = void (*)();

constexpr uint32_t make_version(uint32_t major, uint32_t minor) noexcept {
  return major << 16 | minor;
}

// Capabilities and flags.
inline constexpr uint64_t kMsg = 1ull << 1, kRma = 1ull << 2, kRead = 1ull << 8, kWrite = 1ull << 9,
                          kRecv = 1ull << 10, kTransmit = 1ull << 11, kRemoteRead = 1ull << 12,
                          kRemoteWrite = 1ull << 13, kRemoteCqData = 1ull << 17, kMore = 1ull << 18,
                          kCompletion = 1ull << 24, kDeliveryComplete = 1ull << 28,
                          kMrDmabuf = 1ull << 40, kHmem = 1ull << 47;
// Modes.
inline constexpr uint64_t kContext = 1ull << 59, kContext2 = 1ull << 52;
// Memory registration modes.
inline constexpr int kMrLocal = 1 << 2, kMrVirtAddr = 1 << 4, kMrAllocated = 1 << 5,
                     kMrProvKey = 1 << 6, kMrEndpoint = 1 << 9, kMrHmem = 1 << 10;
// Members of enumerations.
inline constexpr int kAvTable = 2, kProgressManual = 2, kThreadDomain = 3, kThreadCompletion = 4,
                     kEndpointRdm = 3, kCqFormatData = 3, kWaitNone = 0, kControlEnable = 6,
                     kHmemSystem = 0, kHmemCuda = 1;
// Traffic classes of endpoints.
inline constexpr uint32_t kBestEffort = 0x200, kLowLatency = 0x201, kBulkData = 0x203,
                          kScavenger = 0x204;
// Options of endpoints: each a bool. The last is EFA's own (fi_ext.h).
inline constexpr int kOptEndpoint = 0, kOptCudaApiPermitted = 10, kOptSharedMemoryPermitted = 11,
                     kOptEfaEmulatedWrite = -(0xefa << 16) + 2;
inline constexpr uint32_t kFormatSockaddrIn = 2, kFormatSockaddrIn6 = 3;
inline constexpr uint64_t kAddressNotAvailable = ~uint64_t{0};
// Beyond errno.
inline constexpr int kErrorAvailable = 259, kErrorNoKey = 266;

struct Fid;
struct FidOps {
  size_t size;
  int (*close)(Fid* fid);
  int (*bind)(Fid* fid, Fid* to, uint64_t flags);
  int (*control)(Fid* fid, int command, void* argument);
};
struct Fid {
  size_t fclass;
  void* context;
  FidOps* ops;
};

struct TxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t inject_size, size, iov_limit, rma_iov_limit;
  uint32_t tclass;
};
struct RxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t total_buffered_recv, size, iov_limit;
};
struct EpAttr {
  int type;
  uint32_t protocol, protocol_version;
  size_t max_msg_size;
};
struct DomainAttr {
  void* domain;
  char* name;
  int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
  size_t mr_key_size, cq_data_size;
};
struct FabricAttr {
  void* fabric;
  char* name;
  char* prov_name;
  uint32_t prov_version, api_version;
};
struct Info {
  Info* next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void* src_addr;
  void* dest_addr;
  Fid* handle;
  TxAttr* tx_attr;
  RxAttr* rx_attr;
  EpAttr* ep_attr;
  DomainAttr* domain_attr;
  FabricAttr* fabric_attr;
  void* nic;
};

struct AvAttr {
  int type;
  int rx_ctx_bits;
  size_t count, ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};
struct AddressVector;
struct AvOps {
  size_t size;
  int (*insert)(AddressVector* av, const void* address, size_t count, uint64_t* fi_addr,
                uint64_t flags, void* context);
  Unused insertsvc, insertsym;
  int (*remove)(AddressVector* av, uint64_t* fi_addr, size_t count, uint64_t flags);
};
struct AddressVector {
  Fid fid;
  AvOps* ops;
};

struct CqAttr {
  size_t size;
  uint64_t flags;
  int format, wait_obj, signaling_vector, wait_cond;
  void* wait_set;
};
struct CqEntry {  // kCqFormatData
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data;
};
struct CqError {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void* err_data;
  size_t err_data_size;
  uint64_t later[4];  // space for what later releases append
};
struct CompletionQueue;
struct CqOps {
  size_t size;
  ssize_t (*read)(CompletionQueue* cq, void* entries, size_t count);
  Unused readfrom;
  ssize_t (*readerr)(CompletionQueue* cq, CqError* error, uint64_t flags);
  Unused sread, sreadfrom, signal;
  const char* (*strerror)(CompletionQueue* cq, int prov_errno, const void* err_data, char* text,
                          size_t length);
};
struct CompletionQueue {
  Fid fid;
  CqOps* ops;
};

struct MemoryRegion {
  Fid fid;
  void* mem_desc;
  uint64_t key;
};
struct Dmabuf {
  int fd;
  uint64_t offset;
  size_t len;
  void* base_addr;
};
struct MrAttr {
  const void* memory;  // iovec, or Dmabuf with kMrDmabuf
  size_t iov_count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  int iface;
  uint64_t device;
  uint64_t later[4];  // zero: space for what later releases append
};
struct MrOps {
  size_t size;
  Unused reg, regv;
  int (*regattr)(Fid* domain, const MrAttr* attr, uint64_t flags, MemoryRegion** region);
};

struct EndpointOps {
  size_t size;
  Unused cancel;
  int (*getopt)(Fid* endpoint, int level, int option, void* value, size_t* length);
  int (*setopt)(Fid* endpoint, int level, int option, const void* value, size_t length);
};
struct CmOps {
  size_t size;
  Unused setname;
  int (*getname)(Fid* endpoint, void* address, size_t* length);
};
struct RmaIov {
  uint64_t addr;
  size_t len;
  uint64_t key;
};
struct RmaMessage {
  const iovec* msg_iov;
  void** desc;
  size_t iov_count;
  uint64_t addr;
  const RmaIov* rma_iov;
  size_t rma_iov_count;
  void* context;
  uint64_t data;
};
struct Endpoint;
struct RmaOps {
  size_t size;
  Unused read, readv;
  ssize_t (*readmsg)(Endpoint* endpoint, const RmaMessage* message, uint64_t flags);
  Unused write, writev;
  ssize_t (*writemsg)(Endpoint* endpoint, const RmaMessage* message, uint64_t flags);
};
struct Endpoint {
  Fid fid;
  EndpointOps* ops;
  CmOps* cm;
  void* msg;
  RmaOps* rma;
};

struct AccessDomain;
struct DomainOps {
  size_t size;
  int (*av_open)(AccessDomain* domain, AvAttr* attr, AddressVector** av, void* context);
  int (*cq_open)(AccessDomain* domain, CqAttr* attr, CompletionQueue** cq, void* context);
  int (*endpoint)(AccessDomain* domain, Info* info, Endpoint** endpoint, void* context);
};
struct AccessDomain {
  Fid fid;
  DomainOps* ops;
  MrOps* mr;
};
struct Fabric;
struct FabricOps {
  size_t size;
  int (*domain)(Fabric* fabric, Info* info, AccessDomain** domain, void* context);
};
struct Fabric {
  Fid fid;
  FabricOps* ops;
};

// Space of a request that providers may use while it is in flight (fi_context2).
struct Context {
  void* internal[8];
};

struct Library {
  int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags,
                 const Info* hints, Info** info);
  void (*freeinfo)(Info* info);
  Info* (*dupinfo)(const Info* info);
  int (*fabric)(FabricAttr* attr, Fabric** fabric, void* context);
  const char* (*strerror)(int error);
  uint32_t (*version)();
};

// Opens `file`, or, when it is empty, the machine's own library or AWS's installer's, for EFA the
// latter first: distributions carry releases without EFA's RDMA writes. The process has one
// library: another file later is an Error{kInvalidArgument}. Throws Error{kUnavailable} that tells
// how to install it.
void open_library(const std::string& file, bool for_efa);
// Returns the open library; opens the machine's own when none is open.
const Library& library();

// "Connection refused (111)"; takes either sign.
std::string error_text(int64_t error);

#if defined(MOE_P2P_TESTING)
// Replaces the library from now on; null restores the real one.
void set_library_for_tests(const Library* library) noexcept;
#endif

// The deleter of every object with a Fid.
struct FidCloser {
  template <typename T>
  void operator()(T* object) const noexcept {
    object->fid.ops->close(&object->fid);
  }
};
template <typename T>
using Owned = std::unique_ptr<T, FidCloser>;

struct InfoFreer {
  void operator()(Info* info) const noexcept { library().freeinfo(info); }
};
using OwnedInfo = std::unique_ptr<Info, InfoFreer>;

}  // namespace moe_p2p::provider::libfabric
