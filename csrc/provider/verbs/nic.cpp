#include "provider/verbs/nic.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "base/log.h"
#include "provider/locked_memory.h"
#include "provider/verbs/gid.h"

namespace moe_p2p::provider::verbs {

using base::Code;

namespace {

// Completions beyond one per write in flight, one per marker (a lane has one only while it has
// writes in flight) and one per receive: none is expected. Too small: the completion queue
// overruns, which kills every queue pair of the NIC.
constexpr int kSpareEntries = 64;
// Reads that a queue pair has under way; devices allow 16 (mlx5) to 128 (rxe). Too small: small
// reads wait for round trips.
constexpr int kMaxReads = 128;

bool port_active(const Api& api, VerbsDevice* device, uint8_t port) {
  const Owned<Context> context(api.open_device(device), api.close_device);
  PortAttr attr{};
  return context && api.query_port(context.get(), port, &attr) == 0 && attr.state == kPortActive;
}

struct DeviceList {
  explicit DeviceList(const Api& table) : api(table), devices(api.get_device_list(&num)) {}
  ~DeviceList() {
    if (devices) api.free_device_list(devices);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  std::vector<VerbsDevice*> sorted() const {
    std::vector<VerbsDevice*> all(devices, devices + (devices ? num : 0));
    std::ranges::sort(all, [](auto* a, auto* b) { return std::strcmp(a->name, b->name) < 0; });
    return all;
  }
  const Api& api;
  int num = 0;
  VerbsDevice** devices;
};

Owned<Context> open_device(const Api& api, const Config& config, int nic) {
  const DeviceList list(api);
  std::vector<VerbsDevice*> fitting;
  std::string names;
  for (VerbsDevice* device : list.sorted()) {
    names += base::concat(names.empty() ? "" : ", ", device->name);
    if (config.devices.empty() && port_active(api, device, config.port)) fitting.push_back(device);
  }
  const std::string present = names.empty() ? "no RDMA devices" : "the RDMA devices " + names;
  if (!config.devices.empty()) {
    const std::string& wanted = config.devices[static_cast<size_t>(nic) % config.devices.size()];
    for (VerbsDevice* device : list.sorted())
      if (wanted == device->name) fitting = std::vector(static_cast<size_t>(nic) + 1, device);
    MOE_P2P_CHECK(!fitting.empty(), Code::kUnavailable, "there is no RDMA device ", wanted,
                  "; this machine has ", present, ". Are /dev/infiniband and its driver there?");
  }
  MOE_P2P_CHECK(!fitting.empty(), Code::kUnavailable, "no RDMA device has an active port ",
                int{config.port}, "; this machine has ", present,
                ". Are the links up (rdma link), and is /dev/infiniband in this container?");
  VerbsDevice* device = fitting[static_cast<size_t>(nic) % fitting.size()];
  Owned<Context> context(api.open_device(device), api.close_device);
  MOE_P2P_CHECK(context, Code::kUnavailable, "opening RDMA device ", device->name, ": ",
                error_text(errno), "; may this user open /dev/infiniband/", device->dev_name, "?");
  return context;
}

// Without query_gid_table the type is found in sysfs only.
std::vector<GidTableEntry> read_gids(const Api& api, Context* context, uint8_t port, int num) {
  std::vector<GidTableEntry> table(static_cast<size_t>(std::max(num, 1)));
  if (api.query_gid_table) {
    const ssize_t got =
        api.query_gid_table(context, table.data(), table.size(), 0, sizeof(GidTableEntry));
    table.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    std::erase_if(table, [&](const auto& entry) { return entry.port != port; });
    return table;
  }
  table.clear();
  for (int index = 0; index < std::min(num, 256); ++index) {
    GidTableEntry entry{
        .gid = {}, .index = static_cast<uint32_t>(index), .port = port, .type = 0, .ifindex = 0};
    if (api.query_gid(context, port, index, &entry.gid) != 0) break;
    if (entry.gid.words[0] == 0 && entry.gid.words[1] == 0) continue;
    std::string type;
    std::getline(std::ifstream(base::concat(context->device->ibdev_path, "/ports/", int{port},
                                            "/gid_attrs/types/", index)),
                 type);
    entry.type = type == "RoCE v2" ? 2 : 1;
    table.push_back(entry);
  }
  return table;
}

void check_limit(const std::string& name, const char* setting, uint64_t wanted, int limit) {
  MOE_P2P_CHECK(wanted <= static_cast<uint64_t>(std::max(limit, 0)), Code::kResourceExhausted, name,
                ": ", wanted, " entries are needed and the device has at most ", limit, "; lower ",
                setting);
}

}  // namespace

std::string error_text(int error) {
  return base::concat(std::strerror(error), " (", error, ")", locked_memory_hint(error));
}

Nic::Nic(const Config& settings, int nic, bool with_events)
    : config(settings),
      api(load_api(config.library)),
      context(open_device(api, config, nic)),
      pd(nullptr, api.dealloc_pd),
      thread(nullptr, nullptr),
      sending(nullptr, api.dealloc_pd),
      channel(nullptr, api.destroy_comp_channel),
      cq(nullptr, api.destroy_cq),
      srq(nullptr, api.destroy_srq) {
  open_port();
  make_domains();
  make_queues(with_events);
}

std::string Nic::name() const {
  return base::concat(context->device->name, " port ", int{config.port});
}

void Nic::open_port() {
  const int error = api.query_port(context.get(), config.port, &port);
  MOE_P2P_CHECK(error == 0, Code::kUnavailable, name(),
                ": asking for the port: ", error_text(error), "; does the device have it?");
  MOE_P2P_CHECK(port.state == kPortActive, Code::kUnavailable, name(), ": the link is down (state ",
                port.state, "); check cable, switch and `rdma link`");
  ethernet = port.link_layer == kLinkEthernet;
  gid = choose_gid(read_gids(api, context.get(), config.port, port.gid_tbl_len), config, ethernet,
                   name());
  // Non-blocking: the control thread reads events and must not wait for one.
  fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
}

void Nic::make_domains() {
  pd.reset(api.alloc_pd(context.get()));
  MOE_P2P_CHECK(pd, Code::kUnavailable, name(),
                ": making a protection domain: ", error_text(errno));
  const ExtendedOps* ops = extended_ops(context.get());
  if (!ops || !ops->alloc_td || !ops->dealloc_td || !ops->alloc_parent_domain) return;
  TdInitAttr none{};
  thread = {ops->alloc_td(context.get(), &none), ops->dealloc_td};
  if (!thread) return;  // the device has none, or none is left: queue pairs keep their locks
  ParentDomainInitAttr attr{.pd = pd.get(), .td = thread.get(), .comp_mask = 0, .unused = {}};
  sending.reset(ops->alloc_parent_domain(context.get(), &attr));
}

void Nic::make_queues(bool with_events) {
  DeviceAttr attr{};
  const int error = api.query_device(context.get(), &attr);
  MOE_P2P_CHECK(error == 0, Code::kUnavailable, name(), ": asking for limits: ", error_text(error));
  const auto reads = [](int limit) {
    return static_cast<uint8_t>(std::clamp(limit, 0, kMaxReads));
  };
  max_reads_sent = reads(attr.max_qp_init_rd_atom);
  max_reads_served = reads(attr.max_qp_rd_atom);
  check_limit(name(), "max_in_flight", config.max_in_flight + 1, attr.max_qp_wr);
  num_receives =
      std::min<uint32_t>(config.num_receives, static_cast<uint32_t>(std::max(attr.max_srq_wr, 1)));
  SrqInitAttr receive{.srq_context = nullptr, .max_wr = num_receives, .max_sge = 1, .srq_limit = 0};
  srq.reset(api.create_srq(pd.get(), &receive));
  MOE_P2P_CHECK(srq, Code::kResourceExhausted, name(), ": making a receive queue of ", num_receives,
                " entries: ", error_text(errno));
  if (with_events) {
    channel.reset(api.create_comp_channel(context.get()));
    MOE_P2P_CHECK(channel, Code::kResourceExhausted, name(),
                  ": making an event channel: ", error_text(errno));
    fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
  }
  // The driver may have made the receive queue larger, and each entry may be in use.
  const int entries = static_cast<int>(std::max(receive.max_wr, num_receives)) +
                      2 * static_cast<int>(config.max_in_flight) + kSpareEntries;
  check_limit(name(), "receives or max_in_flight", static_cast<uint64_t>(entries), attr.max_cqe);
  cq.reset(api.create_cq(context.get(), entries, nullptr, channel.get(), 0));
  MOE_P2P_CHECK(cq, Code::kResourceExhausted, name(), ": making a completion queue of ", entries,
                " entries: ", error_text(errno));
}

}  // namespace moe_p2p::provider::verbs
