// The data path of the fake of EFA: posting, polling, and what the NICs do in between.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "fake_driver.h"
#include "fake_fabric_world.h"

namespace moe_p2p::test::fabric_world {

namespace {

// efa_io_comp_status of the device (efa_errno.h), with the numbers of to_fi_errno() there.
constexpr int kBadLocalKey = 5, kBadAddress = 7, kUnresponsive = 13;

constexpr size_t kMaxEarly = 16;  // writes kept back until hands are shaken

bool one_in(FakeDomain& domain, uint32_t n) { return domain.random() % n == 0; }

void report(const Operation& op, int err, int prov_errno) {
  const uint64_t kind = kRma | (op.is_read ? kRead : kWrite);
  --op.source->num_outstanding;
  if (err == 0) {
    op.source->cq->entries.push_back({op.context, kind, 0, nullptr, 0});
    return;
  }
  ++network().counts.failed;
  CqError error{};
  error.op_context = op.context;
  error.flags = kind;
  error.err = err;
  error.prov_errno = prov_errno;
  op.source->cq->errors.push_back(error);
}

void carry_out(const Operation& op) {
  Network& n = network();
  if (const int err = std::exchange(n.next_err, 0)) return report(op, err, n.next_prov_errno);
  const auto target = n.endpoints.find(op.target);
  if (target == n.endpoints.end()) return report(op, ECONNABORTED, kUnresponsive);
  const auto& local = op.source->domain->regions;
  const bool has_local = std::ranges::any_of(
      local, [&](const auto& entry) { return entry.second == op.local_region; });
  if (!has_local || !(op.local_region->access & (op.is_read ? kRead : kWrite)))
    return report(op, EINVAL, kBadLocalKey);
  const auto& regions = target->second->domain->regions;
  const auto found = regions.find(op.remote.key);
  if (found == regions.end() ||
      !(found->second->access & (op.is_read ? kRemoteRead : kRemoteWrite)))
    return report(op, EINVAL, kBadAddress);
  const auto base = reinterpret_cast<uint64_t>(found->second->data);
  const uint64_t offset = op.remote.addr - base;
  if (op.remote.addr < base || offset > found->second->bytes ||
      op.bytes > found->second->bytes - offset)
    return report(op, EINVAL, kBadAddress);
  std::byte* const remote = found->second->data + offset;
  // efa_rdm_rma_should_write_using_rdma() (efa_rdm_rma.h): else packets, which the target's polling
  // thread copies with memcpy.
  const bool alike = !op.has_imm || op.source->unsolicited == target->second->unsolicited;
  if (!op.is_read && (!alike || op.source->emulates || target->second->emulates)) {
    ++n.counts.emulated;
    if (found->second->is_foreign) std::abort();
  }
  FakeDriver::write_by_nic(op.is_read ? op.local : remote, op.is_read ? remote : op.local,
                           op.bytes);
  if (op.has_imm)
    target->second->cq->entries.push_back(
        {nullptr, kRma | kRemoteWrite | kRemoteCqData, 0, nullptr, op.imm});
  report(op, 0, 0);
}

bool is_silent(uint64_t target) {
  const auto found = network().endpoints.find(target);
  return found != network().endpoints.end() && found->second->domain->name == network().silent;
}

void advance(FakeDomain& domain) {
  auto& wire = network().wire;
  for (size_t i = 0; i < wire.size();) {
    if (is_silent(wire[i].target)) {
      ++i;
      continue;
    }
    if (wire[i].delay > 0) {
      --wire[i++].delay;
      continue;
    }
    const Operation op = wire[i];
    wire[i] = wire.back();
    wire.pop_back();
    carry_out(op);
  }
  std::ranges::shuffle(wire, domain.random);
}

// --- posting ---

void ring(FakeEndpoint& endpoint) {
  auto& wire = network().wire;
  wire.insert(wire.end(), endpoint.unrung.begin(), endpoint.unrung.end());
  endpoint.unrung.clear();
}

void give_to_nic(FakeEndpoint& endpoint, const Operation& op) {
  endpoint.unrung.push_back(op);
  if (!op.more) ring(endpoint);
}

ssize_t refuse(FakeEndpoint& endpoint) {
  endpoint.cut = true;
  ++network().counts.refused;
  return -EAGAIN;
}

bool is_ready(FakeEndpoint& endpoint, uint64_t target) {
  const auto [peer, is_new] = endpoint.handshakes.try_emplace(target, 0);
  if (is_new) peer->second = endpoint.domain->random() % 20;
  return peer->second == 0;
}

ssize_t post(Endpoint* object, const RmaMessage* message, uint64_t flags, bool is_read) {
  auto& endpoint = *static_cast<FakeEndpoint*>(object);
  FakeDomain& domain = *endpoint.domain;
  const Call call(domain);
  Network& n = network();
  const uint64_t wanted = kCompletion | (is_read ? 0 : kDeliveryComplete);
  if (is_read && (flags & (kRemoteCqData | kDeliveryComplete))) return -EINVAL;
  if (message->iov_count != 1 || message->rma_iov_count != 1 || (flags & wanted) != wanted ||
      message->data >> 32 != 0 || message->addr >= endpoint.av->ids.size() || !message->desc ||
      !message->desc[0])
    return -EINVAL;
  const uint64_t target = endpoint.av->ids[message->addr];
  if (target == 0) return -EINVAL;
  // CUDA refuses SYNC_MEMOPS for memory of cuMemCreate (efa_rdm_ep.h:467, ofiwg/libfabric#12853).
  auto& local = *static_cast<FakeRegion*>(message->desc[0]);
  if (endpoint.cuda_permitted && local.needs_sync) return -EINVAL;
  // 1.20 refuses until hands are shaken, later releases keep up to 16 writes back and say that they
  // have them (efa_rdm_rma.c:360, efa_rdm_ep_utils.c:1099 and efa_rdm_ep.h:35 of 2.5.1): what was
  // posted before with FI_MORE is not rung by that, and they are posted later with the FI_MORE that
  // they came with (efa_rdm_ope_process_queued_ope, until the commit 3b01e1417).
  const bool ready = is_ready(endpoint, target);
  if (n.refuse_all || endpoint.num_outstanding >= kQueue || one_in(domain, 8) ||
      (!ready && (!domain.keeps_early_writes || endpoint.before_handshake.size() >= kMaxEarly)))
    return refuse(endpoint);
  endpoint.cut = false;
  ++endpoint.num_outstanding;
  const uint32_t delay = one_in(domain, 16) ? domain.random() % 64 : domain.random() % 4;
  const Operation op{&endpoint,
                     &local,
                     static_cast<std::byte*>(message->msg_iov->iov_base),
                     message->msg_iov->iov_len,
                     *message->rma_iov,
                     target,
                     message->data,
                     (flags & kRemoteCqData) != 0,
                     message->context,
                     delay,
                     (flags & kMore) != 0,
                     is_read};
  // A read begins and ends a chain of its own, also inside another (efa_rdm_pke.c:
  // efa_rdm_pke_read of 1.22).
  if (is_read && (op.more || !endpoint.unrung.empty())) ++n.counts.left_open;
  if (op.more) ++n.counts.chained;
  if (!endpoint.unrung.empty() && endpoint.unrung.back().target != target) ++n.counts.across_peers;
  if (ready)
    give_to_nic(endpoint, op);
  else
    endpoint.before_handshake.push_back(op);
  return 0;
}

}  // namespace

ssize_t readmsg(Endpoint* endpoint, const RmaMessage* message, uint64_t flags) {
  return post(endpoint, message, flags, /*is_read=*/true);
}
ssize_t writemsg(Endpoint* endpoint, const RmaMessage* message, uint64_t flags) {
  return post(endpoint, message, flags, /*is_read=*/false);
}

ssize_t cq_read(CompletionQueue* object, void* out, size_t count) {
  auto& cq = *static_cast<FakeCq*>(object);
  const Call call(*cq.domain);
  if (cq.broken) return -EIO;
  if (!cq.endpoint->unrung.empty() && !cq.endpoint->cut) ++network().counts.left_open;
  for (auto& [peer, polls] : cq.endpoint->handshakes)
    if (!is_silent(peer)) polls -= polls > 0 ? 1 : 0;
  std::erase_if(cq.endpoint->before_handshake, [&](const Operation& op) {
    if (cq.endpoint->handshakes[op.target] > 0) return false;
    give_to_nic(*cq.endpoint, op);
    return true;
  });
  advance(*cq.domain);
  if (!cq.errors.empty()) return -kErrorAvailable;
  if (cq.entries.empty()) return -EAGAIN;
  std::ranges::shuffle(cq.entries, cq.domain->random);
  const size_t shown = std::min(count, cq.entries.size());
  std::copy_n(cq.entries.end() - static_cast<std::ptrdiff_t>(shown), shown,
              static_cast<CqEntry*>(out));
  cq.entries.resize(cq.entries.size() - shown);
  return static_cast<ssize_t>(shown);
}

ssize_t cq_readerr(CompletionQueue* object, CqError* error, uint64_t) {
  auto& cq = *static_cast<FakeCq*>(object);
  const Call call(*cq.domain);
  if (cq.broken) return -EIO;
  if (cq.errors.empty()) return -EAGAIN;
  *error = cq.errors.back();
  cq.errors.pop_back();
  return 1;
}

}  // namespace moe_p2p::test::fabric_world
