#include "verbs_fake.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "verbs_fake_world.h"

namespace moe_p2p::test {

using namespace verbs_world;

namespace {

VerbsDevice* devices() {
  static VerbsDevice all[3] = {};
  static const bool named = [] {
    for (int i = 0; i < 3; ++i) {
      std::snprintf(all[i].name, sizeof all[i].name, "fake%d", i);
      std::snprintf(all[i].dev_name, sizeof all[i].dev_name, "uverbs%d", i);
    }
    return true;
  }();
  static_cast<void>(named);
  return all;
}
int index_of(const Context* context) { return static_cast<int>(context->device - devices()); }

// GID 0 is link-local, 1 RoCE v1, 2 RoCE v2 of the same IPv4 address.
Gid gid_of(int device, int index, const FakeVerbs::Faults& ports) {
  Gid gid{};
  if (ports.infiniband) {  // 0 without FLID, 1 with
    gid.raw[0] = 0xfe, gid.raw[1] = 0x80, gid.raw[15] = static_cast<uint8_t>(device + 1);
    gid.raw[5] = index == 1 ? ports.flid[device] : 0;
    gid.raw[7] = ports.subnet[device];
    return gid;
  }
  if (index == 0) {
    gid.raw[0] = 0xfe, gid.raw[1] = 0x80, gid.raw[15] = static_cast<uint8_t>(device + 1);
  } else {
    gid.raw[10] = gid.raw[11] = 0xff;
    gid.raw[12] = ports.gid_moved ? 10 : 127, gid.raw[15] = static_cast<uint8_t>(device + 1);
  }
  return gid;
}

// --- control ---

VerbsDevice** get_device_list(int* num) {
  auto** list = new VerbsDevice*[3]{devices(), devices() + 1, devices() + 2};
  *num = 3;
  return list;
}
void free_device_list(VerbsDevice** list) { delete[] list; }

Pd* alloc_parent_domain(Context* context, ParentDomainInitAttr* attr);
Td* alloc_td(Context*, TdInitAttr*);
int dealloc_td(Td* plain);

Context* open_device(VerbsDevice* device) {
  auto* context = new FakeContext{};
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_srq_recv = post_srq_recv;
  context->ops.post_send = post_send;
  context->async_fd = context->events.ends[0];
  static_assert(sizeof(FakeContext) == sizeof(ExtendedOps) + sizeof(Context) + sizeof(FakePipe));
  context->bytes = sizeof(ExtendedOps) + sizeof(Context);
  context->alloc_td = alloc_td;
  context->dealloc_td = dealloc_td;
  context->alloc_parent_domain = alloc_parent_domain;
  return locked([&](FakeVerbs& f, World& w) -> Context* {
    context->abi_compat = reinterpret_cast<void*>(f.faults.no_extended_ops ? 0 : ~uintptr_t{0});
    w.contexts.push_back(context);
    return context;
  });
}
int close_device(Context* context) {
  return locked([&](FakeVerbs&, World& w) {
    std::erase(w.contexts, context);
    delete static_cast<FakeContext*>(context);
    return 0;
  });
}
int query_device(Context*, DeviceAttr* attr) {
  *attr = {};
  attr->max_qp_wr = 1 << 14;
  attr->max_cqe = attr->max_srq_wr = 1 << 16;
  return locked([&](FakeVerbs& f, World&) {
    attr->max_qp_init_rd_atom = f.faults.max_reads_sent;
    attr->max_qp_rd_atom = f.faults.max_reads_served;
    return 0;
  });
}
FakeVerbs::Faults faults() {
  return locked([](FakeVerbs& f, World&) { return f.faults; });
}
uint16_t lid_of(int device) { return static_cast<uint16_t>(10 + device); }
int query_port(Context* context, uint8_t port, PortAttr* attr) {
  if (port != 1) return EINVAL;
  *attr = {};
  const int index = index_of(context);
  const FakeVerbs::Faults ports = faults();
  attr->state = index == 2 ? 1 : kPortActive;
  attr->active_mtu = 5;
  attr->gid_tbl_len = 8;
  attr->max_msg_sz = 1u << 31;
  attr->link_layer = ports.infiniband ? 1 : kLinkEthernet;
  attr->lid = lid_of(index);
  attr->flags = ports.needs_grh[index] ? kPortNeedsGrh : 0;
  return 0;
}
int query_gid(Context* context, uint8_t, int index, Gid* gid) {
  *gid = index < 3 ? gid_of(index_of(context), index, faults()) : Gid{};
  return 0;
}
ssize_t query_gid_table(Context* context, GidTableEntry* table, size_t, uint32_t, size_t) {
  const int device = index_of(context);
  const FakeVerbs::Faults ports = faults();
  const auto entry = [&](uint32_t i, uint32_t type) -> GidTableEntry {
    return {gid_of(device, static_cast<int>(i), ports), i, 1, type, 0};
  };
  if (ports.infiniband) {
    const uint32_t num = ports.flid[device] != 0 ? 2 : 1;
    for (uint32_t i = 0; i < num; ++i) table[i] = entry(i, 0);
    return num;
  }
  for (uint32_t i = 0; i < 3; ++i) table[i] = entry(i, i == 1 ? 1 : 2);
  return 3;
}

Pd* alloc_pd(Context* context) {
  return reinterpret_cast<Pd*>(new FakePd{static_cast<FakeContext*>(context)});
}
// The kernel destroys nothing that is in use.
template <typename T>
int destroy(T* object, bool in_use) {
  return locked([&](FakeVerbs& f, World&) {
    if (in_use) return ++f.counters.busy, EBUSY;
    delete object;
    return 0;
  });
}
FakePd& pd_of(Pd* pd) { return *reinterpret_cast<FakePd*>(pd); }
int dealloc_pd(Pd* plain) {
  FakePd& pd = pd_of(plain);
  if (pd.thread && pd.num_users == 0)
    locked([&](FakeVerbs&, World&) { return --pd.parent->num_users, --pd.thread->num_users; });
  return destroy(&pd, pd.num_users > 0);
}
Td* alloc_td(Context*, TdInitAttr*) {
  return locked([](FakeVerbs& f, World&) -> Td* {
    if (f.faults.no_thread_domains) return errno = EOPNOTSUPP, nullptr;
    ++f.counters.thread_domains;
    return reinterpret_cast<Td*>(new FakeTd);
  });
}
int dealloc_td(Td* plain) {
  auto* td = reinterpret_cast<FakeTd*>(plain);
  locked([](FakeVerbs& f, World&) { return --f.counters.thread_domains; });
  return destroy(td, td->num_users > 0);
}
Pd* alloc_parent_domain(Context* context, ParentDomainInitAttr* attr) {
  if (!attr->pd || attr->comp_mask != 0) return errno = EINVAL, nullptr;
  auto* pd = new FakePd{.context = static_cast<FakeContext*>(context),
                        .parent = &pd_of(attr->pd),
                        .thread = reinterpret_cast<FakeTd*>(attr->td)};
  return locked([&](FakeVerbs&, World&) {
    ++pd->parent->num_users;
    ++pd->thread->num_users;
    return reinterpret_cast<Pd*>(pd);
  });
}

// A peer may not get more rights than the owner has (ibv_reg_mr(3)).
Mr* add_region(Pd* pd, void* addr, size_t bytes, int access) {
  if ((access & kAccessRemoteWrite) && !(access & kAccessLocalWrite))
    return errno = EINVAL, nullptr;
  auto* mr = new FakeMr{};
  mr->access = access;
  mr->pd = pd;
  mr->addr = addr;
  mr->length = bytes;
  return locked([&](FakeVerbs&, World& w) -> Mr* {
    mr->lkey = mr->rkey = w.next_key += 0x100;
    w.regions[mr->rkey] = mr;
    ++pd_of(pd).num_users;
    return mr;
  });
}
Mr* fail_region(int error) {
  errno = error;
  return nullptr;
}
Mr* reg_mr_iova2(Pd* pd, void* addr, size_t bytes, uint64_t, unsigned access) {
  const int error = locked([](FakeVerbs& f, World&) {
    ++f.counters.address_regions;
    return f.faults.register_error;
  });
  return error != 0 ? fail_region(error) : add_region(pd, addr, bytes, static_cast<int>(access));
}
Mr* reg_mr(Pd* pd, void* addr, size_t bytes, int access) {
  if (access & kAccessRelaxedOrdering) return fail_region(EINVAL);
  return reg_mr_iova2(pd, addr, bytes, 0, static_cast<unsigned>(access));
}
Mr* reg_dmabuf_mr(Pd* pd, uint64_t, size_t bytes, uint64_t iova, int fd, int access) {
  const int error = locked([&](FakeVerbs& f, World&) {
    ++f.counters.dmabuf_regions;
    return fd < 0 ? EBADF : f.faults.dmabuf_error;
  });
  return error != 0 ? fail_region(error)
                    : add_region(pd, reinterpret_cast<void*>(iova), bytes, access);
}
int dereg_mr(Mr* mr) {
  return locked([&](FakeVerbs&, World& w) {
    let_through([&](const Accepted& write) { return write.key == mr->rkey; });
    w.regions.erase(mr->rkey);
    --pd_of(mr->pd).num_users;
    delete static_cast<FakeMr*>(mr);
    return 0;
  });
}

CompChannel* create_comp_channel(Context* context) {
  auto* channel = new FakeChannel{};
  channel->context = context;
  channel->fd = channel->events.ends[0];
  return channel;
}
int destroy_comp_channel(CompChannel* channel) {
  delete static_cast<FakeChannel*>(channel);
  return 0;
}
int queue_error() {
  return locked([](FakeVerbs& f, World&) { return errno = f.faults.queue_error; });
}
Cq* create_cq(Context* context, int num_entries, void*, CompChannel* channel, int) {
  if (queue_error() != 0) return nullptr;
  auto* cq = new FakeCq{};
  cq->context = context;
  cq->channel = channel;
  cq->cqe = num_entries;
  return locked([&](FakeVerbs&, World& w) -> Cq* {
    w.cqs.insert(cq);
    return cq;
  });
}
int destroy_cq(Cq* plain) {
  auto* cq = static_cast<FakeCq*>(plain);
  locked([&](FakeVerbs&, World& w) { return w.cqs.erase(cq); });
  return destroy(cq, !cq->users.empty());
}
int get_cq_event(CompChannel* channel, Cq**, void**) {
  char event = 0;
  return static_cast<FakeChannel*>(channel)->events.get(&event, 1);
}
void ack_cq_events(Cq*, unsigned) {}
Srq* create_srq(Pd* pd, SrqInitAttr* attr) {
  auto* srq = new FakeSrq{};
  srq->pd = pd;
  // mlx5, verbs.c: align_queue_size(max_wr + 1), one of which stays empty.
  srq->max_wr = attr->max_wr = std::bit_ceil(attr->max_wr + 1) - 1;
  return locked([&](FakeVerbs&, World&) -> Srq* {
    ++pd_of(pd).num_users;
    return srq;
  });
}
int destroy_srq(Srq* plain) {
  auto* srq = static_cast<FakeSrq*>(plain);
  locked([&](FakeVerbs&, World&) { return --pd_of(srq->pd).num_users; });
  return destroy(srq, srq->num_users > 0);
}

Qp* create_qp(Pd* pd, QpInitAttr* init) {
  if (queue_error() != 0) return nullptr;
  const int ms = locked([](FakeVerbs& f, World&) { return f.faults.make_queue_ms; });
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  auto* qp = new FakeQp{};
  qp->context = pd_of(pd).context;
  qp->pd = pd;
  qp->init = *init;
  qp->send_cq = init->send_cq;
  qp->recv_cq = init->recv_cq;
  qp->srq = init->srq;
  return locked([&](FakeVerbs& f, World& w) -> Qp* {
    if (f.counters.queue_pairs >= f.faults.max_queue_pairs) {
      delete qp;
      errno = ENOMEM;
      return nullptr;
    }
    qp->qp_num = w.next_qp++;
    w.qps[qp->qp_num] = qp;
    static_cast<FakeCq*>(qp->send_cq)->users.insert(qp);
    ++static_cast<FakeSrq*>(qp->srq)->num_users;
    ++pd_of(pd).num_users;
    ++f.counters.queue_pairs;
    ++f.counters.queue_pairs_made;
    qp->thread = pd_of(pd).thread;
    f.counters.queue_pairs_without_locks += qp->thread != nullptr;
    return qp;
  });
}
// Whether packets of this path arrive, which a real device finds out on the wire.
bool arrives(const FakeVerbs::Faults& ports, int from, const AhAttr& path) {
  const int to = path.dgid.raw[15] - 1;
  const bool routed = ports.subnet[from] != ports.subnet[to];
  const bool needs_grh = routed || ports.needs_grh[from] || ports.needs_grh[to];
  const int lid = routed && ports.flid[to] != 0 ? ports.flid[to] : lid_of(to);
  return (path.is_global || !needs_grh) && path.dlid == lid;
}
bool gid_exists(const Gid& gid, const FakeVerbs::Faults& ports) {
  for (int device = 0; device < 3; ++device)
    for (int i = 0; i < 3; ++i)
      if (std::memcmp(gid_of(device, i, ports).raw, gid.raw, 16) == 0) return true;
  return false;
}
int modify_qp(Qp* plain, QpAttr* attr, int mask) {
  return locked([&](FakeVerbs& f, World&) {
    auto& qp = *static_cast<FakeQp*>(plain);
    if (attr->qp_state == kQpError) {
      ++f.counters.broken;
      break_queue(f, qp);
      return 0;
    }
    if (attr->qp_state == kQpReset) {  // mlx5 forgets its completions (qp.c, mlx5_modify_qp)
      qp.state = kQpReset;
      qp.peer_qp = 0;
      purge(qp);
      return 0;
    }
    if (attr->qp_state != qp.state + 1) return EINVAL;  // reset, init, receive, send
    if (mask & kMaskPeerQp) {
      if (!gid_exists(attr->ah_attr.dgid, f.faults)) return ENETUNREACH;
      qp.lost = f.faults.infiniband && !arrives(f.faults, index_of(qp.context), attr->ah_attr);
      // Link-local addresses and others do not reach each other.
      if (!f.faults.infiniband &&
          (attr->ah_attr.dgid.raw[0] == 0xfe) != (attr->ah_attr.sgid_index == 0))
        return ENETUNREACH;
      qp.peer_qp = attr->dest_qp_num;
      f.paths.emplace_back(attr->ah_attr.sl, attr->ah_attr.traffic_class);
    }
    // mlx5 and others refuse more than the device has.
    if (attr->max_rd_atomic > f.faults.max_reads_sent ||
        attr->max_dest_rd_atomic > f.faults.max_reads_served)
      return EINVAL;
    if (mask & kMaskAccess) qp.access = attr->qp_access_flags;
    if (mask & kMaskMaxReads) qp.max_reads_sent = attr->max_rd_atomic;
    if (mask & kMaskMaxPeerReads) qp.max_reads_served = attr->max_dest_rd_atomic;
    qp.state = attr->qp_state;
    return 0;
  });
}
int destroy_qp(Qp* plain) {
  return locked([&](FakeVerbs& f, World& w) {
    auto* qp = static_cast<FakeQp*>(plain);
    purge(*qp);
    static_cast<FakeCq*>(qp->send_cq)->users.erase(qp);
    --static_cast<FakeSrq*>(qp->srq)->num_users;
    --pd_of(qp->pd).num_users;
    w.qps.erase(qp->qp_num);
    --f.counters.queue_pairs;
    delete qp;
    return 0;
  });
}
int get_async_event(Context* context, AsyncEvent* event) {
  return static_cast<FakeContext*>(context)->events.get(event, sizeof *event);
}
void ack_async_event(AsyncEvent*) {}

// ibv_fork_init(3): before any other call.
int fork_init() {
  return locked([](FakeVerbs& f, World& w) {
    if (f.faults.fork_error != 0) return f.faults.fork_error;
    if (f.counters.fork_inits > 0) return 0;
    if (!w.contexts.empty()) return EINVAL;
    return ++f.counters.fork_inits, 0;
  });
}
int is_fork_initialized() {
  return locked([](FakeVerbs& f, World&) -> int {
    if (!f.faults.old_kernel) return kForkUnneeded;
    return f.counters.fork_inits > 0 ? kForkEnabled : kForkDisabled;
  });
}

Api make_table() {
  return {.get_device_list = get_device_list,
          .free_device_list = free_device_list,
          .open_device = open_device,
          .close_device = close_device,
          .query_device = query_device,
          .query_port = query_port,
          .query_gid = query_gid,
          .query_gid_table = query_gid_table,
          .alloc_pd = alloc_pd,
          .dealloc_pd = dealloc_pd,
          .reg_mr = reg_mr,
          .reg_mr_iova2 = reg_mr_iova2,
          .reg_dmabuf_mr = reg_dmabuf_mr,
          .dereg_mr = dereg_mr,
          .create_comp_channel = create_comp_channel,
          .destroy_comp_channel = destroy_comp_channel,
          .create_cq = create_cq,
          .destroy_cq = destroy_cq,
          .get_cq_event = get_cq_event,
          .ack_cq_events = ack_cq_events,
          .create_srq = create_srq,
          .destroy_srq = destroy_srq,
          .create_qp = create_qp,
          .modify_qp = modify_qp,
          .destroy_qp = destroy_qp,
          .get_async_event = get_async_event,
          .ack_async_event = ack_async_event,
          .fork_init = fork_init,
          .is_fork_initialized = is_fork_initialized};
}

// There for every test program: the contract suite opens library=fake by its name.
[[maybe_unused]] const bool kInstalled = (FakeVerbs::install(), true);

}  // namespace

FakeVerbs& FakeVerbs::install(const std::string& old_sysfs) {
  static const Api table = make_table();
  static Api old = make_table();
  old.query_gid_table = nullptr;
  old.reg_mr_iova2 = nullptr;
  old.reg_dmabuf_mr = nullptr;
  old.is_fork_initialized = nullptr;
  set_fake_api_for_tests(old_sysfs.empty() ? &table : &old);
  for (int i = 0; i < 3 && !old_sysfs.empty(); ++i)
    std::snprintf(devices()[i].ibdev_path, sizeof devices()[i].ibdev_path, "%s/%s",
                  old_sysfs.c_str(), devices()[i].name);
  fake().locked([](FakeVerbs& f) {
    f.faults = {};
    const FakeVerbs::Counters before = std::exchange(f.counters, {});
    f.counters.queue_pairs = before.queue_pairs;
    f.counters.thread_domains = before.thread_domains;
  });
  return fake();
}

void FakeVerbs::raise(const char* device, int event_type) {
  locked([&](FakeVerbs&) {
    for (FakeContext* context : world().contexts) {
      if (std::string(context->device->name) != device) continue;
      AsyncEvent event{};
      event.type = event_type;
      for (const auto& [number, qp] : world().qps)  // ordered by number
        if (qp->context == context) event.element = qp;
      context->events.put(&event, sizeof event);
    }
  });
}

size_t FakeVerbs::let_through() {
  return locked(
      [](FakeVerbs&) { return verbs_world::let_through([](const Accepted&) { return true; }); });
}

Context* FakeVerbs::newest_context() {
  return test::locked([](FakeVerbs&, World& w) -> Context* {
    return w.contexts.empty() ? nullptr : w.contexts.back();
  });
}

}  // namespace moe_p2p::test
