// torch.ops.moe_p2p.engine_*: set-up of engines, their memory and their peers.
#include <cmath>
#include <cstring>

#include "base/letter.h"
#include "ops/engine_object.h"
#include "platform/ranges.h"
#include "platform/shm.h"
#include "platform/topology.h"
#include "provider/loopback/segment.h"
#include "provider/loopback/timed.h"

namespace moe_p2p::ops {

namespace {

int64_t engine_create(const std::string& provider, int64_t num_nics, const std::string& settings,
                      const std::string& label, const std::string& wait, int64_t proxy_cpu) {
  engine::EngineOptions options{
      .provider = provider, .num_nics = static_cast<int>(num_nics), .settings = settings};
  if (!label.empty()) options.label = label;
  const proxy::ProxyOptions proxy{.wait = wait_policy(wait), .cpu = static_cast<int>(proxy_cpu)};
  return engines().add(std::make_shared<EngineObject>(options, proxy));
}

void engine_close(int64_t engine) {
  if (const auto object = engines().take(engine)) object->close();
}

Tensor engine_address(int64_t engine) {
  return bytes_tensor(engines().get(engine)->engine().address().serialize());
}

int64_t engine_register(int64_t engine, const Tensor& memory, bool in_order) {
  return engines().get(engine)->register_memory(memory, in_order);
}

void engine_unregister(int64_t engine, int64_t memory) {
  engines().get(engine)->unregister_memory(memory);
}

std::string engine_why_no_fence(int64_t engine) {
  return engines().get(engine)->engine().why_no_fence();
}

// The number of the grant, which engine_descriptor and engine_unregister take as a memory's.
int64_t engine_grant(int64_t engine, int64_t memory) {
  return engines().get(engine)->grant(memory);
}

Tensor engine_descriptor(int64_t engine, int64_t memory) {
  const auto object = engines().get(engine);
  const auto named = object->naming();
  return bytes_tensor(object->engine().descriptor(object->memory(memory)).serialize());
}

int64_t engine_connect(int64_t engine, const Tensor& address, int64_t priority, int64_t tag) {
  return engines().get(engine)->connect(engine::EngineAddress::parse(bytes_of(address, "address")),
                                        priority, static_cast<uint64_t>(tag));
}

void engine_disconnect(int64_t engine, int64_t peer) { engines().get(engine)->disconnect(peer); }

void engine_sever(int64_t engine, int64_t tag, const std::vector<int64_t>& memories,
                  double timeout_s) {
  engines().get(engine)->sever(static_cast<uint64_t>(tag), memories, timeout_s);
}

int64_t engine_resolve(int64_t engine, const Tensor& descriptor, std::optional<int64_t> peer,
                       int64_t priority) {
  return engines().get(engine)->resolve(
      engine::MemoryDescriptor::parse(bytes_of(descriptor, "descriptor")), peer, priority);
}

int64_t engine_region_bytes(int64_t engine, int64_t region) {
  const auto object = engines().get(engine);
  const auto named = object->naming();
  return static_cast<int64_t>(object->region(region)->bytes);
}

// [nics, 7]: bytes written, writes posted, immediates sent, immediates received, connections
// refused, bytes read, reads posted.
Tensor tensor_of(std::span<const engine::NicCounters> counters) {
  Tensor tensor = make_tensor({static_cast<int64_t>(counters.size()), 7}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(tensor.mutable_data_ptr());
  for (const engine::NicCounters& nic : counters)
    for (const uint64_t value :
         {nic.bytes_written, nic.writes, nic.immediates_sent, nic.immediates_received,
          nic.connections_refused, nic.bytes_read, nic.reads})
      *out++ = static_cast<int64_t>(value);
  return tensor;
}

Tensor engine_counters(int64_t engine) {
  return tensor_of(engines().get(engine)->engine().counters());
}

std::tuple<Tensor, int64_t, Tensor> engine_record(int64_t engine, int64_t num_events) {
  std::vector<engine::NicCounters> counters;
  auto [events, overwritten] =
      events_from(engines().get(engine)->engine().record(checked_events(num_events), &counters));
  return {events, overwritten, tensor_of(counters)};
}

// Bytes of /dev/shm that one software NIC takes with so many peers connected to it.
int64_t software_nic_bytes(const std::string& settings, int64_t num_peers, bool timed) {
  namespace loopback = provider::loopback;
  const auto config =
      timed ? provider::loopback::parse_timed_config(settings) : loopback::parse_config(settings);
  return static_cast<int64_t>(
      loopback::Segment::reserved_bytes(config, static_cast<uint32_t>(num_peers)));
}

// The link model of a timed NIC: Gbit/s, then nanoseconds one way, of a post, and of a message.
std::vector<int64_t> timed_link(const std::string& settings) {
  const auto config = provider::loopback::parse_timed_config(settings);
  const auto ns = [](double us) { return std::llround(us * 1e3); };
  return {std::llround(config.gbps), ns(config.latency_us), ns(config.post_us),
          ns(config.message_us)};
}

int64_t remove_stale_memory() { return platform::SharedMemory::remove_stale(); }

void ranges_open(const std::vector<std::string>& files) { platform::use_ranges(files); }

void range_push(const std::string& name) {
  if (const auto* on = platform::range_functions.load(std::memory_order_acquire))
    on->push(name.c_str());
}

void range_pop() {
  if (const auto* on = platform::range_functions.load(std::memory_order_acquire)) on->pop();
}

std::string letter() { return base::letter_text(base::letter()); }

std::string host_identity() { return platform::host_identity(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("engine_create", TORCH_BOX(&engine_create));
  m.impl("engine_close", TORCH_BOX(&engine_close));
  m.impl("engine_address", TORCH_BOX(&engine_address));
  m.impl("engine_register", TORCH_BOX(&engine_register));
  m.impl("engine_unregister", TORCH_BOX(&engine_unregister));
  m.impl("engine_why_no_fence", TORCH_BOX(&engine_why_no_fence));
  m.impl("engine_grant", TORCH_BOX(&engine_grant));
  m.impl("engine_descriptor", TORCH_BOX(&engine_descriptor));
  m.impl("engine_connect", TORCH_BOX(&engine_connect));
  m.impl("engine_disconnect", TORCH_BOX(&engine_disconnect));
  m.impl("engine_sever", TORCH_BOX(&engine_sever));
  m.impl("engine_resolve", TORCH_BOX(&engine_resolve));
  m.impl("engine_region_bytes", TORCH_BOX(&engine_region_bytes));
  m.impl("engine_counters", TORCH_BOX(&engine_counters));
  m.impl("engine_record", TORCH_BOX(&engine_record));
  m.impl("timed_link", TORCH_BOX(&timed_link));
  m.impl("software_nic_bytes", TORCH_BOX(&software_nic_bytes));
  m.impl("remove_stale_memory", TORCH_BOX(&remove_stale_memory));
  m.impl("host_identity", TORCH_BOX(&host_identity));
  m.impl("letter", TORCH_BOX(&letter));
  m.impl("ranges_open", TORCH_BOX(&ranges_open));
  m.impl("range_push", TORCH_BOX(&range_push));
  m.impl("range_pop", TORCH_BOX(&range_pop));
}

}  // namespace moe_p2p::ops
