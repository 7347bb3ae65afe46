#include "provider/verbs/api.h"

#include <cstring>
#include <map>
#include <mutex>

#include "base/log.h"
#include "platform/library.h"

namespace moe_p2p::provider::verbs {

namespace {

#if defined(MOE_P2P_TESTING)
const Api* fake_api = nullptr;
#endif

Api open_library(const std::string& file) {
  // The version of its symbols: the library also has an older interface under the same names.
  const platform::Library library(
      {file},
      {.what = "the RDMA library",
       .install = "install it (Debian, Ubuntu: libibverbs1 ibverbs-providers; RHEL: libibverbs), "
                  "or choose another transport",
       .name = "libibverbs",
       .needed = "a version of rdma-core from 2017 or later is needed"},
      "IBVERBS_1.1");
  Api api{};
  library.load("ibv_get_device_list", api.get_device_list);
  library.load("ibv_free_device_list", api.free_device_list);
  library.load("ibv_open_device", api.open_device);
  library.load("ibv_close_device", api.close_device);
  library.load("ibv_query_device", api.query_device);
  library.load("ibv_query_port", api.query_port);
  library.load("ibv_query_gid", api.query_gid);
  library.load_if_there("_ibv_query_gid_table", api.query_gid_table);
  library.load("ibv_alloc_pd", api.alloc_pd);
  library.load("ibv_dealloc_pd", api.dealloc_pd);
  library.load("ibv_reg_mr", api.reg_mr);
  library.load_if_there("ibv_reg_mr_iova2", api.reg_mr_iova2);
  library.load_if_there("ibv_reg_dmabuf_mr", api.reg_dmabuf_mr);
  library.load("ibv_dereg_mr", api.dereg_mr);
  library.load("ibv_create_comp_channel", api.create_comp_channel);
  library.load("ibv_destroy_comp_channel", api.destroy_comp_channel);
  library.load("ibv_create_cq", api.create_cq);
  library.load("ibv_destroy_cq", api.destroy_cq);
  library.load("ibv_get_cq_event", api.get_cq_event);
  library.load("ibv_ack_cq_events", api.ack_cq_events);
  library.load("ibv_create_srq", api.create_srq);
  library.load("ibv_destroy_srq", api.destroy_srq);
  library.load("ibv_create_qp", api.create_qp);
  library.load("ibv_modify_qp", api.modify_qp);
  library.load("ibv_destroy_qp", api.destroy_qp);
  library.load("ibv_get_async_event", api.get_async_event);
  library.load("ibv_ack_async_event", api.ack_async_event);
  library.load("ibv_fork_init", api.fork_init);
  library.load_if_there("ibv_is_fork_initialized", api.is_fork_initialized);
  return api;
}

// Before 5.12 a fork makes the parent's next write to private memory move the page, while the NIC
// goes on writing the old one. libibverbs then keeps registered pages from children (madvise). It
// must be told before the first device is opened.
void protect_from_forks(const Api& api) {
  const int status = api.is_fork_initialized ? api.is_fork_initialized() : kForkDisabled;
  const int error = status == kForkDisabled ? api.fork_init() : 0;
  if (error != 0)
    MOE_P2P_LOG(base::LogLevel::kWarning, "ibv_fork_init: ", std::strerror(error),
                ": after a fork of this process NICs may write to pages of registered host memory "
                "that it has no longer; start children before the first engine, or by spawn");
}

}  // namespace

const Api& load_api(const std::string& library) {
#if defined(MOE_P2P_TESTING)
  if (library == kFakeLibrary && fake_api) return protect_from_forks(*fake_api), *fake_api;
#endif
  static std::mutex mutex;
  static std::map<std::string, Api> loaded;
  const std::lock_guard lock(mutex);
  const auto found = loaded.find(library);
  if (found != loaded.end()) return found->second;
  const Api& api = loaded.emplace(library, open_library(library)).first->second;
  protect_from_forks(api);
  return api;
}

const ExtendedOps* extended_ops(const Context* context) noexcept {
  if (reinterpret_cast<uintptr_t>(context->abi_compat) != ~uintptr_t{0}) return nullptr;
  const ExtendedOps* ops = reinterpret_cast<const ExtendedOps*>(context) - 1;
  return ops->bytes < sizeof(ExtendedOps) + sizeof(Context) ? nullptr : ops;
}

#if defined(MOE_P2P_TESTING)
void set_fake_api_for_tests(const Api* api) noexcept { fake_api = api; }
#endif

}  // namespace moe_p2p::provider::verbs
