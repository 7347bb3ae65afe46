#include "provider/verbs/api.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/log.h"

namespace moe_p2p::provider::verbs {

using base::Code;

namespace {

#if defined(MOE_P2P_TESTING)
const Api* fake_api = nullptr;
#endif

// The library still carries an older interface under the same names, which a plain dlsym may give.
template <typename Function>
void load_if_there(void* library, const char* name, Function& function) {
  void* symbol = dlvsym(library, name, "IBVERBS_1.1");
  function = reinterpret_cast<Function>(symbol ? symbol : dlsym(library, name));
}

template <typename Function>
void load(void* library, const char* name, Function& function) {
  load_if_there(library, name, function);
  MOE_P2P_CHECK(function, Code::kUnavailable, "libibverbs has no ", name,
                "; a version of rdma-core from 2017 or later is needed");
}

Api open_library(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  MOE_P2P_CHECK(library, Code::kUnavailable, "the RDMA library cannot be opened: ", dlerror(),
                "; install it (Debian, Ubuntu: libibverbs1 ibverbs-providers; RHEL: libibverbs), "
                "or choose another transport");
  Api api{};
  load(library, "ibv_get_device_list", api.get_device_list);
  load(library, "ibv_free_device_list", api.free_device_list);
  load(library, "ibv_open_device", api.open_device);
  load(library, "ibv_close_device", api.close_device);
  load(library, "ibv_query_device", api.query_device);
  load(library, "ibv_query_port", api.query_port);
  load(library, "ibv_query_gid", api.query_gid);
  load_if_there(library, "_ibv_query_gid_table", api.query_gid_table);
  load(library, "ibv_alloc_pd", api.alloc_pd);
  load(library, "ibv_dealloc_pd", api.dealloc_pd);
  load(library, "ibv_reg_mr", api.reg_mr);
  load_if_there(library, "ibv_reg_mr_iova2", api.reg_mr_iova2);
  load_if_there(library, "ibv_reg_dmabuf_mr", api.reg_dmabuf_mr);
  load(library, "ibv_dereg_mr", api.dereg_mr);
  load(library, "ibv_create_comp_channel", api.create_comp_channel);
  load(library, "ibv_destroy_comp_channel", api.destroy_comp_channel);
  load(library, "ibv_create_cq", api.create_cq);
  load(library, "ibv_destroy_cq", api.destroy_cq);
  load(library, "ibv_get_cq_event", api.get_cq_event);
  load(library, "ibv_ack_cq_events", api.ack_cq_events);
  load(library, "ibv_create_srq", api.create_srq);
  load(library, "ibv_destroy_srq", api.destroy_srq);
  load(library, "ibv_create_qp", api.create_qp);
  load(library, "ibv_modify_qp", api.modify_qp);
  load(library, "ibv_destroy_qp", api.destroy_qp);
  load(library, "ibv_get_async_event", api.get_async_event);
  load(library, "ibv_ack_async_event", api.ack_async_event);
  return api;
}

}  // namespace

// Never closed: drivers of the library keep threads and fork handlers.
const Api& load_api(const std::string& library) {
#if defined(MOE_P2P_TESTING)
  if (library == kFakeLibrary && fake_api) return *fake_api;
#endif
  static std::mutex mutex;
  static std::map<std::string, Api> loaded;
  const std::lock_guard lock(mutex);
  const auto found = loaded.find(library);
  if (found != loaded.end()) return found->second;
  return loaded.emplace(library, open_library(library)).first->second;
}

#if defined(MOE_P2P_TESTING)
void set_fake_api_for_tests(const Api* api) noexcept { fake_api = api; }
#endif

}  // namespace moe_p2p::provider::verbs
